"""The transports of a group's data for ``explain()``: the expected ones, and those in NCCL's log.

For every pair of ranks NCCL chooses between peer-to-peer access (P2P), shared memory of the host
and the network, and has no function that returns the choice. :func:`expected` derives it from what
the members published when they connected, from CUDA's driver and from the environment;
:func:`logged` reads NCCL's log, if that is a file.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unicoll.devices.device_runtime import DeviceError, DeviceRuntime
from unicoll.net.wire.interfaces import interfaces

Fact = Mapping[str, Any]
"""What a member published: ``host``, ``device`` (ordinal in its process), ``uuid``, and ``hostid``
if NCCL_HOSTID is set; see :mod:`unicoll.device_collectives.communicators.unique_id`."""

VARIABLES = (
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_DIRECT_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_SOCKET_IFNAME",
    "NCCL_NVLS_ENABLE",
    "NCCL_MNNVL_ENABLE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_HOSTID",
    "NCCL_TOPO_FILE",
)
"""Variables that change NCCL's choice."""
_DEVICES = Path("/sys/class/infiniband")
_SYSTEM = Path("/etc")
_LAST = ("docker", "lo", "virbr")
"""Prefixes of interfaces that NCCL takes only if there are no others, in this order (2.30.7,
src/misc/socket.cc). Before all others it takes those that begin with "ib"."""
_NAMES = 4
_LOG_BYTES = 64 << 20
"""The most that is read of a log."""
_LEVELS = ("INFO", "TRACE")
_LINE = re.compile(
    r"(\d+):\d+ \[\d+\] NCCL INFO Channel \d+(?:/\d+)? : (\d+)\[[^\]]*\] -> (\d+)\[[^\]]*\](?:"
    r" \[(send|receive)\])?"
    r" via (.+?)(?: comm 0x.*)?$"
)
"""Groups: process, ranks from and to, direction and transport."""
_NUMBER = re.compile(r"\d+(\(\d+\))?")
"""The number of a network device, and of a rank in parentheses."""


def settings(
    library: str = "NCCL", environ: Mapping[str, str] = os.environ, system: Path = _SYSTEM
) -> dict[str, str]:
    """NCCL's variables: the environment's, else those of ``NCCL_CONF_FILE`` or ``~/.nccl.conf``,
    else the system's.

    RCCL has the same variables in files of its own.
    """
    found: dict[str, str] = {}
    name = f"{library.lower()}.conf"
    own = environ.get("NCCL_CONF_FILE") or f"~/.{name}"
    for path in (system / name, Path(os.path.expanduser(own))):
        try:
            lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        except OSError:
            continue
        pairs = [line.partition("=") for line in lines if line.startswith("NCCL_")]
        found |= {name.strip(): value.strip() for name, _, value in pairs}
    return found | {name: value for name, value in environ.items() if name.startswith("NCCL_")}


def connecting(addresses: Sequence[str], environ: Mapping[str, str]) -> str:
    """A description of the interfaces on which the ranks connect: NCCL's and unicoll's, which are
    chosen apart.

    Args:
        addresses: on which unicoll listens.
        environ: NCCL's variables (:func:`settings`).
    """
    found = [str(one) for one in interfaces() if one.address in addresses]
    how = (
        "by NCCL_SOCKET_IFNAME"
        if environ.get("NCCL_SOCKET_IFNAME")
        else "NCCL_SOCKET_IFNAME is not set"
    )
    return f"NCCL uses {_sockets(environ)} ({how}), unicoll {_list(found or addresses)}"


# --- the expected transports ----------------------------------------------------------------------


def expected(
    rank: int,
    facts: Sequence[Fact],
    cuda: DeviceRuntime,
    net_name: str | None,
    environ: Mapping[str, str],
    devices: Path = _DEVICES,
) -> str:
    """A description of the transports from this rank to the others.

    Args:
        facts: facts of the members, in group order.
        net_name: the network in the group's options, or None.
        environ, devices: NCCL's variables (:func:`settings`), and the folder of InfiniBand devices.
    """
    own, host = facts[rank], _host(facts[rank])
    peers = [fact for i, fact in enumerate(facts) if i != rank]
    local = Counter(_within_host(own, p, cuda, environ) for p in peers if _host(p) == host)
    remote = [_host(p) for p in peers if _host(p) != host]
    local_by_network = local.pop("", 0)
    parts = [f"{_count(n, 'peer')} by {transport}" for transport, n in sorted(local.items())]
    if local_by_network or remote:
        hosts = [f"{local_by_network} on this host"] if local_by_network else []
        hosts += [f"{len(remote)} on {_count(len(set(remote)), 'other host')}"] if remote else []
        parts.append(f"{' and '.join(hosts)} by network ({_network(net_name, environ, devices)})")
    text = f"expected transports: {', '.join(parts) or 'none, there is one rank'}"
    variables = [f"{name}={environ[name]}" for name in VARIABLES if name in environ]
    return f"{text} ({', '.join(variables)})" if variables else text


def _host(fact: Fact) -> str:
    """NCCL's name of the host: NCCL_HOSTID if that is set."""
    found: str = fact.get("hostid") or fact["host"]
    return found


