"""What ranks do in the mutation checks: programs that a backend with one safeguard taken out gets wrong every time.

Each program puts all its work in place while the device is held, so nothing depends on who is faster; then the policy
of the streams decides. A program answers what it computed and what the simulation found wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import nccl_safety_jobs
import numpy as np
import simulated_arrays as arrays
import simulated_ranks
import simulated_rooms
from nccl_safety_jobs import await_true, busy
from simulated_reduce import NAMES, Given, Signature, results

import unicoll as dist
from nccl_comm import api, lifecycle
from nccl_comm.backend import NCCLBackend
from nccl_comm.communicator import Communicator
from nccl_comm.flights import StreamCompletion
from nccl_comm.lifecycle import Supervised
from nccl_comm.memory import SymmetricMemory
from unicoll.dock import Dock
from unicoll.testing.cases import Case, run_cases
from unicoll.testing.reference import Arithmetic

_COUNT = 1000
Outcome = tuple[Any, list[str]]


# --- taking safeguards out ------------------------------------------------------------------------------------------


def _without_producers(self: NCCLBackend, *args: Any) -> None:
    """The group's stream does not wait for whatever writes the arrays."""


def _without_end(self: StreamCompletion, *args: Any) -> None:
    """``wait()`` does not let the current stream wait."""


@contextmanager
def _without_group(self: Communicator) -> Iterator[list[int]]:
    """Sends and receives go to NCCL one by one."""
    yield []


_hold = StreamCompletion.__init__


def _without_hold(self: StreamCompletion, *args: Any, **kwargs: Any) -> None:
    """Nothing keeps the arrays alive while the device needs them."""
    _hold(self, *args, **kwargs)
    self._calls = ()
    self._flight.release()


_wait = StreamCompletion.wait


def _with_early_release(self: StreamCompletion, timeout: float | None) -> None:
    """The arrays go at ``wait()``, whichever stream it was called on."""
    _wait(self, timeout)
    self._flight.release()


def _without_keep(self: Any, *args: Any) -> None:
    """The memory of packed results goes when the operation has ended, and may still be copied from."""


class _OneLockEach:
    """Every group has a lock of its own, and not its device."""

    def __getitem__(self, device: int) -> Any:
        return threading.RLock()


_MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "turn": (lifecycle, "_turns", _OneLockEach()),
    "idle": (Supervised, "await_idle", lambda self, what, timeout: None),
    "revoke": (Communicator, "revoke", lambda self: False),
    "news": (Communicator, "await_news", lambda self, code, call: None),
    "late": (Supervised, "_late", lambda self, flight, now: now >= flight.deadline),
    "unused": (SymmetricMemory, "_unused", lambda self, one, deadline: True),
    "default streams": (NCCLBackend, "_context_of", lambda self, stream: nullcontext()),
    "keep": (NCCLBackend, "keep", _without_keep),
    "staged keep": (Dock, "keep", _without_keep),
    "producers": (NCCLBackend, "_await_producers", _without_producers),
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
    """A program's answer, with one safeguard taken out or none, and the faults on record since it began."""
    connect()
    with mutated(mutation):
        answer = globals()[program]()
    sim = simulated_ranks.here()
    sim.synchronize()
    faults, sim.faults[:] = list(sim.faults), []
    return answer, faults


def safety(mutation: str, job: str, *args: Any) -> Any:
    """The answer of one of the jobs of :mod:`nccl_safety_jobs`, with one safeguard taken out."""
    with mutated(mutation):
        return getattr(nccl_safety_jobs, job)(*args)


def connect() -> None:
    """What needs the device to run, before it is held."""
    x = arrays.full(1, 1.0)
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.synchronize()
    simulated_ranks.here().synchronize()


