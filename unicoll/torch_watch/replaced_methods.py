"""Records the calls of torch.distributed's groups, of any backend, in the flight recorder.

The methods of torch's C++ class ``ProcessGroup`` are replaced by functions that record the call and
then make it; so is ``Work.wait``. Every function of torch.distributed calls these methods, also if
it was imported before. Calls that torch makes in C++ are not seen, but they count: a call's number
is torch's own.
"""

from __future__ import annotations

import functools
import sys
import weakref
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from unicoll.calls.flight_recorder import ring
from unicoll.process import logs
from unicoll.torch_plugin.compat import compile_not
from unicoll.torch_watch.torch_calls import METHODS, TorchCall
from unicoll.torch_watch.torch_groups import find, groups, pending

log = logs.logger("watch")


def awaited_in(frame: FrameType) -> TorchCall | None:
    """The call that a thread waits for in its innermost frame without a limit of its own, or
    None."""
    if frame.f_code is _WAIT:
        variables = frame.f_locals
        if variables["limits"] or variables["options"]:
            return None
        return _call_of(variables["self"])
    if frame.f_code in _METHODS:
        # The variable is found by its name in the function that _recorded() makes.
        made: TorchCall | None = frame.f_locals.get("call")
        # A call with torch's number gets it when torch's method returns; until then the monitor
        # could not compare it with those of other ranks.
        return made if made is not None and not made.group.is_numbered else None
    return None


_METHODS: set[CodeType] = set()
"""The code of the functions that replace torch's methods."""


def _replacing(function: Any, torchs: Any, name: str) -> Any:
    """A function that replaces torch's method ``name``. torch.compile traces neither of them.

    The code has this name, too: a method of a Python subclass is not called again for itself
    because pybind11 finds the name and the object in the calling frame.
    """
    function.__code__ = function.__code__.replace(co_name=name)
    function = functools.update_wrapper(function, torchs)
    function._torchdynamo_disable = True
    compile_not(function.__code__)
    return function


def _recorded(name: str, torchs: Any) -> Any:
    """A method of torch's process group that records its call."""
    known = groups.get
    reference = weakref.ref
    is_message = METHODS[name].op.message

    def method(self: Any, *args: Any, **options: Any) -> Any:
        try:
            group = known(id(self))
            if group is None or group.pg() is not self:
                group = find(self)
            if group is not None:
                if group.by_device:
                    group = group.part_of(args, options)
                call = TorchCall(group, name, args, options, sys._getframe(1))
        except Exception:
            # Torch will refuse the arguments, or they are of a kind that is not known. The call
            # itself is made below in any case.
            group = None
        if group is None:
            return torchs(self, *args, **options)
        # Before torch gets the call, so that the recorder has one that never returns.
        ring().append(call)
        if is_message:
            call.message = group.count_message(name, args)
            try:
                work = group.message(lambda: torchs(self, *args, **options))
            except BaseException as error:
                if call.message:
                    group.discard_message(name, args)
                call.end(error)
                raise
        else:
            if not group.is_numbered:
                # Before torch gets the call, in which it may block: awaited_in() needs the number.
                group.count = call.seq = group.count + 1
            group.newest = call
            try:
                work = torchs(self, *args, **options)
            except BaseException as error:
                if not group.is_numbered and group.count == call.seq:
                    # Torch has refused the call, and none was counted since, so the next one gets
                    # this number.
                    group.count -= 1
                call.seq = 0
                call.end(error)
                raise
            if group.is_numbered:
                call.seq = group.number(self)
        call.returned = True
        if work is not None:
            # The reference is weak, because a work keeps its tensors alive. A later work may have
            # the same id, so who reads the entry compares the reference.
            pending[id(work)] = reference(work), call
        else:
            call.end()
        return work

    replacing = _replacing(method, torchs, name)
    _METHODS.add(replacing.__code__)
    return replacing


_torchs_wait: Any = dist.Work.wait
_torchs_get_future: Any = dist.Work.get_future


def _call_of(work: Any) -> TorchCall | None:
    found = pending.get(id(work))
    return found[1] if found is not None and found[0]() is work else None


def _wait(self: Any, *limits: Any, **options: Any) -> Any:
    """torch's ``Work.wait``."""
    try:
        result = _torchs_wait(self, *limits, **options)
    except BaseException as error:
        call = _call_of(self)
        # After a limit of its own the call may go on.
        if call is not None and not limits and not options:
            pending.pop(id(self), None)
            call.end(error)
            if call.group.on_error is not None:
                try:
                    call.group.on_error(call, error)
                except Exception:
                    # The program gets only torch's error.
                    log.debug("the cause of an error of torch is not known", exc_info=True)
        raise
    found = pending.pop(id(self), None)
    if found is not None and found[0]() is self:
        found[1].end()
    return result


def _get_future(self: Any) -> Any:
    """torch's ``Work.get_future``."""
    call = _call_of(self)
    if call is not None:
        call.has_callbacks = True
    return _torchs_get_future(self)


def _monitored_barrier(torchs: Any) -> Any:
    """torch's method, which sends messages; how many depends on the rank."""

    def method(self: Any, *args: Any, **options: Any) -> Any:
        try:
            group = find(self)
        except Exception:
            # As in _recorded(): the call of the program goes on.
            group = None
        if group is None:
            return torchs(self, *args, **options)
        group = group.by_device.get("cpu", group)
        return group.message(lambda: torchs(self, *args, **options), is_one=False)

    return _replacing(method, torchs, "monitored_barrier")


@functools.cache
def record() -> None:
    """Record the calls of all groups from now on; once per process."""
    global _WAIT
    process_group: Any = c10d.ProcessGroup
    for name in METHODS:
        if name in process_group.__dict__:
            setattr(process_group, name, _recorded(name, getattr(process_group, name)))
    process_group.monitored_barrier = _monitored_barrier(process_group.monitored_barrier)
    dist.Work.wait = _replacing(_wait, _torchs_wait, "wait")
    dist.Work.get_future = _replacing(_get_future, _torchs_get_future, "get_future")
    # _replacing() has given the function another code object, by which awaited_in() finds its
    # frames.
    _WAIT = _wait.__code__


_WAIT: CodeType = _wait.__code__
