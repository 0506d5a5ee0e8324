"""The listener of a process, shared by all groups, and its connections, made on first use.

A connection belongs to a (group, kind, peer). Collectives and point-to-point messages are separate
kinds, so that no group and no late receiver blocks another; a kind with a number at its end is a
further connection of that kind. Either side may connect. If both connect at once, the connection of
the higher rank is used, and the other one is refused with "busy".
"""

from __future__ import annotations

import copy
import json
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from unicoll.backend.contract import Job
from unicoll.errors import (
    AuthenticationError,
    DistError,
    DistNetworkError,
    GroupAbortedError,
    OperationTimeoutError,
    RankLostError,
)
from unicoll.net.objects.received_json import from_store
from unicoll.net.wire import channel, handshake
from unicoll.net.wire.authenticated_server import Client
from unicoll.net.wire.channel import Connection
from unicoll.net.wire.framed_server import FrameServer, frame, handshake_address, read_exactly
from unicoll.net.wire.interfaces import FIREWALL_HINT, in_zone_of, raise_descriptor_limit
from unicoll.net.wire.links import Address, endpoints, first_link, links, with_interfaces
from unicoll.process import environment
from unicoll.process.fork_safety import guard
from unicoll.process.interrupts import Changes
from unicoll.process.timeouts import backoff

MESSAGES = "m"
"""The kind of the connections for point-to-point messages."""

Key = tuple[str, str, int]
"""Group name, kind, and the peer's global rank."""

_ACCEPTED, _BUSY, _CLOSED = b"A", b"B", b"C"
_TICK_S = 0.1
_DEPARTURE_S = 1.5
"""Seconds to wait for the notice of a peer's end; the relay may have ended, too, and is then
replaced first."""
_HANDSHAKE_S, _ATTEMPTS = 1.5, 20
"""Seconds for a handshake after the peer's first bytes, and the number of attempts."""
_PER_RANK, _SPARE = 2, 256
"""Descriptors reserved: for the connections to each rank, and for all other files of the
program."""


class _Addresses(NamedTuple):
    """What a rank publishes: where it listens, and how many connections it wants to each peer."""

    addresses: list[Address]
    connections: int

    @classmethod
    def parse(cls, published: bytes) -> _Addresses:
        kind = {"addresses": [(str, int, str, str)], "connections": int}
        found = from_store("addresses of a rank", published, kind)
        return cls([Address(*address) for address in found["addresses"]], found["connections"])


class _SlowError(DistNetworkError):
    """A peer did not finish a handshake in time."""


class _Listener(FrameServer):
    """Authenticates a connection, reads its group, kind and rank, and passes the socket on."""

    minimum_protection = "plain"

    def __init__(self, job: Job, admit: Callable[[Key], bytes], deliver: Any) -> None:
        super().__init__(job.addresses, job.key, b"data", "unicoll-listener", job.rank)
        self._admit = admit
        self._deliver = deliver
        self.start()

    def handle(self, client: Client, message: dict[str, Any]) -> None:
        key = (str(message["group"]), str(message["kind"]), int(message["rank"]))
        if key[2] != client.rank:
            raise ValueError(f"rank {client.rank} claims to be rank {key[2]}")
        reply = self._admit(key)
        sock = self.detach(client)
        # The answer is the first byte on the connection, so it is sent before another thread can
        # use that. An error means that the peer has closed the connection. It is delivered all the
        # same: otherwise its key would stay among those that arrive. The thread that uses it gets
        # the error.
        with suppress(OSError):
            sock.sendall(reply)
        if reply == _ACCEPTED:
            self._deliver(key, sock)
        else:
            sock.close()


