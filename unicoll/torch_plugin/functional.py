"""A functional collective whose C++ implementation does not support process groups in Python."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from unicoll.api.world import interrupted

_library: Any = None


def register() -> None:
    """Make ``all_gather_into_tensor_out`` call the group's method; repeated calls do nothing.

    torch's C++ implementation takes the group's C++ backend, which a group in Python does not have.
    This Python implementation is registered for all groups, since operations are registered by name
    only.
    """
    global _library
    if _library is None:
        _library = torch.library.Library("_c10d_functional", "IMPL")
        for device in ("CPU", "CUDA", "XPU"):
            _library.impl("all_gather_into_tensor_out", _all_gather_into_tensor_out, device)


def _all_gather_into_tensor_out(input: Any, group_size: int, group_name: Any, *, out: Any) -> Any:
    named = isinstance(group_name, str)
    group = c10d._resolve_process_group(group_name) if named else group_name
    gather = getattr(group, "all_gather_single", None) or group._allgather_base
    try:
        work = gather(out, input, c10d.AllgatherOptions())
        # Torch's wait_tensor() finds the work by this tensor.
        torch._C._distributed_c10d._register_work(out, work)
        return out
    except BaseException as error:
        interrupted(group, error)
        raise
