"""Probes of this host and this process's environment."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from unicoll.bootstrap import launchers
from unicoll.bootstrap.enclosing_jobs import own_environment
from unicoll.bootstrap.launchers import LaunchInfo
from unicoll.doctor.probes import Facts, Probe
from unicoll.errors import DistArgumentError, DistError
from unicoll.net.wire import interfaces as net
from unicoll.net.wire.secret import find_secret
from unicoll.process import environment
from unicoll.process.host_identity import boot_id

SHM = "/dev/shm"
SYS = "/sys"
CGROUP = "/sys/fs/cgroup"

_SECRET = ("SECRET", "TOKEN", "KEY", "PASSWORD")
_SHOWN = re.compile(
    r"UNICOLL_|[NR]?CCL_|GLOO_|(CUDA|HIP|ROCR)_VISIBLE_DEVICES|MASTER_|(LOCAL_)?RANK$|(LOCAL_)?WORLD_SIZE$"
)
_LONGEST = 60
_MOST_INTERFACES = 8
_UNSYNCHRONIZED = 0x40


def launched_or_none() -> LaunchInfo | None:
    """The launcher of this process; None without one, or if the launcher's variables contradict
    each other.

    A rank that MPI's launcher started without a variable for the size counts as launched: MPI
    provides the size.
    """
    try:
        found = launchers.detect()
    except DistArgumentError:
        return None
    if found is None and launchers.has_rank_without_size(own_environment()):
        return launchers.from_mpi_world(0, 1)
    return found


def host_key() -> str:
    """Text that is equal in two processes if they are on the same host."""
    try:
        boot = boot_id()
    except OSError:
        boot = ""
    return f"{net.hostname()} {boot}"


def interface_of(address: str) -> str:
    """The name of the interface with this address; "" if there is none."""
    try:
        return next((i.name for i in net.interfaces() if i.address == address), "")
    except DistError:
        return ""


def size_text(nbytes: float) -> str:
    """A number of bytes with a unit: ``64 MiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _network() -> Iterator[Facts]:
    by_name: dict[str, list[net.Interface]] = {}
    for interface in net.interfaces():
        by_name.setdefault(interface.name, []).append(interface)
    interfaces, lines, common = [], [], []
    for name, addresses in by_name.items():
        speed = _speed(name)
        state = "up" if addresses[0].is_up else "down"
        summary = f"{name} {state}{f', {speed / 1000:g} Gb/s' if speed else ''}"
        lines.append(
            f"{summary}:"
            f" {', '.join(a.address for a in addresses if a.scope != 'link') or 'link-local only'}"
        )
        if not addresses[0].is_loopback:
            common.append(summary)
        interfaces.append(
            {
                "name": name,
                "up": addresses[0].is_up,
                "loopback": addresses[0].is_loopback,
                "speed": speed,
                "addresses": [a.address for a in addresses],
            }
        )
    if len(lines) > _MOST_INTERFACES:
        lines[_MOST_INTERFACES:] = [f"and {len(lines) - _MOST_INTERFACES} more"]
    paths = sorted(Path(SYS, "class/infiniband").glob("*/ports/*"))
    ports = [f"{p.parent.parent.name} port {p.name}: {_read(p / 'state')}" for p in paths]
    yield {"interfaces": interfaces, "infiniband": ports}
    lines += [f"InfiniBand: {', '.join(ports)}"] if ports else []
    common += [f"InfiniBand: {', '.join(ports)}"] if ports else []
    yield {"lines": lines, "same": common, "at": "the address to listen on"}
    try:
        net.check_loopback()
        choice = net.listen_addresses(None)
    except DistError as e:
        yield {"problem": str(e)}
        return
    text = (
        f"data connections of jobs on several hosts: {', '.join(choice.addresses)}: {choice.reason}"
    )
    yield {"listen": choice.addresses, "why": choice.reason, "lines": [*lines, text]}


def _speed(name: str) -> int | None:
    """Megabits per second as reported by the driver; None if unknown."""
    text = _read(Path(SYS, "class/net", name, "speed"))
    return int(text) if text.isdigit() and int(text) > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _memory() -> Iterator[Facts]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(Path(CGROUP, "memory.max"))
    most = min(total, int(limit)) if limit.isdigit() else total
    line = f"{size_text(total)}{f', of which the control group may use {size_text(most)}' if most < total else ''}"
    yield {"total": total, "limit": most, "at": SHM, "lines": [line]}
    try:
        found = os.statvfs(SHM)
        usable = os.access(SHM, os.R_OK | os.W_OK | os.X_OK)
    except OSError as e:
        yield {"shm": None, "shm_problem": e.strerror, "lines": [line, f"{SHM}: {e.strerror}"]}
        return
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    problem = None if usable else "cannot be written by this user"
    text = f"{SHM}: {size_text(size)}{f', {problem}' if problem else ''}"
    yield {"shm": size, "shm_free": free, "shm_problem": problem, "lines": [line, text]}


