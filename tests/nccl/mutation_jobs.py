"""Programs of the mutation tests, whose results are wrong every time if one safeguard of the backend is removed.

Each program posts all its operations while the device is held, so that timing has no influence; then the policy of the
streams decides. A program returns its results and the faults of the simulation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

import unicoll as dist
from nccl_comm import group_resources
from nccl_comm.backend import NCCLBackend
from nccl_comm.communicators.communicator import Communicator
from nccl_comm.in_flight import InFlight
from nccl_comm.library import interface
from nccl_comm.memory.symmetric import SymmetricMemory
from nccl_comm.stream_completion import StreamCompletion
from nccl_comm.stream_order import StreamOrder
from nccl_comm.supervision import Supervision
from tests.nccl import nccl_safety_jobs
from tests.nccl.nccl_safety_jobs import await_true, busy
from tests.simulated_nccl import arrays, ranks, rendezvous
from tests.simulated_nccl.reductions import NAMES, Contribution, Signature, results
from unicoll.staging.copier import HostCopier
from unicoll.testing.cases import Case, run_cases
from unicoll.testing.reference import Arithmetic

_COUNT = 1000
Outcome = tuple[Any, list[str]]


# --- removing safeguards ------------------------------------------------------------------------------------------


def _without_producers(self: StreamOrder, *args: Any) -> None:
    """The group's stream does not wait for the streams that write the arrays."""


def _without_end(self: StreamCompletion, *args: Any) -> None:
    """``wait()`` does not make the current stream wait."""


@contextmanager
def _without_group(self: Communicator) -> Iterator[list[int]]:
    """Sends and receives go to NCCL one by one."""
    yield []


_hold = StreamCompletion.__init__


def _without_hold(self: StreamCompletion, *args: Any, **kwargs: Any) -> None:
    """No reference keeps the arrays alive while the device uses them."""
    _hold(self, *args, **kwargs)
    self._calls = ()
    self._work.release()


_wait = StreamCompletion.wait


def _with_early_release(self: StreamCompletion, timeout: float | None) -> None:
    """The arrays are released at ``wait()``, on whichever stream that was called."""
    _wait(self, timeout)
    self._work.release()


def _without_retain(self: Any, *args: Any) -> None:
    """The memory of packed results is released at the end of the operation, while it may still be copied."""


class _LockPerGroup:
    """A lock for each group, not for each device."""

    def __getitem__(self, device: int) -> Any:
        return threading.RLock()


_MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "device lock": (group_resources, "_device_locks", _LockPerGroup()),
    "idle": (Supervision, "await_idle", lambda self, what, timeout: None),
    "revoke": (Communicator, "_revoke", lambda self: False),
    "death notice": (Communicator, "await_death_notice", lambda self, code, call: None),
    "overdue": (InFlight, "_is_overdue", lambda self, work, now: now >= work.deadline),
    "unused": (SymmetricMemory, "_unused", lambda self, one, deadline: True),
    "default streams": (StreamOrder, "device_context", lambda self, stream: nullcontext()),
    "retain": (InFlight, "retain", _without_retain),
    "staged retain": (HostCopier, "keep", _without_retain),
    "producers": (StreamOrder, "wait_for_producers", _without_producers),
    "end": (StreamCompletion, "_order", _without_end),
    "hold": (StreamCompletion, "__init__", _without_hold),
    "release": (StreamCompletion, "wait", _with_early_release),
    "group": (Communicator, "group", _without_group),
}


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    owner, method, replacement = _MUTATIONS[name]
    kept = owner.__dict__[method]  # a method of another name would not be a mutation
    setattr(owner, method, replacement)
    try:
        yield
    finally:
        setattr(owner, method, kept)


def run(program: str, mutation: str | None) -> Outcome:
    """A program's result, with one safeguard removed or none, and the faults recorded since it began."""
    connect()
    with mutated(mutation):
        answer = globals()[program]()
    sim = ranks.simulation()
    sim.synchronize()
    faults, sim.faults[:] = list(sim.faults), []
    return answer, faults


def safety(mutation: str, job: str, *args: Any) -> Any:
    """The result of a function of :mod:`nccl_safety_jobs`, with one safeguard removed."""
    with mutated(mutation):
        return getattr(nccl_safety_jobs, job)(*args)


