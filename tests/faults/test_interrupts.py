"""An exception of a signal's handler at each point of a call: right data or an error on all ranks, and no wait.

``interrupt_jobs`` has the operations. The interrupted rank makes three more calls on the group, or leaves it; the other
ranks make theirs. The short run tries a part of the points.
"""

from __future__ import annotations

import pytest

from tests.faults import interrupt_jobs as jobs
from tests.support.ranks import joined, sample_seed
from tests.support.selection import is_short

_SHARE = 6
"""The short run tries every nth point."""


def run(size: int, transport: str, names: list[str], goes_on: bool = True, warm: bool = True) -> None:
    every = _SHARE if is_short() else 1
    points = trials = 0
    wrong: list[str] = []
    with joined(size, env={"UNICOLL_TRANSPORT": transport} if transport else {}) as job:
        for name in names:
            job.call(jobs.trials, name, goes_on, warm, every, sample_seed())
            results = job.results(600)
            points, trials = points + results[0][0], trials + results[0][1]
            wrong += [text for result in results for text in result[2]]
    print(f"{transport or 'auto'}, {size} ranks: {points} points, {trials} trials")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("transport", ["", "tcp", pytest.param("hierarchical", marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_rank_goes_on(size: int, transport: str) -> None:
    run(size, transport, list(jobs.OPERATIONS))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["", "tcp"])
def test_the_rank_leaves_the_group(transport: str) -> None:
    run(2, transport, list(jobs.OPERATIONS), goes_on=False)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["", "tcp", "hierarchical"])
def test_the_first_call_of_a_group(transport: str) -> None:
    """It selects the transport, and connects."""
    run(2, transport, ["all_reduce", "all_gather_object", "send", "recv", "irecv"], warm=False)
