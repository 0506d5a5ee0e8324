"""Detection of CUDA-aware MPI libraries.

A library that is not CUDA-aware reads a device pointer as a host pointer and crashes. So device
pointers are passed to MPI only if the library is known to be CUDA-aware; otherwise arrays are
staged through host memory (:mod:`unicoll.staging.backend`). The sources, in this order: the user's
setting (``UNICOLL_MPI_CUDA``); ``mpi_memory_alloc_kinds`` in the info of MPI_COMM_WORLD has "cuda"
(MPI 4.1); the library's own query function, ``MPIX_Query_cuda_support`` (Open MPI, MVAPICH) or
``MPIX_GPU_query_support`` (MPICH and its derivatives).
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unicoll.process import environment

OVERRIDE = "UNICOLL_MPI_CUDA"
_KINDS = "mpi_memory_alloc_kinds"
_LIBRARY = re.compile(r"lib[a-z_]*mpi[a-z_]*\.so[.\d]*$")
_GPU_SUPPORT_CUDA = 0
"""MPICH's ``MPIX_GPU_SUPPORT_CUDA``."""
_MVAPICH_SWITCHES = ("MV2_USE_CUDA", "MVP_USE_CUDA")
"""MVAPICH takes device pointers only if one of these is 1, even if it was built for CUDA (its user
guide)."""


@dataclass(frozen=True)
class CudaAwareness:
    """How CUDA arrays are passed to MPI.

    Attributes:
        direct: True if MPI gets device pointers; otherwise arrays are staged.
        reason: the source of that, in a few words.
    """

    direct: bool
    reason: str

    def __str__(self) -> str:
        return f"{'direct' if self.direct else 'staged'}: {self.reason}"


def user_setting() -> bool | None:
    """The value of ``UNICOLL_MPI_CUDA``; None if it is not set.

    Raises:
        DistArgumentError: it is not a boolean.
    """
    return environment.flag(OVERRIDE)


def detect(
    mpi: Any, library: str, loaded: Callable[[], Sequence[Any]] | None = None
) -> CudaAwareness:
    """CUDA-awareness of the MPI library in this process.

    Args:
        mpi: mpi4py's module; MPI is initialised, and this thread may call it.
        library: the library's name and version.
        loaded: returns the ctypes libraries to query; by default the MPI libraries loaded in this
            process.

    Raises:
        DistArgumentError: ``UNICOLL_MPI_CUDA`` is not a boolean.
    """
    setting = user_setting()
    if setting is not None:
        return CudaAwareness(setting, f"{OVERRIDE}={os.environ[OVERRIDE].strip()}")
    kinds = _memory_kinds(mpi)
    if "cuda" in kinds:
        return CudaAwareness(True, f"{_KINDS} of {library} has cuda")
    answers: dict[str, bool] = {}
    for one in (loaded or _loaded_libraries)():
        for question, answer in _query(one):
            answers[question] = answers.get(question, False) or answer
    return _interpret(library, answers, os.environ)


def _interpret(
    library: str, answers: Mapping[str, bool], environment: Mapping[str, str]
) -> CudaAwareness:
    """CUDA-awareness by the results of the library's query functions."""
    if not answers:
        return CudaAwareness(
            False, f"{library} does not say whether it takes pointers to a GPU's memory"
        )
    yes = next((question for question, answer in answers.items() if answer), None)
    if yes is None:
        return CudaAwareness(
            False, f"{library} says {' and '.join(f'{question} = 0' for question in answers)}"
        )
    if "mvapich" in library.lower() and all(
        environment.get(v, "") != "1" for v in _MVAPICH_SWITCHES
    ):
        return CudaAwareness(
            False, f"{library} was built for CUDA, but {_MVAPICH_SWITCHES[0]}=1 is not set"
        )
    return CudaAwareness(True, f"{library} says {yes} = 1")


def _memory_kinds(mpi: Any) -> list[str]:
    """Memory kinds that MPI_COMM_WORLD supports; without restrictions, as in ``cuda:device``."""
    try:
        info = mpi.COMM_WORLD.Get_info()
        text = info.Get(_KINDS)
        info.Free()
    except (mpi.Exception, NotImplementedError):
        return []
    return [kind.partition(":")[0].strip() for kind in (text or "").split(",")]


def _query(library: Any) -> Iterator[tuple[str, bool]]:
    """The query functions that a library has, with their results."""
    query = getattr(library, "MPIX_GPU_query_support", None)
    if query is not None:
        query.restype, query.argtypes = ctypes.c_int, [ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
        supported = ctypes.c_int(0)
        failed = query(_GPU_SUPPORT_CUDA, ctypes.byref(supported))
        yield "MPIX_GPU_query_support(CUDA)", not failed and bool(supported.value)
    query = getattr(library, "MPIX_Query_cuda_support", None)
    if query is not None:
        query.restype, query.argtypes = ctypes.c_int, []
        yield "MPIX_Query_cuda_support()", query() == 1


def _loaded_libraries() -> list[Any]:
    """The MPI libraries that this process has loaded; loads no others."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(
        line.partition("/")[1] + line.partition("/")[2] for line in lines if "/" in line
    )
    found = []
    for path in paths:
        if _LIBRARY.match(path.rpartition("/")[2]):
            try:
                found.append(ctypes.CDLL(path, os.RTLD_LAZY | os.RTLD_LOCAL | os.RTLD_NOLOAD))
            except OSError:
                # The file was replaced since it was loaded, so its path is that of another library.
                pass
    return found


def group_awareness(
    ranks: Sequence[int], awareness: Sequence[CudaAwareness], own_rank: int
) -> CudaAwareness:
    """CUDA-awareness of a group: direct if it is direct on all its ranks; ``direct`` is equal on
    all of them.

    Ranks cannot differ: a staged operation is several MPI calls, a direct one is a single call.

    Args:
        ranks: the group's global ranks.
        awareness: CUDA-awareness of every rank of the job.
        own_rank: this process's global rank.
    """
    staged_rank = next((rank for rank in ranks if not awareness[rank].direct), None)
    if staged_rank is None or not awareness[own_rank].direct:
        return awareness[own_rank]
    return CudaAwareness(False, f"rank {staged_rank}: {awareness[staged_rank].reason}")
