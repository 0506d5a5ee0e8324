"""The results of the validation of a group's calls, cached by kind of call: signature, backend,
hooks, split sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unicoll.backend.contract import Backend, Context, Tracker
from unicoll.calls.call import Call
from unicoll.calls.flight_recorder import CallKind
from unicoll.calls.validation import check, sign
from unicoll.group.backends import GroupBackends
from unicoll.group.call_hooks import Hook, HookedBackend
from unicoll.process import debug_level

Splits = tuple[tuple[int, ...] | None, tuple[int, ...] | None]
EVEN: Splits = (None, None)

Run = Callable[[Call], "Tracker | None"]
Checked = tuple[int, Backend, Run, CallKind, Splits]
"""What validation gives: the signature, the backend and its function for blocking calls, what the
flight recorder keeps, and elements sent to and expected from each rank."""

_MAX_KINDS = 1024
"""Kinds of calls whose validation is cached."""


class ValidationCache:
    """Validates the calls of one group, and chooses their backends; once for each kind of call.

    The kind is operation, element type, shapes, device, reduction, root and split sizes. A backend
    in the cache logs the calls or calls hooks, so a change of debug level or hooks empties the
    cache.

    Attributes:
        known: the results by kind; replaced when the cache is emptied, since a thread may be adding
            to the old one.
    """

    def __init__(self, context: Context, backends: GroupBackends) -> None:
        self.known: dict[Any, Checked] = {}
        self._context = context
        self._backends = backends
        self._hooks: tuple[Hook, ...] = context.job.hooks
        self._hooked: dict[Backend, HookedBackend] = {}
        debug_level.add_listener(self)

    def debug_level_changed(self) -> None:
        # The wrappers come first: an entry that is made for the new dict has to know them.
        self._backends.debug_level_changed()
        self.known = {}

    def add_hook(self, hook: Hook) -> Hook:
        """Have a hook called for the calls that start from now on, until it is removed; returns
        it."""
        hook.on_remove.append(self.remove_hook)
        self._set_hooks((*self._hooks, hook))
        return hook

    def remove_hook(self, hook: Hook) -> None:
        """The opposite of :meth:`add_hook`; no effect if the hook is not there."""
        self._set_hooks(tuple(each for each in self._hooks if each is not hook))

    def _set_hooks(self, hooks: tuple[Hook, ...]) -> None:
        # The order matters, because another thread may be in check(). It reads ``known`` first,
        # then ``_hooked`` and then ``_hooks``; these are set in the opposite order. So what it
        # makes from old hooks goes to an old dict, which nobody reads any more. Emptying the dict
        # in place would keep such an entry.
        self._hooks, self._hooked = hooks, {}
        self.known = {}

    def validate(self, call: Call) -> tuple[Backend, Run, CallKind]:
        """Validate a call, unless one of its kind was, and sign it; returns its backend, run
        function and kind."""
        key = kind_of(call)
        if call.compression:
            key = key, call.compression
        checked = self.known.get(key) or self.check(call, key)
        call.signature, backend, run, kind, (call.in_counts, call.out_counts) = checked
        call.kind = kind
        return backend, run, kind

    def check(self, call: Call, key: Any) -> Checked:
        """Validate a call; the result is kept under ``key``."""
        known, context = self.known, self._context
        check(call, context.rank, context.size)
        backend = self._backends.route(call)
        if self._hooks:
            # There is one HookedBackend for each backend, since calls are put together in batches
            # by the identity of their backend.
            backend = self._hooked.setdefault(backend, HookedBackend(backend, context, self._hooks))
        kind = CallKind(call, context.job.number, context.name, context.ranks, backend.name)
        counts = (
            EVEN if call.in_counts is None is call.out_counts else (call.in_counts, call.out_counts)
        )
        checked = sign(call), backend, backend.runner(call.op), kind, counts
        # A program whose shapes differ in each call would otherwise fill the memory.
        if len(known) >= _MAX_KINDS:
            known.clear()
        known[key] = checked
        return checked


def kind_of(call: Call) -> Any:
    """The key under which the validation of a call is cached.

    Whether an output can be written is in it, because check() refuses those that cannot be.
    """
    inputs, outputs, reduce = call.inputs, call.outputs, call.reduce
    reduction = None if reduce is None else reduce.key
    # This key is made in each call; that of one array in place is the shortest.
    if inputs is outputs and len(inputs) == 1 and call.in_counts is None is call.out_counts:
        i = inputs[0]
        return call.op, i.dtype, i.shape, i.device.number, i.writable, reduction, call.root
    op = call.op
    if len(inputs) == 1 == len(outputs):
        i, o = inputs[0], outputs[0]
        key = (
            op,
            i.dtype,
            i.shape,
            i.device.number,
            o.dtype,
            o.shape,
            o.device.number,
            o.writable,
            reduction,
            call.root,
        )
        return (
            key
            if call.in_counts is None is call.out_counts
            else (*key, call.in_counts, call.out_counts)
        )
    arrays: list[Any] = [op, reduction, call.root, len(inputs)]
    for i in inputs:
        arrays += i.dtype, i.shape, i.device.number
    for o in outputs:
        arrays += o.dtype, o.shape, o.device.number, o.writable
    return tuple(arrays)
