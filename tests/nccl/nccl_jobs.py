"""Functions that ranks with a simulated device run in the tests of the NCCL backend."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import unicoll as dist
from nccl_comm.communicators import communicator
from tests.simulated_nccl import arrays, ranks
from tests.support import worker
from tests.support.order import await_true, await_word, send_word
from unicoll.api import world
from unicoll.backend.flight_recorder import ring
from unicoll.group.recorded_calls import recorded_calls


def mixed() -> dict[str, Any]:
    """Device arrays, host arrays, objects and a barrier in the default group."""
    me, n = dist.get_rank(), dist.get_world_size()
    x = arrays.full(4, me + 1, np.float32)
    dist.all_reduce(x)
    host = np.full(3, me + 1.0)
    dist.all_reduce(host)
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": me})
    dist.barrier()
    return {
        "device": x.numpy().tolist(),
        "host": host.tolist(),
        "objects": objects,
        "backend": dist.get_backend(),
        "config": dist.get_backend_config(),
        "explained": dist.explain(),
    }


def alone() -> list[str]:
    """A group with NCCL alone: its barrier, and its errors for host arrays before and after."""
    group = dist.new_group(backend="cuda:nccl", device_id=dist.get_rank())
    dist.barrier(group=group)
    work = dist.barrier(group=group, async_op=True)
    work.wait()
    assert work.is_completed()
    said = []
    try:
        dist.all_reduce(np.ones(2), group=group)
    except dist.DistError as e:
        said.append(f"{type(e).__name__}: {e}")
    return said


def asynchronous(rounds: int) -> list[bool]:
    """Arrays dropped in flight whose memory is reused at once; results read after ``wait()`` alone."""
    me, n = dist.get_rank(), dist.get_world_size()
    good = []
    for i in range(rounds):
        source = arrays.full(100, me + i, np.float64)
        whole = arrays.empty(100 * n, np.float64)
        work = dist.all_gather_into_tensor(whole, source, async_op=True)
        del source
        noise = [arrays.full(100, -1.0, np.float64) for _ in range(3)]
        work.wait()
        expected = np.repeat(np.arange(n) + i, 100)
        good.append(bool((whole.numpy() == expected).all()))
        del noise, work
    gc.collect()
    return good


def not_blocking() -> dict[str, Any]:
    """While the device is held, asynchronous calls return to the host; the results come afterwards."""
    x = arrays.full(8, 1.0, np.float32)
    dist.all_reduce(x)  # connects
    x.numpy()
    here = ranks.simulation()
    here.scheduler.forget()
    with here.hold():
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        done = work.is_completed()
        blocked = [str(b) for b in here.scheduler.blocking_calls()]
    work.synchronize()
    return {"early": done, "late": work.is_completed(), "blocked": blocked, "value": x.numpy().tolist()}


def strided(async_op: bool) -> list[float]:
    """An all_reduce of every other element."""
    base = arrays.full(10, dist.get_rank() + 1, np.float32)
    view = base[::2]
    work = dist.all_reduce(view, async_op=async_op)
    if work is not None:
        work.synchronize()
    found: list[float] = base.numpy().tolist()
    return found


def messages() -> dict[str, Any]:
    """Point-to-point: blocking, in a batch whose order would deadlock otherwise, and refused calls."""
    me, n = dist.get_rank(), dist.get_world_size()
    other = 1 - me
    x, y = arrays.full(5, me, np.int32), arrays.empty(5, np.int32)
    if me == 0:
        dist.send(x, dst=1)
        source = dist.recv(y, src=1)
    else:
        source = dist.recv(y, src=0)
        dist.send(x, dst=0)
    first = y.numpy().tolist()
    big, into = arrays.full(1 << 16, me, np.int32), arrays.empty(1 << 16, np.int32)
    ops = [dist.P2POp(dist.isend, big, other), dist.P2POp(dist.irecv, into, other)]
    own, mine = arrays.full(3, 10 + me, np.int32), arrays.empty(3, np.int32)
    ops += [dist.P2POp(dist.isend, own, me), dist.P2POp(dist.irecv, mine, me)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    refused = []
    for attempt in (
        lambda: dist.send(x, dst=other, tag=3),
        lambda: dist.recv(y),
        lambda: dist.recv(y, other, tag=None),
        lambda: dist.recv(y, other, status=dist.Status()),
        lambda: dist.send(x, me),
        lambda: dist.batch_isend_irecv([*ops, dist.P2POp(dist.isend, own, me)]),
        lambda: dist.batch_isend_irecv([ops[2], dist.P2POp(dist.irecv, y, me)]),
    ):
        try:
            attempt()
        except dist.DistError as e:
            refused.append(f"{type(e).__name__}: {e}")
    again = arrays.full(1, 1, np.int32)
    dist.all_reduce(again)
    return {
        "first": first,
        "source": source,
        "second": sorted(set(into.numpy().tolist())),
        "own": mine.numpy().tolist(),
        "refused": refused,
        "again": again.numpy().tolist(),
        "n": n,
    }


def not_waiting_within_nccl() -> list[float]:
    """A group whose communicator is non-blocking: blocking, asynchronous, coalesced."""
    group = dist.new_group(backend="cuda:nccl", pg_options={"blocking": False}, device_id=dist.get_rank())
    x = arrays.full(3, 1.0)
    dist.all_reduce(x, group=group)
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    dist.all_reduce_coalesced([x, arrays.full(2, 1.0)], group=group)
    found: list[float] = x.numpy().tolist()
    dist.destroy_process_group(group)
    return found


def split_and_shrunk_without_waiting() -> list[list[float]]:
    """Parts of a group whose communicator is non-blocking, for which NCCL returns success before it has made them."""
    me = dist.get_rank()
    options = {"blocking": False}
    group: Any = dist.new_group(backend="cuda:nccl", pg_options=options, device_id=me)
    part: Any = dist.split_group(group, [[0, 2]], pg_options=options)
    smaller: Any = group.shrink([0], pg_options=options) if me else None
    found = []
    for each in (part, smaller):
        if each is not None:
            x = arrays.full(1, me + 1.0)
            dist.all_reduce(x, group=each)
            found.append(x.numpy().tolist())
            dist.destroy_process_group(each)
    dist.destroy_process_group(group)
    return found


def part_of_a_destroyed_group() -> list[float]:
    """A collective of a part whose communicator is non-blocking; the group that it was split from is destroyed."""
    options = {"blocking": False}
    group: Any = dist.new_group(backend="cuda:nccl", pg_options=options, device_id=dist.get_rank())
    part: Any = dist.split_group(group, [[0, 1]], pg_options=options)
    dist.destroy_process_group(group)
    x = arrays.full(1, 1.0)
    dist.all_reduce(x, group=part)
    dist.destroy_process_group(part)
    return x.numpy().tolist()


def coalesced() -> list[list[float]]:
    """Several all_reduces as one group call."""
    me = dist.get_rank()
    several = [arrays.full(3 + i, me + i, np.float32) for i in range(4)]
    dist.all_reduce_coalesced(several)
    return [x.numpy().tolist() for x in several]


def split_groups() -> dict[str, Any]:
    """Groups split from a group that connected when it was made."""
    me, n = dist.get_rank(), dist.get_world_size()
    nccl: Any = ranks.nccl()
    split, colors = nccl.comm_split, []

    def counting(comm: int, color: int | None, key: int, config: Any) -> Any:
        colors.append(color)
        return split(comm, color, key, config)

    nccl.comm_split = counting
    evens = dist.new_group(list(range(0, n, 2)))
    halves = dist.split_group(split_ranks=[list(range(n // 2)), list(range(n // 2, n))])
    x = arrays.full(2, me, np.float32)
    if me % 2 == 0:
        dist.all_reduce(x, group=evens)
    y = arrays.full(2, me, np.float32)
    dist.all_reduce(y, group=halves)
    return {"evens": x.numpy().tolist(), "halves": y.numpy().tolist(), "colors": colors}


def on_devices_of_their_own_after_all() -> tuple[str, list[float]]:
    """Both ranks begin with an array on device 0, which is refused, and then use a device each."""
    with arrays.device(0):
        x = arrays.full(2, 1.0)
        said = _error(lambda: dist.all_reduce(x))
    with arrays.device(dist.get_rank()):
        x = arrays.full(2, 1.0)
        dist.all_reduce(x)
        return said, x.numpy().tolist()


def shared_device() -> str:
    """All ranks are on one device."""
    try:
        dist.all_reduce(arrays.full(2, 1.0))
    except dist.DistArgumentError as e:
        return str(e)
    return "accepted"


def other_device() -> str:
    """An array on a device that the group is not bound to."""
    me, n = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(arrays.full(2, 1.0))
    with arrays.device((me + 1) % n):
        x = arrays.full(2, 1.0)
    try:
        dist.all_reduce(x)
    except dist.DistArgumentError as e:
        return str(e)
    return "accepted"


def from_another_device() -> list[Any]:
    """Calls made while another device is current; the arrays are on the group's, ordered by its legacy stream."""
    me, n = dist.get_rank(), dist.get_world_size()
    connect()
    x = arrays.full(2, 1.0)
    with arrays.device((me + 1) % n):
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        work.synchronize()
        here = ranks.simulation().cuda.current_device()
    return [x.numpy().tolist(), here]


