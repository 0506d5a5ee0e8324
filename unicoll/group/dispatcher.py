"""From the arguments of a method to the backend: validation, signature, choice of the backend,
start.

A call is checked against its row of the table (:mod:`unicoll.calls.ops`), goes to the backend of
its arrays' device, and is either run to its end or posted, which gives a
:class:`~unicoll.calls.work.Work`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from threading import get_ident
from time import monotonic
from typing import Any

from unicoll.arrays.conversion import Buffer, as_buffer
from unicoll.arrays.types import Reduction
from unicoll.backend.contract import Backend, Context
from unicoll.calls import flight_recorder
from unicoll.calls.call import Call
from unicoll.calls.call_site import call_site, caller_frame, site_of, users_files
from unicoll.calls.error_marks import mark_unchanged
from unicoll.calls.flight_recorder import CallKind, failure_text
from unicoll.calls.ops import PROBE, Arity, Op, Sizes
from unicoll.calls.reduce_ops import as_reduce_op
from unicoll.calls.status import Status
from unicoll.calls.thread_activity import entered, entries
from unicoll.calls.validation import check, sign
from unicoll.calls.work import Completion, Work
from unicoll.errors import DistArgumentError, DistError, GroupAbortedError
from unicoll.group.arguments import as_integer, buffers_of
from unicoll.group.backends import GroupBackends
from unicoll.group.call_settings import CallSettings
from unicoll.group.overlaps import separate, separate_one
from unicoll.group.validation_cache import EVEN, Run, Splits, ValidationCache, kind_of
from unicoll.process.timeouts import Timeout

Buffers = tuple[Buffer, ...]

_getframe = sys._getframe
_enter, _leave = entries.append, entries.remove
_TAGS = range(-(1 << 63), 1 << 63)
"""Tags are signed 64-bit integers in the frames of all backends. NCCL takes only 0."""
Message = tuple[Op, Any, int | None, int | None, Status | None]
"""A send or receive: its row of the table, array, peer (None receives from any rank), tag (None
receives with any tag), and for a receive a status or None; with a status the message may be shorter
than the array."""
# Members of an enumeration are slow to look up, so those that each call needs are looked up once.
_GATHERED, _ONE = Sizes.GATHERED, Arity.ONE


class Dispatcher:
    """Validates the calls of one group and hands them to its backends; shared by the group and its
    views.

    Attributes:
        validation: the results of validation, by kind of call.
    """

    def __init__(self, context: Context, backends: GroupBackends) -> None:
        self._context = context
        self._backends = backends
        self.validation = ValidationCache(context, backends)
        self.use_ring()

    def close(self) -> None:
        """Refuse later calls and close the backends; idempotent."""
        if self._backends.closed:
            return
        self.refuse("has been destroyed")
        self._backends.close()

    def refuse(self, reason: str) -> None:
        """Refuse later calls, with a reason that follows the group's name."""
        # The reason is set first. With the cache emptied first, a call of another thread could be
        # validated in between, and its entry would let later calls pass.
        self._backends.closed = reason
        self.validation.known.clear()

    def use_ring(self) -> None:
        """Record later calls in the flight recorder's present ring; not at all if it keeps none."""
        ring = flight_recorder.ring()
        # The bound method saves a look-up in each call, so a new ring has to be set in each group.
        self._record = ring.append if ring.maxlen else None

    # --- collectives ------------------------------------------------------------------------------

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
        if splits is not None:
            call.in_counts, call.out_counts = splits
            call.even = splits == EVEN
        # The key is made before check(), which replaces split sizes by numbers of elements.
        key = kind_of(call)
        if settings.special:
            key = self._apply(settings, call, key)
        checked = self.validation.known.get(key)
        if checked is None:
            checked = self.validation.check(call, key)
        call.signature, backend, run, kind, counts = checked
        call.kind = kind
        # The split sizes belong to the key, so equal calls have equal numbers of elements, and
        # check() need not compute them again.
        if counts is not EVEN:
            call.in_counts, call.out_counts = counts
        # Overlaps depend on addresses, which are not in the key, so each call is looked at.
        if op.separate:
            separate_one(call, self._context.rank)
        # A method of the group has called this function, and with by_functions a public function
        # the method. Then the frame of the caller is taken without a look at the modules of the
        # frames, which would take longer.
        try:
            frame = _getframe(3) if settings.by_functions else caller_frame(_getframe(2))
        except ValueError:
            # No Python code has called the public function: it is the target of a thread, for
            # example.
            frame = _getframe(2)
        if async_op:
            call.site = site_of(frame)
            return _post(call, backend, kind)
        # This is what _run() does, written out to save a call.
        record = self._record
        begun = 0.0 if record is None else monotonic()
        # The entry is added within the try, because a signal's handler may raise right behind the
        # append. A handler that runs behind get_ident() raises outside of the try. So _leave()
        # always finds the entry.
        activity = (get_ident(), call, backend, kind, begun, frame)
        try:
            _enter(activity)
            enqueued = run(call)
        except BaseException as e:
            if record is not None:
                record(flight_recorder.entry(kind, call, begun, frame, failure_text(e)))
            raise
        else:
            if record is None:
                pass
            elif enqueued is not None:
                enqueued.track(flight_recorder.begin((kind,), (call,), begun, frame))
            else:
                # The code and the offset stay in the ring, not the frame, which would keep the
                # caller's arrays alive. The line is computed when the ring is read.
                code = frame.f_code
                if code.co_filename in users_files:
                    record((kind, call.seq, begun, monotonic(), code, frame.f_lasti))
                else:
                    record(flight_recorder.entry(kind, call, begun, frame))
        finally:
            _leave(activity)
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
            backend, run, kind = self.validation.validate(call)
            separate_one(call, self._context.rank)
        except Exception as e:
            # Only refusals are sent to the others. An interrupt (KeyboardInterrupt) fails the group
            # in the handler of the method.
            if root == self._context.rank and self._context.size > 1:
                self._refuse(settings, op, own, timeout, root, e)
                # The other ranks get the error in this call, whatever its class is, so the group
                # need not fail.
                mark_unchanged(e)
            raise
        if async_op:
            return _post(call, backend, kind)
        self._run(settings, call, backend, run, kind)
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
        """:meth:`start` of several calls of one operation as one batch; ``pairs`` are inputs and
        outputs of each."""
        if not pairs:
            raise DistArgumentError(f"{op.name}: no arrays given", op=op.name)
        if reduce is not None:
            reduce = as_reduce_op(reduce)
        site = call_site()
        # All calls are validated before the first one is posted, so a refused one leaves nothing
        # behind.
        calls, backends, kinds = [], [], []
        for inputs, outputs in pairs:
            call = self._new(settings, op, inputs, outputs, timeout, reduce, root)
            backend, _, kind = self.validation.validate(call)
            call.site = site
            calls.append(call)
            backends.append(backend)
            kinds.append(kind)
        if len(set(backends)) > 1:
            raise DistArgumentError(
                f"{op.name}: arrays on {calls[0].inputs[0].device} and on other devices in one"
                " call",
                op=op.name,
            )
        batch = tuple(calls)
        separate(batch, self._context.rank)
        work = Work(_post_recorded(backends[0], batch, kinds), batch)
        if async_op:
            return work
        work.wait()
        return None

    def _run(
        self, settings: CallSettings, call: Call, backend: Backend, run: Run, kind: CallKind
    ) -> None:
        """Do a call for a function that a method of ProcessGroup has called, and record it."""
        record = self._record
        if record is None:
            with entered(call, backend):
                run(call)
            return
        try:
            frame = _getframe(4) if settings.by_functions else caller_frame(_getframe(3))
        except ValueError:
            frame = _getframe(3)
        begun = monotonic()
        activity = (get_ident(), call, backend, kind, begun, frame)
        try:
            _enter(activity)
            enqueued = run(call)
        except BaseException as e:
            record(flight_recorder.entry(kind, call, begun, frame, failure_text(e)))
            raise
        else:
            if enqueued is not None:
                enqueued.track(flight_recorder.begin((kind,), (call,), begun, frame))
            else:
                record(flight_recorder.entry(kind, call, begun, frame))
        finally:
            _leave(activity)

    # --- messages ---------------------------------------------------------------------------------

    def run_message(self, settings: CallSettings, message: Message, timeout: Timeout) -> Call:
        """Send or receive one message; returns the call when it is done."""
        call, backend, run, kind = self._message(settings, message, timeout)
        self._run(settings, call, backend, run, kind)
        return call

    def start_message(self, settings: CallSettings, message: Message, timeout: Timeout) -> Work:
        """:meth:`run_message` in the background."""
        call, backend, _, kind = self._message(settings, message, timeout)
        return _post(call, backend, kind)

    def probe(
        self, settings: CallSettings, peer: int | None, tag: int | None, timeout: Timeout
    ) -> Status:
        """Wait for a message from a rank, or from any, and leave it there; returns what is known of
        it."""
        call, backend, run, kind = self._probe(settings, peer, tag, timeout)
        self._run(settings, call, backend, run, kind)
        return self._status_of(call)

    def iprobe(self, settings: CallSettings, peer: int | None, tag: int | None) -> Status | None:
        """:meth:`probe` without waiting; None if no such message has come."""
        call, backend, _, _ = self._probe(settings, peer, tag, None)
        return self._status_of(call) if backend.iprobe(call) else None

    def _probe(
        self, settings: CallSettings, peer: int | None, tag: int | None, timeout: Timeout
    ) -> tuple[Call, Backend, Run, CallKind]:
        seconds = settings.timeout if timeout is None else settings.seconds(timeout)
        call = Call(
            PROBE, (), (), seconds, None, -1, self._peer(PROBE, peer, True), _tag(PROBE, tag, True)
        )
        call.partial = True
        if settings.special:
            self._apply(settings, call)
        return call, *self.validation.validate(call)

    def _status_of(self, call: Call) -> Status:
        status = Status()
        status.follow(call, self._context.ranks)
        return status

    def start_messages(
        self, settings: CallSettings, messages: Sequence[Message], timeout: Timeout
    ) -> list[Work]:
        """Start several messages; none is sent unless all are valid."""
        several = len(messages) > 1
        started = [self._message(settings, message, timeout, several) for message in messages]
        if not started:
            return []
        if several:
            separate([call for call, *_ in started], self._context.rank)
        site = call_site()
        works: list[Work] = []
        # Device arrays and host arrays may be mixed. Neighbours of one backend go to it together,
        # since NCCL executes them as one operation.
        batches = [(backend, list(some)) for backend, some in groupby(started, itemgetter(1))]
        # This is a loop of its own, since nothing may have been posted when a batch is refused.
        for backend, some in batches:
            if backend.caps.joins_batches:
                _check_own_messages([call for call, *_ in some if call.peer == self._context.rank])
        for backend, some in batches:
            calls, kinds = [], []
            for call, _, _, kind in some:
                call.site = site
                calls.append(call)
                kinds.append(kind)
            pending = flight_recorder.begin(kinds, calls)
            try:
                completions = backend.post_each(calls)
            except BaseException as e:
                flight_recorder.end(pending, e)
                raise
            # There are no entries if the flight recorder keeps nothing.
            for entry, completion in zip(pending, completions, strict=False):
                completion.track((entry,))
            works += [Work(each, (call,)) for call, each in zip(calls, completions, strict=True)]
        return works

    def _message(
        self, settings: CallSettings, message: Message, timeout: Timeout, in_batch: bool = False
    ) -> tuple[Call, Backend, Run, CallKind]:
        op, tensor, peer, tag, status = message
        buffer = as_buffer(tensor, f"{op.name}: tensor")
        receives, context = op.outputs is _ONE, self._context
        if type(tag) is not int or tag not in _TAGS:
            tag = _tag(op, tag, receives)
        if type(peer) is not int or not 0 <= peer < context.size:
            peer = self._peer(op, peer, receives)
        inputs, outputs = ((), (buffer,)) if receives else ((buffer,), ())
        seconds = settings.timeout if timeout is None else settings.seconds(timeout)
        call = Call(op, inputs, outputs, seconds, None, -1, peer, tag)
        if status is not None:
            call.partial = True
            status.follow(call, context.ranks)
        if settings.special:
            self._apply(settings, call)
        key = (op, buffer.dtype, buffer.device.type, buffer.writable)
        checked = self.validation.known.get(key)
        if checked is None:
            checked = self.validation.check(call, key)
        # These properties are not in the key: messages differ in peer and tag, and each would be a
        # kind of its own.
        if peer == context.rank or tag is None or status is not None:
            _check_matching(call, checked[1], context, in_batch)
        return call, checked[1], checked[2], checked[3]

    def _peer(self, op: Op, peer: int | None, receives: bool) -> int:
        """The argument, checked; -1 for a receive from any rank."""
        if peer is None and receives:
            return -1
        if type(peer) is not int:
            peer = as_integer(f"{op.name}: peer", peer)
        if not 0 <= peer < self._context.size:
            raise DistArgumentError(
                f"{op.name}: peer {peer} is not a rank of a group of {self._context.size}",
                op=op.name,
            )
        return peer

    # --- validation -------------------------------------------------------------------------------

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
        """Set the options of a new call; returns the key of its kind with its compression or exact
        reduction."""
        settings.apply(call, self._backends)
        if settings.exact and call.reduce is not None:
            return key, call.reduce.key
        return (key, call.compression) if call.compression else key

    def _refuse(
        self,
        settings: CallSettings,
        op: Op,
        own: Buffers,
        timeout: Timeout,
        root: int,
        reason: Exception,
    ) -> None:
        """This rank, the root, refuses its list of a gather or scatter: make the other ranks' calls
        raise.

        Returns at once. The call takes its place in the group's order, as on the other ranks.
        """
        context = self._context
        inputs, outputs = (own, ()) if op.sizes is Sizes.GATHERED else ((), own)
        try:
            call = self._new(settings, op, inputs, outputs, timeout, None, root)
            check(call, -1, context.size)
            backend = self._backends.route(call)
        except DistError:
            # Something other than the list is wrong. As with any other argument the call does not
            # count, and ranks that make the same call refuse it, too.
            return
        call.signature = sign(call)
        call.site = call_site()
        kind = "" if isinstance(reason, DistError) else f"{type(reason).__name__}: "
        call.refused = f"at {call.site}: {kind}{reason}"
        if backend.compares:
            # The call keeps the order of this rank equal to the others'. Nobody waits for it: this
            # rank raises the reason.
            backend.post((call,))
            return
        # Without a comparison nothing takes the place of the call, so the others would wait in it.
        rank = context.job.rank
        self._backends.fail(
            GroupAbortedError(
                f"{call.describe()} on group {context.name!r}: rank {rank}, the root, refused its"
                f" call {call.refused}",
                group=context.name,
                rank=rank,
                op=op.name,
            )
        )


