"""Who started this process: one table of launcher environments, and what each says about rank, size and
address.

The rows are tried in order and sources are never mixed: the first row whose rank *and* size are there gives
all numbers. Under ``srun --mpi=pmix``, for example, ``PMIX_RANK`` comes without a size, so its row is passed
over and the Slurm row, complete in itself, decides. Adding a launcher is adding a row to :data:`LAUNCHERS`.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from unicoll.errors import DistArgumentError
from unicoll.net import parse_port

__all__ = [
    "LAUNCHERS",
    "Launched",
    "Row",
    "counted_by_mpi",
    "detect",
    "expand_nodelist",
    "is_torchelastic_launched",
    "mpi_alone_knows",
    "near_misses",
]

Environ = Mapping[str, str]

PORT_BASE = 20000
"""First of the ports that are derived from a job's id; they end below 32768, where Linux's ephemeral ports
begin."""
PORT_SPAN = 12000


@dataclass(frozen=True)
class Launched:
    """What the launcher's environment says.

    Attributes:
        name: the row's name: ``"unicoll"``, ``"torchrun"``, ``"environment"``, ``"openmpi"``, ``"slurm"``,
            ...
        rank, world_size: of this process, from 0, and how many processes there are.
        local_rank, local_world_size: the same among the processes of this host; None where the launcher is
            silent.
        node_rank: index of this host among the job's hosts; None where the launcher is silent.
        source: the variables that gave the numbers, with their values, as text.
        started_by_mpi: whether MPI is the natural backend for a job started this way.
        master_addr, master_port: where rank 0 can be met; None where nothing says so, and then
            ``master_hint`` tells what to set.
        master_source: where address and port come from, as text.
        port_fixed: whether ``master_port`` was given; if not it was derived from the job's id, and whoever
            hosts may take one of the next few ports when it is occupied.
        job: text that is equal on all ranks of the job and differs between jobs as far as the launcher tells;
            ``""`` where it tells nothing.
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
        """Whether the launcher says that all ranks are on this host."""
        return self.local_world_size == self.world_size