def connect() -> None:
    """Operations that need the device to run, before it is held."""
    x = arrays.full(1, 1.0)
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.synchronize()
    ranks.simulation().synchronize()


def _asynchronous(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    work = call(*args, async_op=True, **kwargs)
    assert work is not None
    return work


# --- programs -------------------------------------------------------------------------------------------------------


def reads_what_was_written() -> list[float]:
    """The array is written on the current stream right before; the sum is right if the group's stream waits."""
    with ranks.simulation().hold():
        x = arrays.full(_COUNT, float(dist.get_rank() + 1))
        _asynchronous(dist.all_reduce, x).wait()
    return _ends(x)


def result_is_read() -> list[float]:
    """The result is used on the current stream right after ``wait()``."""
    x = arrays.full(_COUNT, float(dist.get_rank() + 1))
    ranks.simulation().synchronize()
    with ranks.simulation().hold():
        _asynchronous(dist.all_reduce, x).wait()
        y = x * 2
    return _ends(y)


def memory_is_reused() -> list[float]:
    """The only references to the input are the backend's, when its memory is requested again on its own stream.

    ``wait()`` was called on another stream, so the stream of the input is not ordered after the operation.
    """
    world = dist.get_world_size()
    elsewhere = arrays.Stream()
    small = arrays.full(1, 1.0)
    out = arrays.full(world * _COUNT, 0.0)
    ranks.simulation().synchronize()
    with ranks.simulation().hold():
        x = arrays.full(_COUNT, float(dist.get_rank() + 1))
        work = _asynchronous(dist.all_gather_into_tensor, out, x)
        with elsewhere:
            work.wait()
        del work, x
        with elsewhere:
            _asynchronous(dist.all_reduce, small).wait()  # the group forgets its last operation
        reused = arrays.full(_COUNT, 99.0)
    with elsewhere:
        found = _ends(out)
    del reused
    return found


def unpacked_on_another_stream() -> list[float]:
    """A strided result is copied from packed memory on another stream, which is late, when that memory is reused."""
    elsewhere = arrays.Stream()
    base = arrays.full(2 * _COUNT, 1.0)
    ranks.simulation().synchronize()
    work = _asynchronous(dist.all_reduce, base[::2])
    with elsewhere:
        finish = busy(elsewhere.ptr)
        work.wait()
    await_true(work.is_completed)
    for backend in dist.group.WORLD.backends:  # type: ignore[union-attr]
        if isinstance(backend, NCCLBackend):
            await_true(lambda backend=backend: not backend.resources.in_flight.operations)
    del work
    dist.all_reduce(arrays.full(1, 1.0))  # the group forgets its last operation
    reused = arrays.full(_COUNT, 99.0)
    ranks.simulation().synchronize_stream(0)
    finish()
    with elsewhere:
        found = _ends(base[::2])
    del reused
    return found


def exchange_with_neighbours() -> list[float]:
    """Every rank sends to the next one and receives from the one before, in one batch."""
    me, world = dist.get_rank(), dist.get_world_size()
    x, y = arrays.full(_COUNT, float(me)), arrays.full(_COUNT, -1.0)
    with ranks.simulation().hold():
        ops = [dist.P2POp(dist.isend, x, (me + 1) % world), dist.P2POp(dist.irecv, y, (me - 1) % world)]
        works = dist.batch_isend_irecv(ops)
        for work in works:
            work.wait()
    for work in works:
        work.synchronize()  # an exchange that hangs has no result; only the host notices
    return _ends(y)


def exchange_with_all() -> list[float]:
    """An exchange of different sizes, for which NCCL has no single function."""
    me, world = dist.get_rank(), dist.get_world_size()
    given = [arrays.full(1 + me, float(me)) for _ in range(world)]
    taken = [arrays.full(1 + r, -1.0) for r in range(world)]
    with ranks.simulation().hold():
        _asynchronous(dist.all_to_all, taken, given).wait()
    return [float(v) for t in taken for v in t.numpy()]


def _ends(x: arrays.Array) -> list[float]:
    """The first and the last element."""
    found = x.numpy()
    return [float(found[0]), float(found[-1])]


# --- wrong arithmetic -----------------------------------------------------------------------------------------------

CASES = (
    Case("all_reduce", "float32", "SUM", _COUNT),
    Case("all_reduce", "float16", "AVG", _COUNT, async_op=True),
    Case("reduce_scatter_tensor", "float32", "SUM", _COUNT),
    Case("reduce", "float16", "SUM", _COUNT),
    Case("all_reduce", "float32", "MIN", _COUNT, special=True),
    Case("reduce_scatter_tensor", "int32", "AVG", _COUNT),
)


def _with_a_wrong_element(signature: Signature, given: Sequence[Contribution]) -> list[bytes]:
    """The first byte of every result is that of another element."""
    size = len(given[0][0]) // signature.count
    return [r and r[size * 7 : size * 8] + r[size:] for r in results(signature, given)]


def _without_a_contribution(signature: Signature, given: Sequence[Contribution]) -> list[bytes]:
    """The second rank's elements are taken for the first's."""
    return results(signature, [given[0], given[0], *given[2:]])


def _without_division(signature: Signature, given: Sequence[Contribution]) -> list[bytes]:
    """An average is the sum."""
    op = interface.SUM if signature.op == interface.AVG else signature.op
    return results(replace(signature, op=op), given)


def _in_half_precision(signature: Signature, given: Sequence[Contribution]) -> list[bytes]:
    """float32 is rounded to float16."""
    made = results(signature, given)
    if NAMES[signature.dtype] != "float32":
        return made
    return [np.frombuffer(r, np.float32).astype(np.float16).astype(np.float32).tobytes() for r in made]


_ARITHMETIC = {
    "element": _with_a_wrong_element,
    "contribution": _without_a_contribution,
    "division": _without_division,
    "precision": _in_half_precision,
}


def judged(error: str | None, arithmetic: Arithmetic) -> list[bool]:
    """For each of a few cases True if it is right, with an error in NCCL's arithmetic or none."""
    connect()
    rendezvous.results = results if error is None else _ARITHMETIC[error]
    try:
        verdicts = run_cases([replace(c, family="simulated", arithmetic=arithmetic) for c in CASES])
    finally:
        dist.barrier()
        rendezvous.results = results
    return [verdict is not None and verdict[0] is None for verdict in verdicts]


# --- no call blocks the host ----------------------------------------------------------------------------------------


def enqueue_all_operations() -> list[str]:
    """Every operation, blocking and not, while the device is held; this thread's calls that query or await it."""
    sim, me, n = ranks.simulation(), dist.get_rank(), dist.get_world_size()
    connect()

    def one(count: int = 4) -> Any:
        return arrays.full(count, float(me))

    def many() -> list[Any]:
        return [one() for _ in range(n)]

    calls: list[Callable[[bool], Any]] = [
        lambda a: dist.all_reduce(one(), async_op=a),
        lambda a: dist.broadcast(one(), 0, async_op=a),
        lambda a: dist.reduce(one(), 0, async_op=a),
        lambda a: dist.all_gather(many(), one(), async_op=a),
        lambda a: dist.all_gather_into_tensor(one(4 * n), one(), async_op=a),
        lambda a: dist.reduce_scatter(one(), many(), async_op=a),
        lambda a: dist.reduce_scatter_tensor(one(), one(4 * n), async_op=a),
        lambda a: dist.all_to_all(many(), many(), async_op=a),
        lambda a: dist.all_to_all_single(one(4 * n), one(4 * n), async_op=a),
        lambda a: dist.gather(one(), many() if me == 0 else None, 0, async_op=a),
        lambda a: dist.scatter(one(), many() if me == 0 else None, 0, async_op=a),
        lambda a: dist.all_reduce(one(8)[::2], async_op=a),
        lambda a: dist.all_reduce_coalesced([one(), one()], async_op=a),
    ]
    sim.scheduler.forget()
    with sim.hold():
        for call in calls:
            call(False)
            call(True).wait()
    mine = [b for b in sim.scheduler.trace if b.thread == threading.current_thread().name]
    blocked = [f"{b.call} {b.what} in {b.where}" for b in mine]
    sim.synchronize()
    return blocked + sim.faults
