"""Ranks that run out of inputs at different times: what ``DistributedDataParallel.join`` has them tell each other.

Before each forward pass, and before the first bucket of each backward pass, every rank tells the others what it is
about to do, in one small all_gather. A rank without further inputs waits for what they tell, and takes part in it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch

from unicoll.errors import DistError
from unicoll.group import ProcessGroup

__all__ = ["Round", "Uneven"]


class _Next(IntEnum):
    """What a rank is about to do."""

    NOTHING = 0  # it has run out of inputs
    NOTHING_SINCE = 1  # the same, since what the others told last
    FORWARD = 2
    SPREAD = 3  # a forward pass before which buffers are spread
    BACKWARD = 4


_WORDS = {
    _Next.FORWARD: "a forward pass",
    _Next.SPREAD: "a forward pass with buffers to be spread",
    _Next.BACKWARD: "a backward pass",
}


class Round:
    """What all ranks are about to do, on the device still, perhaps.

    Args:
        codes: int32, one for each rank.
        work: the operation that fills them in, None if that is over.
        divides_by_initial: whether averages are to count ranks that have run out, too.
        group: that all ranks are of.
    """

    def __init__(self, codes: torch.Tensor, work: Any, divides_by_initial: bool, group: ProcessGroup) -> None:
        self._codes = codes
        self._work = work
        self._divides_by_initial = divides_by_initial
        self._group = group

    def read(self) -> list[_Next]:
        """What each rank told. On a CUDA device this waits for it.

        Raises:
            DistError: ranks that go on are about to do different things.
        """
        if self._work is not None:
            self._work.wait()
        told = [_Next(code) for code in self._codes.tolist()]
        going_on = {rank: what for rank, what in enumerate(told) if what in _WORDS}
        if len(set(going_on.values())) > 1:
            found = ", ".join(
                f"rank {self._group.global_rank(rank)} has come to {_WORDS[what]}"
                for rank, what in going_on.items()
            )
            raise DistError(
                f"join: {found}; ranks that have inputs must make the same passes",
                group=self._group.name,
            )
        return told

    def factor(self) -> float:
        """By what the average over all ranks is to be multiplied."""
        if self._divides_by_initial:
            return 1.0
        told = self.read()
        return len(told) / sum(what in _WORDS for what in told)


class Uneven:
    """This rank's part in a group whose ranks may run out of inputs at different times.

    Args:
        group: the ranks.
        device: where what they tell travels.
        divides_by_initial: averages divide by the number of all ranks, not of those that still have inputs.
        throws: all ranks raise as soon as one has run out.
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, divides_by_initial: bool, throws: bool
    ) -> None:
        self._group = group
        self._device = device
        self._divides_by_initial = divides_by_initial
        self._throws = throws

    def forward_begins(self, spreads: bool) -> int:
        """This rank has another input. The rank in the group whose buffers count, if ``spreads``.

        Raises:
            DistError: another rank has run out of inputs, where that is to be raised; or makes another pass.
        """
        told = self._tell(_Next.SPREAD if spreads else _Next.FORWARD)
        self._check(told)
        return max(r for r, what in enumerate(told.read()) if what in _WORDS) if spreads else 0

    def backward_begins(self) -> Round:
        """This rank is about to average gradients.

        Raises:
            DistError: as :meth:`forward_begins`.
        """
        told = self._tell(_Next.BACKWARD)
        self._check(told)
        return told

    def follow(self, forward: Callable[[int], None], backward: Callable[[], None]) -> int:
        """This rank has run out of inputs: take part in what the others do until all have.

        Args:
            forward: takes part in spreading the buffers of a rank in the group.
            backward: takes part in averaging.

        Returns:
            Of the ranks that ran out last, the highest.

        Raises:
            DistError: others go on, where that is to be raised.
        """
        mine = _Next.NOTHING_SINCE
        while True:
            told = self._tell(mine).read()
            going_on = [rank for rank, what in enumerate(told) if what in _WORDS]
            if not going_on:
                return max(rank for rank, what in enumerate(told) if what is _Next.NOTHING_SINCE)
            if self._throws:
                names = ", ".join(str(self._group.global_rank(rank)) for rank in going_on)
                own = self._group.global_rank(self._group.rank())
                raise self._error(f"Rank {own} exhausted all inputs. Ranks that have more: {names}", own)
            mine = _Next.NOTHING
            what = told[going_on[0]]
            if what is _Next.SPREAD:
                forward(going_on[-1])
            elif what is _Next.BACKWARD:
                backward()

    def _tell(self, what: _Next) -> Round:
        group = self._group
        mine = torch.full((1,), int(what), dtype=torch.int32, device=self._device)
        codes = mine.new_empty(group.size())
        at_once = self._device.type == "cpu"  # on a GPU the host need not wait unless it has to know
        work = group.all_gather_into_tensor(codes, mine, async_op=not at_once)
        return Round(codes, work, self._divides_by_initial, group)

    def _check(self, told: Round) -> None:
        if self._throws:
            out = [rank for rank, what in enumerate(told.read()) if what not in _WORDS]
            if out:
                names = ", ".join(str(self._group.global_rank(rank)) for rank in out)
                raise self._error(
                    "Detected at least one rank that exhausted inputs. Throwing across all ranks. "
                    f"Ranks without further inputs: {names}",
                    self._group.global_rank(out[0]),
                )
        elif self._device.type == "cpu":
            told.read()

    def _error(self, text: str, rank: int) -> DistError:
        return DistError(text, group=self._group.name, rank=rank)
