"""The device runtime of SYCL by torch, with a stand-in for ``torch.xpu`` whose names are checked against torch's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from unicoll.arrays import torch_tensors
from unicoll.arrays.types import BY_NAME
from unicoll.devices import runtimes
from unicoll.devices.device_runtime import DeviceError
from unicoll.devices.sycl import load
from unicoll.devices.sycl.torch_runtime import TorchRuntime
from xccl_comm.library import locate

torch = pytest.importorskip("torch")


class Stream:
    """A stream, whose work is done at once."""

    def __init__(self, device: Any = 0, priority: int = 0) -> None:
        self.device = torch.device("cpu")  # of the tensors that are copied on it
        self.priority = priority
        self.sycl_queue = id(self)
        self.waited: list[Any] = []
        self.busy = False

    def query(self) -> bool:
        return not self.busy

    def synchronize(self) -> None:
        self.busy = False

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.timing = enable_timing
        self.stream: Any = None

    def record(self, stream: Any = None) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.stream is None or self.stream.query()

    def elapsed_time(self, end: Any) -> float:
        return 1500.0 if self.timing and end.timing else 0.0


class Xpu:
    """A stand-in for ``torch.xpu`` with two devices."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.index = 0
        self.current = [Stream(), Stream()]
        self.capturing = self.initialized = False
        self.entered: list[Any] = []

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return len(self.current)

    def current_device(self) -> int:
        return self.index

    def set_device(self, device: int) -> None:
        self.index, self.initialized = device, True

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(name="Intel GPU", total_memory=1 << 34, uuid=f"uuid-{device}")

    def can_device_access_peer(self, device: int, peer: int) -> bool:
        return device != peer

    def current_stream(self, device: int) -> Any:
        return self.current[device]

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.entered.append(stream)
        yield


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Xpu]:
    """torch with the stand-in, as the process's SYCL devices; their memory, and page-locked memory, is any memory."""
    made, empty = Xpu(), torch.empty

    def empty_on_host(*shape: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Any:
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "xpu", made)
    monkeypatch.setattr(torch, "empty", empty_on_host)
    runtimes.install("xpu", None)
    yield made
    runtimes.install("xpu", None)


def test_the_stand_in_has_torchs_names() -> None:
    for name in vars(Xpu):
        if not name.startswith("_"):
            assert hasattr(torch.xpu, name), name
    for mine, theirs in ((Stream, torch.xpu.Stream), (Event, torch.xpu.Event)):
        for name in vars(mine):
            if not name.startswith("_"):
                assert hasattr(theirs, name), name


def test_devices_are_torchs(monkeypatch: pytest.MonkeyPatch, xpu: Xpu) -> None:
    monkeypatch.setattr(locate.LOCATOR, "_found", None)
    runtime: Any = runtimes.runtime("xpu")
    assert isinstance(runtime, TorchRuntime)
    assert runtime.description.startswith("SYCL by torch ")
    assert (runtime.device_count(), runtime.has_gpus(), runtime.current_device()) == (2, True, -1)
    runtime.set_device(1)
    assert (runtime.current_device(), xpu.index) == (1, 1)
    facts = runtime.facts(1)
    assert (facts.name, facts.uuid, facts.memory) == ("Intel GPU", "GPU-uuid-1", 1 << 34)
    assert runtime.peer_access(0, 1) == (True, False)
    assert locate.serves_xpu()


def test_streams_and_events_are_torchs(xpu: Xpu) -> None:
    runtime: Any = runtimes.runtime("xpu")
    own = runtime.create_stream(0, high_priority=True)
    current = runtime.current_stream(0)
    assert current == xpu.current[0].sycl_queue
    first, last = (runtime.create_event(0, timing=True) for _ in range(2))
    assert runtime.event_done(first)
    xpu.current[0].busy = True
    runtime.record(first, current)
    assert (runtime.event_done(first), runtime.stream_done(current), runtime.stream_done(own)) == (
        False,
        False,
        True,
    )
    runtime.wait_event(own, first)
    made = runtime._streams[own]
    assert (made.priority, [event.stream for event in made.waited]) == (-1, [xpu.current[0]])
    runtime.record(last, own)
    assert runtime.elapsed(first, last) == 1.5
    xpu.initialized = xpu.capturing = True
    assert (runtime.capturing(current), runtime.capturing(own)) == (True, False)
    runtime.destroy_event(first)
    runtime.destroy_stream(own)


def test_dpctls_arrays_are_refused_beside_torchs_devices(xpu: Xpu) -> None:
    runtime: Any = runtimes.runtime("xpu")
    for refused in (runtime.place_of, runtime.default_queue):
        with pytest.raises(dist.DistTypeError, match=r"torch\.from_dlpack"):
            refused(0)


def test_errors_name_torchs_function(monkeypatch: pytest.MonkeyPatch, xpu: Xpu) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("XPU out of memory")

    runtime = runtimes.runtime("xpu")
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(DeviceError, match=r"torch\.empty: XPU out of memory"):
        runtime.allocate(0, 64)


def test_memory_is_copied_by_address_on_a_stream(xpu: Xpu) -> None:
    runtime: Any = runtimes.runtime("xpu")
    stream = runtime.create_stream(0)
    ptr, pinned = runtime.allocate(0, 64), runtime.pin(64)
    source = np.arange(64, dtype=np.uint8)
    result = np.zeros(32, np.uint8)
    runtime.copy(ptr, source.ctypes.data, 64, stream)
    runtime.copy(pinned, ptr, 64, stream)
    runtime.copy(result.ctypes.data, pinned + 16, 32, stream)
    assert (result == source[16:48]).all()
    assert [made.sycl_queue for made in xpu.entered] == [stream] * 3
    runtime.free(ptr)
    runtime.unpin(pinned)
    assert not runtime._memory


def test_a_tensor_is_ordered_by_torchs_current_stream(xpu: Xpu) -> None:
    adapt = torch_tensors._torch_on_device(torch, "xpu")
    tensor = torch.arange(6.0).reshape(2, 3)
    buffer = adapt(tensor.T, BY_NAME["float32"], SimpleNamespace(index=1))
    assert (str(buffer.device), buffer.shape, buffer.count) == ("xpu:1", (3, 2), 6)
    assert buffer.stream == xpu.current[1].sycl_queue
    assert buffer.unpack is not None
    xpu.current[1] = Stream()
    assert buffer.current_stream is not None
    assert buffer.current_stream() == xpu.current[1].sycl_queue


def test_there_is_no_device_without_torch_for_xpu_and_dpctl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_LEVEL_ZERO", "libno-such-driver.so.1")
    monkeypatch.setattr(locate.LOCATOR, "_found", None)
    monkeypatch.delitem(sys.modules, "dpctl", raising=False)
    runtimes.install("xpu", None)
    reason = runtimes.reason_against("xpu")
    assert reason is not None
    assert reason.startswith("Intel's driver for GPUs cannot be loaded: libno-such-driver.so.1")
    with pytest.raises(dist.BackendUnavailableError, match="Intel's driver"):
        runtimes.runtime("xpu")
    monkeypatch.setattr(load, "_LEVEL_ZERO", None)  # the process itself
    monkeypatch.setitem(sys.modules, "dpctl", None)
    assert "need a torch for XPU, imported before, or dpctl" in str(runtimes.reason_against("xpu"))
    assert not locate.serves_xpu()
