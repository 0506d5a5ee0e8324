"""An exception at each point of a call on this thread, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.support.interrupts import Interrupt, Point, Points, describe
from tests.support.selection import is_short

_RUNS = 2
"""Calls in which the points are collected: what depends on time may differ."""


def interrupt_at(call: Callable[[], Any], point: Point | None) -> tuple[bool, Points]:
    """Make a call with an exception at a point; True if the exception has left the call."""
    points = Points(point)
    try:
        with points:
            call()
    except Interrupt:
        return True, points
    return False, points


def each_point(call: Callable[[], Any], part: int = 1, runs: int = _RUNS) -> Iterator[tuple[str, Point]]:
    """The points of a call, which is made some times first, with descriptions; the short run has a part of them."""
    seen: dict[Point, None] = {}
    for _ in range(runs):
        seen |= dict.fromkeys(interrupt_at(call, None)[1].seen)
    assert seen
    for point in list(seen)[:: part if is_short() else 1]:
        yield describe(point), point
