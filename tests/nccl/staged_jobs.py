"""What ranks do in the tests of device arrays over a backend of the host."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np

import unicoll as dist
from tests.simulated_nccl import arrays
from tests.simulated_nccl import ranks as simulated_ranks
from tests.support.memory import freed
from tests.support.outcomes import CallOutcome, outcome_of


def mixed_kinds(rounds: int) -> bool:
    """Asynchronous calls on arrays of the device and of the host in turns, in one group: their order is the same on
    all ranks, however late a device is."""
    me, n = dist.get_rank(), dist.get_world_size()
    good = True
    for i in range(rounds):
        x, y = arrays.full(5000, me + i, np.float64), np.full(300, me - i, np.float64)
        z = arrays.full(7, me, np.int32)
        works = [dist.all_reduce(a, async_op=True) for a in (x, y, z)]
        for work in works:
            work.wait()
        ranks = sum(range(n))
        good = good and bool((x.numpy() == ranks + n * i).all() and (y == ranks - n * i).all())
        good = good and bool((z.numpy() == ranks).all())
    return good


def ordered(rounds: int) -> bool:
    """The call takes what the stream will have made, and the stream goes on with what the call gives."""
    me, n = dist.get_rank(), dist.get_world_size()
    good = True
    for i in range(rounds):
        x = arrays.full(3000, me, np.float32)
        with arrays.Stream():
            y = arrays.full(3000, me, np.float32)
            y *= 2
            y += i
            work = dist.all_reduce(y, async_op=True)
        dist.all_reduce(x)
        x += 1
        with arrays.Stream():
            work.wait()
            y += 1
            good = good and bool((y.numpy() == sum(range(n)) * 2 + n * i + 1).all())
        good = good and bool((x.numpy() == sum(range(n)) + 1).all())
    return good


def messages() -> list[bool]:
    """Sends and receives of device arrays, blocking and not, strided, from anyone, and to an array of the host."""
    me, n = dist.get_rank(), dist.get_world_size()
    to, frm = (me + 1) % n, (me - 1) % n
    good = []
    for count in (0, 1, 1000, 300_000):
        x, y = arrays.full(count, me + 1, np.float32), arrays.empty(count, np.float32)
        work = dist.isend(x, to, tag=1)
        dist.recv(y, frm, tag=1)
        work.wait()
        good.append(bool((y.numpy() == frm + 1).all()))
        z = arrays.full((count, 2), 0, np.float32)
        coming = dist.irecv(z.T, None, tag=2)
        dist.send(arrays.full(2 * count, me + 5, np.float32), to, tag=2)
        coming.wait()
        good.append(bool((z.numpy() == frm + 5).all()) and coming.source_rank() == frm)
        host = np.zeros(count, np.float32)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, host, frm, tag=3), dist.P2POp(dist.isend, x, to, tag=3)]
        )
        for one in works:
            one.wait()
        good.append(bool((host == frm + 1).all()))
    return good


def shorter_messages() -> list[tuple[int, Any]]:
    """Messages that are shorter than the arrays of the device: contiguous or not, blocking or not, to this rank too."""
    me, n = dist.get_rank(), dist.get_world_size()
    to, frm = (me + 1) % n, (me - 1) % n
    found: list[tuple[int, Any]] = []
    for count, rows in ((3, 2), (60_000, 30_000)):
        for shape in ("contiguous", "transposed"):
            for peer, source in ((to, frm), (me, me)):
                x, status = arrays.full((rows, 2), -1, np.float32), dist.Status()
                work = dist.irecv(x if shape == "contiguous" else x.T, source, tag=None, status=status)
                dist.send(arrays.full(count - 1, 4, np.float32), peer, tag=9)
                work.wait()
                y = arrays.full((rows, 2), -1, np.float32)
                if peer != me:
                    work = dist.isend(arrays.full(count - 1, 4, np.float32), peer)
                    dist.recv(y, source, status=(second := dist.Status()))
                    work.wait()
                    assert (second.source, second.count) == (source, count - 1)
                    assert y.numpy().ravel().tolist() == [4] * (count - 1) + [-1] * (2 * rows - count + 1)
                assert (status.source, status.tag) == (source, 9)
                got = x.numpy() if shape == "contiguous" else x.numpy().T
                assert (got.ravel()[: count - 1] == 4).all()
                assert (got.ravel()[count - 1 :] == -1).all()
                found.append((status.count, shape))
    dist.barrier()
    return found


def messages_are_not_kept() -> list[bool]:
    """True for each array of a message, sent or received in the background, that is freed after the message."""
    me, n = dist.get_rank(), dist.get_world_size()
    x, y = arrays.full(100, me, np.float32), arrays.empty(100, np.float32)
    references = [weakref.ref(x), weakref.ref(y)]
    works = [dist.isend(x, (me + 1) % n), dist.irecv(y, (me - 1) % n)]
    for work in works:
        work.synchronize()
    del x, y, work, works
    return freed(*references)


def facts() -> dict[str, Any]:
    """What the group says of itself before and after its first device array."""
    before = dist.explain()
    x = arrays.full(3, 1.0, np.float32)
    dist.all_reduce(x)
    return {
        "before": before,
        "after": dist.explain(),
        "backend": dist.get_backend(),
        "sum": x.numpy().tolist(),
        "staging": dist.group.WORLD.staging_bytes()["cuda"],
    }


def stuck(who: int) -> CallOutcome:
    """One rank's device does not come to what is before the call."""
    group = dist.new_group()
    x = arrays.full(10, 1.0, np.float32)
    here, go = simulated_ranks.simulation(), threading.Event()

    def hold() -> None:
        with here.hold():
            held.set()
            go.wait(60)

    held = threading.Event()
    holder = threading.Thread(target=hold)
    if dist.get_rank() == who:
        x.numpy()
        holder.start()
        held.wait(60)
        x += 1
    outcome = outcome_of(lambda: dist.all_reduce(x, group=group, timeout=1.0))
    go.set()
    if dist.get_rank() == who:
        holder.join()
    here.synchronize()
    dist.destroy_process_group(group)
    return outcome


