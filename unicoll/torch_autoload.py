"""Makes unicoll's backends known to torch.distributed by ``import torch``, without an import of the
plug-in.

An installed unicoll names :func:`autoload` as an entry point of the group ``torch.backends``, whose
functions torch calls at the end of its own import; ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns that
off. With ``UNICOLL_WATCH=1`` the groups of torch's own backends are watched, too; with
``UNICOLL_REPLACE=gloo`` torch's backend of that name means unicoll's. This module imports nothing
that torch has not imported, so ``import torch`` takes no longer. Since torch 2.14 torch also
imports :mod:`unicoll.torch_plugin` by itself, by the entry points of the group
``torch.distributed.backends``, if a backend has one of its names.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

BACKENDS: dict[str, tuple[str, ...]] = {
    "unicoll": ("cpu", "cuda", "xpu"),
    "unicoll-gloo": ("cpu",),
    "unicoll-mpi": ("cpu", "cuda"),
    "unicoll-nccl": ("cuda",),
    "unicoll-xccl": ("cpu", "xpu"),
}
"""Backend names and the device types that they are registered for."""


def autoload() -> None:
    """Register the backends; ``init_process_group`` with the name of one imports
    :mod:`unicoll.torch_plugin`.

    Never raises: torch could not be imported then.
    """
    with suppress(Exception):
        c10d = sys.modules["torch.distributed.distributed_c10d"]
        _register(c10d)
        _find_in_env(sys.modules["torch.distributed.rendezvous"])
        if os.environ.get("UNICOLL_WATCH") or os.environ.get("UNICOLL_REPLACE"):
            _prepare_first_group(c10d)


def _register(c10d: Any) -> None:
    plugins = c10d.Backend._plugins
    for name, devices in BACKENDS.items():
        if name.upper() not in plugins:
            make = _factory(plugins, name.upper())
            c10d.Backend.register_backend(name, make, extended_api=True, devices=list(devices))


def _find_in_env(rendezvous: Any) -> None:
    """Import the plug-in before ``env://`` for one of its backends, which need fewer variables than
    torch's do."""
    torchs_handler = rendezvous._rendezvous_handlers["env"]

    def handler(*args: Any, **options: Any) -> Any:
        if "unicoll.torch_plugin" in sys.modules or (
            "unicoll" not in (backend_of_init() or "").lower()
            and not os.environ.get("UNICOLL_REPLACE")
        ):
            return torchs_handler(*args, **options)
        # The plug-in registers a handler that comes before this one.
        import unicoll.torch_plugin  # noqa: F401

        return rendezvous._rendezvous_handlers["env"](*args, **options)

    rendezvous._rendezvous_handlers["env"] = handler


def _prepare_first_group(c10d: Any) -> None:
    """Call :func:`unicoll.torch_watch.watch`, or import the plug-in, which replaces torch's
    backends, when torch makes a group, so that other processes start nothing."""
    torchs_helper = c10d._new_process_group_helper
    prepared = False

    # The plug-in reads the signature.
    @functools.wraps(torchs_helper)
    def helper(*args: Any, **options: Any) -> Any:
        nonlocal prepared
        if prepared:
            return torchs_helper(*args, **options)
        prepared = True
        if os.environ.get("UNICOLL_REPLACE"):
            import unicoll.torch_plugin  # noqa: F401
        _watch()
        # Both may have replaced it by functions that call this one.
        return c10d._new_process_group_helper(*args, **options)

    c10d._new_process_group_helper = helper


def _watch() -> None:
    from unicoll.process import environment, logs

    try:
        if environment.flag("UNICOLL_WATCH"):
            from unicoll.torch_watch import watch

            watch()
    except Exception as error:
        # The program must not depend on the diagnosis.
        logs.logger("watch").warning("UNICOLL_WATCH: torch's groups are not watched: %s", error)


def backend_of_init() -> str | None:
    """The backend string of the current ``init_process_group`` call, which torch does not pass to
    the rendezvous."""
    backend = argument_of_init("backend")
    return None if backend is None else str(backend)


def argument_of_init(name: str) -> Any:
    """An argument of the current ``init_process_group`` call, or None."""
    frame = caller("init_process_group")
    return frame.f_locals.get(name) if frame is not None else None


def caller(function: str) -> FrameType | None:
    """The frame of a function of torch's ``distributed_c10d`` that the calling one runs in, or
    None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if frame.f_code.co_name == function and module == "torch.distributed.distributed_c10d":
            return frame
        frame = frame.f_back
    return None


def _factory(plugins: dict[str, Any], name: str) -> Callable[[Any, Any], Any]:
    def make(opts: Any, pg_options: Any) -> Any:
        # It registers another function in place of this one.
        import unicoll.torch_plugin  # noqa: F401

        return plugins[name].creator_fn(opts, pg_options)

    return make
