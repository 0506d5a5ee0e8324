"""unicoll's backends inside stock torch.distributed, in pure Python.

Importing this package registers them::

    import torch.distributed as dist
    import unicoll.torch_plugin

    dist.init_process_group("unicoll")          # by device: mpi or gloo for CPU tensors, nccl for CUDA tensors
    dist.init_process_group("unicoll-gloo")     # one of unicoll's backends by name; also -mpi and -nccl

and lets ``init_process_group`` find rank, size and address under every launcher that unicoll knows. It needs torch 2.6
or newer, and logs a warning at a version newer than the tested ones. :func:`enable_mpi` makes
``init_process_group("mpi")`` work where torch was built without MPI; :func:`explain` says what was chosen.
"""

from __future__ import annotations

import torch

from .compat import warn_of_untested
from .group import Group as ProcessGroupUnicoll
from .register import enable_mpi, explain, register

__all__ = ["ProcessGroupUnicoll", "enable_mpi", "explain", "register"]

warn_of_untested(torch.__version__)
register()
