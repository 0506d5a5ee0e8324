"""CUDA's driver as unicoll calls it: every call seen by a stand-in that is called by C's rules."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int, c_uint64, c_void_p
from typing import Any

import pytest

from tests.support.forks import in_fork
from tests.unit.c_functions import StandIn, alike, header, parse, put, putting
from tests.unit.declarations import CUDA
from unicoll.bootstrap import environment_report
from unicoll.devices import runtimes
from unicoll.devices.cuda import cuda_driver, load
from unicoll.devices.cuda import driver as common_driver
from unicoll.devices.cuda.cuda_driver import ARGUMENTS, SYMBOLS, CudaDriver
from unicoll.devices.device_runtime import DeviceError, DeviceFacts, DeviceRuntime, await_event, on_device
from unicoll.errors import BackendUnavailableError

DECLARED = parse(CUDA)
SIGNATURES = {SYMBOLS[name]: arguments for name, arguments in ARGUMENTS.items()}
CONTEXTS = {0: 0x5555_0000_0000, 1: 0x5555_0001_0000}
STREAM, EVENT = 0x5556_0000_0000, 0x5557_0000_0000
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE, INVALID_CONTEXT, NOT_READY = 1, 2, 3, 100, 201, 600
NAMES = {
    INVALID_VALUE: (b"CUDA_ERROR_INVALID_VALUE", b"invalid argument"),
    OUT_OF_MEMORY: (b"CUDA_ERROR_OUT_OF_MEMORY", b"out of memory"),
    NOT_INITIALIZED: (b"CUDA_ERROR_NOT_INITIALIZED", b"initialization error"),
    NO_DEVICE: (b"CUDA_ERROR_NO_DEVICE", b"no CUDA-capable device is detected"),
    INVALID_CONTEXT: (b"CUDA_ERROR_INVALID_CONTEXT", b"invalid device context"),
    NOT_READY: (b"CUDA_ERROR_NOT_READY", b"device not ready"),
}


class Machine(StandIn):
    """A driver with two devices; each thread has its current context, none at first."""

    def __init__(self, without: str = "") -> None:
        super().__init__(DECLARED, [without])
        self.now = threading.local()
        self._texts = {code: [ctypes.create_string_buffer(t) for t in texts] for code, texts in NAMES.items()}
        self.answers |= {
            "cuDriverGetVersion": putting(0, 12080, c_int),
            "cuDeviceGetCount": putting(0, 2, c_int),
            "cuDeviceGet": self._device,
            "cuGetErrorName": lambda code, place: self._text(0, code, place),
            "cuGetErrorString": lambda code, place: self._text(1, code, place),
            "cuDevicePrimaryCtxRetain": lambda place, device: (
                put(place, CONTEXTS[device - 70], c_void_p) or 0
            ),
            "cuCtxGetCurrent": lambda place: put(place, self.current(), c_void_p) or 0,
            "cuCtxSetCurrent": self._set_current,
            "cuCtxGetDevice": self._current_device,
        }

    def current(self) -> int:
        return getattr(self.now, "context", 0)

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]

    def _text(self, which: int, code: int, place: int) -> int:
        if code not in self._texts:
            return INVALID_VALUE
        put(place, ctypes.addressof(self._texts[code][which]), c_void_p)
        return 0

    def _device(self, place: int, ordinal: int) -> int:
        put(place, 70 + ordinal, c_int)  # differs from the ordinal, to detect a mix-up
        return 0 if ordinal < 2 else INVALID_VALUE

    def _set_current(self, context: int) -> int:
        self.now.context = context
        return 0

    def _current_device(self, place: int) -> int:
        if not self.current():
            return INVALID_CONTEXT
        put(place, {c: d for d, c in CONTEXTS.items()}[self.current()], c_int)
        return 0


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def driver(machine: Machine) -> CudaDriver:
    return CudaDriver(machine, "libcuda.so.1")


# --- signatures -------------------------------------------------------------------------------------------------


def _hold_to(declared: dict[str, Any], other_names: dict[str, str]) -> int:
    held = 0
    for name, arguments in SIGNATURES.items():
        there = declared.get(name) or declared.get(other_names.get(name, ""))
        if there is not None:
            held += 1
            assert len(arguments) == len(there.types), name
            assert all(map(alike, arguments, there.types)), name
    return held


def test_signatures_are_those_that_cuda_declares() -> None:
    assert _hold_to(DECLARED, {}) == len(SIGNATURES) == len(DECLARED)


HEADER = header("cuda_runtime/include/cuda.h", "cu13/include/cuda.h", "cuda.h")


@pytest.mark.skipif(HEADER is None, reason="cuda.h is not here (pip install nvidia-cuda-runtime-cu12)")
def test_signatures_and_symbols_are_those_of_the_header() -> None:
    assert HEADER is not None
    text = HEADER.read_text()
    symbols = dict(re.findall(r"^ *#define (cu\w+) +(cu\w+)$", text, flags=re.M))
    assert _hold_to(parse(text), {symbol: name for name, symbol in symbols.items()}) == len(SIGNATURES)
    for name, symbol in symbols.items():
        if name.startswith(("cuDeviceGetUuid", "cuEventElapsedTime")):
            continue  # CUDA 12's header has both: _v2 supports MIG instances; drivers before 12.8 have the old one only
        assert name not in SIGNATURES, f"{name} is {symbol} in the library"


# --- devices ----------------------------------------------------------------------------------------------------


def test_description_has_the_version(driver: CudaDriver, machine: Machine) -> None:
    assert isinstance(driver, DeviceRuntime)
    assert driver.description == "CUDA 12.8 driver"
    assert CudaDriver(machine, "/x/libcuda.so").description == "CUDA 12.8 driver (/x/libcuda.so)"
    assert machine.calls[0] == ("cuInit", (0,))
    assert driver.device_count() == 2


def _text(words: bytes) -> Callable[..., int]:
    def write(place: int, room: int, device: int) -> int:
        assert room > len(words)
        ctypes.memmove(place, words + b"\0", len(words) + 1)
        return 0

    return write


def _identify(machine: Machine) -> None:
    """Set the devices' properties."""
    ident = bytes.fromhex("5f1c0d2a9b3e4c7d8e6fa1b2c3d4e5")
    machine.answers |= {
        "cuDeviceGetName": _text(b"NVIDIA Stand-In 80GB"),
        "cuDeviceGetPCIBusId": _text(b"0000:3B:00.0"),
        "cuDeviceGetUuid_v2": lambda place, device: ctypes.memmove(place, ident + bytes([device]), 16) and 0,
        "cuDeviceTotalMem_v2": putting(0, 80 << 30, c_uint64),
        "cuDeviceGetAttribute": lambda place, which, device: put(place, {75: 9, 76: 1}[which], c_int) or 0,
    }


