"""What ranks with a simulated device do in the tests of the NCCL backend's safeguards around NCCL itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import simulated_arrays as arrays
import simulated_ranks
from nccl_jobs import connect
from simulated_streams import LATER, Op

import unicoll as dist
from nccl_comm import communicator, meeting
from nccl_comm.backend import NCCLBackend
from unicoll.testing import worker


def backend_of(group: Any = None) -> NCCLBackend:
    found = (group or dist.group.WORLD)._served[NCCLBackend]
    assert isinstance(found, NCCLBackend)
    return found


def busy(stream: int) -> Callable[[], None]:
    """Put work on a stream that goes on until what is returned is called."""
    sim = simulated_ranks.here()
    over = False

    def body(op: Op) -> Any:
        return None if over else LATER

    op = sim.scheduler.put(sim.cuda.stream(stream), Op("busy", body))

    def finish() -> None:
        nonlocal over
        with sim.scheduler.lock:
            over = True
            if op.running:
                sim.scheduler.finish(op)

    return finish


def await_true(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def on_a_default_stream(handle: int) -> list[Any]:
    """Calls made while another device is current; the arrays are ordered by a default stream of the group's device."""
    me, n = dist.get_rank(), dist.get_world_size()
    with arrays.Stream(handle=handle):
        x = arrays.full(2, 1.0)
        with arrays.device((me + 1) % n):
            dist.all_reduce(x)
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()
            work.synchronize()
        return [x.numpy().tolist(), simulated_ranks.here().cuda.current_device()]


def waited_by_another_thread() -> list[bool]:
    """``wait()`` on the default stream of another thread: whether the arrays are held until the device is done."""
    connect()
    backend = backend_of()
    held = []
    with arrays.Stream(handle=2):
        x = arrays.full(2, 1.0)
        finish = busy(2)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        flight = backend.flights[-1]

        def wait() -> None:
            with arrays.device(x.device), arrays.Stream(handle=2):
                work.wait()
                held.append(bool(flight.calls))

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        finish()
        work.synchronize()
    return held


def late_but_landed() -> bool:
    """A look after the deadline of an operation that has ended, behind one that has not; whether the group failed."""
    connect()
    backend = backend_of()
    first, second = arrays.Stream(), arrays.Stream()
    with first:
        finish = busy(first.ptr)
        dist.all_reduce(arrays.empty(0), timeout=60)
    with second:
        dist.all_reduce(arrays.empty(0), timeout=1)
        second.synchronize()
    backend.sweep(time.monotonic() + 2.0)
    failed = backend.error is not None
    finish()
    simulated_ranks.here().synchronize()
    return failed


def an_error_before_the_news(victim: int) -> str:
    """NCCL reports an error on rank 0, which says so to the test; then the victim is killed."""
    communicator._NEWS_S = 60.0
    connect()
    dist.barrier()
    if dist.get_rank() == victim:
        worker.tell("here")
        threading.Event().wait()
    if dist.get_rank() == 0:
        nccl: Any = simulated_ranks.nccl()
        state = nccl.comm_state

        def telling(comm: int) -> Any:
            found = state(comm)
            if found[1] and nccl.comm_state is telling:
                del nccl.comm_state
                worker.tell("seen")
            return found

        nccl.comm_state = telling
        nccl.inject(6)
    try:
        work = dist.all_reduce(arrays.full(2, 1.0), async_op=True)
        assert work is not None
        work.synchronize()
    except dist.DistError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def a_first_message_between_two_of_three() -> list[str]:
    """Ranks 0 and 1 begin with a message; rank 2 comes when both have said that they wait for it."""
    meeting._SILENCE_S = 0.2
    kept, log = _Kept(), logging.getLogger("unicoll")
    log.addHandler(kept)
    log.propagate = False
    me, store = dist.get_rank(), dist.group.WORLD.job.store  # type: ignore[union-attr]
    x = arrays.full(2, float(me))
    if me < 2:

        def tell() -> None:
            await_true(lambda: kept.said)
            store.set(f"warned/{me}", "")

        thread = threading.Thread(target=tell)
        thread.start()
        if me == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        thread.join()
    else:
        store.wait(["warned/0", "warned/1"], 30)
    dist.all_reduce(x)
    log.removeHandler(kept)
    log.propagate = True
    return [*kept.said, str(x.numpy().tolist())]