@dataclass(frozen=True)
class Row:
    """One launcher's variables. Where several are listed, the first that is set counts.

    Attributes:
        name: what :attr:`Launched.name` says.
        rank, size: both must be set, or the row does not apply.
        local_rank, local_size, node_rank: optional. A size may be a Slurm-style list by node, ``"2(x3),1"``.
        marker: a variable that must be set too (with any value), where several launchers share the others.
        veto: says why the row does not apply although its variables are set; None when it does.
        job: variables that together are equal on all ranks of a job and differ between jobs.
        agents: names of the launcher's own process on each host (as the kernel cuts them: 15 characters).
            Where no ``job`` variable is set, that ancestor's process id tells the jobs of one host apart.
        nodelist: the job's hosts, in Slurm's bracket notation; rank 0 runs on the first.
        mpi: whether MPI is the natural backend.
        fix: what helps when ``rank`` is set and ``size`` is not.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    marker: str | None = None
    veto: Callable[[Environ], str | None] | None = None
    job: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    nodelist: tuple[str, ...] = ()
    mpi: bool = False
    fix: str = ""


# Slurm numbers the steps of a job from 0; ids from 0xfffffff0 up are its own: batch script, interactive
# shell, extern.
_SLURM_OWN_STEPS = 0xFFFFFFF0


def _not_a_slurm_task(environ: Environ) -> str | None:
    """Slurm sets SLURM_PROCID=0 and SLURM_NTASKS for a batch script too, which is one process, not NTASKS."""
    step = environ.get("SLURM_STEP_ID", "")
    if not step:
        return "SLURM_PROCID is set, but SLURM_STEP_ID is not: not started by srun"
    if not step.isdigit() or int(step) >= _SLURM_OWN_STEPS:
        return f"SLURM_STEP_ID={step} is a batch script's or a shell's step: not started by srun"
    if "MPI_LOCALRANKID" in environ:
        # Hydra starts one proxy a host through srun, and the ranks inherit the proxy's SLURM_PROCID.
        return "SLURM_PROCID belongs to the launcher that set MPI_LOCALRANKID"
    return None


def _slurm_set_it(environ: Environ) -> str | None:
    if environ.get("PMIX_NAMESPACE", "").startswith("slurm."):
        return "PMIX_RANK was set by Slurm"
    return None


_TORCH_STYLE = Row(
    "environment",
    rank="RANK",
    size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_size=("LOCAL_WORLD_SIZE",),
    node_rank=("GROUP_RANK", "NODE_RANK"),
)

LAUNCHERS: tuple[Row, ...] = (
    replace(_TORCH_STYLE, name="unicoll", marker="UNICOLL_LAUNCHER", job=("TORCHELASTIC_RUN_ID",)),
    replace(_TORCH_STYLE, name="torchrun", marker="TORCHELASTIC_RUN_ID", job=("TORCHELASTIC_RUN_ID",)),
    _TORCH_STYLE,
    Row(
        "openmpi",  # its OMPI_COMM_WORLD_NODE_RANK is a rank within the node, not the node's
        rank="OMPI_COMM_WORLD_RANK",
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        agents=("mpirun", "prterun", "prted", "orted"),
        mpi=True,
    ),
    Row(
        "pmix",
        rank="PMIX_RANK",
        size=("PMIX_SIZE",),
        local_rank=("PMIX_LOCAL_RANK",),
        local_size=("PMIX_LOCAL_SIZE",),
        veto=_slurm_set_it,
        job=("PMIX_NAMESPACE",),
        mpi=True,
        fix="PMIx keeps the size in its server, not in the environment: start with mpirun, or set PMIX_SIZE",
    ),
    Row(
        "mvapich2",
        rank="MV2_COMM_WORLD_RANK",
        size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
        job=("PMI_PORT",),
        agents=("mpispawn", "hydra_pmi_proxy"),
        mpi=True,
    ),
    Row(
        "slurm",
        rank="SLURM_PROCID",
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        local_size=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        node_rank=("SLURM_NODEID",),
        veto=_not_a_slurm_task,
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        nodelist=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        mpi=True,
    ),
    Row(
        "mpich",  # MPICH's and Intel MPI's Hydra, Cray MPICH, Microsoft MPI: all of PMI's first version
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        job=("PMI_JOBID", "PALS_APID", "I_MPI_HYDRA_UUID", "PMI_PORT"),
        agents=("hydra_pmi_proxy", "mpiexec.gforker"),
        mpi=True,
    ),
    Row(
        "pals",
        rank="PALS_RANKID",
        size=("PALS_SIZE",),
        local_rank=("PALS_LOCAL_RANKID",),
        local_size=("PALS_LOCAL_SIZE",),
        node_rank=("PALS_NODEID",),
        job=("PALS_APID",),
        mpi=True,
        fix="PALS gives the size as PMI_SIZE beside PMI_RANK, or not at all: set PALS_SIZE",
    ),
)


def detect(environ: Environ = os.environ) -> Launched | None:
    """What the launcher said, from the first row of :data:`LAUNCHERS` that is complete; None when none is.

    A plain process inside a Slurm allocation (a batch script, a shell) is not a launched one.

    Raises:
        DistArgumentError: a variable of that row is no number, is negative, or contradicts another one.
    """
    for row in LAUNCHERS:
        if row.marker is not None and row.marker not in environ:
            continue
        size = _first_set(row.size, environ)
        if _first_set((row.rank,), environ) and size and (row.veto is None or row.veto(environ) is None):
            return _read(row, size, environ)
    return None


def counted_by_mpi(rank: int, world_size: int, environ: Environ = os.environ) -> Launched:
    """What MPI itself says, where no launcher that the table knows has said it."""
    address = environ.get("MASTER_ADDR", "").strip().strip("[]") or None
    text = environ.get("MASTER_PORT", "").strip()
    return Launched(
        name="mpi",
        rank=rank,
        world_size=world_size,
        local_rank=None,
        local_world_size=None,
        node_rank=None,
        source="MPI_COMM_WORLD",
        started_by_mpi=True,
        master_addr=address,
        master_port=parse_port(text, f"MASTER_PORT={text}") if text else None,
        master_source="MASTER_ADDR, MASTER_PORT" if address else "",
        master_hint="set MASTER_ADDR and MASTER_PORT on every rank",
        port_fixed=bool(text),
        job="",
    )


def mpi_alone_knows(environ: Environ = os.environ) -> bool:
    """Whether an MPI launcher has given this process a rank, but its environment does not tell the size."""
    return any(
        row.mpi
        and _first_set((row.rank,), environ) is not None
        and _first_set(row.size, environ) is None
        and (row.veto is None or row.veto(environ) is None)
        for row in LAUNCHERS
    )


def near_misses(environ: Environ = os.environ) -> list[str]:
    """Why rows of the table that are partly there do not count, one sentence each; for error messages."""
    reasons: list[str] = []
    for row in LAUNCHERS:
        if row.marker is not None:
            continue
        rank, size = _first_set((row.rank,), environ), _first_set(row.size, environ)
        if rank and row.veto is not None and (reason := row.veto(environ)) is not None:
            reasons.append(reason)
        elif rank and not size:
            text = f"{rank} is set but {' or '.join(row.size)} is not"
            reasons.append(f"{text} ({row.fix})" if row.fix else text)
        elif size and not rank and row.veto is None:
            reasons.append(f"{size} is set but {row.rank} is not")
    return reasons


def is_torchelastic_launched(environ: Environ = os.environ) -> bool:
    """Whether torchrun started this process: ``TORCHELASTIC_RUN_ID`` is set (torch.distributed's rule)."""
    return environ.get("TORCHELASTIC_RUN_ID") is not None


def _read(row: Row, size_name: str, environ: Environ) -> Launched:
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
    job = _job(row, environ, single_host=local_size == world_size)
    master = _master(row, environ, job, single_host=local_size == world_size)
    return Launched(
        name=row.name,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=node_rank,
        source=", ".join(f"{name}={value}" for name, value in used.items()),
        started_by_mpi=row.mpi,
        master_addr=master.address,
        master_port=master.port,
        master_source=master.source,
        master_hint=_hint(row, master, single_host=local_size == world_size),
        port_fixed=bool(environ.get("MASTER_PORT", "").strip()),
        job=job,
    )


class _Master(NamedTuple):
    address: str | None
    port: int | None
    source: str


def _master(row: Row, environ: Environ, job: str, *, single_host: bool) -> _Master:
    """Where rank 0 can be met: MASTER_ADDR and MASTER_PORT, else what follows from the hosts and the job's
    id."""
    sources: list[str] = []
    nodelist = _first_set(row.nodelist, environ)
    address: str | None = environ.get("MASTER_ADDR", "").strip().strip("[]")
    if address:
        sources.append("MASTER_ADDR")
    elif single_host and row is not _TORCH_STYLE:
        address = "127.0.0.1"
        sources.append("all ranks are on one host")
    elif nodelist is not None:
        address = expand_nodelist(environ[nodelist], limit=1)[0]
        sources.append(f"first host of {nodelist}={environ[nodelist]}")
    port: int | None = None
    if text := environ.get("MASTER_PORT", "").strip():
        port = parse_port(text, f"MASTER_PORT={text}")
        sources.append("MASTER_PORT")
    elif job:
        port = PORT_BASE + zlib.crc32(job.encode()) % PORT_SPAN
        sources.append(f"port from {job}")
    return _Master(address or None, port, ", ".join(sources))


def _hint(row: Row, master: _Master, *, single_host: bool) -> str:
    missing = []
    if master.address is None:
        missing.append("MASTER_ADDR (the address of rank 0's host)")
    if master.port is None:
        missing.append("MASTER_PORT (a free port there)")
    if not missing:
        return ""
    wanted = f"set {' and '.join(missing)} on every rank"
    if row is _TORCH_STYLE:
        return wanted
    why = "does not tell the jobs of a host apart" if single_host else "does not say where rank 0 is"
    return f"{row.name} {why}: {wanted}, or pass init_method='tcp://host:port' or 'file:///path'"


def _job(row: Row, environ: Environ, *, single_host: bool) -> str:
    parts = [f"{name}={environ[name]}" for name in row.job if environ.get(name)]
    if not parts and single_host:
        parts = [f"{name}={pid}" for name, pid in _ancestors() if name in row.agents][:1]
    return ", ".join(parts)


def _ancestors() -> list[tuple[str, int]]:
    """Name and id of this process's ancestors, nearest first; as far as /proc shows them."""
    found: list[tuple[str, int]] = []
    pid = os.getppid()
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        # "pid (name) state ppid ...": the name may itself hold spaces and parentheses.
        head, _, tail = stat.rpartition(")")
        found.append((head.partition("(")[2], pid))
        pid = int(tail.split()[1])
    return found


def _first_set(names: tuple[str, ...], environ: Environ) -> str | None:
    return next((name for name in names if environ.get(name, "").strip()), None)


def _number(name: str, environ: Environ) -> int:
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit()):
        raise DistArgumentError(f"{name}={environ[name]}: must be a whole number, 0 or more")
    return int(text)


