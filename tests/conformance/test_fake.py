"""The backend ``fake``: results, refused arguments, groups, and the same recorded calls as a job of real ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.support.calls import COLLECTIVES, EVERYTHING, arrays, invoke
from tests.support.ranks import ProcessJob, joined
from tests.support.worker import leave, rank_and_size
from unicoll.backend.host import fake
from unicoll.calls.flight_recorder import ring
from unicoll.calls.ops import OPS, Arity
from unicoll.diagnosis.recorder_contents import recorded_calls
from unicoll.parallel import GradientBuckets, average_gradients, broadcast_parameters, check_identical
from unicoll.testing import reference


def facts() -> list[tuple[Any, ...]]:
    """The recorded calls without times and backend."""

    def named(arrays: Any) -> list[Any]:
        return [(dtype.name, shape) for dtype, shape in arrays]

    return [
        (c.group, c.ranks, c.seq, c.op, named(c.inputs), named(c.outputs), c.nbytes, c.reduce, c.root)
        + (c.peer, c.tag, c.site, c.state, c.blocking, c.error)
        for c in recorded_calls()
    ]


def program() -> list[tuple[Any, ...]]:
    """Training with buckets, sub-groups, objects and messages; at least four ranks."""
    me, n = dist.get_rank(), dist.get_world_size()
    ring().clear()
    pair, _ = dist.new_subgroups(2)
    odd = dist.new_group([1, 3])
    part = dist.split_group(None, [[0, 2], [1, 3]])
    parameters = {"w": np.ones((40, 30), np.float32), "b": np.ones(30, np.float32), "s": np.ones(7)}
    broadcast_parameters(parameters, src=1)
    buckets = GradientBuckets(parameters, bucket_cap_mb=0.001, first_bucket_mb=0.0001)
    for step in range(3):
        for name in reversed(parameters):
            buckets.ready(name, np.full_like(parameters[name], step))
        buckets.wait()
        losses: list[Any] = [None] * n
        dist.all_gather_object(losses, {"step": step})
        average_gradients([np.ones((3, 2), np.float16)], group=pair)
    check_identical(parameters)
    _collectives(me, n, part)
    _objects(me, n)
    _messages(me, n)
    if me % 2:
        dist.all_reduce(np.ones(5, np.int8), op=dist.ReduceOp.MAX, group=odd)
        dist.gather(np.ones(2), [np.empty(2), np.empty(2)] if me == 1 else None, group_dst=0, group=odd)
    dist.monitored_barrier()
    return facts()


def _collectives(me: int, n: int, part: Any) -> None:
    mesh = dist.init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "tp"))
    for name in ("dp", "tp"):
        dist.all_reduce(np.ones((2, 2)), group=mesh[name].get_group())
    dist.reduce(np.ones((2, 2)), dst=2)
    dist.all_reduce_coalesced([np.ones(3), np.ones((2, 5)), np.ones(4, np.float32)])
    works = [dist.all_reduce(np.ones(1000 * i), async_op=True) for i in range(1, 5)]
    for work in works:
        work.wait()
    dist.scan(np.ones(6), group=part)
    rows = [1] * n
    dist.all_to_all_single(np.empty((n, 3)), np.ones((n, 3)), rows, rows)
    dist.reduce_scatter_tensor(np.empty(2), np.ones(2 * n))
    dist.all_gather_into_tensor(np.empty((n, 4)), np.ones(4), async_op=True).wait()
    try:
        dist.all_reduce(np.ones(3), op="nonsense")
    except dist.DistError:
        pass


def _objects(me: int, n: int) -> None:
    for text in ("two", "2" * 1000):  # the second does not fit the header
        dist.broadcast_object_list([1, text], src=3)
        dist.gather_object(text, [None] * n if me == 2 else None, dst=2)
        dist.scatter_object_list([text], [text] * n if me == 1 else None, src=1)
        dist.all_gather_object([None] * n, text)
    if me == 0:
        dist.send_object_list(["x", 5], dst=3)
    elif me == 3:
        dist.recv_object_list(["y", 6], src=0)


def _messages(me: int, n: int) -> None:
    after, before = (me + 1) % n, (me - 1) % n
    work = dist.isend(np.ones(10), after, tag=3)
    dist.recv(np.empty(10), before, tag=3)
    work.wait()
    sends = [dist.P2POp(dist.isend, np.ones(i), after, tag=i) for i in (1, 2)]
    receives = [dist.P2POp(dist.irecv, np.empty(i), before, tag=i) for i in (1, 2)]
    for each in dist.batch_isend_irecv([*sends, *receives]):
        each.wait()
    if me == 0:
        dist.recv(np.empty(2, np.int32), tag=9)
    elif me == 2:
        dist.send(np.empty(2, np.int32), 0, tag=9)


def program_alone() -> list[tuple[Any, ...]]:
    """The program in this process alone, as one rank of the job that it was started for."""
    rank, size = rank_and_size()
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        return program()
    finally:
        dist.destroy_process_group()


# --- tests ------------------------------------------------------------------------------------------

Join = Callable[[int, int], Any]


@pytest.fixture
def join() -> Iterator[Join]:
    """``join(rank, size)`` makes the default group."""

    def start(rank: int, size: int) -> Any:
        dist.init_process_group("fake", rank=rank, world_size=size)
        return dist.group.WORLD

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_job_needs_no_store_thread_or_connection(join: Join) -> None:
    threads = threading.active_count()
    pg = join(200, 256)
    assert (pg.rank(), pg.size(), dist.get_backend()) == (200, 256, "fake")
    assert dist.get_backend_config() == "cpu:fake,cuda:fake"
    assert pg.job.control is None
    assert "backend fake" in dist.explain()
    assert "nothing is exchanged" in dist.explain()
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work.is_completed()
    assert threading.active_count() == threads
    dist.destroy_process_group()
    with pytest.raises(dist.GroupAbortedError, match="has been destroyed"):
        pg.barrier()
    dist.init_process_group("FAKE", store=dist.HashStore(), rank=0, world_size=2)
    assert dist.get_rank() == 0


def test_a_compression_is_accepted_and_checked(join: Join) -> None:
    group = join(0, 4).using(compression="int8")
    x = np.full(100_000, 0.5, np.float32)
    group.all_reduce(x)
    assert (x == 2).all()
    with pytest.raises(
        dist.DistArgumentError, match=r"all_reduce\(int64\[3\], SUM\): compression='int8' needs"
    ):
        group.all_reduce(np.ones(3, np.int64))


def test_rank_and_size_are_checked(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(dist.DistArgumentError, match="rank 4 is not below world_size 4"):
        join(4, 4)
    with pytest.raises(dist.DistArgumentError, match="unknown rank"):
        dist.init_process_group("fake", world_size=4)
    with pytest.raises(dist.DistArgumentError, match="cannot be combined"):
        dist.init_process_group("cpu:fake,cuda:gloo", rank=0, world_size=4)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")
    join(-1, -1)
    assert (dist.get_rank(), dist.get_world_size()) == (5, 6)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 3), (2, 3), (6, 7)])
@pytest.mark.parametrize("op", [name for name in COLLECTIVES if name != "barrier"])
def test_results_are_those_of_equal_ranks(join: Join, op: str, rank: int, size: int) -> None:
    join(rank, size)
    rng = np.random.default_rng(5)
    row = OPS[op]
    for root in sorted({0, rank}):
        for name in ("float32", "int8", "float16", "complex64"):
            for reduce in _reductions(row, name):
                _check(op, rank, size, root, name, reduce, rng)


def _reductions(row: Any, name: str) -> list[str | None]:
    if not row.reduces:
        return [None]
    every = ["SUM", "PRODUCT", "AVG", "PREMUL_SUM"]
    every += [] if name == "complex64" else ["MIN", "MAX"]
    every += ["BAND", "BOR", "BXOR"] if name == "int8" else []
    return [r for r in every if r not in row.refuses]


def _check(op: str, rank: int, size: int, root: int, name: str, reduce: str | None, rng: Any) -> None:
    row = OPS[op]

    def x(times: int) -> Any:
        shape = (4 * times,)
        return reference.values(name, reduce, shape, rng, special=False)

    given = arrays(row, x, size, rank == root)
    sides = [p.side for p in row.parameters if p.side != "splits"]
    listed = [[] if g is None else g if isinstance(g, list) else [g] for g in given]
    inputs = [a.copy() for side, g in zip(sides, listed, strict=True) if side != "output" for a in g]
    outputs = [a for side, g in zip(sides, listed, strict=True) if side != "input" for a in g]
    before = [a.copy() for a in outputs]
    more: dict[str, Any] = {}
    if row.reduces:
        by = getattr(dist.ReduceOp, reduce or "")
        more["op"] = by(reference.factor_of(name)) if reduce == "PREMUL_SUM" else by
    if row.rooted:
        more[row.root_name] = root
    getattr(dist, op)(*given, **more)
    if row.inputs is Arity.PER_RANK_AT_ROOT and rank != root:
        expected = [[before[0]]]
    else:
        counts = np.full((size, size), 4)
        expected = reference.contributions(op, [inputs] * size, rank, root, counts)
    if (row.exclusive and rank == 0) or (row.outputs is Arity.ONE_AT_ROOT and rank != root):
        reduce = None  # the own array, unchanged
    for got, contributions in zip(outputs, expected, strict=True):
        assert reference.complaint(name, reduce, contributions, got) is None, (op, name, reduce, root)


def test_uneven_parts_are_cut_and_the_rest_is_kept(join: Join) -> None:
    join(1, 3)
    out = [np.full(n, -1.0) for n in (1, 2, 4)]
    dist.all_gather(out, np.array([5.0, 6.0]))
    assert [a.tolist() for a in out] == [[5], [5, 6], [5, 6, -1, -1]]
    got = np.full(6, -1)
    dist.all_to_all_single(got, np.arange(5), [1, 2, 3], [2, 2, 1])
    assert got.tolist() == [2, 2, 3, 2, 3, -1]


def test_arrays_of_other_libraries_and_strided_ones(join: Join) -> None:
    torch = pytest.importorskip("torch")
    join(1, 256)
    x = torch.full((3, 2), 2, dtype=torch.bfloat16).t()
    dist.all_reduce(x)
    assert x.tolist() == [[512.0] * 3] * 2
    y = np.ones((4, 6))[:, ::2]
    dist.all_reduce(y, op=dist.ReduceOp.SUM)
    assert (y == 256).all()
    z = np.arange(6)[::2]
    assert dist.recv(z) == 2
    dist.broadcast(z, src=0)
    assert z.tolist() == [0, 2, 4]


_ADDRESSES = count(1 << 20, 1 << 20)


class DeviceArray:
    """Memory of a GPU that does not exist: an access ends the process."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.device = 0
        self.dtype = np.dtype(np.float32)
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (next(_ADDRESSES), False),
            "version": 3,
            "strides": None,
        }


