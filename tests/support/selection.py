"""The tests of a run of this repository: of each table a part, by the run's seed (:mod:`unicoll.testing.sampling`).

``UNICOLL_TEST_HALF=1`` is the run of ``scripts/test --all``: of the remaining cases of each test with parameters it
runs a random half. ``UNICOLL_TEST_SHORT=1`` is that of ``scripts/test``: it runs a quarter, and omits tests marked
``slow``. Tests marked ``in_turn``, which take seconds and have no parameters, form one table over all modules.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from unicoll.testing.sampling import drawn, is_on

__all__ = ["is_drawn", "part", "share"]


def share() -> int:
    """One of how many cases of each test this run executes: 1, 2 or 4."""
    return 4 if is_on("UNICOLL_TEST_SHORT") else 2 if is_on("UNICOLL_TEST_HALF") else 1


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
