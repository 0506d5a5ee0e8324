"""HIP as unicoll calls it, by a stand-in that is called by C's rules; and the choice between it and NVIDIA's driver."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from ctypes import c_bool, c_int, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_nccl.cuda import SimulatedCuda
from tests.support.forks import in_fork
from tests.unit.c_functions import StandIn, alike, kind, kind_of_ctypes, parse, put, putting
from tests.unit.declarations import HIP
from unicoll.devices.cuda import cuda_driver, hip_driver, load
from unicoll.devices.cuda.hip_driver import ARGUMENTS, SYMBOLS, HipDriver
from unicoll.devices.device_runtime import DeviceError, DeviceFacts, on_device
from unicoll.process.shared_library import SharedLibrary
from unicoll.run import cpu_affinity
from unicoll.run.cpu_affinity import gpu_addresses

DECLARED = parse(HIP)
STREAM, EVENT, MEMORY = 0x5556_0000_0000, 0x5557_0000_0000, 7 << 44
INVALID_VALUE, OUT_OF_MEMORY, NO_DEVICE, NOT_READY = 1, 2, 100, 600
TEXTS = {
    INVALID_VALUE: (b"hipErrorInvalidValue", b"invalid argument"),
    OUT_OF_MEMORY: (b"hipErrorOutOfMemory", b"out of memory"),
    NO_DEVICE: (b"hipErrorNoDevice", b"no ROCm-capable device is detected"),
}
PATH = "/rocm/lib/libamdhip64.so.6"


class Machine(StandIn):
    """A runtime with two devices. Each thread has a current device, 0 at first, and the code of its failed call."""

    def __init__(self, without: str = "") -> None:
        super().__init__(DECLARED, [without])
        self.now = threading.local()
        self._texts = {code: [ctypes.create_string_buffer(t) for t in texts] for code, texts in TEXTS.items()}
        self.answers |= {
            "hipRuntimeGetVersion": putting(0, 60342134, c_int),
            "hipGetDeviceCount": putting(0, 2, c_int),
            "hipDeviceGet": lambda place, ordinal: put(place, 70 + ordinal, c_int) or 0,
            "hipGetErrorName": lambda code: self._text(0, code),
            "hipGetErrorString": lambda code: self._text(1, code),
            "hipGetLastError": self._last_error,
            "hipGetDevice": lambda place: put(place, self.device, c_int) or 0,
            "hipSetDevice": self._set_device,
        }

    @property
    def device(self) -> int:
        return getattr(self.now, "device", 0)

    @property
    def last_error(self) -> int:
        return getattr(self.now, "error", 0)

    def fail(self, symbol: str, code: int) -> None:
        """Make a function return a code, which HIP keeps for the thread."""

        def answer(*_: Any) -> int:
            self.now.error = code
            return code

        self.answers[symbol] = answer

    def _text(self, which: int, code: int) -> int:
        return ctypes.addressof(self._texts[code][which]) if code in self._texts else 0

    def _last_error(self) -> int:
        found, self.now.error = self.last_error, 0
        return found

    def _set_device(self, device: int) -> int:
        self.now.device = device
        return 0 if device < 2 else INVALID_VALUE


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def driver(machine: Machine) -> HipDriver:
    return HipDriver(machine, PATH)


# --- signatures -------------------------------------------------------------------------------------------------


def test_signatures_are_those_that_hip_declares() -> None:
    for name, symbol in SYMBOLS.items():
        declared = DECLARED[symbol]
        assert len(ARGUMENTS[name]) == len(declared.types), symbol
        assert all(map(alike, ARGUMENTS[name], declared.types)), symbol
        assert kind_of_ctypes(HipDriver.results.get(name, c_int)) == kind(declared.result), symbol
    assert SYMBOLS.keys() == ARGUMENTS.keys()
    assert len(SYMBOLS) == len(DECLARED)


HEADER = next((p for p in map(Path, ("/opt/rocm/include", "/usr/include")) if (p / "hip").is_dir()), None)


@pytest.mark.skipif(HEADER is None, reason="hip_runtime_api.h is not here (apt install libamdhip64-dev)")
def test_the_declarations_are_those_of_the_header() -> None:
    assert HEADER is not None
    text = (HEADER / "hip" / "hip_runtime_api.h").read_text()
    there = parse(text.replace(" __dparm(0)", "").replace(" = NULL", ""))
    for symbol, declared in DECLARED.items():
        assert there[symbol].types == declared.types, symbol
        assert there[symbol].result == declared.result, symbol


# --- devices ----------------------------------------------------------------------------------------------------


def test_description_has_the_version_and_the_file(driver: HipDriver, machine: Machine) -> None:
    assert driver.description == f"HIP 6.3 runtime ({PATH})"
    assert machine.calls[0] == ("hipInit", (0,))
    assert driver.device_count() == 2
    assert (driver.name, driver.device_type) == ("HIP", "cuda")


def test_a_runtime_before_6_is_refused(machine: Machine) -> None:
    machine.answers["hipRuntimeGetVersion"] = putting(0, 50221153, c_int)
    with pytest.raises(DeviceError, match=r"^HIP 5\.2 runtime \(.*\) is too old: 6\.0 or newer is needed$"):
        HipDriver(machine, PATH)


def _text(words: bytes) -> Callable[..., int]:
    return lambda place, room, device: ctypes.memmove(place, words + b"\0", len(words) + 1) and 0


@pytest.mark.parametrize(
    ("ident", "uuid"),
    [
        (b"4d3c2b1a00f0e1d2", "GPU-4d3c2b1a00f0e1d2-0000:83:00.0"),
        (b"XX".ljust(16, b"\0"), "GPU-0000:83:00.0"),
    ],
)
def test_device_properties(ident: bytes, uuid: str, driver: HipDriver, machine: Machine) -> None:
    """HIP's uuid has the characters of a number; some devices have none, and the partitions of a device have one."""
    machine.answers |= {
        "hipDeviceGetName": _text(b"AMD Instinct Stand-In"),
        "hipDeviceGetPCIBusId": _text(b"0000:83:00.0"),
        "hipDeviceGetUuid": lambda place, device: ctypes.memmove(place, ident, 16) and 0,
        "hipDeviceTotalMem": putting(0, 64 << 30, c_uint64),
        "hipDeviceGetAttribute": lambda place, which, device: put(place, {23: 9, 61: 4}[which], c_int) or 0,
    }
    assert driver.facts(1) == DeviceFacts("AMD Instinct Stand-In", uuid, "0000:83:00.0", 64 << 30, (9, 4))
    assert machine.last("hipDeviceTotalMem")[1] == 71