def connect() -> None:
    """One all_reduce, so that all are connected."""
    x = arrays.full(2, 1.0)
    dist.all_reduce(x)
    x.numpy()


def miss(late: int) -> list[str]:
    """All but one rank call an all_reduce with a deadline; the errors of the wait and of the next call."""
    connect()
    if dist.get_rank() == late:
        group: Any = dist.group.WORLD
        await_true(lambda: group._backends.for_device("cuda")._state.error)
        errors = []
    else:
        x = arrays.full(2, 1.0)
        work = dist.all_reduce(x, async_op=True, timeout=1.0)
        errors = [_error(work.synchronize)]
    return [*errors, _error(lambda: dist.all_reduce(arrays.full(2, 1.0)))]


def differ() -> str:
    """Rank 1 passes more elements than the others, which NCCL does not notice."""
    connect()
    count = 3 if dist.get_rank() == 1 else 2

    def attempt() -> None:
        work = dist.all_reduce(arrays.full(count, 1.0), async_op=True, timeout=1.0)
        assert work is not None
        work.synchronize()

    said = _error(attempt)
    ranks.nccl().machine.mismatches.clear()
    return said


def _error(attempt: Any) -> str:
    try:
        attempt()
    except dist.DistError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def wait_for_the_dead(victim: int) -> str:
    """An all_reduce that the victim, which is killed meanwhile, never calls."""
    connect()
    worker.send_note("connected")
    if dist.get_rank() == victim:
        threading.Event().wait()

    def attempt() -> None:
        work = dist.all_reduce(arrays.full(2, 1.0), async_op=True)
        assert work is not None
        work.synchronize()

    return _error(attempt)


