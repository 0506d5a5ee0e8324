"""Where the other processes reach this one: one listener for all groups, connections made on first use.

A connection belongs to a (group, kind, peer): one kind for collectives, one for point-to-point, so that no
group and no late receiver can hold up another. Either side may dial. When both do at once the higher rank's call
wins, and the other side's is answered "busy: wait for mine".
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from unicoll import auth, channel
from unicoll.backend import Job
from unicoll.channel import Connection
from unicoll.errors import AuthenticationError, DistNetworkError, GroupAbortedError, RankLostError
from unicoll.forks import guard
from unicoll.frames import Client, FrameServer, frame, published, read_exactly
from unicoll.net import raise_descriptor_limit

__all__ = ["COLLECTIVE", "MESSAGES", "Endpoint", "Key"]

COLLECTIVE = "c"
MESSAGES = "m"

Key = tuple[str, str, int]
"""Group name, kind, and the peer's global rank."""

_ACCEPTED, _BUSY, _CLOSED = b"A", b"B", b"C"
_TICK_S = 0.1
_HANDSHAKE_S, _CALLS = 1.5, 20
"""Seconds that a handshake may take once the peer has begun to answer, and how often it is called."""
_PER_RANK, _OTHERS = 2, 256
"""Descriptors that may be needed: connections to each rank, and whatever else the program has open."""
"""How long a peer that has spoken may take for the rest of the handshake."""


class _SlowError(DistNetworkError):
    """A peer did not go on with a handshake in time."""


class _Door(FrameServer):
    """The listener: authenticates, reads who calls for which group, and hands the socket over."""

    least_protection = "plain"

    def __init__(self, job: Job, admit: Callable[[Key], bytes], deliver: Any) -> None:
        super().__init__(job.addresses, job.key, b"data", "unicoll-listener", job.rank)
        self._admit = admit
        self._deliver = deliver
        self.start()

    def handle(self, client: Client, message: dict[str, Any]) -> None:
        key = (str(message["group"]), str(message["kind"]), int(message["rank"]))
        if key[2] != client.rank:
            raise ValueError(f"rank {client.rank} says that it is rank {key[2]}")
        verdict = self._admit(key)
        sock = self.detach(client)
        try:
            sock.sendall(verdict)
        except OSError:
            sock.close()
        if verdict == _ACCEPTED:
            self._deliver(key, sock)
        else:
            sock.close()


