"""The interface of the checks to an array library on a device: CuPy, torch, or the simulation."""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from unicoll.arrays.types import BY_NAME
from unicoll.bench.arrays import FAMILIES, BenchArrays

Array = Any
Stream = Any
"""A stream of the library: a context manager that makes it current."""


class Replay(NamedTuple):
    """A graph: ``launch`` puts it on the current stream.

    ``close`` destroys it once its launches are done, for CuPy the last reference does: NCCL ends no communicator that
    graphs use.
    """

    launch: Callable[[], object]
    close: Callable[[], object]


class Kit(ABC):
    """One library's arrays, streams, events and graphs.

    Attributes:
        name: of the library.
        simulated: True if times are meaningless.
        marks: events around operations.
    """

    name = ""
    simulated = False
    marks: BenchArrays

    @abstractmethod
    def array(self, values: Any) -> Array:
        """An array with the elements of a NumPy array, or in the memory of one with ``__cuda_array_interface__``."""

    @abstractmethod
    def full(self, count: int, value: float, dtype: str = "float32") -> Array:
        """A flat array of equal elements, filled on the current stream, in memory of the library's pool."""

    @abstractmethod
    def numpy(self, array: Array) -> Any:
        """The elements in host memory, after the current stream's operations; blocks the host."""

    @abstractmethod
    def compute(self, out: Array, formula: Callable[..., Any], *inputs: Array) -> None:
        """``out[...] = formula(numpy-like module, *inputs)`` on the current stream."""

    @abstractmethod
    def stream(self) -> Stream:
        """A new stream that does not synchronize with the legacy default stream."""

    @abstractmethod
    def delay(self, seconds: float) -> None:
        """Keep the current stream busy for about this time."""

    @contextmanager
    def late(self, seconds: float) -> Iterator[None]:
        """Within the block no operation posted on the current stream begins."""
        self.delay(seconds)
        yield

    @abstractmethod
    def busy(self) -> bool:
        """True if the current stream has unfinished work; never blocks."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the device is idle."""

    @abstractmethod
    def capture(self, stream: Stream, body: Callable[[], object]) -> Replay:
        """Capture the operations that ``body`` puts on ``stream`` into a graph."""

    def elapsed(self, body: Callable[[], object], delay: float = 0.0) -> float:
        """Seconds of the device between events around the operations of ``body``; blocks the host.

        With a ``delay`` the device does not begin before the host has posted all of them.
        """
        if delay:
            self.delay(delay)
        first = self.marks.mark()
        body()
        last = self.marks.mark()
        self.marks.finish()
        return self.marks.between(first, last)


def _marks(library: str, device: int) -> BenchArrays:
    arrays = BenchArrays(FAMILIES[library], f"cuda:{device}")
    arrays.empty(1, BY_NAME["float32"])  # events are on this library's current stream
    return arrays


class CupyKit(Kit):
    """CuPy."""

    name = "cupy"
    _SPIN = r"""
    extern "C" __global__ void spin(unsigned long long nanoseconds) {
        unsigned long long began, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
        do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - began < nanoseconds);
    }
    """

    def __init__(self, device: int = 0) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self.marks = _marks(self.name, device)  # makes the device the current one
        self._spin = self._cupy.RawKernel(self._SPIN, "spin")

    def array(self, values: Any) -> Array:
        return self._cupy.asarray(values)

    def full(self, count: int, value: float, dtype: str = "float32") -> Array:
        return self._cupy.full(count, value, dtype)

    def numpy(self, array: Array) -> Any:
        return array.get()

    def compute(self, out: Array, formula: Callable[..., Any], *inputs: Array) -> None:
        out[...] = formula(self._cupy, *inputs)

    def stream(self) -> Stream:
        return self._cupy.cuda.Stream(non_blocking=True)

    def delay(self, seconds: float) -> None:
        self._spin((1,), (1,), (np.uint64(seconds * 1e9),))

    def busy(self) -> bool:
        return not self._cupy.cuda.get_current_stream().done

    def synchronize(self) -> None:
        self._cupy.cuda.Device().synchronize()

    def capture(self, stream: Stream, body: Callable[[], object]) -> Replay:
        self.synchronize()
        with stream:
            stream.begin_capture(self._cupy.cuda.runtime.streamCaptureModeGlobal)
            try:
                body()
            except BaseException:
                with suppress(Exception):  # the error that invalidated the capture is being raised
                    stream.end_capture()
                raise
            graph = stream.end_capture()
        return Replay(lambda: graph.launch(self._cupy.cuda.get_current_stream()), lambda: None)


