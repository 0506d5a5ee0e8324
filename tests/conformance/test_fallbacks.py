"""Collectives by fallbacks: right results, and the same errors on all ranks when calls differ or ranks are lost."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pytest

import unicoll as dist
from tests.faults import fault_jobs
from tests.faults.test_faults import check_lost
from tests.faults.test_mismatch import (
    test_a_list_that_does_not_fit_the_others_arrays,  # noqa: F401
    test_arrays_of_one_size_have_one_shape,  # noqa: F401
    test_every_rank_has_another_root,  # noqa: F401
    test_split_sizes_that_do_not_fit_each_other,  # noqa: F401
    test_two_calls_in_another_order,  # noqa: F401
)
from tests.faults.test_refusals import (
    test_all_ranks_raise_and_the_group_goes_on,  # noqa: F401
    test_refusals_take_their_place_in_the_order,  # noqa: F401
)
from tests.support import worker
from tests.support.order import await_word, send_word
from tests.support.outcomes import CallOutcome, outcome_of
from tests.support.ranks import Pool, ProcessJob, joined, pools
from tests.support.suite import Suite
from unicoll.backend import Caps
from unicoll.backend.host.fallbacks import FALLBACKS, available

MODULE = "tests.conformance.fallback_backends"


def job(backend: str, size: int) -> ProcessJob:
    return ProcessJob(size, prepare=(worker.use, backend, (MODULE,)))


_LONG = pytest.mark.every(n=0)


@pytest.fixture(
    scope="module",
    params=["messages", pytest.param("gathers", marks=_LONG), "most", pytest.param("posts", marks=_LONG)],
)
def pool(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Pool]]:
    with pools(partial(job, request.param)) as made:
        yield made


class _Fallbacks(Suite):
    imports = (MODULE,)
    sample = 30

    def large(self, itemsize: int) -> int:
        return ((1 << 20) // itemsize + 11) | 1

    def boundaries(self, op: str, itemsize: int, size: int) -> Sequence[int]:
        switch = (1 << 14) // itemsize
        return [0, 1, size - 1, size + 1, 1000, switch, switch + 1]


@pytest.mark.every(n=8)
class TestMessages(_Fallbacks):
    backend = "messages"
    turn = 1


@pytest.mark.every(n=8)
class TestGathers(_Fallbacks):
    backend = "gathers"
    turn = 2
    sizes = (1, 2, 3)


@pytest.mark.every(n=8)
class TestLists(_Fallbacks):
    backend = "lists"
    turn = 4
    sizes = (2, 3)


@pytest.mark.every(n=8)
class TestBroadcasts(_Fallbacks):
    backend = "broadcasts"
    turn = 3
    sizes = (2, 3)


def test_which_operations_a_backend_has() -> None:
    messages = frozenset({"send", "recv"})
    assert available(Caps()) == messages | FALLBACKS.keys()
    assert available(Caps(native=frozenset({"send"}))) == {"send"}
    assert available(Caps(native=frozenset({"all_gather"}))) == FALLBACKS.keys()
    assert available(Caps(native=frozenset({"all_reduce"}))) == {"all_reduce"}
    assert available(Caps(devices=frozenset({"cuda"}))) == messages


@pytest.mark.every(n=4)
@pytest.mark.parametrize("name", ["all_reduce", "barrier", "gather", "all_to_all"])
def test_a_killed_rank_is_named(name: str) -> None:
    with joined(3, partial(job, "messages")) as ranks:
        ranks.call(fault_jobs.loop, name, 100)
        ranks.await_notes()
        killed = ranks.signal(1, signal.SIGKILL)
        check_lost(ranks.collect(30, [0, 2]), 1, ranks.pids[1], name, killed)


def late() -> CallOutcome:
    """Rank 1 comes to an all_reduce when the two others have given up."""
    if dist.get_rank() == 1:
        await_word()
        await_word()
    outcome = outcome_of(lambda: dist.all_reduce(np.ones(4), group=dist.new_group(), timeout=1.0))
    if dist.get_rank() != 1:
        send_word(1)
    return outcome


@pytest.mark.every(n=3)
def test_a_deadline_names_the_ranks_that_are_missing(pool: Callable[[int], Pool]) -> None:
    first, second, third = (failure for failure, _ in pool(3).run(late))
    for failure in (first, third):
        assert failure is not None
        assert failure.type == "OperationTimeoutError"
        assert "all_reduce(float64[4], SUM) #1" in failure.message
        missing = failure.message.partition("missing: ")[2]  # the other of the two may be late, too
        assert "rank 1 (" in missing
    assert second is not None


def in_turns() -> list[float]:
    """Blocking and asynchronous collectives, native and not, with one another and with messages."""
    me, size = dist.get_rank(), dist.get_world_size()
    arrays = [np.full(3, me + 1.0) for _ in range(6)]
    works = [dist.all_reduce(x, async_op=True) for x in arrays[:2]]
    works.append(dist.broadcast(arrays[2], 0, async_op=True))
    dist.all_reduce(arrays[3])
    dist.reduce(arrays[4], 0)
    everything = [np.zeros(3) for _ in range(size)]
    dist.all_gather(everything, arrays[5])
    for work in works:
        assert work is not None
        work.wait()
    return [x[0] for x in (*arrays[:4], *everything)]


@pytest.mark.every(n=4)
def test_native_calls_and_fallbacks_keep_their_order(pool: Callable[[int], Pool]) -> None:
    assert pool(3).run(in_turns) == [[6.0, 6.0, 1.0, 6.0, 1.0, 2.0, 3.0]] * 3
