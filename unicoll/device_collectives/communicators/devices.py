"""The device that a group is bound to."""

from __future__ import annotations

import os
import re
from typing import Any

from unicoll.backend import Context
from unicoll.devices.device_runtime import DeviceRuntime
from unicoll.errors import DistArgumentError


def index_of(device: Any, runtime: DeviceRuntime) -> int:
    """The ordinal of a user's ``device_id``: 1, ``"cuda:1"``, or a device of torch, CuPy or
    unicoll.

    Raises:
        DistArgumentError: ``device_id`` is not a device of the runtime with a number.
    """
    wanted = runtime.device_type
    # Devices of torch and unicoll have a type and an index, those of CuPy an id.
    kind = getattr(device, "type", wanted)
    found = (
        getattr(device, "index", None) if hasattr(device, "type") else getattr(device, "id", device)
    )
    if isinstance(found, str):
        match = re.fullmatch(rf"(?:{wanted}:)?(\d+)", found)
        found = int(match[1]) if match else None
    if kind != wanted or isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise DistArgumentError(
            f"device_id: {device!r} is not a {runtime.name} device with a number"
        )
    return found


def bound_device(context: Context, runtime: DeviceRuntime, explicit: bool) -> int | None:
    """The device of a group before its first array: ``device_id``, else the launcher's local rank,
    else None.

    That of arrays in host memory is known.

    Args:
        explicit: whether the user chose the backend by name; the local rank counts only then.

    Raises:
        DistArgumentError: there is no such device.
    """
    if runtime.host_memory:
        return 0
    count = runtime.device_count()
    if context.device is not None:
        index = index_of(context.device, runtime)
        if index >= count:
            visible = runtime.visible_devices
            raise DistArgumentError(
                f"device_id: this process sees {count} {runtime.name} devices, there is no"
                f" {runtime.device_type}:{index} ({visible}={os.environ.get(visible, 'not set')})"
            )
        return index
    local = context.job.local_rank
    if not explicit or local is None:
        return None
    # The launcher shows each process only its own device, which is number 0 there.
    if count == 1:
        return 0
    return local if local < count else None
