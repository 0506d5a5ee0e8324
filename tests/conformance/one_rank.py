"""Checks one GPU and NCCL with one rank, using only the protocols of ``unicoll.devices.device_runtime`` and
``unicoll.device_collectives.interface``.

    python tests/conformance/one_rank.py [CHECK...]         on a machine with a GPU; neither CuPy nor torch is needed

prints a line of JSON for each check: its name, and the error or null. The same checks run on the simulated device
(test_one_rank.py), so that the checks are tested without a GPU, and the simulation is compared with a GPU.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nccl_comm.library.errors import IN_PROGRESS
from nccl_comm.library.nccl import FP8_CAPABILITY, FP8_VERSION
from nccl_comm.library.structs import UNIQUE_ID_BYTES
from unicoll.calls.options import CallOptions
from unicoll.device_collectives import interface
from unicoll.device_collectives.errors import error_for
from unicoll.device_collectives.interface import SUCCESS, CollectiveLibrary, Config
from unicoll.devices.device_runtime import DeviceRuntime, await_event
from unicoll.errors import DistArgumentError

PATIENCE_S = 60.0
F32 = interface.DATA_TYPES["float32"]
COUNT = 1000
_NUMPY = {
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "uint32": "uint32",
    "int64": "int64",
    "uint64": "uint64",
    "float16": "float16",
    "float32": "float32",
    "float64": "float64",
}
_ONES = {"bfloat16": b"\x80\x3f", "float8_e4m3fn": b"\x38", "float8_e5m2": b"\x3c"}
"""1.0 in the types that NumPy lacks."""


class Bench:
    """A device, a stream on it, and arrays to and from it."""

    def __init__(self, cuda: DeviceRuntime, nccl: CollectiveLibrary, device: int = 0) -> None:
        self.cuda, self.nccl, self.device = cuda, nccl, device
        cuda.set_device(device)
        self.stream = cuda.create_stream(device)
        self._event = cuda.create_event(device)
        self._device_memory: list[int] = []
        self._pinned: list[int] = []

    def close(self) -> None:
        """Release all resources."""
        self.finish()
        for ptr in self._device_memory:
            self.cuda.free(ptr)
        for ptr in self._pinned:
            self.cuda.unpin(ptr)
        self.cuda.destroy_event(self._event)
        self.cuda.destroy_stream(self.stream)

    def memory(self, nbytes: int) -> int:
        """Device memory until :meth:`close`."""
        self._device_memory.append(self.cuda.allocate(self.device, nbytes))
        return self._device_memory[-1]

    def pinned(self, nbytes: int) -> Any:
        """Page-locked memory until :meth:`close`, as an array of bytes."""
        self._pinned.append(self.cuda.pin(nbytes))
        return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(self._pinned[-1]), np.uint8)

    def up(self, values: Any) -> int:
        """Copy an array to the device."""
        data = np.ascontiguousarray(values).view(np.uint8).ravel()
        host, ptr = self.pinned(data.nbytes), self.memory(data.nbytes)
        host[:] = data
        self.cuda.copy(ptr, host.ctypes.data, data.nbytes, self.stream)
        return ptr

    def down(self, ptr: int, dtype: Any, count: int = COUNT) -> Any:
        """Copy an array from the device after the stream has finished."""
        nbytes = np.dtype(dtype).itemsize * count
        host = self.pinned(nbytes)
        self.cuda.copy(host.ctypes.data, ptr, nbytes, self.stream)
        self.finish()
        return host.view(dtype).copy()

    def finish(self) -> None:
        """Block until the stream has finished."""
        self.cuda.record(self._event, self.stream)
        assert await_event(self.cuda, self._event, time.monotonic() + PATIENCE_S), "the stream does not end"

    # --- NCCL ---

    def settle(self, comm: int, code: int, what: str) -> None:
        """Wait until a call has completed; raise its error."""
        deadline = time.monotonic() + PATIENCE_S
        while code == IN_PROGRESS:
            assert time.monotonic() < deadline, f"{what} is in progress for ever"
            time.sleep(0.0005)
            asked, code = self.nccl.comm_state(comm)
            assert asked == SUCCESS, f"ncclCommGetAsyncError answers {asked}"
        if code != SUCCESS:
            raise error_for(code, self.nccl, comm, what, None, None, None)

    def begin(self, config: Config | None = None) -> int:
        """A communicator of this rank alone."""
        code, ident = self.nccl.unique_id()
        assert (code, len(ident)) == (SUCCESS, UNIQUE_ID_BYTES)
        code, slot = self.nccl.comm_init(1, [ident], 0, config or Config())
        assert slot.value, f"ncclCommInitRankConfig: no handle, code {code}: {self.nccl.last_error()}"
        self.settle(slot.value, code, "ncclCommInitRankConfig")
        return slot.value

    def end(self, comm: int) -> None:
        """Finalize and destroy."""
        self.finish()
        self.settle(comm, self.nccl.comm_finalize(comm), "ncclCommFinalize")
        assert self.nccl.comm_destroy(comm) == SUCCESS

    @contextmanager
    def communicator(self, config: Config | None = None) -> Iterator[int]:
        """A communicator for a block."""
        comm = self.begin(config)
        yield comm
        self.end(comm)

    @contextmanager
    def window(self, comm: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Memory of NCCL's and the handle of a window on it, or 0, for a block; freed if the block raises nothing."""
        code, ptr = self.nccl.mem_alloc(nbytes)
        assert code == SUCCESS, self.nccl.last_error()
        code, slot = self.nccl.window_register(comm, ptr, nbytes, True)
        self.settle(comm, code, "ncclCommWindowRegister")
        yield ptr, slot.value or 0
        if slot.value:
            code = self.nccl.window_deregister(comm, slot.value)
            self.settle(comm, code, "ncclCommWindowDeregister")
        assert self.nccl.mem_free(ptr) == SUCCESS


