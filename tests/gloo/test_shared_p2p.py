"""Messages through shared memory: when it is used, the delivered data, and failures."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from gloo_fallback.p2p.frames import INLINE_LIMIT
from gloo_fallback.shm import ring_buffer
from gloo_fallback.shm.ring_buffer import CHUNK, RING, RingReader, RingWriter
from gloo_fallback.shm.segment import has_strong_ordering
from tests.conformance.p2p_jobs import me, must
from tests.support.log import Log
from tests.support.memory import mapped_bytes, memory_files, segments
from tests.support.on_ranks import on_ranks
from tests.support.order import await_true, await_word, send_word
from tests.support.outcomes import CallOutcome, failure_of, outcome_of
from tests.support.ranks import joined
from tests.support.worker import Failure, leave, send_note

LARGE = 3 * RING + 12_345
BOTH = (True, True)
NONE = (False, False)


# --- the ring -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ring() -> Iterator[tuple[RingWriter, RingReader]]:
    writer = RingWriter()
    reader = RingReader(writer.offer)
    yield writer, reader
    writer.close()
    reader.close()


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

    def receive() -> None:
        reader.written, writer.read = writer.position, reader.position
        assert read(reader) == waiting.popleft()
        reader.written, writer.read = writer.position, reader.position

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


def test_full_ring_accepts_nothing(ring: tuple[RingWriter, RingReader]) -> None:
    writer, _ = ring
    assert writer.begin(0, 0, 2 * RING)
    rest = memoryview(bytes(2 * RING))
    while count := writer.write(rest):
        rest = rest[count:]
    assert writer.free < CHUNK
    assert not writer.has_space(len(rest), True)
    assert not writer.put(0, 0, bytes(writer.free + 1))


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        pytest.param(
            [100] * 10_000,
            RING // 8,
            marks=pytest.mark.skipif(not has_strong_ordering(), reason="they use the whole ring"),
        ),
        ((CHUNK // 2, CHUNK, CHUNK, *range(0, CHUNK, CHUNK // 16), *[CHUNK] * 20), RING),
    ],
    ids=["small", "up to one chunk"],
)
def test_messages_fit_an_empty_ring(sizes: list[int], most: int, ring: tuple[RingWriter, RingReader]) -> None:
    """Small ones use few pages: they start again at its beginning. One chunk fits wherever it stands."""
    writer, reader = ring
    positions = set()
    for size in sizes:
        assert writer.has_space(size, False)
        assert writer.put(7, size, bytes(size))
        reader.written = writer.position
        assert read(reader) == (size, bytes(size))
        writer.read = reader.position
        positions.add(writer.position % RING)
    assert max(positions) < most


@pytest.mark.skipif(not has_strong_ordering(), reason="notices are always sent")
def test_sides_ask_for_notices_before_they_sleep(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
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


def engine(group: Any = None) -> Any:
    """This rank's point-to-point engine of a group."""
    return (group or dist.group.WORLD)._backends.for_device("cpu")._p2p


def rings(group: Any = None) -> list[tuple[bool, bool]]:
    """For each connection, by the peer's rank: True if sends, and receives, use a ring."""
    connections = [c for c in engine(group)._connections if c is not None]
    return [(c.sender.shared, c.receiver.shared) for c in connections]


