"""Compressed all_reduces: error bounds, equal bits on all ranks, what is refused, differences between ranks, faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import pytest

from gloo_fallback.algorithms import compressed
from tests.gloo import compressed_jobs as jobs
from tests.support.ranks import Pool, ProcessJob, joined, pools, run_ranks

Pools = Callable[[int], Pool]
TCP = {"UNICOLL_TRANSPORT": "tcp"}
HOSTS = {"UNICOLL_TRANSPORT": "hierarchical"}


@pytest.fixture(scope="module")
def tcp() -> Iterator[Pools]:
    with pools(partial(ProcessJob, env=TCP)) as made:
        yield made


@pytest.fixture(scope="module")
def hosts() -> Iterator[Pools]:
    with pools(partial(ProcessJob, env=HOSTS)) as made:
        yield made


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


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("compression", ["bfloat16", "int8"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_errors_over_sockets(tcp: Pools, size: int, compression: str, dtype: str) -> None:
    check_reductions(tcp(size).run(jobs.reductions, compression, dtype, 1))


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("compression", ["bfloat16", "int8"])
@pytest.mark.parametrize("size", [3, 4])
def test_errors_between_hosts(hosts: Pools, size: int, compression: str, dtype: str) -> None:
    check_reductions(hosts(size).run(jobs.reductions, compression, dtype, 2))


def test_within_a_host_nothing_is_compressed(pool: Pools) -> None:
    for _, _, fraction in pool(2).run(jobs.reductions, "int8", "float32", 1)[0]:
        assert fraction < 1e-3


@pytest.mark.every(2)
@pytest.mark.parametrize("channel", ["mac", "tls"])
def test_protected_connections(channel: str) -> None:
    env = {**TCP, "UNICOLL_CHANNEL": channel, "UNICOLL_SECRET": "the secret of this test"}
    check_reductions(run_ranks(3, jobs.reductions, "int8", "float32", 1, env=env))


def test_small_arrays_and_none_are_exact(tcp: Pools, hosts: Pools) -> None:
    assert tcp(2).run(jobs.exact) == [[True] * 5] * 2
    assert hosts(4).run(jobs.exact) == [[True] * 5] * 4


@pytest.mark.parametrize("compression", ["bfloat16", "int8"])
def test_numbers_that_are_not_finite_stay_visible(tcp: Pools, compression: str) -> None:
    by_rank = tcp(3).run(jobs.special, compression)
    assert by_rank == [by_rank[0]] * 3
    nan, _, infinite = by_rank[0]
    if compression == "int8":
        assert nan == [1000 // 256, 20_000 // 256, 30_000 // 256]
        assert infinite == []
    else:
        assert nan == [30_000 // 256]
        assert infinite == [1000, 20_000, 20_001]


def test_option_of_a_group_applies_where_it_can(tcp: Pools) -> None:
    for found in tcp(2).run(jobs.option_of_a_group):
        assert found["as of a call"]
        assert found["changed"]
        assert found["unchanged"] == [True] * 4
        assert found["broadcast"]
        assert found["described"].startswith("unicoll (gloo), compression int8 over sockets")


def test_arrays_reduced_together_have_blocks_of_their_own(tcp: Pools) -> None:
    assert max(tcp(2).run(jobs.coalesced)) <= 2 / 254


def test_strided_arrays(tcp: Pools) -> None:
    assert max(tcp(3).run(jobs.strided)) <= 6 / 254


# --- refused --------------------------------------------------------------------------------------------------------


def test_calls_that_cannot_be_compressed_refuse_the_option(tcp: Pools) -> None:
    for found in tcp(2).run(jobs.refused):
        assert [one.type for one in found] == ["DistArgumentError"] * 9
        words = "compression='int8' needs an all_reduce by SUM or AVG of float32 or float64"
        assert [words in one.message for one in found] == [True] * 9, found
        assert found[0].message.startswith("all_reduce(int32[30000], SUM): ")


def test_groups_that_cannot_compress_refuse_the_option(tcp: Pools) -> None:
    for unknown, number, both, call in tcp(2).run(jobs.refused_groups):
        assert (unknown.type, number.type) == ("DistArgumentError", "DistTypeError")
        assert "pg_options: compression='int4' is none of none, bfloat16, int8" in unknown.message
        assert "pg_options: compression must be a str, got 8" in number.message
        assert (both.type, call.type) == ("DistArgumentError",) * 2
        assert (
            "pg_options: compression='int8': the reductions of this group are deterministic" in both.message
        )
        assert "using: compression='int8': the reductions of this group are deterministic" in call.message


# --- differences and faults -----------------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "env", [TCP, HOSTS, {"UNICOLL_TRANSPORT": "shm"}], ids=["tcp", "hierarchical", "shm"]
)
@pytest.mark.parametrize("how", ["call", "group"])
def test_different_options_raise_mismatch_on_all_ranks(env: dict[str, str], how: str) -> None:
    with joined(3, env=env) as job:
        job.call(jobs.options_differ, how)
        for outcome in job.collect():
            assert outcome.failure is not None
            assert outcome.failure.type == "CollectiveMismatchError"
            assert "all_reduce(float32[40000], SUM, compression=int8)" in outcome.failure.message
            assert "all_reduce(float32[40000], SUM, compression=bfloat16)" in outcome.failure.message


def test_an_option_on_one_rank_raises_mismatch_on_all_ranks() -> None:
    with joined(3, env=TCP) as job:
        job.call(jobs.only_on_one_rank)
        for outcome in job.collect():
            assert outcome.failure is not None
            assert outcome.failure.type == "CollectiveMismatchError"


def test_a_rank_that_does_not_come_is_named() -> None:
    with joined(3, env=TCP) as job:
        job.call(jobs.one_is_late)
        for outcome in job.collect(30, [0, 2]):
            assert outcome.failure is not None
            assert outcome.failure.type == "OperationTimeoutError"
            assert "missing: rank 1" in outcome.failure.message


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
