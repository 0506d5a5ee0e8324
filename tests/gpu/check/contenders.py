"""The compared libraries: unicoll with each array library, torch.distributed's NCCL, and NCCL called directly.

Each prepares calls without arguments, so that the measured overhead is the same for all.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import unicoll as dist
from nccl_comm.library import locate
from nccl_comm.library.interface import DATA_TYPES, IN_PROGRESS, SUCCESS, SUM, Config
from tests.gpu.check.kits import Kit, kit
from unicoll.arrays import cuda as streams

__all__ = ["Bare", "Contender", "Torch", "Unicoll", "contenders"]

Call = Callable[[], object]
Array = Any
_F32 = DATA_TYPES["float32"]
_PATIENCE_S = 60.0


class Contender(ABC):
    """The measured operations with one library.

    Attributes:
        name: name in the JSON file.
        kit: library of its arrays.
    """

    def __init__(self, name: str, arrays: Kit) -> None:
        self.name = name
        self.kit = arrays

    @abstractmethod
    def all_reduce(self, x: Array) -> Call:
        """Blocking all_reduce: on the current stream."""

    @abstractmethod
    def scaled(self, x: Array) -> Call:
        """Blocking all_reduce with a factor, for which even one rank runs a kernel."""

    @abstractmethod
    def background(self, x: Array) -> Call:
        """Asynchronous all_reduce on a stream of the library, and wait."""

    @abstractmethod
    def gather(self, out: Array, x: Array) -> Call:
        """all_gather_into_tensor, blocking."""

    @abstractmethod
    def together(self, arrays: Sequence[Array]) -> Call:
        """Several asynchronous all_reduces as one group call, and wait."""

    @abstractmethod
    def gathers(self, pairs: Sequence[tuple[Array, Array]]) -> Call:
        """Several asynchronous all_gathers as one group call, and wait."""

    @abstractmethod
    def exchange(self, sent: Array, got: Array, peer: int) -> Call:
        """A send to a rank and a receive from it as one batch, and wait."""

    def forget(self) -> None:  # noqa: B027 - optional
        """Forget the calls made so far."""

    def close(self) -> None:  # noqa: B027 - optional
        """Free all resources."""


class Unicoll(Contender):
    """unicoll's nccl backend."""

    def all_reduce(self, x: Array) -> Call:
        return lambda: dist.all_reduce(x)

    def scaled(self, x: Array) -> Call:
        op = dist.ReduceOp.PREMUL_SUM(1.0)
        return lambda: dist.all_reduce(x, op=op)

    def background(self, x: Array) -> Call:
        def call() -> None:
            work: Any = dist.all_reduce(x, async_op=True)
            work.wait()

        return call

    def gather(self, out: Array, x: Array) -> Call:
        return lambda: dist.all_gather_into_tensor(out, x)

    def together(self, arrays: Sequence[Array]) -> Call:
        several = list(arrays)

        def call() -> None:
            work: Any = dist.all_reduce_coalesced(several, async_op=True)
            work.wait()

        return call

    def gathers(self, pairs: Sequence[tuple[Array, Array]]) -> Call:
        outs, given = [out for out, _ in pairs], [x for _, x in pairs]

        def call() -> None:
            work: Any = dist.all_gather_into_tensor_coalesced(outs, given, async_op=True)
            work.wait()

        return call

    def exchange(self, sent: Array, got: Array, peer: int) -> Call:
        ops = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, got, peer)]

        def call() -> None:
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        return call


