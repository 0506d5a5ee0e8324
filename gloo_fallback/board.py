"""Collectives in shared memory: every rank writes to its own slots, then tells the others.

A *step* is: write to my slot, tell all, wait until all have told, read the others' slots. Slots come in two sets that
take turns. A rank that writes for step s+2 has heard from all at s+1, and a rank tells s+1 only when it has read
everything of step s; so nothing is overwritten that is still read, and one wait per step is enough.

Memory order. A rank tells after it has written its slot (and read the others'), and reads and writes slots after it
has heard. :class:`Board` tells by raising a flag, a plain word: x86 makes stores visible in order and moves no load
before an older load nor a store before an older load, and each of these accesses is a machine instruction of its own
behind several calls of the interpreter, so the compiler cannot move them either. :class:`SemaphoreBoard` is for
processors that promise less (Arm, POWER): a POSIX semaphore for each pair of ranks and direction, posted and taken
once per step. All that a rank did before a post happens before what another does after it has taken that post; this
is what POSIX and the C library's release and acquire promise on every processor.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np

from unicoll.backend import Call
from unicoll.kernels import Flat

from . import bells
from .segment import Segment
from .team import Team

__all__ = ["SLOT", "Board", "SemaphoreBoard", "size_of"]

SLOT = 1 << 20
"""Bytes of one slot; a rank has two, whatever the size of the arrays."""
_LINE = 16
"""64-bit words between two ranks' flags: two cache lines, because processors fetch lines in pairs."""
_BELL = 1
"""The word of a rank's line that others set before they sleep on its flag; words 2 to 5 are signatures."""
_NOTE = 6
"""The first of two words, for two steps in turns, that :meth:`Board.note` writes."""
_YIELDS = 2000
_CROWDED_YIELDS = 100
_PATIENT_YIELDS = 20
_MASK = (1 << 64) - 1
_TICK_S = 0.1
_GONE = -1.0


def size_of(ranks: int) -> int:
    """Bytes of the segment of so many ranks: a page, flags, semaphores, slots."""
    return _slots_start(ranks) + 2 * ranks * SLOT


