"""Streams and events of the simulated device: work runs late, and in an order that an adversary chooses.

Nothing runs when it is put on a stream. A thread of the device runs it later: when a host thread blocks on some of it
(or asks whether it is done), or when the host has been quiet for a while, as it is when another rank needs this one's
part. Among the streams whose first piece of work may run a policy chooses. Between :meth:`Scheduler.hold` and
``release`` nothing runs at all: so a test puts everything in place first, and what is then wrong is wrong every time.

Every piece of work knows what it is ordered after (a vector clock: for each stream, up to which of its pieces), which
lets :mod:`simulated_memory` find races in programs whose results happen to be right.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unicoll.streams import CudaError

if TYPE_CHECKING:
    from simulated_graphs import Capture

__all__ = ["LATER", "Blocked", "Op", "Scheduler", "Stream"]

LATER = object()
"""What the body of a piece of work returns that is not done yet: somebody calls :meth:`Scheduler.finish`."""
Clock = dict[int, int]
Range = tuple[int, int]
"""Address and bytes."""


class Op:
    """A piece of work on a stream.

    Attributes:
        label: what it is, in words.
        body: does it on the device's thread; None for a mere mark or wait. Must not hold arrays alive.
        needs: pieces of work, of any stream, after which it may run.
        reads, writes: memory that it touches.
        stream, seq: where it stands, and as which piece of that stream.
        clock: what it comes after: for each stream the last piece of it.
        capture: the capture that it belongs to; it then never runs itself.
        owner: whose it is (a communicator), for whoever looks after it.
    """

    __slots__ = (
        "body", "capture", "clock", "done", "label", "needs", "owner", "reads", "running", "seq", "stream", "writes",
    )  # fmt: skip

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
        """Whether everything that it needs has been done."""
        return not self.running and all(need.done for need in self.needs)

    def after(self, other: Op) -> bool:
        """Whether it is ordered after another piece of work."""
        assert other.stream is not None
        return self.clock.get(other.stream.index, 0) >= other.seq

    def __repr__(self) -> str:
        return f"{self.label} on {self.stream}"


class Stream:
    """A queue of work, done in order.

    Attributes:
        index: number of the stream in the order of making; 0 is the first device's legacy default stream.
        blocking: whether it synchronizes with the legacy default stream of its device.
        tail: the last piece of work put on it, or None.
        capture: the capture that it takes part in, or None.
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


@dataclass(frozen=True)
class Blocked:
    """One time that a host thread blocked on the device, or asked it.

    Attributes:
        call: "synchronize", "free" or "query" (which does not block).
        what: on what.
        thread: name of the host thread.
        where: function of the innermost caller outside the simulation.
    """

    call: str
    what: str
    thread: str
    where: str


Policy = Callable[[list[Stream]], Stream]


def _policy(name: str, seed: int) -> Policy:
    if name == "oldest":
        return lambda streams: min(streams, key=lambda s: s.index)
    if name == "newest":
        return lambda streams: max(streams, key=lambda s: s.index)
    if name == "random":
        rng = random.Random(seed)
        return lambda streams: rng.choice(sorted(streams, key=lambda s: s.index))
    raise ValueError(f"no policy {name!r}: oldest, newest or random")


