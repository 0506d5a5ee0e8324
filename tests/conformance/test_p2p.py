"""Point-to-point messages: matching by sender and tag, order, size, threads, mismatched_receives."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gloo_fallback.p2p.progress import ProgressEngine
from tests.conformance import p2p_jobs as jobs
from tests.support.order import await_true
from tests.support.ranks import Pool, ProcessJob, joined, pools
from unicoll.errors import OperationTimeoutError

Pools = Callable[[int], Pool]


@pytest.fixture(scope="module", params=["auto", "tcp"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pools]:
    """Ranks that share memory, and ranks that use sockets only."""
    with pools(lambda size: ProcessJob(size, env={"UNICOLL_TRANSPORT": request.param})) as made:
        yield made


@pytest.mark.every(n=2)
@pytest.mark.parametrize("size", [2, 3])
def test_every_type(size: int, pool: Pools) -> None:
    pool(size).run(jobs.every_type)


def test_strided_arrays(pool: Pools) -> None:
    pool(2).run(jobs.strided)


@pytest.mark.parametrize("count", [1, 20_000])
def test_tags_are_taken_in_any_order_and_pairs_in_theirs(count: int, pool: Pools) -> None:
    expected = [100 * k + tag for tag in reversed(range(10)) for k in (0, 1)]
    assert pool(2).run(jobs.tags_out_of_order, count)[1] == expected


@pytest.mark.parametrize("count", [1, 50_000])
def test_receives_may_be_there_first(count: int, pool: Pools) -> None:
    pool(2).run(jobs.posted_before_sent, count)


@pytest.mark.every(n=2)
def test_the_first_sends_to_a_rank_keep_their_order(pool: Pools) -> None:
    assert pool(2).run(jobs.first_sends_keep_their_order, 20)[1] == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 20


@pytest.mark.parametrize("background", [False, True])
def test_from_anyone(background: bool, pool: Pools) -> None:
    sources = pool(4).run(jobs.from_any_source, 10, background)[0]
    assert sorted(sources) == [1] * 10 + [2] * 10 + [3] * 10


@pytest.mark.parametrize("size", [2, 4])
def test_a_farm_of_2000_tasks(size: int, pool: Pools) -> None:
    pool(size).run(jobs.farm, 2000)


def test_random_messages(pool: Pools, seed: int) -> None:
    for i in range(20):
        pool(4).run(jobs.random_messages, f"{seed} {i}", 100)


def test_both_send_64_megabytes_before_either_receives(pool: Pools) -> None:
    pool(2).run(jobs.both_send_first, 64)


@pytest.mark.parametrize("count", [0, 10, 1_000_000])
def test_messages_that_nobody_has_asked_for_yet(count: int, pool: Pools) -> None:
    pool(2).run(jobs.unexpected, count)


def test_several_threads_on_one_group(pool: Pools) -> None:
    assert pool(2).run(jobs.many_threads, 6, 40) == [[], []]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 5, 300_000])
def test_batches(size: int, count: int, pool: Pools) -> None:
    pool(size).run(jobs.batches, count)


def test_messages_that_do_not_fit_are_refused_and_the_group_works_on(pool: Pools) -> None:
    failures = pool(2).run(jobs.mismatched_receives)[1]
    assert len(failures) == 8
    for failure in failures:
        assert failure is not None
        assert failure.type == "MessageMismatchError", failure.traceback
        assert "rank 0" in failure.message
        assert "bytes" in failure.message
        assert failure.fields["rank"] == 0
        assert failure.fields["op"] == "recv"


@pytest.mark.parametrize("where", ["connect", "serve"])
def test_a_message_thread_that_dies_fails_its_group(where: str) -> None:
    with joined(2, quiet=False) as job:
        job.call(jobs.message_thread_dies, where)
        for failures in job.results():
            assert len(failures) == 3
            for failure in failures:
                assert failure is not None
                assert failure.type == "GroupAbortedError", failure.traceback
                assert "rank 0 " in failure.message
                assert "'unicoll-messages'" in failure.message
                assert "OSError: injected" in failure.message


@pytest.mark.parametrize("waiting", [False, True])
def test_a_thread_of_the_order_of_operations_that_dies_fails_its_group(waiting: bool) -> None:
    with joined(2, quiet=False) as job:
        job.call(jobs.queue_thread_dies, waiting)
        for failures in job.results():
            assert len(failures) == 3
            for failure in failures:
                assert failure is not None
                assert failure.type == "GroupAbortedError", failure.traceback
                assert "rank 0 " in failure.message
                assert ("'MainThread'" if waiting else "'unicoll-world'") in failure.message
                assert "OSError: injected" in failure.message


def test_a_callback_that_fails_is_logged_and_the_group_goes_on() -> None:
    with joined(2, quiet=False) as job:
        job.call(jobs.failing_callbacks)
        assert job.results() == [[2.0, 1.0], [2.0, 0.0]]

        def logged() -> list[int]:
            return [job.stderr(rank).count("ValueError: of the user's") for rank in range(2)]

        await_true(lambda: min(logged()) >= 2)  # wait() may return while a callback runs
        assert logged() == [2, 2]


@pytest.mark.every(n=2)
def test_a_receive_that_timed_out_takes_nothing(pool: Pools) -> None:
    failures = pool(2).run(jobs.timed_out_receives)[1]
    assert len(failures) == 3
    for failure in failures:
        assert failure is not None
        assert failure.type == "OperationTimeoutError", failure.traceback
        assert "0.3 s" in failure.message
    from_one, from_any, posted = (failure.message.partition("0.3 s: ")[2] for failure in failures)
    assert from_one.startswith("no message for it has come from rank 0 (host ")
    assert from_any == "no message for it has come from any rank"
    assert posted == from_one


@pytest.mark.every(n=2)
@pytest.mark.parametrize("count", [3, 100_000])
def test_an_interrupted_receive_takes_nothing(count: int, pool: Pools) -> None:
    pool(2).run(jobs.interrupted_receives, count)


@pytest.mark.parametrize("use_batch", [False, True])
def test_objects(use_batch: bool, pool: Pools) -> None:
    pool(2).run(jobs.objects, use_batch)


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_objects_in_threads(size: int, tagged: bool, pool: Pools) -> None:
    pool(size).run(jobs.objects_in_threads, 3, 40, tagged)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_groups_and_of_the_world(size: int, pool: Pools) -> None:
    pool(size).run(jobs.in_a_subgroup)


@pytest.mark.parametrize("size", [2, 3])
def test_beside_collectives(size: int, pool: Pools) -> None:
    pool(size).run(jobs.while_collectives_run, 60)


class _DoneAsTimeRunsOut:
    """A completion that another thread finishes between the end of a wait for it and the look whether it is done."""

    def __init__(self) -> None:
        self.finished = False

    def done(self) -> bool:
        return self.finished

    def wait(self, timeout: float | None) -> None:
        self.finished = True
        raise OperationTimeoutError("not done in this tick")


def test_an_operation_that_is_done_as_a_tick_ends_is_no_timeout() -> None:
    room: Any = SimpleNamespace(pending=lambda: False)
    driver = ProgressEngine(room, spins=0)
    letter: Any = SimpleNamespace(completion=_DoneAsTimeRunsOut(), deadline=math.inf)
    acquired, ended = threading.Event(), threading.Event()

    def drive() -> None:
        with driver._progress_lock:
            acquired.set()
            ended.wait(60)

    thread = threading.Thread(target=drive)
    thread.start()
    assert acquired.wait(60)
    driver.until_done(letter)
    ended.set()
    thread.join()
    assert letter.completion.finished
    driver.close()
