"""What an operation on a device runs after, over all groups."""

from __future__ import annotations

import pytest

from unicoll.calls.call import Call
from unicoll.calls.ops import OPS
from unicoll.device_collectives.device_order import first_before
from unicoll.device_collectives.in_flight import PendingWork, next_order
from unicoll.devices.device_runtime import LEGACY_STREAM, PER_THREAD_STREAM

USERS, OTHERS, A, B = 10, 11, 20, 30
"""Streams: two of the program, and those of two groups."""

Put = tuple[str, int, int]
"""Name, of which the first letter is the group; stream that it is on, and the stream after whose work it is."""
Wait = tuple[str, int]
"""A stream waits for the end of an operation."""


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ([("a", USERS, USERS), ("b", USERS, USERS), ("c", USERS, USERS)], {"b": "a", "c": "a"}),
        ([("a", USERS, USERS), ("b", OTHERS, OTHERS)], {}),
        ([("a", A, USERS), ("b", B, USERS)], {}),
        ([("a", A, USERS), ("a", USERS), ("b", B, USERS)], {"b": "a"}),
        ([("a", A, USERS), ("b", B, USERS), ("a", USERS), ("c", B, USERS)], {"c": "b"}),
        ([("a", A, USERS), ("a", OTHERS), ("b", B, USERS)], {}),
        ([("a", USERS, USERS), ("b", B, USERS), ("c", B, OTHERS)], {"b": "a", "c": "a"}),
        ([("a1", USERS, USERS), ("a2", OTHERS, OTHERS), ("b", B, OTHERS)], {"a2": "a1", "b": "a1"}),
        ([("a", 0, 0), ("b", B, LEGACY_STREAM)], {"b": "a"}),
        ([("a", PER_THREAD_STREAM, PER_THREAD_STREAM), ("b", PER_THREAD_STREAM, PER_THREAD_STREAM)], {}),
    ],
)
def test_an_operation_runs_after_what_its_streams_wait_for(
    made: list[Put | Wait], expected: dict[str, str]
) -> None:
    works: dict[str, PendingWork] = {}
    for name, *streams in made:
        if len(streams) == 2:
            works[name] = PendingWork((Call(OPS["barrier"], (), (), 60.0),), 1, *streams, False)
        else:
            works[name].waits = (*works[name].waits, (streams[0], next_order()))
    names = {work: name for name, work in works.items()}
    groups = {work: name[0] for name, work in works.items()}
    found = {name: first_before(work, groups) for name, work in works.items()}
    assert {name: names[first] for name, first in found.items() if first is not None} == expected
