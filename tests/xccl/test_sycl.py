"""The device runtime of SYCL by dpctl, and arrays, on real queues of a SYCL device, the CPU."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.support.on_ranks import on_ranks
from tests.support.order import await_true
from tests.xccl.sycl_ranks import import_dpctl, run, unavailable_reason
from unicoll.arrays.conversion import as_buffer
from unicoll.bootstrap import environment_report
from unicoll.devices import runtimes
from unicoll.devices.device_runtime import DeviceError, DeviceRuntime
from unicoll.group import backend_choice

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)

LARGE = 64 << 20


def runtime_and_stream() -> tuple[DeviceRuntime, int]:
    runtime = runtimes.runtime("xpu")
    return runtime, runtime.create_stream(0)


def bytes_at(ptr: int, nbytes: int) -> np.ndarray[Any, Any]:
    return np.frombuffer((ctypes.c_char * nbytes).from_address(ptr), np.uint8)


@on_ranks(1, start=run)
def test_events_order_streams() -> None:
    """Large copies on one stream, and copies on another after an event, which would find other values without."""
    runtime, first = runtime_and_stream()
    second = runtime.create_stream(0)
    host = [runtime.pin(LARGE), runtime.pin(LARGE)]
    device = [runtime.allocate(0, LARGE) for _ in range(2)]
    bytes_at(host[0], LARGE)[:], bytes_at(host[1], LARGE)[:] = 7, 0
    start, between, end = (runtime.create_event(0, timing=True) for _ in range(3))
    assert runtime.event_done(between)
    runtime.record(start, first)
    for _ in range(8):
        runtime.copy(device[0], host[0], LARGE, first)
    runtime.record(between, first)
    runtime.wait_event(second, between)
    runtime.copy(device[1], device[0], LARGE, second)
    runtime.copy(host[1], device[1], LARGE, second)
    runtime.record(end, second)
    await_true(lambda: runtime.event_done(end))
    assert runtime.event_done(between)
    await_true(lambda: runtime.stream_done(first) and runtime.stream_done(second))
    assert (bytes_at(host[1], LARGE) == 7).all()
    assert runtime.elapsed(start, between) > 0
    for ptr in device:
        runtime.free(ptr)
    for ptr in host:
        runtime.unpin(ptr)
    for event in (start, between, end):
        runtime.destroy_event(event)
    for stream in (first, second):
        runtime.destroy_stream(stream)


@on_ranks(1, start=run)
def test_devices_are_described_and_xccl_is_not_chosen_without_a_gpu() -> None:
    runtime: Any = runtimes.runtime("xpu")
    assert (runtime.name, runtime.device_type, runtime.device_count()) == ("SYCL", "xpu", 1)
    assert not runtime.has_gpus()
    facts = runtime.facts(0)
    assert facts.memory > 1 << 30
    assert facts.uuid.startswith("opencl:cpu:0")
    runtime.set_device(0)
    assert runtime.current_device() == 0
    assert runtime.description.startswith("SYCL by dpctl 0.")
    assert [(c.device, c.name) for c in backend_choice.choose(None)] == [("cpu", "gloo")]
    said = environment_report.lines({})
    assert [line for line in said if line.startswith("SYCL by dpctl")]
    assert [line for line in said if line.startswith("xpu:0: ")]


class ByInterface:
    """Memory of dpctl with the array interface alone, at an offset of two elements."""

    def __init__(self, array: Any, changes: dict[str, Any]) -> None:
        found = array.__sycl_usm_array_interface__
        self.__sycl_usm_array_interface__ = {**found, "offset": 2, "shape": (2,), "strides": None, **changes}
        self.array = array


class ByDLPack:
    """An array with DLPack alone."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)


@on_ranks(1, start=run)
def test_arrays_of_each_interface_become_buffers() -> None:
    whole = import_dpctl().arange(4, dtype="f4")
    start = whole.__sycl_usm_array_interface__["data"][0]
    constant = import_dpctl().arange(8, dtype="f4")
    constant.flags["W"] = False
    assert not as_buffer(constant).writable
    assert not as_buffer(constant[::2]).writable  # it is packed into a copy that is writable
    for array, offset, shape, writable in [
        (whole, 0, (4,), True),
        (whole[1:], 4, (3,), True),
        (ByInterface(whole, {}), 8, (2,), True),
        (ByInterface(whole, {"syclobj": whole.sycl_queue.sycl_context}), 8, (2,), True),
        (ByInterface(whole, {"data": (start, True)}), 8, (2,), False),
        (ByDLPack(whole), 0, (4,), True),
    ]:
        buffer = as_buffer(array)
        assert (str(buffer.device), buffer.dtype.name, buffer.shape) == ("xpu:0", "float32", shape)
        assert (buffer.ptr - start, buffer.writable) == (offset, writable)
        assert buffer.current_stream is not None
        assert buffer.current_stream() == buffer.stream
    assert as_buffer(whole[1:]).stream == as_buffer(whole).stream


@on_ranks(1, start=run)
def test_errors_name_the_function() -> None:
    strided = ByInterface(import_dpctl().arange(4, dtype="f4"), {"offset": 0, "strides": (2,)})
    with pytest.raises(dist.DistArgumentError, match="a SYCL array that is not contiguous"):
        as_buffer(strided)
    runtime, stream = runtime_and_stream()
    with pytest.raises(DeviceError, match="MemoryUSMDevice: "):
        runtime.allocate(0, 1 << 60)
    with pytest.raises(DeviceError, match="queue::memcpy: "):
        runtime.copy(1, 2, 3, stream)


@on_ranks(1, start=run)
def test_sycl_is_refused_in_a_forked_child() -> None:
    runtime, stream = runtime_and_stream()
    array = import_dpctl().arange(4, dtype="f4")
    read, write = os.pipe()
    child = os.fork()
    if not child:
        for call in (lambda: runtime.record(runtime.create_event(0), stream), lambda: as_buffer(array)):
            try:
                call()
            except DeviceError as e:
                os.write(write, f"{e}\n".encode())
        os._exit(0)
    os.close(write)
    with open(read) as said:
        assert said.read().count("forked after its parent had used it") == 2
    os.waitpid(child, 0)
