"""Operations made of other operations, for backends that have no better way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .buffers import Buffer
from .call import Call
from .checks import sign
from .ops import OPS

__all__ = ["merge_all_reduces"]


def merge_all_reduces(calls: Sequence[Call]) -> tuple[Call, ...]:
    """Neighbouring all_reduces of one dtype and operation as one call over a flat copy: one latency, not many."""
    merged: list[Call] = []
    run: list[Call] = []
    for call in calls:
        if run and not _alike(run[-1], call):
            merged.append(_merge(run))
            run = []
        run.append(call)
    merged.append(_merge(run))
    return tuple(merged)


def _alike(a: Call, b: Call) -> bool:
    return (
        a.op is b.op is OPS["all_reduce"]
        and a.dtype is b.dtype
        and a.reduce == b.reduce
        and a.inputs[0].flat is not None
        and b.inputs[0].flat is not None
    )


def _merge(run: list[Call]) -> Call:
    if len(run) == 1:
        return run[0]
    sources: list[Any] = [call.inputs[0].flat for call in run]
    flat = np.concatenate(sources)

    def unpack() -> None:
        start = 0
        for call in run:
            target: Any = call.outputs[0].flat
            target[...] = flat[start : start + target.size]
            start += target.size
            call.write_back()

    first = run[0]
    dtype = first.inputs[0].dtype
    whole = (Buffer([call.inputs[0].owner for call in run], dtype, flat.shape, flat, True, unpack),)
    call = Call(first.op, whole, whole, first.timeout, first.reduce)
    call.signature = hash(tuple(sign(c) for c in run))
    call.site = first.site
    return call
