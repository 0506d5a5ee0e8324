"""Jobs of the tests of messages through shared memory."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unicoll as dist
from gloo_fallback.shm.ring_buffer import CHUNK, RING
from tests.conformance.p2p_jobs import me, must, size
from tests.support.log import Log
from tests.support.order import await_true, await_word, send_word
from tests.support.outcomes import CallOutcome, failure_of, outcome_of
from tests.support.worker import Failure, send_note

LARGE = 3 * RING + 12_345


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


def sizes(counts: list[int]) -> list[tuple[bool, bool]]:
    """Exchange messages of these sizes in both directions; returns :func:`rings`."""
    for i, count in enumerate(counts):
        exchange(count, 10 * i)
    return rings()


def one_way(count: int, rounds: int) -> list[tuple[bool, bool]]:
    """Rank 0 only sends, rank 1 only receives."""
    for i in range(rounds):
        if me() == 0:
            dist.send(bytes_of(count, i), 1)
        else:
            x = np.zeros(count, np.uint8)
            dist.recv(x, 0)
            assert (x == bytes_of(count, i)).all()
        dist.barrier()  # the offer of the ring and the answer to it have arrived
    return rings()


def behind_large_messages() -> None:
    """A small message is received before the unexpected large messages that precede it."""
    exchange(LARGE)
    if me() == 0:
        works = [must(dist.isend(bytes_of(LARGE, tag), 1, tag=tag)) for tag in range(3)]
        dist.send(np.full(5, 7, np.uint8), 1, tag=9)
        for work in works:
            work.wait()
    else:
        small, x = np.zeros(5, np.uint8), np.zeros(LARGE, np.uint8)
        dist.recv(small, 0, tag=9)
        assert (small == 7).all()
        for tag in (2, 0, 1):
            dist.recv(x, 0, tag=tag)
            assert (x == bytes_of(LARGE, tag)).all()


def posted_while_arriving() -> None:
    """A receive is posted while its message is arriving."""
    exchange(LARGE)
    if me() == 0:
        dist.barrier()
        dist.send(bytes_of(8 * LARGE, 5), 1, tag=5)
    else:
        idle = must(dist.irecv(np.zeros(1, np.uint8), 0, tag=6))  # so that the progress thread receives
        dist.barrier()
        deadline = time.monotonic() + 60
        while engine()._connections[0].receiver.message is None and time.monotonic() < deadline:
            time.sleep(0)
        x = np.zeros(8 * LARGE, np.uint8)
        dist.recv(x, 0, tag=5)
        assert (x == bytes_of(8 * LARGE, 5)).all()
    if me() == 0:
        dist.send(np.ones(1, np.uint8), 1, tag=6)
    else:
        idle.wait()


def from_any_source(each: int, count: int) -> list[int]:
    """Rank 0 receives large messages from any source; returns their sources."""
    sources = []
    if me() == 0:
        x = np.zeros(count, np.uint8)
        for _ in range(each * (size() - 1)):
            source = dist.recv(x)
            assert (x == source).all()
            sources.append(source)
    else:
        for _ in range(each):
            dist.send(np.full(count, me(), np.uint8), 0)
    return sources


def from_full_rings(each: int) -> list[int]:
    """Rank 0 receives from any source what is in the rings of the others already; returns the sources."""
    array = np.zeros(100_000, np.uint8)
    for peer in range(1, size()):
        for _ in range(2):  # the second time the ring of the first is used
            if me() == 0:
                dist.recv(array, peer)
                dist.send(array, peer)
            elif me() == peer:
                dist.send(array, 0)
                dist.recv(array, 0)
    dist.barrier()
    for i in range(each if me() else 0):
        dist.send(np.array([me(), i]), 0)
    dist.barrier()
    found = np.zeros(2, np.int64)
    return [dist.recv(found) for _ in range(each * (size() - 1))] if me() == 0 else []


def all_pairs_at_once(count: int, rounds: int) -> None:
    """All pairs in both directions, by blocking calls in threads and asynchronous operations."""
    others = [r for r in range(size()) if r != me()]
    for i in range(rounds):
        arrays = {r: np.zeros(count + 13 * r, np.uint8) for r in others}
        works = [must(dist.irecv(array, r, tag=i)) for r, array in arrays.items()]
        threads = [
            threading.Thread(target=dist.send, args=(bytes_of(count + 13 * me(), me()), r), kwargs={"tag": i})
            for r in others
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for work in works:
            work.wait()
        for r, array in arrays.items():
            assert (array == bytes_of(count + 13 * r, r)).all()


def mismatched_messages() -> list[Failure | None]:
    """Large messages of another size or type than their receives, posted before and after the messages arrive."""
    exchange(LARGE)
    failures = []
    inputs: tuple[Any, ...] = (np.ones(LARGE, np.uint8), np.ones(10, np.uint8), np.ones(LARGE, np.int8))
    arrays = (np.zeros(LARGE + 1, np.uint8), np.zeros(LARGE, np.uint8), np.zeros(LARGE, np.uint8))
    for before in (False, True):
        for x, array in zip(inputs, arrays, strict=True):
            if me() == 0:
                work = must(dist.isend(x, 1, tag=1))
                dist.barrier()
                work.wait()
            elif before:
                work = must(dist.irecv(array, 0, tag=1))
                dist.barrier()
                failures.append(failure_of(work.wait))
            else:
                dist.barrier()
                failures.append(failure_of(lambda r=array: dist.recv(r, 0, tag=1)))  # type: ignore[misc]
            assert not array.any()
            exchange(LARGE, 3)
    return failures


def in_a_callback() -> list[int]:
    """A callback of an asynchronous receive sends and receives with blocking calls."""
    answers: list[int] = []
    if me() == 0:
        dist.send(np.full(1, 4), 1)
        x = np.zeros(LARGE, np.uint8)
        dist.recv(x, 1, tag=1)
        dist.send(np.full(2, int(x[0])), 1, tag=2)
        dist.barrier()
        return answers
    x = np.zeros(1, np.int64)
    work = must(dist.irecv(x, 0))
    over = threading.Event()

    def answer(_: Any) -> None:
        dist.send(np.full(LARGE, int(x[0]) + 1, np.uint8), 0, tag=1)
        y = np.zeros(2, np.int64)
        dist.recv(y, 0, tag=2)
        answers.append(int(y[1]))
        over.set()

    work.get_future().add_done_callback(answer)
    assert over.wait(30)
    dist.barrier()
    return answers


def ended_by_a_receive() -> None:
    """A receive takes its messages from the ring, and thereby sees room for the rest of a send in the background."""
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
        progress.release()
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
    assert ended, "the receives did not report the end of the send"
    del progress.wake_thread


def notices_after_the_peers_end() -> list[bool]:
    """Rank 1 leaves a group, then rank 0 sends it two notices; for each, True if rank 0 still counts it as unsent.

    The peer resets the connection because of the first one, so the second one cannot be sent.
    """
    group = must(dist.new_group([0, 1]))
    create_rings(group)
    if me() == 1:
        dist.destroy_process_group(group)
    dist.barrier()
    if me() == 1:
        return []
    (connection,) = (c for c in engine(group)._connections if c is not None)
    found = []
    for _ in range(2):
        with engine(group).lock:
            connection.sender.notify()
        deadline = time.monotonic() + 10
        while (unsent := connection.has_unsent) and time.monotonic() < deadline:
            time.sleep(0.01)
        found.append(unsent)
    dist.destroy_process_group(group)
    return found


# --- where memory cannot be shared ------------------------------------------------------------------------------


def without(what: str, rank: int) -> tuple[list[tuple[bool, bool]], list[str]]:
    """Large messages while one rank cannot map, or cannot create, shared memory; returns rings and log messages."""
    from gloo_fallback.shm import ring_buffer

    def refuse(*_: object) -> Any:
        raise (
            PermissionError(13, "Permission denied")
            if what == "open_offer"
            else OSError(24, "Too many open files")
        )

    dist.barrier()  # the transport of the collectives is logged, too
    if me() == rank:
        setattr(ring_buffer, what, refuse)
    with Log() as log:
        for i in range(3):
            exchange(LARGE, i)
        dist.barrier()
    return rings(), log.lines


def tcp_on_one_rank(rank: int) -> tuple[list[tuple[bool, bool]], list[str]]:
    """As :func:`without`; one rank of a group uses sockets only."""
    if me() == rank:
        os.environ["UNICOLL_TRANSPORT"] = "tcp"
    group = dist.new_group()
    os.environ.pop("UNICOLL_TRANSPORT", None)
    dist.barrier()  # the transport of the collectives is logged, too
    with Log() as log:
        for i in range(3):
            exchange(LARGE, i, group)
        dist.barrier()
    used = rings(group)
    dist.barrier()
    dist.destroy_process_group(group)
    return used, log.lines


# --- memory -------------------------------------------------------------------------------------------------


def segment_lines() -> list[str]:
    """The lines of this library's segments in the table of mappings of this process."""
    with open("/proc/self/maps") as file:
        return [line for line in file if "memfd:unicoll" in line]


