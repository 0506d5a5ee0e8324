"""Questions about this host and this process's environment."""

from __future__ import annotations

import ctypes
import difflib
import os
import re
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from .. import auth, launchers, net, settings
from ..errors import DistArgumentError, DistError
from ..launchers import Launched
from .probes import Facts, Probe

__all__ = ["FREE_TEXT", "PROBES", "host_key", "interface_of", "launched_or_none", "size_text"]

SHM = "/dev/shm"
SYS = "/sys"
CGROUP = "/sys/fs/cgroup"

FREE_TEXT = (
    "UNICOLL_CUDA_LIBRARY", "UNICOLL_JOB", "UNICOLL_LAUNCHER", "UNICOLL_NCCL_LIBRARY", "UNICOLL_SECRET",
    "UNICOLL_SECRET_FILE", "UNICOLL_SOCKET_IFNAME", "UNICOLL_STORE",
)  # fmt: skip
"""Our variables beside those of :mod:`unicoll.settings`, whose values those who read them check."""
_TESTS = "UNICOLL_TEST_"
_SECRET = ("SECRET", "TOKEN", "KEY", "PASSWORD")
_SHOWN = re.compile(r"UNICOLL_|NCCL_|GLOO_|CUDA_VISIBLE_DEVICES|MASTER_|(LOCAL_)?RANK$|(LOCAL_)?WORLD_SIZE$")
_LONGEST = 60
_MOST_INTERFACES = 8
_UNSYNCHRONIZED = 0x40


