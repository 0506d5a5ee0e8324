"""Jobs of the tests of shared memory."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import numpy as np

import unicoll as dist
from tests.support.log import Log
from tests.support.outcomes import failure_of


def transport_of_world() -> Any:
    """The transport of this rank's world group; None before its first collective."""
    pg = dist.group.WORLD
    assert pg is not None
    return pg._backends.for_device("cpu")._transport  # type: ignore[attr-defined]


def transport() -> tuple[str, float]:
    """The type of the world group's transport target, and the result of an all_reduce."""
    x = np.ones(1000)
    dist.all_reduce(x)
    return transport_of_world().target.__class__.__name__, float(x.sum())


def reason() -> str:
    """The description of the world group's transport."""
    transport()
    return str(transport_of_world().description)


def logged() -> list[str]:
    """What a new group logs about its transport."""
    with Log() as log:
        group = dist.new_group()
        dist.barrier(group)
        dist.destroy_process_group(group)
    return [line.partition("' ")[2] for line in log.lines if " over " in line]


def tcp_on_one_rank(rank: int) -> str:
    """As :func:`reason`, with UNICOLL_TRANSPORT=tcp on one rank."""
    if dist.get_rank() == rank:
        os.environ["UNICOLL_TRANSPORT"] = "tcp"
    return reason()


def cannot_map(rank: int) -> str:
    """As :func:`reason`; one rank cannot map the segment of its host."""
    from gloo_fallback.transport import topology

    if dist.get_rank() == rank:
        topology.open_published = lambda *_: None  # type: ignore[assignment]
    return reason()


def no_memory(rank: int) -> str:
    """As :func:`reason`; the first rank of a host cannot create a segment."""
    if dist.get_rank() == rank:

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        os.memfd_create = full  # type: ignore[assignment]
    return reason()


def another_machine(rank: int) -> tuple[str, float]:
    """As :func:`transport`; one rank is on another host."""
    from gloo_fallback.transport import topology

    if dist.get_rank() == rank:
        topology.boot_id = lambda: "another boot"
    return transport()


def slots_kind() -> tuple[str, float]:
    """The type of the world group's slots, and the result of a large all_reduce."""
    x = np.ones(500_000)
    dist.all_reduce(x)
    return type(transport_of_world().slots).__name__, float(x[-1])


def asleep(seconds: float) -> tuple[float, float]:
    """Rank 0 is late, so the other ranks sleep; their processor time and the sum."""
    dist.barrier()
    started = time.process_time()
    if dist.get_rank() == 0:
        time.sleep(seconds)
    x = np.ones(10)
    dist.all_reduce(x)
    return time.process_time() - started, float(x[0])


def descriptors() -> list[str]:
    """Descriptors of shared memory that this rank has open while the memory is in use."""
    transport()
    targets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return [target for target in targets if "memfd" in target]


def where() -> tuple[int, int]:
    """Process and descriptor of a segment that stays open, for attempts of other processes to open it."""
    from gloo_fallback.shm.segment import create_offer

    segment, _ = create_offer(8192)
    globals()["kept"] = segment
    return os.getpid(), segment.descriptor


def staging() -> tuple[int, int]:
    """Bytes of shared memory of this rank before and after a large operation."""

    def mapped() -> int:
        with open("/proc/self/smaps") as file:
            text = file.read()
        total, ours = 0, False
        for line in text.splitlines():
            if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
                ours = "memfd:unicoll" in line
            elif ours and line.startswith("Size:"):
                total += int(line.split()[1]) << 10
        return total

    dist.barrier()
    gc.collect()  # a group that has failed may wait for it
    before = mapped()
    dist.all_reduce(np.ones(3_000_000))
    return before, mapped()


def peer_leaves_after_signal() -> float:
    """Rank 0 signals and leaves the job, while rank 1 sleeps until it is notified of that."""
    from gloo_fallback.shm import futex, slots

    x = np.ones(3)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        time.sleep(0.3)
        dist.all_reduce(x)
        dist.destroy_process_group()
        return float(x[0])
    control = dist.group.WORLD.job.control  # type: ignore[union-attr]
    assert control is not None

    def sleep(*arguments: Any) -> int:
        assert control.await_departure(0, 20.0) is not None
        return 1

    def late(semaphore: int, seconds: float) -> bool:
        sleep()
        return False

    futex.sleep, futex.timed_wait = sleep, late  # type: ignore[assignment]
    slots._YIELDS = slots._OVERSUBSCRIBED_YIELDS = 0
    transport_of_world().slots._yields = transport_of_world().slots._spins = 0
    dist.all_reduce(x)
    return float(x[0])


