"""A communicator of the simulated NCCL, as one rank has it, and the kernels that do its work."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulated_graphs import Graph
from simulated_memory import Memory
from simulated_network import Address, Channel, Network
from simulated_reduce import Signature
from simulated_streams import LATER, Op, Range, Scheduler, Stream

from nccl_comm.api import IN_PROGRESS, SUCCESS, Config

__all__ = ["Communicator", "Machine", "Result", "Task"]

_GARBAGE = 0xEE
_LOOK_S = 0.01


class Result:
    """ncclResult_t, as far as it is not in :mod:`nccl_comm.api`."""

    CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = range(1, 7)


@dataclass(frozen=True)
class Task:
    """One operation, as it was called and checked.

    Attributes:
        kind: "all_reduce", ... or "send", "recv".
        reads, writes: the memory; empty where this rank has no part on that side.
        signature: of a collective.
        factor: of a pre-multiplied sum.
        peer: of a send or receive.
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
    """A kernel that runs: how many answers it waits for, and where they go."""

    op: Op
    collectives: list[Task]
    messages: list[Task]
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = len(self.messages) + bool(self.collectives)


class Machine:
    """What a communicator needs of its process."""

    def __init__(self, scheduler: Scheduler, memory: Memory, network: Network) -> None:
        self.scheduler = scheduler
        self.memory = memory
        self.network = network
        self.mute = False
        self.stuck = threading.Event()
        self.remote_errors = False
        self.mismatches: list[str] = []


