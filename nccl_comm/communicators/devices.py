"""The device that a group is bound to."""

from __future__ import annotations

import os
import re
from typing import Any

from unicoll.arrays.cuda import Cuda
from unicoll.backend import Context
from unicoll.errors import DistArgumentError


def index_of(device: Any) -> int:
    """The ordinal of a user's ``device_id``: 1, ``"cuda:1"``, or a device of torch, CuPy or unicoll.

    Raises:
        DistArgumentError: ``device_id`` is not a CUDA device with a number.
    """
    kind = getattr(device, "type", "cuda")
    found = getattr(device, "index", None) if hasattr(device, "type") else getattr(device, "id", device)
    if isinstance(found, str):
        match = re.fullmatch(r"(?:cuda:)?(\d+)", found)
        found = int(match[1]) if match else None
    if kind != "cuda" or isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise DistArgumentError(f"device_id: {device!r} is not a CUDA device with a number")
    return found


def bound_device(context: Context, cuda: Cuda, explicit: bool) -> int | None:
    """The device of a group before its first array: ``device_id``, else the launcher's local rank, else None.

    Args:
        explicit: whether the user chose NCCL by name; the local rank counts only then.

    Raises:
        DistArgumentError: there is no such device.
    """
    count = cuda.device_count()
    if context.device is not None:
        index = index_of(context.device)
        if index >= count:
            raise DistArgumentError(
                f"device_id: this process sees {count} CUDA devices, there is no cuda:{index}"
                f" (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
            )
        return index
    local = context.job.local_rank
    if not explicit or local is None:
        return None
    if count == 1:  # the launcher shows each process its own device
        return 0
    return local if local < count else None
