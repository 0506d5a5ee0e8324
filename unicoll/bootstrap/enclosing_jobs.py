"""Jobs that enclose this process's: of a launcher that was started within another job, and of a
rank's subprocess.

A process inherits the variables of all launchers above it. Of launchers whose rank or size differ,
the innermost one has started this process: the one whose variables fewer of the process's ancestors
have. The variables with which an ancestor was started are in ``/proc``.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from unicoll.bootstrap.launcher_table import LAUNCHERS, TORCH_STYLE, Environ, LauncherRow
from unicoll.errors import DistArgumentError
from unicoll.process.environment import OF_A_LAUNCHER

if TYPE_CHECKING:
    from unicoll.bootstrap.launchers import LaunchInfo

_ADDRESSES = ("UNICOLL_STORE", "MASTER_ADDR", "MASTER_PORT")
_JOINED = "UNICOLL_JOINED"
"""Set by a process that has joined its launcher's job, for its subprocesses: its id, and which
job."""


def ancestors() -> list[tuple[str, int]]:
    """Names and ids of this process's ancestors, nearest first, as far as /proc has them."""
    found: list[tuple[str, int]] = []
    pid = os.getppid()
    while pid > 0:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        # The line is "pid (name) state ppid ...". The name may contain spaces and parentheses, so
        # the last parenthesis is its end.
        head, _, tail = stat.rpartition(")")
        found.append((head.partition("(")[2], pid))
        pid = int(tail.split()[1])
    return found


def own_environment(environ: Environ = os.environ) -> Environ:
    """The environment without the variables of launchers of enclosing jobs, as far as they
    contradict the innermost.

    Where the ancestors do not tell which launcher is the innermost one, the order of the table
    decides.

    Raises:
        DistArgumentError: that order would take RANK and WORLD_SIZE, and MPI's launcher has started
            more processes.
    """
    rows = _rows(environ)
    values = {
        name: (environ[name].strip(), size and environ[size].strip())
        for name, (_, size) in rows.items()
    }
    # Without a contradiction nothing needs to be ignored, and /proc is not read.
    if len({*values.values()}) < 2:
        return environ
    inherited = [*_initial_environments()]
    ages = {name: _age(row, environ, inherited) for name, (row, _) in rows.items()}
    # Of equal ages min() takes the first row, so that the order of the table decides.
    inner = min(rows, key=lambda name: ages[name])
    # Older variables with the same rank and size are kept: they describe the same processes.
    outer = {name for name in rows if ages[name] > ages[inner] and values[name] != values[inner]}
    # At equal ages the table prefers RANK and WORLD_SIZE, which a shell may have set and each
    # process of mpirun then inherits. If MPI's launcher has started more processes than WORLD_SIZE,
    # several of them would take one rank.
    if inner == TORCH_STYLE.rank:
        _check_size(
            {name: pair for name, pair in rows.items() if ages[name] == ages[inner]}, environ
        )
    # The address and the store of an enclosing job go together with its RANK. With one of them
    # alone this job would meet at the other job's store.
    return {
        name: value
        for name, value in environ.items()
        if name not in outer and not (TORCH_STYLE.rank in outer and OF_A_LAUNCHER.fullmatch(name))
    }


def _rows(environ: Environ) -> dict[str, tuple[LauncherRow, str | None]]:
    """By the name of their rank's variable the rows that have a rank, with their size's variable.

    Without a size only those of MPI, which has it itself.
    """
    found: dict[str, tuple[LauncherRow, str | None]] = {}
    for row in LAUNCHERS:
        if row.rank in environ and row.rank not in found and row.applies(environ):
            size = row.size_variable(environ)
            if size or row.mpi:
                found[row.rank] = row, size
    return found


def _check_size(rows: dict[str, tuple[LauncherRow, str | None]], environ: Environ) -> None:
    _, name = rows[TORCH_STYLE.rank]
    assert name is not None
    size = environ[name].strip()
    for row, other in rows.values():
        if not (row.mpi and other and size.isdigit() and environ[other].strip().isdigit()):
            continue
        if int(environ[other]) > int(size):
            raise DistArgumentError(
                f"{TORCH_STYLE.rank}={environ[TORCH_STYLE.rank]}, {name}={size} contradict"
                f" {row.rank}={environ[row.rank]}, {other}={environ[other]} ({row.name}): unset"
                " those of the launcher that has not started the ranks, or pass rank=, world_size="
                " and init_method="
            )


def _initial_environments() -> Iterator[dict[str, str]]:
    """The environments with which this process and its ancestors were started, as far as they can
    be read."""
    for pid in (os.getpid(), *(pid for _, pid in ancestors())):
        try:
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            # This is another user's process, or it has ended. The list ends here, because an age is
            # a count of consecutive processes.
            return
        pairs = (os.fsdecode(entry).partition("=") for entry in entries)
        yield {name: value for name, _, value in pairs}


def _age(row: LauncherRow, environ: Environ, inherited: list[dict[str, str]]) -> int:
    """How many processes have inherited a launcher's variables; 0 if this process has set them
    itself."""
    names = (row.rank, *row.size, *row.local_rank, *row.local_size, *row.node_rank, *row.job)
    values = {name: environ[name] for name in names if name in environ}
    return sum(1 for _ in takewhile(lambda before: values.items() <= before.items(), inherited))


# --- subprocesses of a rank -----------------------------------------------------------------------


def mark_joined(launched: LaunchInfo, environ: Environ = os.environ) -> None:
    """Tell subprocesses that this process has joined its launcher's job.

    Not if it is the only rank and opens no port: its subprocesses can be jobs like it.
    """
    # Rank and size that come from MPI itself ("mpi") are in no variable, so a subprocess does not
    # inherit them.
    alone = launched.world_size == 1 and not any(map(environ.get, _ADDRESSES))
    if launched.name != "mpi" and not alone:
        os.environ[_JOINED] = f"{os.getpid()} {_identity(launched, environ)}"


def unmark_joined() -> None:
    """This process has left the job."""
    # A forked child keeps the mark of its parent, which is still in the job.
    if os.environ.get(_JOINED, "").startswith(f"{os.getpid()} "):
        del os.environ[_JOINED]


def refuse_subprocess(launched: LaunchInfo | None, environ: Environ) -> None:
    """Raise DistArgumentError if an ancestor of this process has joined the launcher's job of the
    same variables."""
    pid, _, identity = environ.get(_JOINED, "").partition(" ")
    if not identity or launched is None or identity != _identity(launched, environ):
        return
    # The mark alone proves nothing: it may be left over from a process that has ended, or its
    # process may have handed its environment to one that it has not started.
    name = next((name for name, ancestor in ancestors() if str(ancestor) == pid), None)
    if name is not None:
        raise DistArgumentError(
            f"rank {launched.rank} of {launched.world_size} ({launched.source}) has joined already:"
            f" process {pid} ({name}), of which this process, {os.getpid()}, is a subprocess. It"
            " cannot join the same job; for another one pass rank=, world_size= and init_method=,"
            " or start it by a launcher"
        )


def _identity(launched: LaunchInfo, environ: Environ) -> str:
    """Differs between the jobs of an environment and an enclosing one."""
    addresses = [environ.get(name) for name in (*_ADDRESSES, "TORCHELASTIC_RUN_ID")]
    return f"{zlib.crc32(repr((launched.source, launched.job, addresses)).encode()):08x}"
