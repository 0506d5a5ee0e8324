"""A group's connections for collectives: send and receive with a deadline, and fail on all ranks."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from gloo_fallback.transport.exchange import HEADER_SIZE, MAGIC, Connections, read_header
from gloo_fallback.transport.striping import STRIPED, STRIPED_COMPRESSED, Stripe, advance, stripes, transfer
from unicoll.backend import Call, Context, operation_errors
from unicoll.backend.call import EndedCall
from unicoll.backend.endpoint import Endpoint
from unicoll.errors import DistError, DistNetworkError, RankLostError
from unicoll.net.channel import Channel, Connection
from unicoll.net.links import given_up, unacknowledged
from unicoll.net.records import TamperedError

_COLLECTIVE = "c"
"""The first character of the kind of these connections, as opposed to ``MESSAGES``."""
_TICK_S = 0.1
_TICK_TIMEVAL = struct.pack("@ll", 0, int(_TICK_S * 1e6))
_SYSCALL_BYTES = 1 << 18
"""Maximum bytes per system call; small enough that sends and receives alternate."""

_SHOWN = 8
"""Maximum number of connections that the report of a rank names."""
_DONTWAIT = socket.MSG_DONTWAIT
_NOTHING = memoryview(b"")


class GroupConnections(Connections):
    """The connections of one rank of a group to the other ranks.

    Args:
        context: the group.
        endpoint: this process's listener.
        spins: polls of a socket before sleeping on it; 0 if ranks outnumber cores.

    Attributes:
        error: the error that ended the group, or None.
        call: the operation in progress.
        last: the previous one.
        deadline: of the operation, on the clock of time.monotonic; 0 until the operation first waits.
        wake: wakes the thread that sleeps in shared memory.
    """

    def __init__(self, context: Context, endpoint: Endpoint, spins: int) -> None:
        super().__init__()
        self.context = context
        self.rank = context.rank
        self.size = context.size
        self.error: DistError | None = None
        self.call: Call | None = None
        self.last: EndedCall | None = None
        self._endpoint = endpoint
        self._spins = spins
        self._sockets: list[Connection | None] = [None] * self.size
        self._more_sockets: list[Connection] = []
        self._connections: dict[int, list[Connection]] = {}
        self._names: list[tuple[int, Connection, str]] = []
        self.deadline = 0.0
        self._pollers: dict[tuple[int, int], select.poll] = {}
        self._aborting = threading.Lock()
        self.wake: Callable[[], None] = lambda: None

    # --- bytes ----------------------------------------------------------------------------------------------

    def send(self, peer: int, view: memoryview) -> None:
        if len(view) >= STRIPED and len(self._connections_to(peer)) > 1:
            self._transfer(peer, view, peer, _NOTHING)
        else:
            self._send(peer, view)

    def receive(self, peer: int, view: memoryview, length: int, header: bytes | None = None) -> None:
        if length >= STRIPED and header is None and len(self._connections_to(peer)) > 1:
            self._transfer(peer, _NOTHING, peer, view[:length])
        else:
            self._receive(peer, view, length, header)

    def duplex(
        self, to: int, outgoing: memoryview, frm: int, incoming: memoryview, *, whole: bool = True
    ) -> None:
        if (
            whole
            and max(len(outgoing), len(incoming)) >= STRIPED
            and max(len(self._connections_to(to)), len(self._connections_to(frm))) > 1
        ):
            self._transfer(to, outgoing, frm, incoming)
        else:
            self._duplex(to, outgoing, frm, incoming)

    def _transfer(self, to: int, outgoing: memoryview, frm: int, incoming: memoryview) -> None:
        """Send and receive messages of which at least one is cut into stripes."""
        parts = [*self._cut(frm, incoming, False), *self._cut(to, outgoing, True)]
        transfer(parts, self.tick, self.check_deadline, self._connection_broken)

    def begin(self, to: int, outgoing: memoryview) -> list[Stripe]:
        return self._cut(to, outgoing, True, STRIPED_COMPRESSED)

    def send_some(self, parts: list[Stripe]) -> None:
        while advance(parts, self._connection_broken):
            pass

    def finish(self, to: int, parts: list[Stripe], frm: int, incoming: memoryview) -> None:
        arriving = self._cut(frm, incoming, False, STRIPED_COMPRESSED)
        if self._more_sockets:
            transfer([*arriving, *parts], self.tick, self.check_deadline, self._connection_broken)
        else:
            self._duplex(to, parts[0].view if parts else _NOTHING, frm, incoming)

    def _cut(self, peer: int, view: memoryview, sends: bool, least: int = STRIPED) -> list[Stripe]:
        if not view:
            return []
        if len(view) < least:
            return [Stripe(self._sockets[peer] or self._connect(peer), peer, view, sends)]
        return stripes(self._connections_to(peer), peer, view, sends)

    def _connections_to(self, peer: int) -> list[Connection]:
        """The connections that large messages to and from a peer use; they are made on first use."""
        connections = self._connections.get(peer)
        if connections is None:
            connections = [self._sockets[peer] or self._connect(peer)]
            try:
                count = self._endpoint.connections_to(self.context.ranks[peer], self.tick)
            except DistError as e:
                self.fail(e)
            connections += [self._connect(peer, number) for number in range(1, count)]
            self._connections[peer] = connections
        return connections

    def _send(self, peer: int, view: memoryview) -> None:
        sock = self._sockets[peer] or self._connect(peer)
        try:
            sent = sock.send(view, _DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError as e:
            self._connection_broken(peer, e)
        total = len(view)
        while sent < total:
            self.check_deadline()
            try:
                sent += sock.send(view[sent : sent + _SYSCALL_BYTES])
            except BlockingIOError:
                self.tick()
            except OSError as e:
                self._connection_broken(peer, e)

    def _receive(self, peer: int, view: memoryview, length: int, header: bytes | None = None) -> None:
        sock = self._sockets[peer] or self._connect(peer)
        got = 0
        spins = self._spins
        while True:
            if not spins:
                self.check_deadline()
            try:
                count = sock.recv_into(view[got:] if got else view, length - got, _DONTWAIT if spins else 0)
            except BlockingIOError:
                if spins:
                    spins -= 1
                else:
                    self.tick()
                continue
            except OSError as e:
                self._connection_broken(peer, e)
            got += count
            if got == length:
                return
            if not count:
                self._connection_broken(peer, None)
            if header is not None and got >= HEADER_SIZE and view[:HEADER_SIZE] != header:
                self._bad_header(peer, bytes(view[:HEADER_SIZE]))
            spins = 0

    def _duplex(self, to: int, outgoing: memoryview, frm: int, incoming: memoryview) -> None:
        out_sock = self._sockets[to] or self._connect(to)
        in_sock = self._sockets[frm] or self._connect(frm)
        sent = got = idle = 0
        to_send, to_get = len(outgoing), len(incoming)
        while sent < to_send and got < to_get:
            moved = False
            try:
                sent += out_sock.send(outgoing[sent : sent + _SYSCALL_BYTES], _DONTWAIT)
                moved = True
            except BlockingIOError:
                pass
            except OSError as e:
                self._connection_broken(to, e)
            try:
                count = in_sock.recv_into(incoming[got : got + _SYSCALL_BYTES], 0, _DONTWAIT)
                if not count:
                    self._connection_broken(frm, None)
                got += count
                moved = True
            except BlockingIOError:
                pass
            except OSError as e:
                self._connection_broken(frm, e)
            if moved:
                idle = 0
                self.check_deadline()
            else:
                idle += 1
                if idle > self._spins and not self._poller(to, frm).poll(_TICK_S * 1000):
                    self.tick()
        if sent < to_send:
            self._send(to, outgoing[sent:])
        elif got < to_get:
            self._receive(frm, incoming[got:], to_get - got)

    def _poller(self, to: int, frm: int) -> select.poll:
        found = self._pollers.get((to, frm))
        if found is None:
            found = self._pollers[(to, frm)] = select.poll()
            sender, receiver = self._sockets[to], self._sockets[frm]
            assert sender is not None
            assert receiver is not None
            found.register(receiver, select.POLLIN)
            found.register(sender, select.POLLOUT | (select.POLLIN if to == frm else 0))
        return found

    # --- connections ----------------------------------------------------------------------------------------

    def _connect(self, peer: int, number: int = 0) -> Connection:
        """Connect to a member. ``number`` > 0 is a further connection, which large messages use."""
        kind = f"{_COLLECTIVE}{number}" if number else _COLLECTIVE
        try:
            sock = self._endpoint.connect((self.context.name, kind, self.context.ranks[peer]), self.tick)
            name = self._endpoint.describe(self.context.ranks[peer], sock)
        except RankLostError as e:
            self.fail(self._lost(peer, str(e)))
        except DistError as e:
            self.fail(e)
        # a send or receive that makes no progress for a tick returns, so that deadline and failures are checked
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK_TIMEVAL)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK_TIMEVAL)
        if isinstance(sock, Channel):
            sock.part_moved = self.check_deadline
        with self._aborting:
            if number:
                self._more_sockets.append(sock)
            else:
                self._sockets[peer] = sock
            self._names.append((peer, sock, name))
        if self.error is not None:
            raise self.error
        return sock

    def tick(self) -> None:
        """Check for failure and deadline of the group; called while a wait makes no progress."""
        if self.error is not None:
            raise self.error.with_traceback(None) from None
        call = self.call
        assert call is not None
        now = time.monotonic()
        if not self.deadline:
            self.deadline = now - _TICK_S + call.timeout
        if now >= self.deadline:
            self.fail(operation_errors.timeout_error(self.context, call, self.links))

    def check_deadline(self) -> None:
        """Check the deadline while a message moves in parts: a slow connection may never be idle for a tick."""
        now = time.monotonic()
        if now < self.deadline:
            return
        if self.deadline:
            self.tick()
        else:
            assert self.call is not None
            self.deadline = now + self.call.timeout

    # --- failing --------------------------------------------------------------------------------------------

    def abort(self, error: DistError) -> None:
        """Make the operation in progress and all later ones raise ``error``; callable from any thread."""
        with self._aborting:
            if self.error is None:
                self.error = error
            wake = self.wake
        wake()
        with self._aborting:
            for sock in (*self._sockets, *self._more_sockets):
                if sock is not None:
                    with suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that sleeps in send or recv

    def close(self) -> None:
        """Close the group's connections, which no operation uses any more.

        The system gives a closed socket's descriptor to the next one, which :meth:`abort` must not shut down.
        """
        with self._aborting:
            self._endpoint.close_group(self.context.name)

    def fail(self, error: DistError) -> NoReturn:
        operation_errors.fail_group(self, error)

    def unreadable(self, peer: int, cause: OSError) -> NoReturn:
        """Raise the error for a member whose memory cannot be read: it died, or left the call and freed its arrays."""
        self._connection_broken(peer, cause, "has an array that cannot be read")

    def _connection_broken(
        self, peer: int, cause: Exception | None, what: str = "closed its connection"
    ) -> NoReturn:
        """Raise the error for a connection that ended: a rank died, left the group, or failed and closed it."""
        context, control = self.context, self.context.job.control
        if isinstance(cause, TamperedError):
            assert self.call is not None
            self.fail(operation_errors.tampered_error(context, context.ranks[peer], cause, self.call))
        if self.error is None and control is not None:
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline and self.error is None:
                if (failure := control.group_failure(context.name)) is not None:
                    self.abort(failure)
                elif (rank := control.find_lost_rank(context.ranks[peer], context.ranks, 0.02)) is not None:
                    self.fail(self._lost(context.ranks.index(rank), control.departed[rank]))
        if self.error is not None:
            raise self.error.with_traceback(None) from None
        lost = [name for member, sock, name in self._names if member == peer and given_up(sock, cause)]
        if lost:
            what = f"does not acknowledge what was sent from {'; '.join(lost)}"
        reason = f"{self.context.who(peer)} {what}" + (f": {cause}" if cause else "")
        self.fail(self._lost(peer, reason))

    def _lost(self, peer: int, reason: str) -> RankLostError:
        assert self.call is not None
        return operation_errors.rank_lost_error(self.context, self.call, peer, reason)

    def _bad_header(self, peer: int, header: bytes) -> NoReturn:
        context = self.context
        magic, seq = read_header(header)
        if magic != MAGIC:
            self.fail(DistNetworkError(f"{context.who(peer)} sent an invalid header", group=context.name))
        self.mismatch(peer, seq)

    def mismatch(self, peer: int, seq: int) -> NoReturn:
        """Raise the error for a member that is in another call, with sequence number ``seq``."""
        assert self.call is not None
        self.fail(operation_errors.mismatch_error(self.context, self.call, peer, seq))

    def check_peer(self, peer: int) -> bool:
        """True if a member has ended; for waits in shared memory. Raises after the deadline."""
        self.tick()
        control, rank = self.context.job.control, self.context.ranks[peer]
        return control is not None and (rank in control.departed or not _is_running(control.peers[rank].pid))

    def fail_lost(self, peer: int) -> NoReturn:
        """Raise the error for a member that ended before it signalled."""
        context, control = self.context, self.context.job.control
        reason = control.await_departure(context.ranks[peer]) if control is not None else None
        self.fail(self._lost(peer, reason or f"{context.who(peer)} died"))

    def links(self) -> str:
        """The connections on which the other host acknowledges nothing, and addresses that do not answer."""
        lost = [f"{name}: {state}" for _, sock, name in self._names if (state := unacknowledged(sock))]
        found = lost + self._endpoint.unanswered(self.context.name)
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return "; ".join(found[:_SHOWN]) + more


def _is_running(pid: int) -> bool:
    """True if a process of this host exists (a zombie counts)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class SubsetConnections(Connections):
    """Connections between some members of a group, renumbered from 0.

    Args:
        parent: the group's connections; they wait, fail and keep the deadline.
        members: the members' ranks in the group, including this one.
    """

    def __init__(self, parent: GroupConnections, members: tuple[int, ...]) -> None:
        super().__init__()
        self._parent = parent
        self.members = members
        self.context = parent.context
        self.rank = members.index(parent.rank)
        self.size = len(members)

    @property
    def call(self) -> Call | None:  # type: ignore[override]
        return self._parent.call

    def send(self, peer: int, view: memoryview) -> None:
        self._parent.send(self.members[peer], view)

    def begin(self, to: int, outgoing: memoryview) -> list[Stripe]:
        return self._parent.begin(self.members[to], outgoing)

    def send_some(self, parts: list[Stripe]) -> None:
        self._parent.send_some(parts)

    def finish(self, to: int, parts: list[Stripe], frm: int, incoming: memoryview) -> None:
        self._parent.finish(self.members[to], parts, self.members[frm], incoming)

    def receive(self, peer: int, view: memoryview, length: int, header: bytes | None = None) -> None:
        self._parent.receive(self.members[peer], view, length, header)

    def duplex(
        self, to: int, outgoing: memoryview, frm: int, incoming: memoryview, *, whole: bool = True
    ) -> None:
        self._parent.duplex(self.members[to], outgoing, self.members[frm], incoming, whole=whole)

    def swap(
        self,
        to: int,
        outgoing: memoryview,
        frm: int,
        incoming: memoryview,
        header: bytes,
        discard: Callable[[bytes], memoryview] | None = None,
    ) -> bool:
        return self._parent.swap(self.members[to], outgoing, self.members[frm], incoming, header, discard)

    def fail(self, error: DistError) -> NoReturn:
        self._parent.fail(error)

    def _bad_header(self, peer: int, header: bytes) -> NoReturn:
        self._parent._bad_header(self.members[peer], header)
