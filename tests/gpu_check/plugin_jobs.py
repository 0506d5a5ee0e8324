"""What ranks do in the stage on the plug-in: programs of torch.distributed over unicoll, on CUDA tensors.

Each takes torch's kit and raises AssertionError where something is wrong, or :class:`record.Skip` where it cannot be
done; what it returns is reported. Each has some seconds, ranks that hang are started anew.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

from .kits import Kit

__all__ = ["PROGRAMS", "enter", "leave"]


def enter(timeout: float, device: int | None) -> None:
    """Join a job of torch.distributed, whose ranks share the first device, over unicoll."""
    torch: Any = import_module("torch")
    import_module("unicoll.torch_plugin")
    torch.cuda.set_device(device or 0)
    torch.distributed.init_process_group("unicoll", timeout=timedelta(seconds=timeout))


def leave() -> list[str]:
    """Leave it; what was not given back."""
    import_module("torch.distributed").destroy_process_group()
    return []


PROGRAMS: list[Callable[[Kit], Any]] = []
