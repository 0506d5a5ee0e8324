"""Makes unicoll's backends known to torch.distributed by ``import torch``, without an import of the plug-in.

An installed unicoll names :func:`autoload` as an entry point of the group ``torch.backends``, whose functions torch
calls at the end of its own import; ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns that off. This module imports nothing that
torch has not imported, so ``import torch`` takes no longer. Since torch 2.14 torch also imports
:mod:`unicoll.torch_plugin` by itself, by the entry points of the group ``torch.distributed.backends``, if a backend has
one of its names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

_BACKENDS = {
    "unicoll": ["cpu", "cuda"],
    "unicoll-gloo": ["cpu"],
    "unicoll-mpi": ["cpu", "cuda"],
    "unicoll-nccl": ["cuda"],
}
"""As in :mod:`unicoll.torch_plugin.backend_names`."""
_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def autoload() -> None:
    """Register the backends; the first group of one imports :mod:`unicoll.torch_plugin`.

    So does ``env://`` where torch's own handler does not suffice: if a variable is missing, or unicoll's launcher has a
    store.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:  # torch was built without it
        return
    for name, devices in _BACKENDS.items():
        if name.upper() not in c10d.Backend._plugins:
            c10d.Backend.register_backend(name, _factory(name), extended_api=True, devices=devices)
    handlers: dict[str, Any] = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    torchs_handler = handlers["env"]

    def handler(url: str, *args: Any, **options: Any) -> Any:
        complete = all(os.environ.get(name) for name in _TORCH_VARIABLES)
        if "unicoll.torch_plugin" not in sys.modules and (not complete or os.environ.get("UNICOLL_STORE")):
            import unicoll.torch_plugin  # noqa: F401  # its own handler calls this one if it does not serve the job

            return handlers["env"](url, *args, **options)
        return torchs_handler(url, *args, **options)

    handlers["env"] = handler


def _factory(name: str) -> Callable[[Any, Any], Any]:
    def make(opts: Any, pg_options: Any) -> Any:
        from unicoll.torch_plugin.register import factory

        return factory(name)(opts, pg_options)

    return make
