"""Which samples of a data set each rank reads: ``DistributedSampler`` as in torch, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np

from unicoll.errors import DistArgumentError
from unicoll.world import get_rank, get_world_size

__all__ = ["DistributedSampler"]


class DistributedSampler:
    """Splits the indices ``0 .. len(dataset) - 1`` evenly over the ranks, reshuffled every epoch.

    Rank ``r`` of ``n`` gets every n-th index of one common order, from the r-th on. So that all ranks get
    equally many, the order is first made ``total_size`` long: lengthened by repeating it from its start, or,
    with ``drop_last``, shortened. Lengths, padding, dropping and, without shuffling, the very indices are
    those of ``torch.utils.data.DistributedSampler``; it serves as ``sampler=`` of torch's ``DataLoader`` too.

    The shuffled order depends on ``seed + epoch`` and the data set's length alone: it is the stable sort
    order of that many 64-bit numbers of NumPy's Philox generator, keyed with ``seed + epoch``. NumPy keeps a
    bit generator's stream the same across releases and machines, so that ranks with different NumPy versions
    still agree. torch draws from another generator: the same seed gives another, equally random order there.

    Attributes:
        num_samples: indices that each rank gets per epoch.
        total_size: ``num_samples * num_replicas``.
        epoch: the number last given to :meth:`set_epoch`, 0 before.
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
        """Prepare the split; nothing of the data set but its length is read.

        Args:
            dataset: anything with a length, the same on every rank.
            num_replicas: how many ranks share the data; the default group's size when None.
            rank: this rank among them; the rank in the default group when None.
            shuffle: a new random order every epoch, instead of 0, 1, 2...
            seed: the same on every rank.
            drop_last: leave out the tail that does not fill a whole round of ranks, instead of repeating from
                the start.

        Raises:
            DistArgumentError: ``num_replicas`` is below 1, or ``rank`` is not in ``0 .. num_replicas - 1``.
            NotInitializedError: a number was left to the default group, and there is none.
        """
        if num_replicas is None or rank is None:
            num_replicas = get_world_size() if num_replicas is None else num_replicas
            rank = get_rank() if rank is None else rank
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
        """Choose the order of the next iteration: the same number on every rank, before each epoch.

        Without it every epoch has the same order.
        """
        self.epoch = epoch

    def _order(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        count = len(self.dataset)
        if not self.shuffle:
            return np.arange(count)
        numbers = np.random.Philox(key=(self.seed + self.epoch) % 2**64).random_raw(count)
        return np.argsort(numbers, kind="stable")
