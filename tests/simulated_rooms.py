"""Where the ranks of a simulated communicator meet: who comes, what matches, and who waits for ever.

A room lies in the process of a communicator's rank 0. Each rank has one channel to it and says when a kernel of its
begins to run. The room matches the n-th collectives of all ranks, and sends with receives in the order of each pair of
ranks; what has found its match is answered. A collective that does not match those of the other ranks is never
answered, as with NCCL, where such ranks hang; the room tells every rank so that a test can see it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from simulated_network import Address, Channel
from simulated_reduce import Given, Signature, results

__all__ = ["Lobby"]

Collectives = tuple[Signature, ...]


class _Room:
    """One communicator's ranks; all on the network's thread."""

    def __init__(self, key: str, close: Callable[[], None]) -> None:
        self._key = key
        self._close = close
        self._size = 0
        self._members: dict[int, tuple[Channel, Address]] = {}
        self._rounds: dict[int, dict[int, tuple[int, Collectives, list[Given]]]] = defaultdict(dict)
        self._done: dict[int, int] = defaultdict(int)
        self._sends: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self._receives: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self._splits: dict[int, dict[int, tuple[Any, int]]] = defaultdict(dict)
        self._barriers: dict[int, set[int]] = defaultdict(set)
        self._departing: set[int] = set()
        self._stuck = False

    def join(self, channel: Channel, size: int, rank: int, address: Address) -> str | None:
        """One more rank; what is wrong with it."""
        self._size = self._size or size
        if size != self._size or rank in self._members:
            return f"rank {rank} of {size} does not fit communicator {self._key} of {self._size}"
        self._members[rank] = (channel, address)
        if len(self._members) == self._size:
            addresses = [self._members[r][1] for r in range(self._size)]
            self._tell_all(("ready", addresses))
        return None

    def depart(self, rank: int) -> None:
        """A rank says that it goes."""
        self._departing.add(rank)

    def leave(self, rank: int) -> None:
        """A rank has gone; the others hear of it unless it said so first."""
        self._members.pop(rank, None)
        if rank not in self._departing:
            self._tell_all(("gone", rank))
        if not self._members:
            self._close()

    def _tell_all(self, message: Any) -> None:
        for channel, _ in list(self._members.values()):
            channel.send(message)

    def _tell(self, rank: int, message: Any) -> None:
        if rank in self._members:
            self._members[rank][0].send(message)

    def kernel(
        self, rank: int, number: int, signatures: Collectives, given: list[Given], messages: list[Any]
    ) -> None:
        """A rank's kernel has begun to run: its collectives, and its sends and receives."""
        if signatures:
            position = self._done[rank]
            self._done[rank] += 1
            self._rounds[position][rank] = (number, signatures, given)
            self._match_collectives(position)
        for i, (kind, peer, nbytes, data) in enumerate(messages):
            pair = (rank, peer) if kind == "send" else (peer, rank)
            queue = self._sends if kind == "send" else self._receives
            queue[pair].append((number, i, nbytes, data))
            self._match_messages(pair)

    def _match_collectives(self, position: int) -> None:
        came = self._rounds[position]
        different = {signatures for _, signatures, _ in came.values()}
        if len(different) > 1:
            if not self._stuck:
                self._stuck = True
                said = "; ".join(
                    f"rank {r}: {', '.join(map(str, s))}" for r, (_, s, _) in sorted(came.items())
                )
                self._tell_all(("mismatch", f"collective {position} of communicator {self._key}: {said}"))
            return
        if len(came) < self._size or self._stuck:
            return
        del self._rounds[position]
        (signatures,) = different
        parts = [results(s, [came[r][2][i] for r in range(self._size)]) for i, s in enumerate(signatures)]
        for rank in range(self._size):
            self._tell(rank, ("collectives", came[rank][0], [part[rank] for part in parts]))

    def _match_messages(self, pair: tuple[int, int]) -> None:
        sends, receives = self._sends[pair], self._receives[pair]
        while sends and receives:
            number, i, nbytes, data = sends.popleft()
            their_number, j, expected, _ = receives.popleft()
            if nbytes != expected:
                text = f"a send of {nbytes} bytes from rank {pair[0]} met a receive of {expected} on rank {pair[1]}"
                self._tell_all(("mismatch", f"communicator {self._key}: {text}"))
                continue
            self._tell(pair[0], ("message", number, i, None))
            self._tell(pair[1], ("message", their_number, j, data))

    def barrier(self, rank: int, turn: int) -> None:
        """A rank's part in a barrier of the host's side."""
        came = self._barriers[turn]
        came.add(rank)
        if len(came) == self._size:
            del self._barriers[turn]
            self._tell_all(("barrier", turn))

    def put(self, rank: int, peer: int, window: int, offset: int, data: bytes) -> None:
        """Data for a rank's window, if there is any, and a signal behind it."""
        self._tell(peer, ("put", rank, window, offset, data))

    def split(self, rank: int, turn: int, color: int | None, key: int) -> None:
        """A rank's part in splitting the communicator; when all have come, each learns its new group."""
        came = self._splits[turn]
        came[rank] = (color, key)
        if len(came) < self._size:
            return
        for mine, (color, _) in came.items():
            group = sorted((k, r) for r, (c, k) in came.items() if c == color)
            self._tell(mine, ("split", turn, f"{self._key}/{turn}.{color}", [r for _, r in group]))


class Lobby:
    """All rooms of a process, and the way into them."""

    def __init__(self) -> None:
        self._rooms: dict[str, _Room] = {}

    def _close(self, key: str) -> None:
        del self._rooms[key]

    def welcome(self, channel: Channel) -> Callable[[Any], None]:
        """What to do with the messages of a channel that has come in."""
        place: list[tuple[_Room, int]] = []

        def hear(message: Any) -> None:
            if message is None:
                for room, rank in place:
                    room.leave(rank)
            elif message[0] == "join":
                _, key, size, rank, address = message
                if key not in self._rooms:
                    self._rooms[key] = _Room(key, partial(self._close, key))
                room = self._rooms[key]
                wrong = room.join(channel, size, rank, address)
                if wrong is None:
                    place.append((room, rank))
                else:
                    channel.send(("refused", wrong))
            elif place:
                room, rank = place[0]
                getattr(room, message[0])(rank, *message[1:])

        return hear
