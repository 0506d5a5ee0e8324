"""Streams and events of the simulated device: operations run late, and in an unfavourable order.

No operation runs when it is put on a stream. The device's thread runs it later: when a host thread blocks on an
operation or queries one, or after a time without calls of the host, as when another rank needs this one's part. Among
the streams whose first operation may run, a policy chooses. Within :meth:`Scheduler.hold` no operation begins: a test
posts all its operations first, and a missing order then gives a wrong result every time.

Every operation has a vector clock of the operations that it is ordered after: for each stream the number of the last
one. With it :mod:`tests.simulated_nccl.memory` finds races in programs whose results happen to be right.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from unicoll.devices.device_runtime import DeviceError

if TYPE_CHECKING:
    from tests.simulated_nccl.graphs import Capture

__all__ = ["LATER", "Blocked", "Clock", "Op", "Scheduler", "Stream", "Trap"]

LATER = object()
"""Returned by the body of an operation that is not done yet; :meth:`Scheduler.finish` is called later."""
Clock = dict[int, int]
Range = tuple[int, int]
"""Address and bytes."""


class Trap(Exception):
    """Raised by the body of a kernel that traps, which ends the context of the process."""


class Op:
    """An operation on a stream.

    Attributes:
        label: description for messages.
        body: called on the device's thread; None for a mark or wait. Must not keep arrays alive.
        needs: operations, of any stream, after which it may run.
        reads, writes: memory that it accesses.
        stream, seq: its stream, and its number there.
        clock: for each stream the number of the last operation that it is ordered after.
        capture: the capture that recorded it; it then never runs itself.
        owner: the communicator that it belongs to, or None.
    """

    def __init__(
        self,
        label: str,
        body: Callable[[Op], Any] | None = None,
        needs: Iterable[Op] = (),
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
        owner: Any = None,
    ) -> None:
        self.label = label
        self.body = body
        self.needs = tuple(needs)
        self.reads = reads
        self.writes = writes
        self.owner = owner
        self.stream: Stream | None = None
        self.seq = 0
        self.clock: Clock = {}
        self.capture: Capture | None = None
        self.done = self.running = False

    @property
    def may_run(self) -> bool:
        """True if all that it needs is done."""
        return not self.running and all(need.done for need in self.needs)

    def after(self, other: Op) -> bool:
        """True if it is ordered after another operation."""
        assert other.stream is not None
        return self.clock.get(other.stream.index, 0) >= other.seq

    def __repr__(self) -> str:
        return f"{self.label} on {self.stream}"


class Stream:
    """A queue of operations that run in order.

    Attributes:
        index: number of the stream in the order of creation; 0 is the first device's legacy default stream.
        blocking: whether it synchronizes with the legacy default stream of its device.
        tail: the last operation put on it, or None.
        capture: the capture that records it, or None.
    """

    def __init__(self, index: int, handle: int, device: int, blocking: bool, legacy: bool = False) -> None:
        self.index = index
        self.handle = handle
        self.device = device
        self.blocking = blocking
        self.legacy = legacy
        self.queue: deque[Op] = deque()
        self.tail: Op | None = None
        self.count = 0
        self.capture: Capture | None = None

    def __repr__(self) -> str:
        return "the legacy stream" if self.legacy else f"stream {self.index}"


class Blocked(NamedTuple):
    """A call by which a host thread blocked on the device, or queried it, which does not block."""

    call: str
    what: str
    thread: str
    where: str


Policy = Callable[[list[Stream]], Stream]


def _policy(name: str, seed: int) -> Policy:
    """The choice among streams, which are in the order of their creation."""
    rng = random.Random(seed)
    return {
        "oldest": lambda streams: streams[0],
        "newest": lambda streams: streams[-1],
        "random": rng.choice,
    }[name]


class Scheduler:
    """All streams of a process, and the thread that runs their operations.

    Args:
        policy: the stream whose operation runs first: "oldest", "newest" or "random".
        seed: of the random policy.
        patience: seconds without a call of the host after which the device runs operations by itself.

    Attributes:
        broken: the error of all later calls, once an operation has failed.
        trapped: True if that was a kernel that traps, and no fault of the program.
    """

    def __init__(self, policy: str = "oldest", seed: int = 0, patience: float = 0.005) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.streams: list[Stream] = []
        self.host_clock: Clock = {}
        self.faults: list[str] = []
        self.trace: deque[Blocked] = deque(maxlen=10_000)
        self.on_access: Callable[[Op], None] | None = None
        self.broken: str | None = None
        self.trapped = False
        self._patience = patience
        self._choose = _policy(policy, seed)
        self._made = 0
        self._held: list[int] = []
        self._blocked = 0
        self._requested: set[Op] = set()
        self._last_call = time.monotonic()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="simulated device", daemon=True)
        self._thread.start()

    # --- posting ---

    def new_stream(self, handle: int, device: int, blocking: bool, legacy: bool = False) -> Stream:
        """Create a stream."""
        with self.lock:
            stream = Stream(self._made, handle, device, blocking, legacy)
            self._made += 1
            self.streams.append(stream)
            return stream

    def put(self, stream: Stream, op: Op) -> Op:
        """Put an operation on a stream (or into the graph that the stream records)."""
        with self.changed:
            self.check()
            if stream.capture is not None:
                stream.capture.add(stream, op)
                return op
            op.needs = (*op.needs, *self._implicit(stream))
            stream.count += 1
            op.stream, op.seq = stream, stream.count
            clock = dict(self.host_clock)
            for earlier in (*op.needs, *([stream.tail] if stream.tail else [])):
                merge(clock, earlier.clock)
            clock[stream.index] = op.seq
            op.clock = clock
            stream.tail = op
            stream.queue.append(op)
            if self.on_access is not None and (op.reads or op.writes):
                self.on_access(op)
            self._last_call = time.monotonic()
            self.changed.notify_all()
            return op

    def _implicit(self, stream: Stream) -> Iterator[Op]:
        """The operations before one on a legacy default stream or a blocking stream, which wait for each other."""
        if stream.legacy:
            others = [s for s in self.streams if s.blocking and s.device == stream.device and s is not stream]
        elif stream.blocking:
            others = [s for s in self.streams if s.legacy and s.device == stream.device]
        else:
            return
        for other in others:
            if stream.legacy and other.capture is not None:
                other.capture.invalidate("work was put on the legacy stream")
                raise DeviceError("cudaErrorStreamCaptureImplicit: a blocking stream records a graph")
            if other.tail is not None:
                yield other.tail

    def check(self) -> None:
        """Raise DeviceError if the context has ended."""
        if self.broken is not None:
            error = DeviceError(self.broken)
            error.context_ended = True
            raise error
        if self._closing:
            raise DeviceError("cudaErrorCudartUnloading: the simulated device has been closed")

    # --- calls of the host ---

    def wait_for(self, op: Op | None, what: str, call: str = "synchronize") -> None:
        """Block the host until an operation is done."""
        with self.changed:
            self.check()
            self._note(call, what)
            if op is None:
                return
            if op.done:
                merge(self.host_clock, op.clock)
                return
            if threading.get_ident() in self._held:
                raise DeviceError(f"the host blocks on {what} while it holds the device itself")
            self._blocked += 1
            self.changed.notify_all()
            try:
                while not op.done:
                    self.check()
                    self.changed.wait()
            finally:
                self._blocked -= 1
            self.check()
            merge(self.host_clock, op.clock)

    def query(self, op: Op | None, what: str) -> bool:
        """True if an operation is done; else the device runs it soon."""
        with self.changed:
            self.check()
            self._note("query", what)
            if op is None:
                return True
            if op.done:
                merge(self.host_clock, op.clock)
                return True
            self._requested.add(op)
            self.changed.notify_all()
            return False

    def request(self, op: Op | None) -> None:
        """Have the device run an operation soon, without a call of the host."""
        with self.changed:
            if op is not None and not op.done and op.capture is None:
                self._requested.add(op)
                self.changed.notify_all()

    def _note(self, call: str, what: str) -> None:
        where = "?"
        # extract_stack() would read the text of the lines, which takes long
        for frame, line in traceback.walk_stack(None):
            code = frame.f_code
            if "/simulated_nccl/" not in code.co_filename:
                where = f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{line})"
                break
        self.trace.append(Blocked(call, what, threading.current_thread().name, where))

    def forget(self) -> None:
        """Clear the trace."""
        with self.lock:
            self.trace.clear()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """No operation begins within the block; a host thread that blocks on the device there gets a DeviceError."""
        with self.changed:
            self._held.append(threading.get_ident())
        try:
            yield
        finally:
            with self.changed:
                self._held.remove(threading.get_ident())
                self.changed.notify_all()

    def fault(self, text: str) -> None:
        """Record an error that a real device would not notice, or not survive; after a trap nothing uses memory."""
        with self.lock:
            if not self.trapped:
                self.faults.append(text)

    # --- the device's thread ---

    def finish(self, op: Op) -> None:
        """Mark an operation as done; only the first call has an effect."""
        with self.changed:
            if op.done:
                return
            op.done = True
            stream = op.stream
            assert stream is not None
            if stream.queue and stream.queue[0] is op:
                stream.queue.popleft()
            self._requested.discard(op)
            self.changed.notify_all()

    def _work(self) -> None:
        while (op := self._next()) is not None:
            try:
                outcome = op.body(op) if op.body is not None else None
            except Trap:
                with self.changed:
                    self.broken, self.trapped = f"cudaErrorLaunchFailure: {op} has trapped", True
                    self.changed.notify_all()
                outcome = LATER
            except BaseException as error:
                with self.changed:
                    self.broken = f"cudaErrorLaunchFailure: {op}: {error}"
                    self.faults.append(f"{self.broken}\n{traceback.format_exc()}")
                    self.changed.notify_all()
                outcome = None
            if outcome is not LATER:
                self.finish(op)

    def _next(self) -> Op | None:
        """Wait for the next operation that may run; None at the end."""
        with self.changed:
            while not self._closing:
                ready = [s for s in self.streams if s.queue and s.queue[0].may_run]
                if not ready or self._held or self.broken is not None:
                    self.changed.wait()
                    continue
                rest = self._last_call + self._patience - time.monotonic()
                if self._blocked or self._requested or rest <= 0:
                    op = self._choose(ready).queue[0]
                    op.running = True
                    return op
                self.changed.wait(rest)
            return None

    def close(self) -> None:
        """End the device's thread; the other operations never run."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        self._thread.join()


def merge(clock: Clock, other: Clock) -> None:
    """Make a clock include another one."""
    for index, seq in other.items():
        if clock.get(index, 0) < seq:
            clock[index] = seq
