"""DistributedSampler: torch's semantics and order, without torch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.programs import python
from unicoll.errors import DistArgumentError
from unicoll.parallel.sampler import DistributedSampler, _randperm

lengths = st.integers(0, 60)
worlds = st.integers(1, 9)
seeds = st.integers(-(2**63), 2**64)


def all_ranks(length: int, world: int, **settings: Any) -> list[list[int]]:
    return [list(DistributedSampler(range(length), world, rank, **settings)) for rank in range(world)]


@pytest.mark.torch
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_indices_equal_torchs(shuffle: bool, drop_last: bool) -> None:
    torchs = pytest.importorskip("torch.utils.data").DistributedSampler
    for length, world in itertools.product(range(1, 30), range(1, 10)):
        for rank in range(world):
            ours = DistributedSampler(range(length), world, rank, shuffle, 7, drop_last)
            theirs = torchs(range(length), world, rank, shuffle, 7, drop_last)
            ours.set_epoch(world)
            theirs.set_epoch(world)
            assert list(ours) == list(theirs)
            sizes = (len(ours), ours.num_samples, ours.total_size)
            assert sizes == (len(theirs), theirs.num_samples, theirs.total_size)


@given(length=lengths, world=worlds, seed=seeds, drop_last=st.booleans())
def test_shuffled_ranks_share_one_permutation(length: int, world: int, seed: int, drop_last: bool) -> None:
    (order,) = all_ranks(length, 1, seed=seed)
    assert sorted(order) == list(range(length))
    ranks = all_ranks(length, world, seed=seed, drop_last=drop_last)
    dealt = np.array(ranks).T.ravel().tolist()
    rounds = length // world if drop_last else -(-length // world)
    assert all(len(indices) == rounds for indices in ranks)
    kept = min(length, len(dealt))
    assert dealt[:kept] == order[:kept]
    assert dealt[kept:] == [order[i % length] for i in range(kept, len(dealt))]


@given(length=st.integers(1, 5), world=st.integers(6, 20))
def test_padding_repeats_more_than_once(length: int, world: int) -> None:
    dealt = [indices[0] for indices in all_ranks(length, world, shuffle=False)]
    assert dealt == [i % length for i in range(world)]


def test_drop_last_makes_ranks_disjoint() -> None:
    ranks = all_ranks(103, 4, drop_last=True)
    together = [i for indices in ranks for i in indices]
    assert len(together) == len(set(together)) == 100


def test_the_order_depends_on_the_sum_of_epoch_and_seed() -> None:
    sampler = DistributedSampler(range(100), 2, 0, seed=5)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    assert second == list(DistributedSampler(range(100), 2, 0, seed=6))
    still = DistributedSampler(range(100), 2, 0, shuffle=False)
    still.set_epoch(7)
    assert list(still) == list(range(0, 100, 2))


@pytest.mark.torch
@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000, 70_001])
def test_the_permutation_is_torchs(count: int) -> None:
    torch = pytest.importorskip("torch")
    for seed in (0, 3, 2**31, 2**32 + 5, 2**64 - 1):
        expected = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        assert _randperm(count, seed).tolist() == expected.tolist()


ORDER_OF_50_SEED_9 = [
    *(20, 0, 32, 16, 42, 28, 45, 25, 21, 19, 48, 36, 9, 7, 10, 1, 26, 23, 6, 27, 33, 46, 4, 47, 34),
    *(15, 22, 3, 2, 8, 5, 38, 30, 44, 29, 35, 31, 11, 43, 17, 39, 49, 40, 12, 14, 13, 37, 24, 18, 41),
]


def test_the_order_does_not_depend_on_torch_being_imported() -> None:
    (order,) = all_ranks(50, 1, seed=9)
    assert order == ORDER_OF_50_SEED_9
    assert all(type(i) is int for i in order)
    program = (
        "import sys; from unicoll.parallel.sampler import DistributedSampler; "
        "assert 'torch' not in sys.modules; print(list(DistributedSampler(range(50), 1, 0, seed=9)))"
    )
    done = python("-c", program)
    assert (done.returncode, done.stdout.strip()) == (0, str(order)), done.stderr


@pytest.mark.parametrize(("world", "rank"), [(0, 0), (4, 4), (4, -1), (-1, 0)])
def test_invalid_ranks_raise(world: int, rank: int) -> None:
    with pytest.raises(DistArgumentError):
        DistributedSampler(range(10), world, rank)


def test_rank_and_size_come_from_the_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unicoll.parallel.sampler.get_rank", lambda: 2)
    monkeypatch.setattr("unicoll.parallel.sampler.get_world_size", lambda: 3)
    sampler = DistributedSampler(range(10), shuffle=False)
    assert (sampler.rank, sampler.num_replicas) == (2, 3)
    assert list(sampler) == [2, 5, 8, 1]


@pytest.mark.torch
def test_torchs_data_loader_accepts_it() -> None:
    data = pytest.importorskip("torch.utils.data")
    torch = pytest.importorskip("torch")
    dataset = data.TensorDataset(torch.arange(23))
    sampler = DistributedSampler(dataset, 3, 1, seed=2)
    loader = data.DataLoader(dataset, batch_size=4, sampler=sampler)
    assert len(loader) == 2
    assert [int(i) for (batch,) in loader for i in batch] == list(sampler)
