"""Arrays on a GPU over a backend of arrays in host memory: by address, or in chunks through pinned
memory.

Calls that the backend can do by address use the device's memory
(:mod:`unicoll.staging.device_pointers`). All others are staged:

A collective is cut into chunks, which the backend executes one after another, in the place of the
call in the group's order. A chunk is copied to the host first, after the work that the producer has
enqueued on its stream; afterwards its results are copied to the device. While the backend executes
one chunk, the next one and the previous one are being copied, on streams of the group.

A call is done when the device has its results. The host has to wait for them anyway, so the
caller's stream has nothing left to wait for. Packed results of strided arrays are unpacked on the
current stream of the thread that waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from unicoll.arrays.conversion import Buffer
from unicoll.backend.contract import Backend, Caps, Context
from unicoll.backend.host import Execute, HostBackend, available, check_sizes, largest_part
from unicoll.calls.call import Call, ProxyCall
from unicoll.calls.ops import Arity, Sizes
from unicoll.calls.work import Completion
from unicoll.devices import runtimes
from unicoll.devices.device_runtime import on_device
from unicoll.errors import BackendUnavailableError, DistArgumentError, DistError
from unicoll.staging.chunking import ChunkPlan, plan
from unicoll.staging.copier import CopyStreams, HostCopier
from unicoll.staging.device_pointers import DirectCalls
from unicoll.staging.p2p import HARMLESS, DeviceP2P
from unicoll.staging.pinned_pool import PinnedBlock

if TYPE_CHECKING:
    from unicoll.calls.flight_recorder import PendingEntry

CHUNK = 4 << 20
"""Bytes of a call that are moved at a time; larger calls are cut into several chunks."""
_DEPTH = 3
"""Chunks in flight: one in the backend, one being copied to the host, one being copied to the
device."""
_MESSAGES = frozenset(("send", "recv"))


@dataclass
class _Slot:
    """The host memory and the events of a chunk in flight."""

    # The event after which the inputs are on the host.
    loaded: int
    # The event after which the results are on the device.
    stored: int
    memory: list[PinnedBlock] = field(default_factory=list)
    # The host's buffers by the id of the device's buffer, which the call keeps alive.
    buffers: dict[int, Buffer] = field(default_factory=dict)
    in_backend: bool = False


class Staged(Backend):
    """Device arrays over a backend of host arrays.

    Args:
        host: the backend; it is closed by its owner, and failed here only for faults of the device.
    """

    def __init__(
        self, host: HostBackend, device_type: str, rank: int, ranks: Sequence[int], group: str
    ) -> None:
        self.name = host.name  # type: ignore[misc]
        caps = host.caps
        self.caps = Caps(frozenset((device_type,)), available(caps), caps.reduces, caps.compresses)  # type: ignore[misc]
        self.compares = host.compares  # type: ignore[misc]
        self._host = host
        self._device_type = device_type
        self._rank = rank
        self._ranks = ranks
        self._size = len(ranks)
        self._group = group
        self._copier = HostCopier(runtimes.runtime(device_type), group)
        self._direct = DirectCalls(host, self._copier)
        self._p2p = DeviceP2P(host, self._copier, self._direct, group)

    @classmethod
    def create(cls, context: Context) -> Backend:
        raise BackendUnavailableError("staging is created around another backend")

    @property
    def sequence(self) -> int:
        return self._host.sequence

    @property
    def executing_backend(self) -> HostBackend:
        return self._host

    @property
    def staging(self) -> int:
        return self._host.staging + self._copier.pinned.held + self._direct.held

    def describe(self) -> str:
        staged = f"through page-locked memory, in chunks of {CHUNK >> 20} MiB, and {self.name}"
        arrays = f"{self._device_type} arrays"
        if self._host.direct and self._device_type == "cuda":
            return (
                f"{arrays} by address to {self.name}, and reductions that it does not do itself"
                f" {staged}"
            )
        return f"{arrays} {staged}"

    def run(self, call: Call) -> None:
        self._host.raise_failure()
        if call.op.name in _MESSAGES:
            self._p2p.run(call)
        else:
            self._host.run_with(call, self._executor(call))
        call.write_back()

    def post(self, calls: Sequence[Call], stream: object = None) -> Completion:
        # The error of a failed group comes before one of the device, which is maybe its cause.
        self._host.raise_failure()
        calls = tuple(calls)
        if calls[0].op.name in _MESSAGES:
            return _Unpacking(self._p2p.post(calls[0]), calls, self._copier)
        # They are made before the calls are queued, because the copies are ordered after the work
        # that is on the caller's streams now, not when the queue comes to a call.
        executors = {call: self._executor(call) for call in calls}
        done = self._host.post_with(calls, lambda call: executors[call](call))
        return _Unpacking(done, calls, self._copier)

    def abort(self, error: Exception) -> None:
        self._host.abort(error)

    def close(self) -> None:
        """Release everything; the backend has been closed."""
        self._p2p.close()
        self._direct.close()
        self._copier.close()

    # --- collectives ------------------------------------------------------------------------------

    def _executor(self, call: Call) -> Execute:
        """The function that executes a collective; it orders the copies after the work on the
        caller's streams now."""
        if not call.inputs and not call.outputs:
            return self._host.perform
        if self._host.takes_device(call):
            return self._direct.executor(call)
        return partial(self._execute, self._copier.begin(call))

    def _plan(self, call: Call) -> ChunkPlan:
        """The chunks of a collective; the members agree on them unless every rank knows all
        sizes."""
        if self._size == 1 or not (call.op.sizes is Sizes.EXCHANGED or call.op.root_has_sizes):
            return plan(call, self._size, CHUNK)
        chunks = plan(call, self._size, CHUNK, largest_part(call, self._host.perform))
        # The backend itself compares the sizes of a call that is one chunk.
        if chunks.count > 1:
            try:
                check_sizes(call, self._rank, self._ranks, self._group, self._host.perform)
            except DistArgumentError:
                # The refusal is the root's, and all ranks raise it. The group stays usable.
                raise
            except DistError as e:
                self._host.abort(e)
                raise
        return chunks

    def _execute(self, device: int, call: Call) -> None:
        """Do a collective chunk by chunk, in its place in the group's order."""
        # While the backend executes chunk k on this thread, the inputs of chunk k + 1 are copied on
        # one stream, and the results of chunk k - 1 on the other:
        # 1. Load chunk 0.
        # 2. For each chunk: load the next one into the following slot, once the results of the
        #    chunk that had this slot before are on the device; wait for the inputs of the chunk;
        #    let the backend do it; store its results.
        # 3. Wait for the results of the last chunks.
        # An event that was never recorded counts as completed, so the first rounds wait for
        # nothing.
        deadline = time.monotonic() + call.timeout
        chunks = self._plan(call)
        slots: list[_Slot] = []
        with on_device(self._copier.runtime, device):
            streams = self._copier.streams(device)
            error: BaseException | None = None
            try:
                for _ in range(min(_DEPTH, chunks.count)):
                    slots.append(_Slot(self._copier.event(device), self._copier.event(device)))
                self._load(call, chunks, 0, slots[0], streams)
                for k in range(chunks.count):
                    slot = slots[k % len(slots)]
                    if k + 1 < chunks.count:
                        following = slots[(k + 1) % len(slots)]
                        self._copier.wait(following.stored, call, deadline)
                        self._load(call, chunks, k + 1, following, streams)
                    self._copier.wait(slot.loaded, call, deadline)
                    # An exception until this is reset is the backend's: it has failed the group
                    # itself, and MPI may still use the slot's memory.
                    slot.in_backend = True
                    self._host.perform(self._chunk(call, chunks, k, slot, deadline))
                    slot.in_backend = False
                    self._store(call, chunks, k, slot, streams)
                for slot in slots:
                    self._copier.wait(slot.stored, call, deadline)
            except BaseException as e:
                error = e
                # The other ranks wait in the next chunk. Within the backend, the backend itself has
                # failed the group.
                if not any(slot.in_backend for slot in slots):
                    self._host.give_up(call, e)
                raise
            finally:
                self._release(slots, call, device, error)

    def _load(
        self, call: Call, chunks: ChunkPlan, k: int, slot: _Slot, streams: CopyStreams
    ) -> None:
        """Allocate host memory for chunk ``k`` and enqueue the copies of its inputs."""
        unread = call.op.outputs is Arity.ONE_OFF_ROOT and self._rank != call.root
        for buffer in dict.fromkeys((*call.inputs, *call.outputs)):
            ranges = chunks.ranges(buffer, k)
            on_host = self._allocate(
                slot, buffer, sum(count for _, count in ranges), chunks.count == 1
            )
            if buffer in call.inputs and not unread:
                self._copier.enqueue(buffer, ranges, on_host.owner, streams, to_device=False)
        self._copier.runtime.record(slot.loaded, streams.to_host)

    def _allocate(self, slot: _Slot, buffer: Buffer, count: int, whole: bool) -> Buffer:
        """Host memory for a buffer's part of a chunk; it has the buffer's shape if the chunk is the
        whole call."""
        previous = slot.buffers.get(id(buffer))
        if previous is None or previous.owner.size < count * buffer.dtype.itemsize:
            pinned = self._copier.pinned.take(count * buffer.dtype.itemsize)
            slot.memory.append(pinned)
        else:
            pinned = previous.owner
        flat = pinned.bytes[: count * buffer.dtype.itemsize].view(buffer.dtype.storage)
        shape = buffer.shape if whole else flat.shape
        slot.buffers[id(buffer)] = made = Buffer(pinned, buffer.dtype, shape, flat)
        return made

    def _chunk(self, call: Call, chunks: ChunkPlan, k: int, slot: _Slot, deadline: float) -> Call:
        """Chunk ``k`` as a call on host arrays."""
        inputs = tuple(slot.buffers[id(b)] for b in call.inputs)
        outputs = (
            inputs
            if call.outputs is call.inputs
            else tuple(slot.buffers[id(b)] for b in call.outputs)
        )
        # The deadline is that of the whole call, so a later chunk has what is left of it.
        timeout = call.timeout if k == 0 else max(0.001, deadline - time.monotonic())
        chunk = ProxyCall(call, call.op, inputs, outputs, timeout, call.reduce, call.root)
        if call.in_counts is not None:
            chunk.in_counts, chunk.out_counts = (
                chunks.counts(call.inputs, k),
                chunks.counts(call.outputs, k),
            )
            chunk.even = call.even
        # The number of the chunk is a part of the signature: ranks that are in different chunks
        # must not exchange data.
        chunk.signature = call.signature if chunks.count == 1 else hash((call.signature, k))
        return chunk

    def _store(
        self, call: Call, chunks: ChunkPlan, k: int, slot: _Slot, streams: CopyStreams
    ) -> None:
        """Enqueue the copies of the results of chunk ``k``."""
        for buffer in call.outputs:
            pinned = slot.buffers[id(buffer)].owner
            self._copier.enqueue(buffer, chunks.ranges(buffer, k), pinned, streams, to_device=True)
        self._copier.runtime.record(slot.stored, streams.to_device)

    def _release(
        self, slots: Sequence[_Slot], call: Call, device: int, error: BaseException | None
    ) -> None:
        """Release what a call has used: at once if it succeeded, else when nothing uses it any
        more."""
        streams = self._copier.streams(device)
        for slot in slots:
            events = (slot.loaded, slot.stored)
            if error is None:
                self._copier.release(slot.memory, device, events)
            else:
                # A signal's handler may have raised between a copy and the event behind it.
                # Recorded again, the events are behind all copies of the call.
                self._copier.runtime.record(slot.loaded, streams.to_host)
                self._copier.runtime.record(slot.stored, streams.to_device)
                # MPI may use the memory until the process ends: such memory is in no list, so it is
                # neither used again nor freed.
                keeps = (
                    slot.in_backend and self._host.keeps(call) and not isinstance(error, HARMLESS)
                )
                buffers = (*call.inputs, *call.outputs)
                self._copier.retain(() if keeps else slot.memory, buffers, device, events)


