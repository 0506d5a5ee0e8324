"""The tests of a run of this repository: of each table a part, by the run's seed (:mod:`unicoll.testing.sampling`).

Of the remaining cases of each test with parameters, a run executes a random quarter with ``UNICOLL_TEST_QUARTER=1`` or
``UNICOLL_TEST_SHORT=1``, which also omits tests marked ``slow``, and a half with ``UNICOLL_TEST_HALF=1``. Tests marked
``in_turn``, which take seconds and have no parameters, form one table over all modules.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from unicoll.testing.sampling import drawn, is_on

__all__ = ["is_drawn", "of_this_run", "part"]


def of_this_run(items: list[Any], seed: int) -> list[Any]:
    """The collected tests that this run executes, by its environment."""
    if is_on("UNICOLL_TEST_SHORT"):
        return part(items, seed, 4, slow=False)
    share = 4 if is_on("UNICOLL_TEST_QUARTER") else 2 if is_on("UNICOLL_TEST_HALF") else 1
    return part(items, seed, share) if share > 1 else items


def part(items: Sequence[Any], seed: int, share: int, slow: bool = True) -> list[Any]:
    """One of ``share`` of the collected tests of each table, in their order; without ``slow`` ones if it is False."""
    tables: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        if slow or item.get_closest_marker("slow") is None:
            in_turn = item.get_closest_marker("in_turn") is not None
            tables["in turn" if in_turn else item.nodeid.partition("[")[0]].append(item)
    kept: set[str] = set()
    for name, table in tables.items():
        count = -(-len(table) // share)
        kept.update(item.nodeid for item in random.Random(f"{seed} {name}").sample(table, count))
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
