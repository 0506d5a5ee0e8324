"""Functions that ranks run in the tests of threads in NCCL: several at once, and one in NCCL when its group ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import unicoll as dist
from nccl_comm.communicators import communicator
from tests.nccl.nccl_jobs import connect
from tests.simulated_nccl import arrays, ranks

_PATIENCE_S = 60.0
_OVERLAP_S = 0.3


def _two_inside() -> None:
    """Stay in a call until another thread is in NCCL too, or a time has passed."""
    active_calls = ranks.nccl().active_calls
    until = time.monotonic() + _OVERLAP_S
    while len(active_calls.current) < 2 and time.monotonic() < until:
        time.sleep(0.001)


def two_groups_on_two_threads() -> list[Any]:
    """Each thread does all_reduces on a group of its own; both groups are on this rank's device."""
    connect()
    groups: list[Any] = [dist.group.WORLD, dist.new_group()]
    xs = [arrays.full(2, 1.0) for _ in groups]
    for group, x in zip(groups, xs, strict=True):
        dist.all_reduce(x, group=group)
    ranks.simulation().synchronize()
    active_calls = ranks.nccl().active_calls
    active_calls.pause = _two_inside

    def work(i: int) -> None:
        with arrays.Stream():
            dist.all_reduce(xs[i], group=groups[i])
            work = dist.all_reduce(xs[i], group=groups[i], async_op=True)
            assert work is not None
            work.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_S)
    active_calls.pause = lambda: None
    return [x.numpy().tolist() for x in xs]


def stuck_in_a_first_operation() -> str:
    """A thread that does not return from NCCL before the group's deadline; its error."""
    connect()
    dist.barrier()
    ranks.nccl().machine.stuck.set()
    try:
        dist.all_reduce(arrays.full(2, 1.0), timeout=1.0)
    except dist.DistError as e:
        return f"{type(e).__name__}: {e}"
    finally:
        ranks.nccl().machine.stuck.clear()
    return "nothing"


def closed_during_a_sweep() -> list[str]:
    """The group ends while the watchdog queries its state; the faults."""
    connect()
    nccl = ranks.nccl()

    def stay() -> None:
        if threading.current_thread() is not threading.main_thread():
            _two_inside()

    nccl.active_calls.pause = stay
    until = time.monotonic() + _PATIENCE_S
    while not nccl.active_calls.current:
        assert time.monotonic() < until
        time.sleep(0.001)
    dist.destroy_process_group()
    found, ranks.simulation().faults[:] = list(ranks.simulation().faults), []
    return found


def reported_by_nccl_first(victim: int) -> str:
    """NCCL reports a death to the others before the control plane does."""
    communicator._DEATH_NOTICE_S = 60.0
    connect()
    dist.barrier()
    nccl = ranks.nccl()
    if dist.get_rank() == victim:
        nccl.vanish()
        time.sleep(_OVERLAP_S)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        work = dist.all_reduce(arrays.full(2, 1.0), async_op=True)
        assert work is not None
        work.synchronize()
    except dist.DistError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def drop_symmetric_memory() -> list[str]:
    """Symmetric memory whose last reference is dropped while an operation uses it; the faults."""
    connect()
    group: Any = dist.group.WORLD
    sim = ranks.simulation()
    made = group.symmetric_empty((4,), "float32")
    with sim.hold():
        work = dist.all_reduce(made, async_op=True)
        assert work is not None
        work.wait()
        del made, work
        found = list(sim.faults)
    sim.synchronize()
    found = list(sim.faults)
    sim.faults.clear()
    return found
