"""CUDA-aware MPI, under mpirun: conformance, order, and the waits for the device.

Both libraries take those of the simulated device, whose memory is the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from mpi_comm.reductions import _native
from tests.mpi import direct_jobs as jobs
from tests.mpi.mpi_ranks import MpiJob, library, unavailable_reason
from tests.nccl import staged_jobs
from tests.simulated_nccl.ranks import Settings
from tests.support.ranks import Pool, end_cleanly, pools
from tests.support.suite import Suite
from tests.support.worker import enter
from unicoll.arrays.types import BY_NAME

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)


SIZES = (2, 3)
_AGAIN = 3
_RANKS = 2
_RIGHT: dict[str, list[list[float]]] = {
    "producer_is_late": [[3.0, 3.0]] * 2,
    "sender_is_late": [[5.0, 5.0]] * 2,
    "copies_are_late": [[10.0, 10.0], [12.0, 12.0]],
}
_MUTATIONS = (
    ("producer_is_late", "producers"),
    ("sender_is_late", "producers"),
    ("copies_are_late", "copies"),
)
_WRONG: dict[str, list[bool | None]] = {
    "producer_is_late": [True, True],
    "sender_is_late": [True, False],  # the receiver gets what the sender passed too early
    "copies_are_late": [None, None],  # the packed copy's memory may have the same data from an earlier call
}
"""True if a rank's result is wrong with the mutation; None if it may be."""
_SEEN = {"producer_is_late": [True, True], "sender_is_late": [False, True], "copies_are_late": [True, True]}
"""True if the check of device pointers passed to MPI reports the mutation."""


def _start(size: int, seed: int, policy: str = "random", backend: str = "mpi", word: str = "1") -> MpiJob:
    settings = Settings(policy=policy, seed=seed, own_stream=True, backend=backend)
    prepare, env = (jobs.prepare, settings), {"UNICOLL_MPI_CUDA": word}
    return MpiJob(size, backend=backend, warm_up=True, prepare=prepare, env=env)


@pytest.fixture(scope="module")
def pool(seed: int) -> Iterator[Callable[[int], Pool]]:
    with pools(partial(_start, seed=seed)) as made:
        yield made


