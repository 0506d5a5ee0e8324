"""A group's collectives in shared memory: every rank writes to its own slots, then raises its flag.

A *step* is: write to my slot, raise my flag to the step's number, wait until all flags are there, read the others'
slots. Slots come in two sets that take turns. A rank that writes for step s+2 has seen all flags at s+1, and a rank
raises its flag to s+1 only when it has read everything of step s; so nothing is overwritten that is still read, and
one wait per step is enough.

Memory order: a flag is raised after the slot was written, and slots are read after the flag was seen. x86 makes stores
visible in order and does not move loads before older loads, and each of these accesses is a machine instruction of
its own behind several calls of the interpreter, so the compiler cannot move them either. Elsewhere the transport
is not used (:func:`~gloo_fallback.segment.can_share`).
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import numpy as np

from unicoll.backend import Call
from unicoll.kernels import Flat

from .segment import Segment, can_share, create, open_published
from .team import Team

__all__ = ["SLOT", "Board", "shared_board", "size_of"]

SLOT = 1 << 20
"""Bytes of one slot; a rank has two, whatever the size of the arrays."""
_LINE = 16
"""64-bit words between two ranks' flags: two cache lines, because processors fetch lines in pairs."""
_YIELDS = 2000
_PATIENT_YIELDS = 40
_MASK = (1 << 64) - 1
_NAP_S = 0.00002
_LONGEST_NAP_S = 0.002


def size_of(ranks: int) -> int:
    """Bytes of the segment of a group of so many ranks."""
    return Segment.START + ranks * _LINE * 8 + 2 * ranks * SLOT


class Board:
    """The flags and slots of a group, as one of its ranks sees them.

    Args:
        team: the group; says who is lost, keeps the deadline, and fails together.
        segment: mapped by all ranks.
        spins: looks at a flag before the processor is yielded; 0 where ranks outnumber cores.
    """

    def __init__(self, team: Team, segment: Segment, spins: int) -> None:
        self.team = team
        self.rank = team.rank
        self.size = size = team.size
        self._segment = segment
        self._spins = 4 * spins
        self.patient = False  # on a background thread: sleep soon, and leave the interpreter to the program
        words = size * _LINE
        flags = segment.memory[Segment.START : Segment.START + words * 8].cast("Q")
        self._flags = flags
        self._mine = self.rank * _LINE
        self._others = [r * _LINE for r in range(size) if r != self.rank]
        start = Segment.START + words * 8
        self._slots: Flat = np.frombuffer(segment.memory, np.uint8, 2 * size * SLOT, start).reshape(
            2, size, SLOT
        )
        self._views: dict[tuple[int, int, int, Any], Flat] = {}
        self._rows: dict[tuple[int, int, Any], tuple[Flat, list[Flat]]] = {}
        self._step = 0

    def close(self) -> None:
        """Let go of the memory."""
        self._views.clear()
        self._rows.clear()
        self._slots = np.zeros((2, self.size, 0), np.uint8)
        self._flags = memoryview(b"")
        self._segment.close()

    def slot(self, rank: int, start: int, count: int, dtype: np.dtype[Any], steps: int = 1) -> Flat:
        """``count`` elements at byte ``start`` of a rank's slot, as of ``steps`` steps ahead (0: the last step)."""
        key = (((self._step + steps) & 1) * self.size + rank, start, count, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) > 4096:
                self._views.clear()
            turn, owner = divmod(key[0], self.size)
            raw: Flat = self._slots[turn, owner, start : start + count * dtype.itemsize]
            view = self._views[key] = raw.view(dtype)
        return view

    def rows(self, count: int, dtype: np.dtype[Any]) -> tuple[Flat, list[Flat]]:
        """My slot for the next step, and all ranks' in rank order, to be read after it."""
        key = ((self._step + 1) & 1, count, dtype)
        found = self._rows.get(key)
        if found is None:
            if len(self._rows) > 512:
                self._rows.clear()
            rows = [self.slot(r, 0, count, dtype) for r in range(self.size)]
            found = self._rows[key] = (rows[self.rank], rows)
        return found

    def meet(self, call: Call | None = None) -> None:
        """Raise my flag for the next step and wait for all others'; with ``call``, compare signatures too."""
        self._step = step = self._step + 1
        flags, mine = self._flags, self._mine
        if call is None:
            flags[mine] = step
            for other in self._others:
                if flags[other] < step:
                    self._wait(other, step)
            return
        place = 2 + 2 * (step & 1)
        signature = call.signature & _MASK
        flags[mine + place] = signature
        flags[mine + place + 1] = call.seq
        flags[mine] = step
        for other in self._others:
            if flags[other] < step:
                self._wait(other, step)
            if flags[other + place] != signature or flags[other + place + 1] != call.seq:
                self.team.mismatch(other // _LINE, flags[other + place + 1])

    def _wait(self, other: int, step: int) -> None:
        """Until a flag is at ``step``: look, then yield, then nap, with an eye on deadline and liveness."""
        flags = self._flags
        if not self.patient:
            for _ in range(self._spins):
                if flags[other] >= step:
                    return
        give_way = os.sched_yield
        for _ in range(_PATIENT_YIELDS if self.patient else _YIELDS):
            if flags[other] >= step:
                return
            give_way()
        nap, looked = _NAP_S, time.monotonic()
        while flags[other] < step:
            time.sleep(nap)
            nap = min(nap * 1.3, _LONGEST_NAP_S)
            now = time.monotonic()
            if now - looked > 0.1 or self.team.error is not None:
                looked = now
                if flags[other] < step:
                    self.team.look_around(other // _LINE)


def shared_board(team: Team, spins: int) -> Board | None:
    """The board of a group, if all its ranks are on this host and can map one segment; all decide alike.

    Every rank that sees all others on its host takes part in a vote; one that cannot or will not share votes no, and
    then all use sockets.
    """
    context, control = team.context, team.context.job.control
    if control is None or len({control.peers[r].host for r in context.ranks}) > 1:
        return None
    unwilling = can_share()
    segment = None
    try:
        if team.rank == 0:
            segment = create(context, size_of(team.size), unwilling is None)
        elif unwilling is None:
            segment = open_published(context, team.tick)
        ballot = team.plan((1,) * team.size, np.dtype(np.uint8))
        ballot.mine[0] = segment is not None
        votes = [bool(vote[0]) for vote in team.exchange(ballot)]
        if segment is not None and all(votes):
            return Board(team, segment, spins)
    finally:
        if segment is not None:
            segment.close_descriptor()
    logging.getLogger("unicoll").info(
        "group %r uses sockets: %s",
        context.name,
        unwilling or "not all of its ranks could map the shared memory",
    )
    return None
