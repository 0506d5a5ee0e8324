"""mpi4py called directly, in its idiomatic form."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from unicoll.arrays.types import DType
from unicoll.bench.arrays import BenchArrays, Unsupported, storage_array
from unicoll.bench.contract import BenchCase, BenchJob, Call, Contender, ping_pong
from unicoll.bench.operations import IN, OUT, Operation
from unicoll.bootstrap import launchers
from unicoll.calls.ops import Arity
from unicoll.group import registry


class Mpi4py(Contender):
    """mpi4py: upper-case methods of COMM_WORLD on preallocated NumPy arrays with explicit
    datatypes."""

    _comm: Any = None
    _mpi: Any = None

    def reason(self) -> str | None:
        launched = launchers.detect()
        reason = registry.load("mpi").availability()
        if reason is None and (launched is None or not launched.started_by_mpi):
            return "the ranks were not started by mpirun: COMM_WORLD would have size 1 on each"
        return reason

    def open(self, job: BenchJob) -> None:
        self._mpi = mpi = import_module("mpi4py.MPI")
        self._comm = mpi.COMM_WORLD
        self.refusals = (Unsupported, mpi.Exception, NotImplementedError)
        if (self._comm.rank, self._comm.size) != (job.rank, job.size):
            raise Unsupported(
                f"COMM_WORLD has rank {self._comm.rank} of {self._comm.size}, the job rank"
                f" {job.rank} of {job.size}"
            )

    def describe(self) -> str:
        return f"mpi4py {import_module('mpi4py').__version__}, {library(self._mpi)}"

    def family(self, array_name: str | None, dtype: DType) -> BenchArrays:
        return BenchArrays(storage_array)

    def placements(self, op: Operation) -> tuple[str, ...]:
        if op.name in ("all_reduce", "reduce"):
            return (IN, OUT)
        # MPI's in-place reduce_scatter puts the result at another offset than nccl-tests.
        return (OUT,) if op.name == "reduce_scatter" else op.placements

    def _reduction(self, case: BenchCase) -> Any:
        if not case.dtype.native or case.dtype.half:
            raise Unsupported(f"MPI does not reduce {case.dtype.name}")
        found = {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX"}.get(case.redop)
        if found is None:
            raise Unsupported(f"MPI has no reduction {case.redop}")
        return getattr(self._mpi, found)

    def _typed(self, case: BenchCase, array: Any) -> tuple[Any, Any]:
        """An array with its MPI datatype; elements without an MPI datatype are sent as their
        bits."""
        dtype = case.dtype
        if dtype.half:
            array = array.view(f"u{dtype.itemsize}")
        return (array, self._mpi.Datatype.fromcode(array.dtype.char))

    def _prepared(self, case: BenchCase, send: Any, recv: Any, asynchronous: bool) -> Call:
        mpi, op, row = self._mpi, case.op, case.op.collective
        assert row is not None
        if not row.mpi:
            raise Unsupported(f"MPI has no {row.name}")
        # All ranks' parts are equal.
        name = row.mpi.removeprefix("MPI_").removesuffix("v")
        method = getattr(self._comm, f"I{name.lower()}" if asynchronous else name)
        if op.name == "barrier":
            return partial(method)
        send_spec, recv_spec = self._typed(case, send), self._typed(case, recv)
        reduction = [self._reduction(case)] if row.reduces else []
        root = [case.root] if row.rooted else []
        if op.name == "broadcast":
            return partial(method, send_spec, *root)
        here = case.at_root or not row.rooted
        if case.placement == IN and here:
            send_spec = mpi.IN_PLACE
        sends = here or row.inputs is not Arity.PER_RANK_AT_ROOT
        receives = here or row.outputs not in (Arity.ONE_AT_ROOT, Arity.PER_RANK_AT_ROOT)
        return partial(
            method, send_spec if sends else None, recv_spec if receives else None, *reduction, *root
        )

    def call(self, case: BenchCase, send: Any, recv: Any) -> Call:
        comm = self._comm
        if case.op.name == "sendrecv":
            send_spec, recv_spec = self._typed(case, send), self._typed(case, recv)
            successor, predecessor = (case.rank + 1) % case.size, (case.rank - 1) % case.size
            return partial(comm.Sendrecv, send_spec, successor, 0, recv_spec, predecessor, 0)
        if case.op.name == "latency":
            send_spec, recv_spec = self._typed(case, send), self._typed(case, recv)
            peer = 1 - case.rank
            return ping_pong(
                case.rank,
                partial(comm.Send, send_spec, peer, 0),
                partial(comm.Recv, recv_spec, peer, 0),
            )
        return self._prepared(case, send, recv, False)

    def start(self, case: BenchCase, send: Any, recv: Any) -> tuple[Call, Callable[[Any], Any]]:
        return self._prepared(case, send, recv, True), operator.methodcaller("Wait")


def library(mpi: Any) -> str:
    """Name and version of the MPI library."""
    return " ".join(
        mpi.Get_library_version().replace("\0", "").split(",")[0].split("\n")[0].split()
    )