def memory_in_use() -> tuple[list[str], int, int]:
    """Open descriptors of shared memory, and its bytes after a first large message and after a larger one."""

    def mapped() -> int:
        ends = [[int(x, 16) for x in line.split()[0].split("-")] for line in segment_lines()]
        return sum(b - a for a, b in ends)

    for i in range(2):
        exchange(CHUNK, i)
    before = mapped()
    exchange(20 * LARGE)
    targets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return [target for target in targets if "memfd" in target], before, mapped()


def inodes() -> list[str]:
    """The inodes of the segments that this process has mapped while rings are in use."""
    for i in range(2):
        exchange(LARGE, i)
    return sorted({line.split()[4] for line in segment_lines()})


def groups_come_and_go(rounds: int) -> int:
    """Create and destroy groups with rings; returns the number of remaining mappings."""
    for i in range(rounds):
        group = dist.new_group()
        exchange(LARGE, i, group)
        exchange(LARGE, i, group)
        assert all(rings(group)[0])
        dist.barrier(group=group)
        dist.destroy_process_group(group)
    return len(segment_lines())


# --- faults -------------------------------------------------------------------------------------------------------


def stream(sender: int) -> None:
    """One rank sends large messages to the other until an operation fails."""
    exchange(LARGE)
    x = np.zeros(32 << 20, np.uint8)
    for i in range(1_000_000):
        if me() == sender:
            dist.send(x, 1 - sender)
        else:
            dist.recv(x, sender)
        if i == 2:
            send_note("streaming")