def shrink(victim: int) -> dict[str, Any]:
    """After a death: the group of the remaining ranks, and its results."""
    world = dist.group.WORLD
    assert world is not None
    group = world.shrink([victim])
    x = arrays.full(2, dist.get_rank() + 1.0)
    dist.all_reduce(x, group=group)
    host = np.ones(1)
    dist.all_reduce(host, group=group)
    found = {"size": group.size(), "x": x.numpy().tolist(), "host": host.tolist()}
    dist.destroy_process_group(group)
    return found


def scaled_on_one_rank() -> list[tuple[str, str, int]]:
    """Reductions with a factor in a group of one rank, of sizes around NCCL's blocks; those with wrong elements."""
    connect()
    factor = dist.ReduceOp.PREMUL_SUM(3)
    calls: dict[str, Any] = {
        "all_reduce": lambda x, out: dist.all_reduce(x, op=factor),
        "reduce": lambda x, out: dist.reduce(x, 0, op=factor),
        "reduce_scatter": lambda x, out: dist.reduce_scatter(out, [x], op=factor),
        "reduce_scatter_tensor": lambda x, out: dist.reduce_scatter_tensor(out, x, op=factor),
    }
    wrong = []
    for dtype in ("int8", "float16", "float32", "complex64"):
        item = np.dtype(dtype).itemsize
        for count in (1, 16385 // item, 32770 // item, (1 << 19) // item + 9):
            for name, call in calls.items():
                values = (np.arange(count) % 7).astype(dtype)
                x, out = arrays.array(values), arrays.empty(count, dtype)
                call(x, out)
                found = (out if name.startswith("reduce_scatter") else x).numpy()
                if not np.array_equal(found, 3 * values):
                    wrong.append((name, dtype, count))
    return wrong


def sudden_error(code: int) -> str:
    """NCCL reports an asynchronous error on rank 0."""
    connect()
    dist.barrier()
    if dist.get_rank() == 0:
        ranks.nccl().inject(code)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        said = _error(lambda: dist.all_reduce(arrays.full(2, 1.0), async_op=True).wait())
        if said != "nothing":
            return said
        time.sleep(0.02)
    return "nothing"


def captured() -> dict[str, Any]:
    """Blocking and asynchronous operations recorded into a graph, which is then launched twice."""
    here = ranks.simulation()
    stream = arrays.Stream()
    group = dist.new_group()
    with stream:
        x = arrays.full(4, 1.0, np.float32)
        with here.capture(stream.ptr):
            said = _error(lambda: dist.all_reduce(x, group=group))
        connect()
        y = arrays.full(4, dist.get_rank() + 1.0, np.float32)
        stream.synchronize()
        with here.capture(stream.ptr) as graphs:
            dist.all_reduce(x)
            work = dist.all_reduce(y, async_op=True)
            work.wait()
        for _ in range(2):
            here.launch(graphs[0], stream.ptr)
        values = x.numpy().tolist(), y.numpy().tolist()
    graphs[0].destroy()  # NCCL's communicators last as long as graphs that use them
    dist.destroy_process_group(group)
    return {"first": said, "x": values[0], "y": values[1], "n": dist.get_world_size()}


def told_of_the_end() -> list[Any]:
    """A future, and a callback, of an asynchronous operation."""
    x = arrays.full(2, 1.0)
    called = threading.Event()
    work = dist.all_reduce(x, async_op=True)
    work.add_done_callback(called.set)
    (result,) = work.get_future().result(timeout=20)
    return [called.wait(60), result is x, x.numpy().tolist()]


def symmetric() -> list[Any]:
    """Symmetric memory."""
    connect()
    group: Any = dist.group.WORLD
    made = group.symmetric_empty((2, 3), "float32")
    interface = made.__cuda_array_interface__
    n = ranks.nccl()
    x = arrays.full(1, 1.0)
    dist.all_reduce(x)
    return [interface["shape"], interface["typestr"], n.has("ncclCommWindowRegister"), x.numpy().tolist()]


def on_two_hosts(folder: str) -> dict[str, str]:
    """explain() before two hosts are set for NCCL, for a group made after that, for a part of it, and with a log."""
    me = dist.get_rank()
    told = {"NCCL_HOSTID": f"host{me // 2}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "sim0"}
    found = {"before": dist.explain()}
    os.environ.update(told)
    try:
        four: Any = dist.new_group(use_local_synchronization=True, device_id=me)
        found["four"] = four.describe()
        two: Any = dist.split_group(four, [[0, 1], [2, 3]])
        found["two"] = two.describe()
        log = Path(folder) / f"{os.getpid()}.log"
        log.write_text(f"node:{os.getpid()}:1 [0] NCCL INFO Channel 00/0 : {me}[0] -> 9[1] via P2P/CUMEM\n")
        told |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/%p.log"}
        os.environ.update(told)
        found["logged"] = dist.explain()
        dist.destroy_process_group(two)
        dist.destroy_process_group(four)
    finally:
        for name in told:
            os.environ.pop(name, None)
    return found


def explain_without_a_store() -> str:
    """explain() when the store no longer answers."""
    store: Any = dist.group.WORLD.job.store  # type: ignore[union-attr]

    def wait(keys: Any, timeout: float) -> None:
        raise dist.DistStoreError("the store is gone")

    store.wait = wait
    try:
        return dist.explain()
    finally:
        del store.wait


def average_of_float8() -> list[float]:
    """The average of float8 over this group, which has one rank in some tests."""
    import ml_dtypes

    x = arrays.full(3, dist.get_rank() + 1.0, ml_dtypes.float8_e5m2)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    dist.reduce(x, 0, op=dist.ReduceOp.AVG)
    return [float(value) for value in x.numpy()[:1]]


def float8_on_different_devices() -> list[Any]:
    """Operations on float8 in a group with all ranks, whose last one has an older device, and in one without it."""
    import ml_dtypes

    x = arrays.full(2, 1.0, ml_dtypes.float8_e5m2)
    said = _error(lambda: dist.all_reduce(x))
    batch = _error(lambda: dist.all_reduce_coalesced([x, x]))
    dist.broadcast(x, 0)
    found = [said, batch == said]
    group: Any = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    return [*found, [float(value) for value in x.numpy()]]


class _Own:
    """Memory of ncclMemAlloc without a window, as an array of bytes."""

    def __init__(self, nbytes: int) -> None:
        code, self.ptr = ranks.nccl().mem_alloc(nbytes)
        assert code == 0
        self.__cuda_array_interface__ = self._interface(self.ptr, nbytes)

    @staticmethod
    def _interface(ptr: int, nbytes: int) -> dict[str, Any]:
        return {"shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "version": 3}

    def part(self, start: int, nbytes: int) -> Any:
        """A part of the memory."""
        interface = self._interface(self.ptr + start, nbytes)
        return SimpleNamespace(__cuda_array_interface__=interface)


class _Pool:
    """An allocator's pool that lists its memory as ``torch.cuda.MemPool`` does."""

    def __init__(self, *held: arrays.Array) -> None:
        self.held = held

    def snapshot(self) -> list[dict[str, int]]:
        return [{"device": x.device, "address": x.ptr, "total_size": x.nbytes} for x in self.held]


def _known() -> tuple[int, int]:
    """The numbers of registered windows and buffers."""
    comms = ranks.nccl().communicators
    return sum(len(c.windows) for c in comms), sum(len(c.buffers) for c in comms)


def registered(blocking: bool) -> dict[str, Any]:
    """Arrays, pools and memory of ncclMemAlloc, registered and deregistered."""
    group: Any = dist.new_group(pg_options={"blocking": blocking})
    x = arrays.full(1000, dist.get_rank() + 1.0)
    found: dict[str, Any] = {}
    with group.register(x) as made:  # it connects the group
        found["array"] = (made.nbytes, made.symmetric, made.closed, _known())
        work = dist.all_reduce(x, group=group, async_op=True)
    assert work.is_completed()  # closing waits for the operations
    work.wait()
    found["closed"] = (made.closed, _known(), x.numpy()[:2].tolist())
    made.close()
    pool = _Pool(x, arrays.empty(500))
    made = group.register(pool)
    found["pool"] = (made.nbytes, made.symmetric, _known())
    made.close()
    own = _Own(4096)
    made = group.register(own, symmetric=True)
    found["window"] = (made.nbytes, made.symmetric, _known())
    found["twice"] = _error(lambda: group.register(own, symmetric=True))
    made.close()
    assert ranks.nccl().mem_free(own.ptr) == 0
    left = group.register(x)  # not closed
    del x, pool
    gc.collect()
    found["left"] = _known()
    dist.destroy_process_group(group)
    found["after"] = (left.closed, _known())
    left.close()
    return found


def _windows() -> int:
    """How many windows the groups have, and whether memory of their size is allocated."""
    return _known()[0]


def dropped_at_different_times() -> list[int]:
    """Symmetric arrays that rank 0 drops earlier than rank 1: the numbers of windows after two allocations, and of the
    store's keys that are left."""
    group: Any = dist.new_group(backend="cuda:nccl", device_id=dist.get_rank())
    found = []
    first = group.symmetric_empty(16, "float64")
    if dist.get_rank() == 0:
        del first
        gc.collect()
        time.sleep(0.5)  # the watchdog sweeps
    second = group.symmetric_empty(8, "float64")
    found.append(_windows())
    if dist.get_rank() == 1:
        del first
    del second
    third = group.symmetric_empty(32, "float64")
    found.append(_windows())
    del third
    dist.barrier()
    store = world.current("test").job.store
    found.append(sum("/window/" in key for key in store.list_keys()))
    dist.barrier()
    dist.destroy_process_group(group)
    return found


def _group_with_deadline(seconds: float) -> Any:
    """A connected group; the deadline is that of what follows, since a rank may come late to the start."""
    group: Any = dist.new_group(backend="cuda:nccl", device_id=dist.get_rank())
    dist.barrier()
    group._backends.unstaged("cuda").context.timeout = seconds
    return group


def alone_in_symmetric_memory(missing: int) -> tuple[str, str]:
    """An allocation in which a rank takes no part, and what the group does after it."""
    group = _group_with_deadline(1.0)
    said = _error(lambda: group.symmetric_empty(4)) if dist.get_rank() != missing else ""
    dist.barrier()
    await_true(lambda: _error(lambda: dist.barrier(group=group)) != "nothing")
    after = _error(lambda: dist.barrier(group=group))
    dist.destroy_process_group(group)
    return said, after


def registration_that_hangs() -> list[str]:
    """NCCL does not return from a registration, as some versions do that lose a message."""
    communicator.END_S = 120.0  # the registration returns below, whatever the load
    group = _group_with_deadline(0.5)
    nccl: Any = ranks.nccl()
    released, done, memory = threading.Event(), threading.Event(), []

    def window_register(comm: int, ptr: int, nbytes: int, symmetric: bool) -> Any:
        memory.append(ptr)
        released.wait(30.0)
        done.set()
        return 3, SimpleNamespace(value=None)

    nccl.window_register = window_register
    said = [_error(lambda: group.symmetric_empty(4)), _error(lambda: dist.barrier(group=group))]
    del nccl.window_register
    assert ranks.simulation().cuda.device_of(memory[0]) >= 0  # NCCL may still use it
    released.set()
    done.wait(30.0)
    assert nccl.mem_free(memory[0]) == 0
    dist.destroy_process_group(group)
    return said


def different_symmetric_memory() -> list[str]:
    """Windows that do not fit together, and an allocation that fails on one rank; then all is well."""
    me = dist.get_rank()
    group: Any = dist.new_group(backend="cuda:nccl", device_id=me)
    own = _Own(1 << 14)
    nccl: Any = ranks.nccl()
    mem_alloc = nccl.mem_alloc
    said = [
        _error(lambda: group.symmetric_empty(4 + me)),
        _error(lambda: group.register(own.part(4096 * me, 4096), symmetric=True)),
        _error(lambda: group.register(own.part(512 * me, 4096), symmetric=True)),
        _error(lambda: group.symmetric_empty(4096) if me else group.register(own, symmetric=True)),
    ]
    if me == 1:
        nccl.mem_alloc = lambda nbytes: (1, 0)
    said.append(_error(lambda: group.symmetric_empty(4)))
    nccl.mem_alloc = mem_alloc
    with group.register(own.part(4096, 4096), symmetric=True) as made:
        said.append(f"{made.symmetric} {_known()}")
    dist.destroy_process_group(group)
    assert nccl.mem_free(own.ptr) == 0
    return said


def memory_for_a_second_attempt() -> int:
    """An allocation that succeeds only once the dropped memory is freed; the windows after it."""
    group: Any = dist.new_group(backend="cuda:nccl", device_id=dist.get_rank())
    nccl: Any = ranks.nccl()
    mem_alloc = nccl.mem_alloc
    nccl.mem_alloc = lambda nbytes: (1, 0) if _windows() else mem_alloc(nbytes)
    group.symmetric_empty(4)  # dropped at once
    made = group.symmetric_empty(4)
    nccl.mem_alloc = mem_alloc
    found = _windows()
    del made
    dist.destroy_process_group(group)
    return found


def not_registered() -> list[str]:
    """Errors for memory that cannot be registered."""
    group: Any = dist.group.WORLD
    connect()
    x = arrays.full((4, 4), 1.0)

    class CupyPool:
        def free_all_blocks(self) -> None: ...

    return [
        _error(lambda: group.register(x.T)),
        _error(lambda: group.register(np.ones(2))),
        _error(lambda: group.register(CupyPool())),
        _error(lambda: group.register(_Pool())),
        _error(lambda: group.register(arrays.full(1, 1.0, on=1 - dist.get_rank()))),
        _error(lambda: group.register(x, symmetric=True)),
        _error(lambda: group.register("x")),
    ]


def registered_with_an_old_nccl() -> tuple[Any, ...]:
    """A window is requested from an NCCL without windows."""
    group: Any = dist.group.WORLD
    with group.register(arrays.full(4, 1.0), symmetric=True) as made:
        return (made.symmetric, _known())


def registered_in_a_failed_group() -> list[Any]:
    """Registrations end with a group that fails."""
    group: Any = dist.new_group(device_id=dist.get_rank())
    made = group.register(arrays.full(4, 1.0))
    dist.barrier()
    group.abort()
    said = _error(lambda: group.register(arrays.full(4, 1.0)))
    made.close()
    return [said, made.closed]


def timed() -> dict[str, Any]:
    """Durations of operations on the device."""
    here = ranks.simulation()
    connect()
    group: Any = dist.group.WORLD
    x = arrays.full(4, 1.0)
    found: dict[str, Any] = {}
    work = group.all_reduce(x, async_op=True)
    found["not asked"] = _error(work.duration)
    work.wait()
    view = group.using(timing=True)
    found["view"] = repr(view)
    made = []
    took = []
    for _ in range(10):
        while group._backends.for_device(
            "cuda"
        ).resources.in_flight.operations:  # until the watchdog has removed the last
            time.sleep(0.01)
        started = time.perf_counter()
        with here.hold():  # the device is idle for a while
            work = view.all_reduce(x, async_op=True)
            time.sleep(0.02)
        took.append(0 < work.duration() < time.perf_counter() - started - 0.02)
        made.append(sum(event.timing for event in here.cuda.events.values()))
    found["took"] = took
    found["again"] = work.duration() == work.duration()
    dist.barrier(group=view, async_op=True).duration()  # on the host's backend
    found["events"] = set(made)
    other: Any = dist.new_group(
        backend="cuda:nccl", device_id=dist.get_rank(), pg_options=dist.Options(timing=True)
    )
    found["barrier"] = dist.barrier(group=other, async_op=True).duration() > 0
    found["coalesced"] = other.all_reduce_coalesced([x, arrays.full(2, 1.0)], async_op=True).duration() > 0
    work = other.using(timing=False).all_reduce(x, async_op=True)
    found["off"] = _error(work.duration)
    work.wait()
    stream = arrays.Stream()
    with stream:
        y = arrays.full(4, 1.0)
        stream.synchronize()
        with here.capture(stream.ptr) as graphs:
            work = other.all_reduce(y, async_op=True)
            work.wait()
        found["captured"] = _error(work.duration)
    graphs[0].destroy()
    dist.destroy_process_group(other)
    return found


def untimed() -> int:
    """The number of events with timing when no durations are measured."""
    x = arrays.full(4, 1.0)
    dist.all_reduce(x, async_op=True).wait()
    dist.all_reduce(x)
    return sum(event.timing for event in ranks.simulation().cuda.events.values())


def connected_by_several_ids() -> tuple[int, list[float]]:
    """The number of unique ids of a new group's communicator, and the result of an all_reduce."""
    group: Any = dist.new_group(backend="cuda:nccl", device_id=dist.get_rank())
    x = arrays.full(2, dist.get_rank() + 1.0)
    dist.all_reduce(x, group=group)
    (comm,) = ranks.nccl().communicators
    values = x.numpy().tolist()
    dist.destroy_process_group(group)
    return comm.key.count(".") + 1, values


def a_root_fails(failing: int) -> str:
    """The error on all ranks when a rank cannot make its unique id."""
    if dist.get_rank() == failing:
        ranks.nccl().unique_id = lambda: (2, b"")  # type: ignore[method-assign]
    return _error(lambda: dist.new_group(backend="cuda:nccl", device_id=dist.get_rank()))


def grown(lazy: bool) -> dict[str, Any]:
    """A group of ranks 0 and 1 that grows by ranks 3 and 2."""
    me = dist.get_rank()
    device = None if lazy else me
    small: Any = dist.new_group([0, 1], backend="cpu:gloo,cuda:nccl", device_id=device)
    x = arrays.full(2, me + 1.0)
    found: dict[str, Any] = {}
    if me < 2:
        work = None if lazy else dist.all_reduce(x, group=small, async_op=True)
        larger: Any = small.grow([3, 2])
        if work is not None:
            found["before"] = work.is_completed()
            work.wait()
        before = [c for c in ranks.nccl().communicators if c.size == 2]
        found["growths"] = [c.growths for c in before]
        dist.destroy_process_group(small)
    else:
        larger = dist.grow_group([3, 2], small, device_id=device)
    found["ranks"] = dist.get_process_group_ranks(larger)
    y = arrays.full(3, me + 1.0)
    dist.all_reduce(y, group=larger)
    host = np.full(3, me + 1.0)
    dist.all_reduce(host, group=larger)
    found["sums"] = (y.numpy()[0], host[0])
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, me, group=larger)
    found["gathered"] = gathered
    found["said"] = "expected transports: 3 peers" in larger.describe()
    dist.destroy_process_group(larger)
    return found


def not_grown() -> list[str]:
    """Errors of growing."""
    me = dist.get_rank()
    connect()
    small: Any = dist.new_group([0, 1], backend="nccl", device_id=me)
    said = []
    if me < 2:
        said = [
            _error(lambda: small.grow([1])),
            _error(lambda: small.grow([])),
            _error(lambda: small.grow([7])),
        ]
        made: Any = small.grow([2])
        small.abort()
        said.append(_error(lambda: small.grow([2])))
        dist.destroy_process_group(made)
    else:
        said = [_error(lambda: dist.grow_group([0], small)), _error(lambda: dist.grow_group([2, 0], small))]
        said.append(_error(lambda: dist.grow_group([2], small, timeout=0.2)))
        world.current("test").job.store.add(
            "grow/2/received", -1
        )  # the next call reads the same record again
        made = dist.grow_group([2], small)
        dist.destroy_process_group(made)
    return said


def grown_without_waiting(blocking: bool) -> list[float]:
    """A group of two grows by one, its communicator blocking or not."""
    me = dist.get_rank()
    options = {"blocking": blocking}
    small: Any = dist.new_group([0, 1], backend="cuda:nccl", device_id=me, pg_options=options)
    larger = dist.grow_group([2], small, pg_options=options, device_id=me)
    x = arrays.full(2, me + 1.0)
    dist.all_reduce(x, group=larger)
    values: list[float] = x.numpy().tolist()
    dist.destroy_process_group(larger)
    return values


def ping_pong(rounds: int, blocking: bool) -> list[Any]:
    """Two ranks write to each other's memory in turns, each adding one; then signals alone."""
    me = dist.get_rank()
    group: Any = dist.new_group(backend="cuda:nccl", device_id=me, pg_options={"blocking": blocking})
    source, own = group.symmetric_empty(4, "float64"), _Own(64)
    window = group.register(own, symmetric=True)
    x, y = arrays.adopt(source, "float64"), arrays.adopt(own, "float64")
    x.fill(0.0)
    y.fill(0.0)
    for _ in range(rounds):
        if me == 0:
            group.put(x[:2], 1, window, offset=3)
        group.wait_signal(1 - me, y)
        x[:2] = y[3:5]
        x += 1.0
        if me == 1:
            group.put(x[:2], 0, window, offset=3)
    found = [y.numpy().tolist()]
    for _ in range(3):
        group.signal(1 - me, x)
    group.signal(me, x)
    group.wait_signal({1 - me: 3, me: 1}, x)
    found.append(x.numpy()[:2].tolist())
    window.close()
    del x, y, source
    dist.destroy_process_group(group)
    ranks.nccl().mem_free(own.ptr)
    return found


def not_put() -> list[str]:
    """Errors of puts, and a signal that does not arrive."""
    me = dist.get_rank()
    group: Any = dist.new_group(backend="cuda:nccl", device_id=me)
    source = group.symmetric_empty(4, "float64")
    x, plain = arrays.adopt(source, "float64"), arrays.full(4, 1.0)
    with group.register(plain) as registered:
        said = [
            _error(lambda: group.put(x, 2, source)),
            _error(lambda: group.put(x, 1, registered)),
            _error(lambda: group.put(plain, 1, source)),
            _error(lambda: group.put(x, 1, source, offset=1)),
            _error(lambda: group.put(x[::2], 1, source)),
            _error(lambda: group.wait_signal(0, x, 0)),
            _error(lambda: group.signal(0, np.ones(1))),
        ]
    if me == 0:
        group.wait_signal(1, x, timeout=0.5)
    said.append(_error(lambda: _until_it_fails(group)))
    dist.destroy_process_group(group)
    x = source = None  # the group's error holds this frame
    return said


def _until_it_fails(group: Any) -> None:
    while True:
        group.signal(dist.get_rank(), arrays.full(1, 1.0))
        time.sleep(0.05)


def put_with_an_old_nccl() -> str:
    """One-sided operations with an NCCL that lacks them."""
    connect()
    group: Any = dist.group.WORLD
    return _error(lambda: group.signal(0, arrays.full(1, 1.0)))


def put_among_three() -> list[float]:
    """Rank 0 writes to rank 1; rank 2 makes no one-sided call."""
    me = dist.get_rank()
    group: Any = dist.new_group(backend="cuda:nccl", device_id=me)
    own = group.symmetric_empty(4, "float64")
    x = arrays.adopt(own, "float64")
    x.fill(float(me))
    dist.barrier()
    if me == 0:
        x.fill(7.0)
        group.put(x, 1, own)
        dist.barrier()  # rank 1 waits for the signal after it
    else:
        dist.barrier()
    if me == 1:
        group.wait_signal(0, x)
    found: list[float] = x.numpy().tolist()
    del x, own
    dist.destroy_process_group(group)
    return found


def signal_without_a_window() -> str:
    """A signal before any window."""
    group: Any = dist.new_group(backend="cuda:nccl", device_id=dist.get_rank())
    said = _error(lambda: group.signal(0, arrays.full(1, 1.0)))
    dist.destroy_process_group(group)
    return said


def timed_by_a_host_backend() -> list[bool]:
    """Durations of operations on device arrays by a backend of the host, sends and receives included."""
    me, n = dist.get_rank(), dist.get_world_size()
    view: Any = dist.group.WORLD.using(timing=True)  # type: ignore[union-attr]
    x, y, sent, first, second = (
        arrays.full((4, 4), 1.0) for _ in range(5)
    )  # no array is in two operations at once
    works = [view.all_reduce(x, async_op=True), view.all_reduce(y.T, async_op=True)]
    works += [view.irecv(first, (me - 1) % n), view.isend(sent, (me + 1) % n)]
    works += view.batch_isend_irecv([(True, sent, (me + 1) % n, 0), (False, second, (me - 1) % n, 0)])
    return [work.duration() > 0 for work in works]


def recorded() -> dict[str, Any]:
    """What the flight recorder has of calls that the other rank has not made, and of the same calls when all have."""
    me = dist.get_rank()
    x = arrays.full(4, me + 1, np.float32)
    dist.all_reduce(x)
    dist.barrier()
    ring().clear()
    found: dict[str, Any] = {"enqueued": []}
    if me == 1:
        await_word()
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    if me == 0:
        time.sleep(0.1)
        found["enqueued"] = [(c.op, c.state, c.blocking) for c in recorded_calls()]
        send_word(1)
    work.synchronize()
    # The watchdog notices the end of calls for which no thread waits.
    await_true(lambda: not any(c.state == "started" for c in recorded_calls()))
    found["ended"] = [(c.op, c.state, c.blocking) for c in recorded_calls()]
    return found
