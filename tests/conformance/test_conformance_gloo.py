"""The CPU backend passes the conformance suite: over TCP, through shared memory, and by host over both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import unicoll as dist
from gloo_fallback.algorithms.circulant import BLOCK
from gloo_fallback.algorithms.over_sockets import SMALL
from gloo_fallback.algorithms.rings import SEGMENT
from gloo_fallback.algorithms.shared_memory import WHOLE
from gloo_fallback.shm.slots import SLOT
from tests.support.ranks import run_ranks
from tests.support.suite import Suite
from unicoll.calls.ops import OPS, Sizes


def huge(count: int) -> list[int]:
    """A broadcast of ``count`` bytes, more than 2^31: the bytes that did not arrive as sent, at some offsets."""
    me = dist.get_rank()
    data = np.zeros(count, np.uint8)
    positions = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, count - 1]
    if me == 0:
        data[positions] = np.arange(1, len(positions) + 1)
        data[::4097] |= 0x40
    dist.broadcast(data, src=0, timeout=120)
    wrong = [s for i, s in enumerate(positions) if data[s] & 0x3F != i + 1]
    if not (data[::4097] & 0x40).all() or np.count_nonzero(data) > (count + 4096) // 4097 + len(positions):
        wrong.append(-1)
    return wrong


def huge_gather(count: int) -> list[int]:
    """An all_gather of ``count`` bytes a rank in place: the offsets that are wrong."""
    me, n = dist.get_rank(), dist.get_world_size()
    data = np.zeros(n * count, np.uint8)
    mine = data[me * count : (me + 1) * count]
    mine[:] = me + 1
    dist.all_gather_into_tensor(data, mine, timeout=120)
    return [int(i) for i in range(0, n * count, 65521) if data[i] != i // count + 1]


# --- tests ------------------------------------------------------------------------------------------

_HUGE = 2_200_000_003
_NEEDS = 12 << 30


class _Gloo(Suite):
    backend = "gloo"


@pytest.mark.every(n=4)
class TestSockets(_Gloo):
    env = {"UNICOLL_TRANSPORT": "tcp"}

    def boundaries(self, op: str, itemsize: int, size: int) -> Sequence[int]:
        row = OPS[op]
        if row.sizes is Sizes.EXCHANGED:
            share = 4
        elif row.in_place:
            share = size - 1 if row.reduces else 1
        else:
            share = size * (size - 1) if row.reduces else size
        switch = SMALL // itemsize // max(1, share)
        blocks = size * BLOCK // itemsize
        return [0, 1, 7, 1000, switch - 1, switch, switch + 1, blocks // 2 + 1, blocks, blocks + 1]

    def large(self, itemsize: int) -> int:
        return (2 * SEGMENT // itemsize + 11) | 1


class _Shared(_Gloo):
    def boundaries(self, op: str, itemsize: int, size: int) -> Sequence[int]:
        switch = WHOLE // itemsize // max(1, size - 1)
        half, slot, lane = (SLOT // n // itemsize for n in (2, 1, max(1, size)))
        return [0, 1, 7, 1000, switch, switch + 1, half - 1, half, half + 1, slot, slot + 1, lane, lane + 1]

    def large(self, itemsize: int) -> int:
        return (2 * SLOT // itemsize + 11) | 1


@pytest.mark.every(n=4)
class TestSharedMemory(_Shared):
    turn = 1
    env = {"UNICOLL_TRANSPORT": "shm"}


@pytest.mark.every(n=6)
class TestSemaphores(_Shared):
    """Shared memory as on processors that do not keep stores in order."""

    sample = 15
    turn = 2
    env = {"UNICOLL_TRANSPORT": "shm", "UNICOLL_MEMORY_ORDER": "weak"}


@pytest.mark.every(n=6)
class TestHierarchy(_Gloo):
    """Every two ranks count as a host: from three ranks on, hosts of two ranks and of one."""

    turn = 3
    env = {"UNICOLL_TRANSPORT": "hierarchical"}

    def boundaries(self, op: str, itemsize: int, size: int) -> Sequence[int]:
        switch = SMALL // itemsize
        piece = SLOT // (itemsize + max(itemsize, 4))
        slot, lane = SLOT // itemsize, SLOT // itemsize // (size + 1)
        nodes = -(-size // 2)
        return [
            0,
            1,
            7,
            1000,
            switch // nodes,
            switch // nodes + 1,
            switch,
            switch + 1,
            piece - 20,
            piece + 1,
            slot,
            slot + 1,
            lane,
            lane + 1,
            3 * piece + 5,
        ]

    def large(self, itemsize: int) -> int:
        return (3 * SLOT // itemsize + 11) | 1


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


@pytest.mark.every(n=0)
@pytest.mark.sampled("", "job", 1)
@pytest.mark.parametrize("job", [huge, huge_gather])
def test_more_than_two_to_the_31_bytes(job: object) -> None:
    if _available() < _NEEDS:
        pytest.skip(f"needs {_NEEDS >> 30} GiB of free memory")
    count = _HUGE if job is huge else _HUGE // 2
    quiet = {"UNICOLL_STALL_WARNING": "0"}  # on a busy machine one call may take longer than that
    assert run_ranks(2, job, count, timeout=240, env=quiet) == [[], []]  # type: ignore[arg-type]
