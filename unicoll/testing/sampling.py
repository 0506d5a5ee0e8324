"""Selects the test cases of a run: a part of each large table of parameters.

A test with ``@sampled(rows, columns, count)`` in a class of the conformance suite, or with the mark
of that name elsewhere, is a table: ``rows`` and ``columns`` are names of its parameters (``rows``
is "" if it has columns only). A run executes ``count`` columns of every row, and every column in
some row. Classes that share a suite (one per transport) select different columns: class 0 takes the
first ``count`` columns of a row's random order, class 1 the next, and so on; n classes together
execute every cell once n * count reaches the number of columns. The attribute ``turn`` of a class
or a module is its number in this order.

``UNICOLL_TEST_FULL=1`` runs everything. So does naming a case (a test with its parameters in
brackets).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

_Test = TypeVar("_Test", bound=Callable[..., Any])

FULL_VARIABLE = "UNICOLL_TEST_FULL"
SEED_VARIABLE = "UNICOLL_TEST_SEED"


def sample_seed() -> int:
    """The seed of this run's random samples: from the environment, else random and stored there."""
    return int(os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(1 << 24))))


def is_on(variable: str) -> bool:
    """True if an environment variable that selects tests is set."""
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "no", "off", "false")


def wants_full() -> bool:
    """True if every case is to run."""
    return is_on(FULL_VARIABLE)


def sampled(rows: str, columns: str, count: int) -> Callable[[_Test], _Test]:
    """Mark a test of the conformance suite as a table; see the module's docstring."""

    def mark(test: _Test) -> _Test:
        test.table = (rows, columns, count)  # type: ignore[attr-defined]
        return test

    return mark


def wants_all(arguments: Sequence[str]) -> bool:
    """True if every case is to run: by the environment, or because pytest's arguments name single
    cases."""
    return wants_full() or any("::" in argument and "[" in argument for argument in arguments)


def drawn(table: str, row: int, columns: int, count: int, turn: int, seed: int) -> set[int]:
    """The selected columns of a row, ``count`` of them; ``table`` is equal in all classes that
    share a table."""
    order = list(range(columns))
    random.Random(f"{seed} {table}").shuffle(order)
    start = row + turn * count
    return {order[(start + i) % columns] for i in range(min(count, columns))}


def cells(
    test: Any, axes: Mapping[str, Sequence[Any]], turn: int, seed: int
) -> Iterator[tuple[Any, ...]]:
    """The parameter combinations of a marked test that this run executes."""
    rows, columns, count = test.table
    for values in product(*axes.values()):
        cell = dict(zip(axes, values, strict=True))
        row = axes[rows].index(cell[rows]) if rows else 0
        column = axes[columns].index(cell[columns])
        if column in drawn(test.__name__, row, len(axes[columns]), count, turn, seed):
            yield values
