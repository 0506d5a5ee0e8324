"""What ranks do in the tests of shared memory."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

import unicoll as dist


def way() -> Any:
    """How this rank's world group moves data; None before its first collective."""
    pg = dist.group.WORLD
    assert pg is not None
    return pg._host._way  # type: ignore[attr-defined]


def transport() -> tuple[str, float]:
    """What the world group uses, and an all_reduce over it."""
    x = np.ones(1000)
    dist.all_reduce(x)
    return way().where.__class__.__name__, float(x.sum())


def reason() -> str:
    """How the world group moves data, in words."""
    transport()
    return str(way().words)


def unwilling(rank: int) -> str:
    """As :func:`reason`, where one rank will not share."""
    if dist.get_rank() == rank:
        os.environ["UNICOLL_TRANSPORT"] = "tcp"
    return reason()


def unable(rank: int) -> str:
    """As :func:`reason`, where one rank cannot map what the first of its host made."""
    from gloo_fallback import nodes

    if dist.get_rank() == rank:
        nodes.open_published = lambda *_: None  # type: ignore[assignment]
    return reason()


def no_room(rank: int) -> str:
    """As :func:`reason`, where the first rank of a host gets no memory."""
    if dist.get_rank() == rank:

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        os.memfd_create = full  # type: ignore[assignment]
    return reason()


def another_machine(rank: int) -> tuple[str, float]:
    """As :func:`transport`, where one rank is on a host of its own."""
    from gloo_fallback import nodes

    if dist.get_rank() == rank:
        nodes.boot_id = lambda: "another boot"
    return transport()


def board_kind() -> tuple[str, float]:
    """Which board the world group uses, and a large all_reduce over it."""
    x = np.ones(500_000)
    dist.all_reduce(x)
    return type(way().board).__name__, float(x[-1])


def asleep(seconds: float) -> tuple[float, float]:
    """Rank 0 is late by so much that the others sleep: their processor time meanwhile, and a sum after it."""
    dist.barrier()
    started = time.process_time()
    if dist.get_rank() == 0:
        time.sleep(seconds)
    x = np.ones(10)
    dist.all_reduce(x)
    return time.process_time() - started, float(x[0])


def descriptors() -> list[str]:
    """Descriptors of shared memory that this rank holds once the memory is in use."""
    transport()
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return [link for link in links if "memfd" in link]


def where() -> tuple[int, int]:
    """Process and descriptor of a segment that stays open, for others to try."""
    from gloo_fallback.segment import _sized

    segment = _sized(os.memfd_create("unicoll"), 8192)
    globals()["kept"] = segment
    return os.getpid(), segment._descriptor


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
    before = mapped()
    dist.all_reduce(np.ones(3_000_000))
    return before, mapped()


def a_peer_that_goes_at_once() -> float:
    """Rank 0 does its part and leaves the job, while rank 1 sleeps until it has heard of that."""
    import gloo_fallback.board as board

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

    board.bells.sleep, board.bells.take_within = sleep, late  # type: ignore[assignment]
    board._YIELDS = board._CROWDED_YIELDS = 0
    way().board._yields = way().board._spins = 0
    dist.all_reduce(x)
    return float(x[0])
