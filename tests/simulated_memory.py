"""Memory of the simulated device: blocks, a pool that reuses as CuPy's does, and what goes wrong with either.

A block of device memory is host memory of this process; its address is the pointer. Whoever touches a block says so
when the work is put on a stream; a touch that is not ordered after an earlier one with which it conflicts is a fault,
whether or not the order in which things run happens to be the right one. So is memory that comes back to the pool, or
is freed, before what uses it is ordered before the pool's stream.
"""

from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from simulated_streams import Clock, Op, Scheduler, Stream, merge

from unicoll.streams import CudaError

__all__ = ["Block", "Memory", "Pool"]

_ALIGNMENT = 512
_FRESH, _STALE = 0xCB, 0xDE
Bytes = Any


@dataclass(frozen=True)
class _Touch:
    """A piece of work and the part of a block that it reads or writes."""

    op: Op
    start: int
    stop: int
    writes: bool


class Block:
    """Memory from one call of the allocator.

    Attributes:
        ptr, nbytes: where it is.
        device: to which device it belongs; -1 for pinned host memory.
        data: its bytes.
        idle: whether it lies in a pool, used by nobody.
        registered: how many communicators know it.
        freed: whether it has been given back to the driver.
        touches: what has been done to it, as far as later work may not be ordered after it.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        room = np.full(nbytes + _ALIGNMENT, _FRESH, np.uint8)
        offset = -room.ctypes.data % _ALIGNMENT
        self.data: Bytes = room[offset : offset + nbytes]
        self.ptr: int = room.ctypes.data + offset
        self.nbytes = nbytes
        self.device = device
        self.idle = self.freed = False
        self.registered = 0
        self.touches: list[_Touch] = []

    def __repr__(self) -> str:
        return f"{self.nbytes} bytes at {self.ptr:#x}"


class Memory:
    """All memory of the simulated devices of this process."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = scheduler.lock
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}
        scheduler.on_touch = self._touched

    def allocate(self, nbytes: int, device: int) -> Block:
        """A new block (at least one byte, so that every block has an address of its own)."""
        if nbytes < 0:
            raise CudaError(f"cudaErrorInvalidValue: {nbytes} bytes of memory")
        block = Block(max(1, nbytes), device)
        with self._lock:
            bisect.insort(self._starts, block.ptr)
            self._blocks[block.ptr] = block
        return block

    def free(self, ptr: int) -> Block:
        """Give a block back. It stays where it is, so that a late use of it is found out and hurts nobody."""
        with self._lock:
            block = self._blocks.get(ptr)
            if block is None or block.freed:
                raise CudaError(f"cudaErrorInvalidValue: {ptr:#x} is not the address of an allocation")
            for op in self.users(ptr):
                self._scheduler.fault(f"{block} freed before {op} has run")
            self.let_go(block, "freed")
            block.freed = True
            block.data[:] = _STALE
            return block

    def let_go(self, block: Block, how: str) -> None:
        """A block goes: no communicator may know it any more."""
        if block.registered:
            self._scheduler.fault(f"{block} {how} while it is registered with a communicator")

    def users(self, ptr: int) -> list[Op]:
        """What touches a block and has not run."""
        with self._lock:
            block = self._blocks.get(ptr)
            return [] if block is None else [touch.op for touch in block.touches if not touch.op.done]

    def blocks(self) -> list[Block]:
        """Those that have not been given back to the driver."""
        with self._lock:
            return [block for block in self._blocks.values() if not block.freed]

    def find(self, ptr: int) -> Block | None:
        """The block that an address lies in (its end counts, for empty arrays there)."""
        with self._lock:
            i = bisect.bisect_right(self._starts, ptr) - 1
            if i < 0:
                return None
            block = self._blocks[self._starts[i]]
            return block if ptr <= block.ptr + block.nbytes else None

    def view(self, ptr: int, nbytes: int) -> Bytes:
        """The bytes at an address, as a NumPy array of uint8."""
        block = self.find(ptr)
        if block is None or ptr + nbytes > block.ptr + block.nbytes:
            raise CudaError(f"cudaErrorIllegalAddress: {nbytes} bytes at {ptr:#x}")
        start = ptr - block.ptr
        return block.data[start : start + nbytes]

    # --- races ---

    def _touched(self, op: Op) -> None:
        for ranges, writes in ((op.reads, False), (op.writes, True)):
            for ptr, nbytes in ranges:
                if nbytes:
                    self._touch(op, ptr, nbytes, writes)

    def _touch(self, op: Op, ptr: int, nbytes: int, writes: bool) -> None:
        block = self.find(ptr)
        if block is None:
            return
        if block.idle or block.freed:
            self._scheduler.fault(f"use after free: {op} touches {block}")
        mine = _Touch(op, ptr - block.ptr, ptr - block.ptr + nbytes, writes)
        kept = []
        for touch in block.touches:
            apart = touch.stop <= mine.start or mine.stop <= touch.start
            ordered = op.after(touch.op)
            if not (apart or ordered or touch.op is op) and (writes or touch.writes):
                verbs = ["writes" if t.writes else "reads" for t in (touch, mine)]
                self._scheduler.fault(
                    f"race on {block}: {touch.op} {verbs[0]} it, {op} {verbs[1]} it, and neither is after the other"
                )
            covered = mine.start <= touch.start and touch.stop <= mine.stop and (writes or not touch.writes)
            if not (ordered and covered):
                kept.append(touch)
        kept.append(mine)
        block.touches = kept

    def unordered(self, block: Block, clock: Clock) -> list[Op]:
        """What touches a block and is not before a point in the streams' work."""
        found = []
        for touch in block.touches:
            stream = touch.op.stream
            assert stream is not None
            if clock.get(stream.index, 0) < touch.op.seq:
                found.append(touch.op)
        return found


