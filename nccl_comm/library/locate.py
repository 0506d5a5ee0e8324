"""Location of libnccl, and the library that this process uses.

The order of the search: ``UNICOLL_NCCL_LIBRARY``, the library that the process has already mapped (of ``LD_PRELOAD``,
torch or CuPy: two NCCL libraries in one process conflict), the wheel ``nvidia-nccl-cu12`` or ``-cu13``, the system.
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

from nccl_comm.library.bindings import Bindings
from nccl_comm.library.structs import version_text
from unicoll.device_collectives.interface import CollectiveLibrary
from unicoll.errors import BackendUnavailableError, DistError

VARIABLE = "UNICOLL_NCCL_LIBRARY"
OLDEST = 21800
_NAME = "libnccl.so.2"
_INSTALL = f"pip install nvidia-nccl-cu12 or nvidia-nccl-cu13, or set {VARIABLE} to its path"

_lock = threading.Lock()
_library: CollectiveLibrary | str | None = None


def find() -> CollectiveLibrary | str:
    """The NCCL of this process, loaded at the first call; or the reason why there is none."""
    global _library
    with _lock:
        if _library is None:
            _library = _search()
        return _library


def nccl() -> CollectiveLibrary:
    """The NCCL of this process.

    Raises:
        BackendUnavailableError: there is none; the message gives the reason.
    """
    found = find()
    if isinstance(found, str):
        raise BackendUnavailableError(found)
    return found


def install(implementation: CollectiveLibrary | None) -> None:
    """Use another implementation in this process; None searches for the library again at the next call."""
    global _library
    with _lock:
        _library = implementation


def _search() -> CollectiveLibrary | str:
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


def _load(path: str) -> CollectiveLibrary | str:
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
    # mypy does not see the functions that are bound by name; tests check them against the protocol.
    return cast(CollectiveLibrary, found)


def _candidates() -> Iterator[str]:
    mapped = _mapped()
    if mapped:
        # With LD_PRELOAD torch maps its own file too, but calls the preloaded one, which is in the global scope.
        yield _loaded_from(ctypes.CDLL(None)) or mapped[0]
        return
    for folder in _wheel_folders():
        path = folder / "nccl" / "lib" / _NAME
        if path.is_file():
            yield str(path)
    in_prefix = Path(sys.prefix) / "lib" / _NAME
    if in_prefix.is_file():
        yield str(in_prefix)
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
    """The folders of the package ``nvidia``, which is not imported."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        yield Path(folder)


class _DlInfo(ctypes.Structure):
    """Dl_info."""

    _fields_ = [
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    ]


def _loaded_from(library: ctypes.CDLL) -> str | None:
    """The file of a loaded library, as the dynamic linker names it."""
    try:
        address = ctypes.cast(library.ncclGetVersion, ctypes.c_void_p)
        dladdr = ctypes.CDLL(None).dladdr
    except AttributeError:
        return None
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
    info = _DlInfo()
    if not dladdr(address, ctypes.byref(info)) or not info.dli_fname:
        return None
    return os.path.realpath(os.fsdecode(info.dli_fname))
