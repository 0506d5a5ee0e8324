"""Rendezvous ``env://`` if a variable that torch requires is missing, or unicoll's launcher has a
store."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from unicoll.api import world
from unicoll.bootstrap.rendezvous import meet, open_store
from unicoll.bootstrap.resolve import JoinRequest, resolve
from unicoll.errors import DistArgumentError
from unicoll.process import logs
from unicoll.process.timeouts import backoff, seconds_left
from unicoll.torch_autoload import argument_of_init, backend_of_init
from unicoll.torch_plugin.backend_names import names_unicoll, spec_of
from unicoll.torch_plugin.replaced_backends import meaning
from unicoll.torch_plugin.stores import UnicollBackedStore

log = logs.logger("torch")

_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT_S = 300.0
_TOKEN = "unicoll/store"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""torch's variable: the store is that of torchrun's agent, and serves all jobs of its workers."""


def register(include_mpi: Callable[[], bool]) -> None:
    """Make ``env://`` use unicoll's rendezvous for its backends, if a variable is missing or the
    launcher has a store.

    The launcher's store requires the job's secret, which torch's does not, and records how each
    rank ended. ``include_mpi`` returns True if ``"mpi"`` is a unicoll backend.
    """
    handlers: dict[str, Any] = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    torchs_handler = handlers["env"]
    if getattr(torchs_handler, "dispatches_unicoll", False):
        return

    def handler(url: str, timeout: timedelta | None = None, **options: Any) -> Any:
        backend = meaning(backend_of_init())
        query = dict(parse_qsl(urlsplit(url).query))
        missing = [n for n in _TORCH_VARIABLES if not os.environ.get(n) and n.lower() not in query]
        complete = not missing and not os.environ.get("UNICOLL_STORE")
        if backend == "undefined":
            log.warning(
                "torch.distributed.init_process_group was called without a backend: torch's own"
                " backends are used; backend='unicoll' selects unicoll's"
            )
        if backend is None or not names_unicoll(backend, include_mpi()):
            return torchs_handler(
                url, **({} if timeout is None else {"timeout": timeout}), **options
            )
        if complete:
            return _at_new_store(torchs_handler, url, timeout, options)
        return iter([_rendezvous(spec_of(backend), query, timeout)])

    def tcp_handler(url: str, timeout: timedelta | None = None, **options: Any) -> Any:
        backend = meaning(backend_of_init())
        if backend is None or not names_unicoll(backend, include_mpi()):
            return torchs_tcp_handler(
                url, **({} if timeout is None else {"timeout": timeout}), **options
            )
        return _at_new_store(torchs_tcp_handler, url, timeout, options)

    torchs_tcp_handler = handlers["tcp"]
    handler.dispatches_unicoll = True  # type: ignore[attr-defined]
    handlers["env"], handlers["tcp"] = handler, tcp_handler


class _Met(NamedTuple):
    """The last store in which this process has met the others: rank 0's token, and the server's
    address."""

    token: bytes
    address: tuple[str, int]


_last: _Met | None = None


def _at_new_store(
    handler: Callable[..., Any], url: str, timeout: timedelta | None, options: dict[str, Any]
) -> Iterator[tuple[Any, int, int]]:
    """torch's rendezvous in a TCPStore of rank 0, but not in that of the job before.

    Rank 0 may destroy its groups later than the other ranks. One that joins again at once would
    connect to the store that is about to end. So rank 0 writes a fresh token into each store, and a
    rank that finds the last one connects again.
    """
    global _last
    limit = timeout or c10d.default_pg_timeout
    deadline, pauses = time.monotonic() + limit.total_seconds(), backoff(0.1, 0.2)
    while True:
        if _last is not None:
            _await_end(_last.address, next(pauses))
        left = timedelta(seconds=seconds_left(deadline, 1.0))
        try:
            store, rank, size = next(iter(handler(url, timeout=left, **options)))
            # The agent's store serves all jobs of its workers, so it does not end with the last
            # one.
            if os.environ.get(_AGENT_STORE) == str(True):
                break
            if rank == 0:
                store.set(_TOKEN, secrets.token_hex(8))
            met = _Met(bytes(store.get(_TOKEN)), (store.host, store.port))
        except dist.DistNetworkError:
            # The store of the job before has ended.
            if time.monotonic() >= deadline:
                raise
        else:
            if _last is None or met.token != _last.token or time.monotonic() >= deadline:
                # Rank 0 serves the store itself, so it never finds an old one.
                _last = met if rank else None
                break
        # The connection ends with its last reference.
        store = None
    store.set_timeout(limit)
    yield store, rank, size


def _await_end(address: tuple[str, int], timeout: float) -> None:
    """Wait until a server ends: torch's client logs an error, with frames of C++, if it is
    connected then."""
    with suppress(OSError), socket.create_connection(address, timeout) as connection:
        connection.settimeout(timeout)
        connection.recv(1)


def _rendezvous(
    backend: str | None, query: dict[str, str], timeout: timedelta | None
) -> tuple[UnicollBackedStore, int, int]:
    """(store of all ranks, this rank, number of ranks), determined as in
    ``unicoll.init_process_group``.

    With ``enable_reconfigure`` and a store that outlives lost ranks, the others are not met, since
    some may be new.
    """
    reconfigures = bool(argument_of_init("enable_reconfigure"))
    if world.replaces_lost_rank() and not reconfigures:
        raise DistArgumentError(
            "init_process_group: this process replaces a rank that has ended: it joins the others"
            " in a group that all make with enable_reconfigure=True (docs/torch.md), or by"
            " unicoll.recover(state) (docs/recovery.md)"
        )
    limit = min(_TIMEOUT_S, timeout.total_seconds()) if timeout is not None else _TIMEOUT_S
    rank, size = int(query.get("rank", -1)), int(query.get("world_size", -1))
    request = JoinRequest(backend, rank=rank, world_size=size, join_timeout=limit)
    deadline = time.monotonic() + limit
    found = resolve(request)
    if reconfigures and found.location.found_again:
        rendezvous = open_store(found, deadline)
    else:
        rendezvous = meet(found, request, deadline)
    return UnicollBackedStore(rendezvous), rendezvous.rank, rendezvous.world_size
