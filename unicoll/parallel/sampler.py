"""``DistributedSampler``: torch's sampler for distributed training, without torch."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sized
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from unicoll.api.world import get_rank, get_world_size
from unicoll.errors import DistArgumentError
from unicoll.group.arguments import as_integer

# From this number of samples on torch.randperm uses another algorithm.
_MOST_OF_RANDPERM = (2**32 - 1) // 20


class DistributedSampler:
    """Splits the indices ``0 .. len(dataset) - 1`` evenly over the ranks, reshuffled every epoch.

    Rank ``r`` of ``n`` gets every n-th index of a common order, starting with index ``r``. So that
    all ranks get the same number, the order is first extended to ``total_size`` by repeating it
    from its start, or, with ``drop_last``, shortened. All indices, shuffled ones too, are those of
    ``torch.utils.data.DistributedSampler``; it can be the ``sampler=`` of torch's ``DataLoader``.

    The shuffled order depends only on ``seed + epoch`` and the data set's length: it is that of
    ``torch.randperm``, which is used if torch has been imported. Otherwise the same one is made
    without torch, which takes longer; from 214,748,364 samples on torch is imported, because its
    algorithm is another one there.

    Attributes:
        num_samples: indices that each rank gets per epoch.
        total_size: ``num_samples * num_replicas``.
        epoch: the last argument of :meth:`set_epoch`; initially 0.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Prepare the split; only the length of the data set is read.

        Args:
            dataset: anything with a length, the same on every rank.
            num_replicas: number of ranks that share the data; the default group's size when None.
            rank: this process's rank among them; the rank in the default group when None.
            shuffle: if True, a new random order every epoch, else 0, 1, 2...
            seed: the same on every rank.
            drop_last: if True, omit the last ``len(dataset) % num_replicas`` indices instead of
                repeating indices from the start.

        Raises:
            DistArgumentError: ``num_replicas`` is below 1, or ``rank`` is not in ``0 ..
                num_replicas - 1``.
            NotInitializedError: an argument is None, and there is no default group.
        """
        if num_replicas is None or rank is None:
            num_replicas = get_world_size() if num_replicas is None else num_replicas
            rank = get_rank() if rank is None else rank
        num_replicas = as_integer("DistributedSampler: num_replicas", num_replicas)
        rank = as_integer("DistributedSampler: rank", rank)
        if num_replicas < 1:
            raise DistArgumentError(f"num_replicas is {num_replicas}; it must be at least 1")
        if not 0 <= rank < num_replicas:
            raise DistArgumentError(f"rank {rank} is not in 0 .. {num_replicas - 1}", rank=rank)
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        rounds, rest = divmod(len(dataset), num_replicas)
        self.num_samples = rounds + (rest > 0 and not drop_last)
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        if len(order) != self.total_size:
            order = np.resize(order, self.total_size)
        indices: list[int] = order[self.rank :: self.num_replicas].tolist()
        return iter(indices)

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Set the order of the next iteration; call it before each epoch, with the same number on
        every rank.

        Without it every epoch has the same order.
        """
        self.epoch = epoch

    def _order(self) -> npt.NDArray[np.int64]:
        count = len(self.dataset)
        if not self.shuffle:
            return np.arange(count)
        seed = (self.seed + self.epoch) % 2**64
        torch: Any = sys.modules.get("torch")
        if torch is None:
            if count < _MOST_OF_RANDPERM:
                return _randperm(count, seed)
            torch = import_module("torch")
        generator = torch.Generator().manual_seed(seed)
        order: npt.NDArray[np.int64] = torch.randperm(
            count, generator=generator, device="cpu"
        ).numpy()
        return order


def _randperm(count: int, seed: int) -> npt.NDArray[np.int64]:
    """``torch.randperm`` on the CPU: a Fisher-Yates shuffle by numbers of MT19937, modulo the
    number of places left.

    NumPy's ``RandomState``, whose stream never changes, seeds MT19937 as torch does, by the lowest
    32 bits.
    """
    numbers = np.frombuffer(np.random.RandomState(seed % 2**32).bytes(4 * max(count - 1, 0)), "<u4")
    steps = numbers % np.arange(count, 1, -1, dtype=np.uint32)
    # A list would take five times the memory.
    order = array("q", range(count))
    for place, step in enumerate(steps.data):
        order[place], order[place + step] = order[place + step], order[place]
    return np.array(order, np.int64)
