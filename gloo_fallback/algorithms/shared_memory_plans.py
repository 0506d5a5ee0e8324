"""What small collectives in shared memory need besides their arrays, kept for each kind of call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gloo_fallback.shm.slots import Slots
from unicoll.backend import Call

WHOLE = 1 << 16
"""Arrays up to this size are reduced entirely by every rank, in one step; all blocks together up to this size are moved
in one step with a plan."""
_MAX_PLANS = 512


class Plan(NamedTuple):
    """What a small operation needs besides its arrays.

    Attributes:
        write: the views of this rank's slot that get its data; None if the arrays are processed in chunks.
        read: the views of the ranks' slots that have the data after the step.
        kernel: of a reduction.
        value: see :func:`~unicoll.backend.size_agreement.shape_hash`.
    """

    write: Any
    read: Any
    kernel: Any = None
    value: int = 0


CHUNKED = Plan(None, None)


def make_plan(slots: Slots, call: Call, make: Callable[[Slots, Call], Any]) -> Any:
    """Make the plan of a call for its next step, and keep it under the call's kind."""
    found = make(slots, call)
    if call.kind is not None:
        if len(slots.plans) >= _MAX_PLANS:
            slots.plans.clear()
        slots.plans[call.kind, slots.step & 1] = found
    return found
