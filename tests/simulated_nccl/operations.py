"""Operations, groups and memory of the simulated NCCL."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import cast

from nccl_comm.library import interface
from nccl_comm.library.interface import AVG, IN_PROGRESS, SUCCESS
from tests.simulated_nccl.calls import SET_UP_BY_WINDOWS, Calls, Refused, Slot
from tests.simulated_nccl.communicators import Communicator, Result, Task
from tests.simulated_nccl.cuda import Simulation
from tests.simulated_nccl.reductions import NAMES, PREMUL_SUM, REDUCING, Signature, element
from tests.simulated_nccl.streams import Range, Stream
from tests.simulated_nccl.thread_rules import ActiveCalls, Kind
from unicoll.backend.options import CallOptions

__all__ = ["Operations"]

_FP8_SINCE = 22400
_FIRST_FP8 = 10
_BUILT_IN_OPS = 5
_COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all")
_WITHOUT_OPTIONS = ("send", "recv", "put_signal", "signal", "wait_signal")
_RING = frozenset(("ring",))
_ALGORITHMS = {
    "all_reduce": _RING | {"tree"},
    "broadcast": _RING,
    "reduce": _RING,
    "all_gather": _RING,
    "reduce_scatter": _RING,
}
"""The algorithms of a GPU without NVLink and switches; an all_to_all has none, since it is sends and receives."""


class _Group(threading.local):
    """The calling thread's group call."""

    depth = 0
    error = SUCCESS

    def __init__(self) -> None:
        self.tasks: dict[Communicator, list[Task]] = {}
        self.ends: list[Callable[[], object]] = []  # what frees communicators
        self.calls: dict[Communicator, ExitStack] = {}

    def enter(self, comm: Communicator, active_calls: ActiveCalls, name: str) -> None:
        """The thread is in NCCL for a communicator from its first operation to the end of the group call."""
        if comm not in self.calls:
            self.calls[comm] = ExitStack()
            self.calls[comm].enter_context(active_calls.enter(name, Kind.ISSUE, comm))

    def leave(self) -> None:
        """End the group call."""
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.close()


