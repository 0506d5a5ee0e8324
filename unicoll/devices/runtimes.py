"""The device runtimes of this process, by the type of their devices: ``"cuda"`` and ``"xpu"``.

An array's :class:`unicoll.arrays.buffer.Buffer` has the current stream of its library (CuPy, torch,
dpctl). All other device calls of a backend go through one
:class:`~unicoll.devices.device_runtime.DeviceRuntime`: that of the CUDA driver or of HIP
(:mod:`unicoll.devices.cuda`), which need neither CuPy nor torch, or that of SYCL
(:mod:`unicoll.devices.sycl`). Tests replace them by simulated devices with :func:`install`.
"""

from __future__ import annotations

import threading
from importlib import import_module

from unicoll.devices.device_runtime import DeviceRuntime
from unicoll.errors import BackendUnavailableError

_MODULES = {"cuda": "unicoll.devices.cuda.load", "xpu": "unicoll.devices.sycl.load"}
"""The module of a device type's runtime; needed by programs with such arrays only."""
DEVICE_TYPES = tuple(_MODULES)
"""The device types that have a runtime."""
_BY_IMPORTS = frozenset(("xpu",))
"""Device types whose runtime depends on what the program has imported, so that a reason against it
may not last."""

_installed: dict[str, DeviceRuntime] = {}
_reasons: dict[str, str] = {}
_lock = threading.RLock()


def install(device_type: str, runtime: DeviceRuntime | None) -> None:
    """Use another runtime in this process; None restores the device type's own."""
    _reasons.pop(device_type, None)
    if runtime is None:
        _installed.pop(device_type, None)
    else:
        _installed[device_type] = runtime


def loaded(device_type: str) -> DeviceRuntime | None:
    """The runtime of a device type, if it has been loaded already."""
    return _installed.get(device_type)


def reason_against(device_type: str) -> str | None:
    """The reason why this process can use no device of a type; None if it can."""
    if device_type in _installed:
        return None
    if device_type not in _MODULES:
        return f"unicoll has no runtime for {device_type!r} devices"
    with _lock:
        if device_type in _installed or device_type in _reasons:
            return _reasons.get(device_type)
        found = import_module(_MODULES[device_type]).load()
        if not isinstance(found, str):
            _installed[device_type] = found
            return None
        if device_type not in _BY_IMPORTS:
            _reasons[device_type] = found
        return str(found)


def runtime(device_type: str) -> DeviceRuntime:
    """The devices of a type.

    Raises:
        BackendUnavailableError: no device can be used; the message has the reason.
    """
    found = _installed.get(device_type)
    if found is None:
        reason = reason_against(device_type)
        if reason is not None:
            raise BackendUnavailableError(reason)
        found = _installed[device_type]
    return found
