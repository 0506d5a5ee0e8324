"""libccl: that of the process, the wheel ``oneccl``, oneAPI's folders; with its plug-in for GPUs or
for the CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from unicoll.device_collectives.interface import CollectiveLibrary
from unicoll.device_collectives.locate import LibraryLocator
from unicoll.devices import runtimes
from unicoll.process.shared_library import SharedLibrary
from xccl_comm.library.bindings import OneCCL, XpuOneCCL, defaults
from xccl_comm.library.host_calls import HostOneCCL

VARIABLE = "UNICOLL_XCCL_LIBRARY"
_GPU, _CPU = "ONECCL_LEGACY", "ONECCL_LEGACY_CPU"
"""oneCCL's plug-ins, as ``CCL_PLUGIN`` names them; a process has one of them."""
_CPU_FILE = "libccl_legacy_cpu.so"
_NEEDED_BY_GPU = ("libfabric.so.1", "libccl.so.1")
_NEEDED_BY_CPU = ("libfabric.so.1", "ccl/cpu/lib/libccl.so.1", "libccl.so.1")
"""What a plug-in loads by name. The wheels' folder is not on the linker's path, so it is loaded by
path first."""


def serves_xpu() -> bool:
    """True if oneCCL serves XPU arrays in this process, False if it serves host memory.

    It serves XPUs where there are any, unless ``CCL_PLUGIN`` says otherwise.
    """
    if LOCATOR.found is not None:
        return cast(OneCCL, LOCATOR.found).device_type == "xpu"
    chosen = os.environ.get("CCL_PLUGIN")
    if chosen is not None:
        return chosen != _CPU
    return runtimes.reason_against("xpu") is None and runtimes.runtime("xpu").has_gpus()


def _bind(library: Any, path: str) -> CollectiveLibrary | str:
    xpu = serves_xpu()
    # The bindings call onecclGetVersion, which loads the plug-in.
    with defaults({"CCL_PLUGIN": _GPU if xpu else _CPU}):
        return _bind_for_xpu(library, path) if xpu else _bind_for_host(library, path)


def _bind_for_xpu(library: Any, path: str) -> CollectiveLibrary | str:
    reason = runtimes.reason_against("xpu")
    if reason is not None:
        return f"CCL_PLUGIN is {os.environ['CCL_PLUGIN']!r}: {reason}"
    _load(Path(path).parent, _NEEDED_BY_GPU)
    return cast(CollectiveLibrary, XpuOneCCL(library, path, runtimes.runtime("xpu")))


def _bind_for_host(library: Any, path: str) -> CollectiveLibrary | str:
    folder = Path(path).parent
    # Both builds of libccl.so.1 have one name. The build for GPUs needs SYCL, so a SYCL that
    # appears now shows that the plug-in has loaded the wrong one.
    had_sycl = _maps_sycl()
    _load(folder, _NEEDED_BY_CPU)
    try:
        ctypes.CDLL(str(folder / _CPU_FILE))
    except OSError as e:
        return f"oneCCL's plug-in for the CPU cannot be loaded: {e}"
    if _maps_sycl() and not had_sycl:
        return (
            f"oneCCL's plug-in for the CPU has loaded the build of libccl.so.1 for GPUs ({folder})"
        )
    # The cast is needed because mypy does not see the functions that are bound by name. Tests check
    # them against the interface.
    return cast(CollectiveLibrary, HostOneCCL(library, path))


def _load(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        # If the file is not there, the linker's path has it, or the plug-in cannot be loaded.
        with suppress(OSError):
            ctypes.CDLL(str(folder / name))


def _maps_sycl() -> bool:
    return "/libsycl.so" in Path("/proc/self/maps").read_text(errors="replace")


def _folders() -> Iterator[Path]:
    for variable, folder in (("CCL_ROOT", "lib"), ("ONEAPI_ROOT", "ccl/latest/lib")):
        if root := os.environ.get(variable):
            yield Path(root) / folder
    yield Path("/opt/intel/oneapi/ccl/latest/lib")


LOCATOR = LibraryLocator(
    SharedLibrary(["libccl.so.2"], "/libccl.so.2", "onecclGetVersion", _folders),
    VARIABLE,
    _bind,
    f"pip install oneccl, then oneccl-cpu, or set {VARIABLE} to the path",
)
find, oneccl, install = LOCATOR.find, LOCATOR.get, LOCATOR.use