def _optional(names: tuple[str, ...], environ: Environ, used: dict[str, str]) -> int | None:
    name = _first_set(names, environ)
    if name is None:
        return None
    used[name] = environ[name]
    return _number(name, environ)


def _below(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if rank >= size:
        raise DistArgumentError(f"{rank_name}={rank} must be less than {size_name}={size}")


def _local_size(row: Row, node_rank: int | None, environ: Environ, used: dict[str, str]) -> int | None:
    name = _first_set(row.local_size, environ)
    if name is None:
        return None
    text = environ[name].strip()
    if not text.isdigit():
        counts = _expand_counts(name, text)
        if node_rank is None or node_rank >= len(counts):
            return None
        used[name] = text
        return counts[node_rank]
    used[name] = text
    return int(text)


def _expand_counts(name: str, text: str) -> list[int]:
    """``"2(x3),1"`` as ``[2, 2, 2, 1]``: Slurm's tasks by node."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise DistArgumentError(f"{name}={text}: cannot be read as tasks by node, such as 2(x3),1")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def expand_nodelist(text: str, limit: int | None = None) -> list[str]:
    """The host names that a Slurm node list stands for, in order; the first ``limit`` of them when that is
    given.

    ``"n[1-3,08-10],gpu-a[0-1]b[2,4]"``: commas outside brackets separate patterns, a bracket holds numbers
    and ranges (zero-padded to the width of their start), and a pattern may hold several brackets.

    Raises:
        DistArgumentError: the brackets do not match, a range is no range of numbers, or there is no name.
    """
    hosts: list[str] = []
    for pattern in _split_outside_brackets(text):
        _expand_pattern(pattern, text, hosts, limit)
        if limit is not None and len(hosts) >= limit:
            return hosts[:limit]
    if not hosts:
        raise DistArgumentError(f"the node list {text!r} names no host")
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    if re.search(r"\[[^\]]*\[|\][^\[]*\]|^[^\[]*\]|\[[^\]]*$", text):
        raise DistArgumentError(f"the node list {text!r} has brackets that do not match")
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


def _expand_pattern(pattern: str, text: str, hosts: list[str], limit: int | None) -> None:
    """Append the names of one pattern; the rightmost bracket counts fastest."""
    head, bracket, rest = pattern.partition("[")
    if not bracket:
        hosts.append(pattern)
        return
    inside, _, tail = rest.partition("]")
    suffixes: list[str] = []
    _expand_pattern(tail, text, suffixes, limit)
    for item in inside.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", item)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise DistArgumentError(
                f"the node list {text!r} has {item!r} where a number or a range should be"
            )
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            hosts.extend(f"{head}{number:0{len(match[1])}d}{suffix}" for suffix in suffixes)
            if limit is not None and len(hosts) >= limit:
                return
