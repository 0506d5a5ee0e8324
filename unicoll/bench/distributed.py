"""Contenders with torch.distributed's functions: unicoll's backends, and torch.distributed
itself."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

import unicoll as dist
from unicoll.arrays.types import DType
from unicoll.bench.arrays import BenchArrays, Unsupported, array_of, numpy_type
from unicoll.bench.contract import BenchCase, BenchJob, Call, Contender, ping_pong, use_device
from unicoll.bench.values import FACTOR
from unicoll.calls.ops import Arity
from unicoll.group import registry

_REDUCTIONS = {
    "sum": "SUM",
    "prod": "PRODUCT",
    "min": "MIN",
    "max": "MAX",
    "avg": "AVG",
    "exact": "EXACT_SUM",
}


class _Distributed(Contender):
    """A package with torch.distributed's functions: unicoll itself, or torch.distributed."""

    module: Any = None
    group: Any = None

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.backend = name.removeprefix("torch-").removesuffix("-symmetric")

    def _reduction(self, redop: str) -> Any:
        if redop == "mulsum":
            return self._premultiplied()
        name = _REDUCTIONS[redop]
        if not hasattr(self.module.ReduceOp, name):
            raise Unsupported(f"{self.name} has no reduction {redop}")
        return getattr(self.module.ReduceOp, name)

    @abstractmethod
    def _premultiplied(self) -> Any:
        """The reduction that multiplies each contribution by FACTOR."""

    def _prepared(self, case: BenchCase, send: Any, recv: Any) -> Callable[..., Any]:
        """The collective with all arguments except ``async_op``."""
        row = case.op.collective
        assert row is not None
        names = [name for name in (*row.aliases[:1], row.name) if hasattr(self.module, name)]
        # torch 2.13 has the first alias, earlier versions the name.
        if not names:
            raise Unsupported(f"{row.name} is not measured with {self.name}")
        arrays: list[Any] = []
        for parameter in row.parameters:
            if parameter.side == "splits":
                continue
            array, arity = (recv, row.outputs) if parameter.side == "output" else (send, row.inputs)
            if arity is Arity.PER_RANK_AT_ROOT:
                count = min(case.counts.send, case.counts.recv)
                parts = [array[r * count : (r + 1) * count] for r in range(case.size)]
                array = parts if case.at_root else None
            arrays.append(array)
        options = {"group": self.group}
        if row.reduces:
            options["op"] = self._reduction(case.redop)
        if row.rooted:
            options[row.root_name] = case.root
        return partial(getattr(self.module, names[0]), *arrays, **options)

    def call(self, case: BenchCase, send: Any, recv: Any) -> Call:
        if case.op.name == "sendrecv":
            return self._ring(case, send, recv)
        if case.op.name == "latency":
            peer, module = 1 - case.rank, self.module
            send_call = partial(module.send, send, dst=peer, group=self.group)
            recv_call = partial(module.recv, recv, src=peer, group=self.group)
            return ping_pong(case.rank, send_call, recv_call)
        return self._prepared(case, send, recv)

    def start(self, case: BenchCase, send: Any, recv: Any) -> tuple[Call, Callable[[Any], Any]]:
        return partial(self._prepared(case, send, recv), async_op=True), operator.methodcaller(
            "wait"
        )

    def _ring(self, case: BenchCase, send: Any, recv: Any) -> Call:
        module, group = self.module, self.group
        successor, predecessor = (case.rank + 1) % case.size, (case.rank - 1) % case.size
        operations = [
            module.P2POp(module.isend, send, successor, group),
            module.P2POp(module.irecv, recv, predecessor, group),
        ]
        batch = module.batch_isend_irecv

        def exchange() -> None:
            for work in batch(operations):
                work.wait()

        return exchange


class Unicoll(_Distributed):
    """One of unicoll's backends, in a separate group."""

    refusals = (
        Unsupported,
        dist.DistArgumentError,
        dist.DistTypeError,
        dist.BackendUnavailableError,
    )
    module = dist

    def reason(self) -> str | None:
        if self.backend == "xccl" and find_spec("torch") is not None:
            # If torch is built for XPU, the XPUs are torch's.
            import_module("torch")
        return registry.reason_against(self.backend)

    def open(self, job: BenchJob) -> None:
        kind, device = "cpu", None
        types = registry.load(self.backend).caps.devices
        if "cpu" not in types:
            (kind,) = types
            self.device = device = use_device(job, kind)
        self.compression = job.compression
        options = {"compression": job.compression} if job.compression else None
        backend = f"{kind}:{self.backend}"
        self.group = dist.new_group(
            backend=backend, timeout=job.timeout, pg_options=options, device_id=device
        )
        # The first collective selects the transport.
        self.group.barrier()

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

    def describe(self) -> str:
        return str(self.group.describe())

    def staging(self) -> int | None:
        return int(sum(self.group.staging_bytes().values()))

    def _premultiplied(self) -> Any:
        return dist.ReduceOp.PREMUL_SUM(FACTOR)


