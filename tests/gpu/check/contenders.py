"""The compared libraries: unicoll with each array library, torch.distributed's NCCL, and NCCL called directly.

Each prepares calls without arguments, so that the measured overhead is the same for all.
"""

from __future__ import annotations

import importlib
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import unicoll as dist
from nccl_comm.library import locate
from nccl_comm.library.errors import IN_PROGRESS
from tests.gpu.check.kits import Kit, kit
from unicoll.arrays.buffer import Buffer
from unicoll.arrays.conversion import as_buffer
from unicoll.bench.contract import BenchJob
from unicoll.bench.distributed import Torch as BenchTorch
from unicoll.device_collectives.interface import DATA_TYPES, SUCCESS, SUM, Config
from unicoll.devices import runtimes

Call = Callable[[], object]
Array = Any
TOGETHER, _GATHERS = 8, 4
"""The numbers of all_reduces and of all_gathers in a group call."""
_F32 = DATA_TYPES["float32"]
_PATIENCE_S = 60.0


class Contender:
    """The measured operations with one library. Each is a method that takes bytes, and makes arrays and a call:

    ``all_reduce``: blocking, on the current stream;
    ``scaled``: the same with a factor, for which even one rank runs a kernel;
    ``background``: asynchronous on a stream of the library, and wait;
    ``gather``: all_gather_into_tensor, blocking;
    ``together``: several asynchronous all_reduces as one group call, and wait;
    ``gathers``: several asynchronous all_gathers of these bytes together as one group call, and wait;
    ``exchange``: a send to the other rank and a receive from it as one batch, and wait.

    Attributes:
        name: name in the JSON file.
        kit: library of its arrays.
    """

    def __init__(self, name: str, arrays: Kit) -> None:
        self.name = name
        self.kit = arrays

    def array(self, nbytes: int) -> Array:
        """An array of float32."""
        return self.kit.full(nbytes // 4, 0.0)

    def pair(self, nbytes: int, among: int = 1) -> tuple[Array, Array]:
        """The arrays of one of several all_gathers with inputs of some bytes together: its output and its input."""
        part = max(4, nbytes // among)
        return self.array(part * dist.get_world_size()), self.array(part)

    def forget(self) -> None:
        """Forget the calls made so far."""

    def close(self) -> None:
        """Free all resources."""


class _Distributed(Contender):
    """A package with torch.distributed's functions."""

    module: Any = None

    def factor(self) -> Any:
        """The sum of arrays with a factor."""
        raise NotImplementedError

    def all_reduce(self, nbytes: int) -> Call:
        x, module = self.array(nbytes), self.module
        return lambda: module.all_reduce(x)

    def scaled(self, nbytes: int) -> Call:
        x, module, op = self.array(nbytes), self.module, self.factor()
        return lambda: module.all_reduce(x, op=op)

    def background(self, nbytes: int) -> Call:
        x, module = self.array(nbytes), self.module
        return lambda: module.all_reduce(x, async_op=True).wait()

    def gather(self, nbytes: int) -> Call:
        (out, x), module = self.pair(nbytes), self.module
        return lambda: module.all_gather_into_tensor(out, x)

    def exchange(self, nbytes: int) -> Call:
        module, peer = self.module, 1 - dist.get_rank()
        sent, got = self.array(nbytes), self.array(nbytes)
        ops = [module.P2POp(module.isend, sent, peer), module.P2POp(module.irecv, got, peer)]

        def call() -> None:
            for work in module.batch_isend_irecv(ops):
                work.wait()

        return call


class Unicoll(_Distributed):
    """unicoll's nccl backend."""

    module = dist

    def factor(self) -> Any:
        return dist.ReduceOp.PREMUL_SUM(1.0)

    def together(self, nbytes: int) -> Call:
        module, arrays = self.module, [self.array(nbytes) for _ in range(TOGETHER)]
        return lambda: module.all_reduce_coalesced(arrays, async_op=True).wait()

    def gathers(self, nbytes: int) -> Call:
        module, pairs = self.module, [self.pair(nbytes, _GATHERS) for _ in range(_GATHERS)]
        outs, given = [out for out, _ in pairs], [x for _, x in pairs]
        return lambda: module.all_gather_into_tensor_coalesced(outs, given, async_op=True).wait()


class Torch(_Distributed):
    """torch.distributed with its NCCL, in the same processes."""

    def __init__(self, arrays: Kit) -> None:
        super().__init__("torch.distributed", arrays)
        size = dist.get_world_size()
        self._opened = BenchTorch("torch-nccl")
        self._opened.open(BenchJob(dist.get_rank(), size, 0, (socket.gethostname(),) * size, _PATIENCE_S))
        self.module = self._opened.module
        self._device = importlib.import_module("torch").device("cuda:0")

    def factor(self) -> Any:
        return self.module._make_nccl_premul_sum(1.0)

    def _grouped(self, function: Callable[..., object], arguments: Sequence[tuple[Array, ...]]) -> Call:
        module, device = self.module, self._device

        def call() -> None:
            with module._coalescing_manager(device=device, async_ops=True) as works:
                for each in arguments:
                    function(*each)
            works.wait()

        return call

    def together(self, nbytes: int) -> Call:
        return self._grouped(self.module.all_reduce, [(self.array(nbytes),) for _ in range(TOGETHER)])

    def gathers(self, nbytes: int) -> Call:
        pairs = [self.pair(nbytes, _GATHERS) for _ in range(_GATHERS)]
        return self._grouped(self.module.all_gather_into_tensor, pairs)

    def close(self) -> None:
        self._opened.close()


class Bare(Contender):
    """The functions of libnccl and libcuda, called directly from Python: the minimum for any library."""

    def __init__(self, arrays: Kit) -> None:
        super().__init__("bare NCCL", arrays)
        self._nccl, self._cuda = locate.nccl(), runtimes.runtime("cuda")
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
        self._kept: list[Buffer] = []  # the calls have only addresses

    def _settled(self, code: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while code == IN_PROGRESS:
            assert time.monotonic() < deadline
            code = self._nccl.comm_state(self._comm)[1]
        assert code == SUCCESS, (code, self._nccl.last_error())

    def _buffer(self, x: Array) -> Buffer:
        self._kept.append(as_buffer(x))
        return self._kept[-1]

    def _reduction(self, nbytes: int, op: int = SUM, stream: int | None = None) -> Callable[[], int]:
        """An all_reduce on a stream, by default the current one."""
        x = self._buffer(self.array(nbytes))
        on = x.stream if stream is None else stream
        return partial(self._nccl.all_reduce, x.ptr, x.ptr, x.count, _F32, op, self._comm, on)

    def _gathering(self, nbytes: int, among: int = 1, stream: int | None = None) -> Callable[[], int]:
        out, x = map(self._buffer, self.pair(nbytes, among))
        on = x.stream if stream is None else stream
        return partial(self._nccl.all_gather, x.ptr, out.ptr, x.count, _F32, self._comm, on)

    def _now(self, work: Callable[[], int]) -> Call:
        return lambda: self._settled(work())

    def _there_and_back(self, work: Call) -> Call:
        """On a stream of its own, between two events."""
        cuda, (before, after), mine = self._cuda, self._events, self._stream
        current = as_buffer(self.array(4)).stream

        def call() -> None:
            cuda.record(before, current)
            cuda.wait_event(mine, before)
            work()
            cuda.record(after, mine)
            cuda.wait_event(current, after)

        return call

    def _grouped(self, calls: Sequence[Callable[[], int]]) -> Call:
        nccl = self._nccl

        def work() -> None:
            nccl.group_start()
            for call in calls:
                call()
            self._settled(nccl.group_end())

        return self._there_and_back(work)

    def all_reduce(self, nbytes: int) -> Call:
        return self._now(self._reduction(nbytes))

    def scaled(self, nbytes: int) -> Call:
        code, op = self._nccl.premul_sum(np.float32(1).tobytes(), _F32, self._comm)
        self._settled(code)
        return self._now(self._reduction(nbytes, op))

    def background(self, nbytes: int) -> Call:
        return self._there_and_back(self._now(self._reduction(nbytes, stream=self._stream)))

    def gather(self, nbytes: int) -> Call:
        return self._now(self._gathering(nbytes))

    def together(self, nbytes: int) -> Call:
        return self._grouped([self._reduction(nbytes, stream=self._stream) for _ in range(TOGETHER)])

    def gathers(self, nbytes: int) -> Call:
        return self._grouped([self._gathering(nbytes, _GATHERS, self._stream) for _ in range(_GATHERS)])

    def exchange(self, nbytes: int) -> Call:
        sent, got = self._buffer(self.array(nbytes)), self._buffer(self.array(nbytes))
        rest = (sent.count, _F32, 1 - dist.get_rank(), self._comm, self._stream)
        return self._grouped(
            [partial(self._nccl.send, sent.ptr, *rest), partial(self._nccl.recv, got.ptr, *rest)]
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


def contenders(kits: Sequence[str]) -> tuple[list[Contender], dict[str, str]]:
    """The available contenders, unicoll first; and the reasons why others are missing."""
    found: list[Contender] = [Unicoll(f"unicoll, {name}", kit(name)) for name in kits]
    reason = BenchTorch("torch-nccl").reason() if "torch" in kits else "torch is not installed"
    if reason is None:
        found.append(Torch(kit("torch")))
    found.append(Bare(kit(kits[0])))
    return found, {"torch.distributed": reason} if reason else {}
