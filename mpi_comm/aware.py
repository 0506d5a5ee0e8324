"""Whether MPI takes pointers to memory of a GPU, and how that is known.

A library that does not will read the pointer as one of the host's and crash. So arrays on a GPU are handed to it
only where it is proven that it takes them, else they go through the host's memory (:mod:`unicoll.staging`). Proofs
are, in this order: the user says so (``UNICOLL_MPI_CUDA``); ``mpi_memory_alloc_kinds`` of the world's info has "cuda"
(MPI 4.1); the library answers so itself, asked with ``MPIX_Query_cuda_support`` (Open MPI, MVAPICH) or
``MPIX_GPU_query_support`` (MPICH and what is made of it).
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unicoll import settings

__all__ = ["OVERRIDE", "Awareness", "agreed", "find_out", "override"]

OVERRIDE = "UNICOLL_MPI_CUDA"
_KINDS = "mpi_memory_alloc_kinds"
_LIBRARY = re.compile(r"lib[a-z_]*mpi[a-z_]*\.so[.\d]*$")
_GPU_SUPPORT_CUDA = 0
"""MPICH's ``MPIX_GPU_SUPPORT_CUDA``."""
_MVAPICH_SWITCHES = ("MV2_USE_CUDA", "MVP_USE_CUDA")
"""MVAPICH, built for CUDA or not, takes device pointers only where one of them is 1 (its user guide)."""


@dataclass(frozen=True)
class Awareness:
    """Whether device pointers are handed to MPI.

    Attributes:
        direct: they are.
        why: what says so, in a few words.
    """

    direct: bool
    why: str

    def __str__(self) -> str:
        return f"{'direct' if self.direct else 'staged'}: {self.why}"


def override() -> bool | None:
    """What the user says in ``UNICOLL_MPI_CUDA``; None for nothing.

    Raises:
        DistArgumentError: it is neither yes nor no.
    """
    return settings.flag(OVERRIDE)


def find_out(mpi: Any, library: str, loaded: Callable[[], Sequence[Any]] | None = None) -> Awareness:
    """What is known of the MPI library of this process.

    Args:
        mpi: mpi4py's module; MPI has been initialised, and this thread may call it.
        library: its name and version.
        loaded: the libraries that may answer, as ctypes has them; by default those that are mapped here.

    Raises:
        DistArgumentError: ``UNICOLL_MPI_CUDA`` is neither yes nor no.
    """
    said = override()
    if said is not None:
        return Awareness(said, f"{OVERRIDE}={os.environ[OVERRIDE].strip()}")
    kinds = _memory_kinds(mpi)
    if "cuda" in kinds:
        return Awareness(True, f"{_KINDS} of {library} has cuda")
    answers: dict[str, bool] = {}
    for one in (loaded or _mapped)():
        for question, answer in _ask(one):
            answers[question] = answers.get(question, False) or answer
    return _judge(library, answers, os.environ)


def _judge(library: str, answers: Mapping[str, bool], environment: Mapping[str, str]) -> Awareness:
    """What the library's answers amount to."""
    if not answers:
        return Awareness(False, f"{library} does not say whether it takes pointers to a GPU's memory")
    yes = next((question for question, answer in answers.items() if answer), None)
    if yes is None:
        return Awareness(False, f"{library} says {' and '.join(f'{question} = 0' for question in answers)}")
    if "mvapich" in library.lower() and all(environment.get(v, "") != "1" for v in _MVAPICH_SWITCHES):
        return Awareness(False, f"{library} was built for CUDA, but {_MVAPICH_SWITCHES[0]}=1 is not set")
    return Awareness(True, f"{library} says {yes} = 1")


def _memory_kinds(mpi: Any) -> list[str]:
    """Kinds of memory that the world says it supports; a kind may be narrowed down: ``cuda:device``."""
    try:
        info = mpi.COMM_WORLD.Get_info()
        text = info.Get(_KINDS)
        info.Free()
    except (mpi.Exception, NotImplementedError):
        return []
    return [kind.partition(":")[0].strip() for kind in (text or "").split(",")]


def _ask(library: Any) -> Iterator[tuple[str, bool]]:
    """The questions that a library answers, with its answers."""
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


def _mapped() -> list[Any]:
    """The MPI libraries that this process has loaded; no other is."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(line.partition("/")[1] + line.partition("/")[2] for line in lines if "/" in line)
    found = []
    for path in paths:
        if _LIBRARY.match(path.rpartition("/")[2]):
            try:
                found.append(ctypes.CDLL(path, os.RTLD_LAZY | os.RTLD_LOCAL | os.RTLD_NOLOAD))
            except OSError:  # replaced since it was loaded
                pass
    return found


def agreed(ranks: Sequence[int], known: Sequence[Awareness], mine: int) -> Awareness:
    """What holds for a group: pointers are handed over only where all its members may. Equal on all of them.

    Mixing would be MPI's right, but a call that is staged goes in several pieces, and one that is direct in one.

    Args:
        ranks: the members' global ranks.
        known: of every rank of the job.
        mine: this process's global rank.
    """
    against = next((rank for rank in ranks if not known[rank].direct), None)
    if against is None or not known[mine].direct:
        return known[mine]
    return Awareness(False, f"rank {against}: {known[against].why}")