@pytest.mark.parametrize("op", COLLECTIVES)
def test_device_arrays_are_not_touched(join: Join, op: str) -> None:
    join(1, 4)
    root = {f"group_{OPS[op].root_name}": 0} if OPS[op].rooted else {}
    for async_op in (False, True):
        given = arrays(OPS[op], lambda times: DeviceArray((4 * times,)), 4, at_root=False)
        work = getattr(dist, op)(*given, async_op=async_op, **root)
        if async_op:
            assert work.is_success()
    dist.send(DeviceArray((3,)), 0)
    assert dist.recv(DeviceArray((3,)), 2) == 2
    calls = recorded_calls()[-4:]
    assert [(c.op, c.backend, c.state) for c in calls[:2]] == [(op, "fake", "completed")] * 2
    assert [c.nbytes for c in calls[2:]] == [12, 12]


@pytest.mark.parametrize("rank", [0, 2])
def test_everything_returns(join: Join, rank: int) -> None:
    join(rank, 5)
    sub = dist.new_group([0, 2, 4])
    for name in [*EVERYTHING, "send and recv"]:
        for root in (0, 1):
            invoke(name, root=root)
            invoke(name, group=sub, root=root)
    torch = pytest.importorskip("torch")
    from unicoll.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.ones(3, 4)).sum().backward()
    assert model.module.weight.grad is not None


