"""``DistributedSampler``: torch's sampler for distributed training, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
import numpy.typing as npt

from unicoll.api.world import get_rank, get_world_size
from unicoll.errors import DistArgumentError
from unicoll.group.arguments import as_integer


class DistributedSampler:
    """Splits the indices ``0 .. len(dataset) - 1`` evenly over the ranks, reshuffled every epoch.

    Rank ``r`` of ``n`` gets every n-th index of a common order, starting with index ``r``. So that all ranks get
    the same number, the order is first extended to ``total_size`` by repeating it from its start, or, with
    ``drop_last``, shortened. Lengths, padding, dropping and, without shuffling, the indices are those of
    ``torch.utils.data.DistributedSampler``; it can be the ``sampler=`` of torch's ``DataLoader``.

    The shuffled order depends only on ``seed + epoch`` and the data set's length: it is the stable sort order of
    that many 64-bit numbers of NumPy's Philox generator with the key ``seed + epoch``. A bit generator's stream is
    the same in all NumPy releases and on all machines, so ranks with different NumPy versions agree. torch uses
    another generator: the same seed gives another order there.

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
            drop_last: if True, omit the last ``len(dataset) % num_replicas`` indices instead of repeating indices
                from the start.

        Raises:
            DistArgumentError: ``num_replicas`` is below 1, or ``rank`` is not in ``0 .. num_replicas - 1``.
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
        """Set the order of the next iteration; call it before each epoch, with the same number on every rank.

        Without it every epoch has the same order.
        """
        self.epoch = epoch

    def _order(self) -> npt.NDArray[np.int64]:
        count = len(self.dataset)
        if not self.shuffle:
            return np.arange(count)
        numbers = np.random.Philox(key=(self.seed + self.epoch) % 2**64).random_raw(count)
        return np.argsort(numbers, kind="stable")
