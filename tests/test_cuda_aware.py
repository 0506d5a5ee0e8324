"""Whether MPI takes pointers to a GPU's memory: every source of that knowledge, on doubles of the library."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from mpi_comm.aware import OVERRIDE, Awareness, agreed, find_out
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
    """mpi4py's module, as far as it is asked."""

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
    """A loaded library with the functions that it is given."""

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


def asked(library: str, *loaded: Library, kinds: str | None = None) -> Awareness:
    return find_out(Mpi(kinds), library, lambda: loaded)


@pytest.mark.parametrize(
    ("text", "direct"), [("1", True), ("yes", True), (" On ", True), ("0", False), ("false", False)]
)
def test_the_user_has_the_last_word(text: str, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, text)
    found = asked("Open MPI 5.0.11", Library(query=int(not direct)), kinds=None if direct else "cuda")
    assert found == Awareness(direct, f"UNICOLL_MPI_CUDA={text.strip()}")


@pytest.mark.parametrize("text", ["2", "maybe", "cuda"])
def test_a_word_that_is_neither_yes_nor_no_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, text)
    with pytest.raises(DistArgumentError, match=f"UNICOLL_MPI_CUDA={text} is none of 1, true, .*, 0, false"):
        asked("Open MPI 5.0.11")


@pytest.mark.parametrize("kinds", ["mpi,system,cuda", "cuda:device,mpi", " cuda "])
def test_the_kinds_of_memory_that_the_world_supports(kinds: str) -> None:
    mpi = Mpi(kinds)
    found = find_out(mpi, "MPICH 5.0.2", lambda: [Library(gpu=(0, 0))])
    assert found == Awareness(True, "mpi_memory_alloc_kinds of MPICH 5.0.2 has cuda")
    assert mpi.info.freed


@pytest.mark.parametrize("kinds", [None, "", "mpi,system", "rocm,level_zero", "notcuda"])
def test_kinds_without_cuda_say_nothing(kinds: str | None) -> None:
    assert asked("Open MPI 5.0.11", Library(query=1), kinds=kinds).direct
    assert not asked("Open MPI 5.0.11", Library(query=0), kinds=kinds).direct


def test_a_library_that_has_no_info_is_asked_all_the_same() -> None:
    assert find_out(Mpi(fails=True), "Open MPI 4.1.6", lambda: [Library(query=1)]).direct


@pytest.mark.parametrize(
    ("library", "double", "said"),
    [
        ("Open MPI 5.0.11", Library(query=1), "direct: Open MPI 5.0.11 says MPIX_Query_cuda_support() = 1"),
        ("Open MPI 5.0.11", Library(query=0), "staged: Open MPI 5.0.11 says MPIX_Query_cuda_support() = 0"),
        ("MPICH 5.0.2", Library(gpu=(0, 1)), "direct: MPICH 5.0.2 says MPIX_GPU_query_support(CUDA) = 1"),
        (
            "MPICH 5.0.2", Library(0, (0, 0)),
            "staged: MPICH 5.0.2 says MPIX_GPU_query_support(CUDA) = 0 and MPIX_Query_cuda_support() = 0",
        ),
        ("MPICH 5.0.2", Library(gpu=(5, 1)), "staged: MPICH 5.0.2 says MPIX_GPU_query_support(CUDA) = 0"),
        ("Some MPI 1", Library(), "staged: Some MPI 1 does not say whether it takes pointers to a GPU's memory"),
    ],
)  # fmt: skip
def test_the_library_is_asked(library: str, double: Library, said: str) -> None:
    assert str(asked(library, double)) == said


def test_any_of_the_libraries_that_are_loaded_may_answer() -> None:
    assert asked("Open MPI 5.0.11", Library(), Library(query=1)).direct


def test_mvapich_takes_pointers_only_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(asked("MVAPICH2 2.3.7", Library(query=1))) == (
        "staged: MVAPICH2 2.3.7 was built for CUDA, but MV2_USE_CUDA=1 is not set"
    )
    monkeypatch.setenv("MV2_USE_CUDA", "1")
    assert asked("MVAPICH2 2.3.7", Library(query=1)).direct
    assert not asked("MVAPICH2 2.3.7", Library(query=0)).direct


def test_no_member_of_a_group_goes_another_way() -> None:
    known = [Awareness(True, "a"), Awareness(True, "b"), Awareness(False, "c"), Awareness(False, "d")]
    assert agreed((0, 1), known, 1) == known[1]
    for ranks in ((0, 2), (2, 0), (1, 0, 2, 3)):
        assert not any(agreed(ranks, known, mine).direct for mine in ranks)
    assert agreed((1, 0, 2, 3), known, 0) == Awareness(False, "rank 2: c")
    assert agreed((1, 0, 2, 3), known, 3) == known[3]
