"""torch's ``Work`` objects for unicoll's operations."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from unicoll.calls.error_marks import mark_delivered
from unicoll.calls.futures import torch_future
from unicoll.calls.work import Completion
from unicoll.calls.work import Work as Handle
from unicoll.errors import DistError
from unicoll.group.process_group import ProcessGroup
from unicoll.process.timeouts import Timeout, to_seconds
from unicoll.torch_plugin.error_messages import adapt_for_torch

_NO_TIMEOUT = timedelta(0)


class TorchWork(dist.Work):  # type: ignore[misc]
    """torch.distributed's ``Work`` for a unicoll operation; ``released`` if it has no references to
    the tensors."""

    def __init__(
        self,
        handle: Handle | ReleasedHandle,
        outputs: Sequence[Any],
        registry: WorkRegistry,
        key: int,
    ) -> None:
        super().__init__()
        self._handle = handle
        self._outputs = list(outputs)
        self._registry = registry
        self._key = key
        self._future: Any = None
        self.released = False

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the operation (on CUDA the current stream does); raises its error.

        The caller can wait again after an exception of a signal's handler. If torch's code waits,
        the group fails.
        """
        try:
            self._handle.wait(timeout)
            self._registry.waited(self._key)
        except DistError as error:
            mark_delivered(error)
            adapt_for_torch(error)
            raise error
        except BaseException as error:
            self._registry.interrupted(error)
            raise
        return True

    def synchronize(self) -> None:
        """Same as :meth:`wait`."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return self._handle.is_completed()

    def is_success(self) -> bool:
        return self._handle.is_success()

    def exception(self) -> BaseException | None:
        error = self._handle.exception()
        mark_delivered(error)
        return error

    def result(self) -> list[Any]:
        return self._outputs

    def _source_rank(self) -> int:
        return self._handle.source_rank()

    source_rank = _source_rank

    def release_tensors(self) -> None:
        """Drop the references to the tensors; keep the operation's state."""
        handle = self._handle
        if isinstance(handle, Handle):
            completion = handle.completion
            # This comes before the error is read: an operation that ends in between keeps its
            # completion, which has the error.
            ended = completion.done()
            self._handle = ReleasedHandle(
                None if ended else completion, completion.exception(), handle.source_rank()
            )
        self._outputs = []
        self.released = True

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the output tensors or the operation's error; the same one
        for every call."""
        try:
            if self._future is None:
                self._future = torch_future(torch, self._handle, self._outputs)
        except BaseException as error:
            self._registry.interrupted(error)
            raise
        return self._future


@dataclass(slots=True)
class ReleasedHandle:
    """The state of an operation whose tensors have been released; by default of one that has ended
    without an error.

    The operation may still run on the device: the backend keeps its memory.
    """

    completion: Completion | None = None
    error: BaseException | None = None
    source: int = -1

    @property
    def orders_streams(self) -> bool:
        return self.completion is not None and self.completion.orders_streams

    def wait(self, timeout: Timeout = None) -> bool:
        if self.completion is not None:
            self.completion.wait(to_seconds(timeout) or None)
        elif self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.completion is None or self.completion.done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return self.error if self.completion is None else self.completion.exception()

    def source_rank(self) -> int:
        return self.source

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        if self.completion is None:
            fn()
        else:
            self.completion.add_done_callback(fn)


class CompletedWork(dist.Work):  # type: ignore[misc]
    """The work of a completed blocking call, without its outputs."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result([])
        return future

    def result(self) -> list[Any]:
        return []


DONE = CompletedWork()
"""The shared work of all completed blocking calls."""


class WorkRegistry:
    """Keeps works alive that C++ may hold, since C++ does not keep the Python part of an object
    alive.

    From 2.7 on torch does so for the results of methods that C++ calls (PyWorkHolder), but not for
    works that Python passes to C++, as DDP does for uneven inputs.

    References of C++ cannot be detected. So the newest :attr:`MAX_RELEASED` works of ended
    operations stay. They release their tensors unless Python code references the work: works that
    have been waited for at once (the backend keeps memory that the device still uses), other works
    once the operation has ended and :attr:`MIN_COMPLETE` newer works exist.

    Attributes:
        MIN_COMPLETE: number of newest works that keep their tensors.
        MAX_RELEASED: number of works that are kept without tensors.
        BATCH: works that are checked per new operation.
    """

    MIN_COMPLETE, MAX_RELEASED, BATCH = 16, 4096, 4

    def __init__(self, group: ProcessGroup) -> None:
        # A program may keep a work for longer than the group.
        self._group = weakref.ref(group)
        self._keys = count()
        self._held: dict[int, TorchWork] = {}
        self._waited: deque[int] = deque()
        self._posted: deque[int] = deque()
        self._released: deque[int] = deque()

    def add(self, handle: Handle | ReleasedHandle, outputs: Sequence[Any]) -> TorchWork:
        key = next(self._keys)
        work = TorchWork(handle, outputs, self, key)
        self._held[key] = work
        self._posted.append(key)
        self._prune()
        return work

    def waited(self, key: int) -> None:
        self._waited.append(key)

    def interrupted(self, error: BaseException) -> None:
        """Fail the group if ``error`` ends a wait of torch's code, which has no second one.

        A functional collective would return tensors that are not complete, and DDP leave out the
        rest of its buckets.
        """
        frame: FrameType | None = sys._getframe()
        while frame is not None and _module(frame).startswith("unicoll.torch_plugin."):
            frame = frame.f_back
        by_torch = frame is not None and _module(frame).partition(".")[0] == "torch"
        if by_torch and (group := self._group()) is not None:
            group.interrupted(error)

    def _prune(self) -> None:
        """Check a few works: checking all, or a callback for each, would cost more than the
        operations."""
        if _is_capturing():
            # Queries are not allowed, and a graph's tensors are in use until the capture ends.
            return
        for _ in range(min(self.BATCH, len(self._waited))):
            self._release_next(self._waited, True)
        for _ in range(min(self.BATCH, len(self._posted) - self.MIN_COMPLETE)):
            if not self._release_next(self._posted, False):
                break
        while len(self._released) > self.MAX_RELEASED:
            self._held.pop(self._released.popleft(), None)

    def _release_next(self, queue: deque[int], waited: bool) -> bool:
        """Release the tensors of the first work in the queue, or requeue it; False to stop at this
        work."""
        try:
            key = queue.popleft()
        except IndexError:
            # Another thread has taken it.
            return False
        work = self._held.get(key)
        if work is None or (waited and work.released):
            return True
        if sys.getrefcount(work) > _OWN_REFERENCES:
            queue.append(key)
        elif waited:
            work.release_tensors()
        elif work.is_completed():
            work.release_tensors()
            self._released.append(key)
        else:
            queue.append(key)
            return False
        return True

    def clear(self) -> None:
        """Drop all works; called when the group is closed."""
        self._held.clear()
        self._waited.clear()
        self._posted.clear()
        self._released.clear()


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _own_references() -> int:
    """Reference count of a work that only the dictionary and a local variable reference; 3.14 does
    not count all."""
    held = {0: object()}
    work = held.get(0)
    return sys.getrefcount(work)


_OWN_REFERENCES = _own_references()


_XPU_GRAPHS = getattr(torch._C, "_has_xpu", False) and hasattr(
    torch.xpu, "is_current_stream_capturing"
)


def _is_capturing() -> bool:
    """True if the current stream of a device is capturing a graph."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    return (
        _XPU_GRAPHS and torch.xpu.is_initialized() and bool(torch.xpu.is_current_stream_capturing())
    )
