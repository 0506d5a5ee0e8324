"""Collectives of more than 2^31 bytes."""

from __future__ import annotations

import numpy as np

import unicoll as dist


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