class TorchKit(Kit):
    """torch on a CUDA device."""

    name = "torch"
    _CALIBRATION = 20_000_000

    def __init__(self, device: int = 0) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._cuda = self._torch.cuda
        self._cuda.set_device(device)
        self.marks = _marks(self.name, device)
        self._rate = 0.0

    def array(self, values: Any) -> Array:
        return self._torch.as_tensor(values, device="cuda")

    def full(self, count: int, value: float, dtype: str = "float32") -> Array:
        return self._torch.full((count,), value, dtype=getattr(self._torch, dtype), device="cuda")

    def numpy(self, array: Array) -> Any:
        return array.detach().cpu().numpy()

    def compute(self, out: Array, formula: Callable[..., Any], *inputs: Array) -> None:
        out[...] = formula(self._torch, *inputs)

    def stream(self) -> Stream:
        return _TorchStream(self._cuda)

    def delay(self, seconds: float) -> None:
        if not self._rate:  # cycles per second; the clock has its full rate after the first run
            for _ in range(2):
                took = self.elapsed(lambda: self._cuda._sleep(self._CALIBRATION))
            self._rate = self._CALIBRATION / took
        self._cuda._sleep(int(seconds * self._rate))

    def busy(self) -> bool:
        return not self._cuda.current_stream().query()

    def synchronize(self) -> None:
        self._cuda.synchronize()

    def capture(self, stream: Stream, body: Callable[[], object]) -> Replay:
        graph = self._cuda.CUDAGraph()
        with self._cuda.graph(graph, stream=stream.stream):
            body()
        return Replay(graph.replay, graph.reset)


class _TorchStream:
    """A stream of torch that can be entered more than once."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self.stream = cuda.Stream()
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> _TorchStream:
        within = self._cuda.stream(self.stream)
        within.__enter__()
        self._entered.append(within)
        return self

    def __exit__(self, *rest: Any) -> None:
        self._entered.pop().__exit__(*rest)


class SimulatedKit(Kit):
    """The simulated device, where no operation runs within :meth:`late`, whatever the seconds."""

    name = "simulated"
    simulated = True

    def __init__(self, device: int = 0) -> None:
        from tests.simulated_nccl import arrays

        self._arrays = arrays
        self._sim = arrays.simulation()

    def array(self, values: Any) -> Array:
        adopts = hasattr(values, "__cuda_array_interface__")
        return self._arrays.adopt(values) if adopts else self._arrays.array(values)

    def full(self, count: int, value: float, dtype: str = "float32") -> Array:
        return self._arrays.full(count, value, dtype)

    def numpy(self, array: Array) -> Any:
        return array.numpy()

    def compute(self, out: Array, formula: Callable[..., Any], *inputs: Array) -> None:
        out._kernel("compute", lambda own, *given: np.copyto(own, formula(np, *given)), *inputs)

    def stream(self) -> Stream:
        return self._arrays.Stream()

    def _current(self) -> Any:
        return self._sim.cuda.stream(self._arrays.current_stream())

    def delay(self, seconds: float) -> None:
        from tests.simulated_nccl.streams import Op

        self._sim.scheduler.put(self._current(), Op("delay", lambda op: time.sleep(min(seconds, 0.02))))

    @contextmanager
    def late(self, seconds: float) -> Iterator[None]:
        self.delay(seconds)
        with self._sim.hold():
            yield

    def busy(self) -> bool:
        tail = self._current().tail
        return tail is not None and not tail.done

    def synchronize(self) -> None:
        self._sim.synchronize()

    def capture(self, stream: Stream, body: Callable[[], object]) -> Replay:
        with stream, self._sim.capture(stream.ptr, "global") as made:
            body()
        return Replay(
            lambda: self._sim.launch(made[0], self._arrays.current_stream()), lambda: made[0].destroy()
        )

    def elapsed(self, body: Callable[[], object], delay: float = 0.0) -> float:
        began = time.perf_counter()
        body()
        self._sim.synchronize()
        return time.perf_counter() - began


KITS: dict[str, Callable[[int], Kit]] = {"cupy": CupyKit, "torch": TorchKit, "simulated": SimulatedKit}
_kits: dict[str, Kit] = {}


def kit(name: str, device: int = 0) -> Kit:
    """The kit with a name, in this process; the first call selects its device."""
    if name not in _kits:
        _kits[name] = KITS[name](device)
    return _kits[name]
