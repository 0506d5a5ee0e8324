"""What ranks do in the tests of point-to-point messages."""

from __future__ import annotations

import random
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from operator import itemgetter
from typing import Any

import numpy as np

import unicoll as dist
from tests.support.outcomes import failure_of
from tests.support.worker import Failure
from unicoll.arrays.types import DTYPES
from unicoll.backend.host import op_queue
from unicoll.testing import reference


def me() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def must(work: Any) -> Any:
    """The Work of a call on a group that this process is in."""
    assert work is not None
    return work


def every_type() -> None:
    """Each element type and several shapes, in order, to the next rank."""
    right, left = (me() + 1) % size(), (me() - 1) % size()
    for d in DTYPES:
        dtype = reference.numpy_dtype(d.name)
        if dtype is None:
            continue
        for shape in ((), (0,), (1,), (3, 5), (40_000,)):
            rngs = [np.random.default_rng([d.code, len(shape), r]) for r in range(size())]
            given = [reference.values(d.name, None, shape, rng, False) for rng in rngs]
            room = np.zeros(shape, dtype)
            work = must(dist.isend(given[me()], right))
            assert dist.recv(room, left) == left
            work.wait()
            assert reference.complaint(d.name, None, [given[left].reshape(-1)], room) is None


def _injected(*args: Any, **more: Any) -> Any:
    raise OSError("injected")


def _failures(*calls: Any) -> list[Failure | None]:
    return [failure_of(call) for call in calls]


def message_thread_dies(where: str) -> list[Failure | None]:
    """The message thread of rank 0 raises: the outcomes of two pending receives and of a later call."""
    other = 1 - me()
    group = dist.group.WORLD
    assert group is not None
    dist.barrier()
    x = np.zeros(3)
    first, second = must(dist.irecv(x, other, tag=1)), must(dist.irecv(x, other, tag=2))
    dist.barrier()  # both ranks have posted their receives
    if me() == 0:
        engine: Any = group._backends.for_device("cpu")._p2p  # type: ignore[attr-defined]
        if where == "serve":
            engine._progress._progress_once = _injected
        else:
            engine.connect_pending = _injected
            with suppress(dist.DistError):  # the thread may end before the message is posted
                dist.isend(x, other)
    waiting = [threading.Event(), threading.Event()]
    first.add_done_callback(waiting[0].set)
    second.add_done_callback(waiting[1].set)
    assert all(event.wait(30) for event in waiting)
    return _failures(first.wait, second.wait, lambda: dist.barrier())


def queue_thread_dies(waiting: bool) -> list[Failure | None]:
    """The thread that executes rank 0's asynchronous collectives raises: the outcomes of the operations.

    With ``waiting`` the queue's thread does not look at the queue, so that it is the thread that waits.
    """
    group = dist.group.WORLD
    assert group is not None
    dist.barrier()
    if me() == 0:
        op_queue._attempt = _injected  # type: ignore[assignment]
        if waiting:
            op_queue.OpQueue._wake_thread = lambda self: None  # type: ignore[method-assign]
    x = np.ones(3)
    works = [must(dist.all_reduce(x, async_op=True)) for _ in range(2)]
    if not waiting:
        for work in works:
            work.add_done_callback(int)  # a waiting thread leaves it to the queue's thread
    return _failures(*(work.wait for work in works), lambda: dist.barrier())


def failing_callbacks() -> list[float]:
    """Callbacks that raise, of a collective and of a message."""

    def fail() -> None:
        raise ValueError("of the user's")

    x, y = np.ones(1), np.full(1, float(me()))
    work = must(dist.all_reduce(x, async_op=True))
    work.add_done_callback(fail)
    work.wait()
    received = np.zeros(1)
    ops = [dist.P2POp(dist.isend, y, 1 - me()), dist.P2POp(dist.irecv, received, 1 - me())]
    works = dist.batch_isend_irecv(ops)
    works[-1].add_done_callback(fail)
    for work in works:
        work.wait()
    dist.barrier()
    return [float(x[0]), float(received[0])]