class Operations(Calls):
    """The functions that put work on streams, and those for memory."""

    def __init__(self, simulation: Simulation, version: int = 23007, prompt: bool = False) -> None:
        super().__init__(simulation, version, prompt)
        self._group = _Group()
        self._own_memory: set[int] = set()

    # --- groups ---

    def group_start(self) -> int:
        self._group.depth += 1
        return SUCCESS

    def group_end(self) -> int:
        group = self._group
        if group.depth == 0:
            self._last_error = "ncclGroupEnd: not in a group call"
            return Result.INVALID_USAGE
        group.depth -= 1
        if group.depth:
            return SUCCESS
        tasks, group.tasks = group.tasks, {}
        error, group.error = group.error, SUCCESS
        try:
            return error or self._call(self._launch, tasks)
        finally:
            group.leave()
            ends, group.ends = group.ends, []
            for end in ends:
                end()

    def _launch(self, tasks: dict[Communicator, list[Task]]) -> int:
        result = SUCCESS
        for comm, theirs in tasks.items():
            own = [t.kind for t in theirs if t.peer == comm.rank]
            if own.count("send") != own.count("recv"):
                raise Refused(
                    Result.INVALID_USAGE, "sending to oneself without a matching receive in the group"
                )
            if len({t.stream.capture for t in theirs}) > 1:
                raise Refused(
                    Result.INVALID_USAGE, "the streams of a group are not all captured by the same graph"
                )
        for comm, theirs in tasks.items():
            comm.link(theirs)
        for comm, theirs in tasks.items():
            if comm.config.blocking and not comm.connect():
                raise Refused(Result.INTERNAL_ERROR, "the communicator was stopped while it connected")
            at_once = comm.config.blocking or (self._prompt and comm.connected)
            comm.launch(theirs, at_once)
            result = result if at_once else IN_PROGRESS
        return result

    def _enqueue(self, kind: str, comm: int, prepare: Callable[[Communicator], Task | None]) -> int:
        """Check an operation and add it to the group call, or to one of its own."""
        self.group_start()
        if comm in self._comms:
            self._group.enter(
                self._comms[comm], self.active_calls, f"an {kind}" if kind[0] == "a" else f"a {kind}"
            )

        def check() -> int:
            found = self._usable(comm, poison=True)
            try:
                if found.revoked or found.finalizing:
                    raise Refused(Result.INVALID_USAGE, "the communicator has been revoked or finalized")
                task = prepare(found)
            except Refused as refused:
                if not found.config.blocking:
                    found.error = refused.code
                raise
            if task is not None:
                self._group.tasks.setdefault(found, []).append(task)
            return SUCCESS

        code = self._call(check)
        self._group.error = self._group.error or code
        ended = self.group_end()
        return code or ended

    # --- operations ---

    def _element(self, dtype: int) -> int:
        if dtype not in NAMES or (dtype >= _FIRST_FP8 and self._version < _FP8_SINCE):
            raise Refused(Result.INVALID_ARGUMENT, f"no element type {dtype}")
        return element(dtype).itemsize

    def _stream(self, comm: Communicator, handle: int) -> Stream:
        stream = self._simulation.cuda.stream(handle)
        if stream.device != comm.device:
            raise Refused(Result.CUDA_ERROR, f"{stream} is of device {stream.device}, not {comm.device}")
        return stream

    def _range(self, comm: Communicator, what: str, ptr: int, nbytes: int) -> Range:
        """Check the memory of an operation."""
        if nbytes == 0:
            return (0, 0)
        block = self._simulation.memory.find(ptr) if ptr else None
        if block is None or block.freed or block.device != comm.device:
            where = "is null" if not ptr else f"{ptr:#x} is not memory of device {comm.device}"
            raise Refused(Result.INVALID_ARGUMENT, f"{what} buffer {where}")
        if ptr + nbytes > block.ptr + block.nbytes:
            self._simulation.scheduler.fault(
                f"{what} buffer of {nbytes} bytes at {ptr:#x} goes beyond {block}"
            )
            raise Refused(Result.INVALID_ARGUMENT, f"{what} buffer goes beyond its memory")
        return (ptr, nbytes)

    def _collective(
        self,
        kind: str,
        send: int,
        recv: int,
        count: int,
        dtype: int,
        comm: int,
        stream: int,
        op: int = 0,
        root: int = 0,
        options: CallOptions | None = None,
    ) -> int:
        def prepare(found: Communicator) -> Task | None:
            size = self._element(dtype)
            if count < 0 or not 0 <= root < found.size:
                raise Refused(Result.INVALID_ARGUMENT, f"{kind}: count {count}, root {root} of {found.size}")
            code, factor = self._op(found, op, dtype) if kind in REDUCING else (0, None)
            if kind in REDUCING and dtype >= _FIRST_FP8 and found.least_capability < (9, 0):
                raise Refused(
                    Result.INVALID_ARGUMENT, "FP8 reduction support begins with sm90 capable devices."
                )
            if found.size == 1 and code == AVG and dtype >= _FIRST_FP8:  # in 2.24 to 2.32.3 at least
                raise Refused(Result.INVALID_ARGUMENT, "ncclLaunchOneRank has no kernel for float8")
            target = self._stream(found, stream)
            if count == 0:
                return None
            sends, receives = _shares(kind, found.size, found.rank == root)
            done = count
            if found.size == 1 and code == PREMUL_SUM and self._version < 22907:  # its onerank.cu rounds down
                blocks, pack = min(32, -(-count * size // 16384)), 16 // size
                done = min(count, blocks * -(-(count // blocks) // pack) * pack)
            return Task(
                kind,
                target,
                self._range(found, "send", send, sends * done * size),
                self._range(found, "receive", recv, receives * done * size),
                Signature(kind, done, dtype, code, root, options),
                factor,
            )

        return self._enqueue(kind, comm, prepare)

    def _op(self, comm: Communicator, op: int, dtype: int) -> tuple[int, bytes | None]:
        if 0 <= op < _BUILT_IN_OPS:
            return op, None
        found = comm.factors.get(op)
        if found is None or found[0] != dtype:
            raise Refused(Result.INVALID_ARGUMENT, f"no reduction {op} for element type {dtype}")
        return PREMUL_SUM, found[1]

    def all_reduce(
        self,
        send: int,
        recv: int,
        count: int,
        dtype: int,
        op: int,
        comm: int,
        stream: int,
        options: CallOptions | None = None,
    ) -> int:
        return self._collective("all_reduce", send, recv, count, dtype, comm, stream, op, options=options)

    def broadcast(
        self,
        send: int,
        recv: int,
        count: int,
        dtype: int,
        root: int,
        comm: int,
        stream: int,
        options: CallOptions | None = None,
    ) -> int:
        return self._collective(
            "broadcast", send, recv, count, dtype, comm, stream, root=root, options=options
        )

    def reduce(
        self,
        send: int,
        recv: int,
        count: int,
        dtype: int,
        op: int,
        root: int,
        comm: int,
        stream: int,
        options: CallOptions | None = None,
    ) -> int:
        return self._collective("reduce", send, recv, count, dtype, comm, stream, op, root, options)

    def all_gather(
        self,
        send: int,
        recv: int,
        count: int,
        dtype: int,
        comm: int,
        stream: int,
        options: CallOptions | None = None,
    ) -> int:
        return self._collective("all_gather", send, recv, count, dtype, comm, stream, options=options)

    def reduce_scatter(
        self,
        send: int,
        recv: int,
        count: int,
        dtype: int,
        op: int,
        comm: int,
        stream: int,
        options: CallOptions | None = None,
    ) -> int:
        return self._collective("reduce_scatter", send, recv, count, dtype, comm, stream, op, options=options)

    def all_to_all(
        self,
        send: int,
        recv: int,
        count: int,
        dtype: int,
        comm: int,
        stream: int,
        options: CallOptions | None = None,
    ) -> int:
        self._needs("ncclAlltoAll")
        return self._collective("all_to_all", send, recv, count, dtype, comm, stream, options=options)

    def with_options(self, options: CallOptions) -> interface.Operations:
        self._needs("ncclAllReduceConfig")
        collectives = {
            kind: partial(self._check_options, kind, getattr(self, kind), options=options)
            for kind in _COLLECTIVES
        }
        others = {name: getattr(self, name) for name in _WITHOUT_OPTIONS}
        return cast(interface.Operations, SimpleNamespace(version=self._version, **collectives, **others))

    def _check_options(
        self, kind: str, function: Callable[..., int], *arguments: int, options: CallOptions, **more: int
    ) -> int:
        """A collective with options. NCCL checks them before anything else, and a refusal fails no group call."""
        allowed = _chosen(options.algorithm) & _ALGORITHMS.get(kind, frozenset())
        if options.algorithm is not None and options.force_algorithm is not False and not allowed:
            self._last_error = f"algSelection {options.algorithm!r}: nothing of it can be used for {kind}"
            return Result.INVALID_ARGUMENT
        return function(*arguments, **more, options=options)

    def _message(self, kind: str, ptr: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int:
        def prepare(found: Communicator) -> Task:
            nbytes = count * self._element(dtype)
            if count < 0 or not 0 <= peer < found.size:
                raise Refused(Result.INVALID_ARGUMENT, f"{kind}: count {count}, peer {peer} of {found.size}")
            memory = self._range(found, kind, ptr, nbytes)
            target = self._stream(found, stream)
            if kind == "send":
                return Task(kind, target, reads=memory, peer=peer)
            return Task(kind, target, writes=memory, peer=peer)

        return self._enqueue(kind, comm, prepare)

    def send(self, send: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int:
        return self._message("send", send, count, dtype, peer, comm, stream)

    def recv(self, recv: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int:
        return self._message("recv", recv, count, dtype, peer, comm, stream)

    def premul_sum(self, factor: bytes, dtype: int, comm: int) -> tuple[int, int]:
        self._needs("ncclRedOpCreatePreMulSum")
        made = [0]

        def create() -> int:
            found = self._usable(comm)
            if len(factor) != self._element(dtype):
                raise Refused(
                    Result.INVALID_ARGUMENT, f"a factor of {len(factor)} bytes for element type {dtype}"
                )
            made[0] = _BUILT_IN_OPS + next(self._handles)
            found.factors[made[0]] = (dtype, bytes(factor))
            return SUCCESS

        return self._call_on("ncclRedOpCreatePreMulSum", Kind.USE, comm, create), made[0]

    def redop_destroy(self, op: int, comm: int) -> int:
        self._needs("ncclRedOpDestroy")

        def destroy() -> int:
            if self._usable(comm).factors.pop(op, None) is None:
                raise Refused(Result.INVALID_ARGUMENT, f"no reduction {op}")
            return SUCCESS

        return self._call_on("ncclRedOpDestroy", Kind.USE, comm, destroy)

    # --- memory ---

    def mem_alloc(self, nbytes: int) -> tuple[int, int]:
        self._needs("ncclMemAlloc")
        made = [0]

        def allocate() -> int:
            cuda = self._simulation.cuda
            made[0] = cuda.allocate(max(0, cuda.current_device()), nbytes)
            self._own_memory.add(made[0])
            return SUCCESS

        return self._call(allocate), made[0]

    def mem_free(self, ptr: int) -> int:
        """Unmap the memory (cuMemUnmap) without waiting for anything, unlike cudaFree."""
        self._needs("ncclMemFree")

        def free() -> int:
            self._simulation.memory.free(ptr)
            self._own_memory.discard(ptr)
            return SUCCESS

        return self._call(free)

    def window_register(self, comm: int, ptr: int, nbytes: int, symmetric: bool) -> tuple[int, Slot]:
        self._needs("ncclCommWindowRegister")
        slot = Slot()

        def register() -> int:
            found = self._usable(comm)
            memory = self._range(found, "window", ptr, nbytes)
            block = self._simulation.memory.find(ptr)
            if block is None or block.ptr not in self._own_memory:
                raise Refused(Result.CUDA_ERROR, "the memory of a window was not made by cuMemCreate")

            window = next(self._handles)

            def make() -> int:
                found.add_registration(found.windows, window, memory)
                return window

            found.defer(self._writer(slot, make))
            found.barrier(f"window at offset {found.place(window, nbytes)}")
            found.one_sided |= self._version >= SET_UP_BY_WINDOWS
            return self._begun(found) if self._version >= 22800 else self._result(found)

        return self._call_on("ncclCommWindowRegister", Kind.USE, comm, register), slot

    def window_deregister(self, comm: int, window: int) -> int:
        self._needs("ncclCommWindowDeregister")

        def deregister() -> int:
            found = self._usable(comm)
            memory = found.remove_registration(found.windows, window)
            if memory is None:
                raise Refused(Result.INVALID_ARGUMENT, f"no window {window:#x}")
            for op in self._simulation.memory.users(memory[0]):
                if op.owner is not None:
                    self._simulation.scheduler.fault(f"window deregistered before {op} has run")
            return SUCCESS

        return self._call_on("ncclCommWindowDeregister", Kind.USE, comm, deregister)

    def comm_register(self, comm: int, ptr: int, nbytes: int) -> tuple[int, int]:
        self._needs("ncclCommRegister")
        made = [0]

        def register() -> int:
            found = self._existing(comm)
            memory = self._range(found, "registered", ptr, nbytes)
            made[0] = next(self._handles)
            found.add_registration(found.buffers, made[0], memory)
            return SUCCESS

        return self._call_on("ncclCommRegister", Kind.USE, comm, register), made[0]

    def comm_deregister(self, comm: int, handle: int) -> int:
        self._needs("ncclCommDeregister")

        def deregister() -> int:
            found = self._existing(comm)
            memory = found.remove_registration(found.buffers, handle)
            if memory is None:
                raise Refused(Result.INVALID_USAGE, f"no registered memory {handle:#x}")
            for op in self._simulation.memory.users(memory[0]):
                if op.owner is not None:
                    self._simulation.scheduler.fault(f"memory deregistered before {op} has run")
            return SUCCESS

        return self._call_on("ncclCommDeregister", Kind.USE, comm, deregister)


def _chosen(selection: str | None) -> frozenset[str]:
    """The algorithms in a selection: ``"ring,tree"``, or ``"^ring"`` for all others; any case."""
    everything = frozenset(("ring", "tree", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat"))
    text = (selection or "").lower()
    named = frozenset(text.removeprefix("^").split(","))
    return everything - named if text.startswith("^") else everything & named


def _shares(kind: str, size: int, is_root: bool) -> tuple[int, int]:
    """How many times ``count`` elements a rank sends and receives."""
    root = int(is_root)
    return {
        "all_reduce": (1, 1),
        "broadcast": (root, 1),
        "reduce": (1, root),
        "all_gather": (1, size),
        "reduce_scatter": (size, 1),
        "all_to_all": (size, size),
    }[kind]
