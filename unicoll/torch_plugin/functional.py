"""A functional collective that torch's C++ does not hand to a process group in Python."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

__all__ = ["register"]

_library: Any = None


def register() -> None:
    """Have ``all_gather_into_tensor_out`` call the group's method, as its fellows do; again, it does nothing.

    Its C++ asks the group for a C++ backend, which a group in Python has none of. This does the same in Python, for all
    groups: the operation's name is in a table that knows no groups.
    """
    global _library
    if _library is None:
        _library = torch.library.Library("_c10d_functional", "IMPL")
        for device in ("CPU", "CUDA"):
            _library.impl("all_gather_into_tensor_out", _all_gather_into_tensor_out, device)


def _all_gather_into_tensor_out(input: Any, group_size: int, group_name: Any, *, out: Any) -> Any:
    named = isinstance(group_name, str)
    group = c10d._resolve_process_group(group_name) if named else group_name
    gather = getattr(group, "all_gather_single", None) or group._allgather_base
    work = gather(out, input, c10d.AllgatherOptions())
    torch._C._distributed_c10d._register_work(out, work)
    return out
