"""Messages through shared memory: when it is used, what comes through, and what happens when something goes wrong."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import shared_p2p_jobs as jobs
from test_faults import SOON_S

from gloo_fallback.ring import PART, RING, SHARED_FROM, Inlet, Outlet
from unicoll.testing.ranks import Job, Pool, joined, run_ranks
from unicoll.testing.worker import leave

Pools = Callable[[int], Pool]

BOTH = (True, True)
NONE = (False, False)


# --- the ring -----------------------------------------------------------------------------------------------------


def test_what_is_put_into_a_ring_is_taken_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    outlet = Outlet()
    inlet = Inlet(outlet.offer)
    outlet.accepted()
    waiting: list[bytes] = []
    for _ in range(2000):
        data = rng.bytes(int(rng.integers(1, PART if rng.random() < 0.2 else 1000)))
        if outlet.room(len(data)) <= outlet.free:
            outlet.put(memoryview(data))
            waiting.append(data)
        while waiting and (outlet.free < RING // 3 or rng.random() < 0.3):
            target = bytearray(len(waiting[0]))
            inlet.take(memoryview(target))
            assert target == waiting.pop(0)
            outlet.free += inlet.owed
            inlet.owed = 0
    assert 0 <= outlet.free <= RING
    outlet.close()
    inlet.close()


def test_a_full_ring_takes_nothing() -> None:
    outlet = Outlet()
    try:
        for _ in range(RING // PART):
            assert outlet.part(10 * RING, 10 * RING) == PART
            outlet.put(memoryview(bytes(PART)))
        assert outlet.free == 0
        assert outlet.part(1, 1) == 0
    finally:
        outlet.close()


def test_what_is_not_the_ring_is_not_mapped() -> None:
    outlet = Outlet()
    offer = outlet.offer
    for wrong in (
        offer.replace(b'"token": "', b'"token": "0')[: len(offer)],
        offer.replace(b'"boot": "', b'"boot": "0'),
    ):
        with pytest.raises((OSError, ValueError)):
            Inlet(wrong)
    outlet.close()
    with pytest.raises(OSError):
        Inlet(offer)


# --- what comes through -------------------------------------------------------------------------------------------


def test_large_messages_between_ranks_of_a_host_go_through_memory(pool: Pools) -> None:
    assert pool(2).run(jobs.sizes, [SHARED_FROM] * 3) == [[BOTH]] * 2


def test_odd_sizes(pool: Pools, seed: int) -> None:
    counts = [
        SHARED_FROM - 1,
        SHARED_FROM,
        SHARED_FROM + 1,
        PART - 1,
        PART + 1,
        RING - 1,
        RING,
        RING + 63,
        0,
        1,
    ]
    rng = random.Random(seed)
    counts += [int(2 ** rng.uniform(0, 24)) for _ in range(30)]
    assert pool(2).run(jobs.sizes, counts) == [[BOTH]] * 2


@pytest.mark.parametrize("count", [SHARED_FROM, 300_001, 5_000_000])
def test_one_who_only_sends_uses_memory_too(count: int) -> None:
    sender, receiver = run_ranks(2, jobs.one_way, count, 20)
    assert sender == [(True, False)]
    assert receiver == [(False, True)]


def test_what_comes_behind_a_large_message_can_be_had_before_it(pool: Pools) -> None:
    pool(2).run(jobs.behind_a_large_one)


def test_a_receive_may_come_when_half_of_its_message_has(pool: Pools) -> None:
    pool(2).run(jobs.asked_for_halfway)


def test_large_messages_from_anyone(pool: Pools) -> None:
    assert sorted(pool(3).run(jobs.from_anyone, 5, 1_000_003)[0]) == [1] * 5 + [2] * 5


def test_everybody_at_once(pool: Pools) -> None:
    pool(4).run(jobs.everybody_at_once, 1_500_000, 3)


def test_large_messages_that_do_not_fit_are_refused_and_the_group_works_on(pool: Pools) -> None:
    failures = pool(2).run(jobs.misfits)[1]
    assert [f and f.type for f in failures] == ["MessageMismatchError"] * 6
    assert all("rank 0" in f.message for f in failures)


def test_a_callback_may_wait_for_messages(pool: Pools) -> None:
    assert pool(2).run(jobs.in_a_callback)[1] == [5]


# --- where memory cannot be shared ----------------------------------------------------------------------------------


def test_a_receiver_that_cannot_map_gets_everything_through_the_socket() -> None:
    (used, said), (others, quiet) = run_ranks(2, jobs.without, "taken", 1)
    assert used == [(False, True)]
    assert others == [(True, False)]
    assert quiet == []
    assert len(said) == 1
    assert "rank 1 " in said[0]
    assert "socket" in said[0]
    assert "Permission denied" in said[0]


def test_a_sender_that_gets_no_memory_uses_the_socket() -> None:
    (used, said), (others, quiet) = run_ranks(2, jobs.without, "offered", 0)
    assert used == [(False, True)]
    assert others == [(True, False)]
    assert quiet == []
    assert len(said) == 1
    assert "Too many open files" in said[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_uses_sockets_only(rank: int) -> None:
    stories = run_ranks(2, jobs.unwilling, rank)
    assert [used for used, _ in stories] == [[NONE]] * 2
    assert stories[rank][1] == []
    assert len(stories[1 - rank][1]) == 1


def test_sockets_by_choice() -> None:
    assert (
        run_ranks(2, jobs.sizes, [SHARED_FROM, jobs.LARGE] * 2, env={"UNICOLL_TRANSPORT": "tcp"})
        == [[NONE]] * 2
    )


# --- what is held ---------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_messages_and_needs_no_descriptor() -> None:
    for descriptors, before, after in run_ranks(2, jobs.held):
        assert descriptors == []
        assert before == after
        assert 2 * RING <= before <= 2 * RING + 16384


def test_groups_give_their_memory_back() -> None:
    assert run_ranks(2, jobs.groups_come_and_go, 5) == [0, 0]


def test_nothing_is_left_when_both_are_killed() -> None:
    job = joined(2)
    try:
        job.call(jobs.inodes)
        found = {inode for inodes in job.results() for inode in inodes}
        assert len(found) == 2
        for rank in range(2):
            job.signal(rank, signal.SIGKILL)
        assert job.wait_for_exit() == [-signal.SIGKILL] * 2
    finally:
        job.close()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = [line for line in (process / "maps").read_text().splitlines() if "memfd:unicoll" in line]
        except OSError:
            continue
        assert not found & {line.split()[4] for line in lines}


# --- faults ---------------------------------------------------------------------------------------------------------


def check_lost(job: Job, survivor: int, victim: int, killed: float) -> None:
    outcome = job.collect(30, [survivor])[0]
    failure = outcome.failure or outcome.value[0]
    assert failure is not None
    assert failure.type == "RankLostError", failure.traceback
    assert (failure.fields["rank"], failure.fields["pid"]) == (victim, job.pids[victim])
    assert failure.fields["op"] in ("send", "recv")
    print(f"raised {1000 * (outcome.at - killed):.0f} ms after the kill")
    assert outcome.at - killed < SOON_S
    job.call(leave, ranks=[survivor])
    assert job.collect(30, [survivor])[0].value == []


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("sender", [0, 1])
def test_a_rank_that_is_killed_while_large_messages_move_is_named(sender: int, victim: int) -> None:
    with joined(2) as job:
        job.call(jobs.stream, sender)
        job.await_notes()
        time.sleep(random.random() / 20)
        check_lost(job, 1 - victim, victim, job.signal(victim, signal.SIGKILL))


@pytest.mark.parametrize("job_of", [jobs.stuck, jobs.waits_in_the_middle])
def test_a_rank_that_is_killed_in_the_middle_of_a_message_is_named(job_of: Callable[..., object]) -> None:
    with joined(2) as job:
        job.call(job_of, 30.0)
        job.await_notes()
        time.sleep(0.3)
        check_lost(job, 0, 1, job.signal(1, signal.SIGKILL))


@pytest.mark.parametrize("job_of", [jobs.stuck, jobs.waits_in_the_middle])
def test_a_rank_that_stops_in_the_middle_of_a_message_is_named(job_of: Callable[..., object]) -> None:
    with joined(2) as job:
        job.call(job_of, 1.0)
        job.await_notes()
        job.signal(1, signal.SIGSTOP)
        failure, seconds = job.collect(30, [0])[0].value
        assert failure.type == "OperationTimeoutError", failure.traceback
        assert "rank 1 " in failure.message
        assert f"pid {job.pids[1]}" in failure.message
        assert "only part of it" in failure.message
        assert 0.8 <= seconds < SOON_S


def test_a_send_that_timed_out_before_it_began_leaves_no_trace(pool: Pools) -> None:
    failures = pool(2).run(jobs.timed_out_in_the_queue)[0]
    assert [f and f.type for f in failures] == ["OperationTimeoutError"]
    assert "has not taken part" in failures[0].message


@pytest.mark.parametrize("count", [10, 300])
def test_the_last_messages_of_a_rank_that_leaves_arrive(count: int) -> None:
    with joined(2) as job:
        job.call(jobs.last_words, count)
        assert job.await_notes() == ["left", "waits"]
        assert job.results()[1] == list(range(count))
