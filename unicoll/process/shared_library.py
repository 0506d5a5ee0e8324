"""The file of a shared library: the one that this process has mapped already, else the first of
some folders."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path


def package_folders(name: str) -> list[Path]:
    """The folders of an installed package, which is not imported.

    One in the working directory is not installed: Python searches it for modules, and it may be
    another user's.
    """
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:
        # A module in sys.modules has the name, and has no specification.
        return []
    found = (
        [Path(folder) for folder in spec.submodule_search_locations or []]
        if spec is not None
        else []
    )
    return [folder for folder in found if not _is_in_working_directory(folder)]


def _is_in_working_directory(folder: Path) -> bool:
    installed = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:
        # The working directory was removed.
        return False
    parent = os.path.realpath(folder.parent)
    return parent == here and parent not in installed


class SharedLibrary:
    """Where a library is.

    Args:
        names: of the file, as the dynamic linker knows it: ``["libnccl.so.2"]``; the best first.
        mapped_as: part of the path of a library that the process has mapped: ``"/libnccl.so"``.
        symbol: a function of every version.
        folders: returns folders to search before ``sys.prefix``.
    """

    def __init__(
        self,
        names: Sequence[str],
        mapped_as: str,
        symbol: str,
        folders: Callable[[], Iterable[Path]],
    ) -> None:
        self.names = names
        self.folders = folders
        self._mapped_as = mapped_as
        self._symbol = symbol

    def candidates(self) -> Iterator[str]:
        """The paths to try."""
        mapped = self.mapped()
        if mapped:
            # With LD_PRELOAD torch maps its own file too, but calls the preloaded one, which is in
            # the global scope.
            yield self.loaded_from(ctypes.CDLL(None)) or mapped[0]
            return
        for folder in (*self.folders(), Path(sys.prefix) / "lib"):
            for name in self.names:
                if (folder / name).is_file():
                    yield str(folder / name)
        yield from self.names

    def mapped(self) -> list[str]:
        """Paths of the libraries that this process has mapped, the first mapped first."""
        try:
            lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        except OSError:
            return []
        paths = [line[line.index("/") :] for line in lines if self._mapped_as in line]
        # A file that was replaced since it was mapped cannot be opened under its name any more.
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