def strided() -> None:
    """From every second element into a transposed array."""
    if me() == 0:
        dist.send(np.arange(24.0)[::2].reshape(3, 4), 1)
        dist.send(np.arange(12.0).reshape(4, 3).T, 1)
    elif me() == 1:
        base = np.full((4, 3), -1.0)
        dist.recv(base.T, 0)
        assert np.array_equal(base.T, np.arange(24.0)[::2].reshape(3, 4))
        wide = np.full(24, -1.0)
        dist.irecv(wide[::2], 0).wait()  # type: ignore[union-attr]
        assert (wide[::2] == np.arange(12.0).reshape(4, 3).T.reshape(-1)).all()
        assert (wide[1::2] == -1).all()


def tags_out_of_order(count: int) -> list[int]:
    """Rank 0 sends tags 0..9 twice; rank 1 receives them in descending order: messages of one tag stay in order."""
    taken = []
    if me() == 0:
        works = [
            must(dist.isend(np.full(count, 100 * k + tag), 1, tag=tag)) for k in (0, 1) for tag in range(10)
        ]
        for w in works:
            w.wait()
    else:
        x = np.zeros(count, np.int64)
        for tag in reversed(range(10)):
            for _ in (0, 1):
                dist.recv(x, 0, tag=tag)
                assert (x == x[0]).all()
                taken.append(int(x[0]))
    return taken


def posted_before_sent(count: int) -> None:
    """Receives posted before the messages are sent, with tags in another order."""
    if me() == 0:
        dist.barrier()
        for tag in (2, -7, 1 << 40):
            dist.send(np.full(count, tag), 1, tag=tag)
    else:
        rooms = {tag: np.zeros(count, np.int64) for tag in (1 << 40, 2, -7)}
        works = [must(dist.irecv(room, 0, tag=tag)) for tag, room in rooms.items()]
        dist.barrier()
        for w in works:
            w.wait()
            assert w.source_rank() == 0
        for tag, room in rooms.items():
            assert (room == tag).all()


def first_sends_keep_their_order(groups: int) -> list[list[float]]:
    """Sends in the background, then a blocking one, before there is a connection."""
    seen = []
    for _ in range(groups):
        pg = dist.new_group()
        if me() == 0:
            works = [must(dist.isend(np.array([float(i)]), 1, group=pg)) for i in range(3)]
            dist.send(np.array([3.0]), 1, group=pg)
            works.append(must(dist.isend(np.array([4.0]), 1, group=pg)))
            for work in works:
                work.wait()
        else:
            x = np.zeros(1)
            taken = []
            for _ in range(5):
                dist.recv(x, 0, group=pg)
                taken.append(float(x[0]))
            seen.append(taken)
        dist.barrier(group=pg)
        dist.destroy_process_group(pg)
    return seen


def from_any_source(each: int, background: bool) -> list[int]:
    """Rank 0 receives from any source; returns the sources in order."""
    sources = []
    if me() == 0:
        for _ in range(each * (size() - 1)):
            x = np.zeros(2, np.int64)
            if background:
                work = must(dist.irecv(x))
                work.wait()
                source = work.source_rank()
            else:
                source = dist.recv(x)
            assert x[0] == source
            sources.append(source)
    else:
        for i in range(each):
            dist.send(np.array([me(), i]), 0)
    return sources


def farm(tasks: int) -> None:
    """Rank 0 gives tasks to the other ranks, three to each at first, and receives results from any source.

    A result, the square of the task, is two messages in succession.
    """
    stop = -1
    task, head, result = (np.zeros(1, np.int64) for _ in range(3))
    if me():
        while dist.recv(task, 0) == 0 and task[0] != stop:
            dist.send(task, 0)
            dist.send(task**2, 0)
        return
    results, given = [0] * tasks, 0
    for worker in 3 * [*range(1, size())]:
        dist.send(np.array([given]), worker)
        given += 1
    for _ in range(tasks):
        worker = dist.recv(head)
        dist.recv(result, worker)
        results[head[0]] = int(result[0])
        if given < tasks:
            dist.send(np.array([given]), worker)
        given += 1
    for worker in range(1, size()):
        dist.send(np.array([stop]), worker)
    assert results == [i**2 for i in range(tasks)]


