"""The simulated NCCL follows NCCL's rules; several ranks in one process, each with a device of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nccl_comm.library.interface import AVG, DATA_TYPES, IN_PROGRESS, MAX, SUCCESS, SUM, Config
from tests.simulated_nccl import arrays
from tests.simulated_nccl.arrays import Array
from tests.simulated_nccl.communicators import Communicator
from tests.simulated_nccl.cuda import Simulation
from tests.simulated_nccl.nccl import Result, SimulatedNccl
from tests.simulated_nccl.streams import LATER, Op
from unicoll.arrays.cuda import CudaError
from unicoll.backend.options import CallOptions

PATIENCE_S = 20.0
F64 = DATA_TYPES["float64"]
Codes = list[int]


class World:
    """``size`` ranks of one communicator, on devices of their own, with a stream each."""

    def __init__(
        self, size: int, policy: str = "oldest", blocking: bool = False, version: int = 23007
    ) -> None:
        self.size = size
        self.sim = Simulation(size, policy=policy)
        arrays.use(self.sim)
        self.nccl = SimulatedNccl(self.sim, version)
        self.config = Config(blocking=blocking)
        self.streams = [self.sim.cuda.create_stream(r) for r in range(size)]
        self.comms: list[int] = []
        if size:
            _, unique = self.nccl.unique_id()
            begun = threads([partial(self._begin, unique, r) for r in range(size)])
            assert [code for code, _ in begun] == [SUCCESS if blocking else IN_PROGRESS] * size
            self.comms = [slot.value for _, slot in begun]
            self.settle()

    def _begin(self, unique: bytes, rank: int) -> Any:
        self.sim.cuda.set_device(rank)
        return self.nccl.comm_init(self.size, [unique], rank, self.config)

    def made(self, rank: int) -> Communicator:
        """A rank's communicator, as an object of the simulation."""
        return next(c for c in self.nccl.communicators if c.rank == rank)

    def settle(self, comms: Sequence[int] | None = None) -> Codes:
        """Poll communicators until nothing is in progress; their states."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            states = [self.nccl.comm_state(c)[1] for c in self.comms if comms is None or c in comms]
            if IN_PROGRESS not in states:
                return states
            assert time.monotonic() < deadline, "still in progress"
            time.sleep(0.001)

    def arrays(self, *values: Any, dtype: Any = np.float64) -> list[Array]:
        """An array for each rank, made on its stream."""
        made = []
        for rank, each in enumerate(values):
            with arrays.device(rank), arrays.Stream(handle=self.streams[rank]):
                made.append(arrays.array(np.asarray(each, dtype)))
        return made

    def read(self, given: Sequence[Array]) -> list[Any]:
        """The elements of each rank's array, read on its stream."""
        found = []
        for rank, each in enumerate(given):
            with arrays.device(rank), arrays.Stream(handle=self.streams[rank]):
                found.append(each.numpy().tolist())
        return found

    def all_reduce(self, given: Sequence[Array], op: int = SUM, ranks: Sequence[int] | None = None) -> Codes:
        codes = []
        for r in range(self.size) if ranks is None else ranks:
            x = given[r]
            code = self.nccl.all_reduce(x.ptr, x.ptr, x.size, F64, op, self.comms[r], self.streams[r])
            codes.append(code)
        return codes

    def close(self) -> None:
        arrays.use(None)
        self.nccl.close()
        self.sim.close()


def threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """The functions' results, each called on a thread of its own."""
    results: list[Any] = [None] * len(functions)

    def run(i: int) -> None:
        results[i] = functions[i]()

    made = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in made:
        thread.start()
    for thread in made:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return results


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def begin(*args: Any, **kwargs: Any) -> World:
        made.append(World(*args, **kwargs))
        return made[-1]

    yield begin
    for each in made:
        each.close()


# --- results of operations ---

_RANKS = range(3)
_OPERATIONS: dict[str, tuple[tuple[int, int], dict[str, int], Callable[[list[Any]], list[Any]]]] = {
    "all_reduce": ((2, 2), {"op": SUM}, lambda x: [[a + b + c for a, b, c in zip(*x, strict=True)]] * 3),
    "broadcast": ((2, 2), {"root": 1}, lambda x: [x[1]] * 3),
    "reduce": ((2, 2), {"op": MAX, "root": 2}, lambda x: [None, None, x[2]]),
    "all_gather": ((2, 6), {}, lambda x: [x[0] + x[1] + x[2]] * 3),
    "reduce_scatter": (
        (6, 2),
        {"op": AVG},
        lambda x: [[sum(y[2 * r + i] for y in x) / 3 for i in (0, 1)] for r in _RANKS],
    ),
    "all_to_all": ((6, 6), {}, lambda x: [[v for y in x for v in y[2 * r : 2 * r + 2]] for r in _RANKS]),
}


