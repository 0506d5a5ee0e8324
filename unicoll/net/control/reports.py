"""Reports of the ranks about their calls, on request of a rank whose call has failed or waits for
long."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from types import NoneType
from typing import Any

from unicoll.errors import DistNetworkError
from unicoll.net.wire.interfaces import check_loopback
from unicoll.process.formatting import printable_values
from unicoll.process.interrupts import Changes

Message = dict[str, Any]
Report = dict[str, Any]

_REPLY_S = 1.0
"""Seconds to wait for reports of other ranks."""
_UNKNOWN_S = 0.3
"""How long the request to a rank that does not have the group is repeated: it may be creating the
group."""
_BEHIND_S = 1.0
"""How long the request to a rank that is in an earlier call is repeated: it may be about to leave
that call."""
_KINDS: dict[str, Any] = {
    "seq": int,
    "call": (str, NoneType),
    "last": (str, NoneType),
    "where": str,
    "links": str,
}
"""What a report has; ``{"unknown": True}`` is that of a rank without the group."""


class Reports:
    """Requests reports from other ranks, and answers their requests.

    Args:
        departed: the ranks that have ended.
        changed: notified when a report has arrived, or a rank has ended.
        relay_ended: True if there is no relay, so that no report can arrive.
    """

    def __init__(
        self,
        rank: int,
        departed: Collection[int],
        changed: Changes,
        send: Callable[[Message], None],
        relay_ended: Callable[[], bool],
    ) -> None:
        self._rank = rank
        self._departed = departed
        self._changed = changed
        self._send = send
        self._relay_ended = relay_ended
        # The functions that give the reports, by group and backend.
        self._sources: dict[tuple[str, str], Callable[[], Report]] = {}
        # The reports of the requests in progress, by request and rank.
        self._received: dict[int, dict[int, Report]] = {}
        self._last_request = 0

    def add_source(self, group: str, backend: str, report: Callable[[], Report]) -> None:
        """``report`` gives the state of this process in calls of a backend of the group."""
        with self._changed.lock:
            self._sources[group, backend] = report

    def remove_source(self, group: str, backend: str) -> None:
        """This process has closed the backend of the group."""
        with self._changed.lock:
            self._sources.pop((group, backend), None)

    def request_reports(self, group: str, backend: str, ranks: Iterable[int]) -> dict[int, Report]:
        """The reports of these ranks about a backend of ``group``, without ranks that do not reply
        within a second."""
        wanted = set(ranks)
        reports: dict[int, Report] = {}
        with self._changed.lock:
            self._last_request += 1
            request = self._last_request
        asked = {"t": "ask", "group": group, "backend": backend, "to": sorted(wanted)}
        try:
            # The `try` that removes the entry encloses this, since an exception of a handler may
            # come after any call.
            self._received[request] = reports
            self._send({**asked, "from": self._rank, "id": request})
            self._changed.wait_for(
                lambda: not wanted.difference(reports, self._departed) or self._relay_ended(),
                _REPLY_S,
            )
        finally:
            self._received.pop(request, None)
        return reports

    def collect_reports(
        self, group: str, backend: str, ranks: set[int], reached: int = 0
    ) -> dict[int, Report]:
        """:meth:`request_reports`, of which those that are valid; requests to ranks that do not
        have the group yet, or are before call ``reached``, are repeated."""
        reports = _valid(self.request_reports(group, backend, ranks), ranks)
        started = time.monotonic()
        while True:
            age = time.monotonic() - started
            again = {
                rank
                for rank, answer in reports.items()
                if (
                    age < _UNKNOWN_S
                    if answer.get("unknown")
                    else answer["seq"] < reached and age < _BEHIND_S
                )
            }
            if not again:
                return reports
            time.sleep(0.02)
            reports |= _valid(self.request_reports(group, backend, again), again)

    def answer(self, message: Message) -> None:
        """Another rank requests this one's report."""
        source = self._sources.get((message["group"], message["backend"]))
        # A reply without a report saves the other rank the rest of its wait.
        report = source() if source is not None else {"unknown": True}
        told = {"t": "tell", "to": [message["from"]], "from": self._rank}
        self._send({**told, "id": message["id"], "report": report})

    def receive(self, message: Message) -> None:
        """A report that this process has requested."""
        with self._changed.lock:
            # There is no entry for a late reply, of which the request is over.
            reports = self._received.get(message["id"])
            if reports is not None:
                reports[message["from"]] = printable_values(message["report"])
                self._changed.notify_all()


def _valid(answers: dict[Any, Any], ranks: set[int]) -> dict[int, Report]:
    """The answers that are valid reports of these ranks."""
    return {
        rank: answer
        for rank, answer in answers.items()
        if rank in ranks
        and isinstance(answer, dict)
        and (
            answer.get("unknown")
            or all(n in answer and isinstance(answer[n], kind) for n, kind in _KINDS.items())
        )
    }


def why_no_reply() -> str:
    """Why a rank may not reply to a request."""
    try:
        # This is the address of this host over which its processes connect.
        check_loopback()
    except DistNetworkError as error:
        return str(error)
    return "the process is stopped, a thread holds the GIL, or the network is down"
