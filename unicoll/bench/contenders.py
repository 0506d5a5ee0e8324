"""THE TABLE of what can be measured: unicoll's backends, and the peers they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .contract import Contender
from .distributed import Torch, TorchOnUnicoll, Unicoll
from .mpi import Mpi4py
from .nccl import BareNccl

__all__ = ["TABLE", "Row", "contender"]


@dataclass(frozen=True)
class Row:
    """A contender that the command line knows.

    Attributes:
        make: the class.
        flag: under which flag it is asked for.
        mpi: whether the ranks must be started by mpirun.
    """

    make: Callable[[str], Contender]
    flag: str
    mpi: bool = False


TABLE: dict[str, Row] = {
    "gloo": Row(Unicoll, "--backend"),
    "mpi": Row(Unicoll, "--backend", mpi=True),
    "nccl": Row(Unicoll, "--backend"),
    "torch-unicoll-gloo": Row(TorchOnUnicoll, "--backend"),
    "torch-unicoll-mpi": Row(TorchOnUnicoll, "--backend", mpi=True),
    "torch-unicoll-nccl": Row(TorchOnUnicoll, "--backend"),
    "torch-gloo": Row(Torch, "--peer"),
    "torch-nccl": Row(Torch, "--peer"),
    "bare-nccl": Row(BareNccl, "--peer"),
    "mpi4py": Row(Mpi4py, "--peer", mpi=True),
}
"""The contenders. Backends that are not in it (third parties') are measured as our own."""


def contender(name: str) -> Contender:
    """A contender by name, not open yet."""
    row = TABLE.get(name)
    return row.make(name) if row is not None else Unicoll(name)
