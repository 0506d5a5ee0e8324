"""The stages on streams and lifetimes: what a race would get wrong, and who waits for the device."""

from __future__ import annotations

from unicoll.testing.ranks import Job

from . import graph_jobs, rank_jobs, streaming_jobs, trace_jobs
from .place import Place, joined
from .record import Reporter, Skip

__all__ = ["one", "two"]


def one(reporter: Reporter, place: Place) -> None:
    """One rank: everything."""
    _streams(reporter, place, 1)


def two(reporter: Reporter, place: Place) -> None:
    """Two ranks on the one GPU: the same, where another rank can be late."""
    _streams(reporter, place, 2)


def _streams(reporter: Reporter, place: Place, size: int) -> None:
    for name in place.kits:
        if reporter.left() < 5.0:
            reporter.check(name, _no_time)
            continue
        reporter.check(f"{name}: ranks join, work and leave", _with_kit, reporter, place, size, name)


def _no_time() -> None:
    raise Skip("no time is left")


def _with_kit(reporter: Reporter, place: Place, size: int, name: str) -> None:
    with joined(place, size, [name], timeout=40.0, asking=True) as job:
        job.call(rank_jobs.warm_up, name)
        job.results(90.0)
        for program in (*streaming_jobs.PROGRAMS, *graph_jobs.PROGRAMS):
            words = f"{name}: {program.__name__.replace('_', ' ')}"
            found = reporter.check(words, _call, job, name, program.__module__, program.__name__)
            if found is not None and found[0] is not None:
                reporter.figure(words, found)
            if any(o.returncode is not None or not o.finished for o in job.outcomes):
                raise AssertionError(f"the ranks did not get over: {words}\n{job.report()[-3000:]}")
        if name == "torch":
            found = reporter.check("torch: trace of the runtime's calls", _call_trace, job)
            reporter.figure("torch: runtime's calls in an asynchronous stretch", found)


def _call(job: Job, name: str, module: str, program: str) -> list[object]:
    """A program on all ranks; whatever one of them may not do here is skipped."""
    job.call(rank_jobs.run, name, module, program)
    found = job.results(40.0)
    reasons = [value[1] for value in found if value[0] == "skip"]
    if reasons:
        raise Skip(reasons[0])
    return [value[1] for value in found]


def _call_trace(job: Job) -> list[object]:
    job.call(trace_jobs.asynchronous_stretch)
    found = job.results(60.0)
    for each in found:
        if isinstance(each, str):
            raise Skip(each)
        assert not each["waiting"], f"calls that wait for the device: {each['waiting']}"
    return found
