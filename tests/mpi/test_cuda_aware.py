"""Detection of CUDA-aware MPI from each source, on test doubles of the library."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from mpi_comm.backend import _allows_addresses
from mpi_comm.runtime.cuda_aware import OVERRIDE, CudaAwareness, detect, group_awareness
from tests.simulated_nccl.cuda import SimulatedCuda, Simulation
from tests.simulated_nccl.rccl import SimulatedHip
from unicoll.devices import runtimes
from unicoll.errors import DistArgumentError


class _Info:
    def __init__(self, kinds: str | None) -> None:
        self._kinds = kinds
        self.freed = False

    def Get(self, key: str) -> str | None:
        assert key == "mpi_memory_alloc_kinds"
        return self._kinds

    def Free(self) -> None:
        self.freed = True


class Mpi:
    """A test library_double of mpi4py's module."""

    class Exception(RuntimeError):
        pass

    def __init__(self, kinds: str | None = None, fails: bool = False) -> None:
        self.COMM_WORLD = self
        self.info = _Info(kinds)
        self._fails = fails

    def Get_info(self) -> _Info:
        if self._fails:
            raise self.Exception("no info")
        return self.info


class _Function:
    """A C function of a ctypes library."""

    def __init__(self, body: Any) -> None:
        self._body = body
        self.restype: Any = None
        self.argtypes: Any = None

    def __call__(self, *args: Any) -> Any:
        assert self.restype is ctypes.c_int
        assert len(self.argtypes) == len(args)
        return self._body(*args)


class Library:
    """A test library_double of a loaded library, with the query functions of its arguments."""

    def __init__(self, query: int | None = None, gpu: tuple[int, int] | None = None) -> None:
        if query is not None:
            self.MPIX_Query_cuda_support = _Function(lambda: query)
        if gpu is not None:
            code, answer = gpu

            def ask(kind: int, supported: Any) -> int:
                assert kind == 0
                supported._obj.value = answer
                return code

            self.MPIX_GPU_query_support = _Function(ask)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (OVERRIDE, "MV2_USE_CUDA", "MVP_USE_CUDA"):
        monkeypatch.delenv(name, raising=False)


def detected(library: str, *loaded: Library, kinds: str | None = None) -> CudaAwareness:
    return detect(Mpi(kinds), library, lambda: loaded)


@pytest.mark.parametrize(
    ("text", "direct"), [("1", True), ("yes", True), (" On ", True), ("0", False), ("false", False)]
)
def test_the_users_setting_has_priority(text: str, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, text)
    found = detected("Open MPI 5.0.11", Library(query=int(not direct)), kinds=None if direct else "cuda")
    assert found == CudaAwareness(direct, f"UNICOLL_MPI_CUDA={text.strip()}")


@pytest.mark.parametrize("text", ["2", "maybe", "cuda"])
def test_a_setting_that_is_not_a_boolean_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, text)
    with pytest.raises(DistArgumentError, match=f"UNICOLL_MPI_CUDA={text} is none of 1, true, .*, 0, false"):
        detected("Open MPI 5.0.11")


@pytest.mark.parametrize("kinds", ["mpi,system,cuda", "cuda:device,mpi", " cuda "])
def test_memory_kinds_with_cuda(kinds: str) -> None:
    mpi = Mpi(kinds)
    found = detect(mpi, "MPICH 5.0.2", lambda: [Library(gpu=(0, 0))])
    assert found == CudaAwareness(True, "mpi_memory_alloc_kinds of MPICH 5.0.2 has cuda")
    assert mpi.info.freed


@pytest.mark.parametrize("kinds", [None, "", "mpi,system", "rocm,level_zero", "notcuda"])
def test_memory_kinds_without_cuda_decide_nothing(kinds: str | None) -> None:
    assert detected("Open MPI 5.0.11", Library(query=1), kinds=kinds).direct
    assert not detected("Open MPI 5.0.11", Library(query=0), kinds=kinds).direct


def test_a_library_without_info_is_queried() -> None:
    assert detect(Mpi(fails=True), "Open MPI 4.1.6", lambda: [Library(query=1)]).direct


@pytest.mark.parametrize(
    ("library", "library_double", "expected"),
    [
        ("Open MPI 5.0.11", Library(query=1), "direct: Open MPI 5.0.11 says MPIX_Query_cuda_support() = 1"),
        ("Open MPI 5.0.11", Library(query=0), "staged: Open MPI 5.0.11 says MPIX_Query_cuda_support() = 0"),
        ("MPICH 5.0.2", Library(gpu=(0, 1)), "direct: MPICH 5.0.2 says MPIX_GPU_query_support(CUDA) = 1"),
        (
            "MPICH 5.0.2",
            Library(0, (0, 0)),
            "staged: MPICH 5.0.2 says MPIX_GPU_query_support(CUDA) = 0 and MPIX_Query_cuda_support() = 0",
        ),
        ("MPICH 5.0.2", Library(gpu=(5, 1)), "staged: MPICH 5.0.2 says MPIX_GPU_query_support(CUDA) = 0"),
        (
            "Some MPI 1",
            Library(),
            "staged: Some MPI 1 does not say whether it takes pointers to a GPU's memory",
        ),
    ],
)
def test_the_library_is_queried(library: str, library_double: Library, expected: str) -> None:
    assert str(detected(library, library_double)) == expected


def test_all_loaded_libraries_are_queried() -> None:
    assert detected("Open MPI 5.0.11", Library(), Library(query=1)).direct


def test_mvapich_is_cuda_aware_only_with_its_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(detected("MVAPICH2 2.3.7", Library(query=1))) == (
        "staged: MVAPICH2 2.3.7 was built for CUDA, but MV2_USE_CUDA=1 is not set"
    )
    monkeypatch.setenv("MV2_USE_CUDA", "1")
    assert detected("MVAPICH2 2.3.7", Library(query=1)).direct
    assert not detected("MVAPICH2 2.3.7", Library(query=0)).direct


def test_cuda_awareness_is_equal_on_all_ranks_of_a_group() -> None:
    awareness = [
        CudaAwareness(True, "a"),
        CudaAwareness(True, "b"),
        CudaAwareness(False, "c"),
        CudaAwareness(False, "d"),
    ]
    assert group_awareness((0, 1), awareness, 1) == awareness[1]
    for ranks in ((0, 2), (2, 0), (1, 0, 2, 3)):
        assert not any(group_awareness(ranks, awareness, rank).direct for rank in ranks)
    assert group_awareness((1, 0, 2, 3), awareness, 0) == CudaAwareness(False, "rank 2: c")
    assert group_awareness((1, 0, 2, 3), awareness, 3) == awareness[3]


@pytest.mark.parametrize(
    ("runtime", "setting", "allowed"),
    [
        (SimulatedCuda, None, True),
        (SimulatedHip, None, False),
        (SimulatedHip, "0", False),
        (SimulatedHip, "1", True),
    ],
)
def test_mpi_gets_addresses_of_amds_devices_only_if_the_user_says_so(
    runtime: type[SimulatedCuda], setting: str | None, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library says only whether it takes those of CUDA."""
    monkeypatch.delenv(OVERRIDE, raising=False)
    if setting is not None:
        monkeypatch.setenv(OVERRIDE, setting)
    simulation = Simulation(runtime=runtime)
    runtimes.install("cuda", simulation.cuda)
    try:
        assert _allows_addresses() is allowed
    finally:
        runtimes.install("cuda", None)
        simulation.close()
