"""Hooks around the calls of groups, and ready-made ones: a check for NaN and infinity, and ranges
in profilers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from unicoll.api import world
from unicoll.arrays.families import nonfinite
from unicoll.errors import BackendUnavailableError, DistArgumentError, DistTypeError
from unicoll.group.call_hooks import Hook, HookedCall, add_to_job


def add_hook(
    before: Callable[[HookedCall], None] | None = None,
    after: Callable[[HookedCall], None] | None = None,
    *,
    returned: Callable[[HookedCall], None] | None = None,
    waited: Callable[[HookedCall, float], None] | None = None,
    group: Any = None,
) -> Hook:
    """Have functions called for each collective and message.

    Without hooks calls are as fast as if there were none at all. Several hooks are called in the
    order in which they were added. A hook must not make calls of the group itself.

    Args:
        before: called with a :class:`HookedCall`, which has the arrays, before the call starts. If
            it raises, nothing is sent and the caller gets the exception; the other ranks wait for
            this one. The hooks that were called before it see the call end with that error.
        after: called when the call has ended, with or without an error. For an asynchronous call
            that is another thread; for one that NCCL has enqueued it is the watchdog's, within
            about 0.1 s. Exceptions are logged.
        returned: called on the caller's thread when the call returns, with or without an exception;
            an asynchronous call, or one on a GPU, has then been enqueued. Exceptions are logged.
        waited: called with the seconds for which a thread of the program was blocked: in a blocking
            call, or each time in ``Work.wait`` or ``Work.synchronize``.
        group: whose calls; None means all groups of the job, also later ones.

    Returns:
        The hook; ``remove()``, or the end of ``with``, ends it.

    Raises:
        NotInitializedError: there is no default group.
        DistArgumentError: no function is given, or this process is not in the group.
        DistTypeError: what is given is no function.
    """
    functions = (before, after, returned, waited)
    if functions == (None,) * 4:
        raise DistArgumentError("add_hook: give before, after, returned or waited")
    for given in functions:
        if given is not None and not callable(given):
            raise DistTypeError(f"add_hook: {given!r} is not a function")
    if group is not None:
        dispatcher = world.member(group, "add_hook").base._dispatcher
        return dispatcher.validation.add_hook(Hook(*functions))
    return add_to_job(world.current("add_hook"), Hook(*functions))


# --- NaN and infinity -----------------------------------------------------------------------------


def check_finite(group: Any = None) -> Hook:
    """Refuse arrays with NaN or infinite elements before they are sent, with the rank and the line
    of the caller.

    Arrays on a GPU are checked there, and the host waits for the result. Raises as :func:`add_hook`
    does; a call with such an array raises DistArgumentError, and nothing of it is sent.
    """
    return add_hook(_refuse_nonfinite, group=group)


def _refuse_nonfinite(call: HookedCall) -> None:
    for number, array in enumerate(call.inputs):
        counted = nonfinite(array)
        if counted is None:
            continue
        nans, infinite, size = counted
        if nans or infinite:
            which = f"input {number}" if len(call.inputs) > 1 else "the input"
            raise DistArgumentError(
                f"{call} on group {call.group!r}: {which} of rank {call.rank} has {nans} NaN and"
                f" {infinite} infinite of {size} elements, at {call.site}",
                op=call.op,
                group=call.group,
            )


MakeRange = Callable[[str], Callable[[], None]]
"""Begins a range and returns the function that ends it."""


# --- profilers ------------------------------------------------------------------------------------


def annotate(*, nvtx: bool | None = None, torch: bool | None = None, group: Any = None) -> Hook:
    """Show each call as a range in Nsight Systems (NVTX) and in ``torch.profiler``.

    Calls are ranges of ``torch.profiler`` without this, too, from the first call with a torch
    tensor on while it runs.

    A range is ``unicoll::all_reduce`` with the group, the arrays and the line of the caller. It
    lasts as long as the caller is in the call: for an asynchronous call, and for one on a GPU, that
    is the time to enqueue it.

    Args:
        nvtx: None: if the package ``nvtx`` is installed.
        torch: None: if torch has been imported.
        group: as for :func:`add_hook`.

    Raises:
        BackendUnavailableError: nvtx is not installed and torch not imported, or a requested one
            cannot be imported.
    """
    makers: list[MakeRange] = []
    if nvtx or nvtx is None:
        made = _nvtx_ranges(required=bool(nvtx))
        makers += [made] if made is not None else []
    if torch or (torch is None and "torch" in sys.modules):
        try:
            import_module("torch.autograd.profiler")
        except ImportError as e:
            raise BackendUnavailableError(f"annotate: torch cannot be imported: {e}") from None
        makers.append(_torch_ranges)
    if not makers:
        raise BackendUnavailableError(
            "annotate: nothing records ranges: the package nvtx is not installed (or nvtx=False),"
            " and torch has not been imported (or torch=False)"
        )
    # Several threads may be in calls at once, each with open ranges of its own.
    ranges = threading.local()

    def before(call: HookedCall) -> None:
        text = f"unicoll::{call.op} {call} on {call.group!r} at {call.site}"
        made = [make(text) for make in makers if make is not _torch_ranges or _first_of(call)]
        # A batch of messages has several calls: this function is called for each of them before the
        # first `returned`, so the ranges that are open already are kept.
        ranges.ends = [*getattr(ranges, "ends", ()), *made]

    def returned(call: HookedCall) -> None:
        # Torch's ranges are nested, so the one that began last ends first. In a batch the first
        # call ends the ranges of all.
        while ranges.ends:
            ranges.ends.pop()()
        _ranged.call = None

    return add_hook(before, returned=returned, group=group)


_ranged = threading.local()


def _first_of(call: HookedCall) -> bool:
    """True once for each call, whose hooks all get the same object: a call is one range of torch's
    profiler."""
    known = getattr(_ranged, "call", None) is call
    _ranged.call = call
    return not known


_profiled: Hook | None = None


def follow_profiler(running: bool) -> None:
    """Show the job's calls in ``torch.profiler`` while it runs; called at a change, by a call with
    a tensor."""
    global _profiled
    # It may be the hook of an earlier job, whose end does not remove it from here.
    if _profiled is not None:
        _profiled.remove()
        _profiled = None
    if running and world.is_initialized():
        _profiled = annotate(nvtx=False, torch=True)


def _nvtx_ranges(required: bool) -> MakeRange | None:
    try:
        nvtx: Any = import_module("nvtx")
    except ImportError as e:
        if required:
            raise BackendUnavailableError(
                f"annotate: the package nvtx cannot be imported: {e}"
            ) from None
        return None

    def make(text: str) -> Callable[[], None]:
        return partial(nvtx.end_range, nvtx.start_range(message=text, domain="unicoll"))

    return make


def _torch_ranges(text: str) -> Callable[[], None]:
    record: Any = import_module("torch.autograd.profiler").record_function(text)
    record.__enter__()
    return partial(record.__exit__, None, None, None)
