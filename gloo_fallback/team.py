"""A group's collective connections: sending, waiting with a deadline, and failing together."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from unicoll.backend import Call, Context
from unicoll.channel import Connection, TamperedError
from unicoll.errors import (
    DistError,
    DistNetworkError,
    RankLostError,
)
from unicoll.observe import inquest

from .endpoint import COLLECTIVE, Endpoint
from .links import HEADER_SIZE, MAGIC, Links, read_header
from .undelivered import tampered

__all__ = ["Bridge", "Team"]

_TICK_S = 0.1
_TICK = struct.pack("@ll", 0, int(_TICK_S * 1e6))
_PIECE = 1 << 18
"""Bytes handed to one system call; small enough that sending and receiving take turns."""
_WARN_S = 15.0

_DONTWAIT = socket.MSG_DONTWAIT

Progress = Callable[[int], None]


class Team(Links):
    """The members of a group, as one of them sees them.

    Args:
        context: the group.
        endpoint: this process's listener.
        spins: polls of a socket before sleeping on it; 0 where ranks outnumber cores.

    Attributes:
        error: what ended the group, or None.
        call, last: the operation in progress, and the one before.
        deadline: when it has to be done, on the clock of time.monotonic; 0 until something has to be waited for.
    """

    def __init__(self, context: Context, endpoint: Endpoint, spins: int) -> None:
        super().__init__()
        self.context = context
        self.rank = context.rank
        self.size = context.size
        self.error: DistError | None = None
        self.call: Call | None = None
        self.last: Call | None = None
        self._endpoint = endpoint
        self._spins = spins
        self._sockets: list[Connection | None] = [None] * self.size
        self.deadline = 0.0
        self._started = 0.0
        self._warned = False
        self._pollers: dict[tuple[int, int], select.poll] = {}
        self._aborting = threading.Lock()
        self.wake: Callable[[], None] = lambda: None  # ends a sleep in shared memory

    # --- bytes ----------------------------------------------------------------------------------------------------

    def send(self, peer: int, view: memoryview) -> None:
        sock = self._sockets[peer] or self._connect(peer)
        try:
            sent = sock.send(view, _DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError as e:
            self._broken(peer, e)
        total = len(view)
        while sent < total:
            try:
                sent += sock.send(view[sent : sent + _PIECE])
            except BlockingIOError:
                self.tick(peer)
            except OSError as e:
                self._broken(peer, e)

    def receive(self, peer: int, view: memoryview, length: int, header: bytes | None = None) -> None:
        sock = self._sockets[peer] or self._connect(peer)
        got = 0
        spins = self._spins
        while True:
            try:
                if spins:
                    spins -= 1
                    count = sock.recv_into(view[got:] if got else view, length - got, _DONTWAIT)
                else:
                    count = sock.recv_into(view[got:] if got else view, length - got)
            except BlockingIOError:
                if not spins:
                    self.tick(peer)
                continue
            except OSError as e:
                self._broken(peer, e)
            got += count
            if got == length:
                return
            if not count:
                self._broken(peer, None)
            if header is not None and got >= HEADER_SIZE:
                self._compare(peer, view, header)
            spins = 0

    def duplex(
        self, to: int, outgoing: memoryview, frm: int, incoming: memoryview, header: bytes | None = None
    ) -> None:
        out_sock = self._sockets[to] or self._connect(to)
        in_sock = self._sockets[frm] or self._connect(frm)
        sent = got = idle = 0
        to_send, to_get = len(outgoing), len(incoming)
        while sent < to_send and got < to_get:
            moved = False
            try:
                sent += out_sock.send(outgoing[sent : sent + _PIECE], _DONTWAIT)
                moved = True
            except BlockingIOError:
                pass
            except OSError as e:
                self._broken(to, e)
            try:
                count = in_sock.recv_into(incoming[got : got + _PIECE], 0, _DONTWAIT)
                if not count:
                    self._broken(frm, None)
                got += count
                moved = True
                if header is not None and got >= HEADER_SIZE:
                    self._compare(frm, incoming, header)
                    header = None
            except BlockingIOError:
                pass
            except OSError as e:
                self._broken(frm, e)
            if moved:
                idle = 0
            else:
                idle += 1
                if idle > self._spins and not self._poller(to, frm).poll(_TICK_S * 1000):
                    self.tick(frm)
        if header is not None and got < HEADER_SIZE:
            self.receive(frm, incoming[got:HEADER_SIZE], HEADER_SIZE - got)
            self._compare(frm, incoming, header)
            got = HEADER_SIZE
        if sent < to_send:
            self.send(to, outgoing[sent:])
        elif got < to_get:
            self.receive(frm, incoming[got:], to_get - got)

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

    # --- connections ----------------------------------------------------------------------------------------------

    def _connect(self, peer: int) -> Connection:
        try:
            sock = self._endpoint.connect(
                (self.context.name, COLLECTIVE, self.context.ranks[peer]), self.tick
            )
        except RankLostError as e:
            self.fail(self._lost(peer, str(e)))
        except DistError as e:
            self.fail(e)
        # a receive or send that finds nothing to do for a tick comes back, so that deadlines and news are looked at
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK)
        with self._aborting:
            self._sockets[peer] = sock
        if self.error is not None:
            raise self.error
        return sock

    def tick(self, peer: int = -1) -> None:
        """Nothing has come for a while: is the group well, and is there time left?"""
        if self.error is not None:
            raise self.error.with_traceback(None) from None
        call = self.call
        assert call is not None
        now = time.monotonic()
        if not self.deadline:
            self._started = now - _TICK_S
            self.deadline = self._started + call.timeout
            self._warned = False
        if now >= self.deadline:
            self.fail(inquest.timed_out(self.context, call))
        if now - self._started > _WARN_S and not self._warned:
            self._warned = True
            inquest.while_waiting(self.context, call, _WARN_S)

    # --- failing --------------------------------------------------------------------------------------------------

    def abort(self, error: DistError) -> None:
        """Make the operation in progress, and all later ones, raise ``error``; any thread."""
        with self._aborting:
            if self.error is None:
                self.error = error
            sockets = [s for s in self._sockets if s is not None]
            wake = self.wake
        wake()
        for sock in sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)  # wakes whoever sleeps in it
            except OSError:
                pass

    def close(self) -> None:
        """Give the connections back."""
        self._endpoint.close_group(self.context.name)

    def fail(self, error: DistError) -> NoReturn:
        if self.error is None:
            control = self.context.job.control
            if control is not None:
                error = control.fail(self.context.name, self.context.ranks, error)
            self.abort(error)
        assert self.error is not None
        raise self.error.with_traceback(None) from None

    def _broken(self, peer: int, cause: Exception | None) -> NoReturn:
        """A connection ended. Somebody died, or left, or has failed and closed it: find out."""
        context, control = self.context, self.context.job.control
        if isinstance(cause, TamperedError):
            assert self.call is not None
            self.fail(tampered(context, self.call, context.ranks[peer], cause))
        if self.error is None and control is not None:
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline and self.error is None:
                if (verdict := control.verdict(context.name)) is not None:
                    self.abort(verdict)
                elif (rank := control.culprit(context.ranks[peer], context.ranks, 0.02)) is not None:
                    self.fail(self._lost(context.ranks.index(rank), control.departed[rank]))
        if self.error is not None:
            raise self.error.with_traceback(None) from None
        why = f"{self.context.who(peer)} closed its connection" + (f": {cause}" if cause else "")
        self.fail(self._lost(peer, why))

    def _lost(self, peer: int, why: str) -> RankLostError:
        assert self.call is not None
        return inquest.lost(self.context, self.call, peer, why)

    def _misfit(self, peer: int, header: bytes) -> NoReturn:
        context = self.context
        magic, seq = read_header(header)
        if magic != MAGIC:
            self.fail(DistNetworkError(f"{context.who(peer)} sent what is no header", group=context.name))
        self.mismatch(peer, seq)

    def mismatch(self, peer: int, seq: int) -> NoReturn:
        """A member is in another call, its number ``seq``."""
        assert self.call is not None
        self.fail(inquest.mismatch(self.context, self.call, peer, seq))

    def look_around(self, peer: int) -> bool:
        """While waiting for a member without a connection that would tell: is it gone? Raises if no time is left."""
        self.tick()
        control, rank = self.context.job.control, self.context.ranks[peer]
        return control is not None and (rank in control.departed or not _runs(control.peers[rank].pid))

    def fail_without(self, peer: int) -> NoReturn:
        """A member that is gone has not done its part."""
        context, control = self.context, self.context.job.control
        why = control.await_departure(context.ranks[peer]) if control is not None else None
        self.fail(self._lost(peer, why or f"{context.who(peer)} died"))

    def report(self) -> dict[str, Any]:
        """What this rank is doing in the group, for other ranks' errors (called on the control thread)."""
        return inquest.report(self.call, self.last)


