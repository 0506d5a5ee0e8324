"""One rank's side of a communicator of the simulated NCCL, and its kernels."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nccl_comm.library.errors import IN_PROGRESS
from tests.simulated_nccl.graphs import Graph
from tests.simulated_nccl.memory import Memory
from tests.simulated_nccl.network import Address, Channel, Network
from tests.simulated_nccl.reductions import Signature
from tests.simulated_nccl.streams import LATER, Clock, Op, Range, Scheduler, Stream, merge
from unicoll.device_collectives.interface import SUCCESS, Config

__all__ = ["Communicator", "Machine", "Result", "Task"]

Link = tuple[str, int]
"""("send", peer) or ("recv", peer): the first message connects it; ("collective", -1): the first collective does."""
_GARBAGE = 0xEE


class Result:
    """Values of ncclResult_t that :mod:`unicoll.device_collectives.interface` does not define."""

    CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = range(1, 7)


@dataclass(frozen=True)
class Task:
    """One operation whose arguments have been checked.

    Attributes:
        kind: "all_reduce", ... or "send", "recv".
        reads, writes: the memory; empty if this rank sends or receives nothing.
        signature: for a collective.
        factor: for a pre-multiplied sum.
        peer: for a send or receive.
    """

    kind: str
    stream: Stream
    reads: Range = (0, 0)
    writes: Range = (0, 0)
    signature: Signature | None = None
    factor: bytes | None = None
    peer: int = -1


@dataclass
class _Kernel:
    """A running kernel: its operations, and the number of replies that it waits for."""

    op: Op
    collectives: list[Task]
    messages: list[Task]
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = len(self.messages) + bool(self.collectives)


class Machine:
    """The process: its streams, memory and network, and the reports of operations that do not match."""

    def __init__(
        self, scheduler: Scheduler, memory: Memory, network: Network, capability: tuple[int, int]
    ) -> None:
        self.capability = capability
        self.scheduler = scheduler
        self.memory = memory
        self.network = network
        self.mismatches: list[str] = []


class Communicator:
    """One rank's side of a communicator.

    Attributes:
        size, rank, device: as in the call that made it; size and rank are -1 until all ranks have called the split.
        error: ncclResult_t of the asynchronous error, or SUCCESS.
        revoked, finalizing: True after these calls.
        least_capability: the least compute capability of its ranks' devices.
        growths: number of times that it has grown.
        graphs: captured graphs with its kernels.
        windows, buffers: memory registered with it, by handle.
        one_sided: True once one-sided operations have been set up.
    """

    def __init__(self, machine: Machine, size: int, rank: int, device: int, config: Config) -> None:
        self.machine = machine
        self.size = size
        self.rank = rank
        self.device = device
        blocking = os.environ.get("NCCL_COMM_BLOCKING")
        self.config = replace(config, blocking=blocking == "1") if blocking in ("0", "1") else config
        self.key = ""
        self.least_capability = machine.capability
        self.growths = 0
        self.error = SUCCESS
        self.revoked = self.finalizing = False
        self.graphs: set[Graph] = set()
        self.factors: dict[int, tuple[int, bytes]] = {}
        self.windows: dict[int, Range] = {}
        self.buffers: dict[int, Range] = {}
        self.one_sided = False
        self._places: dict[int, Range] = {}
        self.addresses: list[Address] = []
        self._ready = self._left = False
        self._deferred: list[Callable[[], None]] = []
        self._channel: Channel | None = None
        self._stopped = 0
        self._last: Op | None = None
        self._launched: Clock = {}
        self._last_captured: Op | None = None
        self._kernels = 0
        self._running: dict[int, _Kernel] = {}
        self._pending: list[list[Task]] = []
        self._turn = 0
        self._gathering: dict[Any, Callable[[dict[int, Any]], None]] = {}
        self._child: Communicator | None = None
        self._links: set[Link] = set()
        self._signals: Counter[int] = Counter()
        self._waiting: list[tuple[Op, Counter[int]]] = []

    # --- connecting and leaving ---

    def join(self, address: Address, key: str) -> None:
        """Connect to the rendezvous of the ranks."""
        self.key = key
        try:
            self._channel = self.machine.network.connect(address, self._handle)
        except OSError:
            self.error = Result.SYSTEM_ERROR
            return
        address, capability = self.machine.network.address, self.machine.capability
        self._channel.send(("join", key, self.size, self.rank, address, capability))

    def _gather(
        self, key: Any, value: Any, then: Callable[[dict[int, Any]], None], members: Sequence[int] = ()
    ) -> None:
        """Be in progress until all members, or all ranks, have called this with the same key; then the function is
        called with their values."""
        with self.machine.scheduler.lock:
            if key is None:
                key, self._turn = self._turn, self._turn + 1
            self._gathering[key] = then
        self._send(("gather", key, members, value))

    def split(
        self, child: Communicator | None, color: int | None, key: int, made: Callable[[], None]
    ) -> None:
        """Take part in a split; once all ranks have called it, ``made`` is called and the child connects."""
        self._child = child
        turn = self._turn

        def agreed(values: dict[int, tuple[int | None, int]]) -> None:
            if child is not None:
                made()
                ranks = [r for _, r in sorted((k, r) for r, (c, k) in values.items() if c == color)]
                child.size, child.rank = len(ranks), ranks.index(self.rank)
                child.join(self.addresses[ranks[0]], f"{self.key}/{turn}.{color}")

        self._gather(None, (color, key), agreed)

    def shrink(self, child: Communicator, survivors: list[int], made: Callable[[], None]) -> None:
        """The survivors' communicator, without messages from the others; ``made`` is called at the next poll."""
        self._turn += 1
        self._child = child
        self.defer(made)
        child.size, child.rank = len(survivors), survivors.index(self.rank)
        names = ",".join(map(str, survivors))
        child.join(self.addresses[survivors[0]], f"{self.key}/{self._turn}-{names}")

    def barrier(self, value: object = None) -> None:
        """Be in progress until all ranks have called this; a ``value`` that differs between them is a mismatch."""

        def compare(values: dict[int, Any]) -> None:
            if len(set(values.values())) > 1:
                self.machine.mismatches.append(f"values of communicator {self.key} by rank: {values}")

        self._gather(None, value, compare)

    def place(self, window: int, nbytes: int) -> int:
        """The offset of a new window in the communicator's address range: the first that is free, as in NCCL 2.28.

        NCCL binds multicast addresses by it, so it has to be equal on all ranks.
        """
        offset = 0
        for start, size in sorted(self._places.values()):
            if offset + nbytes <= start:
                break
            offset = start + size
        self._places[window] = (offset, nbytes)
        return offset

    def defer(self, function: Callable[[], None]) -> None:
        """Call a function at the next poll; at once if the communicator is blocking."""
        if self.config.blocking:
            function()
        else:
            self._deferred.append(function)

    def _send(self, message: Any) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def stop(self) -> None:
        """End running and queued kernels, with garbage for results, and the connecting of a child."""
        scheduler = self.machine.scheduler
        if self._child is not None and not self._child._ready:
            self._child.stop()
        with scheduler.changed:
            self._pending.clear()
            self._stopped += 1
            running, self._running = self._running, {}
            waiting, self._waiting = self._waiting, []
            self._gathering.clear()
            scheduler.changed.notify_all()
            for op, _ in waiting:
                scheduler.finish(op)
            for kernel in running.values():
                for task in (*kernel.collectives, *kernel.messages):
                    if task.writes[1]:
                        self.machine.memory.view(*task.writes)[:] = _GARBAGE
                scheduler.finish(kernel.op)

    def revoke(self) -> None:
        """Stop; from now on the communicator can only be split, shrunk and destroyed."""
        self.stop()
        self.revoked = True
        if self.config.blocking:
            self.await_work("ncclCommRevoke")

    def await_work(self, call: str) -> None:
        """Block the host until its kernels have left the streams; stopped ones do so behind what is before them."""
        for op in self.unfinished():
            self.machine.scheduler.wait_for(op, f"{op}", call)
        with self.machine.scheduler.lock:
            merge(self.machine.scheduler.host_clock, self._launched)

    def await_graphs(self) -> None:
        """Block the host until no graph has kernels of the communicator."""
        with self.machine.scheduler.changed:
            while self.graphs:
                self.machine.scheduler.changed.wait()

    def add_registration(self, registrations: dict[int, Range], handle: int, memory: Range) -> None:
        """Add a window or buffer."""
        registrations[handle] = memory
        block = self.machine.memory.find(memory[0])
        assert block is not None
        block.registered += 1

    def remove_registration(self, registrations: dict[int, Range], handle: int) -> Range | None:
        """Remove a window or buffer; its memory, or None if there is none with that handle."""
        memory = registrations.pop(handle, None)
        self._places.pop(handle, None)
        block = self.machine.memory.find(memory[0]) if memory is not None else None
        if block is not None:
            block.registered -= 1
        return memory

    def leave(self) -> None:
        """Announce the departure to the others, and close the channel."""
        self.stop()
        for registrations in (self.windows, self.buffers):
            for handle in list(registrations):
                self.remove_registration(registrations, handle)
        with self.machine.scheduler.changed:
            self._left = True
            channel, self._channel = self._channel, None
            self.machine.scheduler.changed.notify_all()
        if channel is not None:
            channel.send(("depart",))
            channel.close()

    # --- state ---

    @property
    def busy(self) -> bool:
        """True if an earlier call is in progress."""
        return not self._ready or bool(self._pending or self._gathering or self._deferred)

    def poll(self) -> int:
        """ncclCommGetAsyncError; only this call makes progress on a non-blocking communicator."""
        scheduler = self.machine.scheduler
        with scheduler.lock:
            if self.error != SUCCESS:
                return self.error
            if not self.busy:
                if (self.finalizing or self.revoked) and (work := self.unfinished()):
                    scheduler.request(work[-1])
                    return IN_PROGRESS
                return SUCCESS
            self._run_deferred()
            return IN_PROGRESS

    def link(self, tasks: Sequence[Task]) -> None:
        """Begin to connect: to each peer for the first message, to all ranks for the first collective."""
        wanted: set[Link] = {(task.kind, task.peer) for task in tasks if task.signature is None}
        if any(task.signature is not None for task in tasks):
            wanted.add(("collective", -1))
        with self.machine.scheduler.lock:
            new = {(kind, peer) for kind, peer in wanted if peer != self.rank} - self._links
            self._links |= new
        for kind, peer in new:
            pair = {"collective": (), "send": (self.rank, peer), "recv": (peer, self.rank)}[kind]
            self._gather(("link", pair), None, lambda values: None, pair)

    @property
    def connected(self) -> bool:
        """True if the operations that have been called need no more connections."""
        with self.machine.scheduler.lock:
            return not any(isinstance(key, tuple) for key in self._gathering)

    def connect(self) -> bool:
        """Block the host until the other ranks come, as first operations do; False if the communicator is stopped."""
        stopped, changed = self._stopped, self.machine.scheduler.changed
        with changed:
            changed.wait_for(lambda: self.connected or self._stopped != stopped)
            return self._stopped == stopped

    def _run_deferred(self) -> None:
        """Launch the deferred kernels and call the deferred functions."""
        if not self.connected:
            return
        pending, self._pending = self._pending, []
        for tasks in pending:
            self._launch(tasks)
        deferred, self._deferred = self._deferred, []
        for function in deferred:
            function()

    def unfinished(self) -> list[Op]:
        """Operations on streams that have not ended."""
        with self.machine.scheduler.lock:
            return [op for s in self.machine.scheduler.streams for op in s.queue if op.owner is self]

    def wait_ready(self) -> int:
        """Block the host until the communicator is ready or stopped; the result code."""
        stopped = self._stopped
        with self.machine.scheduler.changed:
            while self.busy and self.error == SUCCESS and self._stopped == stopped and not self._left:
                self.machine.scheduler.changed.wait()
            return self.error if self._stopped == stopped and not self._left else Result.INTERNAL_ERROR

    # --- kernels ---

    def launch(self, tasks: list[Task], at_once: bool) -> None:
        """Put a kernel on its streams, now or at the next poll."""
        with self.machine.scheduler.lock:
            if at_once:
                self._launch(tasks)
            else:
                self._pending.append(tasks)

    def serial(self, stream: Stream) -> list[Op]:
        """The operations before a kernel on a stream: NCCL serializes the kernels of a communicator."""
        last = self._last if stream.capture is None else self._last_captured
        if last is None or last.done or last.capture is not stream.capture:
            return []
        return [last]

    def launched(self, op: Op) -> None:
        """Note the last kernel put on a stream, or captured."""
        if op.capture is None:
            self._last = op
            merge(self._launched, op.clock)
        else:
            self._last_captured = op

    def _launch(self, tasks: Sequence[Task]) -> None:
        scheduler = self.machine.scheduler
        stopped = self._stopped
        streams = list(dict.fromkeys(task.stream for task in tasks))
        needs = self.serial(streams[0])
        for other in streams[1:]:  # the streams of a group wait for each other
            needs.append(scheduler.put(other, Op("group begins")))
        label = "+".join(task.kind for task in tasks)
        reads = [task.reads for task in tasks if task.reads[1]]
        writes = [task.writes for task in tasks if task.writes[1]]

        def body(op: Op) -> Any:
            return self._begin(op, tasks, stopped) if self._stopped == stopped else None

        op = Op(f"NCCL {label}", body, needs, reads, writes, self)
        scheduler.put(streams[0], op)
        self.launched(op)
        for other in streams[1:]:
            scheduler.put(other, Op("group ends", needs=[op]))

    def _begin(self, op: Op, tasks: Sequence[Task], stopped: int) -> Any:
        """Start a kernel, on the device's thread: send its operations to the rendezvous.

        Without effect if the communicator has been stopped more than ``stopped`` times.
        """
        kernel = _Kernel(
            op,
            [task for task in tasks if task.signature is not None],
            [task for task in tasks if task.signature is None],
        )
        signatures = tuple(task.signature for task in kernel.collectives)
        inputs = [(self._read(task), task.factor) for task in kernel.collectives]
        messages = [
            (task.kind, task.peer, max(task.reads[1], task.writes[1]), self._read(task))
            for task in kernel.messages
        ]
        with self.machine.scheduler.lock:
            if self._stopped != stopped:  # while the inputs were read: nothing would end the kernel
                return None
            number = self._kernels
            self._kernels += 1
            self._running[number] = kernel
        self._send(("kernel", number, signatures, inputs, messages))
        return LATER

    def _handle(self, message: Any) -> None:
        """Handle a message of the rendezvous."""
        kind = "gone" if message is None else message[0]
        with self.machine.scheduler.changed:
            if self._left:
                return
            if kind == "ready":
                self._ready, self.addresses, self.least_capability = True, message[1], message[2]
            elif kind == "gathered":
                if (then := self._gathering.pop(message[1], None)) is not None:  # None if it was stopped
                    then(message[2])
            elif kind == "put":
                self._receive_put(*message[1:])
            elif kind in ("collectives", "message"):
                self._complete(*message)
            elif kind == "mismatch":
                self.machine.mismatches.append(message[1])
            elif kind == "refused":
                self.error = Result.INVALID_ARGUMENT
            elif (
                kind == "gone" and not self.revoked
            ):  # NCCL's proxy threads notice it only while they have work
                self.error = Result.REMOTE_ERROR
            self.machine.scheduler.changed.notify_all()

    def _read(self, task: Task) -> bytes:
        return bytes(self.machine.memory.view(*task.reads)) if task.reads[1] else b""

    def _write(self, task: Task, data: bytes | None) -> None:
        if data:
            self.machine.memory.view(task.writes[0], len(data))[:] = memoryview(data)

    def _complete(self, kind: str, number: int, *result: Any) -> None:
        """Write the results of a kernel's collectives, or of one of its sends and receives."""
        kernel = self._running.get(number)
        if kernel is None:  # the kernel was stopped
            return
        if kind == "collectives":
            for task, data in zip(kernel.collectives, result[0], strict=True):
                self._write(task, data)
        else:
            self._write(kernel.messages[result[0]], result[1])
        kernel.missing -= 1
        if not kernel.missing:
            del self._running[number]
            self.machine.scheduler.finish(kernel.op)

    # --- one-sided ---

    def put(self, stream: Stream, peer: int, window: int, offset: int, reads: Range) -> None:
        """Write to a peer's window, whose number is the order of registration, and signal the peer; on a stream."""
        stopped = self._stopped

        def body(op: Op) -> None:
            if self._stopped == stopped:
                data = bytes(self.machine.memory.view(*reads)) if reads[1] else b""
                self._send(("put", peer, window, offset, data))

        op = Op("NCCL put", body, self.serial(stream), [reads] if reads[1] else [], owner=self)
        self.machine.scheduler.put(stream, op)
        self.launched(op)

    def wait_signal(self, stream: Stream, signals: Counter[int]) -> None:
        """Make a stream wait for signals."""
        stopped = self._stopped

        def body(op: Op) -> Any:
            with self.machine.scheduler.lock:
                if self._stopped != stopped:
                    return None
                self._waiting.append((op, signals))
                self._match_signals()
            return LATER

        op = Op("NCCL wait for signals", body, self.serial(stream), owner=self)
        self.machine.scheduler.put(stream, op)
        self.launched(op)

    def _receive_put(self, rank: int, window: int, offset: int, data: bytes) -> None:
        if data:
            start, nbytes = list(self.windows.values())[window]
            assert offset + len(data) <= nbytes
            self.machine.memory.view(start + offset, len(data))[:] = memoryview(data)
        self._signals[rank] += 1
        self._match_signals()

    def _match_signals(self) -> None:
        with self.machine.scheduler.changed:
            while self._waiting and self._waiting[0][1] <= self._signals:
                op, signals = self._waiting.pop(0)
                self._signals -= signals
                self.machine.scheduler.finish(op)

    # --- graphs ---

    def captured_in(self, graph: Graph) -> None:
        """Note a graph that has kernels of this communicator."""
        self.graphs.add(graph)

    def released_by(self, graph: Graph) -> None:
        """Forget a graph that was destroyed."""
        with self.machine.scheduler.changed:
            self.graphs.discard(graph)
            self.machine.scheduler.changed.notify_all()
