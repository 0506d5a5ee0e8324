"""What ranks do in the tests of threads within NCCL: several at once, and one that is in there when its group ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import simulated_arrays as arrays
import simulated_ranks
from nccl_jobs import connect

import unicoll as dist
from nccl_comm import communicator

_PATIENCE_S = 20.0
_MEETING_S = 0.3


def _two_inside() -> None:
    """A call stays until another thread is in NCCL, too, or does not come."""
    visits = simulated_ranks.nccl().visits
    until = time.monotonic() + _MEETING_S
    while len(visits._now) < 2 and time.monotonic() < until:
        time.sleep(0.001)


def two_groups_on_two_threads() -> list[Any]:
    """Each thread does all_reduces on a group of its own; both groups are on this rank's device."""
    connect()
    groups: list[Any] = [dist.group.WORLD, dist.new_group()]
    xs = [arrays.full(2, 1.0) for _ in groups]
    for group, x in zip(groups, xs, strict=True):
        dist.all_reduce(x, group=group)
    simulated_ranks.here().synchronize()
    visits = simulated_ranks.nccl().visits
    visits.pause = _two_inside

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
    visits.pause = lambda: None
    return [x.numpy().tolist() for x in xs]


def stuck_in_a_first_operation() -> str:
    """A thread that NCCL does not let out before the group's deadline; what it is told."""
    connect()
    dist.barrier()
    simulated_ranks.nccl().machine.stuck.set()
    try:
        dist.all_reduce(arrays.full(2, 1.0), timeout=1.0)
    except dist.DistError as e:
        return f"{type(e).__name__}: {e}"
    finally:
        simulated_ranks.nccl().machine.stuck.clear()
    return "nothing"


def closed_while_looked_at() -> list[str]:
    """The group ends while the watchdog asks for its state; what is wrong."""
    connect()
    nccl = simulated_ranks.nccl()

    def stay() -> None:
        if threading.current_thread() is not threading.main_thread():
            _two_inside()

    nccl.visits.pause = stay
    until = time.monotonic() + _PATIENCE_S
    while not nccl.visits._now:
        assert time.monotonic() < until
        time.sleep(0.001)
    dist.destroy_process_group()
    found, simulated_ranks.here().faults[:] = list(simulated_ranks.here().faults), []
    return found


def missed_by_nccl_first(victim: int) -> str:
    """NCCL tells the others of a death before anybody else does."""
    communicator._NEWS_S = 60.0
    connect()
    dist.barrier()
    nccl = simulated_ranks.nccl()
    nccl.machine.remote_errors = True
    if dist.get_rank() == victim:
        nccl.vanish()
        time.sleep(_MEETING_S)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        work = dist.all_reduce(arrays.full(2, 1.0), async_op=True)
        assert work is not None
        work.synchronize()
    except dist.DistError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def drop_symmetric_memory() -> list[str]:
    """Memory of NCCL's own whose last reference goes while the device has work with it; what is wrong."""
    connect()
    group: Any = dist.group.WORLD
    sim = simulated_ranks.here()
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