def _within_host(own: Fact, peer: Fact, cuda: DeviceRuntime, environ: Mapping[str, str]) -> str:
    """The transport between two ranks of one host; "" for the network."""
    level = environ.get("NCCL_P2P_LEVEL", "").upper()
    p2p = not _on(environ, "NCCL_P2P_DISABLE") and level not in ("LOC", "0")
    shared = "" if _on(environ, "NCCL_SHM_DISABLE") else "shared memory"
    if not p2p:
        return shared
    if peer["uuid"] == own["uuid"]:
        return "P2P (the same device)"
    reach = _reach(own, peer, cuda)
    # The peer's device is not visible where each process sees only its own.
    if reach is None:
        return f"P2P where the devices allow it, else {shared or 'network'}"
    direct, atomic = reach
    if direct and atomic:
        return f"P2P ({'xGMI' if cuda.name == 'HIP' else 'NVLink'})"
    return "P2P (PCIe)" if direct and level not in ("NVL", "1") else shared


def _reach(own: Fact, peer: Fact, cuda: DeviceRuntime) -> tuple[bool, bool] | None:
    """``peer_access`` of the runtime from this device to a peer's; None if the peer's is not
    visible."""
    try:
        for other in range(cuda.device_count()):
            if cuda.facts(other).uuid == peer["uuid"]:
                return cuda.peer_access(own["device"], other)
    except DeviceError:
        pass
    return None


def _network(net_name: str | None, environ: Mapping[str, str], devices: Path) -> str:
    name = net_name or environ.get("NCCL_NET", "")
    plugin = environ.get("NCCL_NET_PLUGIN", "none")
    if not name and plugin.lower() != "none":
        return f"plug-in {plugin}"
    if name and name.lower() not in ("ib", "socket"):
        return name
    if name.lower() != "socket" and not _on(environ, "NCCL_IB_DISABLE"):
        found = _infiniband(devices)
        if found or name:
            return found or "InfiniBand, without a device on this host"
    return _sockets(environ)


def _sockets(environ: Mapping[str, str]) -> str:
    """The interfaces of NCCL's sockets, with which it also connects the ranks in the first
    place."""
    spec = environ.get("NCCL_SOCKET_IFNAME")
    names = [*dict.fromkeys(one.name for one in interfaces() if one.is_up)]
    others = [name for name in names if not name.startswith(_LAST)]
    choices = [
        [name for name in names if name.startswith("ib")],
        others,
        *([name for name in names if name.startswith(prefix)] for prefix in _LAST),
    ]
    return f"sockets on {spec or _list(next(filter(None, choices), [])) or 'no interface'}"


def _infiniband(devices: Path) -> str:
    """The InfiniBand devices by kind: ``InfiniBand mlx5_0, mlx5_1; RoCE mlx5_2``."""
    kinds: dict[str, list[str]] = defaultdict(list)
    try:
        for device in sorted(devices.iterdir()):
            links = [p.read_text().strip() for p in device.glob("ports/*/link_layer")]
            kinds["RoCE" if links and set(links) == {"Ethernet"} else "InfiniBand"].append(
                device.name
            )
    except OSError:
        pass
    return "; ".join(f"{kind} {_list(names)}" for kind, names in sorted(kinds.items()))


def _list(names: Sequence[str]) -> str:
    more = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (f" and {more} more" if more > 0 else "")


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' if n != 1 else ''}"


def _on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip() not in ("", "0")


# --- NCCL's log -----------------------------------------------------------------------------------


def logged(environ: Mapping[str, str]) -> str:
    """This process's connections in NCCL's log; "" if there is no log file, or none in it.

    All communicators of the process write to the log, and ranks are those of the respective
    communicator.
    """
    if environ.get("NCCL_DEBUG", "").upper() not in _LEVELS:
        return ""
    try:
        peers = _read(_log_file(environ.get("NCCL_DEBUG_FILE", "")))
    except OSError:
        return ""
    parts = [
        f"{transport} with {_count(len(ranks), 'rank')}"
        for transport, ranks in sorted(peers.items())
    ]
    return f"in NCCL's log: {', '.join(parts)}" if parts else ""


def _log_file(pattern: str) -> Path:
    """The log file for a pattern with %h for the host and %p for the process."""
    values = {"h": socket.gethostname().partition(".")[0], "p": str(os.getpid()), "%": "%"}
    return Path(re.sub(r"%(.)", lambda m: values.get(m[1], m[0]), pattern))


def _read(path: Path) -> dict[str, set[int]]:
    """By transport the ranks with which this process is connected; several processes may write to
    one file."""
    peers: dict[str, set[int]] = defaultdict(set)
    # The user may have named a pipe, whose reading might never end.
    if not stat.S_ISREG(path.stat().st_mode):
        return peers
    pid = str(os.getpid())
    with path.open(errors="replace") as lines:
        read = 0
        for line in lines:
            read += len(line)
            if read > _LOG_BYTES:
                break
            found = _LINE.search(line.rstrip())
            if found is not None and found[1] == pid:
                peers[_short(found[5])].add(int(found[2] if found[4] == "receive" else found[3]))
    return peers


def _short(transport: str) -> str:
    """A transport without the number of its device: ``NET/IB/GDRDMA`` of ``NET/IB/0(3)/GDRDMA``."""
    return "/".join(part for part in transport.split("/") if not _NUMBER.fullmatch(part))