def test_peer_access_asks_for_native_atomics(driver: HipDriver, machine: Machine) -> None:
    machine.answers |= {
        "hipDeviceCanAccessPeer": putting(0, 1, c_int),
        "hipDeviceGetP2PAttribute": putting(0, 1, c_int),
    }
    assert driver.peer_access(1, 0) == (True, True)
    assert machine.last("hipDeviceGetP2PAttribute")[1:] == (2, 71, 70)


def test_a_thread_has_a_device_once_it_was_set(driver: HipDriver, machine: Machine) -> None:
    """HIP has device 0 for every thread; that is no choice, so that LOCAL_RANK chooses."""
    assert driver.current_device() == -1
    for device in (0, 1, 1):
        driver.set_device(device)
        assert driver.current_device() == device == machine.device
    with on_device(driver, 0):
        assert (driver.current_device(), machine.device) == (0, 0)
    assert (driver.current_device(), machine.device) == (1, 1)
    driver.set_device(-1)
    assert (driver.current_device(), machine.device) == (-1, 0)
    assert [a[0] for name, a in machine.calls if name == "hipSetDevice"] == [1, 0, 1, 0]
    machine.now.device = 1  # as torch.cuda.set_device does
    assert driver.current_device() == 1


def test_streams_events_and_memory_are_made_on_their_device(driver: HipDriver, machine: Machine) -> None:
    where: list[int] = []

    def create(place: int, *_: int) -> int:
        where.append(machine.device)
        put(place, MEMORY, c_void_p)
        return 0

    symbols = ("hipStreamCreateWithPriority", "hipEventCreateWithFlags", "hipMalloc")
    machine.answers |= dict.fromkeys(symbols, create)
    machine.answers["hipDeviceGetStreamPriorityRange"] = putting(1, -1, c_int)
    driver.set_device(0)
    assert driver.create_stream(1, high_priority=True) == MEMORY
    assert driver.create_event(1) == driver.allocate(1, 0) == MEMORY
    assert where == [1, 1, 1]
    assert driver.current_device() == 0
    assert machine.last("hipStreamCreateWithPriority")[1:] == (1, -1)
    assert machine.last("hipEventCreateWithFlags")[1:] == (2,)
    assert machine.last("hipMalloc")[1:] == (1,)