# --- the device -------------------------------------------------------------------------------------------------


def device_facts_are_plausible(b: Bench) -> None:
    """Facts are plausible, and the thread has its device."""
    facts = b.cuda.facts(b.device)
    assert facts.name
    assert facts.uuid.startswith("GPU-")
    assert facts.memory > 1 << 28
    assert facts.capability >= (3, 5)
    assert len(facts.bus.split(":")) == 3
    assert b.cuda.current_device() == b.device
    assert b.cuda.device_count() > b.device
    assert b.cuda.description


def copies_on_streams_are_ordered_by_events(b: Bench) -> None:
    """Up on one stream, across on another that waits, down on a third."""
    second, third = b.cuda.create_stream(b.device, high_priority=True), b.cuda.create_stream(b.device)
    first_done, second_done = b.cuda.create_event(b.device), b.cuda.create_event(b.device)
    values = np.random.default_rng(1).integers(0, 256, 8 << 20, np.uint8)
    source, target = b.up(values), b.memory(values.nbytes)
    b.cuda.record(first_done, b.stream)
    b.cuda.wait_event(second, first_done)
    b.cuda.copy(target, source, values.nbytes, second)
    b.cuda.record(second_done, second)
    b.cuda.wait_event(third, second_done)
    host = b.pinned(values.nbytes)
    b.cuda.copy(host.ctypes.data, target, values.nbytes, third)
    b.cuda.record(second_done, third)
    assert await_event(b.cuda, second_done, time.monotonic() + PATIENCE_S)
    assert np.array_equal(host, values)
    assert b.cuda.event_done(first_done)
    assert all(b.cuda.stream_done(s) for s in (b.stream, second, third))
    for event in (first_done, second_done):
        b.cuda.destroy_event(event)
    for stream in (second, third):
        b.cuda.destroy_stream(stream)


def an_event_that_was_never_recorded_is_done(b: Bench) -> None:
    """Waiting for such an event returns at once."""
    event = b.cuda.create_event(b.device)
    assert b.cuda.event_done(event)
    b.cuda.wait_event(b.stream, event)
    b.finish()
    b.cuda.destroy_event(event)


def nothing_is_captured(b: Bench) -> None:
    """An ordinary stream, and the default one."""
    assert not b.cuda.capturing(b.stream)
    assert not b.cuda.capturing(1)
    b.cuda.ignore_captures()


def addresses_have_a_device(b: Bench) -> None:
    """Device memory has one, host memory has not, pinned or not."""
    ptr, host = b.memory(4096), b.pinned(4096)
    plain = ctypes.create_string_buffer(4096)
    assert b.cuda.device_of(ptr) == b.device
    assert b.cuda.device_of(ptr + 4000) == b.device
    assert b.cuda.device_of(host.ctypes.data) == -1
    assert b.cuda.device_of(ctypes.addressof(plain)) == -1


