"""The launcher of this process: rank, size and address from the environment.

The rows of :data:`LAUNCHERS` are tried in order and never combined: the first row whose rank *and*
size are set gives all values. Under ``srun --mpi=pmix``, for example, ``PMIX_RANK`` is set without
a size, so its row is skipped, and the complete Slurm row is used. Variables of an enclosing job do
not count (:mod:`unicoll.bootstrap.enclosing_jobs`).
"""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass, replace

from unicoll.bootstrap.enclosing_jobs import ancestors, own_environment
from unicoll.bootstrap.launcher_table import LAUNCHERS, TORCH_STYLE, Environ, LauncherRow, first_set
from unicoll.errors import DistArgumentError
from unicoll.net.wire.interfaces import parse_port

PORT_BASE = 20000
"""First port derived from a job's id; the last one is below 32768, where Linux's ephemeral ports
begin."""
PORT_SPAN = 12000


@dataclass(frozen=True)
class LaunchInfo:
    """The information of the launcher's environment.

    Attributes:
        name: the row's name: ``"unicoll"``, ``"torchrun"``, ``"environment"``, ``"openmpi"``,
            ``"slurm"``...
        local_rank, local_world_size: the same among the processes of this host; None if unknown.
        node_rank: index of this host among the job's hosts; None if unknown.
        source: the variables of these numbers, with their values, as text.
        started_by_mpi: True if MPI is the default backend of host arrays for this launcher.
        master_addr, master_port: rank 0's address; None if unknown, and then ``master_hint`` says
            what to set.
        master_source: where address and port come from, as text.
        port_fixed: True if ``master_port`` was specified; else it is derived from the job's id, and
            rank 0 may use one of the next few ports if it is occupied.
        job: text that is equal on all ranks of the job and, as far as the launcher allows,
            different between jobs; ``""`` if unknown.
    """

    name: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    source: str
    started_by_mpi: bool
    master_addr: str | None
    master_port: int | None
    master_source: str
    master_hint: str
    port_fixed: bool
    job: str

    @property
    def single_host(self) -> bool:
        """True if all ranks are on this host according to the launcher."""
        return self.local_world_size == self.world_size


def detect(environ: Environ = os.environ) -> LaunchInfo | None:
    """The information of the first complete row of :data:`LAUNCHERS`; None if none is complete.

    A process of a Slurm allocation that srun has not started (a batch script, a shell) has no
    launcher.

    Raises:
        DistArgumentError: a variable of that row is not a number, is negative, or contradicts
            another one, or those of another launcher.
    """
    return first_complete(own_environment(environ))


def first_complete(environ: Environ) -> LaunchInfo | None:
    """:func:`detect` in an environment without variables of enclosing jobs."""
    for row in LAUNCHERS:
        if row.applies(environ) and (size := row.size_variable(environ)):
            return _read(row, size, environ)
    return None


def from_mpi_world(rank: int, world_size: int) -> LaunchInfo:
    """The information of MPI itself, if no launcher of the table applies."""
    row = LauncherRow("mpi", "rank", ("size",), mpi=True)
    found = _read(row, "size", {**os.environ, "rank": str(rank), "size": str(world_size)})
    return replace(found, source="MPI_COMM_WORLD")


def master_of(environ: Environ, row: LauncherRow = TORCH_STYLE) -> tuple[str | None, int | None]:
    """A row's address of rank 0, without brackets, and its port, each None if not set.

    Raises:
        DistArgumentError: the port is no number from 0 to 65535.
    """
    address, port = first_set(row.address, environ), first_set(row.port, environ)
    return (
        environ[address].strip().strip("[]") or None if address else None,
        parse_port(environ[port].strip(), f"{port}={environ[port].strip()}") if port else None,
    )


def has_rank_without_size(environ: Environ) -> bool:
    """True if an MPI launcher has set a rank, but no size, in an environment without variables of
    enclosing jobs."""
    return any(
        row.mpi and row.applies(environ) and row.size_variable(environ) is None for row in LAUNCHERS
    )


def near_misses(environ: Environ = os.environ) -> list[str]:
    """Why rows with some of their variables set do not apply, one sentence each; for error
    messages."""
    reasons: list[str] = []
    for row in LAUNCHERS:
        if row.marker is not None:
            continue
        rank, size = first_set((row.rank,), environ), first_set(row.size, environ)
        if rank and row.exclude is not None and (reason := row.exclude(environ)) is not None:
            reasons.append(reason)
        elif rank and not size:
            text = f"{rank} is set but {' or '.join(row.size)} is not"
            reasons.append(f"{text} ({row.hint})" if row.hint else text)
        elif size and not rank and row.exclude is None:
            reasons.append(f"{size} is set but {row.rank} is not")
    return reasons


def is_torchelastic_launched(environ: Environ = os.environ) -> bool:
    """True if torchrun started this process: ``TORCHELASTIC_RUN_ID`` is set (torch.distributed's
    rule)."""
    return environ.get("TORCHELASTIC_RUN_ID") is not None


