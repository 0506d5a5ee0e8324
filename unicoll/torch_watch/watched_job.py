"""The job of watched processes, and the groups of torch.distributed in it
(:mod:`unicoll.torch_watch.watcher`)."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

from unicoll.backend.contract import Job
from unicoll.bootstrap.enter import join
from unicoll.bootstrap.rendezvous_protocol import StoreLocation
from unicoll.bootstrap.resolve import JoinRequest
from unicoll.diagnosis import flight_dump
from unicoll.errors import DistArgumentError
from unicoll.group.backend_choice import BackendChoice
from unicoll.group.call_counters import counters_of_process, start_file
from unicoll.group.process_group import ProcessGroup
from unicoll.process import logs
from unicoll.torch_plugin.torch_job import TorchJob
from unicoll.torch_watch import torch_groups
from unicoll.torch_watch.torch_groups import TorchGroup
from unicoll.torch_watch.watched_backend import Failures, WatchedBackend

log = logs.logger("watch")

_NAME = "torch"
_JOIN_S = 300.0
_COMPARE_S = 0.2
"""Time between comparisons of the calls; longer if there are more than :data:`_MESSAGES_PER_S`
messages a second."""
_MESSAGES_PER_S = 1000
_MAX_INBOX = 10_000
_INBOX_S = 30.0
"""Messages about calls that wait for their group to be made on this rank, and how long they do."""


class WatchedJob:
    """Joins the job of torch's default group. Its methods are called on one thread at a time.

    Attributes:
        failures: of its groups.
    """

    def __init__(self, rank: int, size: int, location: StoreLocation) -> None:
        self._job: Job = join(
            JoinRequest(
                _choices("torch"),
                rank=rank,
                world_size=size,
                store=location,
                timeout=_JOIN_S,
                join_timeout=_JOIN_S,
                name=_NAME,
                makes_group=False,
            )
        )
        self.failures = Failures(rank)
        self._made: dict[TorchGroup, ProcessGroup] = {}
        # Messages and their times of arrival. The control thread appends them, and the watcher's
        # thread takes them: a deque needs no lock for that.
        self._inbox: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_MAX_INBOX)
        self._compared_at = 0.0
        if self._job.control is not None:
            self._job.control.handle(
                "calls", lambda found: self._inbox.append((time.monotonic(), found))
            )
        if metrics_file := os.environ.get("UNICOLL_METRICS_FILE"):
            try:
                start_file(self._job, metrics_file)
            except DistArgumentError as error:
                # Everything else works without the file.
                log.warning("%s", error)

    @property
    def is_exiting(self) -> bool:
        """True once the program ends."""
        return self._job.exiting

    def await_dumps(self, seconds: float) -> None:
        """Wait for the dumps that are being written."""
        flight_dump.dumper_of(self._job).await_written(seconds)

    def update(self, groups: Sequence[TorchGroup]) -> None:
        """Make the groups that torch has made, and close those that it has destroyed."""
        for group in groups:
            if group not in self._made:
                made = TorchJob(self._job).make(
                    group.name, group.ranks, _choices(group.backend_name), None, group.desc, None
                )
                self._made[group] = made
                _backend_of(made).observe(group, self.failures)
        for group in self._made.keys() - set(groups):
            made = self._made.pop(group)
            self._job.close_group(made, stays=True)
        torch_groups.forget_destroyed()

    def compare(self, at_once: bool) -> None:
        """Compare the calls of the ranks, if it is time for that."""
        now = time.monotonic()
        pause = max(_COMPARE_S, len(self._made) * self._job.size / _MESSAGES_PER_S)
        if now - self._compared_at < pause and not at_once:
            return
        self._compared_at = now
        backends = {made.group_name: _backend_of(made) for made in self._made.values()}
        # Each message once: those for groups that this rank has not made yet are put back.
        for _ in range(len(self._inbox)):
            arrived, message = self._inbox.popleft()
            backend = backends.get(message["group"])
            if backend is not None:
                backend.receive(message)
            elif now - arrived < _INBOX_S:
                self._inbox.append((arrived, message))
        self._count()
        calls = torch_groups.last_collectives()
        for group, made in self._made.items():
            _backend_of(made).compare(calls.get(group, ()))

    def _count(self) -> None:
        """Add the recorded calls that have ended to the metrics."""
        if counters_of_process.counts(self._job):
            torch_groups.end_completed()
            for call in torch_groups.last_calls():
                if call.ended and not call.counted:
                    call.counted, kind = True, call.kind
                    seconds = call.ended - call.created
                    counters_of_process.count(
                        kind.op, kind.group, kind.nbytes, seconds, bool(call.error)
                    )

    def leave(self) -> None:
        """Leave the job."""
        self._count()
        self._made.clear()
        self._job.leave()


def _backend_of(group: ProcessGroup) -> WatchedBackend:
    (backend,) = group.backends
    assert isinstance(backend, WatchedBackend)
    return backend


@cache
def _choices(backend: str) -> tuple[BackendChoice, ...]:
    """The choice of the backend of groups whose backend torch calls ``backend``."""
    cls = type("WatchedBackend", (WatchedBackend,), {"name": backend})
    return (BackendChoice("cpu", backend, cls, "torch's"),)