def differ() -> CallOutcome:
    """Ranks reduce arrays of different sizes, each of many pieces."""
    group = dist.new_group()
    x = arrays.full(50_000 + dist.get_rank(), 1.0, np.float32)
    outcome = outcome_of(lambda: dist.all_reduce(x, group=group, timeout=20))
    dist.destroy_process_group(group)
    return outcome


def _elements(give: int, take: int, much: int) -> int:
    """How many elements one rank has for another: none for some, many for others."""
    return (0, 1, much, 3, much // 7)[(3 * give + 2 * take + 2) % 5]


def exchanges(much: int) -> dict[str, Any]:
    """Exchanges of sizes that differ between any two ranks, in a group of its own; the largest has ``much`` elements.

    Which were right, and the bytes that were moved, and held for that on the host.
    """
    group = dist.new_group()
    me, n = dist.get_rank(), dist.get_world_size()
    sent = [[_elements(i, j, much) for j in range(n)] for i in range(n)]
    values = [[np.arange(sent[i][j], dtype=np.float32) + 1000 * i + j for j in range(n)] for i in range(n)]
    good = []
    for async_op in (False, True):
        outs = [arrays.full(sent[i][me], -1, np.float32) for i in range(n)]
        work = dist.all_to_all(outs, [arrays.array(v) for v in values[me]], group=group, async_op=async_op)
        if work is not None:
            work.wait()
        good.append(all((out.numpy() == values[i][me]).all() for i, out in enumerate(outs)))
        give, take = sent[me], [sent[i][me] for i in range(n)]
        out = arrays.full((sum(take), 2), -1, np.float32)
        whole = np.repeat(np.concatenate(values[me]), 2).reshape(-1, 2)
        work = dist.all_to_all_single(out, arrays.array(whole), take, give, group=group, async_op=async_op)
        if work is not None:
            work.wait()
        right = np.concatenate([values[i][me] for i in range(n)])
        good.append(bool((out.numpy() == right[:, None]).all()))
    nothing = [arrays.empty(0, np.float32) for _ in range(2 * n)]
    dist.all_to_all(nothing[:n], nothing[n:], group=group)
    held = group.staging_bytes()
    dist.destroy_process_group(group)
    return {"good": good, "moved": 4 * sum(map(sum, sent)), "held": held["cuda"] - held["cpu"]}


def sizes_misfit(count: int, ranks: list[int] | None) -> CallOutcome | None:
    """In an exchange the first member of a group sends the second more than that has room for."""
    group = dist.new_group(ranks)
    if dist.get_rank() not in (ranks or range(dist.get_world_size())):
        return None
    n, me = dist.get_world_size(group), dist.get_rank(group)
    given = [arrays.full(count + (me == 0 and j == 1), 1.0) for j in range(n)]
    taken = [arrays.full(count, 0.0) for _ in range(n)]
    outcome = outcome_of(lambda: dist.all_to_all(taken, given, group=group, timeout=20))
    dist.destroy_process_group(group)
    return outcome


def another_call() -> CallOutcome:
    """One rank exchanges, the others reduce what they could agree with."""
    group = dist.new_group()
    n = dist.get_world_size()
    x = [arrays.full(10, 1.0) for _ in range(n)]
    if dist.get_rank() == 0:
        outcome = outcome_of(
            lambda: dist.all_to_all([arrays.full(10, 0.0) for _ in x], x, group=group, timeout=20)
        )
    else:
        one = arrays.full(1, 1, np.int64)
        outcome = outcome_of(lambda: dist.all_reduce(one, dist.ReduceOp.MAX, group=group, timeout=20))
    dist.destroy_process_group(group)
    return outcome


def captured() -> CallOutcome:
    """A graph cannot record it."""
    with arrays.Stream() as stream:
        x = arrays.full(10, 1.0, np.float32)
        stream.synchronize()
        here = simulated_ranks.simulation()
        here.begin_capture(stream.ptr)
        try:
            return outcome_of(lambda: dist.all_reduce(x))
        finally:
            here.end_capture(stream.ptr)


def over_nccl() -> dict[str, Any]:
    """Device arrays go over NCCL, whose members have met in the job's store."""
    x = arrays.full(3, dist.get_rank() + 1.0, np.float32)
    dist.all_reduce(x)
    y = np.full(3, dist.get_rank() + 1.0)
    dist.all_reduce(y)
    return {"device": x.numpy().tolist(), "host": y.tolist(), "explained": dist.explain()}
