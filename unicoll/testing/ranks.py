"""Runs functions in the ranks of a job, each in its own process, and collects results, exceptions and leaks.

In the test process::

    results = run_ranks(3, fn, 1, 2)            # join, call, leave; raises if any rank failed
    with ProcessJob(3) as job:                  # step by step, for fault tests
        job.call(fn, 1, 2)
        job.await_note(0)
        job.signal(2, signal.SIGKILL)
        outcomes = job.collect()

In a rank, functions of :mod:`worker` join (``enter``), send a note to the test (``send_note``) and leave (``leave``).
Functions are sent by module and name, and the ranks have this process's module search path; modules that do not import
pytest start faster. Warnings are errors in the ranks too, and output on a rank's standard error fails the test unless
the test expects it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from unicoll.testing import forkserver
from unicoll.testing.environment import ROOT as ROOT
from unicoll.testing.environment import environment as environment
from unicoll.testing.environment import reserved_port as reserved_port
from unicoll.testing.process_job import CALL_S, ProcessJob, RanksFailed
from unicoll.testing.process_job import Outcome as Outcome
from unicoll.testing.sampling import SEED_VARIABLE as SEED_VARIABLE
from unicoll.testing.sampling import sample_seed as sample_seed
from unicoll.testing.worker import end, enter, leave


def end_cleanly(job: ProcessJob) -> None:
    """Leave the job on all ranks, check for leaks, and end the interpreters; raises RanksFailed."""
    job.call(leave)
    leaks = job.results()
    if any(leaks):
        raise RanksFailed(f"leaks after destroy_process_group, by rank: {leaks}")
    job.call(end)
    codes = job.wait_for_exit()
    if any(codes):
        raise RanksFailed(f"exit codes {codes}\n{job.report()}")


def joined(size: int, start: Callable[..., ProcessJob] = ProcessJob, **options: Any) -> ProcessJob:
    """A job whose ranks have joined; ``options`` are those of ``start``."""
    job = start(size, **options)
    try:
        job.call(enter)
        job.results()
    except BaseException:
        job.close()
        raise
    return job


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = CALL_S,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Join, call, leave; returns each value. Raises RanksFailed on failures, hangs, leaks and output on stderr."""
    with joined(size, env=env) as job:
        job.call(function, *args)
        values = job.results(timeout)
        end_cleanly(job)
    return values


_pooled: set[ProcessJob] = set()


def pooled() -> tuple[set[int], Counter[str]]:
    """Processes and descriptors of the open pools and fork servers, which outlive the tests that use them.

    Descriptors are counted by their descriptions, as in :func:`worker.snapshot`.
    """
    servers = forkserver.running()
    processes = servers | {pid for job in _pooled for pid in job.children}
    ranks = sum(job.size for job in _pooled)
    return processes, Counter({"fd socket": len(servers) + ranks, "fd pipe": sum(j.forks for j in _pooled)})


def pooled_memory() -> set[str]:
    """Files of /dev/shm of the open pools."""
    return {name for job in _pooled for name in job.shared_memory()}


class Pool:
    """A job for many calls; it starts at the first call, and again after a failure."""

    def __init__(self, size: int, start: Callable[[int], ProcessJob] = ProcessJob):
        self.size = size
        self._begin = start
        self._job: ProcessJob | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = CALL_S) -> list[Any]:
        """Call a function on all ranks; returns their values. Raises RanksFailed on a failure or a hang."""
        try:
            if self._job is None:
                self._job = joined(self.size, self._begin)
                _pooled.add(self._job)
            self._job.call(function, *args)
            return self._job.results(timeout)
        except BaseException:
            job, self._job = self._job, None
            if job is not None:
                _pooled.discard(job)
                job.close()
            raise

    def close(self) -> None:
        """Leave the job and check for leaks."""
        job, self._job = self._job, None
        if job is not None:
            _pooled.discard(job)
            with job:
                end_cleanly(job)


@contextmanager
def pools(start: Callable[[int], ProcessJob] = ProcessJob) -> Iterator[Callable[[int], Pool]]:
    """Creates pools on demand, one per world size, and closes them at the end."""
    open_pools: dict[int, Pool] = {}

    def pool(size: int) -> Pool:
        return open_pools.setdefault(size, Pool(size, start))

    try:
        yield pool
    finally:
        errors = []
        for each in open_pools.values():
            try:
                each.close()
            except AssertionError as error:
                errors.append(error)
        if errors:
            raise errors[0]
