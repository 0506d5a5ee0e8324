"""The tests of a run of this repository: of large tables a part (:mod:`unicoll.testing.sampling`).

The short run (``UNICOLL_TEST_SHORT=1``) executes the same cases each time: of a test marked ``every(n=3)`` every
third case, from another one on in each test or class; of one marked ``every(n=0)`` none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from unicoll.testing.sampling import drawn, is_on, sample_seed, wants_full

SHORT_VARIABLE = "UNICOLL_TEST_SHORT"


def is_short() -> bool:
    """True if the short run's cases are to run."""
    return is_on(SHORT_VARIABLE) and not wants_full()


def table_seed() -> int:
    """The seed by which this run selects parts of tables."""
    return 0 if is_short() else sample_seed()


def of_this_run(items: list[Any]) -> list[Any]:
    """The collected tests that this run executes, by its environment."""
    return short_run(items) if is_short() else items


def short_run(items: Sequence[Any]) -> list[Any]:
    """The tests of the short run, in their order."""
    tables: defaultdict[str, list[Any]] = defaultdict(list)
    steps: dict[str, int] = {}
    for item in items:
        # A case has the mark of its test and one of its own, in this order.
        numbers = [mark.kwargs["n"] for mark in item.iter_markers("every")]
        if 0 not in numbers:
            name = item.nodeid.partition("[")[0]
            tables[name].append(item)
            steps.setdefault(name, max(numbers, default=1))
    kept: set[str] = set()
    for name, cases in tables.items():
        step = min(steps[name], len(cases))
        kept.update(item.nodeid for item in cases[crc32(name.encode()) % step :: step])
    return [item for item in items if item.nodeid in kept]


def is_drawn(item: Any, seed: int) -> bool:
    """True if this run executes a collected test; tests without the mark always run."""
    marker = item.get_closest_marker("sampled")
    if marker is None:
        return True
    rows, columns, count = marker.args
    values = _values(item, rows, columns)
    row = values[rows].index(item.callspec.params[rows]) if rows else 0
    column = values[columns].index(item.callspec.params[columns])
    turn = getattr(item.cls or item.module, "turn", 0)
    return column in drawn(item.originalname, row, len(values[columns]), count, turn, seed)


def _values(item: Any, rows: str, columns: str) -> dict[str, list[Any]]:
    """The values of each parameter of a test; if rows have different columns, only the columns of the test's row."""
    found: dict[str, list[Any]] = {}
    for marker in item.iter_markers("parametrize"):
        names, values = marker.args[:2]
        if names == (rows, columns):
            found[rows] = list(dict.fromkeys(row for row, _ in values))
            found[columns] = [column for row, column in values if row == item.callspec.params[rows]]
            continue
        found.setdefault(names, [v.values[0] if hasattr(v, "marks") else v for v in values])
    return found