class Endpoint:
    """The listener of this process and its table of connections."""

    def __init__(self, job: Job) -> None:
        raise_descriptor_limit(_PER_RANK * job.size + _SPARE)
        self._job = job
        # This is no Condition: an interrupt could leave the lock of one held, and all later
        # connections of the process would wait for it.
        self._changed = Changes()
        self._open: dict[Key, Connection] = {}
        self._directory: dict[int, _Addresses] = {}
        wanted = environment.number("UNICOLL_SOCKET_CONNECTIONS")
        self._dialing: set[Key] = set()
        # Connections of these keys are accepted, and not in the table yet.
        self._arriving: set[Key] = set()
        self._closed_groups: set[str] = set()
        # Attempts to connect to these addresses got no answer.
        self._unanswered: dict[Key, Address] = {}
        self._message_engines: dict[str, Callable[[int, Connection], None]] = {}
        # It listens before its addresses are published, so a rank that reads them can connect.
        self._listener = _Listener(job, self._admit, self._deliver)
        try:
            self._own = _Addresses(with_interfaces(self._listener.addresses), wanted)
            job.store.set(f"endpoint/{job.rank}", json.dumps(self._own._asdict()))
        except BaseException:
            self._listener.close()
            raise

    @classmethod
    def of(cls, job: Job) -> Endpoint:
        """The endpoint of this process in a job of several, made on first use and closed with the
        job."""
        endpoint: Endpoint = job.shared("endpoint", lambda: cls(job))
        return endpoint

    def close(self) -> None:
        """Stop listening and close the connections in the table."""
        self._listener.close()
        with self._changed.lock:
            sockets = list(self._open.values())
            self._open.clear()
        for sock in sockets:
            sock.close()

    def close_group(self, group: str) -> None:
        """Close a group's connections and refuse new ones for it."""
        with self._changed.lock:
            # The name stays there: a peer that connects later is told that this rank has closed the
            # group.
            self._closed_groups.add(group)
            mine = [k for k in self._open if k[0] == group]
            sockets = [self._open.pop(k) for k in mine]
            for key in [k for k in self._unanswered if k[0] == group]:
                del self._unanswered[key]
            self._message_engines.pop(group, None)
            self._changed.notify_all()
        for sock in sockets:
            sock.close()

    def listen(self, group: str, arrived: Callable[[int, Connection], None]) -> None:
        """Call ``arrived(peer's global rank, socket)`` for every connection of a group's messages,
        whoever made it."""
        with self._changed.lock:
            self._message_engines[group] = arrived
            # A connection may have come before this rank has made the group.
            present = [(k[2], s) for k, s in self._open.items() if k[:2] == (group, MESSAGES)]
        # The lock is released first: `arrived` takes the lock of a message engine, and a thread
        # that holds that one calls forget(), which takes this one.
        for peer, sock in present:
            arrived(peer, sock)

    def forget(self, key: Key) -> None:
        """Close a connection and remove it from the table; the next use makes a new one."""
        with self._changed.lock:
            sock = self._open.pop(key, None)
        if sock is not None:
            sock.close()

    def connect(
        self, key: Key, check: Callable[[], None], postpone: Callable[[], None] = lambda: None
    ) -> Connection:
        """The connection for ``key``, made if it does not exist.

        Args:
            check: called every 0.1 s while waiting; raises to stop the wait (deadline, failure).
            postpone: called with ``check`` while another thread connects, or the peer does not know
                what the connection is for; raises to stop the wait. Later the peer may already send
                on the connection, and would lose what it has sent.

        Raises:
            RankLostError: the peer has ended or left.
            AuthenticationError: another process answers at the peer's address.
        """
        while True:
            with self._changed.lock:
                if key in self._open:
                    return self._open[key]
                # Only one thread dials. When the first of two ended, it would remove the key while
                # the second still dials. The peer's connection would then be accepted, too, and
                # each rank could close the one that the other uses.
                dial = key not in self._arriving and key not in self._dialing
                if dial:
                    self._dialing.add(key)
            try:
                if dial:
                    try:
                        sock = self._dial(key, check, postpone)
                        # The key is in the table before it is removed from those that are dialed:
                        # _admit() would accept the peer's connection in between.
                        if sock is not None:
                            self._deliver(key, sock)
                    finally:
                        with self._changed.lock:
                            self._dialing.discard(key)
                found = self._await_connection(key, check)
                if found is None and not dial:
                    postpone()
            except OperationTimeoutError as error:
                raise self._with_address(error, key) from None
            if found is not None:
                return found
            # The peer may have refused this connection because it had not yet noticed the end of an
            # earlier one, so this rank tries again.

    # --- accepting --------------------------------------------------------------------------------

    def _admit(self, key: Key) -> bytes:
        with self._changed.lock:
            if key[0] in self._closed_groups:
                return _CLOSED
            # If both ranks connect at once, the lower rank accepts and the higher one refuses, so
            # both use the same connection.
            if key in self._open or (key in self._dialing and self._job.rank > key[2]):
                return _BUSY
            self._arriving.add(key)
            return _ACCEPTED

    def _deliver(self, key: Key, sock: Connection) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed.lock:
            self._arriving.discard(key)
            if key not in self._open and key[0] not in self._closed_groups:
                self._open[key] = sock
                self._unanswered.pop(key, None)
                self._changed.notify_all()
                arrived = self._message_engines.get(key[0]) if key[1] == MESSAGES else None
            else:
                sock.close()
                return
        # The lock is released first, as in listen().
        if arrived is not None:
            arrived(key[2], sock)

    def _await_connection(self, key: Key, check: Callable[[], None]) -> Connection | None:
        """The connection that either side is making, after waiting a tick at most; None if it is
        not there yet."""
        found = self._changed.wait_for(lambda: self._open.get(key), _TICK_S)
        if found is not None:
            return found
        if key[0] in self._closed_groups:
            raise GroupAbortedError(f"group {key[0]!r} was closed while connecting", group=key[0])
        check()
        self._check_alive(key[2])
        return None

    # --- connecting -------------------------------------------------------------------------------

    def _dial(
        self, key: Key, check: Callable[[], None], postpone: Callable[[], None]
    ) -> Connection | None:
        """Connect to the peer; None if the peer's own connection is used instead.

        If the peer stops answering within the handshake (a stopped process, for example), the
        attempt is repeated.
        """
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._try_connect(key, check, postpone)
            except _SlowError:
                check()
        return self._try_connect(key, check, postpone)

    def _try_connect(
        self, key: Key, check: Callable[[], None], postpone: Callable[[], None]
    ) -> Connection | None:
        group, kind, peer = key

        def check_all() -> None:
            check()
            postpone()

        address = self._address(peer, group, int(kind[1:] or 0), check)
        host, port = address[:2]
        while True:
            if self._peer_connected(key):
                return None
            check_all()
            self._check_alive(peer)
            try:
                sock = guard(socket.create_connection((host, port), 1.0))
                break
            except TimeoutError:
                # The lock is taken because another thread may read the table for a report.
                with self._changed.lock:
                    self._unanswered[key] = address
            except OSError as e:
                self._connect_failed(key, address, e)
                return None
        # This is the deadline of the handshake; None before it and after it.
        deadline: float | None = None
        try:
            # The kernel accepts a connection for a stopped process, too, which then sends nothing.
            # So the time of the handshake begins with the peer's first bytes.
            self._await_readable(sock, peer, check_all)
            deadline = time.monotonic() + _HANDSHAKE_S
            connection, _ = channel.authenticate(
                sock,
                self._job.key,
                b"data",
                deadline,
                rank=self._job.rank,
                server=peer,
                address=handshake_address(host, port),
                minimum="plain",
            )
            connection.settimeout(None)
            connection.sendall(frame({"group": group, "kind": kind, "rank": self._job.rank}))
            deadline = None
            # From here on the peer may use the connection. It would lose what it has sent if the
            # attempt was postponed now, so only `check` ends the wait.
            self._await_readable(sock, peer, check)
            answer = read_exactly(connection, 1)
        except (OSError, EOFError, DistNetworkError) as e:
            sock.close()
            if deadline is None and isinstance(e, DistError):
                # The call's check has raised it, or the wait because the peer has ended.
                raise
            if (
                deadline is not None
                and time.monotonic() >= deadline
                and not isinstance(e, EOFError)
            ):
                raise _SlowError(f"rank {peer} stopped answering within the handshake") from e
            if isinstance(e, AuthenticationError) and not isinstance(e, handshake.NoAnswerError):
                raise
            self._connect_failed(key, address, e)
            return None
        except BaseException:
            sock.close()
            raise
        if answer == _ACCEPTED:
            return connection
        sock.close()
        # A peer that has connected, and has then closed the group, is still heard: what it sent on
        # its connection can be read.
        if answer == _CLOSED and not self._peer_connected(key):
            reason = (
                self._departure(peer, check) or f"{self._who(peer)} has closed the group {group!r}"
            )
            raise RankLostError(reason, group=group, rank=peer)
        return None

    def _address(self, peer: int, group: str, lane: int, check: Callable[[], None]) -> Address:
        """The peer's address for one of the connections to it."""
        found = self._links(peer, check)
        return found[(first_link(group, self._job.rank, peer) + lane) % len(found)][1]

    def _links(self, peer: int, check: Callable[[], None]) -> list[tuple[Address, Address]]:
        """The links to a peer, as address of this rank and of the peer; both compute the same
        ones."""
        own, theirs = self._own.addresses, self._addresses(peer, check).addresses
        if self._job.rank < peer:
            found = links(own, theirs)
        else:
            found = [(mine, other) for other, mine in links(theirs, own)]
        return [
            (mine, other._replace(host=in_zone_of(mine.host, other.host))) for mine, other in found
        ]

    def connections_to(self, peer: int, check: Callable[[], None]) -> int:
        """How many connections a large message to or from a peer uses; both ranks compute the same
        number."""
        theirs = self._addresses(peer, check)
        return max(len(self._links(peer, check)), min(theirs.connections, self._own.connections))

    def describe(self, peer: int, sock: Connection) -> str:
        """A connection to a peer, for errors: addresses and interfaces of both ends."""
        theirs = self._directory.get(peer)
        return endpoints(
            sock, self._own.addresses, theirs.addresses if theirs else (), f"rank {peer}"
        )

    def unanswered(self, group: str) -> list[str]:
        """The addresses to which this rank cannot make the connections of a group, because they do
        not answer."""
        with self._changed.lock:
            found = {
                (key[2], address) for key, address in self._unanswered.items() if key[0] == group
            }
        lines = [f"no answer from rank {peer} at {address}" for peer, address in sorted(found)]
        return [*lines[:-1], f"{lines[-1]} (behind a firewall: {FIREWALL_HINT})"] if lines else []

    def _await_readable(self, sock: socket.socket, peer: int, check: Callable[[], None]) -> None:
        """Wait until the socket is readable."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while not poll.poll(_TICK_S * 1000):
            check()
            self._check_alive(peer)

    def read_directory(self) -> None:
        """Read the addresses of all ranks in one request, if all are published by now."""
        keys = [f"endpoint/{rank}" for rank in range(self._job.size)]
        # The store's multi_get() waits until all ranks have published, and a rank that creates a
        # group does not wait for others.
        if not self._directory and self._job.store.check(keys):
            found = self._job.store.multi_get(keys)
            self._directory = {rank: _Addresses.parse(value) for rank, value in enumerate(found)}

    def _addresses(self, peer: int, check: Callable[[], None]) -> _Addresses:
        found = self._directory.get(peer)
        if found is not None:
            return found
        pauses = backoff(0.001, 0.05)
        while (value := self._job.store.try_get(f"endpoint/{peer}")) is None:
            check()
            self._check_alive(peer)
            time.sleep(next(pauses))
        found = self._directory[peer] = _Addresses.parse(value)
        return found

    def _peer_connected(self, key: Key) -> bool:
        """True if the peer has connected meanwhile (it may have ended again; its data can still be
        read)."""
        with self._changed.lock:
            return key in self._open or key in self._arriving

    def _connect_failed(self, key: Key, address: Address, error: Exception) -> None:
        """Raise the error for a failed attempt, unless the peer has connected meanwhile."""
        peer = key[2]
        if self._peer_connected(key):
            return
        reason = self._departure(peer, lambda: None)
        if reason is not None:
            raise RankLostError(reason, rank=peer) from error
        raise DistNetworkError(
            f"{self._who(peer)} cannot be reached at {address}: {error} (behind a firewall:"
            f" {FIREWALL_HINT})",
            rank=peer,
        ) from error

    def _with_address(self, error: OperationTimeoutError, key: Key) -> OperationTimeoutError:
        """The error of a message whose connection was not made in time; those of collectives have
        all ranks' links."""
        address = self._unanswered.get(key)
        if address is None or error.seq is not None:
            return error
        # The error may be the group's, which other calls raise, too. So the address is added to a
        # copy.
        named = copy.copy(error)
        named.args = (
            (
                f"{error}; no answer from rank {key[2]} at {address} (behind a firewall:"
                f" {FIREWALL_HINT})"
            ),
        )
        return named

    def _departure(self, peer: int, check: Callable[[], None]) -> str | None:
        """How a peer has ended, waiting a moment for the notification; None if it is still alive.

        ``check`` is called meanwhile: a peer also closes a group that has failed.
        """
        control, reason = self._job.control, None
        deadline = time.monotonic() + _DEPARTURE_S
        while control is not None and reason is None and time.monotonic() < deadline:
            check()
            reason = control.await_departure(peer, _TICK_S)
        return reason

    def _check_alive(self, peer: int) -> None:
        control = self._job.control
        reason = control.departed.get(peer) if control is not None else None
        if reason is not None:
            raise RankLostError(reason, rank=peer)

    def _who(self, peer: int) -> str:
        control = self._job.control
        return control.describe(peer) if control is not None else f"rank {peer}"
