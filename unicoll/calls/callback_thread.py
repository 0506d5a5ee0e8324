"""The thread on which the callbacks of a group's messages run."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from unicoll.process import logs
from unicoll.process.interrupts import LazyThread

if TYPE_CHECKING:
    from unicoll.calls.work import HostCompletion

_CLOSE_S = 2.0


class CallbackThread:
    """Runs callbacks in place of the thread that has found the end of their operation.

    That thread may be the program's main thread, which waits for some other message: an exception
    of a signal's handler in a callback would leave a future incomplete for ever, or the lock of a
    ``concurrent.futures.Future`` held.

    Args:
        name: of the thread, which starts with the first callback.

    Attributes:
        ended: operations that have ended and have callbacks. Its ``put``, a C function, is all that
            the thread that ends one has to call, so no exception comes between the end and the
            callbacks.
    """

    def __init__(self, name: str) -> None:
        self.ended: SimpleQueue[HostCompletion | None] = SimpleQueue()
        self._thread = LazyThread(name)
        self._attached: set[Callable[[], None]] = set()

    @property
    def pending(self) -> bool:
        """True if callbacks are attached that have not begun."""
        return bool(self._attached)

    def attach(self, fn: Callable[[], None]) -> Callable[[], None]:
        """The function to attach to an operation in place of ``fn``, which counts as pending until
        it begins."""

        def callback() -> None:
            self._attached.discard(callback)
            fn()

        self._thread.start(self._run)
        try:
            self._attached.add(callback)
        except BaseException:
            # A signal's handler may raise behind add(). The function would be attached to nothing
            # then, and count as pending for ever.
            self._attached.discard(callback)
            raise
        return callback

    def _run(self) -> None:
        while (completion := self.ended.get()) is not None:
            try:
                completion.run_callbacks()
            except BaseException:
                # The thread goes on, because the other operations have callbacks, too.
                logs.logger("backend").exception("a callback failed")
            # The name would keep the arrays of the operation alive until the next one ends.
            del completion

    def close(self) -> None:
        """End the thread once it has run the callbacks of what has ended; no operation of the group
        is in flight."""
        self.ended.put(None)
        self._thread.join(_CLOSE_S)