def _limits() -> Iterator[Facts]:
    limits: Facts = {}
    for name, which in (
        ("files", resource.RLIMIT_NOFILE),
        ("locked", resource.RLIMIT_MEMLOCK),
        ("processes", resource.RLIMIT_NPROC),
    ):
        soft, hard = resource.getrlimit(which)
        limits[name] = {"soft": _or_none(soft), "hard": _or_none(hard)}
    cores, quota = len(os.sched_getaffinity(0)), _quota()
    files, locked, processes = (limits[n] for n in ("files", "locked", "processes"))
    memory = "unlimited" if locked["soft"] is None else size_text(locked["soft"])
    lines = [
        (
            f"open files {_count(files['soft'])} (up to {_count(files['hard'])}), locked memory"
            f" {memory}, processes {_count(processes['soft'])}"
        ),
        f"cores: {cores} of {os.cpu_count()}{f', by quota {quota:g}' if quota else ''}",
    ]
    yield {**limits, "cores": cores, "quota": quota, "lines": lines}


def _or_none(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _count(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)


def _quota() -> float | None:
    """The control group's quota in cores; None if unlimited."""
    fields = _read(Path(CGROUP, "cpu.max")).split()
    if len(fields) != 2 or not fields[0].isdigit():
        return None
    return int(fields[0]) / int(fields[1])


def _clocks() -> Iterator[Facts]:
    source = _read(Path(SYS, "devices/system/clocksource/clocksource0/current_clocksource"))
    # The buffer is larger than struct timex. With modes 0 the call only reads.
    timex = ctypes.create_string_buffer(512)
    status: int | None = None
    if ctypes.CDLL(None, use_errno=True).adjtimex(timex) >= 0:
        status = int.from_bytes(timex.raw[40:44], "little")
    synchronized = None if status is None else not status & _UNSYNCHRONIZED
    texts = {None: "the kernel does not report whether it is synchronised", True: "synchronised"}
    text = texts.get(synchronized, "not synchronised according to the kernel")
    yield {
        "source": source,
        "synchronized": synchronized,
        "now": time.time(),
        "lines": [f"{source or 'unknown clock source'}; {text}"],
    }


def _environment() -> Iterator[Facts]:
    """Launcher, secret and variables."""
    lines: list[str] = []
    facts: Facts = {"launcher": None, "several_hosts": False, "problems": []}
    try:
        launched = launchers.detect()
        if launched is None:
            facts["near_misses"] = launchers.near_misses()
            lines.append(
                "no launcher:"
                f" {'; '.join(facts['near_misses']) or 'no variables of a supported launcher are set'}"
            )
        else:
            facts |= {
                "launcher": launched.name,
                "ranks": launched.world_size,
                "local": launched.local_world_size,
            }
            facts["several_hosts"] = launched.local_world_size not in (None, launched.world_size)
            on_host = (
                ""
                if launched.local_world_size is None
                else f", {launched.local_world_size} on this host"
            )
            lines.append(f"{launched.name}: {launched.world_size} ranks{on_host}")
    except DistError as e:
        facts["problems"].append(str(e))
    try:
        secret = find_secret()
        facts["secret"] = secret.source if secret.key else None
        lines.append(f"secret: {secret.source}")
    except DistError as e:
        facts["problems"].append(str(e))
    facts["problems"] += list(_invalid())
    facts["unknown"] = unknown = environment.unknown()
    facts["variables"] = shown = {
        # The value may be a misspelt secret, so it is not shown.
        name: "(set)" if name in unknown else _shown(name, v)
        for name, v in sorted(os.environ.items())
        if _SHOWN.match(name)
    }
    common = [f"{name}={value}" for name, value in shown.items() if not _by_rank(name)]
    yield {
        **facts,
        "lines": [*lines, *(f"{n}={v}" for n, v in shown.items())],
        "same": [*lines, *common],
    }


def _by_rank(name: str) -> bool:
    """True for variables that differ by rank in a correct job; joining compares the launcher's
    variables."""
    return (
        name in ("RANK", "LOCAL_RANK")
        or name.endswith("_VISIBLE_DEVICES")
        or name.startswith("MASTER_")
    )


def _shown(name: str, value: str) -> str:
    if any(part in name for part in _SECRET) and not name.endswith("_FILE"):
        return "(set)"
    return value if len(value) <= _LONGEST else value[: _LONGEST - 3] + "..."


def _invalid() -> Iterator[str]:
    """Errors of :func:`unicoll.process.environment.check` for each variable."""
    for name, value in os.environ.items():
        try:
            environment.check({name: value})
        except DistArgumentError as e:
            yield str(e)


PROBES: dict[str, Probe] = {
    "network": _network,
    "memory": _memory,
    "limits": _limits,
    "clocks": _clocks,
    "environment": _environment,
}
"""The probes, in the order of the report."""
