"""What torch holds of an operation in flight."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from unicoll.errors import OperationTimeoutError
from unicoll.types import to_seconds
from unicoll.work import Completion
from unicoll.work import Work as Handle

from .words import in_torchs_words

__all__ = ["DONE", "Done", "Keeper", "Work"]

_NOW = timedelta(0)


class Work(dist.Work):  # type: ignore[misc]
    """A unicoll operation as torch.distributed's ``Work``.

    Args:
        handle: the operation.
        outputs: the tensors that it writes.
        keeper: keeps this object while C++ may hold it, under ``key``.
    """

    def __init__(self, handle: Handle, outputs: Sequence[Any], keeper: Keeper, key: int) -> None:
        super().__init__()
        self._handle: Handle | Over = handle
        self._outputs = list(outputs)
        self._keeper = keeper
        self._key = key
        self._future: Any = None
        self.is_short = False  # whether the tensors have been given up

    def wait(self, timeout: timedelta = _NOW) -> bool:
        """Order the caller after the operation; raises what went wrong with it."""
        try:
            self._handle.wait(timeout)
        except OperationTimeoutError as error:
            raise in_torchs_words(error) from None
        self._keeper.waited(self._key)
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or badly."""
        return self._handle.is_completed()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._handle.is_success()

    def exception(self) -> BaseException | None:
        """Its error, if it has ended badly."""
        return self._handle.exception()

    def result(self) -> list[Any]:
        """The tensors that it writes."""
        return self._outputs

    def _source_rank(self) -> int:
        return self._handle.source_rank()

    source_rank = _source_rank

    def give_up_tensors(self) -> None:
        """Keep only how the operation has ended, or that it has not."""
        self._handle = Over(self._handle)
        self._outputs = []
        self.is_short = True

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the output tensors, the same at every call; fails as the operation does."""
        if self._future is None:
            cuda = [t.device for t in self._outputs if t.device.type == "cuda"]
            self._future = self._on_a_stream(cuda[0]) if cuda else self._when_done()
        return self._future

    def _when_done(self) -> Any:
        begun: Any = torch.futures.Future()
        # torch has no way to fail a future but an error in the function of then()
        future = begun.then(lambda _: self._verdict())
        self._handle.add_done_callback(lambda: begun.set_result(None))
        return future

    def _verdict(self) -> list[Any]:
        error = self._handle.exception()
        if error is not None:
            raise error
        return self._outputs

    def _on_a_stream(self, device: Any) -> Any:
        """For CUDA tensors a future is done at once; who waits for it waits on its stream."""
        with torch.cuda.stream(self._keeper.stream(device)):
            future: Any = torch.futures.Future(devices=[device])
            self._handle.wait()
            future.set_result(self._outputs)
        return future


class Over:
    """What is left of a handle whose tensors nobody asks for any more.

    The operation need not have ended on the device: what it uses there the backend keeps.
    """

    __slots__ = ("_error", "_source", "completion")

    def __init__(self, handle: Handle | Over) -> None:
        self.completion: Completion | None = None if handle.is_completed() else handle.completion
        self._error = handle.exception()
        self._source = handle.source_rank()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Order the caller after the operation; raises what went wrong."""
        if self.completion is not None:
            self.completion.wait(to_seconds(timeout) or None)
        elif self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self.completion is None or self.completion.done()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return self._error if self.completion is None else self.completion.exception()

    def source_rank(self) -> int:
        """Rank in the group that a message came from."""
        return self._source

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` at the end of the operation."""
        if self.completion is None:
            fn()
        else:
            self.completion.add_done_callback(fn)


class Done(dist.Work):  # type: ignore[misc]
    """The work of a blocking call, which is over when the call returns.

    Args:
        outputs: the tensors that it wrote, for its future.
    """

    def __init__(self, outputs: Sequence[Any] = ()) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self.is_short = False

    def wait(self, timeout: timedelta = _NOW) -> bool:
        """True."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def give_up_tensors(self) -> None:
        """Nobody asks for them."""
        self._outputs = []
        self.is_short = True

    def get_future(self) -> Any:
        """A future that is done."""
        future: Any = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def result(self) -> list[Any]:
        """The tensors that it wrote."""
        return self._outputs


DONE = Done()
"""One for all."""


class Keeper:
    """Keeps works alive that C++ may hold: it does not keep the Python part of an object that it was given.

    Whether C++ holds one, or will wait for it again, cannot be seen. So works whose operation has ended stay, the
    newest thousands of them. But they give up their tensors, unless somebody in Python holds them: those that were
    waited for at once, since the backend keeps what the device still uses; the others once their operation has ended
    and they are not among the newest few.
    """

    _WHOLE, _MOST, _AT_ONCE = 16, 4096, 4

    def __init__(self) -> None:
        self._keys = count()
        self._held: dict[int, Work | Done] = {}
        self._waited: deque[int] = deque()
        self._posted: deque[int] = deque()
        self._slim: deque[int] = deque()
        self._streams: dict[Any, Any] = {}

    def keep(self, handle: Handle, outputs: Sequence[Any]) -> Work:
        """The work of an operation."""
        key = next(self._keys)
        work = Work(handle, outputs, self, key)
        self._held[key] = work
        self._posted.append(key)
        self._tidy()
        return work

    def keep_done(self, outputs: Sequence[Any]) -> Done:
        """The work of an operation that is over."""
        key = next(self._keys)
        self._held[key] = work = Done(outputs)
        self._posted.append(key)
        return work

    def waited(self, key: int) -> None:
        """C++ or Python has waited for a work."""
        self._waited.append(key)

    def _tidy(self) -> None:
        """Look at a few works: to ask all of them, or to be told of each end, costs more than the operations."""
        if _is_capturing():
            return  # the device may not be asked anything, and a graph's tensors are used until it is recorded
        for _ in range(min(self._AT_ONCE, len(self._waited))):
            self._shorten(self._waited, True)
        for _ in range(min(self._AT_ONCE, len(self._posted) - self._WHOLE)):
            if not self._shorten(self._posted, False):
                break
        while len(self._slim) > self._MOST:
            self._held.pop(self._slim.popleft(), None)

    def _shorten(self, queue: deque[int], waited: bool) -> bool:
        """Take the tensors of the first work in the queue, or its turn; whether the next one may have ended, too."""
        try:
            key = queue.popleft()
        except IndexError:  # another thread took it
            return False
        work = self._held.get(key)
        if work is None or (waited and work.is_short):
            return True
        if sys.getrefcount(work) > _OURS:
            queue.append(key)
        elif waited:
            work.give_up_tensors()
        elif work.is_completed():
            work.give_up_tensors()
            self._slim.append(key)
        else:
            queue.append(key)
            return False
        return True

    def stream(self, device: Any) -> Any:
        """A stream of our own on a CUDA device, for futures."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def clear(self) -> None:
        """The group is over."""
        self._held.clear()
        self._waited.clear()
        self._posted.clear()
        self._slim.clear()
        self._streams.clear()


_OURS = 3
"""References to a work that nobody else in Python holds: the table's, the local variable's, getrefcount's."""


def _is_capturing() -> bool:
    """Whether the current CUDA stream records a graph."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