def launched_or_none(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """Who started this process; None for nobody, or where the launcher's variables contradict each other.

    A rank that MPI's launcher started without telling the size counts as launched: MPI itself will be asked.
    """
    try:
        found = launchers.detect(environ)
    except DistArgumentError:
        return None
    if found is None and launchers.mpi_alone_knows(environ):
        return launchers.counted_by_mpi(0, 1, environ)
    return found


def host_key() -> str:
    """Text that two processes have in common if they are on the same host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{net.hostname()} {boot}"


def interface_of(address: str) -> str:
    """The name of the interface that has an address; "" for none."""
    try:
        return next((i.name for i in net.interfaces() if i.address == address), "")
    except DistError:
        return ""


def size_text(nbytes: float) -> str:
    """A number of bytes for people: ``64 MiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _network() -> Iterator[Facts]:
    by_name: dict[str, list[net.Interface]] = {}
    for one in net.interfaces():
        by_name.setdefault(one.name, []).append(one)
    interfaces, lines, same = [], [], []
    for name, addresses in by_name.items():
        speed = _speed(name)
        state = "up" if addresses[0].is_up else "down"
        what = f"{name} {state}{f', {speed / 1000:g} Gb/s' if speed else ''}"
        lines.append(
            f"{what}: {', '.join(a.address for a in addresses if a.scope != 'link') or 'link-local only'}"
        )
        if not addresses[0].is_loopback:
            same.append(what)
        interfaces.append(
            {"name": name, "up": addresses[0].is_up, "loopback": addresses[0].is_loopback, "speed": speed,
             "addresses": [a.address for a in addresses]}
        )  # fmt: skip
    if len(lines) > _MOST_INTERFACES:
        lines[_MOST_INTERFACES:] = [f"and {len(lines) - _MOST_INTERFACES} more"]
    bands = [f"{p.parent.parent.name} port {p.name}: {_read(p / 'state')}" for p in _ports()]
    yield {"interfaces": interfaces, "infiniband": bands}
    lines += [f"InfiniBand: {', '.join(bands)}"] if bands else []
    same += [f"InfiniBand: {', '.join(bands)}"] if bands else []
    yield {"lines": lines, "same": same, "at": "the address to listen on"}
    try:
        choice = net.listen_addresses(None)
    except DistError as e:
        yield {"problem": str(e)}
        return
    text = f"data connections of jobs on several hosts: {', '.join(choice.addresses)}: {choice.reason}"
    yield {"listen": choice.addresses, "why": choice.reason, "lines": [*lines, text]}


def _ports() -> list[Path]:
    return sorted(Path(SYS, "class/infiniband").glob("*/ports/*"))


def _speed(name: str) -> int | None:
    """Megabits per second, as the driver says; None where it does not."""
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
    why = None if usable else "cannot be written by this user"
    text = f"{SHM}: {size_text(size)}{f', {why}' if why else ''}"
    yield {"shm": size, "shm_free": free, "shm_problem": why, "lines": [line, text]}


def _limits() -> Iterator[Facts]:
    limits: Facts = {}
    for name, which in (("files", resource.RLIMIT_NOFILE), ("locked", resource.RLIMIT_MEMLOCK),
                        ("processes", resource.RLIMIT_NPROC)):  # fmt: skip
        soft, hard = resource.getrlimit(which)
        limits[name] = {"soft": _or_none(soft), "hard": _or_none(hard)}
    cores, quota = len(os.sched_getaffinity(0)), _quota()
    files, locked, processes = (limits[n] for n in ("files", "locked", "processes"))
    memory = "unlimited" if locked["soft"] is None else size_text(locked["soft"])
    lines = [
        f"open files {_count(files['soft'])} (up to {_count(files['hard'])}), locked memory {memory}, processes "
        f"{_count(processes['soft'])}",
        f"cores: {cores} of {os.cpu_count()}{f', by quota {quota:g}' if quota else ''}",
    ]
    yield {**limits, "cores": cores, "quota": quota, "lines": lines}


def _or_none(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _count(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)


def _quota() -> float | None:
    """How many cores' time the control group has; None where it is not limited."""
    words = _read(Path(CGROUP, "cpu.max")).split()
    if len(words) != 2 or not words[0].isdigit():
        return None
    return int(words[0]) / int(words[1])


def _clocks() -> Iterator[Facts]:
    source = _read(Path(SYS, "devices/system/clocksource/clocksource0/current_clocksource"))
    timex = ctypes.create_string_buffer(512)  # struct timex, with room; modes 0 changes nothing
    status: int | None = None
    if ctypes.CDLL(None, use_errno=True).adjtimex(timex) >= 0:
        status = int.from_bytes(timex.raw[40:44], "little")
    synchronized = None if status is None else not status & _UNSYNCHRONIZED
    words = {None: "the kernel does not say whether it is synchronised", True: "synchronised"}
    text = words.get(synchronized, "the kernel does not know of any synchronisation")
    yield {"source": source, "synchronized": synchronized, "now": time.time(),
           "lines": [f"{source or 'unknown clock source'}; {text}"]}  # fmt: skip


def _environment() -> Iterator[Facts]:
    """Launcher, secret and variables."""
    lines: list[str] = []
    facts: Facts = {"launcher": None, "several_hosts": False, "problems": []}
    try:
        launched = launchers.detect()
        if launched is None:
            facts["near_misses"] = launchers.near_misses()
            lines.append(
                f"no launcher: {'; '.join(facts['near_misses']) or 'none of the known variables are set'}"
            )
        else:
            facts |= {
                "launcher": launched.name,
                "ranks": launched.world_size,
                "local": launched.local_world_size,
            }
            facts["several_hosts"] = launched.local_world_size not in (None, launched.world_size)
            here = "" if launched.local_world_size is None else f", {launched.local_world_size} on this host"
            lines.append(f"{launched.name}: {launched.world_size} ranks{here}")
    except DistError as e:
        facts["problems"].append(str(e))
    try:
        secret = auth.find_secret()
        facts["secret"] = secret.source if secret.key else None
        lines.append(f"secret: {secret.source}")
    except DistError as e:
        facts["problems"].append(str(e))
    facts["problems"] += list(_refused())
    facts["unknown"] = _unknown()
    facts["variables"] = shown = {
        name: _shown(name, v) for name, v in sorted(os.environ.items()) if _SHOWN.match(name)
    }
    same = [f"{name}={value}" for name, value in shown.items() if not _by_rank(name)]
    yield {**facts, "lines": [*lines, *(f"{n}={v}" for n, v in shown.items())], "same": [*lines, *same]}


def _by_rank(name: str) -> bool:
    """Whether ranks rightly differ in a variable; the launcher's own are compared by what joining makes of them."""
    return name in ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES") or name.startswith("MASTER_")


def _shown(name: str, value: str) -> str:
    if any(word in name for word in _SECRET) and not name.endswith("_FILE"):
        return "(set)"
    return value if len(value) <= _LONGEST else value[: _LONGEST - 3] + "..."


def _refused() -> Iterator[str]:
    """What :func:`unicoll.settings.check` says of each variable."""
    for name, value in os.environ.items():
        if name in (*settings.FLAGS, *settings.CHOICES, *settings.NUMBERS):
            try:
                settings.check({name: value})
            except DistArgumentError as e:
                yield str(e)


def _unknown() -> dict[str, str | None]:
    """Variables that look like ours and are not, each with the name that is nearest."""
    known = [*settings.FLAGS, *settings.CHOICES, *settings.NUMBERS, *FREE_TEXT]
    strange = [
        n for n in os.environ if n.startswith("UNICOLL_") and n not in known and not n.startswith(_TESTS)
    ]
    return {name: next(iter(difflib.get_close_matches(name, known, 1)), None) for name in sorted(strange)}


PROBES: dict[str, Probe] = {
    "network": _network,
    "memory": _memory,
    "limits": _limits,
    "clocks": _clocks,
    "environment": _environment,
}
"""The questions, in the order of the page."""
