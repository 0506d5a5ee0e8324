"""NCCL called directly through unicoll's bindings: a baseline without unicoll's overhead."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import unicoll as dist
from unicoll.arrays.conversion import as_buffer
from unicoll.bench.arrays import Unsupported
from unicoll.bench.contract import BenchCase, BenchJob, Call, Contender, ping_pong, use_device
from unicoll.device_collectives import interface
from unicoll.group import registry

_REDUCTIONS = {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX", "avg": "AVG"}


class BareNccl(Contender):
    """libnccl's functions on the current stream, with a separate communicator."""

    def reason(self) -> str | None:
        return registry.reason_against("nccl")

    def open(self, job: BenchJob) -> None:
        self.device = use_device(job)
        self._nccl: Any = import_module("nccl_comm.library.locate").nccl()
        self._path = interface.describe(self._nccl)
        code, identifier = self._nccl.unique_id() if job.rank == 0 else (0, None)
        unique_id: list[Any] = [(code, identifier)]
        dist.broadcast_object_list(unique_id, src=0)
        self._check(unique_id[0][0])
        code, slot = self._nccl.comm_init(
            job.size, [unique_id[0][1]], job.rank, interface.Config(blocking=True)
        )
        self._check(code)
        self._comm = slot.value
        self._timeout = job.timeout

    def close(self) -> None:
        comm, self._comm = self._comm, None
        if comm:
            self._nccl.comm_destroy(comm)

    def describe(self) -> str:
        return f"{self._path}, called directly"

    def _check(self, code: int) -> None:
        """Wait while the result code is ncclInProgress; raise an error for a failure code."""
        if code == self._nccl.in_progress:
            end = time.monotonic() + self._timeout
            while (code := self._nccl.comm_state(self._comm)[1]) == self._nccl.in_progress:
                if time.monotonic() > end:
                    raise dist.OperationTimeoutError(
                        f"NCCL did not finish within {self._timeout:g} s"
                    )
        if code:
            raise dist.DistBackendError(f"NCCL returned {code}: {self._nccl.last_error()}")

    def call(self, case: BenchCase, send: Any, recv: Any) -> Call:
        work = self._prepared(case, send, recv)
        return lambda: self._check(work())

    def _prepared(self, case: BenchCase, send: Any, recv: Any) -> Callable[[], int]:
        n, comm, name = self._nccl, self._comm, case.op.name
        send_buffer, recv_buffer = as_buffer(send), as_buffer(recv)
        stream, source, target = send_buffer.stream or 0, send_buffer.ptr, recv_buffer.ptr
        kind = interface.DATA_TYPES.get(case.dtype.name)
        if kind is None:
            raise Unsupported(f"NCCL has no {case.dtype.name}")
        count = case.counts.shown
        if name in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"):
            options = [self._reduction(case)] if case.op.reduces else []
            options += [case.root] if case.op.rooted else []
            return partial(getattr(n, name), source, target, count, kind, *options, comm, stream)
        if name == "sendrecv":
            return self._ring(case, source, target, kind, stream)
        if name == "latency":
            peer = 1 - case.rank
            send_call = partial(n.send, source, count, kind, peer, comm, stream)
            recv_call = partial(n.recv, target, count, kind, peer, comm, stream)
            exchange = ping_pong(
                case.rank, lambda: self._check(send_call()), lambda: self._check(recv_call())
            )
            return lambda: int(exchange() is not None)
        raise Unsupported(f"{name} is not measured with bare NCCL")

    def _ring(
        self, case: BenchCase, source: int, target: int, kind: int, stream: int
    ) -> Callable[[], int]:
        n, comm, count = self._nccl, self._comm, case.counts.shown
        successor, predecessor = (case.rank + 1) % case.size, (case.rank - 1) % case.size

        def exchange() -> int:
            n.group_start()
            n.send(source, count, kind, successor, comm, stream)
            n.recv(target, count, kind, predecessor, comm, stream)
            code: int = n.group_end()
            return code

        return exchange

    def _reduction(self, case: BenchCase) -> int:
        found = _REDUCTIONS.get(case.redop)
        if found is None:
            raise Unsupported(f"{case.redop} is not measured with bare NCCL")
        code: int = getattr(interface, found)
        return code