def bytes_of(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def exchange(count: int, seed: int = 0, group: Any = None) -> None:
    """Two ranks send each other ``count`` bytes; both have then answered the offers of rings."""
    other, array = 1 - me(), np.zeros(count, np.uint8)
    work = must(dist.isend(bytes_of(count, seed + me()), other, group=group))
    dist.recv(array, other, group=group)
    work.wait()
    assert (array == bytes_of(count, seed + other)).all()
    send_word(other)
    await_word()


def create_rings(group: Any = None) -> None:
    """Create rings and wait until no thread of a rank runs progress."""
    exchange(LARGE, group=group)
    exchange(LARGE, group=group)
    dist.barrier(group)
    await_true(lambda: not engine(group)._progress.active)
    dist.barrier(group)


@pytest.mark.every(n=3)
@pytest.mark.parametrize("env", [{}, {"UNICOLL_MEMORY_ORDER": "weak"}, {"UNICOLL_TRANSPORT": "tcp"}], ids=str)
@on_ranks(2)
def test_odd_sizes(env: dict[str, str], seed: int) -> None:
    counts = [limit + more for limit in (INLINE_LIMIT, CHUNK, RING) for more in (-1, 0, 1)]
    rng = random.Random(seed)
    for i, count in enumerate([*counts, RING + 63, 0, 1, *(int(2 ** rng.uniform(0, 24)) for _ in range(30))]):
        exchange(count, 10 * i)
    assert rings() == [NONE if "UNICOLL_TRANSPORT" in env else BOTH]


@pytest.mark.every(n=2)
@pytest.mark.parametrize("count", [8, INLINE_LIMIT, 300_001, 5_000_000])
@on_ranks(2, env={})
def test_one_direction_uses_shared_memory(count: int) -> None:
    for i in range(20):
        if me() == 0:
            dist.send(bytes_of(count, i), 1)
        else:
            x = np.zeros(count, np.uint8)
            dist.recv(x, 0)
            assert (x == bytes_of(count, i)).all()
        dist.barrier()  # the offer of the ring and the answer to it have arrived
    assert rings() == [(me() == 0, me() == 1)]


@on_ranks(2)
def test_receive_may_be_posted_while_its_message_arrives() -> None:
    exchange(LARGE)
    if me() == 0:
        dist.barrier()
        dist.send(bytes_of(8 * LARGE, 5), 1, tag=5)
        dist.send(np.ones(1, np.uint8), 1, tag=6)
        return
    idle = must(dist.irecv(np.zeros(1, np.uint8), 0, tag=6))  # so that the progress thread receives
    dist.barrier()
    deadline = time.monotonic() + 60
    while engine()._connections[0].receiver.message is None and time.monotonic() < deadline:
        time.sleep(0)
    x = np.zeros(8 * LARGE, np.uint8)
    dist.recv(x, 0, tag=5)
    assert (x == bytes_of(8 * LARGE, 5)).all()
    idle.wait()


@on_ranks(3)
def test_a_receive_from_any_source_takes_from_all_rings_in_turn() -> None:
    """Rank 0 receives what is in the rings of the others already; then large messages."""
    array = np.zeros(100_000, np.uint8)
    for peer in (1, 2):
        for _ in range(2):  # the second time the ring of the first is used
            if me() == 0:
                dist.recv(array, peer)
                dist.send(array, peer)
            elif me() == peer:
                dist.send(array, 0)
                dist.recv(array, 0)
    dist.barrier()
    for i in range(20 if me() else 0):
        dist.send(np.array([me(), i]), 0)
    dist.barrier()
    if me():
        for _ in range(5):
            dist.send(np.full(1_000_003, me(), np.uint8), 0)
        return
    found = np.zeros(2, np.int64)
    sources = [dist.recv(found) for _ in range(40)]
    assert sorted(sources) == [1] * 20 + [2] * 20
    assert set(sources[:10]) == {1, 2}
    array = np.zeros(1_000_003, np.uint8)
    for _ in range(10):
        source = dist.recv(array)
        assert (array == source).all()


@on_ranks(2)
def test_mismatched_large_messages_raise_and_the_group_stays_usable() -> None:
    """Of another size or type than their receives, posted before and after the messages arrive."""
    exchange(LARGE)
    inputs: tuple[Any, ...] = (np.ones(LARGE, np.uint8), np.ones(10, np.uint8), np.ones(LARGE, np.int8))
    for before in (False, True):
        for x, count in zip(inputs, (LARGE + 1, LARGE, LARGE), strict=True):
            if me() == 0:
                work = must(dist.isend(x, 1, tag=1))
                dist.barrier()
                work.wait()
            else:
                array = np.zeros(count, np.uint8)
                received = must(dist.irecv(array, 0, tag=1)) if before else None
                dist.barrier()
                with pytest.raises(dist.MessageMismatchError, match="rank 0"):
                    dist.recv(array, 0, tag=1) if received is None else received.wait()
                assert not array.any()
            exchange(LARGE, 3)


@on_ranks(2)
def test_callback_may_wait_for_messages() -> None:
    if me() == 0:
        dist.send(np.full(1, 4), 1)
        x = np.zeros(LARGE, np.uint8)
        dist.recv(x, 1, tag=1)
        dist.send(np.full(2, int(x[0])), 1, tag=2)
        return
    y, answers, over = np.zeros(1, np.int64), np.zeros(2, np.int64), threading.Event()

    def answer(_: Any) -> None:
        dist.send(np.full(LARGE, int(y[0]) + 1, np.uint8), 0, tag=1)
        dist.recv(answers, 0, tag=2)
        over.set()

    work = must(dist.irecv(y, 0))
    work.get_future().add_done_callback(answer)
    assert over.wait(30)
    assert answers[1] == 5


@pytest.mark.skipif(not has_strong_ordering(), reason="notices are always received")
@on_ranks(2)
def test_a_send_that_a_receive_has_ended_is_reported() -> None:
    """A receive takes its messages from the ring, and thereby sees room for the rest of a send in the background.

    The callbacks of the send did not run before another operation was waited for.
    """
    create_rings()
    progress = engine()._progress
    parts, x = 12, np.zeros(CHUNK, np.uint8)
    if me() == 1:
        works = [must(dist.isend(np.full(CHUNK, i, np.uint8), 0)) for i in range(parts)]
        # nothing is read while rank 0 fills the ring, otherwise its send may find room for all its parts
        while not progress._acquire_progress():
            pass
        dist.barrier()
        works.append(must(dist.irecv(np.zeros(RING + CHUNK, np.uint8), 0, tag=1)))
        dist.barrier()
        progress.give_back(False)
        await_true(lambda: not engine()._connections[0].receiver.has_shared_data)
        dist.barrier()
        for work in works:
            work.wait()
        return
    ended: list[int] = []
    # as if its thread had just looked for messages, and will look again later
    progress.wake_thread = lambda: None
    dist.barrier()
    work = must(dist.isend(np.zeros(RING + CHUNK, np.uint8), 1, tag=1))
    work.get_future().add_done_callback(lambda _: ended.append(1))
    dist.barrier()
    dist.barrier()
    assert not ended, "the send ended before the receives"
    for i in range(parts):
        dist.recv(x, 1)
        assert (x == i).all()
    assert work.is_completed(), "the receives did not report the end of the send"
    await_true(lambda: ended)
    del progress.wake_thread


@on_ranks(2)
def test_notices_to_a_rank_that_has_left_are_not_waited_for() -> None:
    """Closing the group waited 5 s for them to be sent.

    The peer resets the connection because of the first notice, so the second one cannot be sent.
    """
    group = must(dist.new_group([0, 1]))
    create_rings(group)
    if me() == 1:
        dist.destroy_process_group(group)
    dist.barrier()
    if me() == 1:
        return
    (connection,) = (c for c in engine(group)._connections if c is not None)
    for _ in range(2):
        with engine(group).lock:
            connection.sender.notify()
        await_true(lambda: not connection.has_unsent)
    dist.destroy_process_group(group)


# --- where memory cannot be shared ----------------------------------------------------------------------------------


def _refuse(*_: object) -> Any:
    raise OSError(24, "Too many open files")


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("what", "rank", "logging", "words"),
    [
        ("open_offer", 1, 0, ["rank 1 ", "socket", "Too many open files"]),
        ("create_offer", 0, 0, ["Too many open files"]),
        ("tcp", 0, 1, []),
        ("tcp", 1, 0, []),
    ],
)
@on_ranks(2, env={})
def test_the_socket_is_used_where_one_rank_cannot_share(
    what: str, rank: int, logging: int, words: list[str]
) -> None:
    """One rank cannot map, or cannot create, shared memory, or uses sockets only; one rank logs it."""
    if me() == rank:
        if what == "tcp":
            os.environ["UNICOLL_TRANSPORT"] = "tcp"
        else:
            setattr(ring_buffer, what, _refuse)
    group = dist.new_group()
    os.environ.pop("UNICOLL_TRANSPORT", None)
    dist.barrier()  # the transport of the collectives is logged, too
    with Log() as log:
        for i in range(3):
            exchange(LARGE, i, group)
        dist.barrier()
    assert rings(group) == [NONE if what == "tcp" else (me() == 1, me() == 0)]
    assert len(log.lines) == (me() == logging), log.lines
    assert all(word in line for line in log.lines for word in words), log.lines


