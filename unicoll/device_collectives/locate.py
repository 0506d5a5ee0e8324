"""Location of a library with NCCL's API, and the one that this process uses.

The order of the search: a path in the environment; the library that the process has already mapped (of ``LD_PRELOAD``
or of an array library: two copies in one process conflict); the folders of its package and of the system.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from unicoll.device_collectives.interface import CollectiveLibrary
from unicoll.errors import BackendUnavailableError, DistError


class LibraryLocator:
    """Finds and loads one library, once per process; thread-safe.

    Args:
        file_name: as the dynamic linker knows it: ``"libnccl.so.2"``.
        mapped_as: part of the path of a library that the process has mapped: ``"/libnccl.so"``.
        symbol: a function of every version.
        variable: environment variable with a path, the only one that is tried then.
        bind: makes the library of a loaded one and the path of its file; or returns why it cannot be used.
        folders: returns folders to search before ``sys.prefix``.
        install: how to get the library, for errors.
    """

    def __init__(
        self,
        file_name: str,
        mapped_as: str,
        symbol: str,
        variable: str,
        bind: Callable[[Any, str], CollectiveLibrary | str],
        folders: Callable[[], Iterable[Path]],
        install: str,
    ) -> None:
        self.variable = variable
        self.folders = folders
        self._file_name = file_name
        self._mapped_as = mapped_as
        self._symbol = symbol
        self._bind = bind
        self._install = install
        self._lock = threading.Lock()
        self._found: CollectiveLibrary | str | None = None

    def find(self) -> CollectiveLibrary | str:
        """The library of this process, loaded at the first call; or the reason why there is none."""
        with self._lock:
            if self._found is None:
                self._found = self.search()
            return self._found

    @property
    def found(self) -> CollectiveLibrary | None:
        """The library, if it has been loaded already."""
        return self._found if not isinstance(self._found, str) else None

    def get(self) -> CollectiveLibrary:
        """The library of this process.

        Raises:
            BackendUnavailableError: there is none; the message gives the reason.
        """
        found = self.find()
        if isinstance(found, str):
            raise BackendUnavailableError(found)
        return found

    def use(self, implementation: CollectiveLibrary | None) -> None:
        """Use another implementation in this process; None searches for the library again at the next call."""
        with self._lock:
            self._found = implementation

    def search(self) -> CollectiveLibrary | str:
        """Load the library."""
        named = os.environ.get(self.variable)
        if named:
            found = self._load(named)
            return f"{self.variable}: {found}" if isinstance(found, str) else found
        reasons = []
        for path in self.candidates():
            found = self._load(path)
            if not isinstance(found, str):
                return found
            reasons.append(found)
        return f"{self._file_name} cannot be used: {'; '.join(reasons)} ({self._install})"

    def _load(self, path: str) -> CollectiveLibrary | str:
        try:
            library = ctypes.CDLL(path)
        except OSError as e:
            return f"{path} cannot be loaded: {e}" if path not in str(e) else str(e)
        try:
            return self._bind(library, self.loaded_from(library) or path)
        except DistError as e:
            return str(e)

    def candidates(self) -> Iterator[str]:
        """The paths to try."""
        mapped = self.mapped()
        if mapped:
            # With LD_PRELOAD torch maps its own file too, but calls the preloaded one, which is in the global scope.
            yield self.loaded_from(ctypes.CDLL(None)) or mapped[0]
            return
        for folder in (*self.folders(), Path(sys.prefix) / "lib"):
            path = folder / self._file_name
            if path.is_file():
                yield str(path)
        yield self._file_name

    def mapped(self) -> list[str]:
        """Paths of the libraries that this process has mapped, the first mapped first."""
        try:
            lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        except OSError:
            return []
        paths = [line[line.index("/") :] for line in lines if self._mapped_as in line]
        return [path for path in dict.fromkeys(paths) if not path.endswith(" (deleted)")]

    def loaded_from(self, library: ctypes.CDLL) -> str | None:
        """The file of a loaded library, as the dynamic linker names it."""
        try:
            address = ctypes.cast(getattr(library, self._symbol), ctypes.c_void_p)
            dladdr = ctypes.CDLL(None).dladdr
        except AttributeError:
            return None
        dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
        info = _DlInfo()
        if not dladdr(address, ctypes.byref(info)) or not info.dli_fname:
            return None
        return os.path.realpath(os.fsdecode(info.dli_fname))


class _DlInfo(ctypes.Structure):
    """Dl_info."""

    _fields_ = [
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    ]
