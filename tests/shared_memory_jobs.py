"""What ranks do in the tests of shared memory."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import unicoll as dist


def board() -> Any:
    """This rank's board, or None where the group uses sockets."""
    pg = dist.group.WORLD
    assert pg is not None
    return pg._host._board  # type: ignore[attr-defined]


def transport() -> tuple[str, float]:
    """What the world group uses, and an all_reduce over it."""
    x = np.ones(1000)
    dist.all_reduce(x)
    return "sockets" if board() is None else "shared memory", float(x.sum())


def unwilling(rank: int) -> tuple[str, float]:
    """As :func:`transport`, where one rank will not share."""
    if dist.get_rank() == rank:
        os.environ["UNICOLL_TRANSPORT"] = "tcp"
    return transport()


def another_machine(rank: int) -> tuple[str, float]:
    """As :func:`transport`, where one rank's kernel is another: it cannot map what the first one made."""
    from gloo_fallback import segment

    if dist.get_rank() == rank:
        segment._boot = lambda: "another boot"  # type: ignore[assignment]
    return transport()


def arm() -> tuple[str, float]:
    """As :func:`transport`, on a processor that does not keep stores in order."""
    import platform

    platform.machine = lambda: "aarch64"  # type: ignore[assignment]
    return transport()


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
