"""libnccl: that of the process (torch's, CuPy's), the wheel ``nvidia-nccl-cu12`` or ``-cu13``, the system's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from nccl_comm.library.bindings import Bindings
from nccl_comm.library.structs import version_text
from unicoll.device_collectives.interface import CollectiveLibrary
from unicoll.device_collectives.locate import LibraryLocator

VARIABLE = "UNICOLL_NCCL_LIBRARY"
OLDEST = 21800


def _bind(library: Any, path: str) -> CollectiveLibrary | str:
    found = Bindings(library, path)
    if found.version < OLDEST:
        return f"{found!r} is too old: {version_text(OLDEST)} or newer is needed"
    # mypy does not see the functions that are bound by name; tests check them against the interface.
    return cast(CollectiveLibrary, found)


def _wheel_folders() -> Iterator[Path]:
    """The folders of the library in the package ``nvidia``, which is not imported."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        yield Path(folder) / "nccl" / "lib"


LOCATOR = LibraryLocator(
    "libnccl.so.2",
    "/libnccl.so",
    "ncclGetVersion",
    VARIABLE,
    _bind,
    _wheel_folders,
    f"pip install nvidia-nccl-cu12 or nvidia-nccl-cu13, or set {VARIABLE} to its path",
)
find, nccl, install = LOCATOR.find, LOCATOR.get, LOCATOR.use
