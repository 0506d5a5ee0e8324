"""Debug level DETAIL: logs the calls of a group, before they start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from unicoll.backend.contract import Backend, Context, Tracker
from unicoll.calls.call import Call
from unicoll.calls.call_site import call_site
from unicoll.calls.work import Completion
from unicoll.group.wrapped_backend import WrappedBackend
from unicoll.process import logs
from unicoll.process.debug_level import DebugLevel, get_debug_level

log = logs.logger("calls")


class CallLog:
    """Wraps the backends of one group while the level is DETAIL."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._wrapped: dict[Backend, _LoggedBackend] = {}

    def wrap(self, backend: Backend) -> Backend:
        """The wrapped backend, the same object for each call with one backend; the backend at
        another level."""
        if get_debug_level() is not DebugLevel.DETAIL:
            return backend
        # Each backend has one wrapper, since calls are put together in batches by the identity of
        # their backend (Dispatcher.start_batch). Of two threads that make one, both get the first.
        return self._wrapped.setdefault(backend, _LoggedBackend(backend, self._context))


class _LoggedBackend(WrappedBackend):
    """A backend whose calls are logged before they start."""

    def run(self, call: Call) -> Tracker | None:
        call.site = call.site or call_site()
        self._log((call,))
        return self._inner.run(call)

    def post(self, calls: Sequence[Call], stream: Any = None) -> Completion:
        self._log(calls)
        return self._inner.post(calls, stream)

    def post_each(self, calls: Sequence[Call], stream: Any = None) -> list[Completion]:
        self._log(calls)
        return self._inner.post_each(calls, stream)

    def _log(self, calls: Sequence[Call]) -> None:
        if not log.isEnabledFor(logging.DEBUG):
            return
        # The inner backend numbers the calls when it gets them, after this.
        number = self._inner.sequence
        for i, call in enumerate(calls, 1):
            at = "" if call.op.message else f" #{number + i}"
            where = call.site or calls[0].site
            log.debug(
                "%s%s on group %r, %s, at %s",
                call.describe(),
                at,
                self._context.name,
                self.name,
                where,
            )