@pytest.mark.parametrize("text", ["two", "2" * 1000], ids=["in the header", "after it"])
def test_objects(join: Join, text: str) -> None:
    join(3, 5)
    found: list[Any] = [None] * 5
    dist.all_gather_object(found, {"a": text})
    assert found == [{"a": text}] * 5
    found = [None] * 5
    dist.gather_object(text, found, dst=3)
    assert found == [text] * 5
    dist.gather_object(text, None, dst=0)
    own = [1, text]
    dist.broadcast_object_list(own, src=0)
    assert own == [1, text]
    part = [text]
    dist.scatter_object_list(part, None, src=0)
    assert part == [text]
    dist.scatter_object_list(part, [letter + text for letter in "abcde"], src=3)
    assert part == ["d" + text]
    for batched in (False, True):
        assert dist.recv_object_list(own, src=4, use_batch=batched) == 4
        dist.send_object_list(own, dst=4, use_batch=batched)
    assert own == [1, text]


def test_bad_arguments_are_refused(join: Join) -> None:
    pg = join(1, 4)
    x = np.ones(3)
    read_only = np.ones(3)
    read_only.flags.writeable = False
    for error, call in [
        (dist.DistArgumentError, lambda: dist.all_reduce(read_only)),
        (dist.DistTypeError, lambda: dist.all_reduce("text")),
        (dist.DistArgumentError, lambda: dist.broadcast(x, src=4)),
        (dist.DistArgumentError, lambda: dist.send(x, 1)),
        (dist.DistArgumentError, lambda: dist.send(x, 7)),
        (dist.DistArgumentError, lambda: dist.all_gather_into_tensor(np.ones(7), x)),
        (dist.DistArgumentError, lambda: dist.all_gather([x] * 3, x)),
        (dist.DistArgumentError, lambda: dist.scatter(x, [np.ones(2)] * 4, src=1)),
        (dist.DistTypeError, lambda: dist.all_reduce(x, op=dist.ReduceOp.BAND)),
        (dist.BackendUnavailableError, lambda: pg.symmetric_empty((3,))),
    ]:
        with pytest.raises(error):
            call()
    assert pg.sequence == 1  # of the refused list, which the other ranks would see
    with pytest.raises(dist.DistArgumentError, match="no peer"):
        dist.new_group([1]).recv(x)