# --- memory ---------------------------------------------------------------------------------------------------


@pytest.mark.every(n=0)
@on_ranks(2, env={})
def test_memory_does_not_grow_with_the_messages_and_is_released() -> None:
    for i in range(2):
        exchange(CHUNK, i)
    before = mapped_bytes()
    exchange(20 * LARGE)
    assert mapped_bytes() == before
    assert 2 * RING <= before <= 2 * RING + 16384
    assert memory_files() == []
    for i in range(5):
        group = dist.new_group()
        exchange(LARGE, i, group)
        exchange(LARGE, i, group)
        assert all(rings(group)[0])
        dist.barrier(group=group)
        dist.destroy_process_group(group)
    assert mapped_bytes() == before


def _inodes() -> list[str]:
    """The inodes of the segments that this process has mapped while rings are in use."""
    for i in range(2):
        exchange(LARGE, i)
    return sorted({fields[4] for fields in segments()})


def test_nothing_remains_when_both_ranks_are_killed() -> None:
    job = joined(2)
    try:
        job.call(_inodes)
        found = {inode for inodes in job.results() for inode in inodes}
        assert len(found) == 2
        for rank in range(2):
            job.signal(rank, signal.SIGKILL)
        assert job.wait_for_exit() == [-signal.SIGKILL] * 2
    finally:
        job.close()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            lines = [line for line in (process / "maps").read_text().splitlines() if "memfd:unicoll" in line]
            assert not found & {line.split()[4] for line in lines}


