"""``Future``: what ``Work.get_future`` gives, Python's future with the methods of torch's beside its own."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Future"]

T = TypeVar("T")
S = TypeVar("S")


class Future(concurrent.futures.Future[T], Generic[T]):
    """A result that comes later: a ``concurrent.futures.Future`` that torch's comm hooks can use, too."""

    def wait(self, timeout: float | None = None) -> T:
        """The result, waiting for it ``timeout`` seconds at most; raises what the operation raised."""
        return self.result(timeout)

    def value(self) -> T:
        """The result of a future that is done; raises what the operation raised, TimeoutError when not done."""
        return self.result(0)

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """A future of ``callback(self)``, which is called when this one is done, on the thread that ends it.

        What ``callback`` raises is the new future's error; so is this one's, which ``self.value()`` raises in it.
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
