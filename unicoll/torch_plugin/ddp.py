"""``DistributedDataParallel``: torch's class over unicoll groups."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel as _TorchDDP

from unicoll.torch_plugin.wrapped_group import torch_group

_PARAMETERS = inspect.signature(_TorchDDP.__init__)


class DistributedDataParallel(_TorchDDP):  # type: ignore[misc]
    """``torch.nn.parallel.DistributedDataParallel`` with its arguments, methods and errors.

    ``process_group`` may also be a unicoll group; None is unicoll's default group, or torch's if
    unicoll has none. The attribute ``process_group`` is torch's process group over it. If
    torch.distributed has no default group, one over unicoll's default group is created, since comm
    hooks and other parts of torch use it; ``unicoll.destroy_process_group`` destroys it.

    Raises:
        NotInitializedError: no group is given, and there is no default group.
        DistArgumentError: this process is not in the group, or the group has been destroyed.
        DistTypeError: ``process_group`` is not a process group.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = _PARAMETERS.bind(self, *args, **kwargs)
        if bound.arguments.get("device_mesh") is None:
            bound.arguments["process_group"] = torch_group(bound.arguments.get("process_group"))
        super().__init__(*bound.args[1:], **bound.kwargs)


functools.update_wrapper(DistributedDataParallel.__init__, _TorchDDP.__init__)