def repeated_kinds(seed: int, count: int) -> list[str]:
    """Calls of a few kinds, in random order and each many times; the names of those with a wrong result.

    Sizes are chosen by a seed that all ranks share; in an all_to_all and a gather they differ between ranks.
    """
    me, size = dist.get_rank(), dist.get_world_size()
    shared = np.random.default_rng(seed)
    wrong: list[str] = []

    def note(name: str, *pairs: tuple[Any, Any]) -> None:
        if not all(np.array_equal(found, expected) for found, expected in pairs):
            wrong.append(name)

    for _ in range(count):
        name, n, value, root = (int(v) for v in shared.integers(0, [9, 4, 1000, size]))
        n *= 3
        data = [np.arange(n) * 10.0 + 100 * r + value for r in range(size)]
        blocks = [
            [np.arange(n + (s if name == 6 else 0)) + 100.0 * r + value for s in range(size)]
            for r in range(size)
        ]
        total = [sum(blocks[r][s] for r in range(size)) for s in range(size)]
        if name == 0:
            out = np.zeros(n * size)
            dist.all_gather_into_tensor(out, data[me])
            note("all_gather_into_tensor", (out, np.concatenate(data)))
        elif name == 1:
            uneven = [np.arange(n + r) + value for r in range(size)]
            outs = [np.zeros(n + r) for r in range(size)]
            dist.all_gather(outs, uneven[me].astype(float))
            note("all_gather", *zip(outs, uneven, strict=True))
        elif name == 2:
            lengths = [
                n + (r if value % 2 else 0) for r in range(size)
            ]  # equal and different sizes alternate
            outs = [np.zeros(k) for k in lengths]
            dist.gather(np.full(lengths[me], me + value + 0.5), outs if me == root else None, root)
            if me == root:
                note(
                    "gather",
                    *(
                        (out, np.full(k, r + value + 0.5))
                        for r, (out, k) in enumerate(zip(outs, lengths, strict=True))
                    ),
                )
        elif name == 3:
            lengths = [n + (r if value % 2 else 0) for r in range(size)]
            lists = [np.full(k, r + value + 0.5) for r, k in enumerate(lengths)]
            mine = np.zeros(lengths[me])
            dist.scatter(mine, lists if me == root else None, root)
            note("scatter", (mine, lists[me]))
        elif name == 4:
            mine = np.zeros(n)
            dist.reduce_scatter_tensor(mine, np.concatenate(blocks[me]))
            note("reduce_scatter_tensor", (mine, total[me]))
        elif name == 5:
            whole = np.concatenate(blocks[me])
            mine = whole[me * n : (me + 1) * n]  # the output is a part of the input
            dist.reduce_scatter_tensor(mine, whole)
            note("reduce_scatter_tensor in place", (mine, total[me]))
        elif name == 6:
            mine = np.zeros(n + me)
            dist.reduce_scatter(mine, blocks[me])
            note("reduce_scatter", (mine, total[me]))
        elif name == 7:
            whole = np.concatenate(blocks[me])
            dist.all_to_all_single(whole, whole)  # in place
            note("all_to_all_single", (whole, np.concatenate([blocks[r][me] for r in range(size)])))
        else:
            ours = [np.arange(n + r + me) + value + 0.5 * me for r in range(size)]
            outs = [np.zeros(n + r + me) for r in range(size)]
            dist.all_to_all(outs, ours)
            note(
                "all_to_all", *((out, np.arange(n + r + me) + value + 0.5 * r) for r, out in enumerate(outs))
            )
    return wrong


def all_to_all_in_place(count: int) -> list[str]:
    """all_to_all calls whose outputs are their inputs, with blocks of ``count`` elements; those with a wrong result."""
    me, size = dist.get_rank(), dist.get_world_size()
    sent = [np.arange(count) + 1000.0 * (size * me + r) for r in range(size)]
    expected = [np.arange(count) + 1000.0 * (size * r + me) for r in range(size)]
    whole = np.concatenate(sent)
    dist.all_to_all_single(whole, whole)
    dist.all_to_all(sent[::-1], sent)  # entry i of the outputs is entry size - 1 - i of the inputs
    pairs = {"all_to_all_single": (whole, np.concatenate(expected)), "all_to_all": (sent[::-1], expected)}
    return [name for name, pair in pairs.items() if not np.array_equal(*pair)]


def sizes_change() -> list[Any]:
    """all_to_all calls of which the sizes agreed before, and no longer do on one rank: the outcomes."""
    me, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    out, given = np.zeros(2 * size), np.arange(2.0 * size)
    for _ in range(4):
        dist.all_to_all_single(out, given, group=group)
    if me == size - 1:
        out, given = np.zeros(3 * size), np.arange(3.0 * size)
    failure = failure_of(lambda: dist.all_to_all_single(out, given, group=group))
    dist.destroy_process_group(group)
    return [failure, out.tolist()]
