"""Makes unicoll's backends known to torch.distributed by ``import torch``, without an import of the plug-in.

An installed unicoll names :func:`autoload` as an entry point of the group ``torch.backends``, whose functions torch
calls at the end of its own import; ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns that off. This module imports nothing that
torch has not imported, so ``import torch`` takes no longer. Since torch 2.14 torch also imports
:mod:`unicoll.torch_plugin` by itself, by the entry points of the group ``torch.distributed.backends``, if a backend has
one of its names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

_BACKENDS = {
    "unicoll": ["cpu", "cuda"],
    "unicoll-gloo": ["cpu"],
    "unicoll-mpi": ["cpu", "cuda"],
    "unicoll-nccl": ["cuda"],
}
"""As in :mod:`unicoll.torch_plugin.backend_names`."""


def autoload() -> None:
    """Register the backends; ``init_process_group`` with the name of one imports :mod:`unicoll.torch_plugin`.

    Never raises: torch could not be imported then.
    """
    with suppress(Exception):
        _register(sys.modules["torch.distributed.distributed_c10d"])
        _find_in_env(sys.modules["torch.distributed.rendezvous"])


def _register(c10d: Any) -> None:
    for name, devices in _BACKENDS.items():
        if name.upper() not in c10d.Backend._plugins:
            c10d.Backend.register_backend(name, _factory(name), extended_api=True, devices=devices)


def _find_in_env(rendezvous: Any) -> None:
    """Import the plug-in before ``env://`` for one of its backends, which need fewer variables than torch's do."""
    torchs_handler = rendezvous._rendezvous_handlers["env"]

    def handler(*args: Any, **options: Any) -> Any:
        if "unicoll.torch_plugin" in sys.modules or not _is_for_unicoll(sys._getframe(1)):
            return torchs_handler(*args, **options)
        import unicoll.torch_plugin  # noqa: F401  # its handler is before this one

        return rendezvous._rendezvous_handlers["env"](*args, **options)

    rendezvous._rendezvous_handlers["env"] = handler


def _is_for_unicoll(frame: FrameType | None) -> bool:
    """True if the caller's ``init_process_group`` has a backend of unicoll, which torch does not pass on."""
    while frame is not None and frame.f_code.co_name != "init_process_group":
        frame = frame.f_back
    return frame is not None and "unicoll" in str(frame.f_locals.get("backend")).lower()


def _factory(name: str) -> Callable[[Any, Any], Any]:
    def make(opts: Any, pg_options: Any) -> Any:
        from unicoll.torch_plugin.register import factory

        return factory(name)(opts, pg_options)

    return make