def _asynchronous(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    work = call(*args, async_op=True, **kwargs)
    assert work is not None
    return work


# --- programs -------------------------------------------------------------------------------------------------------


def reads_what_was_written() -> list[float]:
    """The array is written on the current stream right before; the sum is right if the group's stream waits."""
    with simulated_ranks.here().hold():
        x = arrays.full(_COUNT, float(dist.get_rank() + 1))
        _asynchronous(dist.all_reduce, x).wait()
    return _ends(x)


def result_is_read() -> list[float]:
    """The result is used on the current stream right after ``wait()``."""
    x = arrays.full(_COUNT, float(dist.get_rank() + 1))
    simulated_ranks.here().synchronize()
    with simulated_ranks.here().hold():
        _asynchronous(dist.all_reduce, x).wait()
        y = x * 2
    return _ends(y)


def memory_is_reused() -> list[float]:
    """The only references to the input are the backend's, when its memory is asked for again on its own stream.

    ``wait()`` was called on another stream, so the stream of the input knows nothing of the operation's end.
    """
    world = dist.get_world_size()
    elsewhere = arrays.Stream()
    small = arrays.full(1, 1.0)
    out = arrays.full(world * _COUNT, 0.0)
    simulated_ranks.here().synchronize()
    with simulated_ranks.here().hold():
        x = arrays.full(_COUNT, float(dist.get_rank() + 1))
        work = _asynchronous(dist.all_gather_into_tensor, out, x)
        with elsewhere:
            work.wait()
        del work, x
        with elsewhere:
            _asynchronous(dist.all_reduce, small).wait()  # the group looks at something else
        reused = arrays.full(_COUNT, 99.0)
    with elsewhere:
        found = _ends(out)
    del reused
    return found


def unpacked_elsewhere() -> list[float]:
    """A strided result is copied to its place on another stream, which is late, when its packed memory is asked for."""
    elsewhere = arrays.Stream()
    base = arrays.full(2 * _COUNT, 1.0)
    simulated_ranks.here().synchronize()
    work = _asynchronous(dist.all_reduce, base[::2])
    with elsewhere:
        finish = busy(elsewhere.ptr)
        work.wait()
    await_true(work.is_completed)
    for backend in dist.group.WORLD._served.values():  # type: ignore[union-attr]
        if isinstance(backend, NCCLBackend):
            await_true(lambda backend=backend: not backend.flights)
    del work
    dist.all_reduce(arrays.full(1, 1.0))  # the group looks at something else
    reused = arrays.full(_COUNT, 99.0)
    simulated_ranks.here().synchronize_stream(0)
    finish()
    with elsewhere:
        found = _ends(base[::2])
    del reused
    return found


def neighbours_exchange() -> list[float]:
    """Every rank sends to the next one and receives from the one before, in one batch."""
    me, world = dist.get_rank(), dist.get_world_size()
    x, y = arrays.full(_COUNT, float(me)), arrays.full(_COUNT, -1.0)
    with simulated_ranks.here().hold():
        ops = [dist.P2POp(dist.isend, x, (me + 1) % world), dist.P2POp(dist.irecv, y, (me - 1) % world)]
        works = dist.batch_isend_irecv(ops)
        for work in works:
            work.wait()
    for work in works:
        work.synchronize()  # an exchange that hangs has no result; only the host learns of it
    return _ends(y)


def everyone_exchanges() -> list[float]:
    """An exchange of sizes that differ, which no single call of NCCL does."""
    me, world = dist.get_rank(), dist.get_world_size()
    given = [arrays.full(1 + me, float(me)) for _ in range(world)]
    taken = [arrays.full(1 + r, -1.0) for r in range(world)]
    with simulated_ranks.here().hold():
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


def _with_a_wrong_element(signature: Signature, given: Sequence[Given]) -> list[bytes]:
    """The first byte of every result is that of another element."""
    size = len(given[0][0]) // signature.count
    return [r and r[size * 7 : size * 8] + r[size:] for r in results(signature, given)]


def _without_a_contribution(signature: Signature, given: Sequence[Given]) -> list[bytes]:
    """The second rank's elements are taken for the first's."""
    return results(signature, [given[0], given[0], *given[2:]])


def _without_division(signature: Signature, given: Sequence[Given]) -> list[bytes]:
    """An average is the sum."""
    op = api.SUM if signature.op == api.AVG else signature.op
    return results(replace(signature, op=op), given)


def _in_half_precision(signature: Signature, given: Sequence[Given]) -> list[bytes]:
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
    """Whether each of a few cases is right, where NCCL makes an error, or none."""
    connect()
    simulated_rooms.results = results if error is None else _ARITHMETIC[error]
    try:
        verdicts = run_cases([replace(c, family="simulated", arithmetic=arithmetic) for c in CASES])
    finally:
        dist.barrier()
        simulated_rooms.results = results
    return [verdict is not None and verdict[0] is None for verdict in verdicts]


# --- no call blocks the host ----------------------------------------------------------------------------------------


def enqueue_everything() -> list[str]:
    """Every operation, blocking and not, while the device is held; this thread's calls that asked or awaited it."""
    sim, me, n = simulated_ranks.here(), dist.get_rank(), dist.get_world_size()
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
