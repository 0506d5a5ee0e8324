"""The table of contenders (unicoll's backends, and what they are compared with), and how they are
opened."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import unicoll as dist
from unicoll.bench.contract import BenchJob, Contender, agree, agreed
from unicoll.bench.distributed import Symmetric, Torch, TorchOnUnicoll, Unicoll
from unicoll.bench.floor import Floor
from unicoll.bench.mpi import Mpi4py
from unicoll.bench.nccl import BareNccl
from unicoll.bootstrap import launchers

if TYPE_CHECKING:
    from unicoll.bench.args import BenchOptions


@dataclass(frozen=True)
class ContenderRow:
    """One contender: its class, its flag on the command line, and True if mpirun must start the
    ranks."""

    make: Callable[[str], Contender]
    flag: str
    mpi: bool = False


TABLE: dict[str, ContenderRow] = {
    "gloo": ContenderRow(Unicoll, "--backend"),
    "gloo-symmetric": ContenderRow(Symmetric, "--backend"),
    "mpi": ContenderRow(Unicoll, "--backend", mpi=True),
    "mpi-symmetric": ContenderRow(Symmetric, "--backend", mpi=True),
    "nccl": ContenderRow(Unicoll, "--backend"),
    "xccl": ContenderRow(Unicoll, "--backend"),
    "torch-unicoll-gloo": ContenderRow(TorchOnUnicoll, "--backend"),
    "torch-unicoll-mpi": ContenderRow(TorchOnUnicoll, "--backend", mpi=True),
    "torch-unicoll-nccl": ContenderRow(TorchOnUnicoll, "--backend"),
    "torch-gloo": ContenderRow(Torch, "--peer"),
    "torch-nccl": ContenderRow(Torch, "--peer"),
    "torch-xccl": ContenderRow(Torch, "--peer"),
    "bare-nccl": ContenderRow(BareNccl, "--peer"),
    "mpi4py": ContenderRow(Mpi4py, "--peer", mpi=True),
    "floor": ContenderRow(Floor, "--peer"),
}
"""The contenders by name. Backends of third parties, which are not in it, use the class
``Unicoll``."""


def label(name: str) -> str:
    """A contender's name in tables and plots: ``unicoll`` for the CPU backend, ``unicoll (mpi)``
    for another one."""
    if name in TABLE and TABLE[name].make not in (Unicoll, Symmetric):
        return name
    backend = name.removeprefix("gloo").removeprefix("-")
    return f"unicoll ({backend})" if backend else "unicoll"


def open_contenders(options: BenchOptions) -> tuple[list[Contender], dict[str, str]]:
    """Open contenders on all ranks; returns them, and for the others the reason why they cannot be
    measured."""
    rank, size = dist.get_rank(), dist.get_world_size()
    launched = launchers.detect()
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, socket.gethostname())
    local = launched.local_rank if launched is not None else None
    if local is None:
        local = hosts[:rank].count(hosts[rank])
    job = BenchJob(rank, size, local, tuple(hosts), options.timeout, options.compression)
    opened: list[Contender] = []
    skipped: dict[str, str] = {}
    for name in options.contenders:
        contender = TABLE[name].make(name) if name in TABLE else Unicoll(name)
        problem = agree(contender.reason())
        if problem is None:
            _, problem = agreed(partial(contender.open, job), (Exception,))
        if problem is None:
            opened.append(contender)
        else:
            skipped[name] = problem
    return opened, skipped