def _nearly(expected: list[Any], gets: int) -> list[Any]:
    """The expected values, up to the rounding of an average."""
    return [pytest.approx([-1.0] * gets if e is None else e, rel=1e-15) for e in expected]


@pytest.mark.parametrize("kind", _OPERATIONS)
def test_the_result_of_each_operation(world: Callable[..., World], kind: str) -> None:
    w = world(3, blocking=True)
    (gives, gets), more, expected = _OPERATIONS[kind]
    given = [[float(10 * r + i) for i in range(gives)] for r in _RANKS]
    sends, receives = w.arrays(*given), w.arrays(*[[-1.0] * gets for _ in _RANKS])
    for r in _RANKS:
        args = {"count": 2, "dtype": F64, **more, "comm": w.comms[r], "stream": w.streams[r]}
        assert getattr(w.nccl, kind)(sends[r].ptr, receives[r].ptr, **args) == SUCCESS
    assert w.read(receives) == _nearly(expected(given), gets)
    assert w.read(sends) == given
    assert w.sim.faults == []


@pytest.mark.parametrize("kind", _OPERATIONS)
def test_each_operation_takes_options(world: Callable[..., World], kind: str) -> None:
    w = world(3, blocking=True, version=23203)
    (gives, gets), more, expected = _OPERATIONS[kind]
    given = [[float(10 * r + i) for i in range(gives)] for r in _RANKS]
    sends, receives = w.arrays(*given), w.arrays(*[[-1.0] * gets for _ in _RANKS])
    operations = w.nccl.with_options(CallOptions(max_ctas=4))
    for r in _RANKS:
        args = {
            "count": 2,
            "dtype": F64,
            **more,
            "comm": w.comms[r],
            "stream": w.streams[r],
        }
        assert getattr(operations, kind)(sends[r].ptr, receives[r].ptr, **args) == SUCCESS
    assert w.read(receives) == _nearly(expected(given), gets)
    assert w.nccl.machine.mismatches == []


def test_options_that_differ_by_rank_do_not_match(world: Callable[..., World]) -> None:
    w = world(2, blocking=True, version=23203)
    xs = w.arrays([1.0], [2.0])
    for r, ctas in enumerate((4, 8)):
        operations = w.nccl.with_options(CallOptions(max_ctas=ctas))
        code = operations.all_reduce(xs[r].ptr, xs[r].ptr, 1, F64, SUM, w.comms[r], w.streams[r])
        assert code == SUCCESS
    eventually(lambda: w.nccl.machine.mismatches)
    assert "max_ctas=4" in w.nccl.machine.mismatches[0]
    assert "max_ctas=8" in w.nccl.machine.mismatches[0]


def test_an_impossible_algorithm_is_refused_without_other_effects(world: Callable[..., World]) -> None:
    w = world(1, blocking=False, version=23203)
    (x,), (comm,), (stream,) = w.arrays([5.0]), w.comms, w.streams
    told = {"all_reduce": "nvls", "broadcast": "tree", "all_to_all": "ring"}
    for kind, algorithm in told.items():
        _, more, _ = _OPERATIONS[kind]
        rest = {**more, "root": 0} if "root" in more else more
        args = {"count": 1, "dtype": F64, **rest, "comm": comm, "stream": stream}
        for force, expected in ((None, Result.INVALID_ARGUMENT), (False, IN_PROGRESS)):
            operations = w.nccl.with_options(CallOptions(algorithm=algorithm, force_algorithm=force))
            code = getattr(operations, kind)(x.ptr, x.ptr, **args)
            assert code == expected, (kind, force)
            assert w.settle() == [SUCCESS]
    assert w.read([x]) == [[5.0]]