_FROM_ANY = 3


def random_messages(seed: str, count: int) -> None:
    """Messages of random pairs, tags and sizes in the background; those of one tag are received from any source."""
    drawn = random.Random(seed)
    sends, queues, taken = [], defaultdict(list), defaultdict(list)
    for i in range(count):
        (source, dest), tag = drawn.sample(range(size()), 2), drawn.choice((0, 0, -7, 1 << 40, _FROM_ANY))
        length = 520 if tag == _FROM_ANY else drawn.choice((1, 7, 500, 520, 3000, 40_000))
        if source == me():
            sends.append((i, dest, tag, length))
        elif dest == me():
            queues[None if tag == _FROM_ANY else source, tag].append((i, source, length))
    own = random.Random(f"{seed} {me()}")
    keys: list[Any] = [key for key, queue in queues.items() for _ in queue] + [None] * len(sends)
    works, positions = [], defaultdict(int)
    for key in own.sample(keys, len(keys)):
        if key is None:
            i, dest, tag, length = sends.pop(0)
            works.append((None, must(dist.isend(np.full(length, i), dest, tag=tag)), None))
        else:
            room = np.full(queues[key][positions[key]][2], -1)
            positions[key] += 1
            works.append((key, must(dist.irecv(room, key[0], tag=key[1])), room))
    for _, work, _ in own.sample(works, len(works)):
        work.wait()
    for key, work, room in works:
        if key is not None:
            assert (room == room[0]).all()
            taken[key].append((int(room[0]), work.source_rank(), room.size))
    for key, queue in queues.items():
        if key[0] is not None:
            assert taken[key] == queue
        else:  # in the order of each source
            assert sorted(taken[key], key=itemgetter(1)) == sorted(queue, key=itemgetter(1))


def both_send_first(megabytes: int) -> None:
    """Both ranks send more than the buffers hold before either receives."""
    count, other = megabytes << 20, 1 - me()
    given, room = np.full(count, me() + 1, np.uint8), np.zeros(count, np.uint8)
    work = must(dist.isend(given, other))
    dist.recv(room, other)
    work.wait()
    assert (room == other + 1).all()
    # blocking sends from threads of their own, on both sides
    sender = threading.Thread(target=dist.send, args=(given, other))
    sender.start()
    room[:] = 0
    dist.recv(room, other)
    sender.join()
    assert (room == other + 1).all()


def unexpected(count: int) -> None:
    """Many large messages arrive before their receives are posted, while collectives run."""
    if me() == 0:
        works = [must(dist.isend(np.full(count, i, np.int32), 1, tag=i)) for i in range(8)]
        dist.barrier()
        x = np.ones(1000)
        dist.all_reduce(x)
        for w in works:
            w.wait()
    else:
        dist.barrier()
        x = np.ones(1000)
        dist.all_reduce(x)
        y = np.zeros(count, np.int32)
        for i in reversed(range(8)):
            dist.recv(y, 0, tag=i)
            assert (y == i).all()


def many_threads(threads: int, rounds: int) -> list[str]:
    """Several threads of both ranks exchange on one group, each with its own tag; returns the errors."""
    other = 1 - me()

    def talk(tag: int) -> None:
        for i in range(rounds):
            count = (tag * 977 + i * 131) % 30_000
            given, room = np.full(count, tag * 1000 + i), np.zeros(count, np.int64)
            if (tag + i + me()) % 2:
                dist.send(given, other, tag=tag)
                dist.recv(room, other, tag=tag)
            else:
                work = must(dist.irecv(room, other, tag=tag))
                must(dist.isend(given, other, tag=tag)).wait()
                work.wait()
            assert (room == tag * 1000 + i).all(), f"round {i}"

    return _in_threads(threads, talk)


