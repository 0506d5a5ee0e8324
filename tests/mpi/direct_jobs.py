"""What ranks do in the tests of CUDA-aware MPI, with a check of the device pointers passed to it.

The simulated device uses host memory, so any MPI library accepts its pointers and stands for a CUDA-aware one. Like a
real one it does not wait for the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

import unicoll as dist
from mpi_comm import collectives, reductions
from tests.nccl import staged
from tests.simulated_nccl import arrays, ranks
from tests.support import worker
from tests.support.outcomes import CallOutcome, outcome_of
from unicoll.arrays.device_flat import DeviceFlat
from unicoll.devices.device_runtime import DeviceError
from unicoll.staging.device_memory import CallMemory
from unicoll.staging.device_pointers import DirectCalls

STAGED = 20_000
"""Bytes up to which lists of arrays are packed in the tests."""
_COUNT = 2000
_handed = 0


def prepare(settings: ranks.Settings) -> None:
    """Called on every rank before it joins."""
    collectives.PACK_LIMIT = reductions.PACK_LIMIT = STAGED  # type: ignore[attr-defined]
    DeviceFlat.__cuda_array_interface__ = property(_watched)  # type: ignore[assignment,method-assign]
    staged.prepare(settings)


_interface: Any = DeviceFlat.__dict__["__cuda_array_interface__"]


def _watched(flat: DeviceFlat) -> dict[str, Any]:
    """Check that no device operation uses the memory of a pointer that is passed to MPI."""
    global _handed
    _handed += 1
    found: dict[str, Any] = _interface.fget(flat)
    here = ranks.simulation()
    block = here.memory.find(flat.ptr) if flat.nbytes else None
    if block is None:
        return found
    start = flat.ptr - block.ptr
    with here.scheduler.lock:
        for access in block.accesses:
            if not access.op.done and access.start < start + flat.nbytes and start < access.stop:
                here.scheduler.fault(f"MPI was given {flat} before {access.op} had been done")
        if here.cuda.current_device() != block.device:
            here.scheduler.fault(f"MPI was given {flat} by a thread whose device is another")
        if block.freed or block.idle:
            here.scheduler.fault(f"MPI was given {flat} of memory that is not allocated")
    return found


def say(words: Sequence[str], settings: ranks.Settings) -> None:
    """Before the ranks join, set ``UNICOLL_MPI_CUDA`` to another value on each."""
    os.environ["UNICOLL_MPI_CUDA"] = words[worker.rank_and_size()[0]]
    prepare(settings)


def faults() -> list[str]:
    """The faults that the simulation has recorded."""
    return ranks.simulation().faults


def ways() -> tuple[int, str]:
    """How many device pointers MPI was given in a few calls, and the text of explain()."""
    before = _handed
    x = arrays.full(_COUNT, 1.0)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    assert x.numpy()[0] == dist.get_world_size()
    return _handed - before, dist.explain()


# --- without one of the waits -------------------------------------------------------------------------------------


def _without_producers(self: DirectCalls, call: Any, device: int, event: int, deadline: float) -> None:
    """Pass the pointer to MPI without waiting for its producers."""
    self._copier.release((), device, (event,))


_copy = CallMemory.copy
_during_copies = ExitStack()
"""Holds the device from the first copy without a wait to the end of the operation."""


def _without_waiting(self: CallMemory, pairs: Any) -> None:
    """Pass the pointer to MPI without waiting for the copies, which begin when the operation has ended."""
    _during_copies.enter_context(ranks.simulation().hold())
    self._copier.wait = lambda *args: None  # type: ignore[method-assign]
    try:
        _copy(self, pairs)
    finally:
        del self._copier.wait


_MUTATIONS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "producers": (DirectCalls, "await_producers", _without_producers),
    "copies": (CallMemory, "copy", _without_waiting),
}


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    owner, method, replacement = _MUTATIONS[name]
    kept = owner.__dict__[method]
    setattr(owner, method, replacement)
    try:
        yield
    finally:
        setattr(owner, method, kept)


def run(program: str, mutation: str | None) -> tuple[list[float], list[str]]:
    """The result of a program, with one wait removed or none, and the faults recorded during it."""
    dist.all_reduce(arrays.full(1, 1.0))  # creates what the first call creates
    here = ranks.simulation()
    here.synchronize()
    with mutated(mutation):
        answer = globals()[program](mutation is not None)
    here.synchronize()
    faults, here.faults[:] = list(here.faults), []
    return answer, faults


def _end(work: Any, mutated: bool) -> None:
    """With the mutation the operation completes while the device is held, since it does not wait for it."""
    if mutated:
        work.wait(timeout=20)


def producer_is_late(mutated: bool) -> list[float]:
    """The array is written on the current stream, by a kernel that runs after the call is made."""
    here = ranks.simulation()
    x = arrays.full(_COUNT, 0.0)
    here.synchronize()
    with here.hold():
        x.fill(float(dist.get_rank() + 1))
        work = dist.all_reduce(x, async_op=True)
        _end(work, mutated)
    work.wait()
    return _ends(x)


def sender_is_late(mutated: bool) -> list[float]:
    """A message is written just before it is sent; its receive has been posted before."""
    here, me = ranks.simulation(), dist.get_rank()
    x = arrays.full(_COUNT, 0.0)
    here.synchronize()
    if me == 0:
        work = dist.irecv(x, 1)
        dist.barrier()
        work.wait()
        return _ends(x)
    dist.barrier()
    if mutated:
        with here.hold():
            x.fill(5.0)
            dist.send(x, 0)
    else:
        x.fill(5.0)
        dist.send(x, 0)
    return [5.0, 5.0]


def copies_are_late(mutated: bool) -> list[float]:
    """Arrays are packed before MPI gets the packed copy."""
    given = [arrays.full(100, float(10 * dist.get_rank() + i)) for i in range(2)]
    out = arrays.full(100, 0.0)
    with _during_copies:
        dist.reduce_scatter(out, given)
    return _ends(out)


def _ends(x: arrays.Array) -> list[float]:
    found = x.numpy()
    return [float(found[0]), float(found[-1])]


# --- device pointers -----------------------------------------------------------------------------------------------


def addresses() -> dict[str, int]:
    """How many device pointers MPI is given, by kind of operation."""
    me, n = dist.get_rank(), dist.get_world_size()
    x, wide = arrays.full(6, 1.0, np.float32), arrays.full(6 * n, 1.0, np.float32)
    whole = arrays.full(6, me, np.int64)
    flags, half = arrays.full(6, True, np.bool_), arrays.full(6, 1.0, np.float16)
    large, other = arrays.full(_COUNT, 1.0), arrays.full(_COUNT, 0.0)
    mean, scaled = dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM(0.5)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(wide, x),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, wide),
        "strided": lambda: dist.all_reduce(wide[::2]),
        "bool": lambda: dist.all_reduce(flags),
        "float16 moved": lambda: dist.broadcast(half, 0),
        "float16 reduced": lambda: dist.all_reduce(half),
        "AVG": lambda: dist.all_reduce(x, mean),
        "PREMUL_SUM": lambda: dist.all_reduce(x, scaled),
        "MAX": lambda: dist.all_reduce(whole, dist.ReduceOp.MAX),
        "MAX with NaN": lambda: dist.all_reduce(x, dist.ReduceOp.MAX),
        "messages": lambda: _swap(large, other, me, n),
        "small messages": lambda: _swap(x, x.copy(), me, n),
    }
    found = {}
    for name, call in calls.items():
        ranks.simulation().synchronize()
        before = _handed
        call()
        found[name] = _handed - before
    return found


def _swap(x: arrays.Array, y: arrays.Array, me: int, n: int) -> None:
    coming = dist.irecv(y, (me - 1) % n)
    ranks.simulation().synchronize()
    dist.send(x, (me + 1) % n)
    coming.wait()


def posted() -> list[str]:
    """The nonblocking MPI collectives that get device pointers."""
    communicator: Any = dist.group.WORLD._backends.for_device("cpu").communicator  # type: ignore[union-attr,attr-defined]
    kept, found = dict(communicator._nonblocking), []

    def watched(name: str) -> Callable[..., Any]:
        def post(*args: Any) -> Any:
            before = _handed
            request = kept[name](*args)
            if _handed > before:
                found.append(name)
            return request

        return post

    communicator._nonblocking.update({name: watched(name) for name in kept if name not in ("Send", "Recv")})
    n, me = dist.get_world_size(), dist.get_rank()
    x, wide = arrays.full(8, 1.0), arrays.full(8 * n, float(me))
    many = [arrays.full(4 + r, 1.0) for r in range(n)]
    calls: list[Callable[[bool], Any]] = [
        lambda a: dist.all_reduce(x, async_op=a),
        lambda a: dist.broadcast(x, 0, async_op=a),
        lambda a: dist.reduce(x, 0, async_op=a),
        lambda a: dist.all_gather_into_tensor(wide, x, async_op=a),
        lambda a: dist.all_gather(many, many[me].copy(), async_op=a),
        lambda a: dist.reduce_scatter_tensor(x, wide, async_op=a),
        lambda a: dist.all_to_all_single(wide, wide.copy(), async_op=a),
        lambda a: dist.all_reduce(np.ones(3), async_op=a),
    ]
    for call in calls:
        call(False)
        call(True).wait()
    communicator._nonblocking.update(kept)
    return found


def one_on_the_host() -> CallOutcome:
    """A collective with a device array on all ranks but rank 0."""
    group = dist.new_group()
    x: Any = arrays.full(5, 1.0) if dist.get_rank() else np.ones(5)
    story = outcome_of(lambda: dist.all_reduce(x, group=group, timeout=20))
    dist.destroy_process_group(group)
    return story


def receives_while_in_use() -> tuple[int, bool]:
    """Receives into arrays with pending device writes return at once, and keep their order.

    Returns how many device pointers MPI was given, and True if the messages are in the right arrays.
    """
    here, me = ranks.simulation(), dist.get_rank()
    peer = 1 - me
    first, second = arrays.full(_COUNT, 0.0), arrays.full(_COUNT, 0.0)
    given = [arrays.full(_COUNT, 10.0 * me + i + 1) for i in range(2)]
    here.synchronize()
    before = _handed
    with here.hold():
        first.fill(-1.0)
        works = [dist.irecv(first, peer), dist.irecv(second, peer)]
    received = _handed - before
    for x in given:
        dist.send(x, peer)
    for work in works:
        work.wait()
    right = [10.0 * peer + 1] * 2 == _ends(first) and [10.0 * peer + 2] * 2 == _ends(second)
    return received, right


def room(times: int) -> list[int]:
    """Bytes of device memory that the group holds after each of several operations that need temporary memory."""
    n, held = dist.get_world_size(), []
    for _ in range(times):
        given = [arrays.full(500, float(i)) for i in range(n)]
        taken = [arrays.full(500, -1.0) for _ in range(n)]
        dist.all_to_all(taken, given)
        held.append(dist.group.WORLD.staging_bytes()["cuda"])
    return held


def device_fails(who: int) -> CallOutcome:
    """The device of one rank fails while arrays are packed during an operation."""
    if dist.get_rank() == who:
        CallMemory.copy = _fail  # type: ignore[method-assign]
    given = [arrays.full(100, 1.0) for _ in range(dist.get_world_size())]
    out = arrays.full(100, 0.0)
    work = dist.reduce_scatter(
        out, given, async_op=True
    )  # a blocking call could be inside MPI, where it cannot be cancelled
    return outcome_of(lambda: work.wait(timeout=20))


def _fail(self: CallMemory, pairs: Any) -> None:
    raise DeviceError("cudaErrorECCUncorrectable: the device has had enough")


def captured_message() -> list[CallOutcome]:
    """Messages during a graph capture."""
    peer = 1 - dist.get_rank()
    with arrays.Stream() as stream:
        x = arrays.full(_COUNT, 1.0)
        stream.synchronize()
        here = ranks.simulation()
        here.begin_capture(stream.ptr)
        try:
            return [outcome_of(lambda: dist.isend(x, peer)), outcome_of(lambda: dist.irecv(x, peer))]
        finally:
            here.end_capture(stream.ptr)