def test_all_groups_of_a_job_are_fake_or_none(join: Join) -> None:
    join(0, 4)
    assert dist.get_backend(dist.new_group([0, 1], backend="gloo")) == "fake"
    part = dist.split_group(None, [[0, 1], [2, 3]], backend="nccl")
    assert dist.get_backend(part) == "fake"
    larger = dist.grow_group([2], part)
    assert larger.ranks == (0, 1, 2)
    assert dist.shrink_group([1], larger).ranks == (0, 2)
    with pytest.raises(dist.DistArgumentError, match="cannot be added to a group"):
        dist.grow_group([0], dist.GroupMember.NON_GROUP_MEMBER)
    dist.group.WORLD.abort("enough")
    with pytest.raises(dist.GroupAbortedError, match="enough"):
        dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1)
    with pytest.raises(dist.DistArgumentError, match="without other processes"):
        dist.new_group([0], backend="fake")


def test_numbers_of_calls_in_callbacks_are_in_order(join: Join) -> None:
    join(0, 4)
    ring().clear()
    first = dist.all_reduce(np.ones(2), async_op=True)
    first.add_done_callback(lambda: dist.broadcast(np.ones(3), src=1))
    dist.barrier()
    assert [(c.op, c.seq) for c in recorded_calls()] == [("all_reduce", 1), ("broadcast", 2), ("barrier", 3)]


def test_calls_are_counted_beyond_the_recorders_size(join: Join) -> None:
    join(0, 4)
    x, y = np.ones(8), np.ones(9)
    for _ in range(3000):
        dist.all_reduce(x)
    dist.all_reduce(y)
    assert len(recorded_calls()) <= (ring().maxlen or 0) < 3000
    dist.destroy_process_group()
    found = {(k.op, k.nbytes): number for k, number in fake.counts()}
    assert found == {("all_reduce", 64): 3000, ("all_reduce", 72): 1}
    join(0, 4)
    assert fake.counts() == []


def test_recorded_calls_are_those_of_real_ranks() -> None:
    with joined(4) as job:
        job.call(program)
        real = job.results()
        job.call(leave)
        assert job.results() == [[]] * 4
    with ProcessJob(4) as job:
        job.call(program_alone)
        imitated = job.results()
    for rank in range(4):
        assert len(real[rank]) >= 50
        assert {"send", "recv", "scan", "scatter", "barrier", "all_to_all_single"} <= {
            c[3] for c in real[0] + real[2]
        }
        for theirs, ours in zip(real[rank], imitated[rank], strict=True):
            assert ours == theirs, rank