def threads_without_a_device_can_watch(b: Bench) -> None:
    """A thread that has never selected a device queries, records, waits and frees."""
    event, spare = b.cuda.create_event(b.device), b.cuda.create_event(b.device)
    found: list[Any] = []

    def watch() -> None:
        try:
            found.append(b.cuda.current_device())
            b.cuda.record(event, b.stream)
            b.cuda.wait_event(b.stream, event)
            found.append(await_event(b.cuda, event, time.monotonic() + PATIENCE_S))
            b.cuda.stream_done(b.stream)
            b.cuda.destroy_event(spare)
            b.cuda.unpin(b.cuda.pin(64))
            found.append(b.cuda.current_device())
        except BaseException as e:
            found.append(e)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join(2 * PATIENCE_S)
    assert found == [-1, True, -1], found
    b.cuda.destroy_event(event)


# --- NCCL -------------------------------------------------------------------------------------------------------


def a_communicator_begins_and_ends(b: Bench) -> None:
    """Finalized, and aborted; blocking, and not."""
    for config in (Config(), Config(blocking=False), Config(min_ctas=1, max_ctas=4, cga_cluster_size=1)):
        with b.communicator(config) as comm:
            assert b.nccl.comm_state(comm) == (SUCCESS, SUCCESS)
    assert b.nccl.comm_abort(b.begin()) == SUCCESS


def reductions_of_one_rank_are_its_values(b: Bench) -> None:
    """All reducing operations and reductions on float32."""
    values = np.arange(COUNT, dtype=np.float32)
    with b.communicator() as comm:
        source = b.up(values)
        for op in (interface.SUM, interface.PROD, interface.MAX, interface.MIN, interface.AVG):
            for name in ("all_reduce", "reduce_scatter"):
                target = b.up(np.zeros_like(values))
                call = getattr(b.nccl, name)
                b.settle(comm, call(source, target, COUNT, F32, op, comm, b.stream), name)
                assert np.array_equal(b.down(target, np.float32), values), (name, op)
            target = b.up(np.zeros_like(values))
            b.settle(comm, b.nccl.reduce(source, target, COUNT, F32, op, 0, comm, b.stream), "reduce")
            assert np.array_equal(b.down(target, np.float32), values), ("reduce", op)


def all_element_types_are_reduced(b: Bench) -> None:
    """The codes of the table are NCCL's: the sum of one rank's ones is one, of the right size."""
    least = b.cuda.facts(b.device).capability
    with b.communicator() as comm:
        for name, code in interface.DATA_TYPES.items():
            if name.startswith("float8") and (b.nccl.version < FP8_VERSION or least < FP8_CAPABILITY):
                continue
            one = _ONES.get(name) or np.ones(1, _NUMPY[name]).tobytes()
            data = np.frombuffer(one * COUNT, np.uint8)
            source, target = b.up(data), b.up(np.zeros(len(data) + 16, np.uint8))
            b.settle(
                comm, b.nccl.all_reduce(source, target, COUNT, code, interface.SUM, comm, b.stream), name
            )
            found = b.down(target, np.uint8, len(data) + 16)
            assert found[: len(data)].tobytes() == data.tobytes(), name
            assert not found[len(data) :].any(), f"{name}: more was written than {COUNT} elements"


def moves_of_one_rank_are_copies(b: Bench) -> None:
    """Broadcast, all_gather, a message to oneself, and what newer versions have natively."""
    values = np.random.default_rng(2).random(COUNT).astype(np.float32)
    n = b.nccl
    calls: dict[str, Callable[[int, int, int], int]] = {
        "broadcast": lambda s, t, c: n.broadcast(s, t, COUNT, F32, 0, c, b.stream),
        "all_gather": lambda s, t, c: n.all_gather(s, t, COUNT, F32, c, b.stream),
        "all_to_all": lambda s, t, c: n.all_to_all(s, t, COUNT, F32, c, b.stream),
    }
    with b.communicator() as comm:
        source = b.up(values)
        for name, call in calls.items():
            if n.has(name):
                target = b.up(np.zeros_like(values))
                b.settle(comm, call(source, target, comm), name)
                assert np.array_equal(b.down(target, np.float32), values), name
        target = b.up(np.zeros_like(values))
        assert n.group_start() == SUCCESS
        assert n.send(source, COUNT, F32, 0, comm, b.stream) in (SUCCESS, IN_PROGRESS)
        assert n.recv(target, COUNT, F32, 0, comm, b.stream) in (SUCCESS, IN_PROGRESS)
        b.settle(comm, n.group_end(), "ncclGroupEnd")
        assert np.array_equal(b.down(target, np.float32), values)


