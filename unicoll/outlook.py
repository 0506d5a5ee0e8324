"""What init_process_group would find here: for ``explain()`` before there is anything to explain."""

from __future__ import annotations

import os
from collections.abc import Mapping

from . import auth, launchers, net, registry
from .errors import DistError

__all__ = ["lines"]


def lines(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Launcher, rank, store, secret, interface and backends, one line each; nothing is connected to."""
    found = [*_identity(environ)]
    try:
        secret = auth.find_secret(environ)
        found.append(f"secret: {secret.source if secret.key else 'none'}")
    except DistError as e:
        found.append(f"secret: {e}")
    found += [registry.reason_against(name) or f"backend {name!r}: available" for name in registry.known()]
    return found


def _identity(environ: Mapping[str, str]) -> list[str]:
    try:
        launched = launchers.detect(environ)
    except DistError as e:
        return [f"rank: {e}"]
    if launched is None:
        why = "; ".join(launchers.near_misses(environ)) or "none of the known launchers' variables are set"
        return [f"no launcher: {why}"]
    found = [f"rank {launched.rank} of {launched.world_size}: from {launched.source} ({launched.name})"]
    master = launched.master_addr
    if environ.get("UNICOLL_STORE"):
        found.append(f"store: {environ['UNICOLL_STORE']} (UNICOLL_STORE)")
    elif master is not None and launched.master_port is not None:
        found.append(f"store: {net.join_hostport(master, launched.master_port)} ({launched.master_source})")
    else:
        found.append(f"store: {launched.master_hint}")
    try:
        choice = net.listen_addresses(master, environ, single_host=launched.single_host)
        found.append(f"interface: {', '.join(choice.addresses)}: {choice.reason}")
    except DistError as e:
        found.append(f"interface: {e}")
    return found