def test_device_properties_are_queried_once(driver: CudaDriver, machine: Machine) -> None:
    _identify(machine)
    expected = DeviceFacts(
        "NVIDIA Stand-In 80GB", "GPU-5f1c0d2a-9b3e-4c7d-8e6f-a1b2c3d4e547", "0000:3b:00.0", 80 << 30, (9, 1)
    )
    assert driver.facts(1) == expected
    asked = len(machine.calls)
    assert driver.facts(1) == expected
    assert len(machine.calls) == asked


@pytest.mark.parametrize(("access", "atomics"), [(0, 0), (1, 0), (1, 1)])
def test_peer_access(access: int, atomics: int, driver: CudaDriver, machine: Machine) -> None:
    machine.answers |= {
        "cuDeviceCanAccessPeer": putting(0, access, c_int),
        "cuDeviceGetP2PAttribute": putting(0, atomics, c_int),
    }
    assert driver.peer_access(1, 0) == (bool(access), bool(atomics))
    assert [arguments[1:] for arguments in machine.of("cuDeviceCanAccessPeer")] == [(71, 70)]
    assert [arguments[1:] for arguments in machine.of("cuDeviceGetP2PAttribute")] == [(3, 71, 70)] * access


def test_an_invalid_device_raises_with_the_drivers_message(driver: CudaDriver) -> None:
    with pytest.raises(DeviceError, match=r"^cuDeviceGet: CUDA_ERROR_INVALID_VALUE: invalid argument$"):
        driver.facts(2)
    with pytest.raises(DeviceError, match="cuDeviceGet: CUDA_ERROR_INVALID_VALUE"):
        driver.set_device(2)


