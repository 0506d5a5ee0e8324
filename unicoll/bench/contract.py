"""The interface of a contender: it is opened once on all ranks and returns a call without arguments
for each case.

All preparation happens before the timed loop, so that the loop has the same overhead for every
contender.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import unicoll as dist
from unicoll.arrays.types import DType
from unicoll.bench.arrays import BenchArrays, Unsupported, family
from unicoll.bench.operations import CallRank, Counts, Operation
from unicoll.devices import runtimes

Call = Callable[[], Any]
Made = TypeVar("Made")


@dataclass(frozen=True)
class BenchCase:
    """One measurement of one contender on this rank; ``redop`` is nccl-tests' name of the
    reduction."""

    op: Operation
    placement: str
    dtype: DType
    redop: str
    root: int
    counts: Counts
    rank: int
    size: int

    @property
    def call_rank(self) -> CallRank:
        return CallRank(self.rank, self.size, self.root)

    @property
    def at_root(self) -> bool:
        return self.rank == self.root


@dataclass(frozen=True)
class BenchJob:
    """The job in which contenders are opened.

    ``local_rank`` selects the device, ``hosts`` has the host name of each rank, ``timeout`` is that
    of an operation in seconds, and ``compression`` that of unicoll's all_reduce.
    """

    rank: int
    size: int
    local_rank: int
    hosts: tuple[str, ...]
    timeout: float
    compression: str = ""


class Contender(ABC):
    """One library that is measured.

    Attributes:
        name: its name on the command line and in the table.
        device: ``"cpu"``, ``"cuda:N"`` or ``"xpu:N"``, set by :meth:`open`.
        refusals: exceptions that mean that it does not support an operation for a type.
        compression: of what it sends, set by :meth:`open`; "" if its results are exact.
        checked: False if it does not compute the operation's result, so that there is nothing to
            check.
    """

    device = "cpu"
    compression = ""
    checked = True
    refusals: tuple[type[Exception], ...] = (Unsupported,)

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def reason(self) -> str | None:
        """The reason why it cannot be measured in this process, or None; called without
        communication."""

    @abstractmethod
    def open(self, job: BenchJob) -> None:
        """Set up the library; called on all ranks, in the same order."""

    def close(self) -> None:  # noqa: B027 - optional
        """Release all resources; called on all ranks."""

    @abstractmethod
    def describe(self) -> str:
        """A short description of its transport; called after the first collective."""

    def staging(self) -> int | None:
        """Bytes of staging memory of this rank, or None if unknown."""
        return None

    def family(self, array_name: str | None, dtype: DType) -> BenchArrays:
        """The array family that it is measured with."""
        return family(array_name, self.device, dtype)

    def placements(self, op: Operation) -> tuple[str, ...]:
        """The placements (in place, out of place) that it supports for an operation."""
        return op.placements

    @abstractmethod
    def call(self, case: BenchCase, send: Any, recv: Any) -> Call:
        """The call for a case on these arrays; in place they are the same array, or one is a part
        of the other.

        Raises:
            Unsupported: the library does not support the case.
        """

    def start(self, case: BenchCase, send: Any, recv: Any) -> tuple[Call, Callable[[Any], Any]]:
        """The asynchronous form: a function that starts the operation, and one that waits for its
        result."""
        raise Unsupported(f"{self.name} is not measured with --overlap")


def use_device(job: BenchJob, kind: str = "cuda") -> str:
    """Select this rank's device in its runtime and the array libraries; returns ``"cuda:N"`` or
    ``"xpu:N"``."""
    runtime = runtimes.runtime(kind)
    index = job.local_rank % runtime.device_count()
    runtime.set_device(index)
    if find_spec("torch") is not None:
        module = getattr(import_module("torch"), kind)
        if module.is_available():
            module.set_device(index)
    if kind == "cuda" and "cupy" in sys.modules:
        sys.modules["cupy"].cuda.Device(index).use()
    return f"{kind}:{index}"


def ping_pong(rank: int, send: Call, recv: Call) -> Call:
    """A ping-pong between ranks 0 and 1, made of a blocking send and a blocking receive."""

    def ping() -> None:
        send()
        recv()

    def pong() -> None:
        recv()
        send()

    return (ping, pong)[rank] if rank < 2 else lambda: None


def agree(problem: str | None) -> str | None:
    """The problem of the lowest rank that has one, returned on all ranks; None if no rank has a
    problem."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, problem)
    return next((p for p in gathered if p is not None), None)


def agreed(
    make: Callable[[], Made], refusals: tuple[type[Exception], ...]
) -> tuple[Made | None, str | None]:
    """What a function returns, or why it was refused on the lowest rank that refused; consistent on
    all ranks."""
    made, problem = None, None
    try:
        made = make()
    except refusals as e:
        problem = _message(e)
    common = agree(problem)
    return (made, None) if common is None else (None, common)


def _message(error: Exception) -> str:
    first = str(error).strip().split("\n")[0]
    return first if type(error).__name__ == "Unsupported" else f"{type(error).__name__}: {first}"