def factors_are_multiplied_in(b: Bench) -> None:
    """A sum with a factor from host memory, float32 and float64."""
    for dtype in (np.float32, np.float64):
        values = np.arange(COUNT, dtype=dtype)
        code = interface.DATA_TYPES[np.dtype(dtype).name]
        with b.communicator() as comm:
            source, target = b.up(values), b.up(np.zeros_like(values))
            made, op = b.nccl.premul_sum(np.array(2.5, dtype).tobytes(), code, comm)
            assert made == SUCCESS
            assert op > interface.AVG
            b.settle(comm, b.nccl.all_reduce(source, target, COUNT, code, op, comm, b.stream), "premul_sum")
            assert np.array_equal(b.down(target, dtype), 2.5 * values)
            assert b.nccl.redop_destroy(op, comm) == SUCCESS


def calls_can_have_options(b: Bench) -> None:
    """Every function that takes some, with hints; an algorithm that there is not is passed over on request."""
    n = b.nccl
    if not n.has("with_options"):
        return
    values = np.arange(COUNT, dtype=np.float32)
    hints = n.with_options(CallOptions(min_ctas=1, max_ctas=2, cta_policy="default", profiler_tag=7))
    calls: dict[str, Callable[[interface.Operations, int, int, int], int]] = {
        "all_reduce": lambda o, s, t, c: o.all_reduce(s, t, COUNT, F32, interface.SUM, c, b.stream),
        "broadcast": lambda o, s, t, c: o.broadcast(s, t, COUNT, F32, 0, c, b.stream),
        "reduce": lambda o, s, t, c: o.reduce(s, t, COUNT, F32, interface.SUM, 0, c, b.stream),
        "all_gather": lambda o, s, t, c: o.all_gather(s, t, COUNT, F32, c, b.stream),
        "reduce_scatter": lambda o, s, t, c: o.reduce_scatter(s, t, COUNT, F32, interface.SUM, c, b.stream),
        "all_to_all": lambda o, s, t, c: o.all_to_all(s, t, COUNT, F32, c, b.stream),
    }
    with b.communicator() as comm:
        source = b.up(values)
        for name, call in calls.items():
            target = b.up(np.zeros_like(values))
            b.settle(comm, call(hints, source, target, comm), name)
            assert np.array_equal(b.down(target, np.float32), values), name
        unknown = n.with_options(CallOptions(algorithm="no such algorithm", force_algorithm=False))
        target = b.up(np.zeros_like(values))
        b.settle(comm, calls["all_reduce"](unknown, source, target, comm), "all_reduce")
        assert np.array_equal(b.down(target, np.float32), values)


def a_communicator_can_be_split(b: Bench) -> None:
    """With a color there is a new one that works, without there is none."""
    with b.communicator() as comm:
        code, slot = b.nccl.comm_split(comm, 0, 0, Config())
        b.settle(comm, code, "ncclCommSplit")
        child = slot.value
        assert child, "the parent is through, and the child's handle is not there"
        b.settle(child, b.nccl.comm_state(child)[1], "the child")
        values = np.arange(COUNT, dtype=np.float32)
        source, target = b.up(values), b.up(np.zeros_like(values))
        b.settle(
            child, b.nccl.all_reduce(source, target, COUNT, F32, interface.SUM, child, b.stream), "all_reduce"
        )
        assert np.array_equal(b.down(target, np.float32), values)
        b.end(child)
        code, slot = b.nccl.comm_split(comm, None, 0, Config())
        b.settle(comm, code, "ncclCommSplit")
        assert slot.value is None


def nccls_memory_can_be_registered(b: Bench) -> None:
    """Memory of NCCL's is the device's; a window on it can be made and given back."""
    if not b.nccl.has("window_register"):
        return
    with b.communicator() as comm, b.window(comm, 2 << 20) as (ptr, _):
        assert b.cuda.device_of(ptr) == b.device
        values = np.arange(COUNT, dtype=np.float32)
        b.cuda.copy(ptr, b.up(values), values.nbytes, b.stream)
        b.settle(comm, b.nccl.all_reduce(ptr, ptr, COUNT, F32, interface.SUM, comm, b.stream), "all_reduce")
        assert np.array_equal(b.down(ptr, np.float32), values)