class Torch(Contender):
    """torch.distributed with its NCCL, in the same processes."""

    def __init__(self, arrays: Kit) -> None:
        super().__init__("torch.distributed", arrays)
        self._dist: Any = importlib.import_module("torch.distributed")
        torch: Any = importlib.import_module("torch")
        self._device = torch.device("cuda:0")
        me, size = dist.get_rank(), dist.get_world_size()
        self._folder = tempfile.mkdtemp(prefix="unicoll-gpu-") if me == 0 else None
        where: list[Any] = [self._folder]
        dist.broadcast_object_list(where, src=0)
        store = self._dist.FileStore(str(Path(where[0], "store")), size)
        self._dist.init_process_group(
            "nccl", store=store, rank=me, world_size=size, timeout=timedelta(seconds=_PATIENCE_S)
        )

    def all_reduce(self, x: Array) -> Call:
        return lambda: self._dist.all_reduce(x)

    def scaled(self, x: Array) -> Call:
        op = self._dist._make_nccl_premul_sum(1.0)
        return lambda: self._dist.all_reduce(x, op=op)

    def background(self, x: Array) -> Call:
        return lambda: self._dist.all_reduce(x, async_op=True).wait()

    def gather(self, out: Array, x: Array) -> Call:
        return lambda: self._dist.all_gather_into_tensor(out, x)

    def together(self, arrays: Sequence[Array]) -> Call:
        def call() -> None:
            with self._dist._coalescing_manager(device=self._device, async_ops=True) as works:
                for x in arrays:
                    self._dist.all_reduce(x)
            works.wait()

        return call

    def gathers(self, pairs: Sequence[tuple[Array, Array]]) -> Call:
        def call() -> None:
            with self._dist._coalescing_manager(device=self._device, async_ops=True) as works:
                for out, x in pairs:
                    self._dist.all_gather_into_tensor(out, x)
            works.wait()

        return call

    def exchange(self, sent: Array, got: Array, peer: int) -> Call:
        module = self._dist
        ops = [module.P2POp(module.isend, sent, peer), module.P2POp(module.irecv, got, peer)]

        def call() -> None:
            for work in module.batch_isend_irecv(ops):
                work.wait()

        return call

    def close(self) -> None:
        self._dist.destroy_process_group()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class Bare(Contender):
    """The functions of libnccl and libcuda, called directly from Python: the minimum for any library."""

    def __init__(self, arrays: Kit) -> None:
        super().__init__("bare NCCL", arrays)
        self._nccl, self._cuda = locate.nccl(), streams.cuda()
        me, size = dist.get_rank(), dist.get_world_size()
        ident: list[Any] = [self._nccl.unique_id()[1] if me == 0 else None]
        dist.broadcast_object_list(ident, src=0)
        self._cuda.set_device(0)
        code, slot = self._nccl.comm_init(size, [ident[0]], me, Config(blocking=True))
        assert code == SUCCESS, (code, self._nccl.last_error())
        assert slot.value
        self._comm = slot.value
        self._stream = self._cuda.create_stream(0, high_priority=True)
        self._events = self._cuda.create_event(0), self._cuda.create_event(0)
        self._kept: list[Array] = []  # the calls have only addresses

    def _settled(self, code: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while code == IN_PROGRESS:
            assert time.monotonic() < deadline
            code = self._nccl.comm_state(self._comm)[1]
        assert code == SUCCESS, (code, self._nccl.last_error())

    def _ptr(self, x: Array) -> int:
        self._kept.append(x)
        return self.kit.ptr(x)

    def _reduced(self, x: Array, op: int) -> Call:
        ptr, count, comm, stream = self._ptr(x), _count(x), self._comm, self.kit.current()
        call = self._nccl.all_reduce
        return lambda: self._settled(call(ptr, ptr, count, _F32, op, comm, stream))

    def all_reduce(self, x: Array) -> Call:
        return self._reduced(x, SUM)

    def scaled(self, x: Array) -> Call:
        code, op = self._nccl.premul_sum(np.float32(1).tobytes(), _F32, self._comm)
        self._settled(code)
        return self._reduced(x, op)

    def gather(self, out: Array, x: Array) -> Call:
        given, into, count, comm = self._ptr(x), self._ptr(out), _count(x), self._comm
        call, stream = self._nccl.all_gather, self.kit.current()
        return lambda: self._settled(call(given, into, count, _F32, comm, stream))

    def _there_and_back(self, work: Callable[[], None]) -> Call:
        """On a stream of its own, between two events."""
        cuda, (before, after), mine = self._cuda, self._events, self._stream
        current = self.kit.current()

        def call() -> None:
            cuda.record(before, current)
            cuda.wait_event(mine, before)
            work()
            cuda.record(after, mine)
            cuda.wait_event(current, after)

        return call

    def _group(self, calls: Sequence[Callable[[], int]]) -> Callable[[], None]:
        nccl = self._nccl

        def work() -> None:
            nccl.group_start()
            for call in calls:
                call()
            self._settled(nccl.group_end())

        return work

    def background(self, x: Array) -> Call:
        ptr, count, comm, mine = self._ptr(x), _count(x), self._comm, self._stream
        call = self._nccl.all_reduce
        return self._there_and_back(lambda: self._settled(call(ptr, ptr, count, _F32, SUM, comm, mine)))

    def together(self, arrays: Sequence[Array]) -> Call:
        comm, mine, all_reduce = self._comm, self._stream, self._nccl.all_reduce

        def one(x: Array) -> Callable[[], int]:
            ptr, count = self._ptr(x), _count(x)
            return lambda: all_reduce(ptr, ptr, count, _F32, SUM, comm, mine)

        return self._there_and_back(self._group([one(x) for x in arrays]))

    def gathers(self, pairs: Sequence[tuple[Array, Array]]) -> Call:
        comm, mine, all_gather = self._comm, self._stream, self._nccl.all_gather

        def one(out: Array, x: Array) -> Callable[[], int]:
            given, into, count = self._ptr(x), self._ptr(out), _count(x)
            return lambda: all_gather(given, into, count, _F32, comm, mine)

        return self._there_and_back(self._group([one(*pair) for pair in pairs]))

    def exchange(self, sent: Array, got: Array, peer: int) -> Call:
        n, comm, mine, count = self._nccl, self._comm, self._stream, _count(sent)
        given, into = self._ptr(sent), self._ptr(got)
        return self._there_and_back(
            self._group(
                [
                    lambda: n.send(given, count, _F32, peer, comm, mine),
                    lambda: n.recv(into, count, _F32, peer, comm, mine),
                ]
            )
        )

    def forget(self) -> None:
        self.kit.synchronize()
        self._kept.clear()

    def close(self) -> None:
        self.forget()
        self._nccl.comm_destroy(self._comm)
        self._cuda.destroy_stream(self._stream)
        for event in self._events:
            self._cuda.destroy_event(event)


def _count(x: Array) -> int:
    found = x.numel() if hasattr(x, "numel") else x.size
    return int(found)


def contenders(kits: Sequence[str]) -> tuple[list[Contender], dict[str, str]]:
    """The available contenders, unicoll first; and the reasons why others are missing."""
    found: list[Contender] = [Unicoll(f"unicoll, {name}", kit(name)) for name in kits]
    missing: dict[str, str] = {}
    if "torch" in kits:
        module: Any = importlib.import_module("torch.distributed")
        if module.is_available() and module.is_nccl_available():
            found.append(Torch(kit("torch")))
        else:
            missing["torch.distributed"] = "this torch is built without NCCL"
    else:
        missing["torch.distributed"] = "torch is not installed"
    found.append(Bare(kit(kits[0])))
    return found, missing
