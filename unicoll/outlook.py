"""What init_process_group would find here: for ``explain()`` before there is anything to explain."""

from __future__ import annotations

import os
from collections.abc import Mapping

from . import auth, launchers, net, registry, streams
from .errors import DistError

__all__ = ["lines"]


def lines(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Launcher, rank, store, secret, interface, backends and devices, one line each; nothing is connected to."""
    found = [*_identity(environ)]
    try:
        secret = auth.find_secret(environ)
        found.append(f"secret: {secret.source if secret.key else 'none'}")
    except DistError as e:
        found.append(f"secret: {e}")
    found += [registry.in_words(name) for name in registry.known()]
    return found + _devices()


def _devices() -> list[str]:
    """CUDA's driver and each device; nothing where there are none, since NCCL's line says why."""
    if streams.reason_against() is not None:
        return []
    try:
        cuda = streams.cuda()
        count = cuda.device_count()
        found = [f"{cuda.description}: {count} device{'s' if count != 1 else ''}"]
        for device in range(count):
            facts = cuda.facts(device)
            capability = ".".join(map(str, facts.capability))
            found.append(
                f"cuda:{device}: {facts.name}, {facts.memory / 2**30:.1f} GiB, compute capability {capability},"
                f" {facts.bus}, {facts.uuid}"
            )
    except DistError as e:
        return [f"CUDA: {e}"]
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