def _check_matching(call: Call, backend: Backend, context: Context, in_batch: bool) -> None:
    """Refuse what only backends with probes have; a message to oneself not in a batch that can have
    its receive."""
    if PROBE.name in backend.caps.native:
        return
    if call.tag is None or call.partial:
        reason = f"does not support {'tag=None' if call.tag is None else 'status'}"
    elif not backend.caps.joins_batches:
        reason = "does not support messages to oneself"
    elif not in_batch:
        reason = (
            "supports messages to oneself only in a batch with their receives (batch_isend_irecv)"
        )
    else:
        return
    raise DistArgumentError(f"{call.op.name}: backend {backend.name} {reason}", op=call.op.name)


def _check_own_messages(calls: Sequence[Call]) -> None:
    """Refuse messages to oneself that have no receive of their size in the same batch, for a
    backend that needs it."""
    sent = [call.inputs[0] for call in calls if call.inputs]
    received = [call.outputs[0] for call in calls if call.outputs]
    if [(b.dtype, b.count) for b in sent] != [(b.dtype, b.count) for b in received]:
        texts = [", ".join(map(str, buffers)) or "nothing" for buffers in (sent, received)]
        raise DistArgumentError(
            "batch_isend_irecv: messages to oneself and their receives differ:"
            f" sent is {texts[0]}, received {texts[1]}"
        )


def _tag(op: Op, tag: int | None, receives: bool) -> int | None:
    """The argument, checked; None for a receive with any tag."""
    if tag is None and receives:
        return None
    if type(tag) is not int:
        tag = as_integer(f"{op.name}: tag", tag)
    if tag not in _TAGS:
        raise DistArgumentError(
            f"{op.name}: tag {tag} is not between -2**63 and 2**63 - 1", op=op.name
        )
    return tag


def _post(call: Call, backend: Backend, kind: CallKind) -> Work:
    call.site = call.site or call_site()
    calls = (call,)
    return Work(_post_recorded(backend, calls, (kind,)), calls)


def _post_recorded(
    backend: Backend, calls: tuple[Call, ...], kinds: Sequence[CallKind]
) -> Completion:
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
