"""Memory of the simulated device: blocks, a pool that reuses memory as CuPy's does, and detection of races.

A block of device memory is host memory of this process; its address is the pointer. Every operation records the memory
that it accesses when it is put on a stream; an access that is not ordered after an earlier conflicting one is a fault,
whatever the order in which the operations happen to run. So is memory that returns to the pool, or is freed, before the
operations that use it are ordered before the pool's stream.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.simulated_nccl.streams import Clock, Op, Scheduler, Stream, merge
from unicoll.devices.device_runtime import DeviceError

__all__ = ["Block", "Memory", "Pool"]

_ALIGNMENT = 512
_FRESH, _STALE = 0xCB, 0xDE
Bytes = Any


@dataclass(frozen=True)
class _Access:
    """An operation and the part of a block that it reads or writes."""

    op: Op
    start: int
    stop: int
    writes: bool


class Block:
    """Memory from one call of the allocator.

    Attributes:
        ptr, nbytes: address and size.
        device: ordinal of its device; -1 for pinned host memory.
        data: its bytes.
        idle: True while it is free in a pool.
        registered: number of communicators that it is registered with.
        freed: True once it has been given back to the driver.
        accesses: the accesses that later operations may not be ordered after.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        base = np.full(nbytes + _ALIGNMENT, _FRESH, np.uint8)
        offset = -base.ctypes.data % _ALIGNMENT
        self.data: Bytes = base[offset : offset + nbytes]
        self.ptr: int = base.ctypes.data + offset
        self.nbytes = nbytes
        self.device = device
        self.idle = self.freed = False
        self.registered = 0
        self.accesses: list[_Access] = []

    def __repr__(self) -> str:
        return f"{self.nbytes} bytes at {self.ptr:#x}"


class Memory:
    """All memory of the simulated devices of this process."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = scheduler.lock
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}
        scheduler.on_access = self._record

    def allocate(self, nbytes: int, device: int) -> Block:
        """A new block (at least one byte, so that every block has an address of its own)."""
        if nbytes < 0:
            raise DeviceError(f"cudaErrorInvalidValue: {nbytes} bytes of memory")
        block = Block(max(1, nbytes), device)
        with self._lock:
            bisect.insort(self._starts, block.ptr)
            self._blocks[block.ptr] = block
        return block

    def free(self, ptr: int) -> Block:
        """Free a block. The bytes stay allocated, so that a late use of them is detected and does no harm."""
        with self._lock:
            block = self._blocks.get(ptr)
            if block is None or block.freed:
                raise DeviceError(f"cudaErrorInvalidValue: {ptr:#x} is not the address of an allocation")
            for op in self.users(ptr):
                self._scheduler.fault(f"{block} freed before {op} has run")
            self.release(block, "freed")
            block.freed = True
            block.data[:] = _STALE
            return block

    def release(self, block: Block, how: str) -> None:
        """Record a fault if a block is still registered with a communicator."""
        if block.registered:
            self._scheduler.fault(f"{block} {how} while it is registered with a communicator")

    def users(self, ptr: int) -> list[Op]:
        """Operations that access a block and have not run."""
        with self._lock:
            block = self._blocks.get(ptr)
            return [] if block is None else [access.op for access in block.accesses if not access.op.done]

    def blocks(self) -> list[Block]:
        """The blocks that have not been freed."""
        with self._lock:
            return [block for block in self._blocks.values() if not block.freed]

    def find(self, ptr: int) -> Block | None:
        """The block that contains an address, or ends there (for empty arrays)."""
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
            raise DeviceError(f"cudaErrorIllegalAddress: {nbytes} bytes at {ptr:#x}")
        start = ptr - block.ptr
        return block.data[start : start + nbytes]

    # --- races ---

    def _record(self, op: Op) -> None:
        for ranges, writes in ((op.reads, False), (op.writes, True)):
            for ptr, nbytes in ranges:
                if nbytes:
                    self._record_range(op, ptr, nbytes, writes)

    def _record_range(self, op: Op, ptr: int, nbytes: int, writes: bool) -> None:
        block = self.find(ptr)
        if block is None:
            return
        if block.idle or block.freed:
            self._scheduler.fault(f"use after free: {op} accesses {block}")
        new = _Access(op, ptr - block.ptr, ptr - block.ptr + nbytes, writes)
        kept = []
        for access in block.accesses:
            apart = access.stop <= new.start or new.stop <= access.start
            ordered = op.after(access.op)
            if not (apart or ordered or access.op is op) and (writes or access.writes):
                verbs = ["writes" if a.writes else "reads" for a in (access, new)]
                self._scheduler.fault(
                    f"race on {block}: {access.op} {verbs[0]} it, {op} {verbs[1]} it, and neither is after the other"
                )
            covered = new.start <= access.start and access.stop <= new.stop and (writes or not access.writes)
            if not (ordered and covered):
                kept.append(access)
        kept.append(new)
        block.accesses = kept

    def unordered(self, block: Block, clock: Clock) -> list[Op]:
        """Operations that access a block and are not included in a clock."""
        found = []
        for access in block.accesses:
            stream = access.op.stream
            assert stream is not None
            if clock.get(stream.index, 0) < access.op.seq:
                found.append(access.op)
        return found


class Pool:
    """An allocator with the behaviour of CuPy's memory pool.

    There is an arena for each device and stream that is current at the allocation. A chunk returns to its arena with
    its last reference, whatever the device is doing, and is the memory of the next allocation of that size there.

    Attributes:
        strict: True if memory that returns before its arena's stream is ordered after all operations that use it is a
            fault, even if that stream is ordered before it uses the memory again.
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
        """All blocks that it has allocated."""
        return set(self._made)

    def take_back(self, block: Block, stream: Stream) -> None:
        """Take the memory of a chunk without references."""
        scheduler = self._scheduler
        with scheduler.lock:
            clock = dict(scheduler.host_clock)
            if stream.tail is not None:
                merge(clock, stream.tail.clock)
            for op in self._memory.unordered(block, clock) if self.strict else ():
                scheduler.fault(
                    f"freed too early: {block} went back to the pool of {stream}, "
                    f"whose next user is not ordered after {op}"
                )
            self._memory.release(block, "went back to its pool")
            block.idle = True
            self._arenas.setdefault((stream, block.nbytes), []).append(block)


class Chunk:
    """Memory of a pool, which returns to it with the last reference."""

    __slots__ = ("_pool", "_stream", "block")

    def __init__(self, pool: Pool, block: Block, stream: Stream) -> None:
        self.block = block
        self._pool = pool
        self._stream = stream

    @property
    def ptr(self) -> int:
        """Address of the memory."""
        return self.block.ptr

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # the scheduler's thread no longer runs then, and may hold the lock
            self._pool.take_back(self.block, self._stream)
