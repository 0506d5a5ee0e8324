"""Merging of neighbouring calls of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unicoll.arrays.conversion import Buffer
from unicoll.calls.call import Call
from unicoll.calls.ops import OPS
from unicoll.calls.validation import sign


def merge_all_reduces(calls: Sequence[Call]) -> tuple[Call, ...]:
    """The calls with neighbouring all_reduces of one dtype and reduction merged over a flat copy,
    as one operation."""
    if len(calls) == 1:
        return tuple(calls)
    merged: list[Call] = []
    run: list[Call] = []
    for call in calls:
        if run and not _mergeable(run[-1], call):
            merged.append(_merge(run))
            run = []
        run.append(call)
    merged.append(_merge(run))
    return tuple(merged)


def _mergeable(a: Call, b: Call) -> bool:
    return (
        a.op is b.op is OPS["all_reduce"]
        and a.dtype is b.dtype
        and a.reduce == b.reduce
        # A block of a codec must not have elements of two arrays.
        and not a.compression
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
            # The batch has one number, that of the merged call: the user's calls get it for the
            # recorder.
            call.seq = merged.seq
            target: Any = call.outputs[0].flat
            target[...] = flat[start : start + target.size]
            start += target.size
            call.write_back()

    first = run[0]
    dtype = first.inputs[0].dtype
    whole = (Buffer([call.inputs[0].owner for call in run], dtype, flat.shape, flat, True, unpack),)
    merged = Call(first.op, whole, whole, first.timeout, first.reduce)
    # The signature covers each call, so ranks that have merged other arrays of the same total size
    # differ.
    merged.signature = hash(tuple(sign(c) for c in run))
    merged.site = first.site
    return merged
