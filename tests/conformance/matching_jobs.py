"""Functions that ranks run: any tag, shorter messages, probes, messages to oneself and to nobody, waitany."""

from __future__ import annotations

from typing import Any

import numpy as np

import unicoll as dist
from tests.conformance.p2p_jobs import me, must, size
from tests.support.outcomes import Failure, failure_of

TAGS = (7, -3, 1 << 40)


def statuses(count: int) -> None:
    """Rank 0 sends messages of several lengths; rank 1 receives them with any tag, posted first and sent first."""
    lengths = (count, count // 2, 0)
    for posted_first in (False, True):
        if me() == 0:
            if posted_first:
                dist.barrier()
            works = [
                must(dist.isend(np.arange(n, dtype=np.float64), 1, tag=tag))
                for n, tag in zip(lengths, TAGS, strict=True)
            ]
            if not posted_first:
                dist.barrier()
            for work in works:
                work.wait()
            continue
        arrays = [np.full(count + 3, -1.0) for _ in TAGS]
        found = [dist.Status() for _ in TAGS]
        if posted_first:
            works = [
                must(dist.irecv(x, source, tag=None, status=status))
                for x, status, source in zip(arrays, found, (0, None, 0), strict=True)
            ]
            assert [(s.source, s.tag, s.count) for s in found] == [(-1, -1, 0)] * 3
            dist.barrier()
            for work in works:
                work.wait()
            assert [work.source_rank() for work in works] == [0] * 3
        else:
            dist.barrier()
            for x, status in zip(arrays, found, strict=True):
                assert dist.recv(x, tag=None, status=status) == 0
        assert [(s.source, s.group_source, s.tag, s.count, s.nbytes) for s in found] == [
            (0, 0, tag, n, 8 * n) for tag, n in zip(TAGS, lengths, strict=True)
        ]
        for x, n in zip(arrays, lengths, strict=True):
            assert (x[:n] == np.arange(n)).all()
            assert (x[n:] == -1).all()


def shorter_in_strided() -> None:
    """A message that is shorter than an array which is not contiguous: its first elements in C order."""
    if me() == 0:
        dist.send(np.arange(5), 1)
        return
    x = np.full((4, 6), -1)
    dist.recv(x[:, ::2], 0, status=(status := dist.Status()))
    assert status.count == 5
    assert x[:2, ::2].tolist() == [[0, 1, 2], [3, 4, -1]]
    assert (x[2:] == -1).all()
    assert (x[:, 1::2] == -1).all()


def too_long(count: int) -> list[Failure | None]:
    """Messages that are longer than the array, or of another type, of receives with a Status."""
    if me() == 0:
        dist.send(np.ones(count), 1)
        dist.send(np.ones(count - 1, np.float32), 1)
        dist.send(np.ones(1), 1)
        return []
    x, status = np.zeros(count - 1), dist.Status()
    failures = [failure_of(lambda: dist.recv(x, 0, status=status)) for _ in range(2)]
    assert not x.any()
    dist.recv(x, 0, status=status)
    assert status.count == 1
    return failures


def probes(count: int) -> None:
    """Rank 0 probes for messages of the others, and receives each into an array of its size."""
    if me() != 0:
        for i in range(3):
            dist.send(np.full(count + 10 * me() + i, me(), np.int32), 0, tag=i)
        dist.barrier()
        return
    seen = []
    for _ in range(3 * (size() - 1)):
        status = dist.probe()
        again = dist.probe(status.source, tag=status.tag)
        assert (again.source, again.tag, again.count) == (status.source, status.tag, status.count)
        x = np.empty(status.count, np.int32)
        assert dist.recv(x, status.source, tag=status.tag) == status.source
        assert status.count == count + 10 * status.source + status.tag
        assert (x == status.source).all()
        seen.append((status.source, status.tag))
    for source in range(1, size()):
        assert [tag for rank, tag in seen if rank == source] == [0, 1, 2]
    assert dist.iprobe() is None
    assert failure_of(lambda: dist.probe(1, timeout=0.2)).type == "OperationTimeoutError"  # type: ignore[union-attr]
    dist.barrier()


def polled(count: int) -> None:
    """A rank polls with iprobe until a message comes; a message with another tag does not count."""
    if me() == 0:
        assert dist.iprobe(1) is None
        dist.barrier()
        while (status := dist.iprobe(1, tag=2)) is None:
            pass
        assert (status.source, status.tag, status.count) == (1, 2, count)
        dist.recv(np.empty(count), 1, tag=2)
        dist.recv(np.empty(count), 1, tag=1)
        assert dist.iprobe() is None
    elif me() == 1:
        dist.barrier()
        works = [must(dist.isend(np.ones(count), 0, tag=tag)) for tag in (1, 2)]
        for work in works:
            work.wait()
    else:
        dist.barrier()


def to_self(count: int) -> None:
    """Messages to the rank itself: sent first, posted first, found by probes and among those of any source."""
    own = me()
    fresh: Any = dist.new_group()
    fresh.send(np.full(count, 4.0), own)  # before the group's first receive
    first = np.empty(count)
    fresh.recv(first, own)
    assert (first == 4).all()
    dist.destroy_process_group(fresh)
    dist.send(np.full(count, 5.0), own, tag=1)
    dist.send(np.full(count, 6.0), own, tag=2)
    status = dist.probe(own, tag=2)
    assert (status.source, status.tag, status.count) == (own, 2, count)
    with dist.add_hook(lambda call: None):
        assert must(dist.iprobe(own)).tag == 1
    x = np.empty(count)
    assert dist.recv(x, own, tag=2) == own
    assert (x == 6).all()
    assert dist.recv(x, tag=None) == own
    assert (x == 5).all()
    y = np.empty(count + 1)
    work = must(dist.irecv(y, tag=None, status=(status := dist.Status())))
    must(dist.isend(np.full(count, 7.0), own, tag=9)).wait()
    work.wait()
    assert (status.source, status.tag, status.count) == (own, 9, count)
    assert (y[:count] == 7).all()
    assert dist.iprobe() is None
    dist.sendrecv(np.full(count, 8.0), own, x, own)
    assert (x == 8).all()
    dist.send_object_list([{"a": own}], own)
    objects: list[Any] = [None]
    assert dist.recv_object_list(objects, own) == own
    assert objects == [{"a": own}]
    dist.barrier()


def to_nobody() -> None:
    """Messages to and from NO_RANK end at once and move no data."""
    x, nobody, status = np.full(3, 1.0), dist.NO_RANK, dist.Status()
    dist.send(x, nobody)
    dist.send(x, group_dst=nobody)
    must(dist.isend(x, nobody)).wait()
    assert dist.recv(x, nobody, status=status) == nobody
    assert (status.source, status.tag, status.count) == (nobody, -1, 0)
    work = must(dist.irecv(x, nobody))
    work.wait()
    assert work.source_rank() == nobody
    assert dist.probe(nobody).source == nobody
    assert dist.sendrecv(x, nobody, x, nobody) == nobody
    assert (
        dist.batch_isend_irecv([dist.P2POp(dist.isend, x, nobody), dist.P2POp(dist.irecv, x, nobody)]) == []
    )
    assert (x == 1).all()
    assert dist.iprobe() is None
    dist.barrier()


def around(count: int) -> None:
    """sendrecv around a ring, and along a line whose ends have no neighbours."""
    n = size()
    x, y = np.full(count, float(me())), np.full(count + 1, -1.0)
    left, right = (me() - 1) % n, (me() + 1) % n
    assert dist.sendrecv(x, right, y[:count], left, sendtag=4, recvtag=4) == left
    assert (y[:count] == left).all()
    mesh = dist.init_device_mesh("cpu", (n,))
    assert mesh.shift(0, periodic=True) == (left, right)
    source, target = mesh.shift(0)
    status = dist.Status()
    y[:] = -1
    assert dist.sendrecv(x, target, y, source, recvtag=None, status=status) == source
    assert status.source == source == (me() - 1 if me() else dist.NO_RANK)
    assert status.count == (count if me() else 0)
    assert (y[: status.count] == source).all()
    assert (y[status.count :] == -1).all()


def first_of_several() -> list[int]:
    """Rank 0 waits for any of the others, which send one after another; returns their order."""
    order = []
    if me() == 0:
        arrays = np.zeros((size(), 4))
        works: list[Any] = [None, *(dist.irecv(arrays[r], r) for r in range(1, size()))]
        for _ in range(1, size()):
            index = dist.waitany(works)
            assert (arrays[index] == index).all()
            works[index] = None
            order.append(index)
            dist.send(arrays[index], index % (size() - 1) + 1, tag=1)  # its successor's turn
        failure = failure_of(lambda: dist.waitany(works))
        assert failure is not None
        assert "no Work" in failure.message
        late = must(dist.irecv(arrays[0], 1, timeout=0.3))
        for seconds in (0.01, None):
            failure = failure_of(lambda s=seconds: dist.waitany([None, late], s))  # type: ignore[misc]
            assert failure is not None
            assert failure.type == "OperationTimeoutError"
        dist.recv(arrays[0], size() - 1, tag=2)
    else:
        x = np.full(4, float(me()))
        if me() > 1:
            dist.recv(np.empty(4), 0, tag=1)
        dist.send(x, 0)
        if me() == 1:
            dist.recv(np.empty(4), 0, tag=1)
        if me() == size() - 1:
            dist.send(x, 0, tag=2)
    return order


def by_color() -> list[int] | None:
    """Parts by colour and key; the global ranks of this one's part in the order of the group."""
    assert dist.split_group(color=None) is None
    color = None if me() == 1 else me() % 2
    group = dist.split_group(color=color, key=-me())
    if group is None:
        return None
    x = np.ones(1)
    dist.all_reduce(x, group=group)
    assert x[0] == group.size()
    return list(group.ranks)


def with_other_tags() -> Failure | None:
    """A receive whose tag nobody sends: its error names those that have come."""
    failure = None
    if me() == 0:
        for tag in (3, 5, 5):
            dist.send(np.ones(2), 1, tag=tag)
        dist.barrier()
    else:
        dist.barrier()
        x = np.empty(2)
        failure = failure_of(lambda: dist.recv(x, 0, tag=4, timeout=0.3))
        for _ in range(3):
            dist.recv(x, 0, tag=None)
    return failure


ROWS: list[tuple[int, Any, tuple[Any, ...]]] = [
    (2, statuses, (5,)),
    (2, statuses, (300_000,)),
    (2, shorter_in_strided, ()),
    (3, probes, (0,)),
    (3, probes, (300_000,)),
    (2, polled, (10,)),
    (3, polled, (300_000,)),
    (1, to_self, (4,)),
    (2, to_self, (4,)),
    (2, to_self, (1_000_000,)),
    (1, to_nobody, ()),
    (2, to_nobody, ()),
    (1, around, (3,)),
    (2, around, (3,)),
    (3, around, (300_000,)),
    (4, first_of_several, ()),
]
"""World size, function, arguments."""