class Endpoint:
    """This process's listener and its table of connections."""

    def __init__(self, job: Job) -> None:
        raise_descriptor_limit(_PER_RANK * job.size + _OTHERS)
        self._job = job
        self._changed = threading.Condition()
        self._open: dict[Key, Connection] = {}
        self._directory: dict[int, list[tuple[str, int]]] = {}
        self._dialing: set[Key] = set()
        self._arriving: set[Key] = set()  # accepted, not yet in the table
        self._closed_groups: set[str] = set()
        self._listeners: dict[tuple[str, str], Callable[[int, Connection], None]] = {}
        self._door = _Door(job, self._admit, self._deliver)
        job.store.set(f"gloo/{job.rank}", json.dumps(self._door.addresses))

    def close(self) -> None:
        """Stop listening and close connections that no group has taken over."""
        self._door.close()
        with self._changed:
            sockets = list(self._open.values())
            self._open.clear()
        for sock in sockets:
            sock.close()

    def close_group(self, group: str) -> None:
        """Refuse further calls for a group that is over, and close its connections."""
        with self._changed:
            self._closed_groups.add(group)
            mine = [k for k in self._open if k[0] == group]
            sockets = [self._open.pop(k) for k in mine]
            for kind in (COLLECTIVE, MESSAGES):
                self._listeners.pop((group, kind), None)
            self._changed.notify_all()
        for sock in sockets:
            sock.close()

    def listen(self, group: str, kind: str, arrived: Callable[[int, Connection], None]) -> None:
        """Call ``arrived(peer's global rank, socket)`` for every connection of a kind, whoever made it."""
        with self._changed:
            self._listeners[(group, kind)] = arrived
            present = [(k[2], s) for k, s in self._open.items() if k[:2] == (group, kind)]
        for peer, sock in present:
            arrived(peer, sock)

    def forget(self, key: Key) -> None:
        """A connection is over: close it; the next use makes a new one."""
        with self._changed:
            sock = self._open.pop(key, None)
        if sock is not None:
            sock.close()

    def connect(self, key: Key, check: Callable[[], None]) -> Connection:
        """The connection for ``key``, made if there is none.

        Args:
            check: called ten times a second while waiting; raises to give up (deadline, failure).

        Raises:
            RankLostError: the peer is gone.
            AuthenticationError: something else answers at the peer's address.
        """
        with self._changed:
            if key in self._open:
                return self._open[key]
            dial = key not in self._arriving
            if dial:
                self._dialing.add(key)
        if dial:
            try:
                sock = self._dial(key, check)
                if sock is not None:
                    self._deliver(key, sock)
            finally:
                with self._changed:
                    self._dialing.discard(key)
        return self._await_call(key, check)

    # --- answering ------------------------------------------------------------------------------------------------

    def _admit(self, key: Key) -> bytes:
        with self._changed:
            if key[0] in self._closed_groups:
                return _CLOSED
            if key in self._open or (key in self._dialing and self._job.rank > key[2]):
                return _BUSY
            self._arriving.add(key)
            return _ACCEPTED

    def _deliver(self, key: Key, sock: Connection) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            self._arriving.discard(key)
            if key not in self._open and key[0] not in self._closed_groups:
                self._open[key] = sock
                self._changed.notify_all()
                arrived = self._listeners.get(key[:2])
            else:
                sock.close()
                return
        if arrived is not None:
            arrived(key[2], sock)

    def _await_call(self, key: Key, check: Callable[[], None]) -> Connection:
        """The connection that the peer is making, or that was just made."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: key in self._open, _TICK_S):
                    return self._open[key]
                if key[0] in self._closed_groups:
                    raise GroupAbortedError(f"group {key[0]!r} was closed while connecting", group=key[0])
            check()
            self._check_alive(key[2])

    # --- calling ---------------------------------------------------------------------------------------------------

    def _dial(self, key: Key, check: Callable[[], None]) -> Connection | None:
        """Call the peer; None if it answers that its own call is on the way.

        A peer that begins to answer and then falls silent (it is stopped, say) is called again.
        """
        for _ in range(_CALLS - 1):
            try:
                return self._call(key, check)
            except _SlowError:
                check()
        return self._call(key, check)

    def _call(self, key: Key, check: Callable[[], None]) -> Connection | None:
        group, kind, peer = key
        address = self._address(peer, group, check)
        host, port = address
        while True:
            if self._called(key):
                return None
            check()
            self._check_alive(peer)
            try:
                sock = guard(socket.create_connection((host, port), 1.0))
                break
            except TimeoutError:
                continue
            except OSError as e:
                self._refused(key, f"{host}:{port}", e)
                return None
        deadline = float("inf")
        try:
            self._await_word(sock, peer, check)  # a stopped process accepts, and says nothing
            deadline = time.monotonic() + _HANDSHAKE_S
            link, _ = channel.authenticate(
                sock,
                self._job.key,
                b"data",
                deadline,
                rank=self._job.rank,
                server=peer,
                address=published(host, port),
                least="plain",
            )
            link.settimeout(None)
            link.sendall(frame({"group": group, "kind": kind, "rank": self._job.rank}))
            deadline = float("inf")
            self._await_word(sock, peer, check)
            answer = read_exactly(link, 1)
        except (OSError, EOFError, DistNetworkError) as e:
            sock.close()
            if time.monotonic() >= deadline and not isinstance(e, EOFError):
                raise _SlowError(f"rank {peer} fell silent within the handshake") from e
            if isinstance(e, AuthenticationError) and not isinstance(e, auth.NoAnswerError):
                raise
            self._refused(key, f"{host}:{port}", e)
            return None
        except BaseException:
            sock.close()
            raise
        if answer == _ACCEPTED:
            return link
        sock.close()
        if answer == _CLOSED and not self._called(key):
            why = self._departure(peer) or f"{self._who(peer)} has closed the group {group!r}"
            raise RankLostError(why, group=group, rank=peer)
        return None

    def _address(self, peer: int, group: str, check: Callable[[], None]) -> tuple[str, int]:
        addresses = self._directory.get(peer) or self._look_up(peer, check)
        # several interfaces: groups take turns, and every pair of ranks agrees on whose turn it is
        turn = sum(group.encode()) + peer + self._job.rank
        host, port = addresses[turn % len(addresses)]
        return host, port

    def _await_word(self, sock: socket.socket, peer: int, check: Callable[[], None]) -> None:
        """Wait until there is something to read."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while not poll.poll(_TICK_S * 1000):
            check()
            self._check_alive(peer)

    def read_directory(self) -> None:
        """Learn where everybody listens, in one question, if all have said so by now."""
        keys = [f"gloo/{rank}" for rank in range(self._job.size)]
        if not self._directory and self._job.store.check(keys):
            found = self._job.store.multi_get(keys)
            self._directory = {rank: json.loads(value) for rank, value in enumerate(found)}

    def _look_up(self, peer: int, check: Callable[[], None]) -> list[tuple[str, int]]:
        pause = 0.001
        while (found := self._job.store.try_get(f"gloo/{peer}")) is None:
            check()
            self._check_alive(peer)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        addresses: list[tuple[str, int]] = json.loads(found)
        self._directory[peer] = addresses
        return addresses

    def _called(self, key: Key) -> bool:
        """Whether the peer has called meanwhile (and may be gone again: what it sent is still to be had)."""
        with self._changed:
            return key in self._open or key in self._arriving

    def _refused(self, key: Key, address: str, error: Exception) -> None:
        """A call failed: raises the reason, unless the peer has called meanwhile."""
        peer = key[2]
        if self._called(key):
            return
        why = self._departure(peer)
        if why is not None:
            raise RankLostError(why, rank=peer) from error
        raise DistNetworkError(
            f"{self._who(peer)} cannot be reached at {address}: {error}", rank=peer
        ) from error

    def _departure(self, peer: int) -> str | None:
        """How a peer has ended, waiting a moment for the news; None if it seems to be there."""
        control = self._job.control
        return control.await_departure(peer) if control is not None else None

    def _check_alive(self, peer: int) -> None:
        control = self._job.control
        why = control.departed.get(peer) if control is not None else None
        if why is not None:
            raise RankLostError(why, rank=peer)

    def _who(self, peer: int) -> str:
        control = self._job.control
        return control.who(peer) if control is not None else f"rank {peer}"
