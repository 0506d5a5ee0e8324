"""From the arguments of a method to the backend: validation, signature, choice of the backend, start.

A call is checked against its row of the table (:mod:`unicoll.backend.ops`), goes to the backend of its arrays' device,
and is either run to its end or posted, which gives a :class:`~unicoll.backend.work.Work`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from time import monotonic
from typing import Any

from unicoll.arrays.conversion import Buffer, as_buffer
from unicoll.arrays.types import Reduction
from unicoll.backend import flight_recorder
from unicoll.backend.call import Call
from unicoll.backend.contract import Backend
from unicoll.backend.flight_recorder import CallKind, failure_text, user_frame
from unicoll.backend.ops import Arity, Op, Sizes
from unicoll.backend.reduce_ops import as_reduce_op
from unicoll.backend.validation import check, sign
from unicoll.backend.work import Completion, Work
from unicoll.errors import DistArgumentError, DistError, GroupAbortedError
from unicoll.group.arguments import as_integer, buffers_of, call_site
from unicoll.group.backends import GroupBackends
from unicoll.group.call_settings import CallSettings
from unicoll.group.hooks import Hook, HookedBackend
from unicoll.group.members import GroupMembers
from unicoll.net import debug_level
from unicoll.net.timeouts import Timeout

Buffers = tuple[Buffer, ...]
Splits = tuple[tuple[int, ...] | None, tuple[int, ...] | None]

_Checked = tuple[int, Backend, CallKind, Splits]
"""What validation gives: the signature, the backend, what the flight recorder keeps, and elements sent to and expected
from each rank."""

_getframe = sys._getframe
_TAGS = range(-(1 << 63), 1 << 63)
"""Tags are signed 64-bit integers in the frames of all backends. NCCL takes only 0."""
_EVEN: Splits = (None, None)
_GATHERED, _ONE = Sizes.GATHERED, Arity.ONE  # members of an enumeration are slow to look up
_MAX_KINDS = 1024
"""Kinds of calls whose validation is cached."""


class Dispatcher:
    """Validates the calls of one group and hands them to its backends; shared by the group and its views.

    Validation, signature and backend are cached by kind of call: operation, element type, shapes, device, reduction,
    root and split sizes.
    """

    def __init__(self, members: GroupMembers, backends: GroupBackends) -> None:
        self._members = members
        self._backends = backends
        self._checked: dict[Any, _Checked] = {}
        self._hooks: tuple[Hook, ...] = members.job.hooks
        self._hooked: dict[Backend, HookedBackend] = {}
        self.use_ring()
        debug_level.on_change(self._debug_level_changed)

    def close(self) -> None:
        """Refuse later calls and close the backends; idempotent."""
        if self._backends.closed:
            return
        self._backends.closed = True
        self._checked.clear()
        self._backends.close()

    def use_ring(self) -> None:
        """Record later calls in the flight recorder's present ring; not at all if it keeps none."""
        ring = flight_recorder.ring()
        self._record = ring.append if ring.maxlen else None

    def _debug_level_changed(self) -> None:
        self._backends.debug_level_changed()
        self._checked = {}  # the old one, to which a thread may be adding, has backends with or without logging

    def add_hook(self, hook: Hook) -> Hook:
        """Have a hook called for the calls that start from now on, until it is removed; returns it."""
        hook.on_remove.append(self.remove_hook)
        self._set_hooks((*self._hooks, hook))
        return hook

    def remove_hook(self, hook: Hook) -> None:
        """The opposite of :meth:`add_hook`; no effect if the hook is not there."""
        self._set_hooks(tuple(each for each in self._hooks if each is not hook))

    def _set_hooks(self, hooks: tuple[Hook, ...]) -> None:
        self._hooks, self._hooked = hooks, {}
        self._checked = {}  # the old one, to which a thread may be adding, has backends with other hooks

    # --- collectives --------------------------------------------------------------------------------------------

    def start(
        self,
        settings: CallSettings,
        op: Op,
        inputs: Buffers,
        outputs: Buffers,
        async_op: bool,
        timeout: Timeout,
        reduce: Any = None,
        root: int = -1,
        splits: Splits | None = None,
    ) -> Work | None:
        """Validate a call, hand it to its backend, and wait for it unless ``async_op``."""
        if reduce is not None and type(reduce) is not Reduction:
            reduce = as_reduce_op(reduce)
        if type(root) is not int:
            root = as_integer(f"{op.name}: root", root)
        call = Call(
            op,
            inputs,
            outputs,
            settings.timeout if timeout is None else settings.seconds(timeout),
            reduce,
            root,
        )
        if inputs is outputs and inputs and inputs[0].writable:  # one array in place: the shortest key
            first = inputs[0]
            key: Any = (
                op,
                first.dtype,
                first.shape,
                first.device.type,
                None if reduce is None else reduce.key,
                root,
            )
        else:
            if splits is not None:
                call.in_counts, call.out_counts = splits
                call.even = splits == _EVEN
            key = _kind(call)
        if settings.special:
            key = self._apply(settings, call, key)
        checked = self._checked.get(key)
        if checked is None:
            checked = self._check(call, key)
        call.signature, backend, kind, (call.in_counts, call.out_counts) = checked
        call.kind = kind
        if async_op:
            return _post(call, backend, kind)
        record = self._record
        if record is None:
            backend.run(call)
            return None
        begun = monotonic()
        try:
            enqueued = backend.run(call)
        except BaseException as e:
            record((kind, call.seq, begun, monotonic(), call_site(), 0, failure_text(e)))
            raise
        if enqueued is not None:
            enqueued.track(flight_recorder.begin((kind,), (call,), begun))
            return None
        try:  # a method has called this one
            frame = _getframe(3) if settings.by_functions else user_frame(_getframe(2))
        except ValueError:  # no Python code has called the public function
            frame = _getframe(2)
        record((kind, call.seq, begun, monotonic(), frame.f_code, frame.f_lasti))
        return None

    def start_rooted(
        self,
        settings: CallSettings,
        op: Op,
        own: Buffers,
        list_name: str,
        arrays: Sequence[Any] | None,
        async_op: bool,
        timeout: Timeout,
        root: int,
    ) -> Work | None:
        """:meth:`start` of a gather or scatter, whose list only the root passes.

        If the root's list is refused, the error is sent to the other ranks.

        Args:
            own: the array that every rank passes.
            list_name: operation and argument, for errors.
            arrays: the root's list; None elsewhere.
        """
        try:
            listed = buffers_of(list_name, () if arrays is None else arrays)
            inputs, outputs = (own, listed) if op.sizes is _GATHERED else (listed, own)
            call = self._new(settings, op, inputs, outputs, timeout, None, root)
            backend, kind = self._validate(call)
        except Exception as e:
            if root == self._members.rank and self._members.size > 1:
                self._refuse(settings, op, own, timeout, root, e)
            raise
        if async_op:
            return _post(call, backend, kind)
        self._run(settings, call, backend, kind)
        return None

    def start_batch(
        self,
        settings: CallSettings,
        op: Op,
        pairs: Sequence[tuple[Buffers, Buffers]],
        async_op: bool,
        timeout: Timeout,
        reduce: Any = None,
        root: int = -1,
    ) -> Work | None:
        """:meth:`start` of several calls of one operation as one batch; ``pairs`` are inputs and outputs of each."""
        if not pairs:
            raise DistArgumentError(f"{op.name}: no arrays given", op=op.name)
        reduction = None if reduce is None else as_reduce_op(reduce)
        calls = tuple(self._new(settings, op, i, o, timeout, reduction, root) for i, o in pairs)
        chosen, kinds = [], []
        for call in calls:
            backend, kind = self._validate(call)
            chosen.append(backend)
            kinds.append(kind)
        if len(set(chosen)) > 1:
            raise DistArgumentError(
                f"{op.name}: arrays on {calls[0].inputs[0].device} and on other devices in one call",
                op=op.name,
            )
        site = call_site()
        for call in calls:
            call.site = site
        work = Work(_post_recorded(chosen[0], calls, kinds), calls)
        if async_op:
            return work
        work.wait()
        return None

    def _run(self, settings: CallSettings, call: Call, backend: Backend, kind: CallKind) -> None:
        """Do a call for a function that a method of ProcessGroup has called, and record it."""
        record = self._record
        if record is None:
            backend.run(call)
            return
        begun = monotonic()
        try:
            enqueued = backend.run(call)
        except BaseException as e:
            record(flight_recorder.entry(kind, call, begun, user_frame(_getframe(2)), failure_text(e)))
            raise
        if enqueued is not None:
            enqueued.track(flight_recorder.begin((kind,), (call,), begun))
            return
        try:
            frame = _getframe(4) if settings.by_functions else user_frame(_getframe(3))
        except ValueError:
            frame = _getframe(3)
        record(flight_recorder.entry(kind, call, begun, frame))

    # --- messages -----------------------------------------------------------------------------------------------

    def run_message(
        self, settings: CallSettings, op: Op, tensor: Any, peer: int | None, tag: int, timeout: Timeout
    ) -> Call:
        """Send or receive one message; returns the call when it is done."""
        call, backend, kind = self._message(settings, op, tensor, peer, tag, timeout)
        self._run(settings, call, backend, kind)
        return call

    def start_message(
        self, settings: CallSettings, op: Op, tensor: Any, peer: int | None, tag: int, timeout: Timeout
    ) -> Work:
        """:meth:`run_message` in the background."""
        return _post(*self._message(settings, op, tensor, peer, tag, timeout))

    def start_messages(
        self,
        settings: CallSettings,
        messages: Sequence[tuple[Op, Any, int | None, int]],
        timeout: Timeout,
    ) -> list[Work]:
        """Start several messages, given as (row, array, peer, tag); none is sent unless all are valid."""
        triples = [self._message(settings, op, x, peer, tag, timeout) for op, x, peer, tag in messages]
        if not triples:
            return []
        site = call_site()
        works: list[Work] = []
        for backend, some in groupby(triples, itemgetter(1)):  # device arrays and host arrays may be mixed
            calls, kinds = [], []
            for call, _, kind in some:
                call.site = site
                calls.append(call)
                kinds.append(kind)
            pending = flight_recorder.begin(kinds, calls)
            try:
                completions = backend.post_each(calls)
            except BaseException as e:
                flight_recorder.end(pending, e)
                raise
            for entry, completion in zip(pending, completions, strict=False):  # none if nothing is recorded
                completion.track((entry,))
            works += [Work(each, (call,)) for call, each in zip(calls, completions, strict=True)]
        return works

    def _message(
        self, settings: CallSettings, op: Op, tensor: Any, peer: int | None, tag: int, timeout: Timeout
    ) -> tuple[Call, Backend, CallKind]:
        buffer = as_buffer(tensor, f"{op.name}: tensor")
        members = self._members
        receives = op.outputs is _ONE
        if type(tag) is not int:
            tag = as_integer(f"{op.name}: tag", tag)
        if tag not in _TAGS:
            raise DistArgumentError(f"{op.name}: tag {tag} is not between -2**63 and 2**63 - 1", op=op.name)
        if peer is None and receives:
            peer = -1
        else:
            if type(peer) is not int:
                peer = as_integer(f"{op.name}: peer", peer)
            if not 0 <= peer < members.size:
                raise DistArgumentError(
                    f"{op.name}: peer {peer} is not a rank of a group of {members.size}", op=op.name
                )
            if peer == members.rank:
                raise DistArgumentError(f"{op.name}: a rank cannot exchange messages with itself", op=op.name)
        inputs, outputs = ((), (buffer,)) if receives else ((buffer,), ())
        seconds = settings.timeout if timeout is None else settings.seconds(timeout)
        call = Call(op, inputs, outputs, seconds, None, -1, peer, tag)
        if settings.special:
            self._apply(settings, call)
        key = (op, buffer.dtype, buffer.device.type, buffer.writable)
        checked = self._checked.get(key)
        if checked is None:
            checked = self._check(call, key)
        return call, checked[1], checked[2]

    # --- validation ---------------------------------------------------------------------------------------------

    def _new(
        self,
        settings: CallSettings,
        op: Op,
        inputs: Buffers,
        outputs: Buffers,
        timeout: Timeout,
        reduce: Reduction | None,
        root: int,
    ) -> Call:
        if type(root) is not int:
            root = as_integer(f"{op.name}: root", root)
        seconds = settings.timeout if timeout is None else settings.seconds(timeout)
        call = Call(op, inputs, outputs, seconds, reduce, root)
        if settings.special:
            self._apply(settings, call)
        return call

    def _apply(self, settings: CallSettings, call: Call, key: Any = None) -> Any:
        """Set the options of a new call; returns the key of its kind with its compression."""
        settings.apply(call, self._backends)
        return (key, call.compression) if call.compression else key

    def _validate(self, call: Call) -> tuple[Backend, CallKind]:
        """Validate a call, unless one of its kind was, and sign it; returns its backend and kind."""
        key = _kind(call)
        if call.compression:
            key = key, call.compression
        checked = self._checked.get(key) or self._check(call, key)
        call.signature, backend, kind, (call.in_counts, call.out_counts) = checked
        call.kind = kind
        return backend, kind

    def _check(self, call: Call, key: Any) -> _Checked:
        """Validate a call; the result is kept under ``key``."""
        known, members = self._checked, self._members
        check(call, members.rank, members.size)
        backend = self._backends.route(call)
        if self._hooks:
            backend = self._hooked.setdefault(backend, HookedBackend(backend, members, self._hooks))
        kind = CallKind(call, members.name, members.ranks, backend.name)
        checked = sign(call), backend, kind, (call.in_counts, call.out_counts)
        if len(known) >= _MAX_KINDS:
            known.clear()
        known[key] = checked
        return checked

    def _refuse(
        self, settings: CallSettings, op: Op, own: Buffers, timeout: Timeout, root: int, reason: Exception
    ) -> None:
        """This rank, the root, refuses its list of a gather or scatter: make the other ranks' calls raise.

        Returns at once. The call takes its place in the group's order, as on the other ranks.
        """
        members = self._members
        inputs, outputs = (own, ()) if op.sizes is Sizes.GATHERED else ((), own)
        try:
            call = self._new(settings, op, inputs, outputs, timeout, None, root)
            check(call, -1, members.size)
            backend = self._backends.route(call)
        except DistError:
            return  # the call is refused on every rank for this reason
        call.signature = sign(call)
        call.site = call_site()
        kind = "" if isinstance(reason, DistError) else f"{type(reason).__name__}: "
        call.refused = f"at {call.site}: {kind}{reason}"
        if backend.compares:
            backend.post((call,))
            return
        rank = members.job.rank
        self._backends.fail(
            GroupAbortedError(
                f"{call.describe()} on group {members.name!r}: rank {rank}, the root, refused its call"
                f" {call.refused}",
                group=members.name,
                rank=rank,
                op=op.name,
            )
        )


