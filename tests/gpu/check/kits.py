"""The interface of the checks to an array library on a device: CuPy, torch, or the simulation."""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

__all__ = ["KITS", "Kit", "Replay", "kit"]

Host = Any
"""A NumPy array."""
Array = Any
Stream = Any
"""A stream of the library: a context manager that makes it current."""


class Replay:
    """A graph: a call launches it on the current stream; close() destroys it."""

    def __init__(self, launch: Callable[[], object], end: Callable[[], object]) -> None:
        self._launch: Callable[[], object] | None = launch
        self._end = end

    def __call__(self) -> None:
        assert self._launch is not None
        self._launch()

    def close(self) -> None:
        """Destroy the graph once its launches are done: NCCL ends no communicator that graphs use."""
        self._launch = None
        self._end()


class Kit(ABC):
    """One library's arrays, streams, events and graphs.

    Attributes:
        name: of the library; ``family`` is its name in :mod:`unicoll.testing.families`.
        simulated: True if times are meaningless.
    """

    name = ""
    family = ""
    simulated = False

    @abstractmethod
    def array(self, values: Host) -> Array:
        """An array with the elements of a host array."""

    @abstractmethod
    def full(self, count: int, value: float, dtype: str = "float32") -> Array:
        """A flat array of equal elements, filled on the current stream, in memory of the library's pool."""

    @abstractmethod
    def numpy(self, array: Array) -> Host:
        """The elements in host memory, after the current stream's operations; blocks the host."""

    @abstractmethod
    def ptr(self, array: Array) -> int:
        """Address of the first element."""

    @abstractmethod
    def compute(self, out: Array, formula: Callable[..., Any], *inputs: Array) -> None:
        """``out[...] = formula(numpy-like module, *inputs)`` on the current stream."""

    @abstractmethod
    def stream(self) -> Stream:
        """A new stream that does not synchronize with the legacy default stream."""

    @abstractmethod
    def current(self) -> int:
        """Handle of the current stream."""

    @abstractmethod
    def order(self, first: Stream | None, then: Stream | None) -> None:
        """Make later operations on ``then`` run after those on ``first``; None is the current stream."""

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

    @abstractmethod
    def elapsed(self, body: Callable[[], object], delay: float = 0.0) -> float:
        """Seconds of the device between events around the operations of ``body``; blocks the host.

        With a ``delay`` the device does not begin before the host has posted all of them.
        """

    @abstractmethod
    def adopt(self, array: Any) -> Array:
        """An array of the library in the memory of one with ``__cuda_array_interface__``."""


class CupyKit(Kit):
    """CuPy."""

    name = family = "cupy"
    _SPIN = r"""
    extern "C" __global__ void spin(unsigned long long nanoseconds) {
        unsigned long long began, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
        do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - began < nanoseconds);
    }
    """

    def __init__(self, device: int = 0) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self._cupy.cuda.Device(device).use()
        self._spin = self._cupy.RawKernel(self._SPIN, "spin")

    def array(self, values: Host) -> Array:
        return self._cupy.asarray(values)

    def full(self, count: int, value: float, dtype: str = "float32") -> Array:
        return self._cupy.full(count, value, dtype)

    def numpy(self, array: Array) -> Host:
        return array.get()

    def ptr(self, array: Array) -> int:
        return int(array.data.ptr)

    def compute(self, out: Array, formula: Callable[..., Any], *inputs: Array) -> None:
        out[...] = formula(self._cupy, *inputs)

    def stream(self) -> Stream:
        return self._cupy.cuda.Stream(non_blocking=True)

    def current(self) -> int:
        return int(self._cupy.cuda.get_current_stream().ptr)

    def order(self, first: Stream | None, then: Stream | None) -> None:
        here = self._cupy.cuda.get_current_stream()
        (then or here).wait_event((first or here).record())

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
                with _quietly():
                    stream.end_capture()
                raise
            graph = stream.end_capture()
        return Replay(lambda: graph.launch(self._cupy.cuda.get_current_stream()), lambda: None)

    def elapsed(self, body: Callable[[], object], delay: float = 0.0) -> float:
        cuda = self._cupy.cuda
        first, last = cuda.Event(), cuda.Event()
        if delay:
            self.delay(delay)
        first.record()
        body()
        last.record()
        last.synchronize()
        return float(cuda.get_elapsed_time(first, last)) / 1e3

    def adopt(self, array: Any) -> Array:
        return self._cupy.asarray(array)


