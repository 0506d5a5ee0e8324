"""Selects the test cases of a run: a sample of each large table of parameters, determined by the run's seed.

A test with ``@sampled(rows, columns, count)`` in a class of the conformance suite, or with the mark of that name
elsewhere, is a table: ``rows`` and ``columns`` are names of its parameters (``rows`` is "" if it has columns only). A
run executes ``count`` columns of every row, and every column in some row. Classes that share a suite (one per
transport) select different columns: class 0 takes the first ``count`` columns of a row's random order, class 1 the
next, and so on; n classes together execute every cell once n * count reaches the number of columns. The attribute
``turn`` of a class or a module is its number in this order.

``UNICOLL_TEST_FULL=1`` runs everything. So does naming a case (a test with its parameters in brackets).

``UNICOLL_TEST_HALF=1`` is the run of ``scripts/test --all``: of the remaining cases of each test with parameters it
runs a random half. ``UNICOLL_TEST_SHORT=1`` is that of ``scripts/test``: it runs a quarter, and omits tests marked
``slow``. Tests marked ``in_turn``, which take seconds and have no parameters, form one table over all modules.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

__all__ = [
    "FULL_VARIABLE",
    "HALF_VARIABLE",
    "SEED_VARIABLE",
    "SHORT_VARIABLE",
    "cells",
    "drawn",
    "is_drawn",
    "part",
    "sample_seed",
    "sampled",
    "share",
    "wants_all",
    "wants_full",
]

_Test = TypeVar("_Test", bound=Callable[..., Any])

FULL_VARIABLE = "UNICOLL_TEST_FULL"
HALF_VARIABLE = "UNICOLL_TEST_HALF"
SHORT_VARIABLE = "UNICOLL_TEST_SHORT"
SEED_VARIABLE = "UNICOLL_TEST_SEED"


def sample_seed() -> int:
    """The seed of this run's random samples: from the environment, else random and stored there."""
    return int(os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(1 << 24))))


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "no", "off", "false")


def wants_full() -> bool:
    """True if every case is to run."""
    return _is_on(FULL_VARIABLE)


def share() -> int:
    """One of how many cases of each test this run executes: 1, 2 or 4."""
    return 4 if _is_on(SHORT_VARIABLE) else 2 if _is_on(HALF_VARIABLE) else 1


def part(items: Sequence[Any], seed: int, share: int) -> list[Any]:
    """One of ``share`` of the collected tests of each table, in their order; a share of 4 has no slow tests."""
    tables: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        if share < 4 or item.get_closest_marker("slow") is None:
            in_turn = item.get_closest_marker("in_turn") is not None
            tables["in turn" if in_turn else item.nodeid.partition("[")[0]].append(item)
    kept: set[str] = set()
    for name, table in tables.items():
        count = -(-len(table) // share)
        kept.update(item.nodeid for item in random.Random(f"{seed} {name}").sample(table, count))
    return [item for item in items if item.nodeid in kept]


def sampled(rows: str, columns: str, count: int) -> Callable[[_Test], _Test]:
    """Mark a test of the conformance suite as a table; see the module's docstring."""

    def mark(test: _Test) -> _Test:
        test.table = (rows, columns, count)  # type: ignore[attr-defined]
        return test

    return mark


def wants_all(arguments: Sequence[str]) -> bool:
    """True if every case is to run: by the environment, or because pytest's arguments name single cases."""
    return wants_full() or any("::" in argument and "[" in argument for argument in arguments)


def drawn(table: str, row: int, columns: int, count: int, turn: int, seed: int) -> set[int]:
    """The selected columns of a row.

    Args:
        table: name of the table, equal in all classes that share it.
        row, columns: position of the row, and number of columns.
        count: number of columns per class.
        turn: number of the class.
    """
    order = list(range(columns))
    random.Random(f"{seed} {table}").shuffle(order)
    start = row + turn * count
    return {order[(start + i) % columns] for i in range(min(count, columns))}


def cells(test: Any, axes: Mapping[str, Sequence[Any]], turn: int, seed: int) -> Iterator[tuple[Any, ...]]:
    """The parameter combinations of a marked test that this run executes."""
    rows, columns, count = test.table
    for values in product(*axes.values()):
        cell = dict(zip(axes, values, strict=True))
        row = axes[rows].index(cell[rows]) if rows else 0
        column = axes[columns].index(cell[columns])
        if column in drawn(test.__name__, row, len(axes[columns]), count, turn, seed):
            yield values


def is_drawn(item: Any, seed: int) -> bool:
    """True if this run executes a collected test; tests without the mark always run."""
    marker = item.get_closest_marker("sampled")
    if marker is None:
        return True
    rows, columns, count = marker.args
    values = _values(item)
    row = values[rows].index(item.callspec.params[rows]) if rows else 0
    column = values[columns].index(item.callspec.params[columns])
    turn = getattr(item.cls or item.module, "turn", 0)
    return column in drawn(item.originalname, row, len(values[columns]), count, turn, seed)


def _values(item: Any) -> dict[str, list[Any]]:
    """The values of each parameter of a test."""
    found: dict[str, list[Any]] = {}
    for marker in item.iter_markers("parametrize"):
        names, values = marker.args[:2]
        found.setdefault(names, [v.values[0] if hasattr(v, "marks") else v for v in values])
    return found