# --- calls ------------------------------------------------------------------------------------------------------

CALLS: list[tuple[Callable[[HipDriver], None], str, tuple[int, ...]]] = [
    (lambda d: d.record(EVENT, STREAM), "hipEventRecord", (EVENT, STREAM)),
    (lambda d: d.wait_event(STREAM, EVENT), "hipStreamWaitEvent", (STREAM, EVENT, 0)),
    (lambda d: d.copy(MEMORY, 9, 3 << 33, STREAM), "hipMemcpyAsync", (MEMORY, 9, 3 << 33, 4, STREAM)),
    (lambda d: d.free(MEMORY), "hipFree", (MEMORY,)),
    (lambda d: d.unpin(MEMORY), "hipHostFree", (MEMORY,)),
    (lambda d: d.destroy_event(EVENT), "hipEventDestroy", (EVENT,)),
    (lambda d: d.destroy_stream(STREAM), "hipStreamDestroy", (STREAM,)),
]


FREEING = ("hipFree", "hipHostFree", "hipEventDestroy", "hipStreamDestroy")
"""Once the device has failed these have nothing to do, and raise nothing."""


@pytest.mark.parametrize(("call", "symbol", "arguments"), CALLS)
def test_calls_and_their_errors(
    call: Callable[[HipDriver], None],
    symbol: str,
    arguments: tuple[int, ...],
    driver: HipDriver,
    machine: Machine,
) -> None:
    call(driver)
    assert machine.last(symbol) == arguments
    machine.fail(symbol, OUT_OF_MEMORY)
    with pytest.raises(DeviceError, match=f"^{symbol}: hipErrorOutOfMemory: out of memory$"):
        call(driver)
    machine.fail(symbol, 719)
    if symbol in FREEING:
        call(driver)
    else:
        with pytest.raises(DeviceError, match=f"^{symbol}: error 719$") as raised:
            call(driver)
        assert raised.value.context_ended


@pytest.mark.parametrize("symbol", ["hipGetDevice", "hipSetDevice"])
def test_a_device_is_made_current_after_the_device_has_failed(
    symbol: str, driver: HipDriver, machine: Machine
) -> None:
    driver.set_device(1)
    machine.fail(symbol, 719)
    with on_device(driver, 0):
        driver.free(MEMORY)


@pytest.mark.parametrize(
    ("ask", "symbol"),
    [(lambda d: d.event_done(EVENT), "hipEventQuery"), (lambda d: d.stream_done(STREAM), "hipStreamQuery")],
)
def test_no_code_is_left_for_the_programs_next_call(
    ask: Callable[[HipDriver], bool], symbol: str, driver: HipDriver, machine: Machine
) -> None:
    """torch takes the code that HIP has kept for the thread for that of the kernel it has launched."""
    assert ask(driver) is True
    machine.fail(symbol, NOT_READY)
    assert ask(driver) is False
    assert machine.last_error == 0
    machine.fail(symbol, INVALID_VALUE)
    with pytest.raises(DeviceError, match=f"^{symbol}: hipErrorInvalidValue: invalid argument$"):
        ask(driver)
    assert machine.last_error == 0


