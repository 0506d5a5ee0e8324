"""Rendezvous of the ranks of simulated communicators: connecting, and matching of their operations.

The rendezvous of a communicator is in the process of its rank 0. Each rank has one channel to it and sends a message
when one of its kernels begins to run. The rendezvous matches the n-th collectives of all ranks, and sends with receives
in the order of each pair of ranks, and replies to the ranks whose operations match. A collective that does not match
those of the other ranks gets no reply, as in NCCL, where such ranks hang; the rendezvous reports the mismatch to every
rank so that a test can check it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tests.simulated_nccl.network import Address, Channel
from tests.simulated_nccl.reductions import Contribution, Signature, results

__all__ = ["RendezvousServer"]

Collectives = tuple[Signature, ...]
Capability = tuple[int, int]


class _Rendezvous:
    """The rendezvous of one communicator."""

    def __init__(self, key: str, close: Callable[[], None]) -> None:
        self._key = key
        self._close = close
        self._size = 0
        self._members: dict[int, tuple[Channel, Address, Capability]] = {}
        self._rounds: dict[int, dict[int, tuple[int, Collectives, list[Contribution]]]] = defaultdict(dict)
        self._collectives: dict[int, int] = defaultdict(int)
        self._sends: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self._receives: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self._gatherings: dict[Any, dict[int, Any]] = defaultdict(dict)
        self._departing: set[int] = set()
        self._stuck = False

    def join(
        self, channel: Channel, size: int, rank: int, address: Address, capability: Capability
    ) -> str | None:
        """Add a rank; the reason if it is refused, else None."""
        self._size = self._size or size
        if size != self._size or rank in self._members:
            return f"rank {rank} of {size} does not fit communicator {self._key} of {self._size}"
        self._members[rank] = (channel, address, capability)
        if len(self._members) == self._size:
            addresses = [self._members[r][1] for r in range(self._size)]
            least = min(capability for _, _, capability in self._members.values())
            self._send_all(("ready", addresses, least))
        return None

    def depart(self, rank: int) -> None:
        """A rank announces that it leaves."""
        self._departing.add(rank)

    def leave(self, rank: int) -> None:
        """A rank's channel is closed; the others are notified unless it announced that."""
        self._members.pop(rank, None)
        if rank not in self._departing:
            self._send_all(("gone", rank))
        if not self._members:
            self._close()

    def _send_all(self, message: Any) -> None:
        for channel, _, _ in list(self._members.values()):
            channel.send(message)

    def _send(self, rank: int, message: Any) -> None:
        if rank in self._members:
            self._members[rank][0].send(message)

    def kernel(
        self, rank: int, number: int, signatures: Collectives, given: list[Contribution], messages: list[Any]
    ) -> None:
        """A kernel of a rank has begun to run, with its collectives, sends and receives."""
        if signatures:
            position = self._collectives[rank]
            self._collectives[rank] += 1
            self._rounds[position][rank] = (number, signatures, given)
            self._match_collectives(position)
        for i, (kind, peer, nbytes, data) in enumerate(messages):
            pair = (rank, peer) if kind == "send" else (peer, rank)
            queue = self._sends if kind == "send" else self._receives
            queue[pair].append((number, i, nbytes, data))
            self._match_messages(pair)

    def _match_collectives(self, position: int) -> None:
        arrived = self._rounds[position]
        different = {signatures for _, signatures, _ in arrived.values()}
        if len(different) > 1:
            if not self._stuck:
                self._stuck = True
                calls = "; ".join(
                    f"rank {r}: {', '.join(map(str, s))}" for r, (_, s, _) in sorted(arrived.items())
                )
                self._send_all(("mismatch", f"collective {position} of communicator {self._key}: {calls}"))
            return
        if len(arrived) < self._size or self._stuck:
            return
        del self._rounds[position]
        (signatures,) = different
        parts = [results(s, [arrived[r][2][i] for r in range(self._size)]) for i, s in enumerate(signatures)]
        for rank in range(self._size):
            self._send(rank, ("collectives", arrived[rank][0], [part[rank] for part in parts]))

    def _match_messages(self, pair: tuple[int, int]) -> None:
        sends, receives = self._sends[pair], self._receives[pair]
        while sends and receives:
            number, i, nbytes, data = sends.popleft()
            peer_number, j, expected, _ = receives.popleft()
            if nbytes != expected:
                text = f"a send of {nbytes} bytes from rank {pair[0]} matches a receive of {expected} on rank {pair[1]}"
                self._send_all(("mismatch", f"communicator {self._key}: {text}"))
                continue
            self._send(pair[0], ("message", number, i, None))
            self._send(pair[1], ("message", peer_number, j, data))

    def gather(self, rank: int, key: Any, members: Sequence[int], value: Any) -> None:
        """A rank's part in a gathering; once all members have come, each gets the values by rank."""
        arrived = self._gatherings[key]
        arrived[rank] = value
        members = members or range(self._size)
        if all(member in arrived for member in members):
            del self._gatherings[key]
            for member in members:
                self._send(member, ("gathered", key, arrived))

    def put(self, rank: int, peer: int, window: int, offset: int, data: bytes) -> None:
        """Data for a peer's window, if there is any, followed by a signal."""
        self._send(peer, ("put", rank, window, offset, data))


class RendezvousServer:
    """The rendezvous of all communicators whose rank 0 is in this process."""

    def __init__(self) -> None:
        self._by_key: dict[str, _Rendezvous] = {}

    def _close(self, key: str) -> None:
        del self._by_key[key]

    def accept(self, channel: Channel) -> Callable[[Any], None]:
        """The handler for the messages of a channel that another process has opened."""
        joined: list[tuple[_Rendezvous, int]] = []

        def handle(message: Any) -> None:
            if message is None:
                for rendezvous, rank in joined:
                    rendezvous.leave(rank)
            elif message[0] == "join":
                _, key, size, rank, address, capability = message
                if key not in self._by_key:
                    self._by_key[key] = _Rendezvous(key, partial(self._close, key))
                rendezvous = self._by_key[key]
                reason = rendezvous.join(channel, size, rank, address, capability)
                if reason is None:
                    joined.append((rendezvous, rank))
                else:
                    channel.send(("refused", reason))
            elif joined:
                rendezvous, rank = joined[0]
                getattr(rendezvous, message[0])(rank, *message[1:])

        return handle
