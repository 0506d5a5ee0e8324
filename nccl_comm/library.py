"""Where NCCL is, and the one that this process uses.

Looked for in this order: ``UNICOLL_NCCL_LIBRARY``, the library that the process has mapped already (torch's or CuPy's:
two of them in one process do not go well together), the wheel ``nvidia-nccl-cu12`` or ``-cu13``, the system.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from unicoll.errors import BackendUnavailableError, DistError

from .api import Nccl
from .bindings import Bindings
from .structs import version_text

__all__ = ["OLDEST", "VARIABLE", "describe", "find", "install", "nccl"]

VARIABLE = "UNICOLL_NCCL_LIBRARY"
OLDEST = 21800
_NAME = "libnccl.so.2"
_INSTALL = f"pip install nvidia-nccl-cu12 or nvidia-nccl-cu13, or set {VARIABLE} to its path"

_lock = threading.Lock()
_found: Nccl | str | None = None


def find() -> Nccl | str:
    """The NCCL of this process, loaded when first asked for; or, in words, why there is none."""
    global _found
    with _lock:
        if _found is None:
            _found = _look()
        return _found


def nccl() -> Nccl:
    """The NCCL of this process.

    Raises:
        BackendUnavailableError: there is none; the message says why.
    """
    found = find()
    if isinstance(found, str):
        raise BackendUnavailableError(found)
    return found


def install(implementation: Nccl | None) -> None:
    """Use another implementation in this process; None looks for the library again when it is next asked for."""
    global _found
    with _lock:
        _found = implementation


def describe(found: Nccl) -> str:
    """Version and path, for people: ``NCCL 2.27.5 (/path/libnccl.so.2)``."""
    return f"NCCL {version_text(found.version)} ({found.path})"


def _look() -> Nccl | str:
    named = os.environ.get(VARIABLE)
    if named:
        found = _load(named)
        return f"{VARIABLE}: {found}" if isinstance(found, str) else found
    reasons = []
    for path in _candidates():
        found = _load(path)
        if not isinstance(found, str):
            return found
        reasons.append(found)
    return f"{_NAME} cannot be used: {'; '.join(reasons)} ({_INSTALL})"


def _load(path: str) -> Nccl | str:
    try:
        library = ctypes.CDLL(path)
    except OSError as e:
        return f"{path} cannot be loaded: {e}" if path not in str(e) else str(e)
    try:
        found = Bindings(library, _loaded_from(library) or path)
    except DistError as e:
        return str(e)
    if found.version < OLDEST:
        return f"{found!r} is too old: {version_text(OLDEST)} or newer is needed"
    # The functions that are bound as they are make it one; tests hold it to the protocol's members and arguments.
    return cast(Nccl, found)


def _candidates() -> Iterator[str]:
    mapped = _mapped()
    if mapped:
        yield mapped[0]
        return
    for folder in _wheel_folders():
        path = folder / "nccl" / "lib" / _NAME
        if path.is_file():
            yield str(path)
    beside = Path(sys.prefix) / "lib" / _NAME
    if beside.is_file():
        yield str(beside)
    yield _NAME


def _mapped() -> list[str]:
    """Paths of the NCCL libraries that this process has mapped, the first mapped first."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return []
    paths = [line[line.index("/") :] for line in lines if "/libnccl.so" in line]
    return [path for path in dict.fromkeys(paths) if not path.endswith(" (deleted)")]


def _wheel_folders() -> Iterator[Path]:
    """Where the package ``nvidia`` lies; importing it is not needed, nor is anything in it imported."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        yield Path(folder)


class _Where(ctypes.Structure):
    """Dl_info."""

    _fields_ = [
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    ]


def _loaded_from(library: ctypes.CDLL) -> str | None:
    """The file that a library's functions are in, as the linker names it."""
    try:
        address = ctypes.cast(library.ncclGetVersion, ctypes.c_void_p)
        ask = ctypes.CDLL(None).dladdr
    except AttributeError:
        return None
    ask.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Where)]
    where = _Where()
    if not ask(address, ctypes.byref(where)) or not where.dli_fname:
        return None
    return os.path.realpath(os.fsdecode(where.dli_fname))