def create_rings(group: Any = None) -> None:
    """Create rings and wait until no thread of a rank runs progress."""
    exchange(LARGE, group=group)
    exchange(LARGE, group=group)
    dist.barrier(group)
    await_true(lambda: not engine(group)._progress.active)
    dist.barrier(group)


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


def stops_receiving(timeout: float) -> CallOutcome:
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


def stops_sending(timeout: float) -> CallOutcome:
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


def timed_out_in_the_queue() -> list[Failure | None]:
    """A send that times out on a full ring before any part has left does not affect later messages."""
    create_rings()
    failures: list[Failure | None] = []
    x = np.zeros(CHUNK, np.uint8)  # fits one chunk
    if me() == 0:
        sent, writer = 0, engine()._connections[1].sender.writer
        while writer.has_space(CHUNK, False):
            x[:] = sent % 251
            dist.send(x, 1)
            sent += 1
        assert 0 < sent <= RING // CHUNK
        failures.append(failure_of(lambda: dist.send(x, 1, timeout=0.3)))
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
    return failures


def send_after_a_cut_one() -> list[Failure | None]:
    """A send times out within its message; the next one waits until rank 1 notices that the connection has ended."""
    create_rings()
    x = np.zeros(3)
    if me() == 0:
        cut = failure_of(
            lambda: dist.send(np.zeros(LARGE, np.uint8), 1, timeout=0.5)
        )  # begins before the deadline
        dist.barrier()
        dist.send(np.full(3, 7.0), 1)
    else:
        dist.barrier()
        time.sleep(0.5)  # rank 0's new connection is refused meanwhile
        cut = failure_of(lambda: dist.recv(np.zeros(LARGE, np.uint8), 0))
        dist.recv(x, 0)
        assert (x == 7).all()
    exchange(LARGE)
    return [cut]


def messages_before_leaving(count: int) -> list[int]:
    """Rank 0 sends large and small messages and leaves; rank 1 receives them afterwards."""
    create_rings()
    parts = RING // CHUNK - 1
    if me() == 0:
        for i in range(parts):
            dist.send(np.full(CHUNK, i, np.uint8), 1)
        for i in range(count):
            dist.send(np.full(5000, i % 251, np.uint8), 1, tag=1)
        dist.destroy_process_group()
        send_note("left")
        return []
    send_note("waits")
    time.sleep(1.0)
    x, y = np.zeros(CHUNK, np.uint8), np.zeros(5000, np.uint8)
    for i in range(parts):
        dist.recv(x, 0)
        assert (x == i).all()
    taken = []
    for i in range(count):
        dist.recv(y, 0, tag=1)
        assert (y == i % 251).all()
        taken.append(i)
    return taken


