"""Messages through shared memory: when it is used, the delivered data, and failures."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gloo_fallback.p2p.frames import INLINE_LIMIT
from gloo_fallback.shm.ring_buffer import CHUNK, RING, RingReader, RingWriter
from gloo_fallback.shm.segment import has_strong_ordering
from tests.gloo import shared_p2p_jobs as jobs
from tests.support.ranks import Pool, ProcessJob, joined, run_ranks
from tests.support.worker import leave

Pools = Callable[[int], Pool]

BOTH = (True, True)
NONE = (False, False)


# --- the ring -----------------------------------------------------------------------------------------------------


def write(writer: RingWriter, tag: int, data: bytes) -> Iterator[None]:
    """Write a message; yields while there is no space."""
    if len(data) <= CHUNK:
        while not writer.put(7, tag, data):
            assert not writer.has_space(len(data), False)
            yield
        return
    while not writer.begin(7, tag, len(data)):
        assert not writer.has_space(len(data), False)
        yield
    rest = memoryview(data)
    while rest:
        while not (count := writer.write(rest)):
            assert not writer.has_space(len(rest), True)
            yield
        rest = rest[count:]


def read(reader: RingReader) -> tuple[int, bytes] | None:
    """Read the next message, which must be complete; None if the ring is empty."""
    header = reader.header()
    if header is None:
        return None
    code, tag, size = header
    assert code == 7
    body = reader.body(size)
    if body is not None:
        data = bytes(body)
        reader.skip(size)
        return tag, data
    reader.skip()
    target = bytearray(size)
    got = 0
    while got < size:
        count = reader.read(memoryview(target)[got:])
        assert count
        got += count
    return tag, bytes(target)


@pytest.mark.parametrize("order", ["strong", "weak"])
def test_ring_delivers_what_was_written(seed: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICOLL_MEMORY_ORDER", "weak" if order == "weak" else "auto")
    rng = np.random.default_rng(seed)
    writer = RingWriter()
    reader = RingReader(writer.offer)
    writer.accepted()
    waiting: deque[tuple[int, bytes]] = deque()

    def exchange_positions() -> None:
        reader.written, writer.read = writer.position, reader.position

    def receive() -> None:
        exchange_positions()
        assert read(reader) == waiting.popleft()
        exchange_positions()

    for tag in range(2000):
        large = rng.random() < 0.1
        data = rng.bytes(int(rng.integers(0, RING // 4 if large else 1000)))
        sending = write(writer, tag, data)
        while next(sending, True) is None:
            receive()
        waiting.append((tag, data))
        while waiting and rng.random() < (0.6 if tag % 100 < 50 else 0.3):
            receive()
    while waiting:
        receive()
    assert read(reader) is None
    assert writer.free == RING
    writer.close()
    reader.close()


def test_full_ring_accepts_nothing() -> None:
    writer = RingWriter()
    try:
        assert writer.begin(0, 0, 2 * RING)
        rest = memoryview(bytes(2 * RING))
        while count := writer.write(rest):
            rest = rest[count:]
        assert writer.free < CHUNK
        assert not writer.has_space(len(rest), True)
        assert not writer.put(0, 0, bytes(writer.free + 1))
    finally:
        writer.close()


@pytest.mark.skipif(not has_strong_ordering(), reason="they use the whole ring")
def test_small_messages_use_few_pages() -> None:
    """They start again at the beginning of the ring while it is empty."""
    writer = RingWriter()
    reader = RingReader(writer.offer)
    positions = set()
    for tag in range(10_000):
        assert writer.put(7, tag, bytes(100))
        reader.written = writer.position
        assert read(reader) == (tag, bytes(100))
        writer.read = reader.position
        positions.add(writer.position % RING)
    assert max(positions) < RING // 8
    writer.close()
    reader.close()


def test_a_message_of_one_chunk_fits_an_empty_ring_wherever_it_stands() -> None:
    writer = RingWriter()
    reader = RingReader(writer.offer)
    for size in (CHUNK // 2, CHUNK, CHUNK, *range(0, CHUNK, CHUNK // 16), *[CHUNK] * 20):
        assert writer.has_space(size, False)
        assert writer.put(7, 0, bytes(size))
        reader.written = writer.position
        assert read(reader) == (0, bytes(size))
        writer.read = reader.position
    writer.close()
    reader.close()


@pytest.mark.skipif(not has_strong_ordering(), reason="notices are always sent")
def test_sides_ask_for_notices_before_they_sleep() -> None:
    writer = RingWriter()
    reader = RingReader(writer.offer)
    assert not reader.await_data()
    assert writer.put(7, 0, b"x")
    assert writer.must_notify()
    assert not writer.must_notify()
    assert reader.await_data()
    reader.await_data(False)
    assert writer.put(7, 0, b"x")
    assert not writer.must_notify()
    while writer.put(7, 0, bytes(CHUNK)):
        pass
    writer.await_space()
    told = 0
    while read(reader) is not None:
        told += reader.must_notify()
    assert told == 1
    writer.close()
    reader.close()


def test_wrong_offers_are_not_mapped() -> None:
    writer = RingWriter()
    offer = writer.offer
    for wrong in (
        offer.replace(b'"token": "', b'"token": "0')[: len(offer)],
        offer.replace(b'"boot": "', b'"boot": "0'),
        json.dumps(json.loads(offer) | {"strong": not writer.strong}).encode(),
    ):
        with pytest.raises((OSError, ValueError)):
            RingReader(wrong)
    writer.close()
    with pytest.raises(OSError):
        RingReader(offer)


# --- delivered data -------------------------------------------------------------------------------------------


def test_messages_within_a_host_use_shared_memory(pool: Pools) -> None:
    assert pool(2).run(jobs.sizes, [CHUNK] * 3) == [[BOTH]] * 2


def test_odd_sizes(pool: Pools, seed: int) -> None:
    counts = [
        INLINE_LIMIT - 1,
        INLINE_LIMIT,
        INLINE_LIMIT + 1,
        CHUNK - 1,
        CHUNK,
        CHUNK + 1,
        RING - 1,
        RING,
        RING + 63,
        0,
        1,
    ]
    rng = random.Random(seed)
    counts += [int(2 ** rng.uniform(0, 24)) for _ in range(30)]
    assert pool(2).run(jobs.sizes, counts) == [[BOTH]] * 2
    assert run_ranks(2, jobs.sizes, counts, env={"UNICOLL_MEMORY_ORDER": "weak"}) == [[BOTH]] * 2


@pytest.mark.parametrize("count", [8, INLINE_LIMIT, 300_001, 5_000_000])
def test_one_direction_uses_shared_memory(count: int) -> None:
    sender, receiver = run_ranks(2, jobs.one_way, count, 20)
    assert sender == [(True, False)]
    assert receiver == [(False, True)]


def test_a_message_behind_large_ones_can_be_received_first(pool: Pools) -> None:
    pool(2).run(jobs.behind_large_messages)


def test_receive_may_be_posted_while_its_message_arrives(pool: Pools) -> None:
    pool(2).run(jobs.posted_while_arriving)


def test_large_messages_from_any_source(pool: Pools) -> None:
    assert sorted(pool(3).run(jobs.from_any_source, 5, 1_000_003)[0]) == [1] * 5 + [2] * 5


def test_a_receive_from_any_source_takes_from_all_rings_in_turn(pool: Pools) -> None:
    sources = pool(3).run(jobs.from_full_rings, 20)[0]
    assert sorted(sources) == [1] * 20 + [2] * 20
    assert set(sources[:10]) == {1, 2}


def test_all_pairs_at_once(pool: Pools) -> None:
    pool(4).run(jobs.all_pairs_at_once, 1_500_000, 3)


def test_mismatched_large_messages_raise_and_the_group_stays_usable(pool: Pools) -> None:
    failures = pool(2).run(jobs.mismatched_messages)[1]
    assert [f and f.type for f in failures] == ["MessageMismatchError"] * 6
    assert all("rank 0" in f.message for f in failures)


def test_callback_may_wait_for_messages(pool: Pools) -> None:
    assert pool(2).run(jobs.in_a_callback)[1] == [5]


@pytest.mark.skipif(not has_strong_ordering(), reason="notices are always received")
def test_a_send_that_a_receive_has_ended_is_reported(pool: Pools) -> None:
    """Its callbacks did not run before another operation was waited for."""
    pool(2).run(jobs.ended_by_a_receive)


def test_notices_to_a_rank_that_has_left_are_not_waited_for(pool: Pools) -> None:
    """Closing the group waited 5 s for them to be sent."""
    assert pool(2).run(jobs.notices_after_the_peers_end) == [[False, False], []]


# --- where memory cannot be shared ----------------------------------------------------------------------------------


def test_receiver_that_cannot_map_the_ring_uses_the_socket() -> None:
    (used, log), (others, other_log) = run_ranks(2, jobs.without, "open_offer", 1)
    assert used == [(False, True)]
    assert others == [(True, False)]
    assert other_log == []
    assert len(log) == 1
    assert "rank 1 " in log[0]
    assert "socket" in log[0]
    assert "Permission denied" in log[0]


def test_sender_without_memory_uses_the_socket() -> None:
    (used, log), (others, other_log) = run_ranks(2, jobs.without, "create_offer", 0)
    assert used == [(False, True)]
    assert others == [(True, False)]
    assert other_log == []
    assert len(log) == 1
    assert "Too many open files" in log[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_tcp_on_one_rank(rank: int) -> None:
    outcomes = run_ranks(2, jobs.tcp_on_one_rank, rank)
    assert [used for used, _ in outcomes] == [[NONE]] * 2
    assert outcomes[rank][1] == []
    assert len(outcomes[1 - rank][1]) == 1


def test_tcp_on_all_ranks() -> None:
    assert run_ranks(2, jobs.sizes, [CHUNK, jobs.LARGE] * 2, env={"UNICOLL_TRANSPORT": "tcp"}) == [[NONE]] * 2


# --- memory ---------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_messages_and_needs_no_descriptor() -> None:
    for descriptors, before, after in run_ranks(2, jobs.memory_in_use):
        assert descriptors == []
        assert before == after
        assert 2 * RING <= before <= 2 * RING + 16384


def test_destroyed_groups_release_their_memory() -> None:
    assert run_ranks(2, jobs.groups_come_and_go, 5) == [0, 0]


def test_nothing_remains_when_both_ranks_are_killed() -> None:
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


def check_lost(job: ProcessJob, survivor: int, victim: int, killed: float) -> None:
    outcome = job.collect(30, [survivor])[0]
    failure = outcome.failure or outcome.value[0]
    assert failure is not None
    assert failure.type == "RankLostError", failure.traceback
    assert (failure.fields["rank"], failure.fields["pid"]) == (victim, job.pids[victim])
    assert failure.fields["op"] in ("send", "recv")
    print(f"raised {1000 * (outcome.at - killed):.0f} ms after the kill")
    job.call(leave, ranks=[survivor])
    assert job.collect(30, [survivor])[0].value == []


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("sender", [0, 1])
def test_rank_killed_during_large_messages_is_named(sender: int, victim: int) -> None:
    with joined(2) as job:
        job.call(jobs.stream, sender)
        job.await_notes()
        time.sleep(random.random() / 20)
        check_lost(job, 1 - victim, victim, job.signal(victim, signal.SIGKILL))


@pytest.mark.parametrize("job_of", [jobs.stops_receiving, jobs.stops_sending])
def test_rank_killed_within_a_message_is_named(job_of: Callable[..., object]) -> None:
    with joined(2) as job:
        job.call(job_of, 30.0)
        job.await_notes()
        check_lost(job, 0, 1, job.signal(1, signal.SIGKILL))


@pytest.mark.every(2)
@pytest.mark.parametrize("job_of", [jobs.stops_receiving, jobs.stops_sending])
def test_rank_stopped_within_a_message_is_named(job_of: Callable[..., object]) -> None:
    with joined(2) as job:
        job.call(job_of, 1.0)
        job.await_notes()
        job.signal(1, signal.SIGSTOP)
        failure, seconds = job.collect(30, [0])[0].value
        assert failure.type == "OperationTimeoutError", failure.traceback
        assert "rank 1 " in failure.message
        assert f"pid {job.pids[1]}" in failure.message
        assert "only a part of the message was transferred" in failure.message
        assert seconds >= 0.8


def test_send_that_timed_out_before_it_began_has_no_effect(pool: Pools) -> None:
    failures = pool(2).run(jobs.timed_out_in_the_queue)[0]
    assert [f and f.type for f in failures] == ["OperationTimeoutError"]
    assert "has not received the message" in failures[0].message


def test_a_send_after_one_that_was_cut_off_makes_a_new_connection(pool: Pools) -> None:
    (sent,), (received,) = pool(2).run(jobs.send_after_a_cut_one)
    assert sent is not None
    assert sent.type == "OperationTimeoutError"
    assert "only a part of the message was transferred" in sent.message
    assert received is not None
    assert received.type == "RankLostError"


@pytest.mark.every(2)
@pytest.mark.parametrize("count", [10, 300])
def test_last_messages_of_a_leaving_rank_arrive(count: int) -> None:
    with joined(2) as job:
        job.call(jobs.messages_before_leaving, count)
        assert job.await_notes() == ["left", "waits"]
        assert job.results()[1] == list(range(count))


def test_last_messages_of_a_leaving_rank_without_a_ring_arrive() -> None:
    """The kernel dropped them, because the rank had not read all notices of the other ring."""
    with joined(2, env={"UNICOLL_MEMORY_ORDER": "weak"}) as job:
        job.call(jobs.leaves_without_a_ring, 300)
        job.await_notes()
        assert job.results()[1] == 300


def test_an_interrupted_send_fails_the_receives_of_its_connection() -> None:
    """The connection is closed within a message; the callbacks of receives from the peer did not run."""
    failure = run_ranks(2, jobs.interrupted_send)[0]
    assert failure is not None
    assert failure.type == "RankLostError", failure.traceback


@pytest.mark.skipif(not has_strong_ordering(), reason="rings with notices are not polled")
def test_a_send_that_another_thread_aborts_raises_the_error_of_the_group() -> None:
    """The thread that waited for it sent on the closed socket, and raised the OSError of that."""
    failure = run_ranks(2, jobs.aborted_while_the_socket_is_full)[0]
    assert failure is not None
    assert failure.type == "GroupAbortedError", failure.traceback
    assert failure.fields["rank"] == 1


@pytest.mark.slow
def test_receives_go_on_while_a_peer_does_not_answer() -> None:
    """They waited until the attempt to connect to that peer had timed out."""
    with joined(3) as job:
        job.call(jobs.receives_while_connecting)
        job.await_notes()
        job.signal(1, signal.SIGSTOP)
        received, failure = job.collect(60, [0])[0].value
        assert received
        assert failure.type == "OperationTimeoutError", failure.traceback


@pytest.mark.slow
def test_send_behind_one_with_a_longer_timeout_ends_at_its_own() -> None:
    """It waited for the connection as long as the first one."""
    with joined(2) as job:
        job.call(jobs.queued_behind_a_longer_timeout)
        job.await_notes()
        job.signal(1, signal.SIGSTOP)
        failure, seconds = job.collect(60, [0])[0].value
        assert failure.type == "OperationTimeoutError", failure.traceback
        assert "rank 1 " in failure.message
        assert seconds >= 0.8
