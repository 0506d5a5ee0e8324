"""Operations, groups, one-sided operations and memory of the simulated NCCL."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any, cast

from nccl_comm.library.errors import IN_PROGRESS
from tests.simulated_nccl.calls import SET_UP_BY_WINDOWS, Calls, Refused, Slot, function
from tests.simulated_nccl.communicators import Communicator, Result, Task
from tests.simulated_nccl.cuda import Simulation
from tests.simulated_nccl.reductions import NAMES, PREMUL_SUM, REDUCING, Signature, element
from tests.simulated_nccl.streams import Range, Stream
from tests.simulated_nccl.thread_rules import ActiveCalls, Kind
from unicoll.calls.options import CallOptions
from unicoll.device_collectives import interface
from unicoll.device_collectives.interface import AVG, SUCCESS

__all__ = ["Operations"]

_FP8_SINCE = 22400
_FIRST_FP8 = 10
_BUILT_IN_OPS = 5
_ARGUMENTS = {
    "all_reduce": ("send", "recv", "count", "dtype", "op", "comm", "stream"),
    "broadcast": ("send", "recv", "count", "dtype", "root", "comm", "stream"),
    "reduce": ("send", "recv", "count", "dtype", "op", "root", "comm", "stream"),
    "all_gather": ("send", "recv", "count", "dtype", "comm", "stream"),
    "reduce_scatter": ("send", "recv", "count", "dtype", "op", "comm", "stream"),
    "all_to_all": ("send", "recv", "count", "dtype", "comm", "stream"),
}
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

    def _collective(self, kind: str, *arguments: int, options: CallOptions | None = None) -> int:
        """A collective, whose arguments are NCCL's in NCCL's order."""
        if kind == "all_to_all":
            self._needs("ncclAlltoAll")
        given = dict(zip(_ARGUMENTS[kind], arguments, strict=True))
        count, dtype, root = given["count"], given["dtype"], given.get("root", 0)

        def prepare(found: Communicator) -> Task | None:
            size = self._element(dtype)
            if count < 0 or not 0 <= root < found.size:
                raise Refused(Result.INVALID_ARGUMENT, f"{kind}: count {count}, root {root} of {found.size}")
            code, factor = self._op(found, given["op"], dtype) if kind in REDUCING else (0, None)
            if kind in REDUCING and dtype >= _FIRST_FP8 and found.least_capability < (9, 0):
                raise Refused(
                    Result.INVALID_ARGUMENT, "FP8 reduction support begins with sm90 capable devices."
                )
            if found.size == 1 and code == AVG and dtype >= _FIRST_FP8:  # in 2.24 to 2.32.3 at least
                raise Refused(Result.INVALID_ARGUMENT, "ncclLaunchOneRank has no kernel for float8")
            target = self._stream(found, given["stream"])
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
                self._range(found, "send", given["send"], sends * done * size),
                self._range(found, "receive", given["recv"], receives * done * size),
                Signature(kind, done, dtype, code, root, options),
                factor,
            )

        return self._enqueue(kind, given["comm"], prepare)

    all_reduce = partialmethod(_collective, "all_reduce")
    broadcast = partialmethod(_collective, "broadcast")
    reduce = partialmethod(_collective, "reduce")
    all_gather = partialmethod(_collective, "all_gather")
    reduce_scatter = partialmethod(_collective, "reduce_scatter")
    all_to_all = partialmethod(_collective, "all_to_all")

    def _op(self, comm: Communicator, op: int, dtype: int) -> tuple[int, bytes | None]:
        if 0 <= op < _BUILT_IN_OPS:
            return op, None
        found = comm.factors.get(op)
        if found is None or found[0] != dtype:
            raise Refused(Result.INVALID_ARGUMENT, f"no reduction {op} for element type {dtype}")
        return PREMUL_SUM, found[1]

    def with_options(self, options: CallOptions) -> interface.Operations:
        self._needs("ncclAllReduceConfig")
        collectives = {kind: partial(self._with_options, options, kind) for kind in _ARGUMENTS}
        others = {name: getattr(self, name) for name in _WITHOUT_OPTIONS}
        return cast(interface.Operations, SimpleNamespace(**collectives, **others))

    def _with_options(self, options: CallOptions, kind: str, *arguments: int) -> int:
        """A collective with options. NCCL checks them before anything else, and a refusal fails no group call."""
        allowed = _chosen(options.algorithm) & _ALGORITHMS.get(kind, frozenset())
        if options.algorithm is not None and options.force_algorithm is not False and not allowed:
            self._last_error = f"algSelection {options.algorithm!r}: nothing of it can be used for {kind}"
            return Result.INVALID_ARGUMENT
        code: int = getattr(self, kind)(*arguments, options=options)  # a test may have replaced it
        return code

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

    @function("ncclRedOpCreatePreMulSum", Kind.USE, int)
    def premul_sum(self, factor: bytes, dtype: int, comm: int) -> tuple[int, int]:
        found = self._usable(comm)
        if len(factor) != self._element(dtype):
            text = f"a factor of {len(factor)} bytes for element type {dtype}"
            raise Refused(Result.INVALID_ARGUMENT, text)
        op = _BUILT_IN_OPS + next(self._handles)
        found.factors[op] = (dtype, bytes(factor))
        return SUCCESS, op

    @function("ncclRedOpDestroy", Kind.USE)
    def redop_destroy(self, op: int, comm: int) -> int:
        if self._usable(comm).factors.pop(op, None) is None:
            raise Refused(Result.INVALID_ARGUMENT, f"no reduction {op}")
        return SUCCESS

    # --- one-sided operations: the memory of both sides is in symmetric windows, with the same numbers on all ranks ---

    @function("ncclPutSignal", Kind.ISSUE)
    def put_signal(
        self,
        send: int,
        count: int,
        dtype: int,
        peer: int,
        window: int,
        offset: int,
        signal_index: int,
        context: int,
        flags: int,
        comm: int,
        stream: int,
    ) -> int:
        found = self._one_sided(comm, [peer], (signal_index, context, flags))
        if window not in found.windows:
            raise Refused(Result.INVALID_ARGUMENT, f"no window {window:#x}")
        reads = self._range(found, "put", send, count * self._element(dtype))
        if not any(s <= send and send + reads[1] <= s + n for s, n in found.windows.values()):
            raise Refused(Result.INVALID_ARGUMENT, "srcWinHost is not in a valid symmetric window")
        number = list(found.windows).index(window)
        return self._defer(found, found.put, self._stream(found, stream), peer, number, offset, reads)

    @function("ncclSignal", Kind.ISSUE)
    def signal(self, peer: int, signal_index: int, context: int, flags: int, comm: int, stream: int) -> int:
        found = self._one_sided(comm, [peer], (signal_index, context, flags))
        return self._defer(found, found.put, self._stream(found, stream), peer, 0, 0, (0, 0))

    @function("ncclWaitSignal", Kind.ISSUE)
    def wait_signal(self, signals: Sequence[tuple[int, int]], comm: int, stream: int) -> int:
        found, wanted = self._one_sided(comm, [peer for peer, _ in signals]), Counter(dict(signals))
        if not wanted or min(wanted.values()) <= 0:
            raise Refused(Result.INVALID_ARGUMENT, f"invalid opCnt in {signals}")
        return self._defer(found, found.wait_signal, self._stream(found, stream), wanted)

    def _one_sided(self, comm: int, peers: Sequence[int], zeros: Sequence[int] = ()) -> Communicator:
        """The communicator; NCCL before 2.31 waits for all ranks in its first operation, later ones need a window."""
        found = self._usable(comm, poison=True)
        if any(zeros) or not all(0 <= peer < found.size for peer in peers):
            text = f"{tuple(zeros)} are not 0, or no such ranks: {peers}"
            raise Refused(Result.INVALID_ARGUMENT, text)
        if not found.one_sided and self._version >= SET_UP_BY_WINDOWS:
            raise Refused(Result.INVALID_USAGE, "no window was registered before")
        if not found.one_sided:
            found.one_sided = True
            found.barrier()
            if found.config.blocking and (code := found.wait_ready()) != SUCCESS:
                raise Refused(code, "stopped while it waited for the other ranks")
        return found

    @staticmethod
    def _defer(comm: Communicator, call: Callable[..., None], *arguments: Any) -> int:
        """Put an operation on its stream now or at the next poll."""
        comm.defer(partial(call, *arguments))
        return SUCCESS if comm.config.blocking else IN_PROGRESS

    # --- memory ---

    @function("ncclMemAlloc", Kind.USE, int)
    def mem_alloc(self, nbytes: int) -> tuple[int, int]:
        cuda = self._simulation.cuda
        ptr = cuda.allocate(max(0, cuda.current_device()), nbytes)
        self._own_memory.add(ptr)
        return SUCCESS, ptr

    @function("ncclMemFree", Kind.USE)
    def mem_free(self, ptr: int) -> int:
        """Unmap the memory (cuMemUnmap) without waiting for anything, unlike cudaFree."""
        self._simulation.memory.free(ptr)
        self._own_memory.discard(ptr)
        return SUCCESS

    @function("ncclCommWindowRegister", Kind.USE, Slot)
    def window_register(self, comm: int, ptr: int, nbytes: int, symmetric: bool) -> tuple[int, Slot]:
        found, slot, window = self._usable(comm), Slot(), next(self._handles)
        memory = self._range(found, "window", ptr, nbytes)
        block = self._simulation.memory.find(ptr)
        if block is None or block.ptr not in self._own_memory:
            raise Refused(Result.CUDA_ERROR, "the memory of a window was not made by cuMemCreate")

        def make() -> int:
            found.add_registration(found.windows, window, memory)
            return window

        found.defer(self._writer(slot, make))
        found.barrier(f"window at offset {found.place(window, nbytes)}")
        found.one_sided |= self._version >= SET_UP_BY_WINDOWS
        return self._begun(found) if self._version >= 22800 else self._result(found), slot

    @function("ncclCommWindowDeregister", Kind.USE)
    def window_deregister(self, comm: int, window: int) -> int:
        found = self._usable(comm)
        return self._deregister("window", found, found.windows, window, Result.INVALID_ARGUMENT)

    @function("ncclCommRegister", Kind.USE, int)
    def comm_register(self, comm: int, ptr: int, nbytes: int) -> tuple[int, int]:
        found, handle = self._existing(comm), next(self._handles)
        found.add_registration(found.buffers, handle, self._range(found, "registered", ptr, nbytes))
        return SUCCESS, handle

    @function("ncclCommDeregister", Kind.USE)
    def comm_deregister(self, comm: int, handle: int) -> int:
        found = self._existing(comm)
        return self._deregister("memory", found, found.buffers, handle, Result.INVALID_USAGE)

    def _deregister(
        self, what: str, comm: Communicator, registrations: dict[int, Range], handle: int, otherwise: int
    ) -> int:
        memory = comm.remove_registration(registrations, handle)
        if memory is None:
            raise Refused(otherwise, f"no registered {what} {handle:#x}")
        for op in self._simulation.memory.users(memory[0]):
            if op.owner is not None:
                self._simulation.scheduler.fault(f"{what} deregistered before {op} has run")
        return SUCCESS


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