class _Unpacking(Completion):
    """A completion that unpacks the results of strided arrays when a thread waits for it, on that
    thread's stream."""

    def __init__(self, done: Completion, calls: tuple[Call, ...], copier: HostCopier) -> None:
        self._done = done
        self._calls = calls
        self._copier = copier
        self._packed = any(b.unpack is not None for call in calls for b in call.outputs)
        self._lock = threading.Lock()

    def done(self) -> bool:
        return self._done.done()

    def wait(self, timeout: float | None) -> None:
        self._done.wait(timeout)
        if self._packed:
            packed = False
            try:
                with self._lock:
                    # One of several threads that wait unpacks.
                    packed, self._packed = self._packed, False
                if packed:
                    self._unpack()
            except BaseException:
                # The next wait unpacks.
                self._packed = packed
                raise

    def _unpack(self) -> None:
        for call in self._calls:
            call.write_back()
            for buffer in call.outputs:
                # The copy from the packed memory may still run when the call is forgotten.
                if buffer.unpack is not None:
                    self._copier.keep(buffer)

    def exception(self) -> BaseException | None:
        return self._done.exception()

    def track(self, entries: Sequence[PendingEntry]) -> None:
        self._done.track(entries)

    def took(self) -> float:
        return self._done.took()

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        self._done.add_done_callback(fn)
