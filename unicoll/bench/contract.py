"""What a contender is: it opens itself once on all ranks, and gives for each case a call without arguments.

Everything that can be prepared is prepared, so that the timed loop is equally thin for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..types import DType
from .arrays import Family, Unsupported, family
from .operations import Counts, Operation

__all__ = ["Call", "Case", "Contender", "World", "there_and_back"]

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One line of the table for one contender: what to call, on which half, with what.

    Attributes:
        op: the operation.
        half: ``"in_place"`` or ``"out_of_place"``.
        dtype: element type.
        redop: nccl-tests' name of the reduction.
        root: the root.
        counts: elements.
        rank, size: ours, and the number of ranks.
    """

    op: Operation
    half: str
    dtype: DType
    redop: str
    root: int
    counts: Counts
    rank: int
    size: int

    @property
    def at_root(self) -> bool:
        """Whether this rank is the root."""
        return self.rank == self.root


@dataclass(frozen=True)
class World:
    """The job in which contenders open themselves.

    Attributes:
        rank, size: ours, and the number of ranks.
        local_rank: ours among the ranks of this host: the CUDA device to use.
        hosts: the ranks' host names.
        timeout: seconds that an operation may take.
    """

    rank: int
    size: int
    local_rank: int
    hosts: tuple[str, ...]
    timeout: float


class Contender(ABC):
    """One library's way of doing the operations.

    Attributes:
        name: what the user says and the table shows.
        device: ``"cpu"`` or ``"cuda:N"``, known once it is open.
        refusals: exceptions by which it says that it does not have an operation for a type.
    """

    device = "cpu"
    refusals: tuple[type[Exception], ...] = (Unsupported,)

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def reason(self) -> str | None:
        """Why it cannot be measured in this process, or None; nothing is communicated."""

    @abstractmethod
    def open(self, world: World) -> None:
        """Called on all ranks, in the same order."""

    def close(self) -> None:  # noqa: B027 - optional
        """Give everything back; called on all ranks."""

    @abstractmethod
    def describe(self) -> str:
        """How its data moves, in a few words; asked after the first collective."""

    def staging(self) -> int | None:
        """Bytes of staging memory of this rank, or None if it does not say."""
        return None

    def family(self, wanted: str | None, dtype: DType) -> Family:
        """The arrays that it is measured with."""
        return family(wanted, self.device, dtype)

    def halves(self, op: Operation) -> tuple[str, ...]:
        """The halves of nccl-tests' line that it has for an operation."""
        return op.halves

    @abstractmethod
    def call(self, case: Case, send: Any, recv: Any) -> Call:
        """The call of a case on these arrays; in place they are the same, or one is a part of the other.

        Raises:
            Unsupported: it does not have it.
        """

    @abstractmethod
    def begin(self, case: Case, send: Any, recv: Any) -> tuple[Call, Callable[[Any], Any]]:
        """The same in the background: a function that starts it, and one that waits for what the first returned."""


def there_and_back(rank: int, put: Call, take: Call) -> Call:
    """Ping-pong between ranks 0 and 1, from a blocking send and a blocking receive."""

    def ping() -> None:
        put()
        take()

    def pong() -> None:
        take()
        put()

    return (ping, pong)[rank] if rank < 2 else _nothing


def _nothing() -> None:
    pass
