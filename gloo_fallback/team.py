"""A group's collective connections: exchanging, waiting with a deadline, and failing together.

Every collective begins with :meth:`Team.exchange`: ranks pass each other a header with sequence number and
signature (and, for small operations, the data itself) in ceil(log2 n) rounds. A rank that comes out of it has heard,
directly or through others, from every rank of the group, and every hop compared headers; so a call that differs
anywhere is noticed before bulk data moves, at no extra round for small operations.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from unicoll.backend import Call, Context
from unicoll.errors import (
    DistError,
    DistNetworkError,
    RankLostError,
)
from unicoll.kernels import Flat

from . import inquest
from .endpoint import COLLECTIVE, Endpoint

__all__ = ["HEADER_SIZE", "Plan", "Team"]

_HEADER = struct.Struct("<QQqQ")
HEADER_SIZE = _HEADER.size
_MAGIC = 0x316C6C6F63696E75  # "unicoll1" as it lies in memory
_TICK_S = 0.1
_TICK = struct.pack("@ll", 0, int(_TICK_S * 1e6))
_PIECE = 1 << 18
"""Bytes handed to one system call; small enough that sending and receiving take turns."""
_CROSSING = 1 << 14
"""Messages up to this size are sent whole before the answer is read: the kernel's buffers hold them."""
_WARN_S = 15.0

_DONTWAIT = socket.MSG_DONTWAIT

Progress = Callable[[int], None]


class Plan:
    """The rounds of an exchange in which rank i contributes ``lengths[i]`` bytes.

    Blocks lie in the scratch memory in the order rank, rank+1, ...: round k sends the first 2^k of them to
    rank - 2^k and appends those of rank + 2^k (Bruck et al., "Efficient Algorithms for All-to-All Communications in
    Multiport Message-Passing Systems", 1997).
    """

    __slots__ = ("head", "mine", "rounds", "views")

    def __init__(self, scratch: Flat, lengths: tuple[int, ...], rank: int, storage: np.dtype[Any]) -> None:
        size = len(lengths)
        order = [(rank + i) % size for i in range(size)]
        offsets = [0]
        for r in order:
            offsets.append(offsets[-1] + lengths[r])
        data = scratch.data
        self.head = data[:HEADER_SIZE]
        self.rounds: list[tuple[int, int, memoryview, memoryview, int, memoryview]] = []
        distance = 1
        while distance < size:
            count = min(distance, size - distance)
            start, stop = offsets[distance], offsets[distance + count]
            # the incoming header lands on the 32 bytes before the incoming blocks, which are put back afterwards
            self.rounds.append(
                (
                    (rank - distance) % size,
                    (rank + distance) % size,
                    data[: HEADER_SIZE + offsets[count]],
                    data[start : HEADER_SIZE + stop],
                    HEADER_SIZE + stop - start,
                    data[start : start + HEADER_SIZE],
                )
            )
            distance *= 2
        blocks: list[Flat] = [scratch[:0].view(storage)] * size
        for i, r in enumerate(order):
            block = scratch[HEADER_SIZE + offsets[i] : HEADER_SIZE + offsets[i + 1]]
            blocks[r] = block.view(storage)
        self.views = blocks
        self.mine = blocks[rank]