def _in_threads(count: int, talk: Callable[[int], None]) -> list[str]:
    """Call ``talk`` with each number below ``count``, each in a thread; returns the errors."""
    wrong: list[str] = []

    def run(thread: int) -> None:
        try:
            talk(thread)
        except Exception as e:
            wrong.append(f"thread {thread}: {e!r}")

    them = [threading.Thread(target=run, args=(thread,)) for thread in range(count)]
    for t in them:
        t.start()
    for t in them:
        t.join()
    return wrong


def batches(count: int) -> None:
    """Messages between all pairs of ranks in one batch, twice, in both orders."""
    for round_ in (0, 1):
        peers = [r for r in range(size()) if r != me()]
        rooms = {r: np.zeros(count + r, np.float32) for r in peers}
        ops = [
            dist.P2POp(dist.isend, np.full(count + me(), me() + 1, np.float32), r, tag=round_) for r in peers
        ]
        takes = [dist.P2POp(dist.irecv, room, group_peer=r, tag=round_) for r, room in rooms.items()]
        works = dist.batch_isend_irecv([*ops, *takes] if (me() + round_) % 2 else [*takes, *ops])
        for w in works:
            w.wait()
        for r, room in rooms.items():
            assert (room == r + 1).all()
    assert dist.batch_isend_irecv([]) == []


def mismatched_receives() -> list[Failure | None]:
    """Messages of another size or type than the arrays of their receives; the group stays usable."""
    failures: list[Failure | None] = []
    sent = [np.ones(4, np.float32), np.ones(3, np.float32), np.ones(4, np.int32), np.ones(0, np.float32)]
    for before in (False, True):
        for x in sent:
            if me() == 0:
                if before:
                    dist.send(x, 1)
                dist.barrier()
                if not before:
                    dist.send(x, 1)
            else:
                room = np.zeros(4 if x.size != 4 or x.dtype != np.float32 else 5, np.float32)
                if before:
                    dist.barrier()
                    failures.append(failure_of(lambda r=room: dist.recv(r, 0)))  # type: ignore[misc]
                else:
                    work = must(dist.irecv(room, 0))
                    dist.barrier()
                    failures.append(failure_of(work.wait))
                assert not room.any(), "a message that does not fit was written all the same"
            y = np.ones(3)
            dist.all_reduce(y)
            assert (y == 2).all()
            if me() == 0:
                dist.send(np.full(2, 5.0), 1, tag=9)
            else:
                z = np.zeros(2)
                dist.recv(z, 0, tag=9)
                assert (z == 5).all()
    return failures


def timed_out_receives() -> list[Failure | None]:
    """A receive without a message times out; the next one gets the message that arrives later."""
    x = np.zeros(3)
    if me() == 1:
        failures = [
            failure_of(lambda: dist.recv(x, 0, timeout=0.3)),
            failure_of(lambda: dist.recv(x, timeout=0.3)),
        ]
        failures.append(failure_of(must(dist.irecv(x, 0, timeout=0.3)).wait))
        y = np.zeros(3)
        work = must(dist.irecv(y, 0, tag=1))
        early = failure_of(lambda: work.wait(timeout=0.05))
        assert early is not None
        assert early.message.startswith("recv(float64[3], peer=0, tag=1) was not done after waiting 0.05 s")
        dist.barrier()
        dist.recv(x, 0)
        assert (x == 7).all()
        work.wait()
        assert (y == 8).all()
        return failures
    dist.barrier()
    dist.send(np.full(3, 7.0), 1)
    dist.send(np.full(3, 8.0), 1, tag=1)
    return []


class Alarm(Exception):
    """Raised by the signal handler of :func:`interrupted_receives`."""


def interrupted_receives(count: int) -> None:
    """A receive that an exception has ended consumes no message; the next one gets the message that arrives later."""

    def ring(*_: object) -> None:
        raise Alarm

    x = np.zeros(count)
    if me() == 1:
        before = signal.signal(signal.SIGALRM, ring)
        for src in (0, None):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                dist.recv(np.zeros(count), src)
            except Alarm:
                continue
            raise AssertionError("nothing has interrupted the receive")
        signal.signal(signal.SIGALRM, before)
        dist.barrier()
        dist.recv(x, 0)
        assert (x == 7).all()
    else:
        dist.barrier()
        dist.send(np.full(count, 7.0), 1)