# --- faults ---------------------------------------------------------------------------------------------------------


def outcome_within_a_message(call: Callable[[], Any], within: Callable[[], object]) -> CallOutcome:
    """The outcome of a call; sends a note once a part of its message is transferred, or when it has ended."""
    ended = threading.Event()

    def note() -> None:
        await_true(lambda: ended.is_set() or within())
        send_note("within a message")

    thread = threading.Thread(target=note)
    thread.start()
    outcome = outcome_of(call)
    ended.set()
    thread.join()
    return outcome


def _stops_receiving(timeout: float) -> CallOutcome:
    """Rank 0 has sent part of a message, and rank 1 does not receive the rest."""
    create_rings()
    if me() == 1:
        send_note("idle")
        time.sleep(60)
    sender = engine()._connections[1].sender
    return outcome_within_a_message(
        lambda: dist.send(np.zeros(LARGE, np.uint8), 1, timeout=timeout),
        lambda: any(pending.begun for pending in tuple(sender.outbox)),
    )


def _stops_sending(timeout: float) -> CallOutcome:
    """Rank 0 has received part of a message, and rank 1 does not send the rest."""
    exchange(LARGE)
    exchange(LARGE)
    if me() == 1:
        connection = engine()._connections[0]
        put = connection.sender.writer.write

        def once(view: memoryview) -> int:
            connection.sender.writer.write = lambda rest: 0
            return int(put(view))

        connection.sender.writer.write = once
        must(dist.isend(np.zeros(LARGE, np.uint8), 0))._waited = True
        send_note("sending")
        time.sleep(60)
    receiver = engine()._connections[1].receiver
    return outcome_within_a_message(
        lambda: dist.recv(np.zeros(LARGE, np.uint8), 1, timeout=timeout), lambda: receiver.message is not None
    )