def test_no_event_of_a_capturing_stream_is_queried(driver: HipDriver, machine: Machine) -> None:
    """HIP would make the capture invalid, also for an event that was recorded before it."""
    capturing = [1]
    machine.answers["hipStreamIsCapturing"] = lambda stream, place: put(place, capturing[0], c_int) or 0
    driver.record(EVENT, STREAM)
    assert driver.event_done(EVENT) is False
    assert "hipEventQuery" not in [name for name, _ in machine.calls]
    capturing[0] = 0
    assert driver.event_done(EVENT) is True
    assert machine.last("hipEventQuery") == (EVENT,)
    driver.record(EVENT, 0)  # which captures nothing
    capturing[0] = 1
    assert driver.event_done(EVENT) is True
    driver.destroy_event(EVENT)
    assert driver._recorded_on == {}


def test_no_event_of_a_destroyed_stream_is_queried(driver: HipDriver, machine: Machine) -> None:
    """HIP would read the stream's memory. To destroy a stream waits for its work."""
    driver.record(EVENT, STREAM)
    machine.fail("hipStreamIsCapturing", 709)
    machine.fail("hipEventQuery", INVALID_VALUE)
    assert driver.event_done(EVENT) is True
    assert machine.last_error == 0


@pytest.mark.parametrize(
    ("kind_of_memory", "managed", "ordinal", "device"),
    [(0, False, -2, -1), (1, False, 1, -1), (2, False, 1, 1), (1, True, 1, 1), (2, True, 0, 0)],
)
def test_the_device_of_an_address(
    kind_of_memory: int, managed: bool, ordinal: int, device: int, driver: HipDriver, machine: Machine
) -> None:
    """Managed memory is on the host to HIP, and one byte says that it is managed."""

    def attributes(count: int, which: int, places: int, ptr: int) -> int:
        assert list((c_int * count).from_address(which)) == [2, 8, 9]
        found = (c_void_p * count).from_address(places)
        put(found[0], kind_of_memory, c_int)
        put(found[1], managed, c_bool)
        put(found[2], ordinal, c_int)
        return 0

    machine.answers["hipDrvPointerGetAttributes"] = lambda count, which, places, ptr: (
        ctypes.memset((c_void_p * count).from_address(places)[1], 0xFF, 4) and 0
    )
    driver.device_of(MEMORY)
    machine.answers["hipDrvPointerGetAttributes"] = attributes
    assert driver.device_of(MEMORY) == device


def test_both_results_of_an_address_range_have_a_place(driver: HipDriver, machine: Machine) -> None:
    def answer(start: int, size: int, ptr: int) -> int:
        put(start, MEMORY, c_uint64)
        put(size, 4096, c_uint64)
        return 0

    machine.answers["hipMemGetAddressRange"] = answer
    assert driver.allocation(MEMORY + 99) == MEMORY


def test_a_forked_child_gets_an_error_that_names_hip(driver: HipDriver) -> None:
    def child() -> None:
        with pytest.raises(DeviceError, match=r"^hipGetDevice: HIP cannot be used .* had initialised HIP:"):
            driver.set_device(0)

    assert in_fork(child) == 0