def test_set_device_retains_the_context_once_and_sets_it_if_it_differs(
    driver: CudaDriver, machine: Machine
) -> None:
    assert driver.current_device() == -1
    for device in (1, 1, 0, 0, 1):
        driver.set_device(device)
        assert driver.current_device() == device
    assert [d for _, d in machine.of("cuDevicePrimaryCtxRetain")] == [71, 70]
    assert machine.of("cuCtxSetCurrent") == [(CONTEXTS[1],), (CONTEXTS[0],), (CONTEXTS[1],)]


def test_threads_have_separate_devices_and_share_contexts(driver: CudaDriver, machine: Machine) -> None:
    driver.set_device(1)
    with ThreadPoolExecutor(6) as pool:
        begin = threading.Barrier(6, timeout=30)

        def work() -> tuple[int, int]:
            begin.wait()
            before = driver.current_device()
            driver.set_device(0)
            return before, driver.current_device()

        assert [task.result() for task in [pool.submit(work) for _ in range(6)]] == [(-1, 0)] * 6
    assert driver.current_device() == 1
    assert [d for _, d in machine.of("cuDevicePrimaryCtxRetain")] == [71, 70]


def test_on_device_restores_no_device(driver: CudaDriver, machine: Machine) -> None:
    with on_device(driver, 1):
        assert driver.current_device() == 1
    assert driver.current_device() == -1
    assert machine.of("cuCtxSetCurrent") == [(CONTEXTS[1],), (0,)]
    driver.set_device(-1)
    assert len(machine.of("cuCtxSetCurrent")) == 2


# --- streams and events -----------------------------------------------------------------------------------------


def test_streams_are_non_blocking_and_have_the_requested_priority(
    driver: CudaDriver, machine: Machine
) -> None:
    where: list[int] = []

    def create(place: int, flags: int, priority: int) -> int:
        where.append(machine.current())
        put(place, STREAM + priority + 16, c_void_p)
        return 0

    def priorities(lowest: int, highest: int) -> int:
        put(lowest, 0, c_int)
        put(highest, -5, c_int)
        return 0

    machine.answers |= {"cuStreamCreateWithPriority": create, "cuCtxGetStreamPriorityRange": priorities}
    driver.set_device(0)
    assert driver.create_stream(1, high_priority=True) == STREAM + 11
    assert driver.create_stream(0) == STREAM + 16
    assert where == [CONTEXTS[1], CONTEXTS[0]]
    assert driver.current_device() == 0
    assert [a[1:] for a in machine.of("cuStreamCreateWithPriority")] == [(1, -5), (1, 0)]


def test_the_device_is_restored_after_an_error(driver: CudaDriver, machine: Machine) -> None:
    machine.answers["cuMemAlloc_v2"] = lambda place, nbytes: OUT_OF_MEMORY
    driver.set_device(0)
    with pytest.raises(DeviceError, match="cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY: out of memory"):
        driver.allocate(1, 1 << 40)
    assert driver.current_device() == 0


MEMORY = 7 << 44
CALLS = {
    "cuEventRecord": (lambda d: d.record(EVENT, STREAM), (EVENT, STREAM)),
    "cuStreamWaitEvent": (lambda d: d.wait_event(STREAM, EVENT), (STREAM, EVENT, 0)),
    "cuMemcpyAsync": (lambda d: d.copy(MEMORY, 9, 3 << 33, STREAM), (MEMORY, 9, 3 << 33, STREAM)),
    "cuMemFree_v2": (lambda d: d.free(MEMORY), (MEMORY,)),
    "cuMemFreeHost": (lambda d: d.unpin(MEMORY), (MEMORY,)),
    "cuEventDestroy_v2": (lambda d: d.destroy_event(EVENT), (EVENT,)),
    "cuStreamDestroy_v2": (lambda d: d.destroy_stream(STREAM), (STREAM,)),
}


