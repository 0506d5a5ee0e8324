"""A thread that starts when it is first needed: exactly one calls the function, also after an interrupted start."""

from __future__ import annotations

import threading

import pytest

from tests.support.order import PATIENCE_S, await_true
from tests.unit.interrupt_points import each_point, interrupt_at
from unicoll.process.interrupts import LazyThread

NAME = "lazy thread"


class Job:
    """A function that waits for :attr:`end`, and its thread."""

    def __init__(self) -> None:
        self.thread = LazyThread(NAME)
        self.calls: list[int] = []
        self.end = threading.Event()

    def start(self) -> None:
        self.thread.start(self._work)

    def _work(self) -> None:
        self.calls.append(threading.get_ident())
        assert self.thread.join(PATIENCE_S)  # by itself
        self.end.wait(PATIENCE_S)


def is_running() -> bool:
    return any(thread.name == NAME for thread in threading.enumerate() if thread.ident is not None)


def test_one_thread_calls_the_function() -> None:
    job = Job()
    assert job.thread.join(0)
    assert job.thread.ident is None
    for _ in range(3):
        job.start()
    await_true(lambda: job.calls)
    assert job.calls == [job.thread.ident]
    assert not job.thread.join(0)
    job.end.set()
    assert job.thread.join(PATIENCE_S)
    job.start()  # it has run
    assert not is_running()
    assert len(job.calls) == 1


def test_an_interrupt_at_each_point_of_the_start() -> None:
    jobs: list[Job] = []

    def start() -> None:
        jobs.append(Job())
        jobs[-1].start()

    for what, point in each_point(start):
        # CPython leaves the lock of Thread.start()'s Condition held, and the first thread waits for it without end.
        if point[2] in ("__enter__", "__exit__"):
            continue
        interrupt_at(start, point)
        job = jobs[-1]
        job.thread.join(0)  # whatever the thread has come to
        job.start()
        await_true(lambda job=job: job.calls)
        for each in jobs:
            each.end.set()
        assert job.thread.join(PATIENCE_S), what
        await_true(lambda: not is_running())
        assert len(job.calls) == 1, what


def test_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    job = Job()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            job.start()
    job.end.set()
    job.start()
    await_true(lambda: job.calls)
    assert job.thread.join(PATIENCE_S)
