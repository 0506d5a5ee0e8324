"""Fallbacks for backends that are not a :class:`~unicoll.backend.host.host_backend.HostBackend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unicoll.backend.host.fallbacks import available
from unicoll.backend.host.host_backend import HostBackend

if TYPE_CHECKING:
    from unicoll.backend.contract import Backend, Context
    from unicoll.calls.call import Call
    from unicoll.calls.options import CallOptions
    from unicoll.calls.work import Completion
    from unicoll.errors import DistError


def with_fallbacks(backend: Backend, context: Context) -> Backend:
    """The backend of a group, with all the operations that fallbacks can add to it."""
    if isinstance(backend, HostBackend) or available(backend.caps) == backend.caps.native:
        return backend
    adapter = _FallbackAdapter(backend, context)
    adapter.watch()
    return adapter


class _Messages:
    """The sends and receives of another backend."""

    has_callbacks = True
    """Unknown, so callbacks are assumed."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def run(self, call: Call) -> None:
        self._inner.run(call)

    def post(self, call: Call) -> Completion:
        return self._inner.post((call,))

    def iprobe(self, call: Call) -> bool:
        return self._inner.iprobe(call)

    def abort(self) -> None:
        """The adapter aborts the backend itself."""

    def drain(self, timeout: float) -> None:
        """The backend waits for its sends when it is closed."""

    def close(self) -> bool:
        """The adapter closes the backend itself."""
        return True


class _FallbackAdapter(HostBackend):
    """Puts the collectives of another backend, and the fallbacks, in one order."""

    stages = False

    def __init__(self, inner: Backend, context: Context) -> None:
        self.name = inner.name  # type: ignore[misc]
        self.caps = inner.caps  # type: ignore[misc]
        # A fallback compares its calls. So a refused list fails no group, unless the backend has a
        # gather or scatter of its own and does not compare calls.
        self.compares = inner.compares or inner.caps.native.isdisjoint(("gather", "scatter"))  # type: ignore[misc]
        self._inner = inner
        super().__init__(context, _Messages(inner))
        self.state.add_listener(inner.abort)

    def execute(self, call: Call) -> None:
        self.state.call = call
        try:
            self._inner.run(call)
        finally:
            self.state.last, self.state.call = call.ended, None

    @property
    def staging(self) -> int:
        return self._inner.staging

    def describe(self) -> str:
        return self._inner.describe()

    def refuse_options(self, options: CallOptions) -> None:
        self._inner.refuse_options(options)

    def split(self, context: Context | None) -> Backend | None:
        self._await_calls()
        return self._inner.split(context)

    def shrink(self, context: Context, excluded: Sequence[int]) -> Backend:
        return self._inner.shrink(context, excluded)

    def grow(self, context: Context) -> Backend:
        self._await_calls()
        return self._inner.grow(context)

    def _await_calls(self) -> None:
        """Wait for the calls before a split, which may be an operation of all members in the order
        of their calls."""
        if not self.queue.in_callback:
            self.queue.idle(self.context.timeout)

    def release(self, clean: bool, failure: DistError | None) -> None:
        self._inner.close()