class Pool:
    """An allocator with the behaviour of CuPy's memory pool.

    There is an arena for each device and stream that is current at the allocation. A chunk comes back to its arena as
    soon as nobody refers to it, whatever the device is doing, and is what the next allocation of that size there gets.

    Attributes:
        strict: whether memory that comes back before its arena's stream is ordered after all that uses it is a fault,
            even if that stream is put in order before it uses the memory again.
    """

    _GRAIN = 512

    def __init__(self, memory: Memory, scheduler: Scheduler) -> None:
        self._memory = memory
        self._scheduler = scheduler
        self._arenas: dict[tuple[Stream, int], list[Block]] = {}
        self._made: set[Block] = set()
        self.strict = True

    def malloc(self, nbytes: int, stream: Stream) -> Chunk:
        """Memory for work on a stream."""
        size = -(-max(1, nbytes) // self._GRAIN) * self._GRAIN
        with self._scheduler.lock:
            free = self._arenas.setdefault((stream, size), [])
            if free:
                block = free.pop()
                block.idle = False
            else:
                block = self._memory.allocate(size, stream.device)
                self._made.add(block)
        return Chunk(self, block, stream)

    def blocks(self) -> set[Block]:
        """All that it has asked the driver for."""
        return set(self._made)

    def take_back(self, block: Block, stream: Stream) -> None:
        """A chunk that nobody refers to any more."""
        scheduler = self._scheduler
        with scheduler.lock:
            clock = dict(scheduler.known)
            if stream.tail is not None:
                merge(clock, stream.tail.clock)
            for op in self._memory.unordered(block, clock) if self.strict else ():
                scheduler.fault(
                    f"freed too early: {block} went back to the pool of {stream}, "
                    f"whose next user is not ordered after {op}"
                )
            self._memory.let_go(block, "went back to its pool")
            block.idle = True
            self._arenas.setdefault((stream, block.nbytes), []).append(block)


class Chunk:
    """A piece of a pool's memory; it goes back with the last reference to it."""

    __slots__ = ("_pool", "_stream", "block")

    def __init__(self, pool: Pool, block: Block, stream: Stream) -> None:
        self.block = block
        self._pool = pool
        self._stream = stream

    @property
    def ptr(self) -> int:
        """Its address."""
        return self.block.ptr

    def __del__(self) -> None:
        if threading is not None:  # not at the end of the interpreter
            self._pool.take_back(self.block, self._stream)