@pytest.mark.parametrize("symbol", CALLS)
def test_calls_without_a_context_are_retried_with_one(
    symbol: str, driver: CudaDriver, machine: Machine
) -> None:
    """Watchdog threads have no context; one of a device in use is taken, so that no other device is initialised."""
    call, arguments = CALLS[symbol]
    driver.set_device(1)
    machine.now.context = 0
    contexts: list[int] = []
    machine.answers[symbol] = _with_a_context(machine, lambda *_: contexts.append(machine.current()) or 0)
    call(driver)
    assert machine.of(symbol) == [arguments] * 2
    assert contexts == [CONTEXTS[1]]
    assert machine.current() == 0
    assert [d for _, d in machine.of("cuDevicePrimaryCtxRetain")] == [71]


ENDED = (4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 911)
"""The codes of cuda.h (12.9) after which "the process must be terminated and relaunched", and those of a library that
shuts down and of a destroyed context."""


@pytest.mark.parametrize("code", [*ENDED, 1, 2, 3, 400, 600, 720, 900, 999])
def test_what_frees_raises_nothing_in_a_context_that_has_ended(
    code: int, driver: CudaDriver, machine: Machine
) -> None:
    for symbol in CALLS:
        machine.answers[symbol] = lambda *arguments: code
        call, _ = CALLS[symbol]
        if code == 600 or (code in ENDED and ("Free" in symbol or "Destroy" in symbol)):
            call(driver)
        else:
            with pytest.raises(DeviceError) as raised:
                call(driver)
            assert raised.value.context_ended is (code in ENDED)


@pytest.mark.parametrize("symbol", ["cuCtxGetDevice", "cuCtxGetCurrent", "cuCtxSetCurrent"])
def test_a_device_is_made_current_in_a_context_that_has_ended(
    symbol: str, driver: CudaDriver, machine: Machine
) -> None:
    driver.set_device(1)
    machine.answers[symbol] = lambda *arguments: 719
    with on_device(driver, 0):
        driver.free(MEMORY)
    driver.set_device(-1)


def _with_a_context(machine: Machine, answer: Callable[..., int]) -> Callable[..., int]:
    return lambda *arguments: answer(*arguments) if machine.current() else INVALID_CONTEXT


RESULTS = [
    (lambda d: d.elapsed(EVENT, STREAM), "cuEventElapsedTime", (0, 2.5, c_float), 0.0025, (EVENT, STREAM)),
    (lambda d: d.capturing(STREAM), "cuStreamIsCapturing", (1, 0, c_int), False, (STREAM,)),
    (lambda d: d.capturing(STREAM), "cuStreamIsCapturing", (1, 1, c_int), True, (STREAM,)),
    (lambda d: d.capturing(STREAM), "cuStreamIsCapturing", (1, 2, c_int), True, (STREAM,)),
    (lambda d: d.pin(3 << 33), "cuMemHostAlloc", (0, MEMORY, c_void_p), MEMORY, (3 << 33, 1)),
    (lambda d: d.create_event(1), "cuEventCreate", (0, EVENT, c_void_p), EVENT, (2,)),  # without timing
    (lambda d: d.create_event(1, timing=True), "cuEventCreate", (0, EVENT, c_void_p), EVENT, (0,)),
]


def test_results_written_to_an_address(driver: CudaDriver, machine: Machine) -> None:
    for ask, symbol, answer, result, arguments in RESULTS:
        machine.answers[symbol] = putting(*answer)
        found = ask(driver)
        assert (type(found), found) == (type(result), result)
        given = list(machine.last(symbol))
        del given[answer[0]]
        assert tuple(given) == arguments
        assert driver.current_device() == -1  # which creating an object restores


def test_the_start_of_an_allocation(driver: CudaDriver, machine: Machine) -> None:
    machine.answers["cuMemGetAddressRange_v2"] = putting(0, MEMORY, c_uint64)
    assert driver.allocation(MEMORY + 99) == MEMORY
    assert machine.last("cuMemGetAddressRange_v2")[2] == MEMORY + 99


