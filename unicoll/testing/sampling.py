"""Which cells of the large tables a run does, drawn from the run's seed.

A test with ``@sampled(rows, columns, count)`` in a class of the conformance suite, or with the mark of that name
elsewhere, is a table: ``rows`` and ``columns`` are names of its parameters ("" where it has columns only). A run does
``count`` columns of every row, and every column in some row. The classes that share a suite (one for each transport)
take turns: class 0 has the first ``count`` columns of a row's own order, class 1 the next, so that together they miss
as little as possible: with ``count`` columns for each of n classes, every cell is done by some class once n * count
reaches the number of columns. A class, or a module, says its turn with an attribute ``turn``.

``UNICOLL_TEST_FULL=1`` does everything. So does naming a cell (a test with its parameters in brackets).

``UNICOLL_TEST_SHORT=1`` is the short run of ``scripts/test``: of what is left of each test with parameters it does a
quarter, drawn from the seed, and it leaves out tests marked ``slow``.
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
    "SHORT_VARIABLE",
    "cells",
    "drawn",
    "is_drawn",
    "quarter",
    "sampled",
    "wants_all",
    "wants_quarter",
]

_Test = TypeVar("_Test", bound=Callable[..., Any])

FULL_VARIABLE = "UNICOLL_TEST_FULL"
SHORT_VARIABLE = "UNICOLL_TEST_SHORT"
_SHARE = 4


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "no", "off", "false")


def wants_quarter() -> bool:
    """Whether this is a short run."""
    return _is_on(SHORT_VARIABLE)


def quarter(items: Sequence[Any], seed: int) -> list[Any]:
    """The tests of a short run, out of those that pytest has collected, in their order."""
    tables: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            tables[item.nodeid.partition("[")[0]].append(item)
    kept: set[str] = set()
    for name, table in tables.items():
        count = -(-len(table) // _SHARE)
        kept.update(item.nodeid for item in random.Random(f"{seed} {name}").sample(table, count))
    return [item for item in items if item.nodeid in kept]


def sampled(rows: str, columns: str, count: int) -> Callable[[_Test], _Test]:
    """Mark a test of the conformance suite as a table; see above."""

    def mark(test: _Test) -> _Test:
        test.table = (rows, columns, count)  # type: ignore[attr-defined]
        return test

    return mark


def wants_all(arguments: Sequence[str]) -> bool:
    """Whether nothing is to be left out: it was asked for, or pytest's arguments name single cells."""
    return _is_on(FULL_VARIABLE) or any("::" in argument and "[" in argument for argument in arguments)


def drawn(table: str, row: int, columns: int, count: int, turn: int, seed: int) -> set[int]:
    """The columns that are done of a row.

    Args:
        table: name of the table, equal for all classes that have it.
        row, columns: position of the row, and number of columns.
        count: of columns that one class does.
        turn: of the class.
    """
    order = list(range(columns))
    random.Random(f"{seed} {table}").shuffle(order)
    start = row + turn * count
    return {order[(start + i) % columns] for i in range(min(count, columns))}


def cells(test: Any, axes: Mapping[str, Sequence[Any]], turn: int, seed: int) -> Iterator[tuple[Any, ...]]:
    """The combinations of a marked test's parameters that are done in this run."""
    rows, columns, count = test.table
    for values in product(*axes.values()):
        cell = dict(zip(axes, values, strict=True))
        row = axes[rows].index(cell[rows]) if rows else 0
        column = axes[columns].index(cell[columns])
        if column in drawn(test.__name__, row, len(axes[columns]), count, turn, seed):
            yield values


def is_drawn(item: Any, seed: int) -> bool:
    """Whether a test with the mark, which pytest has collected, is done in this run."""
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