class Custom:
    """An object that only pickle can send."""

    def __init__(self, value: int) -> None:
        self.value = value


def objects(use_batch: bool) -> None:
    """Lists of objects, plain and not, between ranks and from any source."""
    given = [None, True, 3, 2.5, "text", b"bytes", {"a": [1, (2,)]}, np.arange(5), Custom(4)]
    if me() == 0:
        dist.send_object_list(given, 1, use_batch=use_batch)
        dist.send_object_list(["again"], 1)
    elif me() == 1:
        room: list[Any] = [None] * len(given)
        assert dist.recv_object_list(room, 0, use_batch=use_batch) == 0
        assert room[:7] == given[:7]
        assert (room[7] == np.arange(5)).all()
        assert room[8].value == 4
        last = [None]
        assert dist.recv_object_list(last) == 0
        assert last == ["again"]


def objects_in_threads(threads: int, rounds: int, tagged: bool) -> None:
    """Threads of all other ranks send objects to threads of rank 0, which receive them from any rank.

    Args:
        tagged: each thread has its own tag; otherwise a thread receives what any has sent.
    """

    def obj(rank: int, thread: int, k: int) -> list[Any]:
        return [rank, thread, k, bytes([rank, thread, k]) * (20_000 if (thread + k) % 3 else 1)]

    found: list[list[Any]] = []

    def talk(thread: int) -> None:
        for k in range(rounds if me() else rounds * (size() - 1)):
            tag = thread if tagged else 0
            if me():
                dist.send_object_list(obj(me(), thread, k), 0, tag=tag)
            else:
                room: list[Any] = [None] * 4
                sender = dist.recv_object_list(room, tag=tag)
                found.append([sender, thread if tagged else room[1], *room])

    wrong = _in_threads(threads, talk)
    assert not wrong, wrong
    if me() == 0:
        sent = [obj(r, t, k) for r in range(1, size()) for t in range(threads) for k in range(rounds)]
        assert sorted(found) == [[*each[:2], *each] for each in sent]


def in_a_subgroup() -> None:
    """Global and group ranks differ; messages of different groups do not mix."""
    n = size()
    group = dist.new_group(list(reversed(range(n))), sort_ranks=False)
    mine = group.rank()
    assert mine == n - 1 - me()
    x = np.zeros(1, np.int64)
    works = [
        must(dist.isend(np.array([100 + me()]), (me() + 1) % n, group=group)),
        must(dist.isend(np.array([200 + me()]), (me() + 1) % n)),
    ]
    left = (me() - 1) % n
    assert dist.recv(x, left) == left
    assert x[0] == 200 + left
    assert dist.recv(x, group=group, group_src=group.group_rank(left)) == left
    assert x[0] == 100 + left
    for w in works:
        w.wait()
    if mine == 0:
        group.send(np.array([5]), 1)
    elif mine == 1:
        assert group.recv(x) == 0
        assert x[0] == 5
    dist.destroy_process_group(group)


def while_collectives_run(rounds: int) -> None:
    """Messages between two ranks from a second thread, while the first does collectives."""
    partner = me() ^ 1
    problems: list[BaseException] = []

    def talk() -> None:
        try:
            for i in range(rounds):
                x = np.zeros(500)
                work = must(dist.isend(np.full(500, float(i)), partner))
                dist.recv(x, partner)
                assert (x == i).all()
                work.wait()
        except BaseException as e:
            problems.append(e)

    thread = threading.Thread(target=talk)
    if partner < size():
        thread.start()
    for i in range(rounds):
        y = np.full(300 if i % 3 else 60_000, 1.0)
        dist.all_reduce(y)
        assert (y == size()).all()
    if partner < size():
        thread.join()
    assert not problems, problems
