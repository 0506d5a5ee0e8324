"""A group's connections for collectives: send and receive with a deadline, and fail on all
ranks."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from gloo_fallback.transport.exchange import HEADER_SIZE, MAGIC, Connections, read_header
from gloo_fallback.transport.striping import (
    STRIPED,
    STRIPED_COMPRESSED,
    Stripe,
    advance,
    stripes,
    transfer,
)
from unicoll.backend import operation_errors
from unicoll.backend.connections import Endpoint
from unicoll.backend.group_state import TICK_S, GroupState
from unicoll.errors import DistError, DistNetworkError, RankLostError
from unicoll.net.wire.channel import Channel, Connection
from unicoll.net.wire.links import given_up, unacknowledged
from unicoll.net.wire.records import TamperedError
from unicoll.process.interrupts import raised_by_handler

_COLLECTIVE = "c"
"""The first character of the kind of these connections, as opposed to ``MESSAGES``."""
_TICK_TIMEVAL = struct.pack("@ll", 0, int(TICK_S * 1e6))
_SYSCALL_BYTES = 1 << 18
"""Maximum bytes per system call; small enough that sends and receives alternate."""

_SHOWN = 8
"""Maximum number of connections that the report of a rank names."""
_DONTWAIT = socket.MSG_DONTWAIT
_NOTHING = memoryview(b"")


class GroupConnections(Connections):
    """The connections of one rank of a group to the other ranks.

    Args:
        state: of the group.
        endpoint: this process's listener.
        spins: polls of a socket before sleeping on it; 0 if ranks outnumber cores.
    """

    def __init__(self, state: GroupState, endpoint: Endpoint, spins: int) -> None:
        super().__init__(state)
        self.rank = self.context.rank
        self.size = self.context.size
        self._endpoint = endpoint
        self._spins = spins
        self._sockets: list[Connection | None] = [None] * self.size
        self._more_sockets: list[Connection] = []
        self._connections: dict[int, list[Connection]] = {}
        # The control thread reads this list for reports while threads of calls connect. Entries are
        # only appended, which is one atomic operation of the interpreter.
        self._names: list[tuple[int, Connection, str]] = []
        self._pollers: dict[tuple[int, int], select.poll] = {}
        # The lock protects the lists of sockets between a thread that connects, one that reports a
        # failure and one that closes the group.
        self._shutting_down = threading.Lock()
        state.add_listener(self.shut_down)

    # --- bytes ------------------------------------------------------------------------------------

    def send(self, peer: int, view: memoryview) -> None:
        if len(view) >= STRIPED and len(self._connections_to(peer)) > 1:
            self._transfer(peer, view, peer, _NOTHING)
        else:
            self._send(peer, view)

    def receive(
        self, peer: int, view: memoryview, length: int, header: bytes | None = None
    ) -> None:
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
        transfer(parts, self.state.tick, self.state.check_deadline, self._connection_broken)

    def begin(self, to: int, outgoing: memoryview) -> list[Stripe]:
        return self._cut(to, outgoing, True, STRIPED_COMPRESSED)

    def send_some(self, parts: list[Stripe]) -> None:
        while advance(parts, self._connection_broken):
            pass

    def finish(self, to: int, parts: list[Stripe], frm: int, incoming: memoryview) -> None:
        # This comes before the test below, because it may make the further connections to a peer.
        arriving = self._cut(frm, incoming, False, STRIPED_COMPRESSED)
        if self._more_sockets:
            transfer(
                [*arriving, *parts],
                self.state.tick,
                self.state.check_deadline,
                self._connection_broken,
            )
        else:
            # Without further connections a message is one part, of which the view is what is left.
            self._duplex(to, parts[0].view if parts else _NOTHING, frm, incoming)

    def _cut(self, peer: int, view: memoryview, sends: bool, least: int = STRIPED) -> list[Stripe]:
        if not view:
            return []
        if len(view) < least:
            return [Stripe(self._sockets[peer] or self._connect(peer), peer, view, sends)]
        return stripes(self._connections_to(peer), peer, view, sends)

    def _connections_to(self, peer: int) -> list[Connection]:
        """The connections that large messages to and from a peer use; they are made on first
        use."""
        connections = self._connections.get(peer)
        if connections is None:
            connections = [self._sockets[peer] or self._connect(peer)]
            try:
                count = self._endpoint.connections_to(self.context.ranks[peer], self.state.tick)
            except DistError as e:
                self.state.fail(e)
            connections += [self._connect(peer, number) for number in range(1, count)]
            # The list is stored once all of them are made, so that an error in between leaves no
            # shorter one: both sides cut a message by the number of connections.
            self._connections[peer] = connections
        return connections

    def _send(self, peer: int, view: memoryview) -> None:
        sock = self._sockets[peer] or self._connect(peer)
        # A small message usually fits the buffer of the socket, and leaves in this one system call.
        # The deadline is only looked at afterwards.
        try:
            sent = sock.send(view, _DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError as e:
            self._connection_broken(peer, e)
        total = len(view)
        while sent < total:
            # The deadline is checked after each part, too: a peer that takes a few bytes at a time
            # never lets a send run into its timeout.
            self.state.check_deadline()
            try:
                sent += sock.send(view[sent : sent + _SYSCALL_BYTES])
            except BlockingIOError:
                self.state.tick()
            except OSError as e:
                self._connection_broken(peer, e)

    def _receive(
        self, peer: int, view: memoryview, length: int, header: bytes | None = None
    ) -> None:
        sock = self._sockets[peer] or self._connect(peer)
        got = 0
        # The first bytes are awaited by polls without sleeping. They are few, so the deadline is
        # not checked between them.
        spins = self._spins
        while True:
            if not spins:
                self.state.check_deadline()
            try:
                count = sock.recv_into(
                    view[got:] if got else view, length - got, _DONTWAIT if spins else 0
                )
            except BlockingIOError:
                if spins:
                    spins -= 1
                else:
                    self.state.tick()
                continue
            except OSError as e:
                self._connection_broken(peer, e)
            got += count
            if got == length:
                return
            if not count:
                self._connection_broken(peer, None)
            # A rank in another call may have sent a shorter message. Waiting for the rest of this
            # one would end at the deadline, without the name of that call.
            if header is not None and got >= HEADER_SIZE and view[:HEADER_SIZE] != header:
                self._bad_header(peer, bytes(view[:HEADER_SIZE]))
            spins = 0

    def _duplex(self, to: int, outgoing: memoryview, frm: int, incoming: memoryview) -> None:
        out_sock = self._sockets[to] or self._connect(to)
        in_sock = self._sockets[frm] or self._connect(frm)
        sent = got = idle = 0
        to_send, to_get = len(outgoing), len(incoming)
        # Both directions take turns while both have something left: ranks in a ring all send at the
        # same time, and would all wait if each sent everything before it received.
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
                self.state.check_deadline()
            else:
                # Both calls have found nothing to do, also of data that a protected channel has
                # decrypted already. So the sleep misses nothing.
                idle += 1
                if idle > self._spins and not self._poller(to, frm).poll(TICK_S * 1000):
                    self.state.tick()
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
            # The sockets of a group's collectives are never replaced, so a poll object can be kept
            # for each pair. If both are one socket, the second registration replaces the first, and
            # has both events.
            found.register(receiver, select.POLLIN)
            found.register(sender, select.POLLOUT | (select.POLLIN if to == frm else 0))
        return found

    # --- connections ------------------------------------------------------------------------------

    def _connect(self, peer: int, number: int = 0) -> Connection:
        """Connect to a member. ``number`` > 0 is a further connection, which large messages use."""
        kind = f"{_COLLECTIVE}{number}" if number else _COLLECTIVE
        try:
            sock = self._endpoint.connect(
                (self.context.name, kind, self.context.ranks[peer]), self.state.tick
            )
            name = self._endpoint.describe(self.context.ranks[peer], sock)
        except RankLostError as e:
            self.state.fail(self.state.lost_error(peer, str(e)))
        except DistError as e:
            self.state.fail(e)
        # A send or receive that makes no progress for a tick returns, so that deadline and failures
        # are checked. The timeout is the kernel's, and not that of the socket object: with that one
        # Python would poll before each call, which is a system call more.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK_TIMEVAL)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK_TIMEVAL)
        if isinstance(sock, Channel):
            sock.part_moved = self.state.check_deadline
        with self._shutting_down:
            if number:
                self._more_sockets.append(sock)
            else:
                self._sockets[peer] = sock
            self._names.append((peer, sock, name))
        # The group may have failed before the socket was in the lists. Its error is set before
        # shut_down is called, so either shut_down finds the socket or this check finds the error.
        self.state.check()
        return sock

    # --- failing ----------------------------------------------------------------------------------

    def shut_down(self, error: DistError | None = None) -> None:
        """Shut the connections down, which wakes a thread that sleeps in send or recv; any
        thread."""
        with self._shutting_down:
            for sock in (*self._sockets, *self._more_sockets):
                if sock is not None:
                    # The peer may have ended the connection already.
                    with suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the group's connections, which no operation uses any more.

        The system gives a closed socket's descriptor to the next one, which :meth:`shut_down` must
        not shut down.
        """
        with self._shutting_down:
            self._endpoint.close_group(self.context.name)

    def _connection_broken(self, peer: int, cause: Exception | None) -> NoReturn:
        """Raise the error for a connection that ended: a rank died, left the group, or failed and
        closed it."""
        context, state = self.context, self.state
        if cause is not None and raised_by_handler(cause):
            # No system call has raised it, but a signal's handler, for example TimeoutError of an
            # alarm. It is not the end of the connection, and the program has to get its own
            # exception.
            raise cause
        if isinstance(cause, TamperedError):
            assert state.call is not None
            state.fail(
                operation_errors.tampered_error(context, context.ranks[peer], cause, state.call)
            )
        # The end of a process closes its connections. If the host or the network is lost instead,
        # the kernel gives the connection up after a while: then the error names the addresses of
        # the connection.
        what = "closed its connection"
        lost = [
            name for member, sock, name in self._names if member == peer and given_up(sock, cause)
        ]
        if lost:
            what = f"does not acknowledge what was sent from {'; '.join(lost)}"
        state.fail_peer(peer, f"{context.who(peer)} {what}" + (f": {cause}" if cause else ""))

    def _bad_header(self, peer: int, header: bytes) -> NoReturn:
        context = self.context
        magic, seq = read_header(header)
        # Without it these bytes are no header, and the number in them means nothing.
        if magic != MAGIC:
            self.state.fail(
                DistNetworkError(f"{context.who(peer)} sent an invalid header", group=context.name)
            )
        self.state.fail_mismatch(peer, seq)

    def links(self) -> str:
        """The connections on which the other host acknowledges nothing, and addresses that do not
        answer."""
        lost = [
            f"{name}: {state}" for _, sock, name in self._names if (state := unacknowledged(sock))
        ]
        found = lost + self._endpoint.unanswered(self.context.name)
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return "; ".join(found[:_SHOWN]) + more


class SubsetConnections(Connections):
    """Connections between some members of a group, renumbered from 0.

    Args:
        parent: the group's connections.
        members: the members' ranks in the group, including this one.
    """

    def __init__(self, parent: GroupConnections, members: tuple[int, ...]) -> None:
        super().__init__(parent.state)
        self._parent = parent
        self.members = members
        self.rank = members.index(parent.rank)
        self.size = len(members)

    def send(self, peer: int, view: memoryview) -> None:
        self._parent.send(self.members[peer], view)

    def begin(self, to: int, outgoing: memoryview) -> list[Stripe]:
        return self._parent.begin(self.members[to], outgoing)

    def send_some(self, parts: list[Stripe]) -> None:
        self._parent.send_some(parts)

    def finish(self, to: int, parts: list[Stripe], frm: int, incoming: memoryview) -> None:
        self._parent.finish(self.members[to], parts, self.members[frm], incoming)

    def receive(
        self, peer: int, view: memoryview, length: int, header: bytes | None = None
    ) -> None:
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
        return self._parent.swap(
            self.members[to], outgoing, self.members[frm], incoming, header, discard
        )

    def _bad_header(self, peer: int, header: bytes) -> NoReturn:
        self._parent._bad_header(self.members[peer], header)
