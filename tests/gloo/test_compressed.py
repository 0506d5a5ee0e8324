"""Compressed all_reduces: error bounds, equal bits on all ranks, what is refused, differences between ranks, faults."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from gloo_fallback.algorithms import compressed
from tests.support.on_ranks import on_ranks
from tests.support.outcomes import failures_of
from tests.support.ranks import Pool, ProcessJob, joined, pools, run_ranks
from unicoll.arrays.compression import BLOCK

Pools = Callable[[int], Pool]
TCP = {"UNICOLL_TRANSPORT": "tcp"}
HOSTS = {"UNICOLL_TRANSPORT": "hierarchical"}
SMALL = 1 << 14
"""float32 elements up to which arrays are not compressed."""
COUNTS = (SMALL + 1, 300_001)
MANY = 1_200_007
"""Several chunks for each of up to three ranks."""


@pytest.fixture(scope="module")
def tcp() -> Iterator[Pools]:
    with pools(partial(ProcessJob, env=TCP)) as made:
        yield made


@pytest.fixture(scope="module")
def hosts() -> Iterator[Pools]:
    with pools(partial(ProcessJob, env=HOSTS)) as made:
        yield made


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
    group: Any = _using(compression)
    found = []
    cases = [(count, kind) for count in COUNTS for kind in ("normal", "mixed", "ties", "sparse")]
    for count, kind in [*cases, (MANY, "normal")]:
        arrays = [contribution(r, count, dtype, kind) for r in range(size)]
        parts = [sum(arrays[i : i + per_host]) for i in range(0, size, per_host)]
        for op in ("SUM", "AVG"):
            x = arrays[rank].copy()
            work: Any = dist.all_reduce(x, op=op, group=group, async_op=kind == "ties")
            if work is not None:
                work.wait()
            name = f"{dtype}[{count}] {kind} {op}"
            found.append((name, zlib.crc32(x.tobytes()), _fraction(compression, op, parts, x)))
    return found


def _using(compression: str, **options: Any) -> Any:
    """The world with an option."""
    world: Any = dist.group.WORLD
    return world.using(compression=compression, **options)


def check_reductions(by_rank: list[list[tuple[str, int, float]]]) -> None:
    for cases in zip(*by_rank, strict=True):
        names, checksums, fractions = zip(*cases, strict=True)
        assert len(set(names)) == 1
        assert len(set(checksums)) == 1, names[0]
        assert max(fractions) <= 1, (names[0], fractions)
    worst = [
        max(fraction for name, _, fraction in by_rank[0] if f" {kind} " in name) for kind in ("ties", "mixed")
    ]
    assert max(worst) > 0.3  # a result without errors would not test the bound


@pytest.mark.every(n=18)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("compression", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    ("transport", "size"), [("tcp", 2), ("tcp", 3), ("tcp", 4), ("hosts", 3), ("hosts", 4)]
)
def test_errors(transport: str, size: int, compression: str, dtype: str, tcp: Pools, hosts: Pools) -> None:
    pool, per_host = (tcp, 1) if transport == "tcp" else (hosts, 2)
    check_reductions(pool(size).run(reductions, compression, dtype, per_host))


@pytest.mark.every(n=0)
@pytest.mark.parametrize("channel", ["mac", "tls"])
def test_protected_connections(channel: str) -> None:
    env = {**TCP, "UNICOLL_CHANNEL": channel, "UNICOLL_SECRET": "the secret of this test"}
    check_reductions(run_ranks(3, reductions, "int8", "float32", 1, env=env))


@on_ranks(2)
def test_within_a_host_nothing_is_compressed() -> None:
    assert max(fraction for _, _, fraction in reductions("int8", "float32", 1)) < 1e-3


def _exact() -> list[bool]:
    """True for each all_reduce that gives the bits of one without compression."""
    found = []
    group: Any = dist.new_group(pg_options={"compression": "bfloat16"})
    for compression, count in (
        ("int8", 0),
        ("int8", 5),
        ("bfloat16", SMALL),
        ("int8", SMALL),
        ("none", MANY),
    ):
        x = contribution(dist.get_rank(), count, "float32", "normal")
        y = x.copy()
        dist.all_reduce(x, group=group.using(compression=compression))
        dist.all_reduce(y)
        found.append(x.tobytes() == y.tobytes())
    dist.destroy_process_group(group)
    return found


def test_small_arrays_and_none_are_exact(tcp: Pools, hosts: Pools) -> None:
    assert tcp(2).run(_exact) == [[True] * 5] * 2
    assert hosts(4).run(_exact) == [[True] * 5] * 4


@pytest.mark.parametrize(
    ("compression", "nan", "infinite"),
    [
        ("int8", [1000 // BLOCK, 20_000 // BLOCK, 30_000 // BLOCK], []),
        ("bfloat16", [30_000 // BLOCK], [1000, 20_000, 20_001]),
    ],
)
@on_ranks(3, pool="tcp")
def test_numbers_that_are_not_finite_stay_visible(
    compression: str, nan: list[int], infinite: list[int]
) -> None:
    rank, x = dist.get_rank(), np.full(40_000, 0.5, np.float32)
    if rank == 0:
        x[1000], x[20_001] = np.inf, 3e38
    if rank == 1:
        x[30_000] = np.nan
        x[20_000:20_002] = -np.inf, 3e38
    dist.all_reduce(x, group=_using(compression))
    assert sorted({int(i) // BLOCK for i in np.flatnonzero(np.isnan(x))}) == nan
    assert np.flatnonzero(np.isinf(x)).tolist() == infinite
    sums: list[Any] = [None] * 3
    dist.all_gather_object(sums, zlib.crc32(x.tobytes()))
    assert len(set(sums)) == 1


@on_ranks(2, pool="tcp")
def test_option_of_a_group_applies_where_it_can() -> None:
    group: Any = dist.new_group(pg_options=dist.Options(compression="int8"))

    def bits(g: Any, dtype: str, op: str) -> bytes:
        x = (contribution(dist.get_rank(), 30_000, "float64", "normal") * 100).astype(dtype)
        if op == "broadcast":
            dist.broadcast(x, 0, group=g)
        else:
            dist.all_reduce(x, op=op, group=g)
        return x.tobytes()

    assert bits(group, "float32", "AVG") == bits(_using("int8"), "float32", "AVG")
    assert bits(group, "float32", "AVG") != bits(None, "float32", "AVG")
    unchanged = [("int32", "SUM"), ("float16", "SUM"), ("float32", "MAX"), ("float64", "PRODUCT")]
    for case in [*unchanged, ("float32", "broadcast")]:
        assert bits(group, *case) == bits(None, *case), case
    assert group.describe().startswith("unicoll (gloo), compression int8 over sockets")


@on_ranks(2, pool="tcp")
def test_arrays_reduced_together_have_blocks_of_their_own() -> None:
    small, large = np.full(20_100, 1e-3, np.float32), np.full(20_100, 1e3, np.float32)
    dist.all_reduce_coalesced([small, large], group=_using("int8"))
    assert float(np.abs(small / 2e-3 - 1).max()) <= 2 / 254


@on_ranks(3, pool="tcp")
def test_strided_arrays() -> None:
    x = np.ones(80_000, np.float32)
    dist.all_reduce(x[::2], group=_using("int8"))
    assert (x[1::2] == 1).all()
    assert float(np.abs(x[::2] - 3).max()) <= 6 / 254


# --- refused --------------------------------------------------------------------------------------------------------


@on_ranks(2, pool="tcp")
def test_calls_that_cannot_be_compressed_refuse_the_option() -> None:
    """The group is usable after each."""
    view = _using("int8")
    x, many = np.ones(30_000, np.float32), [np.ones(10, np.float32) for _ in range(2)]
    calls: list[Callable[[], Any]] = [
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
    for i, call in enumerate(calls):
        words = "compression='int8' needs an all_reduce by SUM or AVG of float32 or float64"
        with pytest.raises(dist.DistArgumentError, match=words) as raised:
            call()
        assert i or str(raised.value).startswith("all_reduce(int32[30000], SUM): ")
        dist.barrier()


@on_ranks(2, pool="tcp")
def test_groups_that_cannot_compress_refuse_the_option() -> None:
    group: Any = dist.new_group(pg_options={"deterministic": True})
    both = "compression='int8': the reductions of this group are deterministic"
    for call, error, words in (
        (lambda: dist.new_group(pg_options={"compression": "int4"}), dist.DistArgumentError,
         "pg_options: compression='int4' is none of none, bfloat16, int8"),
        (lambda: dist.new_group(pg_options={"compression": 8}), dist.DistTypeError,
         "pg_options: compression must be a str, got 8"),
        (lambda: dist.new_group(pg_options={"compression": "int8", "deterministic": True}), dist.DistArgumentError,
         f"pg_options: {both}"),
        (lambda: group.using(compression="int8"), dist.DistArgumentError, f"using: {both}"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call()


# --- differences and faults -----------------------------------------------------------------------------------------


@pytest.mark.every(n=8)
@pytest.mark.parametrize(
    "env", [TCP, HOSTS, {"UNICOLL_TRANSPORT": "shm"}], ids=lambda env: env["UNICOLL_TRANSPORT"]
)
@pytest.mark.parametrize("how", ["call", "group", "one rank"])
@on_ranks(3)
def test_different_options_raise_mismatch_on_all_ranks(env: dict[str, str], how: str) -> None:
    mine = "int8" if dist.get_rank() == 1 else "bfloat16" if how != "one rank" else "none"
    group: Any = dist.new_group(pg_options={"compression": mine} if how == "group" else None)
    view = group if how == "group" else group.using(compression=mine)
    with pytest.raises(dist.CollectiveMismatchError) as raised:
        view.all_reduce(np.ones(40_000, np.float32), timeout=10)
    for option in ("", ", compression=int8", "" if how == "one rank" else ", compression=bfloat16"):
        assert f"all_reduce(float32[40000], SUM{option}" in str(raised.value)


def _one_is_late() -> None:
    """An all_reduce that rank 1 does not make."""
    group: Any = dist.new_group()
    if dist.get_rank() != 1:
        group.using(compression="int8", timeout=0.5).all_reduce(np.ones(40_000, np.float32))


def test_a_rank_that_does_not_come_is_named() -> None:
    with joined(3, env=TCP) as job:
        job.call(_one_is_late)
        failures_of(job, [0, 2], "OperationTimeoutError", "missing: rank 1")


# --- blocks and chunks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 7, 64, 600])
def test_blocks_begin_at_the_blocks_of_the_codecs_and_chunks_fit(ranks: int) -> None:
    for count in (1, 256, 16_385, 300_001, 20_000_000):
        bounds = compressed._bounds(count, ranks)
        assert (bounds[0], bounds[-1], len(bounds)) == (0, count, ranks + 1)
        assert sorted(bounds) == bounds
        assert all(b % 256 == 0 or b == count for b in bounds)
        longest = max(high - low for low, high in pairwise(bounds))
        chunk = compressed._chunk(longest, ranks)
        assert chunk % 256 == 0
        assert 256 <= chunk <= compressed._limit(ranks)