class Symmetric(Unicoll):
    """unicoll's CPU backend, or MPI, on arrays in symmetric memory."""

    def describe(self) -> str:
        return f"{super().describe()}; arrays in symmetric memory"

    def family(self, array_name: str | None, dtype: DType) -> BenchArrays:
        return BenchArrays(self._allocate)

    def _allocate(self, count: int, dtype: DType, device: str) -> Any:
        """An array in symmetric memory that is as large as the largest that a rank asks for."""
        most = np.array([count])
        self.group.all_reduce(most, op=dist.ReduceOp.MAX)
        memory = self.group.symmetric_empty(int(most[0]), dtype.name, device=device)
        return memory[:count].view(numpy_type(dtype))


_DEVICE_TYPES = {"nccl": "cuda", "xccl": "xpu"}
"""The device type of the arrays of torch's backends, where it is not the CPU."""


class Torch(_Distributed):
    """torch.distributed with its gloo, nccl or xccl backend, in the same processes, with a separate
    store."""

    refusals = (Unsupported, RuntimeError, ValueError, TypeError, NotImplementedError)

    def reason(self) -> str | None:
        if find_spec("torch") is None:
            return "torch is not installed"
        module = import_module("torch.distributed")
        if not module.is_available() or not getattr(module, f"is_{self.backend}_available")():
            return f"this torch is built without {self.backend}"
        kind = _DEVICE_TYPES.get(self.backend)
        if kind is not None and not getattr(import_module("torch"), kind).is_available():
            return f"torch finds no {kind} device"
        return None

    def open(self, job: BenchJob) -> None:
        self.module = import_module("torch.distributed")
        from datetime import timedelta

        limit = timedelta(seconds=job.timeout)
        if self.backend in _DEVICE_TYPES:
            self.device = use_device(job, _DEVICE_TYPES[self.backend])
        if self.module.is_initialized():
            self.group = self.module.new_group(backend=self.backend, timeout=limit)
            return
        store = _torch_store(self.module, job, limit)
        self.module.init_process_group(
            self.backend, store=store, rank=job.rank, world_size=job.size, timeout=limit
        )
        self.group = self.module.group.WORLD

    def close(self) -> None:
        if self.group is not None and self.module.is_initialized():
            self.module.destroy_process_group()
        self.group = None

    def describe(self) -> str:
        return f"torch.distributed {import_module('torch').__version__}, {self.backend}"

    def family(self, array_name: str | None, dtype: DType) -> BenchArrays:
        return BenchArrays(partial(array_of, "torch"), self.device)

    def _premultiplied(self) -> Any:
        if self.backend in ("gloo", "mpi"):
            raise Unsupported(f"torch's {self.backend} has no premultiplied sum")
        return import_module("torch.distributed.distributed_c10d")._make_nccl_premul_sum(
            float(FACTOR)
        )


class TorchOnUnicoll(Torch):
    """torch.distributed on one of unicoll's backends (``torch-unicoll-gloo``), through its
    plug-in."""

    def reason(self) -> str | None:
        if find_spec("torch") is None:
            return "torch is not installed"
        return registry.reason_against(self.backend.removeprefix("unicoll-"))

    def open(self, job: BenchJob) -> None:
        if job.compression:
            raise Unsupported("--compression is for the groups of unicoll's own functions")
        import_module("unicoll.torch_plugin")
        if self.backend == "unicoll-nccl":
            self.device = use_device(job)
        super().open(job)
        # The first collective selects the transport.
        self.module.barrier(group=self.group)

    def describe(self) -> str:
        return f"{super().describe()}: {self.group.unicoll.describe()}"


def _torch_store(module: Any, job: BenchJob, limit: Any) -> Any:
    """A TCPStore on rank 0, on a port that the kernel selects; rank 0 broadcasts its address."""
    address = "127.0.0.1" if len(set(job.hosts)) == 1 else own_address()
    location: list[Any] = [None]
    store = None
    if job.rank == 0:
        store = module.TCPStore(address, 0, job.size, True, limit, wait_for_workers=False)
        location = [[address, store.port]]
    dist.broadcast_object_list(location, src=0)
    host, port = location[0]
    return store or module.TCPStore(host, port, job.size, False, limit)


def own_address() -> str:
    """The address at which other hosts reach this rank."""
    group = dist.group.WORLD
    assert group is not None
    return str(group.job.addresses[0])
