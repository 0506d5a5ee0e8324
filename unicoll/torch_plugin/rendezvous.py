"""Rendezvous ``env://`` if a variable that torch requires is missing, or unicoll's launcher has a store."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from unicoll.api import world
from unicoll.bootstrap.join import run_rendezvous
from unicoll.bootstrap.rendezvous import find_members, open_store
from unicoll.errors import DistArgumentError
from unicoll.net import logs
from unicoll.torch_autoload import argument_of_init, backend_of_init
from unicoll.torch_plugin.backend_names import names_unicoll, spec_of
from unicoll.torch_plugin.stores import UnicollBackedStore

log = logs.logger("torch")

_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT_S = 300.0


def register(include_mpi: Callable[[], bool]) -> None:
    """Make ``env://`` use unicoll's rendezvous for its backends, if a variable is missing or the launcher has a store.

    The launcher's store requires the job's secret, which torch's does not, and records how each rank ended.
    ``include_mpi`` returns True if ``"mpi"`` is a unicoll backend.
    """
    handlers: dict[str, Any] = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    torchs_handler = handlers["env"]
    if getattr(torchs_handler, "dispatches_unicoll", False):
        return

    def handler(url: str, timeout: timedelta | None = None, **options: Any) -> Any:
        backend = backend_of_init()
        query = dict(parse_qsl(urlsplit(url).query))
        missing = [n for n in _TORCH_VARIABLES if not os.environ.get(n) and n.lower() not in query]
        complete = not missing and not os.environ.get("UNICOLL_STORE")
        if backend == "undefined":
            log.warning(
                "torch.distributed.init_process_group was called without a backend: torch's own backends are used;"
                " backend='unicoll' selects unicoll's"
            )
        if backend is None or complete or not names_unicoll(backend, include_mpi()):
            return torchs_handler(url, **({} if timeout is None else {"timeout": timeout}), **options)
        return iter([_rendezvous(spec_of(backend), query, timeout)])

    handler.dispatches_unicoll = True  # type: ignore[attr-defined]
    handlers["env"] = handler


def _rendezvous(
    backend: str | None, query: dict[str, str], timeout: timedelta | None
) -> tuple[UnicollBackedStore, int, int]:
    """(store of all ranks, this rank, number of ranks), determined as in ``unicoll.init_process_group``.

    With ``enable_reconfigure`` and a store that outlives lost ranks, the others are not met, since some may be new.
    """
    reconfigures = bool(argument_of_init("enable_reconfigure"))
    if world.replaces_lost_rank() and not reconfigures:
        raise DistArgumentError(
            "init_process_group: this process replaces a rank that has ended: it joins the others in a group that all"
            " make with enable_reconfigure=True (docs/torch.md), or by unicoll.recover(state) (docs/recovery.md)"
        )
    limit = min(_TIMEOUT_S, timeout.total_seconds()) if timeout is not None else _TIMEOUT_S
    rank, size = int(query.get("rank", -1)), int(query.get("world_size", -1))
    found = find_members(None, rank, size) if reconfigures else None
    if found is not None and found.location.found_again:
        rendezvous = open_store(found, limit)
    else:
        rendezvous = run_rendezvous(backend, None, rank, size, None, limit)
    return UnicollBackedStore(rendezvous), rendezvous.rank, rendezvous.world_size