@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_every_element_type_is_summed_and_scaled(world: Callable[..., World], dtype: str) -> None:
    w = world(2, blocking=True)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    xs = w.arrays([1, 1], [3, 1], dtype=kind)
    code = DATA_TYPES[dtype]
    for r in range(2):
        assert w.nccl.all_reduce(xs[r].ptr, xs[r].ptr, 2, code, SUM, w.comms[r], w.streams[r]) == SUCCESS
        factor = np.array([r + 1], kind).tobytes()
        made, op = w.nccl.premul_sum(factor, code, w.comms[r])
        assert made == SUCCESS
        assert w.nccl.all_reduce(xs[r].ptr, xs[r].ptr, 2, code, op, w.comms[r], w.streams[r]) == SUCCESS
        assert w.nccl.redop_destroy(op, w.comms[r]) == SUCCESS
        assert w.nccl.redop_destroy(op, w.comms[r]) == Result.INVALID_ARGUMENT
    assert w.read(xs) == [[12, 6], [12, 6]]


def test_elements_of_large_arrays_arrive(world: Callable[..., World]) -> None:
    w = world(2)
    xs = w.arrays(*(np.arange(500_000) * (r + 1) for r in range(2)))
    assert w.all_reduce(xs) == [IN_PROGRESS] * 2
    w.settle()
    assert all(np.array_equal(got, np.arange(500_000) * 3) for got in map(np.asarray, w.read(xs)))


def test_empty_collectives_have_no_effect(world: Callable[..., World]) -> None:
    w = world(2, blocking=True)
    assert w.nccl.all_reduce(0, 0, 0, F64, SUM, w.comms[0], w.streams[0]) == SUCCESS
    w.sim.synchronize()  # no kernel waits for rank 1


# --- non-blocking communicators ---


def test_a_kernel_reaches_its_stream_at_the_next_poll(world: Callable[..., World]) -> None:
    w = world(2)
    xs = w.arrays([1.0], [2.0])
    w.sim.synchronize()
    assert w.all_reduce(xs) == [IN_PROGRESS] * 2
    assert w.read(xs) == [[1.0], [2.0]]  # an event recorded before the poll would have included no kernel
    assert w.settle() == [SUCCESS] * 2
    assert w.read(xs) == [[3.0], [3.0]]


def test_a_communicator_in_progress_refuses_other_calls(world: Callable[..., World]) -> None:
    w = world(2)
    xs = w.arrays([1.0], [2.0])
    w.all_reduce(xs, ranks=[0])
    assert w.nccl.premul_sum(b"\0" * 8, F64, w.comms[0])[0] == Result.INVALID_ARGUMENT
    assert w.settle([w.comms[0]]) == [SUCCESS]
    w.all_reduce(xs, ranks=[0])
    assert w.all_reduce(xs, ranks=[0]) == [Result.INVALID_ARGUMENT]
    assert w.nccl.comm_state(w.comms[0]) == (SUCCESS, Result.INVALID_ARGUMENT)  # and it has failed
    assert "before the previous operation" in w.nccl.last_error()


def test_a_communicator_is_ready_once_all_ranks_have_joined(world: Callable[..., World]) -> None:
    w = world(0)
    _, unique = w.nccl.unique_id()
    code, first = w.nccl.comm_init(2, [unique], 0, Config(blocking=False))
    assert code == IN_PROGRESS
    assert w.nccl.comm_state(first.value or 0) == (SUCCESS, IN_PROGRESS)
    _, second = w.nccl.comm_init(2, [unique], 1, Config(blocking=False))
    w.comms = [first.value or 0, second.value or 0]
    assert w.settle() == [SUCCESS, SUCCESS]


def test_an_address_without_a_listener_is_an_error(world: Callable[..., World]) -> None:
    w = world(0)
    _, slot = w.nccl.comm_init(1, [b"x" * 128], 0, Config())
    w.comms = [slot.value or 0]
    assert w.settle() == [Result.SYSTEM_ERROR]
    assert w.nccl.comm_init(2, [b"x" * 128], 2, Config())[0] == Result.INVALID_ARGUMENT


def test_finalize_waits_for_the_work(world: Callable[..., World]) -> None:
    w = world(2)
    xs = w.arrays([1.0], [2.0])
    w.all_reduce(xs)
    w.settle()
    assert w.nccl.comm_finalize(w.comms[0]) == IN_PROGRESS
    assert w.settle() == [SUCCESS] * 2
    assert w.read(xs) == [[3.0], [3.0]]
    assert w.nccl.comm_finalize(w.comms[0]) == Result.INVALID_ARGUMENT
    assert w.all_reduce(xs, ranks=[0]) == [Result.INVALID_USAGE]
    assert [w.nccl.comm_destroy(c) for c in w.comms] == [SUCCESS] * 2
    assert w.nccl.communicators == []
    assert w.nccl.comm_destroy(w.comms[0]) == Result.INVALID_ARGUMENT
    assert "has been destroyed" in w.sim.faults[0]