def _read(row: LauncherRow, size_name: str, environ: Environ) -> LaunchInfo:
    used = {row.rank: environ[row.rank], size_name: environ[size_name]}
    rank = _number(row.rank, environ)
    world_size = _number(size_name, environ)
    _below(row.rank, rank, size_name, world_size)
    node_rank = _optional(row.node_rank, environ, used)
    local_rank = _optional(row.local_rank, environ, used)
    local_size = _local_size(row, node_rank, environ, used)
    if local_rank is not None and local_size is not None:
        local_names = [name for name in (*row.local_rank, *row.local_size) if name in used]
        _below(local_names[0], local_rank, local_names[-1], local_size)
    if row.one_per_host:
        local_rank, local_size = 0, 1
    single_host = local_size == world_size
    job = _job(row, environ, single_host=single_host)
    address, port, source = _master(row, environ, job, single_host=single_host)
    return LaunchInfo(
        name=row.name,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=node_rank,
        source=", ".join(f"{name}={value}" for name, value in used.items()),
        started_by_mpi=row.mpi,
        master_addr=address,
        master_port=port,
        master_source=source,
        master_hint=address_hint(row, address, port, single_host=single_host),
        port_fixed=first_set(row.port, environ) is not None,
        job=job,
    )


def _master(
    row: LauncherRow, environ: Environ, job: str, *, single_host: bool
) -> tuple[str | None, int | None, str]:
    """Rank 0's address and port, and where they come from: variables, else derived from the hosts
    and the job's id."""
    sources: list[str] = []
    reordered = row.reorders is not None and row.reorders(environ)
    nodelist = first_set(row.nodelist, environ) if not reordered else None
    address, port = master_of(environ, row)
    if address is not None:
        sources.append(str(first_set(row.address, environ)))
    elif single_host and row is not TORCH_STYLE:
        address = "127.0.0.1"
        sources.append("all ranks are on one host")
    elif nodelist is not None:
        address = first_host(environ[nodelist])
        sources.append(f"first host of {nodelist}={environ[nodelist]}")
    if port is not None:
        sources.append(str(first_set(row.port, environ)))
    elif job:
        port = PORT_BASE + zlib.crc32(job.encode()) % PORT_SPAN
        sources.append(f"port from {job}")
    return address, port, ", ".join(sources)


def address_hint(
    row: LauncherRow, address: str | None, port: int | None, *, single_host: bool = False
) -> str:
    """What to set for the rendezvous if a launcher's variables lack the address or the port of rank
    0; else ``""``."""
    missing = []
    if address is None:
        missing.append("MASTER_ADDR (the address of rank 0's host)")
    if port is None:
        missing.append("MASTER_PORT (a free port there)")
    if not missing:
        return ""
    wanted = (
        f"set {' and '.join(missing)} on every rank, or pass init_method='tcp://host:port' or"
        " 'file:///path'"
    )
    if row is TORCH_STYLE:
        return wanted
    reason = (
        "sets no variable that differs between two jobs on one host"
        if single_host
        else "does not set the address of rank 0"
    )
    return f"{row.name} {reason}: {wanted}"


def _job(row: LauncherRow, environ: Environ, *, single_host: bool) -> str:
    # PMI_PORT is that of this host's daemon
    names = [name for name in row.job if single_host or name != "PMI_PORT"]
    parts = [f"{name}={environ[name]}" for name in names if environ.get(name)]
    if not parts and single_host:
        parts = [f"{name}={pid}" for name, pid in ancestors() if name in row.agents and pid > 1][:1]
    return ", ".join(parts)


def _number(name: str, environ: Environ) -> int:
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit()):
        raise DistArgumentError(f"{name}={environ[name]}: must be a whole number, 0 or more")
    return int(text)


def _optional(names: tuple[str, ...], environ: Environ, used: dict[str, str]) -> int | None:
    name = first_set(names, environ)
    if name is None:
        return None
    used[name] = environ[name]
    return _number(name, environ)


def _below(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if rank >= size:
        raise DistArgumentError(f"{rank_name}={rank} must be less than {size_name}={size}")


def _local_size(
    row: LauncherRow, node_rank: int | None, environ: Environ, used: dict[str, str]
) -> int | None:
    name = first_set(row.local_size, environ)
    if name is None:
        return None
    text = environ[name].strip()
    if text.isdigit():
        size = _number(name, environ)
    else:
        counts = tasks_by_node(name, text)
        if node_rank is None or node_rank >= len(counts):
            return None
        size = counts[node_rank]
    used[name] = text
    return size


def first_host(text: str) -> str:
    """The first host of a list in Slurm's notation, such as ``"n[08-11,20],gpu-a[0-1]b[2,4]"``.

    Commas outside brackets separate patterns. A bracket holds numbers and ranges, and a pattern any
    number of brackets.

    Raises:
        DistArgumentError: the text is not such a list.
    """

    def first_number(bracket: re.Match[str]) -> str:
        item = bracket[1].partition(",")[0]
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", item)
        if found is None or (found[2] is not None and int(found[2]) < int(found[1])):
            raise DistArgumentError(
                f"the node list {text!r} has {item!r} where a number or a range should be"
            )
        return found[1]

    if re.search(r"\[[^\]]*\[|\][^\[]*\]|^[^\[]*\]|\[[^\]]*$", text):
        raise DistArgumentError(f"the node list {text!r} has brackets that do not match")
    patterns = [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]
    if not patterns:
        raise DistArgumentError(f"the node list {text!r} names no host")
    return re.sub(r"\[([^\]]*)\]", first_number, patterns[0])


def tasks_by_node(name: str, text: str) -> list[int]:
    """Slurm's ``"2(x3),1"`` as ``[2, 2, 2, 1]``; ``name`` is the variable, for errors."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise DistArgumentError(
                f"{name}={text} is neither a number nor a list of tasks by node, such as 2(x3),1"
            )
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts
