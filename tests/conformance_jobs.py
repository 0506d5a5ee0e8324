"""What ranks do in the conformance suite beside single cases."""

from __future__ import annotations

import array
import hashlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import reference

import unicoll as dist


def coalesced(async_op: bool) -> None:
    """Every ``*_coalesced`` call against its single counterpart's result."""
    n, me = dist.get_world_size(), dist.get_rank()
    sizes = (3, 0, 17, 30000)

    def finish(work: Any) -> None:
        assert (work is not None) == async_op
        if async_op:
            work.wait()

    x: Any
    for dtype in ("float32", "int64", "float16"):
        x = [np.full(s, me + k, dtype) for k, s in enumerate(sizes)]
        x[2] = np.full(2 * 17, me + 2, dtype)[::2]
        finish(dist.all_reduce_coalesced(x, async_op=async_op))
        for k, each in enumerate(x):
            assert (each == sum(r + k for r in range(n))).all(), (dtype, k, each)
        x = [np.full(s, me + k, dtype) for k, s in enumerate(sizes)]
        finish(dist.all_reduce_coalesced(x, op=dist.ReduceOp.MAX, async_op=async_op))
        assert all((each == n - 1 + k).all() for k, each in enumerate(x))
        x = [np.full(s, me * 10 + k, dtype) for k, s in enumerate(sizes)]
        finish(dist.broadcast_coalesced(x, src=n - 1, async_op=async_op))
        assert all((each == (n - 1) * 10 + k).all() for k, each in enumerate(x))
        inputs = [np.full(s, me * 10 + k, dtype) for k, s in enumerate(sizes)]
        outs = [[np.empty(s, dtype) for s in sizes] for _ in range(n)]
        finish(dist.all_gather_coalesced(outs, inputs, async_op=async_op))
        assert all((outs[r][k] == r * 10 + k).all() for r in range(n) for k in range(len(sizes)))
        flat = [np.empty((n, s), dtype) for s in sizes]
        finish(dist.all_gather_into_tensor_coalesced(flat, inputs, async_op=async_op))
        assert all((flat[k][r] == r * 10 + k).all() for r in range(n) for k in range(len(sizes)))
        given = [np.arange(n, dtype=dtype).repeat(s) + np.asarray(me, dtype) for s in sizes]
        parts = [np.empty(s, dtype) for s in sizes]
        finish(dist.reduce_scatter_tensor_coalesced(parts, given, async_op=async_op))
        assert all((p == sum(me + r for r in range(n))).all() for p in parts)
    two = [np.full(4, me, np.float32), np.full(4, me, np.int32)]
    finish(dist.all_reduce_coalesced(two, async_op=async_op))
    assert all((t == sum(range(n))).all() for t in two)


def barrier_times(call: str) -> tuple[float, float]:
    """When this rank came to a barrier, and when it left; ranks come apart."""
    time.sleep(0.03 * dist.get_rank())
    came = time.monotonic()
    if call == "async barrier":
        work = dist.barrier(async_op=True)
        assert work is not None
        work.wait()
    else:
        getattr(dist, call)()
    return came, time.monotonic()


def refusals(op: str, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The error of a reduction for each (dtype, reduction); the group must work afterwards."""
    n = dist.get_world_size()
    errors = []
    for dtype, reduce in pairs:
        x, whole = np.zeros(4, reference.numpy_dtype(dtype)), np.zeros(4 * n, reference.numpy_dtype(dtype))
        kind: Any = dist.ReduceOp.PREMUL_SUM(2) if reduce == "PREMUL_SUM" else getattr(dist.ReduceOp, reduce)
        args: dict[str, tuple[Any, ...]] = {
            "all_reduce": (x, kind), "reduce": (x, 0, kind), "reduce_scatter": (x, [x.copy() for _ in range(n)], kind),
            "reduce_scatter_tensor": (x, whole, kind),
        }  # fmt: skip
        try:
            getattr(dist, op)(*args[op])
            errors.append(("nothing", f"{dtype} {reduce} was accepted"))
        except Exception as e:
            errors.append((type(e).__name__, str(e)))
    x = np.ones(3)
    dist.all_reduce(x)
    assert (x == n).all()
    return errors


def repeated_reductions() -> list[list[str]]:
    """Digests of the results of the same all_reduces, done several times, blocking and not."""
    digests = []
    for count in (5, 1000, 100_003):
        for dtype in ("float32", "float16", "complex64"):
            given = np.random.default_rng(dist.get_rank()).standard_normal(count).astype(dtype)
            mine = []
            for _ in range(3):
                x = given.copy()
                dist.all_reduce(x)
                mine.append(x)
                x = given.copy()
                work = dist.all_reduce(x, async_op=True)
                assert work is not None
                mine.append(work.result()[0])
            digests.append([hashlib.sha256(x.tobytes()).hexdigest() for x in mine])
    return digests


def other_buffers() -> list[int]:
    """Objects that lend their memory take part too."""
    me = dist.get_rank()
    x = array.array("q", [(me + 1) * i for i in (1, 2, 3)])
    dist.all_reduce(x)
    y = bytearray(b"from0" if me == 0 else b".....")
    dist.broadcast(y, src=0)
    assert y == b"from0"
    z = memoryview(bytearray(bytes([me] * 4)))
    dist.all_reduce(z, op=dist.ReduceOp.MAX)
    assert bytes(z) == bytes([dist.get_world_size() - 1] * 4)
    return list(x)


def huge(count: int) -> list[int]:
    """A broadcast of ``count`` bytes, more than 2^31: the bytes that did not arrive as sent, at some offsets."""
    me = dist.get_rank()
    data = np.zeros(count, np.uint8)
    spots = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, count - 1]
    if me == 0:
        data[spots] = np.arange(1, len(spots) + 1)
        data[::4097] |= 0x40
    dist.broadcast(data, src=0, timeout=120)
    wrong = [s for i, s in enumerate(spots) if data[s] & 0x3F != i + 1]
    if not (data[::4097] & 0x40).all() or np.count_nonzero(data) > (count + 4096) // 4097 + len(spots):
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
