"""Names of torch's backends that mean unicoll's: the environment variable ``UNICOLL_REPLACE``.

A framework that accepts torch's names only, such as accelerate on a CPU, then needs no change.
torch's ``get_backend()`` returns the name that was asked for, since frameworks compare it.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch.distributed import distributed_c10d as c10d

from unicoll.bootstrap.resolve import apply_environment
from unicoll.process import environment, logs
from unicoll.torch_autoload import BACKENDS
from unicoll.torch_plugin import compat
from unicoll.torch_plugin.group import TorchProcessGroup

_VARIABLE = "UNICOLL_REPLACE"

log = logs.logger("torch")
_installed = False
"""True if torch's function has been replaced. Without the variable it is not, since tracebacks of
errors would have a frame more."""


def note() -> str:
    """For logs and :func:`unicoll.torch_plugin.explain`: which names are replaced; "" if none."""
    names = sorted(_replaced())
    if not names:
        return ""
    pairs = ", ".join(f"{name!r} means 'unicoll-{name}'" for name in names)
    return f"{_VARIABLE}={','.join(names)}: in torch.distributed {pairs}"


def meaning(backend: str | None) -> str | None:
    """What a backend string of torch means: ``"unicoll-gloo"`` for ``"gloo"`` where that is
    replaced; else itself.

    ``"cpu:gloo,cuda:nccl"`` is replaced if all its names are, since the devices of a group have one
    library's backends. ``"undefined"``, which torch has for a call without a name, is the
    backend that torch chooses then.

    Raises:
        DistArgumentError: the variable has another name.
    """
    replaced = _replaced()
    if not replaced or backend is None:
        return backend
    _log_once()
    by_device = c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map()
    names = {str(name) for name in by_device.values()}
    if not names & replaced:
        return backend
    if others := sorted(names - replaced - BACKENDS.keys()):
        log.warning(
            "%s=%s: a group with the backends %r is torch's own, because %s is not replaced",
            _VARIABLE,
            ",".join(sorted(replaced)),
            backend,
            ", ".join(others),
        )
        return backend
    meant = {d: f"unicoll-{name}" if name in replaced else name for d, name in by_device.items()}
    if ":" in backend or backend == "undefined":
        return ",".join(f"{device}:{name}" for device, name in meant.items())
    return next(iter(meant.values()))


def install() -> None:
    """Have torch make unicoll's groups for the replaced names, if there are any now; repeated calls
    do nothing."""
    global _installed
    if environment.names(_VARIABLE):
        compat.replace("_new_process_group_helper", _making)
        _installed = True


def _replaced() -> frozenset[str]:
    return environment.names(_VARIABLE) if _installed else frozenset()


@cache
def _log_once() -> None:
    # Joining applies the log level of the environment, but logs a line before torch makes a group.
    apply_environment()
    log.info("%s", note())


def _making(torchs: Any) -> Any:
    """torch's function that makes a group and registers it by the name of its backend."""
    signature = inspect.signature(torchs)

    def _new_process_group_helper(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        asked = bound.arguments["backend"]
        meant = meaning(str(asked))
        if meant == str(asked):
            return torchs(*args, **options)
        bound.arguments["backend"] = c10d.Backend(meant)
        group, store = torchs(*bound.args, **bound.kwargs)
        if isinstance(group, TorchProcessGroup):
            world = c10d._world
            world.pg_map[group] = (asked, world.pg_map[group][1])
            world.pg_backend_config[group] = str(c10d.BackendConfig(asked))
        return group, store

    return _new_process_group_helper