@pytest.mark.parametrize(
    ("ask", "symbol"),
    [(lambda d: d.event_done(EVENT), "cuEventQuery"), (lambda d: d.stream_done(STREAM), "cuStreamQuery")],
)
def test_queries_return_a_bool_or_raise(
    ask: Callable[[CudaDriver], bool], symbol: str, driver: CudaDriver, machine: Machine
) -> None:
    assert ask(driver) is True
    machine.answers[symbol] = lambda handle: NOT_READY
    assert ask(driver) is False
    machine.answers[symbol] = lambda handle: 700
    with pytest.raises(DeviceError, match=f"^{symbol}: error 700$"):
        ask(driver)
    assert machine.last(symbol) == ((EVENT if symbol == "cuEventQuery" else STREAM),)


def test_ignore_captures_sets_the_relaxed_mode_and_returns_the_one_before(
    driver: CudaDriver, machine: Machine
) -> None:
    modes = [1]

    def exchange(place: int) -> int:
        mode = c_int.from_address(place)
        modes.append(mode.value)
        mode.value = modes[-2]
        return 0

    machine.answers["cuThreadExchangeStreamCaptureMode"] = exchange
    assert driver.ignore_captures() == 1
    assert driver.ignore_captures(1) == 2
    assert modes == [1, 2, 1]


def test_a_query_retried_with_a_context_may_return_false(driver: CudaDriver, machine: Machine) -> None:
    machine.answers["cuEventQuery"] = _with_a_context(machine, lambda event: NOT_READY)
    machine.answers["cuStreamQuery"] = _with_a_context(machine, lambda stream: 0)
    assert driver.event_done(EVENT) is False
    assert driver.stream_done(STREAM) is True


# --- memory -----------------------------------------------------------------------------------------------------


def test_memory_is_allocated_on_the_device_with_a_positive_size(driver: CudaDriver, machine: Machine) -> None:
    where: list[int] = []

    def allocate(place: int, nbytes: int) -> int:
        where.append(machine.current())
        put(place, 7 << 44, c_uint64)
        return 0

    machine.answers["cuMemAlloc_v2"] = allocate
    assert [driver.allocate(1, 5 << 33), driver.allocate(0, 0)] == [7 << 44] * 2
    assert where == [CONTEXTS[1], CONTEXTS[0]]
    assert [nbytes for _, nbytes in machine.of("cuMemAlloc_v2")] == [5 << 33, 1]


@pytest.mark.parametrize(
    ("kind", "managed", "ordinal", "device"),
    [(2, 0, 1, 1), (2, 0, 0, 0), (1, 0, 1, -1), (0, 0, 0, -1), (1, 1, 1, 1), (2, 1, 0, 0)],
    ids=["device 1", "device 0", "pinned", "plain", "managed on the host", "managed"],
)
def test_device_of_an_address(
    kind: int, managed: int, ordinal: int, device: int, driver: CudaDriver, machine: Machine
) -> None:
    answers = {2: kind, 8: managed, 9: ordinal}

    def attributes(count: int, which: int, places: int, ptr: int) -> int:
        assert (count, ptr) == (3, 0x7F00_0000_0040)
        asked, where = (c_int * count).from_address(which), (c_void_p * count).from_address(places)
        for attribute, place in zip(asked, where, strict=True):
            put(place, answers[attribute], c_int)
        return 0

    machine.answers["cuPointerGetAttributes"] = attributes
    assert driver.device_of(0x7F00_0000_0040) == device
    machine.answers["cuPointerGetAttributes"] = lambda *_: (
        0
    )  # the driver may leave outputs unset for unknown addresses
    assert driver.device_of(0x10) == -1


# --- loading ----------------------------------------------------------------------------------------------------


def _load_with(machine: Any, monkeypatch: pytest.MonkeyPatch) -> DeviceRuntime | str:
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda path: machine)
    return cuda_driver.load()


def test_the_driver_is_loaded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _load_with(machine, monkeypatch)
    assert isinstance(found, CudaDriver)
    assert found.device_count() == 2


NO_DEVICE_REASON = "cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"


