"""Flags and slots in shared memory: each rank writes to its own slot, signals, and reads the slots
of the others.

A *step* is: write to its own slot, signal, wait for the signals of all ranks, read the slots of the
others. Each rank has two slots, used alternately. A rank that writes for step s+2 has received all
signals of step s+1, and a rank signals s+1 only after it has read everything of step s. So no slot
is overwritten while it is read, and one wait per step suffices.

Memory order. A rank signals after it has written its slot and read the slots of the others, and
accesses slots after it has received the signals. :class:`Slots` signals by a flag, a plain word:
x86 makes stores visible in order and moves neither a load nor a store before an older load. Each of
these accesses is a machine instruction of its own behind several calls of the interpreter, so the
compiler cannot reorder them either. :class:`SemaphoreSlots` is for processors with a weaker memory
order (Arm, POWER): one POSIX semaphore for each ordered pair of ranks, posted and waited for once
per step. What a rank does before a post happens before what another does after the matching wait;
POSIX and the release and acquire of the C library guarantee this on every processor.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from gloo_fallback.shm import futex
from gloo_fallback.shm.process_memory import PeerMemory
from gloo_fallback.shm.segment import SharedSegment
from gloo_fallback.shm.symmetric_segments import SymmetricMemory
from unicoll.arrays.kernels import Flat
from unicoll.backend import Call
from unicoll.backend.group_state import TICK_S, GroupState
from unicoll.backend.host import OpQueue
from unicoll.errors import DistError

SLOT = 1 << 20
"""Bytes of one slot; a rank has two, whatever the size of the arrays."""
_WORDS = 16
"""64-bit words for each rank's flags: two cache lines, because processors fetch lines in pairs."""
_AWAITED = 1
"""The word in which other ranks write the step that they wait for before they sleep on this rank's
flag; words 2 to 5 are signatures."""
_VALUE = 6
"""The first of two words, used alternately, that :meth:`Slots.publish_value` writes."""
# These are yields of the processor before a thread sleeps. They are few where ranks outnumber
# cores, and on the queue's thread, whose polls keep the interpreter from the threads of the
# program.
_YIELDS = 2000
_OVERSUBSCRIBED_YIELDS = 20
_BACKGROUND_YIELDS = 20
_PAGE, _OFFSET = 4096, 1024
"""Slots start ``_OFFSET`` bytes after the start of a page. memcpy ("rep movsb") is 10 times as slow
on AMD's Zen 3 if the target is 1 to 31 bytes further in its page than the source; large arrays of
NumPy start 16 bytes after the start of a page, those of PyTorch 64 bytes."""
# The words are unsigned. Signatures and values may be negative, and are stored modulo 2^64.
_MASK = (1 << 64) - 1
# It is no time of the monotonic clock, on which times are not negative.
_ARRIVED = -1.0


def size_of(ranks: int) -> int:
    """Bytes of the segment for a number of ranks: a page, flags, semaphores, slots."""
    return _slots_start(ranks) + 2 * ranks * SLOT