def _kind(call: Call) -> Any:
    """The key under which the validation of a call is cached.

    A device is given by its index, which is -1 for the CPU.
    """
    op, inputs, outputs, reduce = call.op, call.inputs, call.outputs, call.reduce
    reduction = None if reduce is None else reduce.key
    if len(inputs) == 1 == len(outputs):
        i, o = inputs[0], outputs[0]
        key = (
            op,
            i.dtype,
            i.shape,
            i.device.index,
            o.dtype,
            o.shape,
            o.device.index,
            o.writable,
            reduction,
            call.root,
        )
        return key if call.in_counts is None is call.out_counts else (*key, call.in_counts, call.out_counts)
    arrays: list[Any] = [op, reduction, call.root, len(inputs)]
    for i in inputs:
        arrays += i.dtype, i.shape, i.device.index
    for o in outputs:
        arrays += o.dtype, o.shape, o.device.index, o.writable
    return tuple(arrays)


def _post(call: Call, backend: Backend, kind: CallKind) -> Work:
    call.site = call_site()
    calls = (call,)
    return Work(_post_recorded(backend, calls, (kind,)), calls)


def _post_recorded(backend: Backend, calls: tuple[Call, ...], kinds: Sequence[CallKind]) -> Completion:
    """Post a batch and record it."""
    pending = flight_recorder.begin(kinds, calls)
    try:
        completion = backend.post(calls)
    except BaseException as e:
        flight_recorder.end(pending, e)
        raise
    if pending:
        completion.track(pending)
    return completion


RUNNING = frozenset((Dispatcher.start.__code__, Dispatcher._run.__code__))
"""Functions that are on a thread's stack during a blocking call, with the variables ``call``, ``kind``, and
``begun`` if calls are recorded."""