def _slots_start(ranks: int) -> int:
    bytes_before = Segment.START + ranks * _LINE * 8 + ranks * ranks * bells.SEMAPHORE
    return -(-bytes_before // 4096) * 4096


class Board:
    """The flags and slots of the ranks of one host, as one of them sees them.

    Args:
        team: the group; says who is lost, keeps the deadline, and fails together.
        members: the ranks (in the team) that share the segment, this one among them.
        segment: mapped by all of them.
        spins: looks at a flag before the processor is yielded; 0 where ranks outnumber cores.

    Attributes:
        step: number of the last step; a rank's two slots take turns.
        plans: what the algorithms remember of small operations, by kind.
    """

    def __init__(self, team: Team, members: tuple[int, ...], segment: Segment, spins: int) -> None:
        self.team = team
        self.members = members
        self.rank = members.index(team.rank)
        self.size = size = len(members)
        self.patient = False  # on a background thread: sleep soon, and leave the interpreter to the program
        self._segment = segment
        self._spins = 4 * spins
        self._yields = _YIELDS if spins else _CROWDED_YIELDS
        start = Segment.START
        words = size * _LINE
        self._flags = segment.memory[start : start + words * 8].cast("Q")
        self._address = segment.address + start
        self._mine = self.rank * _LINE
        self._others = [r * _LINE for r in range(size) if r != self.rank]
        self._slots: Flat = np.frombuffer(
            segment.memory, np.uint8, 2 * size * SLOT, _slots_start(size)
        ).reshape(2, size, SLOT)
        self._views: dict[tuple[int, int, int, Any], Flat] = {}
        self._rows: dict[tuple[int, int, Any], tuple[Flat, list[Flat]]] = {}
        self.step = 0
        self.plans: dict[Any, Any] = {}
        self.counts: tuple[bytes, int] = (b"", 0)  # the last table of an all_to_all's sizes that was good, its maximum
        held = threading.Lock()
        held.acquire()
        self._let_go, self._take = held.release, held.acquire
        team.wake = self._wake_up

    def close(self) -> None:
        """Let go of the memory."""
        self.team.wake = lambda: None
        self._views.clear()
        self._rows.clear()
        self.plans.clear()
        self._slots = np.zeros((2, self.size, 0), np.uint8)
        self._flags = memoryview(b"")
        self._segment.close()

    def slot(self, rank: int, start: int, count: int, dtype: np.dtype[Any], steps: int = 1) -> Flat:
        """``count`` elements at byte ``start`` of a rank's slot, as of ``steps`` steps ahead (0: the last step)."""
        key = (((self.step + steps) & 1) * self.size + rank, start, count, dtype)
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
        key = ((self.step + 1) & 1, count, dtype)
        found = self._rows.get(key)
        if found is None:
            if len(self._rows) > 512:
                self._rows.clear()
            rows = [self.slot(r, 0, count, dtype) for r in range(self.size)]
            found = self._rows[key] = (rows[self.rank], rows)
        return found

    def begun(self, call: Call) -> bool:
        """Whether the first step of a call has begun: then the others may have heard of it."""
        return call.seq in (self._flags[self._mine + 3], self._flags[self._mine + 5])

    def meet(self, call: Call | None = None) -> None:
        """Tell the others of the next step and wait to hear from all; with ``call``, compare signatures too."""
        step = self.step + 1
        flags, mine = self._flags, self._mine
        if call is not None:
            signature, seq = call.signature & _MASK, call.seq
            place = 2 + 2 * (step & 1)
            flags[mine + place] = signature
            flags[mine + place + 1] = seq
        flags[mine] = self.step = step
        # the flag must be out before the bell is looked at: taking a lock is a full barrier on x86
        self._let_go()
        self._take()
        if flags[mine + _BELL]:
            flags[mine + _BELL] = 0
            bells.wake(self._address + 8 * mine)
        for other in self._others:
            if flags[other] < step:
                self._wait(other, step)
            if call is not None and (flags[other + place] != signature or flags[other + place + 1] != seq):
                self._differ(other // _LINE, flags[other + place + 1])

    def note(self, value: int) -> None:
        """A number of this rank that the others can read after the next step."""
        self._flags[self._mine + _NOTE + (self.step + 1 & 1)] = value & _MASK

    def noted(self, rank: int) -> int:
        """The number that a rank has given for the last step, without its sign."""
        return self._flags[rank * _LINE + _NOTE + (self.step & 1)]

    def meet_alike(self, call: Call, number: int) -> bool:
        """:meth:`meet`; whether ``number`` is the same on all ranks, and not negative."""
        self.note(number)
        self.meet(call)
        flags, place = self._flags, _NOTE + (self.step & 1)
        for other in self._others:
            if flags[other + place] != number:
                return False
        return number >= 0

    def _wait(self, other: int, step: int) -> None:
        """Until a flag is at ``step``: look, then yield, then sleep, with an eye on deadline and liveness."""
        flags = self._flags
        if not self.patient:
            for _ in range(self._spins):
                if flags[other] >= step:
                    return
        give_way = os.sched_yield
        for _ in range(_PATIENT_YIELDS if self.patient else self._yields):
            if flags[other] >= step:
                return
            give_way()
        address = self._address + 8 * other
        looked = time.monotonic()
        while (seen := flags[other]) < step:
            flags[other + _BELL] = 1
            bells.sleep(address, seen & 0xFFFFFFFF, _TICK_S)
            looked = self._look_around(other // _LINE, looked)
            if looked == _GONE and flags[other] < step:  # what it did before it went counts
                self.team.fail_without(self.members[other // _LINE])

    def _look_around(self, other: int, looked: float) -> float:
        """Ten times a second, or when the group has failed: is the awaited rank gone, and is there time left?"""
        now = time.monotonic()
        if now - looked < _TICK_S and self.team.error is None:
            return looked
        return _GONE if self.team.look_around(self.members[other]) else now

    def _differ(self, other: int, seq: int) -> None:
        self.team.mismatch(self.members[other], seq)

    def _wake_up(self) -> None:
        """The group has failed: whoever sleeps here is to look (others look, too, and sleep on)."""
        for other in self._others:
            bells.wake(self._address + 8 * other)


class SemaphoreBoard(Board):
    """A board whose ranks tell each other by semaphores; right on every processor."""

    def __init__(self, team: Team, members: tuple[int, ...], segment: Segment, spins: int) -> None:
        super().__init__(team, members, segment, spins)
        first = segment.address + Segment.START + self.size * _LINE * 8
        others = [r for r in range(self.size) if r != self.rank]
        self._to = [_semaphore(first, self.size, self.rank, r) for r in others]
        self._from = [(r, _semaphore(first, self.size, r, self.rank)) for r in others]

    @staticmethod
    def prepare(segment: Segment, ranks: int) -> None:
        """Set the semaphores up; once, before the others map the segment."""
        first = segment.address + Segment.START + ranks * _LINE * 8
        for giver in range(ranks):
            for taker in range(ranks):
                bells.make_semaphore(_semaphore(first, ranks, giver, taker))

    def meet(self, call: Call | None = None) -> None:
        step = self.step + 1
        flags, mine = self._flags, self._mine
        if call is not None:
            signature, seq = call.signature & _MASK, call.seq
            place = 2 + 2 * (step & 1)
            flags[mine + place] = signature
            flags[mine + place + 1] = seq
        self.step = step
        for semaphore in self._to:
            bells.post(semaphore)
        for rank, semaphore in self._from:
            if bells.take(semaphore) != 0:
                self._take_late(rank, semaphore)
            if call is not None:
                line = rank * _LINE + place
                if flags[line] != signature or flags[line + 1] != seq:
                    self._differ(rank, flags[line + 1])

    def _take_late(self, rank: int, semaphore: int) -> None:
        """Take a semaphore that was not posted yet: try, then yield, then sleep."""
        for _ in range(0 if self.patient else self._spins):
            if bells.take(semaphore) == 0:
                return
        for _ in range(_PATIENT_YIELDS if self.patient else self._yields):
            if bells.take(semaphore) == 0:
                return
            os.sched_yield()
        looked = time.monotonic()
        while not bells.take_within(semaphore, _TICK_S):
            looked = self._look_around(rank, looked)
            if looked == _GONE:  # what it did before it went counts
                if bells.take(semaphore) == 0:
                    return
                self.team.fail_without(self.members[rank])

    def _wake_up(self) -> None:
        """Nothing: a sleep ends after a tick, and a post that nobody made must not be taken."""


def _semaphore(first: int, ranks: int, giver: int, taker: int) -> int:
    """Address of the semaphore that one rank posts and another takes."""
    return first + (giver * ranks + taker) * bells.SEMAPHORE