# --- groups, order, mismatches ---


def _exchange(w: World, grouped: bool) -> list[Array]:
    """Each of two ranks sends to the other and receives from it."""
    xs, ys = w.arrays([1.0], [2.0]), w.arrays([0.0], [0.0])
    for r in range(2):
        if grouped:
            assert w.nccl.group_start() == SUCCESS
        assert w.nccl.send(xs[r].ptr, 1, F64, 1 - r, w.comms[r], w.streams[r]) == SUCCESS
        assert w.nccl.recv(ys[r].ptr, 1, F64, 1 - r, w.comms[r], w.streams[r]) == SUCCESS
        if grouped:
            assert w.nccl.group_end() == SUCCESS
    return ys


def test_sends_and_receives_of_a_group_run_together(world: Callable[..., World]) -> None:
    w = world(2, blocking=True)
    assert w.read(_exchange(w, grouped=True)) == [[2.0], [1.0]]


def test_without_a_group_an_exchange_hangs_and_abort_ends_it(world: Callable[..., World]) -> None:
    w = world(2, blocking=True)
    ys = _exchange(w, grouped=False)
    event = w.sim.cuda.create_event(0)
    w.sim.cuda.record(event, w.streams[0])
    eventually(lambda: all(c._running for c in w.nccl.communicators))  # both sends are running
    assert not w.sim.cuda.event_done(event)
    for comm in w.comms:
        assert w.nccl.comm_abort(comm) == SUCCESS
    assert w.read(ys) == [[0.0], [0.0]]
    assert w.nccl.communicators == []


def test_the_calls_of_a_group_take_effect_at_its_end(world: Callable[..., World]) -> None:
    w = world(2, blocking=True)
    xs = w.arrays([1.0], [2.0])
    w.sim.synchronize()
    w.nccl.group_start()
    w.nccl.group_start()
    assert w.all_reduce(xs) == [SUCCESS] * 2
    assert w.all_reduce(xs, MAX) == [SUCCESS] * 2
    assert w.nccl.group_end() == SUCCESS
    assert not any(c.unfinished() for c in w.nccl.communicators)
    assert w.nccl.group_end() == SUCCESS
    assert [len(c.unfinished()) for c in w.nccl.communicators] == [1, 1]  # one kernel for both operations
    assert w.nccl.group_end() == Result.INVALID_USAGE


def test_an_error_in_a_group_is_returned_at_its_end_and_nothing_is_launched(
    world: Callable[..., World],
) -> None:
    w = world(2, blocking=True)
    xs = w.arrays([1.0], [2.0])
    w.nccl.group_start()
    w.all_reduce(xs)
    assert w.nccl.all_reduce(0, 0, 1, F64, SUM, w.comms[0], w.streams[0]) == Result.INVALID_ARGUMENT
    assert w.nccl.group_end() == Result.INVALID_ARGUMENT
    assert not any(c.unfinished() for c in w.nccl.communicators)
    assert w.all_reduce(xs) == [SUCCESS] * 2  # a blocking communicator remains usable
    assert w.read(xs) == [[3.0], [3.0]]


@pytest.mark.parametrize("blocking", [True, False])
def test_a_first_message_waits_for_the_call_of_the_peer(world: Callable[..., World], blocking: bool) -> None:
    """A later one does not; the first collective waits for all ranks."""
    w = world(2, blocking=blocking)
    w.nccl.machine.connects_late = True
    x, y = w.arrays([1.0], [0.0])

    def message(rank: int) -> int:
        w.sim.cuda.set_device(rank)
        call, array = (w.nccl.recv, y) if rank else (w.nccl.send, x)
        return call(array.ptr, 1, F64, 1 - rank, w.comms[rank], w.streams[rank])

    def first_waits(call: Callable[[int], Any]) -> None:
        thread = threading.Thread(target=call, args=(0,))
        thread.start()
        thread.join(PATIENCE_S if not blocking else 0.05)
        assert thread.is_alive() == blocking
        assert blocking or w.nccl.comm_state(w.comms[0])[1] == IN_PROGRESS
        call(1)
        thread.join(PATIENCE_S)
        assert w.settle() == [SUCCESS] * 2

    first_waits(message)
    assert message(0) == (SUCCESS if blocking else IN_PROGRESS)
    assert w.settle([w.comms[0]]) == [SUCCESS]
    message(1)
    assert w.settle() == [SUCCESS] * 2
    first_waits(lambda rank: w.all_reduce([x, y], ranks=[rank]))
    assert w.read([x, y]) == [[2.0]] * 2


