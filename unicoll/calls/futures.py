"""The futures of ``Work.get_future``: torch's for torch tensors, else Python's with the methods of
torch's."""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from unicoll.errors import DistError
from unicoll.process import excepthook

T = TypeVar("T")
S = TypeVar("S")


class Future(concurrent.futures.Future[T], Generic[T]):
    """A ``concurrent.futures.Future`` that torch's comm hooks can use, too."""

    def wait(self, timeout: float | None = None) -> T:
        """The result, after waiting ``timeout`` seconds at most; raises the operation's error."""
        return self.result(timeout)

    def value(self) -> T:
        """The result of a future that is done; raises the operation's error, or TimeoutError when
        not done."""
        return self.result(0)

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """A future of ``callback(self)``, which is called when this one is done, on the thread that
        ends it.

        The new future's error is the exception of ``callback``, which also raises this one's by
        ``self.value()``.
        """
        made: Future[S] = Future()
        # A future that runs cannot be cancelled: the operation goes on anyhow.
        made.set_running_or_notify_cancel()

        def follow(_: Any) -> None:
            try:
                value = callback(self)
            except BaseException as error:
                made.set_exception(error)
            else:
                made.set_result(value)

        self.add_done_callback(follow)
        return made


class Operation(Protocol):
    """What a future is made of: a Work."""

    @property
    def orders_streams(self) -> bool: ...

    def wait(self) -> object: ...

    def exception(self) -> BaseException | None: ...

    def add_done_callback(self, fn: Callable[[], None]) -> None: ...


def work_future(
    work: Operation, outputs: Sequence[Any], value: Callable[[], Any] | None = None
) -> Any:
    """The future of an operation: :func:`torch_future` if its first output is a torch tensor, else
    python_future."""
    torch: Any = sys.modules.get("torch")
    is_torch = torch is not None and len(outputs) > 0 and isinstance(outputs[0], torch.Tensor)
    return (
        torch_future(torch, work, outputs, value)
        if is_torch
        else python_future(work, outputs, value)
    )


def torch_future(
    torch: Any, work: Operation, outputs: Sequence[Any], value: Callable[[], Any] | None = None
) -> Any:
    """A ``torch.futures.Future`` of an operation.

    It is complete when the operation has ended. Where ``work.wait`` makes streams wait (NCCL), it
    is complete at once, like NCCL's in torch.distributed, and its own ``wait`` makes the current
    stream wait for the operation.

    Args:
        outputs: its output arrays.
        value: returns what the future is complete with when the operation has ended, in place of
            the outputs.
    """
    on_device = len(outputs) > 0 and (outputs[0].is_cuda or outputs[0].is_xpu)
    devices = [outputs[0].device] if on_device and value is None else None
    if devices is None or not work.orders_streams:
        return _at_end(
            torch.futures.Future(devices=devices), work, value or partial(_waited, work, outputs)
        )
    module = torch.get_device_module(outputs[0].device)
    # The stream is one of torch's pool. It waits for the operation, and set_result() records an
    # event on it; the caller's own stream does not wait.
    with module.stream(module.Stream(outputs[0].device)):
        ended = torch.futures.Future(devices=devices)
        try:
            work.wait()
        except Exception as error:
            return _failed(ended, error)
        ended.set_result(outputs)
    return ended


def python_future(
    work: Operation, outputs: Sequence[Any], value: Callable[[], Any] | None = None
) -> Future[Any]:
    """A :class:`Future` of an operation, complete when it has ended; arguments as of
    :func:`torch_future`."""

    def result() -> Sequence[Any]:
        error = work.exception()
        if error is not None:
            raise error
        return outputs

    ended: Future[Any] = Future()
    ended.set_running_or_notify_cancel()
    made: Future[Any] = _at_end(ended, work, value or result)
    return made


def _waited(work: Operation, outputs: Sequence[Any]) -> Sequence[Any]:
    """The outputs of an operation that has ended; strided ones are unpacked on the stream that the
    future is of."""
    work.wait()
    return outputs


def _at_end(ended: Any, work: Operation, value: Callable[[], Any]) -> Any:
    def result(_: Any) -> Any:
        try:
            return value()
        except DistError as error:
            excepthook.for_future(error)
            raise error

    # A torch future gets an error only from such a callback.
    future = ended.then(result)
    work.add_done_callback(lambda: ended.set_result(None))
    return future


def _failed(ended: Any, error: Exception) -> Any:
    def fail(_: Any) -> Any:
        if isinstance(error, DistError):
            excepthook.for_future(error)
        raise error

    future = ended.then(fail)
    ended.set_result([])
    return future
