"""unicoll's backends as torch.distributed backends, in pure Python.

Importing this package registers them::

    import torch.distributed as dist
    import unicoll.torch_plugin

    dist.init_process_group("unicoll")          # by device: mpi or gloo for CPU tensors, nccl for CUDA tensors
    dist.init_process_group("unicoll-gloo")     # one of unicoll's backends by name; also -mpi and -nccl

``init_process_group`` then takes rank, world size and address from every launcher that unicoll
supports. The package needs torch 2.6 or newer, and logs a warning for a version newer than the
tested ones. :func:`enable_mpi` makes ``init_process_group("mpi")`` work if torch was built without
MPI; :func:`explain` reports the chosen backends. :func:`torch_group` gives torch's group over a
group of unicoll's functions. :func:`watch` diagnoses the groups of any other backend.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch

from unicoll.errors import DistError
from unicoll.torch_plugin.compat import warn_of_untested
from unicoll.torch_plugin.group import TorchProcessGroup as ProcessGroupUnicoll
from unicoll.torch_plugin.register import enable_mpi, explain, register
from unicoll.torch_plugin.wrapped_group import torch_group

__all__ = ["ProcessGroupUnicoll", "enable_mpi", "explain", "register", "torch_group", "watch"]


def watch(on_hang: str | Callable[[DistError], object] | None = None) -> None:
    """As :func:`unicoll.torch_watch.watch`."""
    import_module("unicoll.torch_watch").watch(on_hang)


warn_of_untested(torch.__version__)
register()
