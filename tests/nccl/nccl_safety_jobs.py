"""Functions that ranks with a simulated device run in the tests of the NCCL backend's safeguards."""

from __future__ import annotations

import gc
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import unicoll as dist
from nccl_comm import supervision
from nccl_comm.backend import NCCLBackend
from nccl_comm.communicators import agreement, communicator
from nccl_comm.group_resources import GroupResources
from tests.nccl.nccl_jobs import connect
from tests.simulated_nccl import arrays, ranks
from tests.simulated_nccl.communicators import Result
from tests.simulated_nccl.streams import LATER, Op
from tests.support import worker
from unicoll.api import world


def backend_of(group: Any = None) -> NCCLBackend:
    found = (group or dist.group.WORLD)._backends.for_device("cuda")
    assert isinstance(found, NCCLBackend)
    return found


def resources_of(group: Any = None) -> GroupResources:
    found = backend_of(group).resources
    assert found is not None
    return found


def busy(stream: int) -> Callable[[], None]:
    """Put an operation on a stream that runs until the returned function is called."""
    sim = ranks.simulation()
    finished = False

    def body(op: Op) -> Any:
        return None if finished else LATER

    op = sim.scheduler.put(sim.cuda.stream(stream), Op("busy", body))

    def finish() -> None:
        nonlocal finished
        with sim.scheduler.lock:
            finished = True
            if op.running:
                sim.scheduler.finish(op)

    return finish


