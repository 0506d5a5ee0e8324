"""Base of the backends that pass a group's calls on to another one, and do something before or
after."""

from __future__ import annotations

from unicoll.backend.contract import Backend, Context
from unicoll.calls.call import Call


class WrappedBackend(Backend):
    """Passes on what is no call that is made or posted."""

    def __init__(self, inner: Backend, context: Context) -> None:
        self.name = inner.name  # type: ignore[misc]
        self.caps = inner.caps  # type: ignore[misc]
        self.compares = inner.compares  # type: ignore[misc]
        self._inner = inner
        self._context = context

    def iprobe(self, call: Call) -> bool:
        return self._inner.iprobe(call)

    @property
    def executing_backend(self) -> Backend | None:
        return self._inner.executing_backend

    def abort(self, error: Exception) -> None:
        self._inner.abort(error)

    def close(self) -> None:
        self._inner.close()