# --- the choice -------------------------------------------------------------------------------------------------


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The libraries that can be loaded, by path."""
    found: dict[str, Any] = {}

    def open_library(path: str) -> Any:
        if path not in found:
            raise OSError(f"{path}: cannot open shared object file")
        return found[path]

    for vendor in ("CUDA", "HIP", "ROCR"):
        monkeypatch.delenv(f"UNICOLL_{vendor}_LIBRARY", raising=False)
        monkeypatch.delenv(f"{vendor}_VISIBLE_DEVICES", raising=False)
    file = SharedLibrary(["libamdhip64.so.6"], "/libamdhip64.so", "hipInit", list)
    monkeypatch.setattr(hip_driver, "FILE", file)
    monkeypatch.setattr(file, "mapped", list)
    monkeypatch.setattr(file, "loaded_from", lambda library: PATH)
    monkeypatch.setattr(hip_driver, "_KERNEL_DRIVER", "/no/such/file")
    monkeypatch.setattr(ctypes, "CDLL", open_library)
    return found


def test_hip_is_used_where_there_is_no_cuda_device(
    libraries: dict[str, Any], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = load.load()
    assert reason == "NVIDIA's driver cannot be loaded: libcuda.so.1: cannot open shared object file"
    monkeypatch.setattr(hip_driver, "_KERNEL_DRIVER", os.devnull)
    assert load.load() == (
        f"{reason}; AMD's HIP runtime cannot be loaded: libamdhip64.so.6: cannot open shared object file"
    )
    libraries["libamdhip64.so.6"] = machine
    found = load.load()
    assert isinstance(found, HipDriver)
    assert found.description == f"HIP 6.3 runtime ({PATH})"


def test_the_reason_against_hip(
    libraries: dict[str, Any], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hip_driver.VARIABLE, "/x/libamdhip64.so")
    assert "HIP runtime cannot be loaded: /x/libamdhip64.so: cannot open" in str(load.load())
    libraries["/x/libamdhip64.so"] = machine
    machine.fail("hipInit", NO_DEVICE)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert load.load() == (
        "hipInit: hipErrorNoDevice: no ROCm-capable device is detected (HIP_VISIBLE_DEVICES='')"
    )
    libraries["/x/libamdhip64.so"] = Machine("hipDrvPointerGetAttributes")
    assert f"{PATH} is not a HIP runtime: " in str(load.load())


def test_a_program_that_has_mapped_hip_gets_hip_if_it_has_a_device(
    libraries: dict[str, Any], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch for ROCm has mapped it, but so has an MPI library for both kinds of devices."""
    nvidia = SimulatedCuda.__new__(SimulatedCuda)
    monkeypatch.setattr(cuda_driver, "load", lambda: nvidia)
    libraries["/x/libamdhip64.so"] = machine
    monkeypatch.setattr(hip_driver.FILE, "candidates", lambda: iter(["/x/libamdhip64.so"]))
    assert load.load() is nvidia
    monkeypatch.setattr(hip_driver.FILE, "mapped", lambda: ["/x/libamdhip64.so"])
    assert isinstance(load.load(), HipDriver)
    machine.fail("hipInit", NO_DEVICE)
    assert load.load() is nvidia
    monkeypatch.setattr(cuda_driver, "load", lambda: "there is no CUDA device")
    assert load.load() == "there is no CUDA device"


def test_the_folders_of_torch_come_before_the_systems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "_rocm_sdk_core" / "lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    monkeypatch.setenv("ROCM_PATH", "/opt/rocm-6.4.1")
    assert list(hip_driver.library_folders()) == [
        tmp_path / "torch" / "lib",
        tmp_path / "_rocm_sdk_core" / "lib",
        Path("/opt/rocm-6.4.1/lib"),
    ]


RUNTIME = r"""
#include <string.h>
int hipRuntimeGetVersion(int *version) { *version = 60000000; return 0; }
int hipDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int hipGetDeviceCount(int *count) { *count = 2; return 0; }
int hipDeviceGetPCIBusId(char *text, int length, int device) {
    strncpy(text, device ? "0000:8A:00.3" : "0000:83:00.0", length);
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_launcher_lists_amds_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Partition 3 of a device belongs to the device's function 0 for the kernel."""
    source, library = tmp_path / "hip.c", tmp_path / "libamdhip64.so"
    others = [f"int {symbol}() {{ return 0; }}\n" for symbol in DECLARED if f"int {symbol}(" not in RUNTIME]
    source.write_text(RUNTIME + "".join(others))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.setenv(hip_driver.VARIABLE, str(library))
    monkeypatch.setattr(cpu_affinity, "_AMD_KERNEL_DRIVER", os.devnull)
    monkeypatch.setitem(cpu_affinity._PROGRAMS, "CUDA", "")
    gpu_addresses.cache_clear()
    try:
        assert gpu_addresses() == ["0000:83:00.0", "0000:8a:00.0"]
    finally:
        gpu_addresses.cache_clear()
