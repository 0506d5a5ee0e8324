"""What init_process_group would use in this environment, for ``explain()`` before
initialization."""

from __future__ import annotations

import os
from collections.abc import Mapping

from unicoll.bootstrap import launchers
from unicoll.devices import runtimes
from unicoll.errors import DistError
from unicoll.group import registry
from unicoll.net.wire import interfaces
from unicoll.net.wire.secret import find_secret


def lines(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Launcher, rank, store, secret, interface, backends and devices, one line each; makes no
    connection."""
    found = [*_identity(environ)]
    try:
        secret = find_secret(environ)
        found.append(f"secret: {secret.source if secret.key else 'none'}")
    except DistError as e:
        found.append(f"secret: {e}")
    found += [registry.status_line(name) for name in registry.backend_names()]
    return found + [line for device_type in runtimes.DEVICE_TYPES for line in _devices(device_type)]


def _devices(device_type: str) -> list[str]:
    """The runtime and each device of a type; empty without devices, since the backend's line has
    the reason."""
    if runtimes.reason_against(device_type) is not None:
        return []
    runtime = runtimes.runtime(device_type)
    try:
        count = runtime.device_count()
        found = [f"{runtime.description}: {count} device{'s' if count != 1 else ''}"]
        for device in range(count):
            facts = runtime.facts(device)
            capability = ".".join(map(str, facts.capability))
            known = [f"compute capability {capability}"] if facts.capability != (0, 0) else []
            known += [facts.bus, facts.uuid]
            memory = f"{facts.memory / 2**30:.1f} GiB"
            found.append(
                f"{device_type}:{device}: {', '.join([facts.name, memory, *filter(None, known)])}"
            )
    except DistError as e:
        return [f"{runtime.name}: {e}"]
    return found


def _identity(environ: Mapping[str, str]) -> list[str]:
    try:
        launched = launchers.detect(environ)
    except DistError as e:
        return [f"rank: {e}"]
    if launched is None:
        reason = (
            "; ".join(launchers.near_misses(environ)) or "no variables of a known launcher are set"
        )
        return [f"no launcher: {reason}"]
    found = [
        f"rank {launched.rank} of {launched.world_size}: from {launched.source} ({launched.name})"
    ]
    master = launched.master_addr
    if environ.get("UNICOLL_STORE"):
        found.append(f"store: {environ['UNICOLL_STORE']} (UNICOLL_STORE)")
    elif master is not None and launched.master_port is not None:
        found.append(
            f"store: {interfaces.join_hostport(master, launched.master_port)}"
            f" ({launched.master_source})"
        )
    else:
        found.append(f"store: {launched.master_hint}")
    try:
        choice = interfaces.listen_addresses(master, environ, single_host=launched.single_host)
        found.append(f"interface: {', '.join(choice.addresses)}: {choice.reason}")
    except DistError as e:
        found.append(f"interface: {e}")
    return found