class Scheduler:
    """All streams of a process, and the thread that runs what is on them.

    Args:
        policy: which stream is served first: "oldest", "newest" or "random".
        seed: of the random policy.
        patience: seconds without a call of the host after which the device goes on by itself.
    """

    def __init__(self, policy: str = "oldest", seed: int = 0, patience: float = 0.005) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.streams: list[Stream] = []
        self.known: Clock = {}
        self.faults: list[str] = []
        self.trace: deque[Blocked] = deque(maxlen=10_000)
        self.on_touch: Callable[[Op], None] | None = None
        self.broken: str | None = None
        self._patience = patience
        self._choose = _policy(policy, seed)
        self._made = 0
        self._held: list[int] = []
        self._blocked = 0
        self._wanted: set[Op] = set()
        self._last_call = time.monotonic()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="simulated device", daemon=True)
        self._thread.start()

    # --- putting work on streams ---

    def new_stream(self, handle: int, device: int, blocking: bool, legacy: bool = False) -> Stream:
        """One more stream."""
        with self.lock:
            stream = Stream(self._made, handle, device, blocking, legacy)
            self._made += 1
            self.streams.append(stream)
            return stream

    def put(self, stream: Stream, op: Op) -> Op:
        """Put a piece of work on a stream (or into the graph that the stream records)."""
        with self.changed:
            self._check()
            if stream.capture is not None:
                stream.capture.add(stream, op)
                return op
            op.needs = (*op.needs, *self._implicit(stream))
            stream.count += 1
            op.stream, op.seq = stream, stream.count
            clock = dict(self.known)
            for earlier in (*op.needs, *([stream.tail] if stream.tail else [])):
                merge(clock, earlier.clock)
            clock[stream.index] = op.seq
            op.clock = clock
            stream.tail = op
            stream.queue.append(op)
            if self.on_touch is not None and (op.reads or op.writes):
                self.on_touch(op)
            self._last_call = time.monotonic()
            self.changed.notify_all()
            return op

    def _implicit(self, stream: Stream) -> Iterator[Op]:
        """What the legacy default stream and the blocking streams of a device wait for in each other."""
        if stream.legacy:
            others = [s for s in self.streams if s.blocking and s.device == stream.device and s is not stream]
        elif stream.blocking:
            others = [s for s in self.streams if s.legacy and s.device == stream.device]
        else:
            return
        for other in others:
            if stream.legacy and other.capture is not None:
                other.capture.invalidate("work was put on the legacy stream")
                raise CudaError("cudaErrorStreamCaptureImplicit: a blocking stream records a graph")
            if other.tail is not None:
                yield other.tail

    def _check(self) -> None:
        if self.broken is not None:
            raise CudaError(self.broken)
        if self._closing:
            raise CudaError("cudaErrorCudartUnloading: the simulated device has been closed")

    # --- the host's side ---

    def wait_for(self, op: Op | None, what: str, call: str = "synchronize") -> None:
        """Block the host until a piece of work has been done."""
        with self.changed:
            self._check()
            self._note(call, what)
            if op is None:
                return
            if op.done:
                merge(self.known, op.clock)
                return
            if threading.get_ident() in self._held:
                raise CudaError(f"the host blocks on {what} while it holds the device itself")
            self._blocked += 1
            self.changed.notify_all()
            try:
                while not op.done:
                    self._check()
                    self.changed.wait()
            finally:
                self._blocked -= 1
            self._check()
            merge(self.known, op.clock)

    def ask(self, op: Op | None, what: str) -> bool:
        """Whether a piece of work has been done; the device will come to it, since somebody wants to know."""
        with self.changed:
            self._check()
            self._note("query", what)
            if op is None:
                return True
            if op.done:
                merge(self.known, op.clock)
                return True
            self._wanted.add(op)
            self.changed.notify_all()
            return False

    def want(self, op: Op | None) -> None:
        """Let the device come to a piece of work; no call of the host."""
        with self.changed:
            if op is not None and not op.done and op.capture is None:
                self._wanted.add(op)
                self.changed.notify_all()

    def _note(self, call: str, what: str) -> None:
        where = "?"
        for frame in reversed(traceback.extract_stack(limit=12)):
            if not frame.filename.rpartition("/")[2].startswith("simulated_"):
                where = f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
                break
        self.trace.append(Blocked(call, what, threading.current_thread().name, where))

    def blocking_calls(self) -> list[Blocked]:
        """Calls since the last :meth:`forget` that blocked the host, or would have."""
        with self.lock:
            return [b for b in self.trace if b.call != "query"]

    def forget(self) -> None:
        """Begin the trace anew."""
        with self.lock:
            self.trace.clear()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let nothing begin to run within the block; a host that blocks there on the device is refused."""
        with self.changed:
            self._held.append(threading.get_ident())
        try:
            yield
        finally:
            with self.changed:
                self._held.remove(threading.get_ident())
                self.changed.notify_all()

    def fault(self, text: str) -> None:
        """Record something that a real device would not notice, or not survive."""
        with self.lock:
            self.faults.append(text)

    # --- the device's side ---

    def finish(self, op: Op) -> None:
        """A piece of work is done; only the first call counts."""
        with self.changed:
            if op.done:
                return
            op.done = True
            stream = op.stream
            assert stream is not None
            if stream.queue and stream.queue[0] is op:
                stream.queue.popleft()
            self._wanted.discard(op)
            self.changed.notify_all()

    def _work(self) -> None:
        while (op := self._next()) is not None:
            try:
                outcome = op.body(op) if op.body is not None else None
            except BaseException as error:
                with self.changed:
                    self.broken = f"cudaErrorLaunchFailure: {op}: {error}"
                    self.faults.append(f"{self.broken}\n{traceback.format_exc()}")
                    self.changed.notify_all()
                outcome = None
            if outcome is not LATER:
                self.finish(op)

    def _next(self) -> Op | None:
        """The next piece of work, once it is time for it; None at the end."""
        with self.changed:
            while not self._closing:
                ready = [s for s in self.streams if s.queue and s.queue[0].may_run]
                if not ready or self._held or self.broken is not None:
                    self.changed.wait()
                    continue
                rest = self._last_call + self._patience - time.monotonic()
                if self._blocked or self._wanted or rest <= 0:
                    op = self._choose(ready).queue[0]
                    op.running = True
                    return op
                self.changed.wait(rest)
            return None

    def close(self) -> None:
        """End the device's thread; what has not run never will."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        self._thread.join()


def merge(clock: Clock, other: Clock) -> None:
    """Let a clock be after another one, too."""
    for index, seq in other.items():
        if clock.get(index, 0) < seq:
            clock[index] = seq
