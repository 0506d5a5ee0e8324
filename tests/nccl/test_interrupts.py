"""An exception of a signal's handler at each point of a call with arrays of the simulated device.

The calls are those of :mod:`tests.faults.interrupt_jobs`. There are no points within the library and the device, which
are C in a real program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

import unicoll as dist
from tests.faults import interrupt_jobs as jobs
from tests.nccl import staged
from tests.simulated_nccl import arrays, ranks
from tests.support import worker
from tests.support.order import await_true
from tests.support.ranks import ProcessJob, joined, sample_seed
from tests.support.selection import is_short

_SHARE, _SHARE_OF_FIRST = 48, 300
"""The short run tries every nth point: of a call, and of one that connects, which takes a second."""
_MAY_STAY = re.compile(r"(event|stream|[0-9]+ bytes|mismatch:|fd /memfd:unicoll) ")
"""What an interrupted call may leave: what it has just created, and a group of calls of which it has made a part."""


class DeviceLibrary(jobs.Library):
    """unicoll with arrays of the simulated device.

    Args:
        begun: True if calls have only begun when they return, as the library's.
    """

    def __init__(self, begun: bool) -> None:
        self._begun = begun
        self._stream: arrays.Stream | None = None

    def full(self, shape: int | tuple[int, int], value: float) -> Any:
        return arrays.full(shape, value)

    def values(self, x: Any) -> Any:
        return x.numpy()

    def check(self, group: Any, check: Callable[[], None]) -> str:
        """If the group has failed before the device is done, the result of a call that had begun is undefined.

        A library that cannot abort leaves the stream waiting then.
        """
        cuda = ranks.simulation().cuda
        event = cuda.create_event(cuda.current_device())
        cuda.record(event, arrays.current_stream())
        await_true(lambda: cuda.event_done(event) or self._failure(group))
        try:
            if cuda.event_done(event):
                check()
        except (AssertionError, dist.DistError) as e:
            if not self._failure(group) or not (self._begun or isinstance(e, dist.DistError)):
                raise
        finally:
            cuda.destroy_event(event)
        return type(self._failure(group)).__name__ if self._failure(group) else ""

    def _failure(self, group: Any) -> dist.DistError | None:
        return group.job.control.group_failure(group.name)

    @contextmanager
    def current(self) -> Iterator[None]:
        """A stream of its own, new if the last one waits: a library that cannot abort leaves it so. No new faults.

        Not a new one each time, since the pool keeps memory for each.
        """
        faults = ranks.simulation().faults
        before, aborts = len(faults), ranks.nccl().has("comm_abort")
        if self._stream is None or not ranks.simulation().cuda.stream_done(self._stream.ptr):
            self._stream = arrays.Stream()
        with self._stream:
            yield
        new = [fault for fault in faults[before:] if aborts or not fault.startswith("two threads in")]
        assert not new, new


def trials(begun: bool, *arguments: Any) -> tuple[int, int, list[str]]:
    return jobs.trials(*arguments, of=DeviceLibrary(begun))


OPERATIONS = [name for name in jobs.OPERATIONS if name != "recv_object_list"]
STARTS: dict[str, Callable[[int], ProcessJob]] = {
    "nccl": partial(ranks.SimulatedJob, policy="random"),
    "oneccl": partial(ranks.SimulatedJob, policy="random", kind="xpu", backend=None),
    "staged": partial(
        ProcessJob, prepare=(staged.prepare, ranks.Settings(policy="random", backend="gloo"), 1 << 20)
    ),
}


def run(start: str, names: list[str], goes_on: bool = True, warm: bool = True) -> None:
    every = (_SHARE if warm else _SHARE_OF_FIRST) if is_short() else 1
    points = tried = 0
    wrong: list[str] = []
    with joined(2, STARTS[start]) as job:
        for name in names:
            job.call(trials, start != "staged", name, goes_on, warm, every, sample_seed())
            results = job.results(jobs.TRIALS_S)
            points, tried = points + results[0][0], tried + results[0][1]
            wrong += [text for result in results for text in result[2]]
            print(f"{name}: {results[0][:2]}", flush=True)
        job.call(worker.leave)
        left = [text for found in job.results() for text in found if not _MAY_STAY.match(text)]
    print(f"{points} points, {tried} trials")
    assert not wrong, "\n".join(wrong)
    assert start == "oneccl" or not left  # it cannot end a communicator that has failed


@pytest.mark.every(n=3)
@pytest.mark.parametrize("start", list(STARTS))
def test_the_rank_goes_on(start: str) -> None:
    run(start, OPERATIONS)


@pytest.mark.every(n=0)
@pytest.mark.parametrize("start", list(STARTS))
def test_the_rank_leaves_the_group(start: str) -> None:
    """An interrupted wait() does not fail the group: after those of messages the other rank waits until its timeout."""
    run(start, [name for name in OPERATIONS if not name.startswith(("i", "batch"))], goes_on=False)


@pytest.mark.every(n=3)
@pytest.mark.parametrize("start", list(STARTS))
def test_the_first_call_of_a_group(start: str) -> None:
    """It connects the ranks."""
    run(start, ["all_reduce", "irecv"], warm=False)
