"""Bare mpi4py, as those who know it would write it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from .. import launchers, registry
from ..types import DType
from .arrays import Family, StorageFamily, Unsupported
from .contract import Call, Case, Contender, World, there_and_back
from .operations import IN, OUT, Operation

__all__ = ["Mpi4py", "library"]


class Mpi4py(Contender):
    """Bare mpi4py: upper-case methods of COMM_WORLD on preallocated NumPy arrays, types given."""

    _comm: Any = None
    _mpi: Any = None

    def reason(self) -> str | None:
        launched = launchers.detect()
        reason = registry.load("mpi").availability()
        if reason is None and (launched is None or not launched.started_by_mpi):
            return "the ranks were not started by mpirun, so MPI would see each one alone"
        return reason

    def open(self, world: World) -> None:
        self._mpi = mpi = import_module("mpi4py.MPI")
        self._comm = mpi.COMM_WORLD
        self.refusals = (Unsupported, mpi.Exception, NotImplementedError)
        if (self._comm.rank, self._comm.size) != (world.rank, world.size):
            raise Unsupported(
                f"COMM_WORLD says rank {self._comm.rank} of {self._comm.size}, the job {world.rank} of {world.size}"
            )

    def describe(self) -> str:
        return f"mpi4py {import_module('mpi4py').__version__}, {library(self._mpi)}"

    def family(self, wanted: str | None, dtype: DType) -> Family:
        return StorageFamily()

    def halves(self, op: Operation) -> tuple[str, ...]:
        if op.name in ("all_reduce", "reduce"):
            return (IN, OUT)
        # MPI's reduce_scatter in place leaves the result where nccl-tests' does not look for it.
        return (OUT,) if op.name == "reduce_scatter" else op.halves

    def _reduction(self, case: Case) -> Any:
        if not case.dtype.native or case.dtype.half:
            raise Unsupported(f"MPI does not reduce {case.dtype.name}")
        found = {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX"}.get(case.redop)
        if found is None:
            raise Unsupported(f"MPI has no reduction {case.redop}")
        return getattr(self._mpi, found)

    def _typed(self, case: Case, array: Any) -> tuple[Any, Any]:
        """An array with its MPI type; elements that MPI has no type for travel as their bits."""
        dtype = case.dtype
        if dtype.half:
            array = array.view(f"u{dtype.itemsize}")
        return (array, self._mpi.Datatype.fromcode(array.dtype.char))

    def _prepared(self, case: Case, send: Any, recv: Any, prefix: str) -> Call:
        mpi, op = self._mpi, case.op
        names = {"all_reduce": "allreduce", "broadcast": "bcast", "all_gather": "allgather"}
        names |= {"reduce_scatter": "reduce_scatter_block", "all_to_all": "alltoall"}
        bare = names.get(op.name, op.name)
        method = getattr(self._comm, prefix + bare if prefix else bare.capitalize())
        if op.name == "barrier":
            return partial(method)
        given, taken, here = self._typed(case, send), self._typed(case, recv), mpi.IN_PLACE
        in_place = case.half == IN
        if op.name == "broadcast":
            return partial(method, given, case.root)
        if op.name == "all_reduce":
            return partial(method, here if in_place else given, taken, self._reduction(case))
        if op.name == "reduce":
            return partial(
                method,
                here if in_place and case.at_root else given,
                taken if case.at_root else None,
                self._reduction(case),
                case.root,
            )
        if op.name == "reduce_scatter":
            return partial(method, given, taken, self._reduction(case))
        if op.name == "gather":
            return partial(method, given, taken if case.at_root else None, case.root)
        if op.name == "scatter":
            return partial(method, given if case.at_root else None, taken, case.root)
        return partial(method, here if in_place else given, taken)

    def call(self, case: Case, send: Any, recv: Any) -> Call:
        comm = self._comm
        if case.op.name == "sendrecv":
            given, taken = self._typed(case, send), self._typed(case, recv)
            after, before = (case.rank + 1) % case.size, (case.rank - 1) % case.size
            return partial(comm.Sendrecv, given, after, 0, taken, before, 0)
        if case.op.name == "latency":
            given, taken = self._typed(case, send), self._typed(case, recv)
            peer = 1 - case.rank
            return there_and_back(
                case.rank, partial(comm.Send, given, peer, 0), partial(comm.Recv, taken, peer, 0)
            )
        return self._prepared(case, send, recv, "")

    def begin(self, case: Case, send: Any, recv: Any) -> tuple[Call, Callable[[Any], Any]]:
        return self._prepared(case, send, recv, "I"), operator.methodcaller("Wait")


def library(mpi: Any) -> str:
    """Which MPI it is, in a few words."""
    return " ".join(mpi.Get_library_version().replace("\0", "").split(",")[0].split("\n")[0].split())