def a_rank_writes_and_signals_to_itself(b: Bench) -> None:
    """unicoll sets one-sided operations of NCCL 2.29 and 2.30 up by a signal of each rank to itself."""
    if not b.nccl.has("put_signal"):
        return
    with b.communicator() as comm, b.window(comm, 2 << 20) as (ptr, window):
        if window and b.nccl.signal(0, 0, 0, 0, comm, b.stream) == SUCCESS:  # else there is no transport
            b.settle(comm, b.nccl.wait_signal([(0, 1)], comm, b.stream), "ncclWaitSignal")
            values = np.arange(COUNT, dtype=np.float32)
            b.cuda.copy(ptr, b.up(values), values.nbytes, b.stream)
            code = b.nccl.put_signal(ptr, COUNT, F32, 0, window, 1 << 20, 0, 0, 0, comm, b.stream)
            b.settle(comm, code, "ncclPutSignal")
            b.settle(comm, b.nccl.wait_signal([(0, 1)], comm, b.stream), "ncclWaitSignal")
            assert np.array_equal(b.down(ptr + (1 << 20), np.float32), values)
        b.finish()


def invalid_arguments_are_refused(b: Bench) -> None:
    """An element type that there is not: an argument error, and a blocking communicator can be used after it."""
    with b.communicator(Config(blocking=True)) as comm:
        source = b.up(np.zeros(COUNT, np.float32))
        code = b.nccl.all_reduce(source, source, COUNT, 99, interface.SUM, comm, b.stream)
        error = error_for(code, b.nccl, comm, "all_reduce", None, None, None)
        assert type(error) is DistArgumentError, error
        assert b.nccl.last_error(), "NCCL has no words for it"
        b.settle(
            comm, b.nccl.all_reduce(source, source, COUNT, F32, interface.SUM, comm, b.stream), "all_reduce"
        )


def a_communicator_can_be_revoked(b: Bench) -> None:
    """It can be destroyed after that."""
    if not b.nccl.has("comm_revoke"):
        return
    comm = b.begin()
    b.settle(comm, b.nccl.comm_revoke(comm), "ncclCommRevoke")
    assert b.nccl.comm_abort(comm) == SUCCESS


CHECKS: list[Callable[[Bench], None]] = [
    device_facts_are_plausible,
    copies_on_streams_are_ordered_by_events,
    an_event_that_was_never_recorded_is_done,
    nothing_is_captured,
    addresses_have_a_device,
    threads_without_a_device_can_watch,
    a_communicator_begins_and_ends,
    reductions_of_one_rank_are_its_values,
    all_element_types_are_reduced,
    moves_of_one_rank_are_copies,
    factors_are_multiplied_in,
    calls_can_have_options,
    a_communicator_can_be_split,
    nccls_memory_can_be_registered,
    a_rank_writes_and_signals_to_itself,
    invalid_arguments_are_refused,
    a_communicator_can_be_revoked,
]


def run(check: Callable[[Bench], None], cuda: DeviceRuntime, nccl: CollectiveLibrary) -> None:
    """Run one check on a new Bench."""
    bench = Bench(cuda, nccl)
    check(bench)
    bench.close()


def main(names: Sequence[str]) -> int:
    """The checks of these names, or all, on this machine's GPU; the exit code is the number of those that failed."""
    from nccl_comm.library import locate
    from unicoll.devices import runtimes

    cuda, nccl = runtimes.runtime("cuda"), locate.nccl()
    print(json.dumps({"cuda": cuda.description, "nccl": interface.describe(nccl)}), flush=True)
    failed = 0
    for check in [check for check in CHECKS if not names or check.__name__ in names]:
        began, error = time.monotonic(), None
        try:
            run(check, cuda, nccl)
        except BaseException as e:
            failed += 1
            where = traceback.extract_tb(e.__traceback__)[-1]
            error = f"{type(e).__name__}: {e} ({where.name}, line {where.lineno})"
        print(
            json.dumps({"check": check.__name__, "error": error, "s": round(time.monotonic() - began, 3)}),
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