class TorchKit(Kit):
    """torch on a CUDA device."""

    name, family = "torch", "torch_cuda"
    _CALIBRATION = 20_000_000

    def __init__(self, device: int = 0) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._cuda = self._torch.cuda
        self._cuda.set_device(device)
        self._rate = 0.0

    def array(self, values: Host) -> Array:
        return self._torch.from_numpy(np.array(values, order="C")).cuda()

    def full(self, count: int, value: float, dtype: str = "float32") -> Array:
        return self._torch.full((count,), value, dtype=getattr(self._torch, dtype), device="cuda")

    def numpy(self, array: Array) -> Host:
        return array.detach().cpu().numpy()

    def ptr(self, array: Array) -> int:
        return int(array.data_ptr())

    def compute(self, out: Array, formula: Callable[..., Any], *inputs: Array) -> None:
        out[...] = formula(self._torch, *inputs)

    def stream(self) -> Stream:
        return _TorchStream(self._cuda)

    def current(self) -> int:
        return int(self._cuda.current_stream().cuda_stream)

    def order(self, first: Stream | None, then: Stream | None) -> None:
        here = self._cuda.current_stream()
        (then.stream if then else here).wait_stream(first.stream if first else here)

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

    def elapsed(self, body: Callable[[], object], delay: float = 0.0) -> float:
        first, last = (self._cuda.Event(enable_timing=True) for _ in range(2))
        if delay:
            self.delay(delay)
        first.record()
        body()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def adopt(self, array: Any) -> Array:
        return self._torch.as_tensor(array, device="cuda")


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

    name = family = "simulated"
    simulated = True

    def __init__(self, device: int = 0) -> None:
        from tests.simulated_nccl import arrays

        self._arrays = arrays
        self._sim = arrays.simulation()

    def array(self, values: Host) -> Array:
        return self._arrays.array(values)

    def full(self, count: int, value: float, dtype: str = "float32") -> Array:
        return self._arrays.full(count, value, dtype)

    def numpy(self, array: Array) -> Host:
        return array.numpy()

    def ptr(self, array: Array) -> int:
        return int(array.ptr)

    def compute(self, out: Array, formula: Callable[..., Any], *inputs: Array) -> None:
        out._kernel("compute", lambda own, *given: np.copyto(own, formula(np, *given)), *inputs)

    def stream(self) -> Stream:
        return self._arrays.Stream()

    def current(self) -> int:
        return int(self._arrays.current_stream())

    def order(self, first: Stream | None, then: Stream | None) -> None:
        here = self._arrays.Stream(handle=self.current())
        (then or here).wait_for(first or here)

    def delay(self, seconds: float) -> None:
        from tests.simulated_nccl.streams import Op

        stream = self._sim.cuda.stream(self.current())
        self._sim.scheduler.put(stream, Op("delay", lambda op: time.sleep(min(seconds, 0.02))))

    @contextmanager
    def late(self, seconds: float) -> Iterator[None]:
        self.delay(seconds)
        with self._sim.hold():
            yield

    def busy(self) -> bool:
        tail = self._sim.cuda.stream(self.current()).tail
        return tail is not None and not tail.done

    def synchronize(self) -> None:
        self._sim.synchronize()

    def capture(self, stream: Stream, body: Callable[[], object]) -> Replay:
        with stream, self._sim.capture(stream.ptr, "global") as made:
            body()
        return Replay(lambda: self._sim.launch(made[0], self.current()), made[0].destroy)

    def elapsed(self, body: Callable[[], object], delay: float = 0.0) -> float:
        began = time.perf_counter()
        body()
        self._sim.synchronize()
        return time.perf_counter() - began

    def adopt(self, array: Any) -> Array:
        return self._arrays.adopt(array)


@contextmanager
def _quietly() -> Iterator[None]:
    try:
        yield
    except Exception:  # the error that invalidated the capture is being raised
        pass


KITS: dict[str, type[Kit]] = {"cupy": CupyKit, "torch": TorchKit, "simulated": SimulatedKit}
_kits: dict[str, Kit] = {}


def kit(name: str, device: int = 0) -> Kit:
    """The kit with a name, in this process; the first call selects its device."""
    if name not in _kits:
        _kits[name] = KITS[name](device)
    return _kits[name]