def _slots_start(ranks: int) -> int:
    bytes_before = SharedSegment.START + ranks * _WORDS * 8 + ranks * ranks * futex.SEMAPHORE_BYTES
    return -(-bytes_before // _PAGE) * _PAGE + _OFFSET


class Slots:
    """The flags and slots of the ranks of one host, used by one of them.

    Args:
        state: of the group.
        members: the ranks (in the group) that share the segment, including this one.
        segment: mapped by all members.
        spins: polls of a flag before the processor is yielded; 0 if ranks outnumber cores.

    Attributes:
        step: number of the last step.
        queue: the group's queue, once its collectives use the slots.
        plans: the algorithms' cache for small operations.
        symmetric: the group's symmetric memory; None until the group has some.
        peers: the memory of the other ranks; None if it cannot be read.
    """

    def __init__(
        self, state: GroupState, members: tuple[int, ...], segment: SharedSegment, spins: int
    ) -> None:
        self.state = state
        self.members = members
        self.rank = members.index(state.context.rank)
        self.size = size = len(members)
        self.queue: OpQueue | None = None
        self._segment = segment
        self._spins = 4 * spins
        self._yields = _YIELDS if spins else _OVERSUBSCRIBED_YIELDS
        start = SharedSegment.START
        words = size * _WORDS
        self._flags = segment.memory[start : start + words * 8].cast("Q")
        self._address = segment.address + start
        self._mine = self.rank * _WORDS
        self._others = [r * _WORDS for r in range(size) if r != self.rank]
        self._slots: Flat = np.frombuffer(
            segment.memory, np.uint8, 2 * size * SLOT, _slots_start(size)
        ).reshape(2, size, SLOT)
        # Making a view costs more than a look-up. :meth:`_slot` bounds the number of views, since
        # each size of an array adds some.
        self._views: dict[tuple[int, int, int, int, Any], Flat] = {}
        self.step = 0
        self.plans: dict[Any, Any] = {}
        self.symmetric: SymmetricMemory | None = None
        self.peers: PeerMemory | None = None
        # This lock is private, and held except within :meth:`sync_step`, which uses it as a full
        # barrier. So neither call of it ever waits.
        lock = threading.Lock()
        lock.acquire()
        self._release, self._acquire = lock.release, lock.acquire
        # The thread that learns of a failure of the group may not be the one that sleeps on a
        # futex.
        state.add_listener(self._wake_sleepers)

    def close(self) -> None:
        """Release the memory."""
        # The listener may still run on another thread. It uses addresses only, and the kernel
        # refuses a wake at an address that is not mapped.
        self.state.remove_listener(self._wake_sleepers)
        self._views.clear()
        self.plans.clear()
        self._slots = np.zeros((2, self.size, 0), np.uint8)
        self._flags = memoryview(b"")
        # The memory is unmapped when the last view is gone, so all references to views are dropped
        # before.
        self._segment.close()

    def next_slot(self, rank: int, start: int, count: int, dtype: np.dtype[Any]) -> Flat:
        """``count`` elements at byte ``start`` of a rank's slot for the next step."""
        return self._slot(self.step + 1 & 1, rank, start, count, dtype)

    def last_slot(self, rank: int, start: int, count: int, dtype: np.dtype[Any]) -> Flat:
        """``count`` elements at byte ``start`` of a rank's slot for the last step."""
        return self._slot(self.step & 1, rank, start, count, dtype)

    def later_slot(self, rank: int, start: int, count: int, dtype: np.dtype[Any]) -> Flat:
        """``count`` elements at byte ``start`` of a rank's slot for the step after the next one."""
        # There are two slots, so the one after the next is the one of the last step. The other
        # ranks may still read it: it must not be written before the next step is done.
        return self._slot(self.step & 1, rank, start, count, dtype)

    def _slot(self, turn: int, rank: int, start: int, count: int, dtype: np.dtype[Any]) -> Flat:
        key = turn, rank, start, count, dtype
        view = self._views.get(key)
        if view is None:
            if len(self._views) > 4096:
                self._views.clear()
            raw: Flat = self._slots[turn, rank, start : start + count * dtype.itemsize]
            view = self._views[key] = raw.view(dtype)
        return view

    def rows(self, count: int, dtype: np.dtype[Any]) -> tuple[Flat, list[Flat]]:
        """This rank's slot for the next step, and the slots of all ranks in rank order, to be read
        after it."""
        rows = [self.next_slot(r, 0, count, dtype) for r in range(self.size)]
        return rows[self.rank], rows

    def may_be_direct(self, nbytes: int, *, scatter: bool = False) -> bool:
        """True if a large collective may need no slots, which
        :mod:`gloo_fallback.algorithms.peer_memory` determines.

        Args:
            nbytes: of the collective, equal on all ranks.
            scatter: True if it is a scatter.
        """
        return self.symmetric is not None or self.may_read(nbytes, scatter=scatter)

    def may_read(self, nbytes: int, *, scatter: bool = False) -> bool:
        """True if the memory of the other ranks can be read, and ``nbytes`` are enough for that to
        be faster."""
        peers = self.peers
        return peers is not None and nbytes >= (peers.scatter_minimum if scatter else peers.minimum)

    def begun(self, call: Call) -> bool:
        """True if the first step of a call has begun: other ranks may have received its signal."""
        return call.seq in (self._flags[self._mine + 3], self._flags[self._mine + 5])

    def sync_step(self, call: Call | None = None) -> None:
        """Signal the next step and wait for the signals of all ranks; with ``call``, also compare
        signatures."""
        # Each rank writes the words of its own row, except for _AWAITED, which the other ranks
        # write. Signature and number have two places, used alternately like the slots: a rank that
        # is a step ahead does not overwrite what others still compare. The flag is stored last,
        # since it stands for everything that this rank has written and read before.
        last = self.step
        step = last + 1
        flags, mine = self._flags, self._mine
        if call is not None:
            signature, seq = call.signature & _MASK, call.seq
            place = 2 + 2 * (step & 1)
            at = mine + place
            flags[at] = signature
            flags[at + 1] = seq
        flags[mine] = self.step = step
        # The flag must be visible before the awaited step is read: acquiring a lock is a full
        # barrier on x86. A rank that is about to sleep stores the awaited step and then compares
        # the flag again, in the kernel. With a barrier on both sides at least one of them sees the
        # store of the other. Without this one a rank could sleep until its next look at the
        # deadline.
        self._release()
        self._acquire()
        # All other ranks write this word. One that still waits for the last step may have
        # overwritten the step for which another one sleeps, so the last step counts, too. The word
        # is never cleared: a rank may just be storing the next step, and clearing would erase it. A
        # wake without a sleeper only costs a system call.
        if flags[mine + _AWAITED] >= last:
            futex.wake(self._address + 8 * mine)
        for other in self._others:
            if flags[other] < step:
                self._wait(other, step)
            if call is not None:
                at = other + place
                # The other rank cannot change these words before this one has signalled the next
                # step. A rank whose step compares no call has an old number here, which differs as
                # well.
                if flags[at] != signature or flags[at + 1] != seq:
                    self.state.fail_mismatch(self.members[other // _WORDS], flags[at + 1])

    def publish_value(self, value: int) -> None:
        """Store a number that the other ranks can read after the next step."""
        self._flags[self._mine + _VALUE + (self.step + 1 & 1)] = value & _MASK

    def published_value(self, rank: int) -> int:
        """The number that a rank has published for the last step, modulo 2^64."""
        return self._flags[rank * _WORDS + _VALUE + (self.step & 1)]

    def sync_step_checked(self, call: Call | None, value: int) -> bool:
        """:meth:`sync_step`; True if ``value`` is equal on all ranks and not negative."""
        flags, place = self._flags, _VALUE + (self.step + 1 & 1)
        flags[self._mine + place] = value & _MASK
        self.sync_step(call)
        # A negative value equals no unsigned word, so a rank that passes one gets False, as do all
        # others.
        for other in self._others:
            if flags[other + place] != value:
                return False
        return value >= 0

    @property
    def background(self) -> bool:
        """True while a background thread runs the operation: it sleeps sooner, which frees the
        interpreter."""
        return self.queue is not None and self.queue.in_background

    def _wait(self, other: int, step: int) -> None:
        """Wait until a flag reaches ``step``: poll, then yield, then sleep, checking deadline and
        liveness."""
        flags = self._flags
        background = self.background
        if not background:
            for _ in range(self._spins):
                if flags[other] >= step:
                    return
        yield_processor = os.sched_yield
        for _ in range(_BACKGROUND_YIELDS if background else self._yields):
            if flags[other] >= step:
                return
            yield_processor()
        # The kernel compares 32 bits. They are the lower half of the flag, which on x86, where
        # flags are used, is at the address of the flag.
        address = self._address + 8 * other
        checked = time.monotonic()
        while (seen := flags[other]) < step:
            # The word is stored in each round, because another rank that waits for an earlier step
            # may have overwritten it. The flag was read before: if it changes after that, the
            # kernel refuses the sleep.
            flags[other + _AWAITED] = step
            futex.sleep(address, seen & 0xFFFFFFFF, TICK_S)
            checked = self._check_liveness(other // _WORDS, checked, lambda: flags[other] >= step)

    def _check_liveness(self, other: int, checked: float, arrived: Callable[[], bool]) -> float:
        """Every 0.1 s, or once the group has failed: check the awaited rank and the deadline.

        A signal from before the rank ended or the group failed is valid.

        Returns:
            The time of the last check; ``_ARRIVED`` if the awaited signal had come when the check
            found a failure.
        """
        # A sleep may end early, by a signal or by a wake that was meant for another process, so the
        # time decides, and not the number of sleeps.
        now = time.monotonic()
        state = self.state
        if now - checked < TICK_S and state.error is None:
            return checked
        try:
            state.tick()
        except DistError:
            if arrived():
                return _ARRIVED
            raise
        # Nothing like the end of a connection tells this rank that another one has died, so it asks
        # the control plane and the kernel.
        member, control = self.members[other], state.context.job.control
        rank = state.context.ranks[member]
        if control is None or (
            rank not in control.departed and _is_running(control.peers[rank].pid)
        ):
            return now
        if arrived():
            return _ARRIVED
        # The kernel may show the end of the process before its notice has arrived, which says how
        # the rank ended.
        reason = control.await_departure(rank) or f"{state.context.who(member)} died"
        state.fail(state.lost_error(member, reason))

    def unreadable(self, other: int, cause: OSError) -> NoReturn:
        """Fail the group because a rank's memory cannot be read: it died, or left the call and
        freed its arrays."""
        member = self.members[other]
        who = self.state.context.who(member)
        self.state.fail_peer(member, f"{who} has an array that cannot be read: {cause}")

    def _wake_sleepers(self, error: DistError) -> None:
        """Wake the thread that sleeps on a flag after the group has failed; sleepers of other
        processes sleep again."""
        # The group's error is set before the listeners are called, so the thread finds it when it
        # wakes. This thread does not know on which flag that one sleeps.
        for other in self._others:
            futex.wake(self._address + 8 * other)


class SemaphoreSlots(Slots):
    """Slots with semaphores as signals; correct on every processor."""

    def __init__(
        self, state: GroupState, members: tuple[int, ...], segment: SharedSegment, spins: int
    ) -> None:
        super().__init__(state, members, segment, spins)
        first = segment.address + SharedSegment.START + self.size * _WORDS * 8
        others = [r for r in range(self.size) if r != self.rank]
        # There is one semaphore for each pair of ranks. With one for each waiting rank, two posts
        # of a rank that is a step ahead could be taken for a post of a rank that is late.
        self._to = [_semaphore(first, self.size, self.rank, r) for r in others]
        self._from = [(r, _semaphore(first, self.size, r, self.rank)) for r in others]

    @staticmethod
    def prepare(segment: SharedSegment, ranks: int) -> None:
        """Initialize the semaphores; once, before the other ranks map the segment."""
        first = segment.address + SharedSegment.START + ranks * _WORDS * 8
        for poster in range(ranks):
            for waiter in range(ranks):
                futex.init_semaphore(_semaphore(first, ranks, poster, waiter))

    def sync_step(self, call: Call | None = None) -> None:
        step = self.step + 1
        flags, mine = self._flags, self._mine
        if call is not None:
            signature, seq = call.signature & _MASK, call.seq
            place = 2 + 2 * (step & 1)
            flags[mine + place] = signature
            flags[mine + place + 1] = seq
        # All posts come before the first wait, since every rank waits for all others. They also
        # publish the plain words above: POSIX orders what precedes a post before what follows the
        # matching wait.
        self.step = step
        for semaphore in self._to:
            futex.post(semaphore)
        for rank, semaphore in self._from:
            if futex.try_wait(semaphore) != 0:
                self._wait_for_post(rank, semaphore)
            if call is not None:
                offset = rank * _WORDS + place
                if flags[offset] != signature or flags[offset + 1] != seq:
                    self.state.fail_mismatch(self.members[rank], flags[offset + 1])

    def _wait_for_post(self, rank: int, semaphore: int) -> None:
        """Wait for a semaphore that is not posted yet: poll, then yield, then sleep."""
        background = self.background
        for _ in range(0 if background else self._spins):
            if futex.try_wait(semaphore) == 0:
                return
        for _ in range(_BACKGROUND_YIELDS if background else self._yields):
            if futex.try_wait(semaphore) == 0:
                return
            os.sched_yield()
        checked = time.monotonic()
        # The look whether the signal has come takes the post from the semaphore. So _ARRIVED has to
        # end the loop: another wait would need a second post.
        while not futex.timed_wait(semaphore, TICK_S):
            checked = self._check_liveness(rank, checked, lambda: futex.try_wait(semaphore) == 0)
            if checked == _ARRIVED:
                return

    def _wake_sleepers(self, error: DistError) -> None:
        """Do nothing: a sleep ends after a tick, and an extra post would count as a signal."""


def _is_running(pid: int) -> bool:
    """True if a process of this host exists (a zombie counts)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # The process exists, and belongs to another user.
        pass
    return True


def _semaphore(first: int, ranks: int, poster: int, waiter: int) -> int:
    """Address of the semaphore that one rank posts and another waits for."""
    return first + (poster * ranks + waiter) * futex.SEMAPHORE_BYTES