class Communicator:
    """One rank's side of a communicator.

    Attributes:
        size, rank, device: as in the call that made it; size and rank are -1 until a split has been agreed upon.
        error: ncclResult_t of the asynchronous error, or SUCCESS.
        revoked, finalizing: as they say.
        growths: how often it has grown.
        graphs: captured graphs with kernels of it.
        windows, buffers: memory that is registered with it, by handle.
    """

    def __init__(self, machine: Machine, size: int, rank: int, device: int, config: Config) -> None:
        self.machine = machine
        self.size = size
        self.rank = rank
        self.device = device
        self.config = config
        self.key = ""
        self.growths = 0
        self.error = SUCCESS
        self.revoked = self.finalizing = False
        self.graphs: set[Graph] = set()
        self.factors: dict[int, tuple[int, bytes]] = {}
        self.windows: dict[int, Range] = {}
        self.buffers: dict[int, Range] = {}
        self.addresses: list[Address] = []
        self._ready = self._gone = False
        self._later: list[Callable[[], None]] = []
        self._channel: Channel | None = None
        self._stopped = 0
        self._last: Op | None = None
        self._kernels = 0
        self._running: dict[int, _Kernel] = {}
        self._pending: list[list[Task]] = []
        self._turn = 0
        self._splits: dict[int, Callable[[str, list[int]], None]] = {}
        self._barriers: set[int] = set()
        self._signals: Counter[int] = Counter()
        self._waiting: list[tuple[Op, Counter[int]]] = []

    # --- coming and going ---

    def join(self, address: Address, key: str) -> None:
        """Meet the other ranks."""
        self.key = key
        try:
            self._channel = self.machine.network.connect(address, self._hear)
        except OSError:
            self.error = Result.SYSTEM_ERROR
            return
        self._channel.send(("join", key, self.size, self.rank, self.machine.network.address))

    def split(
        self, child: Communicator | None, color: int | None, key: int, made: Callable[[], None]
    ) -> None:
        """Take part in a split; the child learns who belongs to it, and ``made`` is called then."""

        def agreed(new_key: str, ranks: list[int]) -> None:
            if child is not None:
                made()
                child.size, child.rank = len(ranks), ranks.index(self.rank)
                child.join(self.addresses[ranks[0]], new_key)

        with self.machine.scheduler.lock:
            turn, self._turn = self._turn, self._turn + 1
            self._splits[turn] = agreed
        self._send(("split", turn, color, key))

    def shrink(self, child: Communicator, survivors: list[int], made: Callable[[], None]) -> None:
        """The survivors' communicator, which needs nothing of the others; ``made`` is called when somebody polls."""
        self._turn += 1
        self.error = SUCCESS
        self.put_off(made)
        child.size, child.rank = len(survivors), survivors.index(self.rank)
        left = ",".join(map(str, survivors))
        child.join(self.addresses[survivors[0]], f"{self.key}/{self._turn}-{left}")

    def barrier(self) -> None:
        """Be busy until all ranks have come here."""
        with self.machine.scheduler.lock:
            turn, self._turn = self._turn, self._turn + 1
            self._barriers.add(turn)
        self._send(("barrier", turn))

    def put_off(self, function: Callable[[], None]) -> None:
        """Do something when somebody polls; at once if the communicator is blocking."""
        if self.config.blocking:
            function()
        else:
            self._later.append(function)

    def _send(self, message: Any) -> None:
        if self._channel is not None and not self.machine.mute:
            self._channel.send(message)

    def stop(self) -> None:
        """End what runs and what has been put on streams, with garbage for results."""
        scheduler = self.machine.scheduler
        with scheduler.changed:
            self._pending.clear()
            self._stopped += 1
            running, self._running = self._running, {}
            waiting, self._waiting = self._waiting, []
            for op, _ in waiting:
                scheduler.finish(op)
            for kernel in running.values():
                for task in (*kernel.collectives, *kernel.messages):
                    if task.writes[1]:
                        self.machine.memory.view(*task.writes)[:] = _GARBAGE
                scheduler.finish(kernel.op)

    def revoke(self) -> None:
        """Stop; from now on only splitting, shrinking and destroying are possible."""
        self.stop()
        self.revoked = True
        self.put_off(lambda: None)

    def know(self, known: dict[int, Range], handle: int, memory: Range) -> None:
        """Memory is registered."""
        known[handle] = memory
        block = self.machine.memory.find(memory[0])
        assert block is not None
        block.registered += 1

    def unknow(self, known: dict[int, Range], handle: int) -> Range | None:
        """Memory is registered no longer; which, if it was."""
        memory = known.pop(handle, None)
        block = self.machine.memory.find(memory[0]) if memory is not None else None
        if block is not None:
            block.registered -= 1
        return memory

    def leave(self) -> None:
        """Say goodbye to the others, for good."""
        self.stop()
        for known in (self.windows, self.buffers):
            for handle in list(known):
                self.unknow(known, handle)
        with self.machine.scheduler.changed:
            self._gone = True
            channel, self._channel = self._channel, None
            self.machine.scheduler.changed.notify_all()
        if channel is not None:
            channel.send(("depart",))
            self.machine.network.call(channel.close)

    def vanish(self) -> None:
        """Break the connection without a word."""
        if self._channel is not None:
            self.machine.network.call(self._channel.close)

    # --- state ---

    @property
    def busy(self) -> bool:
        """Whether an earlier call is still in progress."""
        return not self._ready or bool(self._pending or self._splits or self._barriers or self._later)

    def poll(self) -> int:
        """ncclCommGetAsyncError; what was in progress goes on when somebody looks, and not before."""
        scheduler = self.machine.scheduler
        with scheduler.lock:
            if self.error != SUCCESS:
                return self.error
            if not self.busy:
                if self.finalizing and (work := self.unfinished()):
                    scheduler.want(work[-1])
                    return IN_PROGRESS
                return SUCCESS
            self._settle()
            return IN_PROGRESS

    def connect(self) -> bool:
        """Block the host until the others come, as a first operation does; False if the communicator was stopped."""
        machine, stopped = self.machine, self._stopped
        with machine.scheduler.changed:
            while machine.stuck.is_set() and self._stopped == stopped:
                machine.scheduler.changed.wait(_LOOK_S)
            return self._stopped == stopped

    def _settle(self) -> None:
        """Do what was put off."""
        if self.machine.stuck.is_set():
            return
        pending, self._pending = self._pending, []
        for tasks in pending:
            self._launch(tasks)
        later, self._later = self._later, []
        for each in later:
            each()

    def unfinished(self) -> list[Op]:
        """What has been put on streams and has not ended."""
        with self.machine.scheduler.lock:
            return [op for s in self.machine.scheduler.streams for op in s.queue if op.owner is self]

    def wait_ready(self) -> None:
        """Block the host until the others have come."""
        with self.machine.scheduler.changed:
            while self.busy and self.error == SUCCESS:
                self.machine.scheduler.changed.wait()

    # --- kernels ---

    def launch(self, tasks: list[Task], at_once: bool) -> None:
        """Put a kernel on its streams, now or when somebody polls."""
        with self.machine.scheduler.lock:
            if at_once:
                self._launch(tasks)
            else:
                self._pending.append(tasks)

    def serial(self, stream: Stream) -> list[Op]:
        """What a kernel on a stream has to wait for, since NCCL serializes the kernels of a communicator."""
        last = self._last
        if last is None or last.done or last.capture is not stream.capture:
            return []
        return [last]

    def launched(self, op: Op) -> None:
        """A kernel has been put on a stream."""
        self._last = op

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
            return self._begin(op, tasks) if self._stopped == stopped else None

        op = Op(f"NCCL {label}", body, needs, reads, writes, self)
        scheduler.put(streams[0], op)
        self.launched(op)
        for other in streams[1:]:
            scheduler.put(other, Op("group ends", needs=[op]))

    def _begin(self, op: Op, tasks: Sequence[Task]) -> Any:
        """The kernel begins to run, on the device's thread."""
        kernel = _Kernel(
            op,
            [task for task in tasks if task.signature is not None],
            [task for task in tasks if task.signature is None],
        )
        signatures = tuple(task.signature for task in kernel.collectives)
        given = [(self._read(task), task.factor) for task in kernel.collectives]
        messages = [
            (task.kind, task.peer, max(task.reads[1], task.writes[1]), self._read(task))
            for task in kernel.messages
        ]
        with self.machine.scheduler.lock:
            number = self._kernels
            self._kernels += 1
            self._running[number] = kernel
        self._send(("kernel", number, signatures, given, messages))
        return LATER

    def _hear(self, message: Any) -> None:
        """A message of the room, on the network's thread."""
        kind = "gone" if message is None else message[0]
        with self.machine.scheduler.changed:
            if self._gone:
                return
            if kind == "ready":
                self._ready, self.addresses = True, message[1]
            elif kind == "split":
                self._splits.pop(message[1])(message[2], message[3])
            elif kind == "barrier":
                self._barriers.remove(message[1])
            elif kind == "put":
                self._receive_put(*message[1:])
            elif kind in ("collectives", "message"):
                self._answer(*message)
            elif kind == "mismatch":
                self.machine.mismatches.append(message[1])
            elif kind == "refused":
                self.error = Result.INVALID_ARGUMENT
            elif kind == "gone" and self.machine.remote_errors:
                self.error = Result.REMOTE_ERROR
            self.machine.scheduler.changed.notify_all()

    def _read(self, task: Task) -> bytes:
        return bytes(self.machine.memory.view(*task.reads)) if task.reads[1] else b""

    def _write(self, task: Task, data: bytes | None) -> None:
        if data:
            self.machine.memory.view(task.writes[0], len(data))[:] = memoryview(data)

    def _answer(self, kind: str, number: int, *result: Any) -> None:
        """The collectives of a kernel have met those of all other ranks, or a message has met its match."""
        kernel = self._running.get(number)
        if kernel is None:  # it was stopped meanwhile
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

    # --- one rank alone ---

    def put(self, stream: Stream, peer: int, window: int, offset: int, reads: Range) -> None:
        """Write to a rank's window of a number, counted as they were registered, and signal it; on a stream."""
        stopped = self._stopped

        def body(op: Op) -> None:
            if self._stopped == stopped:
                data = bytes(self.machine.memory.view(*reads)) if reads[1] else b""
                self._send(("put", peer, window, offset, data))

        op = Op("NCCL put", body, self.serial(stream), [reads] if reads[1] else [], owner=self)
        self.machine.scheduler.put(stream, op)
        self.launched(op)

    def wait_signal(self, stream: Stream, signals: Counter[int]) -> None:
        """Let a stream wait for signals."""
        stopped = self._stopped

        def body(op: Op) -> Any:
            with self.machine.scheduler.lock:
                if self._stopped != stopped:
                    return None
                self._waiting.append((op, signals))
                self.machine.network.call(self._match_signals)
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
        """A graph has kernels of this communicator."""
        self.graphs.add(graph)

    def released_by(self, graph: Graph) -> None:
        """The graph is gone."""
        with self.machine.scheduler.changed:
            self.graphs.discard(graph)
            self.machine.scheduler.changed.notify_all()
