"""The failures of groups: announced through the relay, which keeps the first one of each group."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import unicoll.errors as errors
from unicoll.errors import DistError
from unicoll.process.formatting import printable, printable_values
from unicoll.process.interrupts import Changes

Message = dict[str, Any]

_ANNOUNCEMENT_S = 1.0
"""Seconds to wait for the relay's announcement of a failure."""


class GroupFailures:
    """The error of each group that has failed, and who is called when one does.

    Args:
        changed: notified when a group has failed, or a rank has ended.
        relay_ended: True if there is no relay, so that no announcement can arrive.

    Attributes:
        failure_listeners: called with a group's name and error, once for each group, before its
            calls raise the error; also for groups of other ranks whose failure the relay announces
            here.
    """

    def __init__(
        self, changed: Changes, send: Callable[[Message], None], relay_ended: Callable[[], bool]
    ) -> None:
        self.failure_listeners: list[Callable[[str, DistError], None]] = []
        self._changed = changed
        self._send = send
        self._relay_ended = relay_ended
        self._errors: dict[str, DistError] = {}
        self._messages: dict[str, Message] = {}
        # The groups whose failure the listeners have got; they get each one once.
        self._reported: set[str] = set()
        # The functions by group and backend: a group may have several backends.
        self._callbacks: dict[tuple[str, str], Callable[[DistError], None]] = {}

    def watch(self, group: str, backend: str, on_failure: Callable[[DistError], None]) -> None:
        """Call ``on_failure`` when the group fails, at once if it has."""
        # Both steps are under the lock. A failure that arrives now either is found here, or finds
        # the function there: it is called once.
        with self._changed.lock:
            self._callbacks[group, backend] = on_failure
            failure = self._copy(group)
        if failure is not None:
            on_failure(failure)

    def unwatch(self, group: str, backend: str) -> None:
        """Do not call the function of the group and backend any more."""
        with self._changed.lock:
            self._callbacks.pop((group, backend), None)

    def group_failure(self, group: str, timeout: float = 0.0) -> DistError | None:
        """The error with which ``group`` failed, waiting up to ``timeout`` seconds; None if it has
        not failed."""
        self._changed.wait_for(lambda: group in self._errors or self._relay_ended(), timeout)
        return self._copy(group)

    def _copy(self, group: str) -> DistError | None:
        """A copy: the error that is kept must not keep the frames, and with them arrays, of those
        who raise it."""
        return copy.copy(self._errors.get(group))

    def announce_failure(self, group: str, members: Iterable[int], error: DistError) -> DistError:
        """Announce that ``group`` failed; returns the error that all its members raise.

        It is the first error that has reached the relay, or ``error`` if the relay cannot be
        reached. Then a relay that replaces it gets the error.
        """
        failure = {
            "t": "fail",
            "group": group,
            "members": list(members),
            "error": pack_error(error),
        }
        # The failure is kept before it is sent. A new relay gets it from introduce(), or, if that
        # has run already, by the message below.
        with self._changed.lock:
            self._messages.setdefault(group, failure)
        self._send(failure)
        announced = self.group_failure(group, _ANNOUNCEMENT_S)
        # Without an announcement the control thread does not call the listeners.
        if announced is None:
            self._inform_listeners(group, error)
        return announced or error

    def messages(self) -> list[Message]:
        """The failures for a new relay: the old one may not have sent them to all members."""
        with self._changed.lock:
            return [*self._messages.values()]

    def receive(self, message: Message, is_member: bool) -> None:
        """The relay has announced a failure, of a group of this process or of other ranks."""
        group, error = message["group"], unpack_error(message["error"])
        if not is_member:
            self._inform_listeners(group, error)
            return
        with self._changed.lock:
            # This replaces the announcement of this rank if another one was first: a new relay must
            # get the error that the members raise.
            self._messages[group] = message
        # The listeners come before the error is set, which ends the calls: they may still copy what
        # these wait in.
        self._inform_listeners(group, error)
        with self._changed.lock:
            # A new relay sends the failures of the last one again.
            if group in self._errors:
                return
            self._errors[group] = error
            self._changed.notify_all()
            callbacks = [fn for (watched, _), fn in self._callbacks.items() if watched == group]
        # The functions are called without the lock, which the threads need that were just woken.
        for callback in callbacks:
            callback(copy.copy(error))

    def _inform_listeners(self, group: str, error: DistError) -> None:
        with self._changed.lock:
            if group in self._reported:
                return
            # The name is added before the calls: the control thread and one that announces the
            # failure may be here at once.
            self._reported.add(group)
        for listener in self.failure_listeners:
            listener(group, error)


_FIELDS = ("group", "rank", "op", "seq", "host", "pid", "missing", "ranks")


def pack_error(error: DistError) -> Message:
    """An error as JSON."""
    fields = {
        name: getattr(error, name) for name in _FIELDS if getattr(error, name, None) is not None
    }
    return {"type": type(error).__name__, "message": str(error), "fields": fields}


def unpack_error(packed: Message) -> DistError:
    """The error of :func:`pack_error`; a :class:`DistError` if its type is not one of unicoll's.

    Its texts, which another process has sent, are made printable; the lines of the message stay.
    """
    # Another process has sent the names of the type and of the fields.
    kind = getattr(errors, packed["type"]) if packed["type"] in errors.__all__ else DistError
    error: DistError = kind(printable(str(packed["message"])))
    for name, value in packed["fields"].items():
        if name in _FIELDS:
            setattr(error, name, value if name == "group" else printable_values(value))
    return error
