"""The job of watched processes, and the groups of torch.distributed in it
(:mod:`unicoll.torch_watch.watcher`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache

from unicoll.backend.call_comparison import Recorded
from unicoll.backend.compared_backend import ComparedBackend
from unicoll.backend.contract import Job
from unicoll.bootstrap.enter import join
from unicoll.bootstrap.rendezvous_protocol import StoreLocation
from unicoll.bootstrap.resolve import JoinRequest
from unicoll.diagnosis import flight_dump
from unicoll.diagnosis.wait_monitor import monitor_of
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
        self._comparisons = monitor_of(self._job).comparisons
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
        backends = {group: _backend_of(made) for group, made in self._made.items()}

        def recorded() -> Mapping[ComparedBackend, Sequence[Recorded]]:
            self._count()
            calls = torch_groups.last_collectives()
            return {backend: calls.get(group, ()) for group, backend in backends.items()}

        self._comparisons.compare(backends.values(), recorded, at_once)

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