def test_the_reason_against_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for answers, without, visible, reason in (
        ({"cuInit": lambda flags: NO_DEVICE}, "", None, NO_DEVICE_REASON),
        ({"cuInit": lambda flags: NO_DEVICE}, "", "", f"{NO_DEVICE_REASON} (CUDA_VISIBLE_DEVICES='')"),
        ({"cuDeviceGetCount": putting(0, 0, c_int)}, "", None, "there is no CUDA device"),
        ({}, "cuDeviceGetUuid_v2", None, "too old"),
        ({}, "cuDeviceGetUuid_v2", None, "cuDeviceGetUuid_v2"),
    ):
        machine = Machine(without)
        machine.answers |= answers
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = _load_with(machine, monkeypatch)
        assert isinstance(found, str)
        assert reason in found


def test_without_a_driver_the_reason_names_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda_driver.VARIABLE, "/no/such/libcuda.so.1")
    reason = cuda_driver.load()
    assert isinstance(reason, str)
    assert "NVIDIA's driver cannot be loaded" in reason
    assert "/no/such/libcuda.so.1" in reason


@pytest.fixture
def _own_runtime() -> Iterator[None]:
    runtimes.install("cuda", None)
    yield
    runtimes.install("cuda", None)


@pytest.mark.usefixtures("_own_runtime")
def test_the_driver_is_the_default(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load", lambda: "no driver today")
    assert runtimes.reason_against("cuda") == "no driver today"
    with pytest.raises(BackendUnavailableError, match="no driver today"):
        runtimes.runtime("cuda")
    runtimes.install("cuda", None)
    monkeypatch.undo()
    loaded = _load_with(machine, monkeypatch)
    monkeypatch.setattr(load, "load", lambda: loaded)
    assert runtimes.reason_against("cuda") is None
    assert runtimes.runtime("cuda") is loaded


@pytest.mark.usefixtures("_own_runtime")
def test_explain_names_the_driver_and_the_devices(driver: CudaDriver, machine: Machine) -> None:
    _identify(machine)
    runtimes.install("cuda", driver)
    said = environment_report.lines({})
    start = said.index("CUDA 12.8 driver: 2 devices")
    assert said[start + 1 :] == [
        f"cuda:{n}: NVIDIA Stand-In 80GB, 80.0 GiB, compute capability 9.1, 0000:3b:00.0,"
        f" GPU-5f1c0d2a-9b3e-4c7d-8e6f-a1b2c3d4e5{70 + n:02x}"
        for n in (0, 1)
    ]
    machine.answers["cuDeviceTotalMem_v2"] = lambda place, device: NOT_INITIALIZED
    runtimes.install("cuda", CudaDriver(machine, "libcuda.so.1"))
    assert (
        environment_report.lines({})[-1]
        == "CUDA: cuDeviceTotalMem_v2: CUDA_ERROR_NOT_INITIALIZED: initialization error"
    )


def test_waiting_for_an_event_ends_at_the_deadline(driver: CudaDriver, machine: Machine) -> None:
    machine.answers["cuEventQuery"] = lambda event: NOT_READY
    assert not await_event(driver, EVENT, time.monotonic() + 0.05)
    asked = len(machine.of("cuEventQuery"))
    assert asked
    machine.answers["cuEventQuery"] = lambda event: (
        0 if len(machine.of("cuEventQuery")) > asked + 5 else NOT_READY
    )
    assert await_event(driver, EVENT, time.monotonic() + 30)


# --- forks ------------------------------------------------------------------------------------------------------


def test_a_forked_child_gets_an_error_and_does_not_hang(driver: CudaDriver, machine: Machine) -> None:
    driver.set_device(0)

    def child() -> None:
        calls = len(machine.calls)
        for call in (
            lambda: driver.set_device(0),
            lambda: driver.record(EVENT, STREAM),
            lambda: driver.event_done(EVENT),
            lambda: driver.allocate(0, 8),
            driver.device_count,
            driver.current_device,
        ):
            with pytest.raises(DeviceError, match=r"forked after .* unicoll\.spawn"):
                call()
        assert len(machine.calls) == calls

    assert in_fork(child) == 0
    driver.record(EVENT, STREAM)
    assert machine.last("cuEventRecord") == (EVENT, STREAM)


def test_deleted_drivers_are_not_kept_for_forks(machine: Machine) -> None:
    before = len(common_driver._drivers)
    made = CudaDriver(machine, "libcuda.so.1")
    assert len(common_driver._drivers) == before + 1
    del made
    gc.collect()
    assert len(common_driver._drivers) == before