def test_sending_to_oneself_needs_a_group(world: Callable[..., World]) -> None:
    w = world(1, blocking=True)
    (x,), (y,) = w.arrays([5.0]), w.arrays([0.0])
    (comm,), (stream,) = w.comms, w.streams
    assert w.nccl.send(x.ptr, 1, F64, 0, comm, stream) == Result.INVALID_USAGE
    w.nccl.group_start()
    w.nccl.send(x.ptr, 1, F64, 0, comm, stream)
    w.nccl.recv(y.ptr, 1, F64, 0, comm, stream)
    assert w.nccl.group_end() == SUCCESS
    assert w.read([y]) == [[5.0]]


def test_kernels_of_one_communicator_run_in_order_whatever_their_streams(world: Callable[..., World]) -> None:
    w = world(2, policy="newest", blocking=True)
    xs, ys = w.arrays([1.0], [2.0]), w.arrays([10.0], [20.0])
    w.sim.synchronize()
    others = [w.sim.cuda.create_stream(r) for r in range(2)]
    with w.sim.hold():
        w.all_reduce(xs)
        for r in range(2):
            w.nccl.all_reduce(ys[r].ptr, ys[r].ptr, 1, F64, MAX, w.comms[r], others[r])
    w.sim.synchronize()
    assert w.read(xs) == [[3.0], [3.0]]
    assert w.read(ys) == [[20.0], [20.0]]
    assert w.nccl.machine.mismatches == []


@pytest.mark.parametrize("wrong", ["count", "op", "message"])
def test_calls_that_do_not_match_hang_and_are_recorded(world: Callable[..., World], wrong: str) -> None:
    w = world(2, blocking=True)
    xs = w.arrays([1.0, 1.0], [2.0, 2.0])
    ptrs = [x.ptr for x in xs]
    for r in range(2):
        count, op = 1 + (r if wrong != "op" else 0), r if wrong == "op" else 0
        if wrong == "message":
            call = (w.nccl.send, w.nccl.recv)[r]
            assert call(ptrs[r], count, F64, 1 - r, w.comms[r], w.streams[r]) == SUCCESS
        else:
            code = w.nccl.all_reduce(ptrs[r], ptrs[r], count, F64, op, w.comms[r], w.streams[r])
            assert code == SUCCESS
    eventually(lambda: w.nccl.machine.mismatches)
    assert all(c.unfinished() for c in w.nccl.communicators)
    threads([partial(w.nccl.comm_abort, c) for c in w.comms])
    w.sim.synchronize()


# --- arguments ---


def test_invalid_arguments_are_refused(world: Callable[..., World]) -> None:
    w = world(2, blocking=True)
    x = w.arrays([1.0, 2.0], [1.0])[0]
    p, comm, stream = x.ptr, w.comms[0], w.streams[0]

    def reduce(ptr: int = p, count: int = 1, dtype: int = F64, op: int = SUM, on: int = stream) -> int:
        return w.nccl.all_reduce(ptr, ptr, count, dtype, op, comm, on)

    for code in (
        reduce(ptr=0),
        reduce(ptr=12345),
        reduce(count=-1),
        reduce(dtype=12),
        reduce(dtype=-1),
        reduce(op=9),
    ):
        assert code == Result.INVALID_ARGUMENT
    assert reduce(ptr=w.sim.cuda.pin(64)) == Result.INVALID_ARGUMENT
    assert reduce(on=w.streams[1]) == Result.CUDA_ERROR
    assert reduce(on=0xBAD) == Result.CUDA_ERROR
    assert w.nccl.broadcast(p, p, 1, F64, 2, comm, stream) == Result.INVALID_ARGUMENT
    assert w.nccl.send(p, 1, F64, -1, comm, stream) == Result.INVALID_ARGUMENT
    assert w.nccl.all_reduce(p, p, 1, F64, SUM, 0xBAD, stream) == Result.INVALID_ARGUMENT
    assert w.nccl.comm_state(0xBAD)[0] == Result.INVALID_ARGUMENT
    w.sim.faults.clear()
    assert reduce(count=100_000) == Result.INVALID_ARGUMENT
    assert "goes beyond" in w.sim.faults[0]
    assert w.nccl.comm_state(comm) == (SUCCESS, SUCCESS)


def test_a_refused_operation_fails_a_non_blocking_communicator(world: Callable[..., World]) -> None:
    w = world(1)
    assert w.nccl.all_reduce(0, 0, 1, F64, SUM, w.comms[0], w.streams[0]) == Result.INVALID_ARGUMENT
    assert w.nccl.comm_state(w.comms[0]) == (SUCCESS, Result.INVALID_ARGUMENT)