def leaves_without_a_ring(count: int) -> int:
    """Rank 0 has no ring to send in; it leaves while notices of the other direction are unread."""
    from gloo_fallback.shm import ring_buffer

    def refuse(*_: object) -> Any:
        raise OSError(24, "Too many open files")

    x = np.zeros(5000, np.uint8)
    if me() == 0:
        ring_buffer.create_offer = refuse
    create_rings()
    assert rings() == [(me() == 1, me() == 0)]
    if me() == 1:
        works = [must(dist.isend(np.zeros(CHUNK, np.uint8), 0, tag=2)) for _ in range(2)]
        dist.barrier()
        send_note("waits")
        time.sleep(1.0)
        for i in range(count):
            dist.recv(x, 0)
            assert (x == i % 251).all()
        for work in works:
            work.wait()
        return count
    dist.barrier()
    for i in range(count):
        dist.send(np.full(5000, i % 251, np.uint8), 1)
    dist.destroy_process_group()
    send_note("left")
    return 0


def aborted_while_the_socket_is_full() -> Failure | None:
    """Rank 0 has no ring to send in; another thread aborts the group while a send waits for space in the socket."""
    from gloo_fallback.shm import ring_buffer

    def refuse(*_: object) -> Any:
        raise OSError(24, "Too many open files")

    if me() == 0:
        ring_buffer.create_offer = refuse
    group = must(dist.new_group())
    create_rings(group)
    assert rings(group) == [(me() == 1, me() == 0)]
    if me() == 1:
        dist.barrier()
        return None
    messages = engine(group)
    connection, find = messages._connections[1], messages.connection_to

    def find_before_the_abort(peer: int) -> Any:
        """Another thread aborts the group when the waiting thread has found the connection."""
        found = find(peer)
        if found is not None:
            assert found.sender.blocked
            error = dist.GroupAbortedError("aborted while rank 1 receives nothing", rank=1)
            aborting = threading.Thread(target=messages.abort, args=(error,))
            aborting.start()
            aborting.join()
            assert connection.closed
            assert connection.sock.fileno() < 0
        return found

    messages.connection_to = find_before_the_abort
    failure = failure_of(lambda: dist.send(np.zeros(64 << 20, np.uint8), 1, group=group, timeout=60.0))
    dist.barrier()
    return failure


def queued_behind_a_longer_timeout() -> tuple[Failure | None, float]:
    """Rank 1 is stopped, and rank 0 sends to it, for the first time, with a long and then with a short timeout."""
    dist.barrier()
    if me() == 1:
        send_note("idle")
        time.sleep(60)
    send_note("sends")
    time.sleep(0.5)
    first = must(dist.isend(np.zeros(4), 1, timeout=8.0))
    start = time.monotonic()
    failure = failure_of(lambda: dist.send(np.zeros(4), 1, timeout=1.0))
    seconds = time.monotonic() - start
    assert failure_of(first.wait) is not None
    return failure, seconds


def receives_while_connecting() -> tuple[bool, Failure | None]:
    """Rank 1 is stopped; rank 0 sends to it for the first time and receives from rank 2, waiting for neither."""
    dist.barrier()
    send_note("ready")
    if me() == 1:
        time.sleep(60)
    time.sleep(0.5)
    if me() == 2:
        time.sleep(0.5)
        dist.send(np.ones(4), 0)
        return True, None
    first = must(dist.isend(np.zeros(4), 1, timeout=10.0))
    work, received = must(dist.irecv(np.zeros(4), 2)), threading.Event()
    work.get_future().add_done_callback(lambda _: received.set())
    in_time = received.wait(30) and not first.is_completed()
    work.wait()
    return in_time, failure_of(first.wait)


def interrupted_send() -> Failure | None:
    """Ctrl-C during a large send of rank 0, which has a receive from the same rank in the background."""
    create_rings()
    if me() == 1:
        time.sleep(2.0)
        dist.barrier()
        return None
    work, ended = must(dist.irecv(np.zeros(4), 1, tag=1)), threading.Event()
    work.get_future().add_done_callback(lambda _: ended.set())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    engine()._progress.wake_thread = lambda: None  # as if its thread looked after the connection was closed
    try:
        dist.send(np.zeros(LARGE, np.uint8), 1)
    except KeyboardInterrupt:
        assert ended.wait(20)
    finally:
        signal.signal(signal.SIGINT, before)
        timer.join()
        del engine()._progress.wake_thread
        dist.barrier()
    return failure_of(work.wait)
