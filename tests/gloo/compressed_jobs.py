"""Jobs of the tests of compressed reductions."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

import unicoll as dist
from tests.support.outcomes import failure_of
from tests.support.worker import Failure
from unicoll.arrays.compression import BLOCK

SMALL = 1 << 14
"""float32 elements up to which arrays are not compressed."""
COUNTS = (SMALL + 1, 300_001)
MANY = 1_200_007
"""Several chunks for each of up to three ranks."""


def contribution(rank: int, count: int, dtype: str, kind: str) -> Any:
    """One rank's array; the kinds are numbers of one magnitude, of many, ties of the roundings, and mostly zeros."""
    rng = np.random.default_rng((rank, count))
    if kind == "normal":
        values = rng.standard_normal(count)
    elif kind == "mixed":
        values = rng.standard_normal(count) * 10.0 ** rng.integers(-30, 30, count)
    elif kind == "ties":
        values = (rng.integers(-127, 127, count) + 0.5) / 127
        values[::BLOCK] = 1
    else:
        values = rng.standard_normal(count) * (rng.random(count) < 0.001)
    return values.astype(dtype)


def _largest(values: Any) -> Any:
    """For each element the largest magnitude of its block."""
    padded = np.zeros(-(-values.size // BLOCK) * BLOCK)
    padded[: values.size] = np.abs(values)
    return padded.reshape(-1, BLOCK).max(axis=1).repeat(BLOCK)[: values.size]


def _error(compression: str, values: Any) -> Any:
    """The documented error of one rounding of each element."""
    if compression == "bfloat16":
        return np.abs(values) * 2.0**-8 + 2.0**-134
    return np.maximum(_largest(values), 2.0**-118) / 254 * 1.0001


def _fraction(compression: str, op: str, parts: list[Any], x: Any) -> float:
    """The largest error of a result, relative to the documented bound.

    The bound: one rounding of each part, one of the result, and the roundings of the sum in the element type.
    """
    n = dist.get_world_size() if op == "AVG" else 1
    wide = [part.astype(np.float64) / n for part in parts]
    eps = float(np.finfo(x.dtype).eps)
    bound = sum(_error(compression, part) for part in wide) + _error(compression, x.astype(np.float64))
    bound = bound * 1.01 + 8 * eps * sum(np.abs(part) for part in wide)
    return float((np.abs(x.astype(np.float64) - sum(wide)) / bound).max())


def reductions(compression: str, dtype: str, per_host: int) -> list[tuple[str, int, float]]:
    """(name, checksum, error relative to the bound) of all_reduces of many kinds; ``per_host`` ranks share memory."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.using(compression=compression)  # type: ignore[union-attr]
    found = []
    cases = [(count, kind) for count in COUNTS for kind in ("normal", "mixed", "ties", "sparse")]
    for count, kind in [*cases, (MANY, "normal")]:
        arrays = [contribution(r, count, dtype, kind) for r in range(size)]
        parts = [sum(arrays[i : i + per_host]) for i in range(0, size, per_host)]
        for op in ("SUM", "AVG"):
            x = arrays[rank].copy()
            if kind == "ties":
                work = dist.all_reduce(x, op=op, group=group, async_op=True)
                assert work is not None
                work.wait()
            else:
                dist.all_reduce(x, op=op, group=group)
            name = f"{dtype}[{count}] {kind} {op}"
            found.append((name, zlib.crc32(x.tobytes()), _fraction(compression, op, parts, x)))
    return found


def exact() -> list[bool]:
    """True for each all_reduce that gives the bits of one without compression: small arrays, and ``none``."""
    found = []
    for compression, count in (
        ("int8", 0),
        ("int8", 5),
        ("bfloat16", SMALL),
        ("int8", SMALL),
        ("none", MANY),
    ):
        group = dist.new_group(pg_options={"compression": "bfloat16"})
        x = contribution(dist.get_rank(), count, "float32", "normal")
        y = x.copy()
        dist.all_reduce(x, group=group.using(compression=compression))
        dist.all_reduce(y)
        found.append(x.tobytes() == y.tobytes())
        dist.destroy_process_group(group)
    return found


def option_of_a_group() -> dict[str, Any]:
    """What the option of a group changes."""
    group = dist.new_group(pg_options=dist.Options(compression="int8"))
    rank = dist.get_rank()

    def bits(g: Any, dtype: str, op: str) -> bytes:
        x = (contribution(rank, 30_000, "float64", "normal") * 100).astype(dtype)
        dist.all_reduce(x, op=op, group=g)
        return x.tobytes()

    world: Any = dist.group.WORLD
    unchanged = [("int32", "SUM"), ("float16", "SUM"), ("float32", "MAX"), ("float64", "PRODUCT")]
    y = contribution(rank, 30_000, "float32", "normal")
    z = y.copy()
    dist.broadcast(y, 0, group=group)
    dist.broadcast(z, 0)
    return {
        "as of a call": bits(group, "float32", "AVG")
        == bits(world.using(compression="int8"), "float32", "AVG"),
        "changed": bits(group, "float32", "AVG") != bits(world, "float32", "AVG"),
        "unchanged": [bits(group, *case) == bits(world, *case) for case in unchanged],
        "broadcast": y.tobytes() == z.tobytes(),
        "described": group.describe(),
    }


def special(compression: str) -> tuple[Any, int, list[int]]:
    """Where the result of contributions with infinities and NaN is NaN, a checksum, and where it is infinite."""
    rank, count = dist.get_rank(), 40_000
    x = np.full(count, 0.5, np.float32)
    if rank == 0:
        x[1000] = np.inf
    if rank == 1:
        x[30_000] = np.nan
        x[20_000:20_002] = -np.inf, 3e38
    if rank == 0:
        x[20_001] = 3e38
    dist.all_reduce(x, group=dist.group.WORLD.using(compression=compression))  # type: ignore[union-attr]
    nan = sorted({int(i) // BLOCK for i in np.flatnonzero(np.isnan(x))})
    return nan, zlib.crc32(x.tobytes()), [int(i) for i in np.flatnonzero(np.isinf(x))]


def coalesced() -> float:
    """The largest relative error of an array that is reduced together with one of larger numbers."""
    small, large = np.full(20_100, 1e-3, np.float32), np.full(20_100, 1e3, np.float32)
    group = dist.group.WORLD.using(compression="int8")  # type: ignore[union-attr]
    dist.all_reduce_coalesced([small, large], group=group)
    return float(np.abs(small / (1e-3 * dist.get_world_size()) - 1).max())


def strided() -> float:
    """The largest error of an all_reduce of every second element of ones; the others are unchanged."""
    x = np.ones(80_000, np.float32)
    dist.all_reduce(x[::2], group=dist.group.WORLD.using(compression="int8"))  # type: ignore[union-attr]
    assert (x[1::2] == 1).all()
    return float(np.abs(x[::2] - dist.get_world_size()).max())


def refused() -> list[Failure | None]:
    """Calls that do not take the option; the group is usable after each."""
    world: Any = dist.group.WORLD
    view = world.using(compression="int8")
    x, many = np.ones(30_000, np.float32), [np.ones(10, np.float32) for _ in range(dist.get_world_size())]
    calls = [
        lambda: dist.all_reduce(np.ones(30_000, np.int32), group=view),
        lambda: dist.all_reduce(np.ones(30_000, np.float16), group=view),
        lambda: dist.all_reduce(x, op="MAX", group=view),
        lambda: dist.all_reduce(x, op=dist.ReduceOp.PREMUL_SUM(2.0), group=view),
        lambda: dist.broadcast(x, 0, group=view),
        lambda: dist.all_gather(many, many[0], group=view),
        lambda: dist.send(x, 1 - dist.get_rank(), group=view),
        lambda: dist.barrier(group=view),
        lambda: dist.all_reduce_coalesced([x, np.ones(3, np.int64)], group=view),
    ]
    found = []
    for call in calls:
        found.append(failure_of(call))
        dist.barrier()
    return found


def refused_groups() -> list[Failure | None]:
    """Groups that cannot have the option."""
    found = [
        failure_of(lambda: dist.new_group(pg_options={"compression": "int4"})),
        failure_of(lambda: dist.new_group(pg_options={"compression": 8})),
        failure_of(lambda: dist.new_group(pg_options={"compression": "int8", "deterministic": True})),
    ]
    group: Any = dist.new_group(pg_options={"deterministic": True})
    found.append(failure_of(lambda: group.using(compression="int8")))
    return found


def options_differ(how: str) -> None:
    """An all_reduce whose compression differs on rank 1, by the option of the call or of the group."""
    mine = "int8" if dist.get_rank() == 1 else "bfloat16"
    group: Any = dist.new_group(pg_options={"compression": mine} if how == "group" else None)
    view = group if how == "group" else group.using(compression=mine)
    view.all_reduce(np.ones(40_000, np.float32), timeout=10)


def only_on_one_rank() -> None:
    """An all_reduce that only rank 1 compresses."""
    group: Any = dist.new_group()
    view = group.using(compression="int8") if dist.get_rank() == 1 else group
    view.all_reduce(np.ones(40_000, np.float32), timeout=10)


def one_is_late() -> None:
    """An all_reduce that rank 1 does not make."""
    group = dist.new_group()
    if dist.get_rank() != 1:
        view = group.using(compression="int8", timeout=0.5)
        view.all_reduce(np.ones(40_000, np.float32))