class Team:
    """The members of a group, as one of them sees them.

    Args:
        context: the group.
        endpoint: this process's listener.
        spins: polls of a socket before sleeping on it; 0 where ranks outnumber cores.
    """

    def __init__(self, context: Context, endpoint: Endpoint, spins: int) -> None:
        self.context = context
        self.rank = context.rank
        self.size = context.size
        self.error: DistError | None = None
        self.call: Call | None = None
        self.last: Call | None = None
        self._endpoint = endpoint
        self._spins = spins
        self._sockets: list[socket.socket | None] = [None] * self.size
        self._scratch = np.zeros(HEADER_SIZE, np.uint8)
        self._plans: dict[Any, Plan] = {}
        self._deadline = 0.0
        self._started = 0.0
        self._warned = False
        self._pollers: dict[tuple[int, int], select.poll] = {}
        self._aborting = threading.Lock()

    # --- one operation ------------------------------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        """An operation starts; its deadline runs from here (and is looked at when something has to be waited for)."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        self.call = call
        self._deadline = 0.0

    def end(self) -> None:
        """The operation is over."""
        self.last, self.call = self.call, None

    def plan(self, lengths: tuple[int, ...], storage: np.dtype[Any]) -> Plan:
        """The (remembered) plan of an exchange."""
        key = (lengths, storage)
        found = self._plans.get(key)
        if found is None:
            need = HEADER_SIZE + sum(lengths)
            if need > self._scratch.size or len(self._plans) >= 256:
                self._plans.clear()
                if need > self._scratch.size:
                    self._scratch = np.zeros(max(need, 2 * self._scratch.size), np.uint8)
            found = self._plans[key] = Plan(self._scratch, lengths, self.rank, storage)
        return found

    def exchange(self, plan: Plan) -> list[Flat]:
        """Give everyone ``plan.mine``; returns every rank's block.

        Raises:
            CollectiveMismatchError: another rank is in another call.
        """
        call = self.call
        assert call is not None
        header = _HEADER.pack(_MAGIC, call.seq, call.signature, 0)
        plan.head[:] = header
        for to, frm, outgoing, incoming, length, overlap in plan.rounds:
            if length > _CROSSING:
                self._exchange_long(to, frm, outgoing, incoming, header)
                continue
            self.send(to, outgoing)
            saved = bytes(overlap)
            self.receive(frm, incoming, length, header)
            if overlap != header:
                self._mismatch(frm, bytes(overlap))
            overlap[:] = saved
        return plan.views

    def _exchange_long(
        self, to: int, frm: int, outgoing: memoryview, incoming: memoryview, header: bytes
    ) -> None:
        """A round whose bytes might fill both sockets' buffers: sent and received at once."""
        staging = memoryview(bytearray(len(incoming)))
        self.duplex(to, outgoing, frm, staging, header)
        self._check(frm, staging, header)
        incoming[HEADER_SIZE:] = staging[HEADER_SIZE:]

    def _check(self, peer: int, view: memoryview, header: bytes) -> None:
        if view[:HEADER_SIZE] != header:
            self._mismatch(peer, bytes(view[:HEADER_SIZE]))

    # --- bytes ----------------------------------------------------------------------------------------------------

    def send(self, peer: int, view: memoryview) -> None:
        """Send all of ``view`` (bytes) to a member."""
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
        """Fill ``view`` (``length`` bytes) from a member.

        ``header`` is what has to come first. It is compared as soon as it is there, because a member that is in
        another call may send less than is awaited; comparing the whole is left to the caller.
        """
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
                self._check(peer, view, header)
            spins = 0

    def duplex(
        self, to: int, outgoing: memoryview, frm: int, incoming: memoryview, header: bytes | None = None
    ) -> None:
        """Send ``outgoing`` to one member while ``incoming`` is filled from another (or the same).

        ``header`` is as for :meth:`receive`.
        """
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
                    self._check(frm, incoming, header)
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
            self._check(frm, incoming, header)
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

    def _connect(self, peer: int) -> socket.socket:
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
        if not self._deadline:
            self._started = now - _TICK_S
            self._deadline = self._started + call.timeout
            self._warned = False
        if now >= self._deadline:
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
        for sock in sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)  # wakes whoever sleeps in it
            except OSError:
                pass

    def close(self) -> None:
        """Give the connections back."""
        self._endpoint.close_group(self.context.name)

    def fail(self, error: DistError) -> NoReturn:
        """This rank found that the operation cannot succeed: agree on the error with the others, and raise it."""
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

    def _mismatch(self, peer: int, header: bytes) -> NoReturn:
        context = self.context
        magic, seq, _, _ = _HEADER.unpack(header)
        if magic != _MAGIC:
            self.fail(DistNetworkError(f"{context.who(peer)} sent what is no header", group=context.name))
        self.mismatch(peer, seq)

    def mismatch(self, peer: int, seq: int) -> NoReturn:
        """A member is in another call, its number ``seq``."""
        assert self.call is not None
        self.fail(inquest.mismatch(self.context, self.call, peer, seq))

    def look_around(self, peer: int) -> None:
        """While waiting for a member without a connection that would tell: is it alive, and is there time left?"""
        context = self.context
        self.tick()
        control, rank = context.job.control, context.ranks[peer]
        if control is None or (rank not in control.departed and _runs(control.peers[rank].pid)):
            return
        why = control.await_departure(rank) or f"{context.who(peer)} died"
        self.fail(self._lost(peer, why))

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
