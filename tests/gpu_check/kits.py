"""What the checks need of an array library on a device: CuPy, torch, or the simulation in their place."""

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
"""A stream of the library: a context manager that makes it the current one."""


class Replay:
    """A graph: called, it is launched on the current stream; closed, it is given back."""

    def __init__(self, launch: Callable[[], object], end: Callable[[], object]) -> None:
        self._launch: Callable[[], object] | None = launch
        self._end = end

    def __call__(self) -> None:
        assert self._launch is not None
        self._launch()

    def close(self) -> None:
        """Give the graph back, once what it launched is done: NCCL ends no communicator that graphs need."""
        self._launch = None
        self._end()


class Kit(ABC):
    """One library's arrays, streams, events and graphs.

    Attributes:
        name: of the library; ``family`` in the terms of tests/families.py.
        simulated: whether times mean nothing.
    """

    name = ""
    family = ""
    simulated = False

    @abstractmethod
    def array(self, values: Host) -> Array:
        """An array with the elements of a host array."""

    @abstractmethod
    def full(self, count: int, value: float, dtype: str = "float32") -> Array:
        """A flat array with all elements alike, filled on the current stream; memory comes from the library's pool."""

    @abstractmethod
    def numpy(self, array: Array) -> Host:
        """The elements in host memory, once the current stream is there; blocks the host."""

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
        """What comes on ``then`` from now on runs after what is on ``first``; None is the current stream."""

    @abstractmethod
    def delay(self, seconds: float) -> None:
        """Keep the current stream busy for about so long."""

    @contextmanager
    def late(self, seconds: float) -> Iterator[None]:
        """Within the block the current stream has not begun with what is put on it."""
        self.delay(seconds)
        yield

    @abstractmethod
    def busy(self) -> bool:
        """Whether the current stream has work that is not done; never blocks."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the device has done everything."""

    @abstractmethod
    def capture(self, stream: Stream, body: Callable[[], object]) -> Replay:
        """Record what ``body`` puts on ``stream`` into a graph."""

    @abstractmethod
    def elapsed(self, body: Callable[[], object], delay: float = 0.0) -> float:
        """Seconds of the device between events around what ``body`` puts on the current stream; blocks the host.

        With a ``delay`` the device is kept from beginning until the host has put it all in place.
        """

    def adopt(self, array: Any) -> Array:
        """An array of the library in the memory of one with ``__cuda_array_interface__``."""
        raise NotImplementedError


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

    def __init__(self) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self._cupy.cuda.Device(0).use()
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

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._cuda = self._torch.cuda
        self._cuda.set_device(0)
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
        if not self._rate:  # cycles a second; the clock is up to speed after the first
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
    """The simulated device; there nothing runs within :meth:`late`, whatever the seconds."""

    name = family = "simulated"
    simulated = True

    def __init__(self) -> None:
        import simulated_arrays

        self._arrays = simulated_arrays
        self._sim = simulated_arrays.simulation()

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
        from simulated_streams import Op

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


@contextmanager
def _quietly() -> Iterator[None]:
    try:
        yield
    except Exception:  # what spoiled the capture is being raised
        pass


KITS: dict[str, type[Kit]] = {"cupy": CupyKit, "torch": TorchKit, "simulated": SimulatedKit}
_kits: dict[str, Kit] = {}


def kit(name: str) -> Kit:
    """The kit of that name in this process."""
    if name not in _kits:
        _kits[name] = KITS[name]()
    return _kits[name]