@pytest.mark.every(n=6)
class TestMPI(Suite):
    """What differs from host arrays: transfer modes, dtypes, layouts, sizes around the switches of algorithm."""

    backend = "mpi"
    families = ("simulated",)
    sample = 10
    sizes = switch_sizes = SIZES
    coalesced_sizes = (2,)
    turn = library().turn

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls, seed: int) -> Iterator[Callable[[int], Pool]]:
        with pools(partial(_start, seed=seed)) as made:
            yield made

    def pairs(self, op: str) -> list[tuple[str, str | None]]:
        """All reductions by device pointer, and a few that are staged, which other tests cover."""
        return [
            (d, r)
            for d, r in super().pairs(op)
            if r is None or d == "float16" or (_native(BY_NAME[d], r) and r not in ("AVG", "PREMUL_SUM"))
        ]

    def boundaries(self, op: str, itemsize: int, size: int) -> Sequence[int]:
        return [n // size // itemsize for n in (4096, jobs.STAGED - 8, jobs.STAGED, jobs.STAGED + 8)]

    def large(self, itemsize: int) -> int:
        return (200_000 // itemsize) | 1

    test_every_layout = None  # type: ignore[assignment]  # covered by the random cases
    test_torch_tensors = None  # type: ignore[assignment]  # CPU tensors are not device arrays
    test_nobody_leaves_a_barrier_before_all_have_come = None  # type: ignore[assignment]  # as without arrays
    test_refuses_what_it_does_not_reduce = None  # type: ignore[assignment]  # as for host arrays
    test_the_same_data_gives_the_same_bits_again = None  # type: ignore[assignment]
    test_buffers_of_other_kinds = None  # type: ignore[assignment]


def test_explain_has_the_mode_of_device_arrays_and_the_reason(pool: Callable[[int], Pool]) -> None:
    for facts in pool(2).run(staged_jobs.facts):
        assert facts["sum"] == [2.0] * 3
        assert "cuda arrays that it serves are direct: UNICOLL_MPI_CUDA=1" in facts["before"]
        assert "cuda arrays by address to mpi" in facts["after"]
        assert "through page-locked memory" in facts["after"]


def test_operations_that_pass_device_pointers(pool: Callable[[int], Pool]) -> None:
    staged_operations = {"float16 reduced", "AVG", "PREMUL_SUM", "MAX with NaN", "small messages"}
    for found in pool(2).run(jobs.addresses):
        assert {name for name, times in found.items() if not times} == staged_operations


@pytest.mark.parametrize("size", SIZES)
def test_no_nonblocking_collective_of_open_mpi_gets_a_device_pointer(
    size: int, pool: Callable[[int], Pool]
) -> None:
    for names in pool(size).run(jobs.posted):
        assert bool(names) == (library().name != "openmpi"), names


def test_arrays_of_a_collective_are_on_devices_on_all_ranks_or_none(pool: Callable[[int], Pool]) -> None:
    failures = [failure for failure, _ in pool(2).run(jobs.one_on_the_host)]
    assert {f.type if f else "" for f in failures} == {"CollectiveMismatchError"}
    message = failures[0].message if failures[0] else ""
    assert "rank 0: all_reduce(float64[5], SUM)" in message
    assert "rank 1: all_reduce(float64[5] on cuda:1, SUM)" in message


def test_a_receive_into_an_array_in_use_does_not_block(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.receives_while_in_use) == [(0, True)] * 2


def test_messages_that_are_shorter_than_the_array(pool: Callable[[int], Pool]) -> None:
    for found in pool(2).run(staged_jobs.shorter_messages):
        assert [count for count, _ in found] == [2] * 4 + [59_999] * 4


def test_one_thread_makes_all_mpi_calls() -> None:
    settings = Settings(policy="random", seed=5, own_stream=True, backend="mpi")
    env = {"UNICOLL_MPI_CUDA": "1", "UNICOLL_MPI_THREAD_LEVEL": "funneled"}
    with MpiJob(_RANKS, backend="mpi", prepare=(jobs.prepare, settings), env=env) as job:
        job.call(enter)
        job.results()
        job.call(staged_jobs.mixed_kinds, 2)
        assert job.results() == [True] * _RANKS
        job.call(staged_jobs.messages)
        assert job.results() == [[True] * 12] * _RANKS
        job.call(jobs.faults)
        assert job.results() == [[], []]


def test_a_device_failure_during_an_operation_is_reported_to_the_other_ranks() -> None:
    with _start(_RANKS, 1) as job:
        job.call(enter)
        job.results()
        job.call(jobs.device_fails, 1)
        (other, _), (mine, _) = job.results()
    assert mine is not None
    assert mine.type == "DeviceError"
    assert other is not None
    assert other.type == "GroupAbortedError"
    assert "rank 1" in other.message
    assert "DeviceError: cudaErrorECCUncorrectable" in other.message


def test_temporary_device_memory_is_reused(pool: Callable[[int], Pool]) -> None:
    for held in pool(2).run(jobs.room, 10):
        assert held[0] > 0
        assert set(held[1:]) == {held[1]}


def test_a_graph_cannot_capture_a_message(pool: Callable[[int], Pool]) -> None:
    for stories in pool(2).run(jobs.captured_message):
        for failure, _ in stories:
            assert failure is not None
            assert failure.type == "DistArgumentError"
            assert "a graph cannot record" in failure.message


def test_ranks_with_different_cuda_awareness_use_one_mode() -> None:
    with MpiJob(_RANKS, backend="mpi", prepare=(jobs.say, ["1", "0"], Settings(backend="mpi"))) as job:
        job.call(enter)
        job.results()
        job.call(jobs.ways)
        (handed, first), (handed_too, second) = job.results()
    assert handed == handed_too == 0
    assert "cuda arrays that it serves are staged: rank 1: UNICOLL_MPI_CUDA=0" in first
    assert "cuda arrays that it serves are staged: UNICOLL_MPI_CUDA=0" in second


# --- waits for the device----------------------------------------------------------------------------------------------


def test_operations_wait_for_the_device_and_without_the_wait_results_are_wrong() -> None:
    with _start(_RANKS, 11, "newest") as job:
        job.call(enter)
        job.results()
        for program, right in _RIGHT.items():
            for _ in range(_AGAIN):
                job.call(jobs.run, program, None)
                assert job.results() == [(each, []) for each in right]
        for program, mutation in _MUTATIONS:
            for _ in range(_AGAIN):
                job.call(jobs.run, program, mutation)
                got = job.results()
                for rank, wrong in enumerate(_WRONG[program]):
                    assert wrong is None or (got[rank][0] != _RIGHT[program][rank]) == wrong, (program, got)
                seen = [any("MPI was given" in fault for fault in faults) for _, faults in got]
                assert seen == _SEEN[program], (program, got)
        end_cleanly(job)
