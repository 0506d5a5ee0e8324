"""What is wrong with the list of a gather or scatter, which the root alone has, reaches the other ranks as an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.faults import refusal_jobs as jobs
from tests.nccl import staged
from tests.simulated_nccl.ranks import Settings, SimulatedJob
from tests.support.on_ranks import on_ranks
from tests.support.ranks import Pool, ProcessJob, pools
from tests.support.worker import Failure

EXPECTED = {
    "none": ("DistArgumentError", "0 %s arrays given, 3 expected on the root (group of 3): "),
    "short": ("DistArgumentError", "2 %s arrays given, 3 expected"),
    "own size": ("DistArgumentError", "must be of one size"),
    "element": ("DistTypeError", "_list"),
    "no list": ("DistTypeError", "expected a list of arrays"),
    "other": ("DistTypeError", "in one call"),
    "unreadable": ("RuntimeError", "not there any more"),
}
"""For each bad list what the root raises: the type, and words of the message."""


@pytest.fixture(scope="module", params=["tcp", "shm", "hierarchical"])
def pool(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Pool]]:
    with pools(partial(ProcessJob, env={"UNICOLL_TRANSPORT": request.param})) as made:
        yield made


@pytest.mark.every(n=2)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_all_ranks_raise_and_the_group_goes_on(
    name: str, async_op: bool, pool: Callable[[int], Pool]
) -> None:
    for i, which in enumerate(EXPECTED):
        count = (4, 200_000)[i % 2]
        told = pool(3).run(jobs.refuse, name, which, count, async_op, "cpu", True)
        check(name, which, [failure for failure, _ in told], "DistArgumentError")
        assert all(untouched for _, untouched in told)


def check(name: str, which: str, failures: list[Failure | None], others: str) -> None:
    """The root raised its own error, the others one that tells of it."""
    assert None not in failures, (which, failures)
    mine = failures[jobs.ROOT]
    assert mine is not None
    kind, words = EXPECTED[which]
    if "%s" in words:
        words %= "output" if name == "gather" else "input"
    assert mine.type == kind, (which, mine)
    assert words in mine.message, (which, mine)
    for rank, failure in enumerate(failures):
        assert failure is not None
        if rank == jobs.ROOT:
            continue
        assert failure.type == others, (which, failure)
        assert failure.fields["rank"] == jobs.ROOT
        assert failure.fields["op"] == name
        for word in (f"rank {jobs.ROOT}, the root, refused its call at ", "refusal_jobs.py:", mine.message):
            assert word in failure.message, (which, failure)


@on_ranks(3)
def test_refusals_take_their_place_in_the_order() -> None:
    """The root refuses two calls, one behind an asynchronous call that goes well, and does not wait for anybody."""
    x = np.ones(4)
    work: Any = dist.all_reduce(x, async_op=True)
    for _ in range(2):
        with pytest.raises(dist.DistArgumentError):
            dist.gather(np.ones(2), [] if dist.get_rank() == jobs.ROOT else None, jobs.ROOT, timeout=20)
    work.wait()
    dist.all_reduce(x)
    assert (x == 9).all()


@on_ranks(2)
def test_a_refused_call_that_the_others_do_not_make_is_a_mismatch() -> None:
    group = dist.new_group()
    if dist.get_rank() == jobs.ROOT:
        with suppress(dist.DistArgumentError):
            dist.gather(np.ones(3), [], jobs.ROOT, group=group, timeout=20)
    with pytest.raises(dist.CollectiveMismatchError, match=r"(?s)gather.*all_reduce|all_reduce.*gather"):
        dist.all_reduce(np.ones(3), group=group, timeout=20)
    dist.destroy_process_group(group)


def test_device_arrays_through_the_host(seed: int) -> None:
    settings = Settings(policy="random", seed=seed, backend="gloo")
    with pools(partial(ProcessJob, prepare=(staged.prepare, settings))) as pool:
        for i, which in enumerate(EXPECTED):
            for name in ("gather", "scatter"):
                told = pool(3).run(jobs.refuse, name, which, (4, 20_000)[i % 2], i % 3 == 0, "cuda", True)
                if which == "other":  # an array of the host among arrays of a device
                    assert told[jobs.ROOT][0] is not None
                    continue
                check(name, which, [failure for failure, _ in told], "DistArgumentError")


def test_where_nothing_is_compared_the_group_fails() -> None:
    with pools(SimulatedJob) as pool:
        for name in ("gather", "scatter"):
            told = pool(3).run(jobs.refuse, name, "short", 4, False, "cuda", False)
            check(name, "short", [failure for failure, _ in told], "GroupAbortedError")