@pytest.mark.parametrize("there", [True, False])
def test_functions_exist_from_their_versions_on(world: Callable[..., World], there: bool) -> None:
    since = {"ncclCommRevoke": 22807, "ncclCommShrink": 22700, "ncclAlltoAll": 22800, "ncclCommSplit": 21800}
    w = world(0)
    for name, version in since.items():
        w.nccl._version = version if there else version - 1
        assert w.nccl.has(name) is there
        assert w.nccl.has("ncclAllReduce")
    if not there:
        with pytest.raises(AttributeError, match="undefined symbol: ncclCommSplit"):
            w.nccl.comm_split(1, None, 0, Config())


def test_float8_exists_from_2_24_on(world: Callable[..., World]) -> None:
    for version, code in ((22400, SUCCESS), (22307, Result.INVALID_ARGUMENT)):
        w = world(1, blocking=True, version=version)
        (x,) = w.arrays([1.0])
        dtype = DATA_TYPES["float8_e5m2"]
        assert w.nccl.all_reduce(x.ptr, x.ptr, 1, dtype, SUM, w.comms[0], w.streams[0]) == code


def test_one_rank_cannot_average_float8(world: Callable[..., World]) -> None:
    """ncclLaunchOneRank's cases for float8 depend on __CUDA_ARCH__, which is not defined in code of the host."""
    for size, code in ((1, Result.INVALID_ARGUMENT), (2, SUCCESS)):
        w = world(size, blocking=True)
        x, *_ = w.arrays(*[[1.0]] * size)
        for name, op, expected in (
            ("float8_e5m2", AVG, code),
            ("float8_e5m2", SUM, SUCCESS),
            ("float16", AVG, SUCCESS),
        ):
            answer = w.nccl.all_reduce(x.ptr, x.ptr, 1, DATA_TYPES[name], op, w.comms[0], w.streams[0])
            assert answer == expected, (size, name)


# --- errors, abort, revoke, shrink, split ---


def test_an_asynchronous_error_is_reported_while_the_kernel_runs(world: Callable[..., World]) -> None:
    w = world(2)
    xs = w.arrays([1.0], [2.0])
    w.all_reduce(xs, ranks=[0])
    w.settle()
    w.nccl.inject(Result.REMOTE_ERROR)
    assert w.settle() == [Result.REMOTE_ERROR] * 2
    assert w.all_reduce(xs, ranks=[0]) == [Result.REMOTE_ERROR]
    assert len(w.made(0).unfinished()) == 1
    reader = threading.Thread(target=w.read, args=(xs[:1],))
    reader.start()
    assert w.nccl.comm_abort(w.comms[0]) == SUCCESS
    reader.join(PATIENCE_S)
    assert not reader.is_alive()
    assert w.nccl.comm_abort(w.comms[1]) == SUCCESS


def test_an_aborted_result_is_garbage(world: Callable[..., World]) -> None:
    w = world(2, blocking=True)
    xs = w.arrays([1.0], [2.0])
    w.all_reduce(xs, ranks=[0])
    w.sim.scheduler.request(w.made(0)._last)
    eventually(lambda: w.made(0)._running)
    w.nccl.comm_abort(w.comms[0])
    assert w.read(xs[:1]) != [[1.0]]


def test_an_abort_can_hang(world: Callable[..., World]) -> None:
    w = world(1)
    w.nccl.hang_aborts.set()
    thread = threading.Thread(target=w.nccl.comm_abort, args=(w.comms[0],))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    w.nccl.hang_aborts.clear()
    thread.join(PATIENCE_S)
    assert w.nccl.communicators == []


@pytest.mark.parametrize("call", ["comm_revoke", "comm_abort"])
def test_a_stopped_kernel_stays_behind_what_is_before_it(world: Callable[..., World], call: str) -> None:
    w = world(1, blocking=True)
    before = w.sim.scheduler.put(w.sim.cuda.stream(w.streams[0]), Op("kernel", lambda op: LATER))
    w.all_reduce(w.arrays([1.0]))
    thread = threading.Thread(target=getattr(w.nccl, call), args=(w.comms[0],))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    w.sim.scheduler.finish(before)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("revoked", [False, True])