def _runs(pid: int) -> bool:
    """Whether a process of this host is there (a zombie is)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class Bridge(Links):
    """Some members of a team, numbered anew, over the team's connections.

    Args:
        team: whose connections are used; waits, fails and keeps the deadline.
        members: their ranks in the team; this process is one of them.
    """

    def __init__(self, team: Team, members: tuple[int, ...]) -> None:
        super().__init__()
        self._team = team
        self.members = members
        self.context = team.context
        self.rank = members.index(team.rank)
        self.size = len(members)

    @property
    def call(self) -> Call | None:  # type: ignore[override]
        return self._team.call

    def send(self, peer: int, view: memoryview) -> None:
        self._team.send(self.members[peer], view)

    def receive(self, peer: int, view: memoryview, length: int, header: bytes | None = None) -> None:
        self._team.receive(self.members[peer], view, length, header)

    def duplex(
        self, to: int, outgoing: memoryview, frm: int, incoming: memoryview, header: bytes | None = None
    ) -> None:
        self._team.duplex(self.members[to], outgoing, self.members[frm], incoming, header)

    def swap(
        self,
        to: int,
        outgoing: memoryview,
        frm: int,
        incoming: memoryview,
        header: bytes,
        room: Callable[[bytes], memoryview],
    ) -> bool:
        return self._team.swap(self.members[to], outgoing, self.members[frm], incoming, header, room)

    def fail(self, error: DistError) -> NoReturn:
        self._team.fail(error)

    def _misfit(self, peer: int, header: bytes) -> NoReturn:
        self._team._misfit(self.members[peer], header)