def await_true(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def sweep(backend: NCCLBackend, now: float) -> None:
    """Sweep a group on this thread, in the watchdog's place."""
    supervision = backend.supervision
    assert supervision.watchdog is not None
    supervision.watchdog.unwatch(supervision)
    supervision.sweep(now)
    supervision.watchdog.watch(supervision)


def watchdog_fails() -> str:
    """The watchdog of rank 0 raises when it looks at a group: how an operation that never ends ends."""
    connect()
    backend = backend_of()
    if dist.get_rank() == 0:

        def fail(resources: Any, now: float) -> None:
            raise OSError("injected")

        backend.supervision._check_communicator = fail  # type: ignore[method-assign]
    await_true(lambda: backend._state.error is not None)
    try:
        dist.all_reduce(arrays.full(2, 1.0))
    except dist.DistError as e:
        return str(e)
    return "nothing"


def on_a_default_stream(handle: int) -> list[Any]:
    """Calls while another device is current; the arrays are ordered by a default stream of the group's device."""
    me, n = dist.get_rank(), dist.get_world_size()
    with arrays.Stream(handle=handle):
        x = arrays.full(2, 1.0)
        with arrays.device((me + 1) % n):
            dist.all_reduce(x)
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()
            work.synchronize()
        return [x.numpy().tolist(), ranks.simulation().cuda.current_device()]


def waited_by_another_thread() -> list[bool]:
    """``wait()`` on the default stream of another thread: True if the arrays are kept until the device is done."""
    connect()
    kept = []
    with arrays.Stream(handle=2):
        x = arrays.full(2, 1.0)
        finish = busy(2)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        pending = resources_of().in_flight.operations[-1]

        def wait() -> None:
            with arrays.device(x.device), arrays.Stream(handle=2):
                work.wait()
                kept.append(bool(pending.calls))

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        finish()
        work.synchronize()
    return kept


def late_but_ended() -> bool:
    """A sweep after the deadline of an operation that has ended, behind one that has not; True if the group failed."""
    connect()
    backend = backend_of()
    first, second = arrays.Stream(), arrays.Stream()
    with first:
        finish = busy(first.ptr)
        dist.all_reduce(arrays.empty(0), timeout=60)
    with second:
        dist.all_reduce(arrays.empty(0), timeout=30)
        second.synchronize()
    sweep(backend, time.monotonic() + 31.0)
    failed = backend._state.error is not None
    finish()
    ranks.simulation().synchronize()
    return failed


def warm_up() -> None:
    """Connect the group."""
    connect()
    dist.barrier()


def an_error_of_a_peer() -> None:
    """NCCL reports that a peer has ended, though none has died."""
    ranks.nccl().inject(6)
    dist.all_reduce(arrays.full(2, 1.0))
    dist.barrier()


def an_error_before_the_death_notice(victim: int) -> str:
    """NCCL reports an error on rank 0, which notifies the test; then the victim is killed."""
    communicator._DEATH_NOTICE_S = 60.0
    connect()
    dist.barrier()
    if dist.get_rank() == victim:
        worker.send_note("ready")
        threading.Event().wait()
    if dist.get_rank() == 0:
        nccl: Any = ranks.nccl()
        state = nccl.comm_state

        def notifying(comm: int) -> Any:
            found = state(comm)
            if found[1] and nccl.comm_state is notifying:
                del nccl.comm_state
                worker.send_note("seen")
            return found

        nccl.comm_state = notifying
        nccl.inject(6)
    try:
        work = dist.all_reduce(arrays.full(2, 1.0), async_op=True)
        assert work is not None
        work.synchronize()
    except dist.DistError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def split_without_a_member(victim: int, blocking: bool) -> None:
    """Ranks notify the test when they split a group; the victim, which is killed, takes no part in that."""
    options = {"blocking": blocking}
    group: Any = dist.new_group(
        backend="cuda:nccl", pg_options=options, device_id=dist.get_rank(), timeout=600
    )
    if dist.get_rank() == victim:
        worker.send_note("ready")
        threading.Event().wait()
    nccl: Any = ranks.nccl()
    split = nccl.comm_split

    def notifying(*arguments: Any) -> Any:
        worker.send_note("in a split")
        return split(*arguments)

    nccl.comm_split = notifying
    dist.split_group(group, [[0, 1]], pg_options=options)


class _Recorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def recorded_log() -> Iterator[list[str]]:
    """The messages of unicoll's log."""
    recorder, log = _Recorder(), logging.getLogger("unicoll")
    log.addHandler(recorder)
    log.propagate = False
    try:
        yield recorder.messages
    finally:
        log.removeHandler(recorder)
        log.propagate = True


def a_first_message_between_two_of_three() -> list[str]:
    """Ranks 0 and 1 begin with a send and a receive; rank 2 joins once both have logged that they wait for it."""
    agreement.WARNING_S = 0.2
    me, store = dist.get_rank(), dist.group.WORLD.job.store  # type: ignore[union-attr]
    x = arrays.full(2, float(me))
    with recorded_log() as messages:

        def warnings_of_members() -> list[str]:
            return [message for message in messages if "waits for all its members" in message]

        if me < 2:

            def publish() -> None:
                await_true(warnings_of_members)
                store.set(f"warned/{me}", "")

            thread = threading.Thread(target=publish)
            thread.start()
            if me == 0:
                dist.send(x, 1)
            else:
                dist.recv(x, 0)
            thread.join()
        else:
            store.wait(["warned/0", "warned/1"], 60)
        dist.all_reduce(x)
        return [*warnings_of_members(), str(x.numpy().tolist())]


def with_an_error_on_rank_1(way: str) -> str:
    """The error on each rank when NCCL makes a communicator and gives rank 1 an error."""
    if way != "init":
        connect()
    nccl: Any = ranks.nccl()
    if dist.get_rank() == 1:
        setattr(nccl, f"comm_{way}", lambda *arguments: (Result.SYSTEM_ERROR, nccl.new_slot()))
    try:
        if way == "init":
            connect()
        elif way == "split":
            dist.new_group([0, 1], timeout=600)
        elif dist.get_rank() < 2:
            dist.shrink_group([2])
    except dist.DistError as e:
        return f"{type(e).__name__}: {e}"
    finally:
        vars(nccl).pop(f"comm_{way}", None)
    return "nothing"


def given_up_early() -> str:
    """The error of a rank whose deadline passes before NCCL has written the handle."""
    nccl: Any = ranks.nccl()
    init, given_up = nccl.comm_init, threading.Event()
    abort_start = communicator.Communicator._abort_start

    def late(*arguments: Any) -> Any:
        assert given_up.wait(60)
        time.sleep(0.2)  # the abort has begun, or the test shows nothing
        return init(*arguments)

    def noting(self: Any, *arguments: Any) -> None:
        given_up.set()
        abort_start(self, *arguments)

    nccl.comm_init = late
    communicator.Communicator._abort_start = noting  # type: ignore[method-assign]
    try:
        dist.new_group(backend="cuda:nccl", device_id=dist.get_rank(), timeout=0.5)
    except dist.DistError as e:
        await_true(lambda: not any("ncclCommInitRankConfig" in t.name for t in threading.enumerate()))
        return f"{type(e).__name__}: {e}"
    finally:
        del nccl.comm_init
        communicator.Communicator._abort_start = abort_start  # type: ignore[method-assign]
    return "nothing"


def shrunk_after_an_error(failing: int) -> list[Any]:
    """The sum over the ranks that remain after NCCL has reported an error to some of them; the calls of shrink."""
    connect()
    nccl: Any = ranks.nccl()
    me, shrink, calls = dist.get_rank(), nccl.comm_shrink, []

    def counting(*arguments: Any) -> Any:
        calls.append("shrink")
        return shrink(*arguments)

    nccl.comm_shrink = counting
    if me < failing:
        nccl.inject(Result.REMOTE_ERROR)
    if failing:
        await_true(lambda: backend_of()._state.error is not None)
    if me == 2:
        return []
    group = dist.shrink_group([2])
    x = arrays.full(2, me + 1.0)
    dist.all_reduce(x, group=group)
    del nccl.comm_shrink
    return [x.numpy().tolist(), calls]


# --- threads and teardown ---------------------------------------------------------------------------------------------


def two_threads_with_a_group_each() -> int:
    """The largest number of threads in NCCL's functions at once."""
    groups = [dist.new_group(), dist.new_group()]
    for group in groups:
        dist.all_reduce(arrays.full(2, 1.0), group=group)
    nccl: Any = ranks.nccl()
    all_reduce, both, most = nccl.all_reduce, threading.Barrier(2), [0]

    def waiting(*arguments: Any) -> Any:
        try:
            both.wait(1.0)
            most[0] = 2
        except threading.BrokenBarrierError:
            most[0] = max(most[0], 1)
        return all_reduce(*arguments)

    nccl.all_reduce = waiting

    def reduce(group: Any) -> None:
        dist.all_reduce(arrays.full(2, 1.0), group=group)

    threads = [threading.Thread(target=reduce, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del nccl.all_reduce
    ranks.simulation().synchronize()
    return most[0]


def split_with_work_in_flight() -> list[int]:
    """Groups split while the parent has an operation in flight: the number of unfinished ones when NCCL splits."""
    connect()
    nccl: Any = ranks.nccl()
    split, found = nccl.comm_split, []

    def counting(comm: int, *arguments: Any) -> Any:
        found.append(len(nccl._comms[comm].unfinished()))
        return split(comm, *arguments)

    nccl.comm_split = counting
    held = threading.Event()

    def hold() -> None:
        with ranks.simulation().hold():
            held.set()
            time.sleep(0.5)

    for mine in (True, False):
        held.clear()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        work = dist.all_reduce(arrays.full(2, 1.0), async_op=True)
        assert work is not None
        dist.new_group([dist.get_rank() if mine else 1 - dist.get_rank()])
        thread.join()
        work.synchronize()
    return found


def a_thread_in_nccl(revokes: bool) -> list[str]:
    """A call that does not return from NCCL until the communicator is revoked, or aborted, at its deadline."""
    connect()
    nccl: Any = ranks.nccl()
    revoke, abort = nccl.comm_revoke, nccl.comm_abort
    log: list[str] = []
    free = threading.Event()

    def stuck(*arguments: Any) -> Any:
        log.append("in")
        assert free.wait(60)
        time.sleep(0.2)
        log.append("out")
        return Result.INTERNAL_ERROR

    def revoking(comm: int) -> Any:
        log.append("revoke")
        free.set()
        return revoke(comm)

    def aborting(comm: int) -> Any:
        log.append("abort")
        free.set()
        return abort(comm)

    nccl.all_reduce, nccl.comm_revoke, nccl.comm_abort = stuck, revoking, aborting
    try:
        dist.all_reduce(arrays.full(2, 1.0), timeout=1)
    except dist.DistError as e:
        log.append(type(e).__name__)
    backend_of().supervision.await_abort()
    del nccl.all_reduce, nccl.comm_revoke
    if revokes:
        dist.destroy_process_group()
    del nccl.comm_abort
    return log


def destroyed_with_work_in_flight() -> list[Any]:
    """The result of an operation behind a kernel that ends once the group's destruction has warned, and the log."""
    connect()
    supervision._WARNING_S = 0.05
    x = arrays.full(2, 1.0 + dist.get_rank())
    finish = busy(arrays.current_stream())
    dist.all_reduce(x)
    with recorded_log() as messages:
        thread = threading.Thread(target=lambda: (await_true(lambda: messages), finish()))
        thread.start()
        dist.destroy_process_group()
        thread.join()
    return [x.numpy().tolist(), *messages]


def destroyed_before_a_deadline() -> str:
    """The error of a group that is destroyed before the deadline of an operation that one rank does not call."""
    connect()
    if dist.get_rank() == 0:
        dist.all_reduce(arrays.full(2, 1.0), timeout=0.5)
        try:
            dist.destroy_process_group()
        except dist.OperationTimeoutError as e:
            return str(e)
    return ""


def stopped_behind_a_kernel(ends_before: bool) -> list[str]:
    """NCCL's calls when a group fails whose operation is behind a kernel that lasts longer than NCCL may take.

    The kernel ends before the group is destroyed, or afterwards.
    """
    connect()
    communicator.END_S = supervision.END_S = 0.2
    nccl: Any = ranks.nccl()
    comm = resources_of().comm
    calls: list[str] = []

    def noting(name: str) -> Callable[[int], int]:
        inner = getattr(nccl, name)

        def call(comm: int) -> int:
            calls.append(f"{name} begins")
            code: int = inner(comm)
            calls.append(f"{name} ends")
            return code

        return call

    nccl.comm_revoke, nccl.comm_abort = noting("comm_revoke"), noting("comm_abort")
    finish = busy(arrays.current_stream())
    work = dist.all_reduce(arrays.full(2, 1.0), async_op=True, timeout=0.2)
    assert work is not None
    with recorded_log() as messages:
        try:
            work.synchronize()
        except dist.OperationTimeoutError:
            calls.append("timed out")
        await_true(lambda: any("stopping NCCL's communicator" in message for message in messages))
        if not ends_before:
            dist.destroy_process_group()
        finish()
        await_true(lambda: "comm_revoke ends" in calls)
        await_true(comm._returned.is_set)
        communicator.END_S = supervision.END_S = 120.0
        if ends_before:
            dist.destroy_process_group()
    del nccl.comm_revoke, nccl.comm_abort
    return calls


def ended_with_a_graph(exiting: bool) -> list[str]:
    """The log when a job ends while a graph that has recorded an operation exists."""
    connect()
    communicator.END_S = supervision.END_S = 0.2
    sim = ranks.simulation()
    stream = arrays.Stream()
    with stream, sim.capture(stream.ptr) as graphs:
        dist.all_reduce(arrays.full(2, 1.0))
    with recorded_log() as messages:
        world.leave(SystemExit() if exiting else None)
        found = list(messages)
    graphs[0].destroy()
    return found


def late_in_nccl(blocking: bool) -> list[str]:
    """Rank 1 calls NCCL once rank 0 has logged that it waits there; rank 0's log."""
    agreement.WARNING_S = 0.2
    nccl: Any = ranks.nccl()
    me, store, init = dist.get_rank(), dist.group.WORLD.job.store, nccl.comm_init  # type: ignore[union-attr]

    def late(*arguments: Any) -> Any:
        store.wait(["warned"], 60)
        return init(*arguments)

    def warnings_of_nccl() -> list[str]:
        return [message for message in messages if "has not returned" in message]

    def publish() -> None:
        await_true(warnings_of_nccl)
        store.set("warned", "")

    with recorded_log() as messages:
        if me:
            nccl.comm_init = late
        else:
            thread = threading.Thread(target=publish)
            thread.start()
        dist.new_group(backend="cuda:nccl", pg_options={"blocking": blocking}, device_id=me)
        if me:
            del nccl.comm_init
        else:
            thread.join()
    return warnings_of_nccl()


def blocking_by_environment() -> tuple[bool, bool]:
    """Whether the group takes its communicator for a blocking one, and whether it is."""
    connect()
    backend = backend_of()
    (made,) = ranks.nccl().communicators
    return backend._factory.config.blocking, made.config.blocking


def dropped_arrays() -> str:
    """The name of the thread that drops the arrays of an operation that ends after its Work."""
    connect()
    names: list[str] = []
    x = arrays.full(8, 1.0)
    weakref.finalize(x, lambda: names.append(threading.current_thread().name))
    finish = busy(arrays.current_stream())
    work = dist.all_reduce(x, async_op=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # wait() would drop the arrays
        del work, x
    assert not names
    finish()
    await_true(lambda: names)
    return names[0]


def swept_in_nccl() -> bool:
    """True if the arrays of a call are freed that a sweep has seen in NCCL, with no later sweep."""
    connect()
    nccl: Any = ranks.nccl()
    supervision = backend_of().supervision
    inner = nccl.all_reduce

    def swept(*arguments: Any) -> Any:
        supervision.sweep(time.monotonic())
        return inner(*arguments)

    assert supervision.watchdog is not None
    supervision.watchdog.unwatch(supervision)
    x = arrays.full(8, 1.0)
    reference = weakref.ref(x)
    nccl.all_reduce = swept
    dist.all_reduce(x)
    del nccl.all_reduce
    ranks.simulation().synchronize()
    del x
    gc.collect()
    freed = reference() is None
    supervision.watchdog.watch(supervision)
    return freed


# --- symmetric memory ------------------------------------------------------------------------------------------------


def symmetric_memory_dropped(by: str) -> list[tuple[str, int]]:
    """Memory dropped while an operation or kernel uses it, and new memory afterwards: the thread that frees the old
    one, and the unfinished accesses then."""
    connect()
    sim = ranks.simulation()
    nccl: Any = ranks.nccl()
    mem_free, log = nccl.mem_free, []
    made = _new_symmetric_memory()
    ptr = made.__cuda_array_interface__["data"][0]

    def freeing(address: int) -> Any:
        block = sim.memory.find(address)
        assert block is not None
        used = sum(not access.op.done for access in block.accesses)
        if address == ptr:
            log.append((threading.current_thread().name, used))
        return 0 if used else mem_free(address)

    nccl.mem_free = freeing
    stream = arrays.Stream()
    with stream:
        view = arrays.adopt(made)
        view.fill(1.0)
        sim.synchronize()
        finish = busy(stream.ptr)
        if by == "operation":
            work = dist.all_reduce(view, async_op=True)
            assert work is not None
            work.wait()
            del work
        else:
            view += 1.0
        del view, made
        gc.collect()
        others = [_new_symmetric_memory()]
        early = list(log)
        finish()
        stream.synchronize()
        others.append(_new_symmetric_memory())
        found = early or list(log)
    del nccl.mem_free
    return found


def _new_symmetric_memory() -> Any:
    return dist.group.WORLD.symmetric_empty((4,), "float64")  # type: ignore[union-attr]


def gathered_into_lists() -> list[list[float]]:
    """Rank 0's list is contiguous in memory, the others' are not."""
    me, n = dist.get_rank(), dist.get_world_size()
    whole = arrays.full(8 * n, -1.0)
    step = 4 if me == 0 else 8
    into = [whole[step * r : step * r + 4] for r in range(n)]
    for async_op in (False, True):
        work = dist.all_gather(into, arrays.full(4, float(me + async_op)), async_op=async_op)
        if work is not None:
            work.wait()
    return [part.numpy().tolist() for part in into]