def test_an_abort_waits_for_graphs_unless_the_communicator_is_revoked(
    world: Callable[..., World], revoked: bool
) -> None:
    w = world(1, blocking=True)
    (x,) = w.arrays([1.0])
    w.sim.synchronize()
    with w.sim.capture(w.streams[0]) as graphs:
        w.all_reduce([x])
    if revoked:
        assert w.nccl.comm_revoke(w.comms[0]) == SUCCESS
    thread = threading.Thread(target=w.nccl.comm_abort, args=(w.comms[0],))
    thread.start()
    thread.join(PATIENCE_S if revoked else 0.05)
    assert thread.is_alive() != revoked
    graphs[0].destroy()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_departed_rank_is_a_hang_or_a_remote_error(world: Callable[..., World]) -> None:
    w = world(3)
    died = w.made(2)
    w.nccl.network.call(died._channel.close)  # type: ignore[union-attr]
    eventually(lambda: [w.made(r).poll() for r in range(2)] == [Result.REMOTE_ERROR] * 2)


def test_nccl_may_report_a_death_before_it_happens(world: Callable[..., World]) -> None:
    w = world(1)
    w.nccl.vanish()
    eventually(lambda: w.made(0).poll() == Result.REMOTE_ERROR)


def test_revoke_ends_running_kernels_and_allows_a_shrink(world: Callable[..., World]) -> None:
    w = world(3)
    xs = w.arrays([1.0], [2.0], [3.0])
    w.all_reduce(xs, ranks=[0, 2])
    w.settle()
    for r in (0, 2):
        assert w.nccl.comm_revoke(w.comms[r]) == IN_PROGRESS
    assert w.settle() == [SUCCESS] * 3
    w.sim.synchronize()
    assert w.nccl.comm_revoke(w.comms[0]) == Result.INVALID_ARGUMENT
    assert w.nccl.comm_finalize(w.comms[2]) == Result.INVALID_ARGUMENT
    begun = [w.nccl.comm_shrink(w.comms[r], [1], w.config, True) for r in (0, 2)]
    assert [code for code, _ in begun] == [SUCCESS] * 2
    assert [slot.value for _, slot in begun] == [None, None]
    w.settle()
    fresh = [slot.value or 0 for _, slot in begun]
    old, w.comms = w.comms, [*w.comms, *fresh]
    assert w.settle(fresh) == [SUCCESS] * 2
    ys = w.arrays([1.0], [0.0], [3.0])
    for comm, r in zip(fresh, (0, 2), strict=True):
        w.nccl.all_reduce(ys[r].ptr, ys[r].ptr, 1, F64, SUM, comm, w.streams[r])
    w.settle(fresh)
    assert w.read(ys) == [[4.0], [0.0], [4.0]]
    assert w.nccl.comm_shrink(old[1], [1], w.config, True)[0] == Result.INVALID_ARGUMENT
    assert w.all_reduce(xs, ranks=[0]) == [Result.INVALID_USAGE]
    assert w.nccl.comm_state(old[0])[1] == Result.INVALID_USAGE
    assert w.nccl.comm_shrink(old[0], [1], w.config, True)[0] == Result.INVALID_USAGE
    assert w.sim.faults == []


def test_split_makes_groups_by_color(world: Callable[..., World]) -> None:
    w = world(3)
    colors, keys = [5, None, 5], [1, 0, 0]
    begun = [w.nccl.comm_split(w.comms[r], colors[r], keys[r], w.config) for r in range(3)]
    assert begun[0] == (SUCCESS, begun[0][1])
    assert w.settle() == [SUCCESS] * 3
    made = [slot.value for _, slot in begun]
    assert made[1] is None
    w.comms += [m for m in made if m]
    w.settle()
    known = {c.rank: c.device for c in w.nccl.communicators[3:]}
    assert known == {1: 0, 0: 2}


def test_a_late_handle_written_to_a_dropped_slot_is_a_fault(world: Callable[..., World]) -> None:
    w = world(1)
    with w.sim.scheduler.lock:  # the split completes after its slot has been dropped
        w.nccl.comm_split(w.comms[0], 0, 0, w.config)
    w.settle()
    assert "was freed" in w.sim.faults[0]


# --- memory, graphs ---