@pytest.mark.every(n=2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("job_of", [_stops_receiving, _stops_sending])
def test_rank_killed_or_stopped_within_a_message_is_named(
    job_of: Callable[..., object], number: signal.Signals
) -> None:
    with joined(2) as job:
        job.call(job_of, 30.0 if number == signal.SIGKILL else 1.0)
        job.await_notes()
        job.signal(1, number)
        failure, seconds = job.collect(30, [0])[0].value
        assert "rank 1 " in failure.message
        assert f"pid {job.pids[1]}" in failure.message
        if number == signal.SIGSTOP:
            assert failure.type == "OperationTimeoutError", failure.traceback
            assert "only a part of the message was transferred" in failure.message
            assert seconds >= 0.8
            return
        assert failure.type == "RankLostError", failure.traceback
        assert (failure.fields["rank"], failure.fields["pid"]) == (1, job.pids[1])
        assert failure.fields["op"] in ("send", "recv")
        job.call(leave, ranks=[0])
        assert job.collect(30, [0])[0].value == []


@on_ranks(2)
def test_send_that_timed_out_before_it_began_has_no_effect() -> None:
    """It times out on a full ring before any part has left."""
    create_rings()
    x = np.zeros(CHUNK, np.uint8)  # fits one chunk
    if me() == 0:
        sent, writer = 0, engine()._connections[1].sender.writer
        while writer.has_space(CHUNK, False):
            x[:] = sent % 251
            dist.send(x, 1)
            sent += 1
        assert 0 < sent <= RING // CHUNK
        with pytest.raises(dist.OperationTimeoutError, match="has not received the message"):
            dist.send(x, 1, timeout=0.3)
        dist.barrier()
        dist.send(np.full(1, sent), 1, tag=1)
        x[:] = 252
        dist.send(x, 1)
    else:
        dist.barrier()
        count = np.zeros(1, np.int64)
        dist.recv(count, 0, tag=1)
        for i in [*(k % 251 for k in range(int(count[0]))), 252]:
            dist.recv(x, 0)
            assert (x == i).all(), (i, x[0])
    exchange(LARGE)


@on_ranks(2)
def test_a_send_after_one_that_was_cut_off_makes_a_new_connection() -> None:
    """A send times out within its message; the next one waits until rank 1 notices that the connection has ended."""
    create_rings()
    x = np.zeros(3)
    if me() == 0:
        with pytest.raises(dist.OperationTimeoutError, match="only a part of the message was transferred"):
            dist.send(np.zeros(LARGE, np.uint8), 1, timeout=0.5)  # begins before the deadline
        dist.barrier()
        dist.send(np.full(3, 7.0), 1)
    else:
        dist.barrier()
        time.sleep(0.5)  # rank 0's new connection is refused meanwhile
        with pytest.raises(dist.RankLostError):
            dist.recv(np.zeros(LARGE, np.uint8), 0)
        dist.recv(x, 0)
        assert (x == 7).all()
    exchange(LARGE)


def _messages_before_leaving(count: int, has_ring: bool) -> None:
    """Rank 0 sends messages and leaves; rank 1 receives them afterwards.

    Args:
        count: of small messages.
        has_ring: False: rank 0 sends through its socket; it leaves while notices of the other direction are unread.
    """
    if me() == 0 and not has_ring:
        ring_buffer.create_offer = _refuse
    create_rings()
    parts = RING // CHUNK - 1 if has_ring else 0
    works = []
    if me() == 1 and not has_ring:
        assert rings() == [(True, False)]
        works = [must(dist.isend(np.zeros(CHUNK, np.uint8), 0, tag=2)) for _ in range(2)]
    dist.barrier()
    messages = [(CHUNK, i, 0) for i in range(parts)] + [(5000, i % 251, 1) for i in range(count)]
    if me() == 0:
        for size, value, tag in messages:
            dist.send(np.full(size, value, np.uint8), 1, tag=tag)
        dist.destroy_process_group()
        send_note("left")
        return
    send_note("waits")
    time.sleep(1.0)
    for size, value, tag in messages:
        x = np.zeros(size, np.uint8)
        dist.recv(x, 0, tag=tag)
        assert (x == value).all()
    for work in works:
        work.wait()


@pytest.mark.every(n=2)
@pytest.mark.parametrize(("count", "has_ring"), [(10, True), (300, True), (300, False)])
def test_last_messages_of_a_leaving_rank_arrive(count: int, has_ring: bool) -> None:
    """Without a ring the kernel dropped them, because the rank had not read all notices of the other ring."""
    with joined(2, env={} if has_ring else {"UNICOLL_MEMORY_ORDER": "weak"}) as job:
        job.call(_messages_before_leaving, count, has_ring)
        assert job.await_notes() == ["left", "waits"]
        job.results()


@on_ranks(2, env={})
def test_an_interrupted_send_fails_the_group() -> None:
    """Ctrl-C during a large send of rank 0, which has a receive from the same rank in the background.

    The message is incomplete; the callbacks of receives from the peer run.
    """
    create_rings()
    failed = r"rank 0 .* send.*KeyboardInterrupt$"
    if me() == 1:
        world: Any = dist.group.WORLD
        await_true(lambda: world.job.control.group_failure(world.name))  # it reads nothing until then
        with pytest.raises(dist.GroupAbortedError, match=failed):
            dist.recv(np.zeros(1), 0, tag=2)
        return
    work, ended = must(dist.irecv(np.zeros(4), 1, tag=1)), threading.Event()
    work.get_future().add_done_callback(lambda _: ended.set())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    engine()._progress.wake_thread = lambda: None  # as if its thread looked after the connection was closed
    with pytest.raises(KeyboardInterrupt):
        dist.send(np.zeros(LARGE, np.uint8), 1)
    assert ended.wait(20)
    timer.join()
    del engine()._progress.wake_thread
    with pytest.raises(dist.GroupAbortedError, match=failed):
        dist.barrier()
    with pytest.raises(dist.GroupAbortedError, match=failed):
        work.wait()


@pytest.mark.every(n=2)
@pytest.mark.parametrize("env", [{}, {"UNICOLL_TRANSPORT": "tcp"}], ids=str)
@pytest.mark.parametrize("posted", [False, True])
@on_ranks(2)
def test_no_thread_goes_on_with_a_stream_in_doubt(env: dict[str, str], posted: bool) -> None:
    """An interrupted thread has released the lock, but not failed the group yet: the others change nothing."""
    group = must(dist.new_group())
    create_rings(group)
    failed = r"rank 0 .*: a message was interrupted$"
    x = np.zeros(4)
    if me() == 0:
        work = must(dist.irecv(x, 1, group=group)) if posted else None
        with engine(group).lock:
            engine(group).unsure = True
        dist.barrier()
        with pytest.raises(dist.GroupAbortedError, match=failed):
            if work is not None:
                work.wait()
            else:
                dist.recv(x, 1, group=group)
        assert (x == 0).all()
    else:
        dist.barrier()
        with suppress(dist.GroupAbortedError):  # rank 0 may have found it by now
            dist.send(np.ones(4), 0, group=group)
    with pytest.raises(dist.GroupAbortedError, match=failed):
        dist.recv(x, 1 - me(), group=group)


@pytest.mark.skipif(not has_strong_ordering(), reason="rings with notices are not polled")
@on_ranks(2, env={})
def test_a_send_that_another_thread_aborts_raises_the_error_of_the_group() -> None:
    """Rank 0 has no ring to send in; another thread aborts the group while a send waits for space in the socket.

    The thread that waited for it sent on the closed socket, and raised the OSError of that.
    """
    if me() == 0:
        ring_buffer.create_offer = _refuse
    group = must(dist.new_group())
    create_rings(group)
    assert rings(group) == [(me() == 1, me() == 0)]
    if me() == 1:
        dist.barrier()
        return
    backend: Any = group._backends.for_device("cpu")
    messages = backend._p2p
    connection, find = messages._connections[1], messages.connection_to

    def find_before_the_abort(peer: int) -> Any:
        """Another thread aborts the group when the waiting thread has found the connection."""
        found = find(peer)
        if found is not None:
            assert found.sender.blocked
            error = dist.GroupAbortedError("aborted while rank 1 receives nothing", rank=1)
            aborting = threading.Thread(target=backend.abort, args=(error,))
            aborting.start()
            aborting.join()
            assert connection.closed
            assert connection.sock.fileno() < 0
        return found

    messages.connection_to = find_before_the_abort
    with pytest.raises(dist.GroupAbortedError) as raised:
        dist.send(np.zeros(64 << 20, np.uint8), 1, group=group, timeout=60.0)
    assert raised.value.rank == 1
    dist.barrier()


@on_ranks(2, env={})
def test_a_collective_that_fails_runs_no_callbacks_of_messages() -> None:
    """A callback that makes a call of the group would wait for the failing one, which runs it."""
    group = must(dist.new_group())
    if me() == 0:
        failures: Any = group.job.control._failures  # type: ignore[union-attr]
        key = group.group_name, "gloo"
        end_messages, returned = failures._callbacks[key], threading.Event()
        failures._callbacks[key] = lambda error: returned.wait(60) and end_messages(error)
        found: list[Any] = []
        here = threading.get_ident()

        def fail() -> None:
            found.append((threading.get_ident(), failure_of(lambda: dist.barrier(group=group))))

        receive = must(dist.irecv(np.zeros(1), 1, group=group))
        receive.add_done_callback(fail)
        failure = failure_of(lambda: dist.all_reduce(np.zeros(1), group=group, timeout=0.5))
        returned.set()
        await_true(lambda: found)
        ((thread, raised),) = found
        assert thread != here
        assert failure is not None
        assert raised.message == failure.message
    dist.barrier()


@on_ranks(2, env={})
def test_a_group_that_a_callback_destroys_sends_what_was_posted() -> None:
    group, values, destroyed = must(dist.new_group()), np.ones(1 << 23), threading.Event()
    create_rings(group)

    def destroy() -> None:
        dist.destroy_process_group(group)
        destroyed.set()

    if me() == 0:
        send = must(dist.isend(values, 1, group=group))
        must(dist.all_reduce(np.ones(4), group=group, async_op=True)).add_done_callback(destroy)
        assert destroyed.wait(60)
        send.wait()
    else:
        dist.all_reduce(np.ones(4), group=group)
        values[:] = 0
        dist.recv(values, 0, group=group)
        assert values.all()
    dist.barrier()


def _sends_to_a_stopped_rank() -> tuple[Failure | None, Failure | None, bool]:
    """Rank 1 is stopped, and rank 0 sends to it, for the first time, with a long and then with a short timeout.

    It receives from rank 2 meanwhile: the outcomes of the sends, and whether that ended before the first one.
    """
    dist.barrier()
    send_note("ready")
    if me() == 1:
        time.sleep(60)
    time.sleep(0.5)
    if me() == 2:
        time.sleep(0.5)
        dist.send(np.ones(4), 0)
        return None, None, True
    first = must(dist.isend(np.zeros(4), 1, timeout=10.0))
    work, received = must(dist.irecv(np.zeros(4), 2)), threading.Event()
    work.get_future().add_done_callback(lambda _: received.set())
    second = failure_of(lambda: dist.send(np.zeros(4), 1, timeout=1.0))
    in_time = received.wait(30) and not first.is_completed()
    work.wait()
    return failure_of(first.wait), second, in_time


@pytest.mark.every(n=0)
def test_a_peer_that_does_not_answer_delays_no_other_operation() -> None:
    """A receive from another rank, and a send to that peer with a shorter timeout, waited as long as the first send."""
    with joined(3) as job:
        job.call(_sends_to_a_stopped_rank)
        job.await_notes()
        job.signal(1, signal.SIGSTOP)
        first, second, in_time = job.collect(60, [0])[0].value
        assert in_time
        for failure in (first, second):
            assert failure.type == "OperationTimeoutError", failure.traceback
            assert "rank 1 " in failure.message
