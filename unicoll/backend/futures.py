"""The futures of ``Work.get_future``: Python's, with the methods of torch's in addition."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")


class Future(concurrent.futures.Future[T], Generic[T]):
    """A ``concurrent.futures.Future`` that torch's comm hooks can use, too."""

    def wait(self, timeout: float | None = None) -> T:
        """The result, after waiting ``timeout`` seconds at most; raises the operation's error."""
        return self.result(timeout)

    def value(self) -> T:
        """The result of a future that is done; raises the operation's error, or TimeoutError when not done."""
        return self.result(0)

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """A future of ``callback(self)``, which is called when this one is done, on the thread that ends it.

        The new future's error is the exception of ``callback``, which also raises this one's by ``self.value()``.
        """
        made: Future[S] = Future()
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