def test_memory_and_windows(world: Callable[..., World]) -> None:
    w = world(1, blocking=True)
    code, ptr = w.nccl.mem_alloc(4096)
    assert code == SUCCESS
    assert w.sim.cuda.device_of(ptr) == 0
    code, window = w.nccl.window_register(w.comms[0], ptr, 4096, True)
    assert code == SUCCESS
    assert window.value is not None
    assert w.nccl.all_reduce(ptr, ptr, 512, F64, SUM, w.comms[0], w.streams[0]) == SUCCESS
    w.sim.synchronize()
    assert w.nccl.window_deregister(w.comms[0], window.value) == SUCCESS
    assert w.nccl.window_deregister(w.comms[0], window.value) == Result.INVALID_ARGUMENT
    assert w.nccl.mem_free(ptr) == SUCCESS
    assert w.nccl.mem_free(ptr) == Result.CUDA_ERROR
    assert w.sim.faults == []


def test_memory_is_freed_after_it_is_deregistered(world: Callable[..., World]) -> None:
    w = world(1, blocking=True)
    (comm,) = w.comms
    ptr = w.sim.cuda.allocate(0, 4096)
    code, window = w.nccl.window_register(comm, ptr, 4096, True)
    assert (code, window.value) == (Result.CUDA_ERROR, None)  # not memory of ncclMemAlloc
    code, handle = w.nccl.comm_register(comm, ptr, 4096)
    assert code == SUCCESS
    assert w.nccl.comm_deregister(comm, handle + 1) == Result.INVALID_USAGE
    w.sim.cuda.free(ptr)
    assert len(w.sim.faults) == 1
    assert "freed while it is registered" in w.sim.faults[0]
    assert w.nccl.comm_destroy(comm) == SUCCESS
    assert "before its memory was deregistered" in w.sim.faults[1]


def test_mem_free_waits_for_nothing(world: Callable[..., World]) -> None:
    """Unlike cudaFree, ncclMemFree waits for nothing, and a window must not be in use when it is deregistered."""
    w = world(1, blocking=True)
    _, ptr = w.nccl.mem_alloc(4096)
    _, window = w.nccl.window_register(w.comms[0], ptr, 4096, True)
    w.sim.synchronize()
    with w.sim.hold():
        assert w.nccl.all_reduce(ptr, ptr, 512, F64, SUM, w.comms[0], w.streams[0]) == SUCCESS
        assert w.nccl.window_deregister(w.comms[0], window.value or 0) == SUCCESS
        assert w.sim.faults == ["window deregistered before NCCL all_reduce on stream 1 has run"]
        assert w.nccl.mem_free(ptr) == SUCCESS
    assert len(w.sim.faults) == 2
    assert w.sim.faults[1].endswith("freed before NCCL all_reduce on stream 1 has run")


def test_captured_kernels_run_with_the_graph_which_ends_before_the_communicator(
    world: Callable[..., World],
) -> None:
    w = world(2, policy="newest", blocking=True)
    xs = w.arrays([1.0], [2.0])
    w.sim.synchronize()
    graphs = []
    for r in range(2):
        with w.sim.capture(w.streams[r]) as made:
            w.all_reduce(xs, ranks=[r])
        graphs += made
    assert w.read(xs) == [[1.0], [2.0]]
    for _ in range(2):
        for r in range(2):
            w.sim.launch(graphs[r], w.streams[r])
    assert w.read(xs) == [[6.0], [6.0]]
    thread = threading.Thread(target=w.nccl.comm_destroy, args=(w.comms[0],))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    for graph in graphs:
        graph.destroy()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert w.sim.faults == []


def test_streams_of_a_group_are_captured_by_one_graph_or_none(world: Callable[..., World]) -> None:
    w = world(1, blocking=True)
    (x,) = w.arrays([1.0])
    other = w.sim.cuda.create_stream(0)
    with w.sim.capture(other):
        w.nccl.group_start()
        for stream in (w.streams[0], other):
            w.nccl.all_reduce(x.ptr, x.ptr, 1, F64, SUM, w.comms[0], stream)
        assert w.nccl.group_end() == Result.INVALID_USAGE


def test_a_race_with_the_producer_is_found_whatever_the_order(world: Callable[..., World]) -> None:
    w = world(1, policy="oldest", blocking=True)
    x = arrays.full(1, 5.0)  # on the legacy stream, and nothing orders the communicator's stream after it
    w.nccl.all_reduce(x.ptr, x.ptr, 1, F64, SUM, w.comms[0], w.streams[0])
    assert "race" in w.sim.faults[0]


def test_the_host_cannot_wait_while_it_holds_the_device(world: Callable[..., World]) -> None:
    w = world(1, blocking=True)
    xs = w.arrays([1.0])
    with w.sim.hold():
        w.all_reduce(xs)
        with pytest.raises(CudaError, match="holds the device"):
            w.sim.synchronize()
