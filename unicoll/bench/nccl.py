"""NCCL called directly through our bindings: what is left when everything that a library adds is taken away."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import unicoll as dist

from .. import registry
from ..buffers import as_buffer
from .arrays import Unsupported
from .contract import Call, Case, Contender, World, there_and_back
from .cuda import use_cuda

__all__ = ["BareNccl"]

_REDUCTIONS = {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX", "avg": "AVG"}


class BareNccl(Contender):
    """libnccl's functions on the current stream, with a communicator of their own."""

    def reason(self) -> str | None:
        return registry.reason_against("nccl")

    def open(self, world: World) -> None:
        self.device = use_cuda(world)
        self._api: Any = import_module("nccl_comm.api")
        library: Any = import_module("nccl_comm.library")
        self._nccl: Any = library.nccl()
        self._path = library.describe(self._nccl)
        code, ident = self._nccl.unique_id() if world.rank == 0 else (0, None)
        answer: list[Any] = [(code, ident)]
        dist.broadcast_object_list(answer, src=0)
        self._check(answer[0][0])
        code, slot = self._nccl.comm_init(world.size, [answer[0][1]], world.rank, self._api.Config(blocking=True))
        self._check(code)
        self._comm = slot.value
        self._deadline = world.timeout

    def close(self) -> None:
        comm, self._comm = self._comm, None
        if comm:
            self._nccl.comm_destroy(comm)

    def describe(self) -> str:
        return f"{self._path}, called directly"

    def _check(self, code: int) -> None:
        """Wait for what is in progress; raise what went wrong."""
        if code == self._api.IN_PROGRESS:
            end = time.monotonic() + self._deadline
            while (code := self._nccl.comm_state(self._comm)[1]) == self._api.IN_PROGRESS:
                if time.monotonic() > end:
                    raise dist.OperationTimeoutError("NCCL is in progress for ever")
        if code:
            raise dist.DistBackendError(f"NCCL answers {code}: {self._nccl.last_error()}")

    def call(self, case: Case, send: Any, recv: Any) -> Call:
        work = self._prepared(case, send, recv)
        return lambda: self._check(work())

    def begin(self, case: Case, send: Any, recv: Any) -> tuple[Call, Callable[[Any], Any]]:
        raise Unsupported("bare NCCL is not measured in the background")

    def _prepared(self, case: Case, send: Any, recv: Any) -> Callable[[], int]:
        """The function with all its arguments."""
        n, comm, name = self._nccl, self._comm, case.op.name
        given, taken = as_buffer(send), as_buffer(recv)
        stream, source, target = given.stream or 0, given.ptr, taken.ptr
        kind = self._api.DATA_TYPES.get(case.dtype.name)
        if kind is None:
            raise Unsupported(f"NCCL has no {case.dtype.name}")
        op = self._reduction(case) if case.op.reduces else 0
        count = case.counts.shown
        calls: dict[str, Callable[[], int]] = {
            "all_reduce": partial(n.all_reduce, source, target, count, kind, op, comm, stream),
            "broadcast": partial(n.broadcast, source, target, count, kind, case.root, comm, stream),
            "reduce": partial(n.reduce, source, target, count, kind, op, case.root, comm, stream),
            "all_gather": partial(n.all_gather, source, target, count, kind, comm, stream),
            "reduce_scatter": partial(n.reduce_scatter, source, target, count, kind, op, comm, stream),
        }
        if name in calls:
            return calls[name]
        if name == "sendrecv":
            return self._ring(case, source, target, kind, stream)
        if name == "latency":
            peer = 1 - case.rank
            put = partial(n.send, source, count, kind, peer, comm, stream)
            take = partial(n.recv, target, count, kind, peer, comm, stream)
            both = there_and_back(case.rank, lambda: self._check(put()), lambda: self._check(take()))
            return lambda: int(both() is not None)
        raise Unsupported(f"{name} is not measured with bare NCCL")

    def _ring(self, case: Case, source: int, target: int, kind: int, stream: int) -> Callable[[], int]:
        n, comm, count = self._nccl, self._comm, case.counts.shown
        after, before = (case.rank + 1) % case.size, (case.rank - 1) % case.size

        def exchange() -> int:
            n.group_start()
            n.send(source, count, kind, after, comm, stream)
            n.recv(target, count, kind, before, comm, stream)
            code: int = n.group_end()
            return code

        return exchange

    def _reduction(self, case: Case) -> int:
        found = _REDUCTIONS.get(case.redop)
        if found is None:
            raise Unsupported(f"{case.redop} is not measured with bare NCCL")
        code: int = getattr(self._api, found)
        return code
