"""Starting: ``env://`` where torch lacks a variable that it wants, or where our launcher keeps a store."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from unicoll.joining import meet

from .compat import backend_of_init
from .names import asks_for_us, spec_of
from .stores import ToTorch

__all__ = ["register"]

_WANTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE_S = 300.0


def register(mpi_is_ours: Callable[[], bool]) -> None:
    """Let ``env://`` ask unicoll for its own backends, where torch lacks a variable or our launcher keeps a store.

    Our launcher's store asks for the job's secret, which torch's would not, and knows how a rank ended.
    """
    handlers: dict[str, Any] = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    theirs = handlers["env"]
    if getattr(theirs, "knows_unicoll", False):
        return

    def handler(url: str, timeout: timedelta | None = None, **more: Any) -> Any:
        backend = backend_of_init()
        query = dict(parse_qsl(urlsplit(url).query))
        missing = [n for n in _WANTED if not os.environ.get(n) and n.lower() not in query]
        known = not missing and not os.environ.get("UNICOLL_STORE")
        if backend is None or known or not asks_for_us(backend, mpi_is_ours()):
            return theirs(url, **({} if timeout is None else {"timeout": timeout}), **more)
        return iter([_meet(spec_of(backend), query, timeout)])

    handler.knows_unicoll = True  # type: ignore[attr-defined]
    handlers["env"] = handler


def _meet(backend: str | None, query: dict[str, str], timeout: timedelta | None) -> tuple[ToTorch, int, int]:
    """A store that all ranks share, this rank, and the number of ranks; as unicoll's own init finds them."""
    patience = min(_PATIENCE_S, timeout.total_seconds()) if timeout is not None else _PATIENCE_S
    rank, size = int(query.get("rank", -1)), int(query.get("world_size", -1))
    meeting = meet(backend, None, rank, size, None, patience)
    return ToTorch(meeting), meeting.rank, meeting.world_size
