"""The MPI library of this environment, and the processes that its ``mpirun`` starts.

The library is that of the environment that runs the tests (its ``mpirun`` is next to its ``python``).

Settings of the tests: Open MPI may run as root and start more ranks than cores; its "ofi" transport, which needs a
second to detect that there is no fabric, is disabled, as are all transports of Intel MPI's fabrics but TCP. Neither
binds ranks to cores.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tests.support.ranks import environment
from unicoll.run.mpirun import mpirun_path

GRACE_S = 8.0
_SHARED_MEMORY = "/dev/shm/"


# --- the library ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Library:
    """An MPI library's launcher.

    Attributes:
        name: "openmpi", "mpich" or "intelmpi".
        title: its name in texts.
        turn: its number.
        mpirun: its path.
        variables: environment variables to start several ranks, see above.
        between_hosts: variables with which the ranks of one host use the transport for other hosts.
        rank, local_rank, local_size: the variables that have these numbers of a process.
        recover: options with which a rank's death leaves the other ranks running; Hydra's (``-disable-auto-cleanup``)
            is not reliable, so the tests stop Hydra's proxy before they kill a rank.
    """

    name: str
    title: str
    turn: int
    mpirun: str
    variables: dict[str, str]
    between_hosts: dict[str, str]
    rank: str
    local_rank: str
    local_size: str
    recover: tuple[str, ...] = ()


_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # these three are Open MPI 4's
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_plm_rsh_agent": "sh",  # it fails without an ssh, though on one host it uses none
    "OMPI_MCA_btl": "^ofi",
}
_INTEL_MPI = {"FI_PROVIDER": "tcp", "I_MPI_PIN": "0"}


@lru_cache(maxsize=1)
def _find() -> tuple[Library | None, str]:
    """The environment's MPI library, or None and why there is none."""
    if importlib.util.find_spec("mpi4py") is None:
        return None, "mpi4py is not installed in this environment"
    adjacent = Path(sys.executable).with_name("mpirun")
    path = str(adjacent) if adjacent.exists() else shutil.which("mpirun")
    if path is None:
        return None, "there is no mpirun in this environment"
    version = subprocess.run(
        [path, "--version"],
        env=os.environ | mpirun_path(path),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    ).stdout
    hydra = ("PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if "Open MPI" in version:
        found = Library(
            "openmpi",
            "Open MPI",
            0,
            path,
            _OPEN_MPI,
            {"OMPI_MCA_btl": "tcp,self"},
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
            ("--enable-recovery",) if "(Open MPI) 4" in version else ("--runtime-options", "recoverable"),
        )
    elif "HYDRA" in version:
        found = Library("mpich", "MPICH", 1, path, {}, {"MPIR_CVAR_NOLOCAL": "1"}, *hydra)
    elif "Intel" in version:
        variables = _INTEL_MPI | mpirun_path(path)
        # mpirun is a shell script that passes no signals on
        path = str(Path(path).with_name("mpiexec.hydra"))
        found = Library("intelmpi", "Intel MPI", 2, path, variables, {"I_MPI_FABRICS": "ofi"}, *hydra)
    else:
        return None, f"{path} is not Open MPI's, MPICH's or Intel MPI's: {version[:80]!r}"
    return found, ""


def unavailable_reason() -> str:
    """Why this environment has no MPI library; "" if it has one."""
    return _find()[1]


def library() -> Library:
    """The environment's MPI library, which must exist."""
    found, reason = _find()
    assert found is not None, reason
    return found


def command(size: int, options: Sequence[str], program: Sequence[str]) -> list[str]:
    """The command line of mpirun with a program; mpirun is killed when this process ends."""
    die_with_parent = (
        "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [
        sys.executable,
        "-S",
        "-c",
        die_with_parent,
        library().mpirun,
        *options,
        "-n",
        str(size),
        *program,
    ]


def across(addresses: Sequence[str], interface: str, agent: str) -> tuple[list[str], dict[str, str]]:
    """mpirun's options, and variables, that start ranks on several hosts in turn.

    Args:
        addresses: of the hosts; mpirun runs on the first.
        interface: the name of their interfaces with these addresses.
        agent: a program that runs a command on a host as ssh does.
    """
    if library().name == "openmpi":
        hosts = ",".join(f"{address}:16" for address in addresses)
        variables = {
            "PRTE_MCA_plm_ssh_agent": agent,
            "PRTE_MCA_prte_if_include": interface,
            "OMPI_MCA_btl": "tcp,self",
            "OMPI_MCA_btl_tcp_if_include": interface,
        }
        return ["--host", hosts, "--map-by", "node"], variables
    kind = "launcher" if library().name == "mpich" else "bootstrap"
    options = [f"-{kind}", "rsh", f"-{kind}-exec", agent, "-iface", interface]
    variables = {"UCX_NET_DEVICES": interface, "UCX_TLS": "tcp,self", "FI_TCP_IFACE": interface}
    return [*options, "-hosts", ",".join(addresses), "-ppn", "1"], variables


def variables_for(folder: str, extra: dict[str, str] | None) -> dict[str, str]:
    """Environment of mpirun: Open MPI keeps the sockets of a job in TMPDIR."""
    found = environment(library().variables | {"TMPDIR": folder} | (extra or {}))
    found.pop("PYTHONUNBUFFERED", None)  # it cuts the lines of processes that share a terminal into pieces
    return found


# --- what mpirun starts ---------------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants."""
    found = []
    for task in _tasks(pid):
        try:
            children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            found += [child, *descendants(child)]
    return found


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def lives(pid: int) -> bool:
    """True if a process runs; a zombie does not."""
    words = _stat(pid)
    return bool(words) and words[0] not in "ZX"


def started_at(pid: int) -> str:
    """Start time of a process: with its id, it identifies the process."""
    words = _stat(pid)
    return words[19] if words else ""


def segments(pids: Sequence[int]) -> set[str]:
    """Files of shared memory that processes have mapped."""
    found = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {line[line.index(_SHARED_MEMORY) :] for line in lines if _SHARED_MEMORY in line}
    return {path for path in found if not path.endswith(" (deleted)")}


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process, if it exists."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


class Tree:
    """mpirun and all its descendants, ended together."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._seen: dict[int, str] = {}
        self._segments: set[str] = set()

    def stop_proxy(self) -> None:
        """Stop Hydra's proxy, so that it cannot end the other ranks when one dies."""
        for pid in descendants(self.process.pid):
            if _is_proxy(pid):
                kill(pid, signal.SIGSTOP)

    def record(self) -> None:
        """Record the descendants, since children of a rank that dies are reparented, and the shared memory in use,
        which Hydra does not remove if a rank is killed."""
        found = descendants(self.process.pid)
        self._seen |= {pid: started_at(pid) for pid in found}
        self._segments |= segments(found)

    def close(self) -> None:
        """End all processes that still run, the ranks first, so that mpirun can clean up; idempotent."""
        self.record()
        for pid in self._left():
            kill(pid, signal.SIGCONT if _is_proxy(pid) else signal.SIGKILL)
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in self._left():
            kill(pid)
        for path in self._segments:
            Path(path).unlink(missing_ok=True)

    def _left(self) -> list[int]:
        return [pid for pid, start in self._seen.items() if lives(pid) and started_at(pid) == start]


def _is_proxy(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("hydra")
    except OSError:
        return False
