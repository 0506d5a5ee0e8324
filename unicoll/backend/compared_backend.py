"""Base of the backends whose recorded calls are compared between the ranks, and what does that for
all of a job (:mod:`unicoll.backend.call_comparison`)."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from unicoll.backend.call_comparison import CallComparison, CallInProgress, Recorded
from unicoll.backend.contract import Context, Job
from unicoll.backend.error_texts import Report
from unicoll.backend.group_state import GroupState
from unicoll.backend.observed_backend import ObservedBackend
from unicoll.calls import flight_recorder, thread_activity
from unicoll.calls.call import Call
from unicoll.calls.call_site import place_text, site_of
from unicoll.calls.flight_recorder import CallKind, PendingEntry
from unicoll.calls.thread_activity import Activity
from unicoll.errors import DistError
from unicoll.net.control.group_failures import pack_error, unpack_error

_PAUSE_S = 0.2
"""Time between comparisons of the calls; longer if there are more than :data:`_MESSAGES_PER_S`
messages a second."""
_MESSAGES_PER_S = 1000
_MAX_INBOX = 10_000
_INBOX_S = 30.0
"""Messages about calls that wait for their group to be made on this rank, and how long they do."""


class ComparedBackend(ObservedBackend):
    """A backend that does not compare the ranks' calls before it makes them.

    Attributes:
        comparison: of the recorded calls, after they were made.
        difference: the error of calls that differ, once it is known; else None.
    """

    def __init__(self, context: Context, state: GroupState | None = None) -> None:
        super().__init__(context, state)
        self.comparison = CallComparison(context)
        self.difference: DistError | None = None

    @property
    def is_comparable(self) -> bool:
        """True if the ranks' numbers of a call are equal."""
        return True

    @property
    def last_number(self) -> int:
        """The number of the last collective that this rank has begun."""
        return self.sequence

    def _report(self) -> Report:
        report = super()._report()
        # Several calls may be in progress, of which the state has the first.
        report["seq"] = self.last_number
        return report

    def unrecorded(self) -> CallInProgress | None:
        """The oldest call in progress, if only another library's recorder has it."""
        return None

    def compare(self, calls: Sequence[Recorded]) -> None:
        """Compare this rank's last collectives with those of the other ranks; several times a
        second, on one thread."""
        if self.difference is not None or not self.is_comparable:
            return
        call = self.state.call
        self.comparison.add(calls, call.seq if call is not None else 0, self.unrecorded())
        found = self.comparison.find_difference()
        if found is not None:
            self._note(found, is_told=False)
            # Without effect if the group has failed before.
            self.state.announce(found)
            others = [rank for rank in self.context.ranks if rank != self.context.job.rank]
            self.comparison.send(others, {"differ": pack_error(found)})

    def receive(self, message: dict[str, Any]) -> None:
        """A message of another rank about its calls."""
        rank = message["from"]
        if rank in self.context.ranks:
            if "differ" in message:
                self._note(unpack_error(message["differ"]), is_told=True)
            self.comparison.receive(rank, message)

    def _note(self, error: DistError, is_told: bool) -> None:
        self.difference = error
        self.calls_differ(error, is_told)

    def calls_differ(self, error: DistError, is_told: bool) -> None:
        """The calls differ, and the group fails; ``is_told`` if another rank has found it."""

    def lost_member(self, call: Call) -> int | None:
        lost = super().lost_member(call)
        return self.comparison.lacks(call.seq) if lost is None and self.is_comparable else lost


class Comparisons:
    """Compares the calls of a job's groups, on one thread at a time."""

    def __init__(self, job: Job) -> None:
        self._size = job.size
        # Messages and their times of arrival. The control thread appends them, and the thread that
        # compares takes them: a deque needs no lock for that.
        self._inbox: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_MAX_INBOX)
        self._compared_at = 0.0
        if job.control is not None:
            job.control.handle("calls", lambda found: self._inbox.append((time.monotonic(), found)))

    def compare(
        self,
        backends: Iterable[ComparedBackend],
        recorded: Callable[[], Mapping[ComparedBackend, Sequence[Recorded]]],
        at_once: bool = False,
    ) -> None:
        """Compare the calls of the ranks, if it is time for that.

        Args:
            backends: of all groups of the job.
            recorded: gives the collectives of each that the flight recorder has.
            at_once: True to compare now.
        """
        by_name = {backend.comparison.name: backend for backend in backends}
        now = time.monotonic()
        pause = max(_PAUSE_S, len(by_name) * self._size / _MESSAGES_PER_S)
        if now - self._compared_at < pause and not at_once:
            return
        self._compared_at = now
        # Each message once: those for groups that this rank has not made yet are put back.
        for _ in range(len(self._inbox)):
            arrived, message = self._inbox.popleft()
            backend = by_name.get(message["group"])
            if backend is not None:
                backend.receive(message)
            elif now - arrived < _INBOX_S:
                self._inbox.append((arrived, message))
        if by_name:
            calls = recorded()
            for backend in by_name.values():
                backend.compare(calls.get(backend, ()))


class _Ended(NamedTuple):
    """A blocking collective that has ended, as the comparison has it."""

    kind: CallKind
    seq: int
    code: Any
    offset: int

    @property
    def site(self) -> str:
        """``file:line`` of the caller."""
        return place_text(self.code, self.offset)


def last_collectives(
    backends: Iterable[ComparedBackend],
) -> Mapping[ComparedBackend, Sequence[Recorded]]:
    """For each backend its collectives that have a number, and that the comparison does not have:
    those in the flight recorder, and blocking ones in progress."""
    by_key = {(b.context.job.number, b.context.name, b.name): b for b in backends}
    found: dict[ComparedBackend, list[Recorded]] = defaultdict(list)
    # The threads come first: a call that ends meanwhile is in the ring then.
    for activity in [Activity(*entry) for entry in [*thread_activity.entries]]:
        call, kind = activity.what, activity.kind
        if isinstance(call, Call) and call.seq and kind is not None and activity.frame is not None:
            backend = by_key.get((kind.job, kind.group, kind.backend))
            if backend is not None:
                found[backend].append(CallInProgress(call.seq, kind, site_of(activity.frame)))
    wanted = {key: (backend, backend.comparison.known_until) for key, backend in by_key.items()}
    # The newest calls are last, so a few entries are looked at as long as there are few new ones.
    for entry in reversed(flight_recorder.snapshot()):
        if not wanted:
            break
        if isinstance(entry, PendingEntry):
            # Until the library has returned, the number is that of the call only. Read once: the
            # thread that posts the call sets it to None.
            posted = entry.call
            made: Recorded = (
                entry if posted is None else CallInProgress(posted.seq, entry.kind, entry.site)
            )
        elif isinstance(entry, tuple):
            made = _Ended(entry[0], entry[1], *entry[4:6])
        else:
            continue
        key = made.kind.job, made.kind.group, made.kind.backend
        of_backend = wanted.get(key)
        if of_backend is None or not made.seq:
            continue
        backend, known = of_backend
        if made.seq <= known:
            del wanted[key]
        else:
            found[backend].append(made)
    return found
