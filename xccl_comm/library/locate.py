"""libccl: that of the process, the wheel ``oneccl``, oneAPI's folders; with its plug-in for the CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from unicoll.device_collectives.interface import CollectiveLibrary
from unicoll.device_collectives.locate import LibraryLocator
from xccl_comm.library.host_calls import HostOneCCL

VARIABLE = "UNICOLL_XCCL_LIBRARY"
_PLUGIN = "ONECCL_LEGACY_CPU"
_SETTINGS = {
    "CCL_PLUGIN": _PLUGIN,
    "CCL_ATL_TRANSPORT": "ofi",  # else mpiexec's variables have it start MPI
    "CCL_YIELD": "sleep",  # else threads that wait use a whole core: an all_reduce of 2 ranks on 2 cores took seconds
}
"""Environment variables of oneCCL, set unless the user has set them."""
_PLUGIN_FILE = "libccl_legacy_cpu.so"
_NEEDED = ("libfabric.so.1", "ccl/cpu/lib/libccl.so.1", "libccl.so.1")
"""What the plug-in loads by name. The wheels' folder is not on the linker's path, so it is loaded by path first."""


def _bind(library: Any, path: str) -> CollectiveLibrary | str:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if (chosen := os.environ["CCL_PLUGIN"]) != _PLUGIN:
        return f"CCL_PLUGIN is {chosen!r}: arrays in host memory need {_PLUGIN}"
    folder = Path(path).parent
    had_sycl = _maps_sycl()
    for name in _NEEDED:
        with suppress(OSError):  # then the linker's path has it, or the plug-in cannot be loaded
            ctypes.CDLL(str(folder / name))
    try:
        ctypes.CDLL(str(folder / _PLUGIN_FILE))
    except OSError as e:
        return f"oneCCL's plug-in for the CPU cannot be loaded: {e}"
    if _maps_sycl() and not had_sycl:
        return f"oneCCL's plug-in for the CPU has loaded the build of libccl.so.1 for GPUs ({folder})"
    # mypy does not see the functions that are bound by name; tests check them against the interface.
    return cast(CollectiveLibrary, HostOneCCL(library, path))


def _maps_sycl() -> bool:
    return "/libsycl.so" in Path("/proc/self/maps").read_text(errors="replace")


def _folders() -> Iterator[Path]:
    for variable, folder in (("CCL_ROOT", "lib"), ("ONEAPI_ROOT", "ccl/latest/lib")):
        if root := os.environ.get(variable):
            yield Path(root) / folder
    yield Path("/opt/intel/oneapi/ccl/latest/lib")


LOCATOR = LibraryLocator(
    "libccl.so.2",
    "/libccl.so.2",
    "onecclGetVersion",
    VARIABLE,
    _bind,
    _folders,
    f"pip install oneccl, then oneccl-cpu, or set {VARIABLE} to the path",
)
find, oneccl, install = LOCATOR.find, LOCATOR.get, LOCATOR.use
