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
        at_end = _torch_at_end if devices is None else _device_at_end
        return at_end(torch, devices, work, value or partial(_waited, work, outputs))
    module = torch.get_device_module(outputs[0].device)
    # The stream is one of torch's pool. It waits for the operation, and set_result() records an
    # event on it; the caller's own stream does not wait.
    with module.stream(module.Stream(outputs[0].device)):
        ended = torch.futures.Future(devices=devices)
        try:
            work.wait()
        except Exception as error:
            future = ended.then(torch._C.Future.value)
            _fail(ended, error)
            return future
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
    made = ended.then(lambda _: (value or result)())
    work.add_done_callback(lambda: ended.set_result([]))
    return made


def _waited(work: Operation, outputs: Sequence[Any]) -> Sequence[Any]:
    """The outputs of an operation that has ended; strided ones are unpacked on the stream that the
    future is of."""
    work.wait()
    return outputs


def _device_at_end(torch: Any, devices: Any, work: Operation, value: Callable[[], Any]) -> Any:
    ended = torch.futures.Future(devices=devices)

    # It runs on streams of the future's own, on which arrays are unpacked.
    def result(_: Any) -> Any:
        try:
            return value()
        except DistError as error:
            excepthook.for_future(error)
            raise error

    future = ended.then(result)
    work.add_done_callback(lambda: ended.set_result(None))
    return future


def _torch_at_end(torch: Any, devices: Any, work: Operation, value: Callable[[], Any]) -> Any:
    ended = torch.futures.Future()
    # A future of torch gets an error only from a callback. The text of an error that this function
    # of C++ raises has no lines with the frames of Python that have called it.
    future = ended.then(torch._C.Future.value)

    def end() -> None:
        try:
            outputs = value()
        except BaseException as error:
            _fail(ended, error)
        else:
            ended.set_result(outputs)

    work.add_done_callback(end)
    return future


def _fail(ended: Any, error: BaseException) -> None:
    """End a future of torch whose ``value`` raises an error from now on."""
    if isinstance(error, DistError):
        excepthook.for_future(error)
    ended._set_unwrap_func(_raiser(error))
    ended.set_result([])


def _raiser(error: BaseException) -> Callable[[Any], Any]:
    """A function that raises an error. At debug level DETAIL it has frames of Python."""
    if excepthook.shows_all_frames():

        def fail(_: Any) -> None:
            raise error

        return fail
    import asyncio

    # The iterator of such a future raises its error in C.
    failed: asyncio.Future[Any] = asyncio.Future(loop=_NoLoop())  # type: ignore[arg-type]
    failed.set_exception(error)
    return partial(next, iter(failed))


class _NoLoop:
    """What a future of asyncio asks of its loop."""

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: object) -> None:
        """Nobody has asked for the error."""
