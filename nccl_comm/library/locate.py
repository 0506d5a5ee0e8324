"""libnccl: that of the process (torch's, CuPy's), the wheel ``nvidia-nccl-cu12`` or ``-cu13``, the
system's.

On AMD's devices librccl, which has the same functions: that of the process, torch's or the
system's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from nccl_comm.library.bindings import Bindings
from nccl_comm.library.rccl import RcclBindings
from nccl_comm.library.structs import version_text
from unicoll.device_collectives.interface import CollectiveLibrary
from unicoll.device_collectives.locate import LibraryLocator
from unicoll.devices import runtimes
from unicoll.devices.cuda import hip_driver
from unicoll.process.shared_library import SharedLibrary, package_folders

VARIABLE = "UNICOLL_NCCL_LIBRARY"
OLDEST = 21800


def _bind(library: Any, path: str, bindings: type[Bindings] = Bindings) -> CollectiveLibrary | str:
    found = bindings(library, path)
    if found.version < OLDEST:
        return f"{found!r} is too old: {version_text(OLDEST)} or newer is needed"
    # The cast is needed because mypy does not see the functions that are bound by name. Tests check
    # them against the interface.
    return cast(CollectiveLibrary, found)


def _wheel_folders() -> Iterator[Path]:
    """The folders of the library in the package ``nvidia``."""
    for folder in package_folders("nvidia"):
        yield folder / "nccl" / "lib"


def _rocm_folders() -> Iterator[Path]:
    """Folders with librccl; that of the HIP runtime in use comes first, since RCCL links to it."""
    runtime = runtimes.loaded("cuda")
    if isinstance(runtime, hip_driver.HipDriver):
        yield runtime.folder
    yield from hip_driver.library_folders()


LOCATOR = LibraryLocator(
    SharedLibrary(["libnccl.so.2"], "/libnccl.so", "ncclGetVersion", _wheel_folders),
    VARIABLE,
    _bind,
    f"pip install nvidia-nccl-cu12 or nvidia-nccl-cu13, or set {VARIABLE} to its path",
)
RCCL_LOCATOR = LibraryLocator(
    SharedLibrary(["librccl.so.1", "librccl.so"], "/librccl.so", "ncclGetVersion", _rocm_folders),
    VARIABLE,
    lambda library, path: _bind(library, path, RcclBindings),
    f"install RCCL or a torch for ROCm, or set {VARIABLE} to its path",
)


def _locator() -> LibraryLocator:
    """That of RCCL on AMD's devices. CUDA is not initialised for it, except on a machine with AMD's
    kernel driver."""
    # A library that is in use stays the one of the process, whatever runtime is loaded later.
    if LOCATOR.found is not None:
        return LOCATOR
    runtime = runtimes.loaded("cuda")
    if runtime is None and hip_driver.is_expected():
        if runtimes.reason_against("cuda") is not None:
            return RCCL_LOCATOR
        runtime = runtimes.runtime("cuda")
    return RCCL_LOCATOR if runtime is not None and runtime.name == "HIP" else LOCATOR


def find() -> CollectiveLibrary | str:
    """The library of this process, loaded at the first call; or the reason why there is none."""
    return _locator().find()


def nccl() -> CollectiveLibrary:
    """The library of this process.

    Raises:
        BackendUnavailableError: there is none; the message gives the reason.
    """
    return _locator().get()


def install(implementation: CollectiveLibrary | None) -> None:
    """Use another implementation in this process; None searches for the library again at the next
    call."""
    _locator().use(implementation)
