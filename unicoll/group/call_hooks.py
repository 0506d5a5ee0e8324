"""Hooks: functions of the user that are called before and after each call of a group.

A group with hooks hands its calls to a :class:`HookedBackend`, which wraps the group's backend; a
group without hooks does not, so that hooks cost nothing where there are none. torchcomms has hooks
of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeVar

from unicoll.backend.contract import Backend, Context, Job, Tracker
from unicoll.calls.call import Call
from unicoll.calls.call_site import call_site
from unicoll.calls.error_marks import mark_unchanged
from unicoll.calls.flight_recorder import CallKind, PendingEntry
from unicoll.calls.ops import Arity
from unicoll.calls.thread_activity import NotBlocked, entered
from unicoll.calls.work import Completion
from unicoll.group.wrapped_backend import WrappedBackend
from unicoll.process import logs

log = logs.logger("calls")

T = TypeVar("T")


class HookedCall:
    """A call, as hooks get it; the same object for all functions of a hook.

    Attributes:
        group, ranks: name of the group, and the global ranks of its members.
        rank: the global rank of this process.
        op: name of the operation.
        inputs, outputs: the user's arrays; empty in ``after`` and ``waited``, so that no array is
            kept alive.
        nbytes: bytes of the inputs, or of the outputs where this rank has no inputs.
        root: rank in the group, or -1.
        peer, tag: of a message; else -1 and 0.
        backend: name of the backend.
        site: ``file:line`` of the caller.
        blocking: False for asynchronous calls.
        seq: sequence number in the group; 0 in ``before``, and for messages.
        started, ended: seconds on the clock of ``time.monotonic``; ``ended`` is 0 until ``after``.
        error: the error's type and text, or "".
    """

    def __init__(self, call: Call, context: Context, backend: str, blocking: bool) -> None:
        self.group = context.name
        self.ranks = context.ranks
        self.rank = context.job.rank
        self.op = call.op.name
        # In a broadcast the array of a rank that is not the root is only written, so its old
        # contents may be anything (NaN, for example) and are not shown to the hooks.
        unread = call.op.outputs is Arity.ONE_OFF_ROOT and context.rank != call.root
        self.inputs = [] if unread else [b.owner for b in call.inputs]
        self.outputs = [b.owner for b in call.outputs]
        self.nbytes = sum([b.nbytes for b in call.inputs or call.outputs])
        self.root = call.root
        self.peer = call.peer
        self.tag = call.tag
        self.backend = backend
        self.site = call.site
        self.blocking = blocking
        self.seq = 0
        self.started = monotonic()
        self.ended = 0.0
        self.error = ""
        self._text = call.describe()

    @property
    def seconds(self) -> float:
        """Seconds from the start of the call to its end."""
        return self.ended - self.started

    def __str__(self) -> str:
        return self._text


HookFunction = Callable[[HookedCall], None]


@dataclass(eq=False)
class Hook:
    """Functions that are called for each call of one group or of all groups; :meth:`remove` ends
    that.

    :func:`unicoll.add_hook` describes them.

    Attributes:
        on_remove: functions that :meth:`remove` calls with the hook.
    """

    before: HookFunction | None = None
    after: HookFunction | None = None
    returned: HookFunction | None = None
    waited: Callable[[HookedCall, float], None] | None = None
    on_remove: list[Callable[[Hook], None]] = field(default_factory=list, init=False)

    def remove(self) -> None:
        """Call the functions no more for calls that start from now on; idempotent."""
        while self.on_remove:
            self.on_remove.pop()(self)

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *rest: object) -> None:
        self.remove()


def add_to_job(job: Job, hook: Hook) -> Hook:
    """Have a hook called for the calls of all groups of a job, also of later ones, until it is
    removed; returns it."""

    def remove(hook: Hook) -> None:
        job.hooks = tuple(each for each in job.hooks if each is not hook)
        for group in job.groups:
            group._dispatcher.validation.remove_hook(hook)

    hook.on_remove.append(remove)
    job.hooks = (*job.hooks, hook)
    for group in job.groups:
        group._dispatcher.validation.add_hook(hook)
    return hook


class HookedBackend(WrappedBackend):
    """A backend that calls hooks around the calls of another one."""

    def __init__(self, inner: Backend, context: Context, hooks: Sequence[Hook]) -> None:
        super().__init__(inner, context)
        # The hooks of a call are the same at its begin and at its end. Another set of hooks gets
        # another HookedBackend (ValidationCache), and calls in progress keep theirs.
        self._hooks = tuple(hooks)
        self._after = [hook.after for hook in hooks if hook.after is not None]
        self._returned = [hook.returned for hook in hooks if hook.returned is not None]
        self._waited = [hook.waited for hook in hooks if hook.waited is not None]

    def run(self, call: Call) -> Tracker | None:
        call.site = call.site or call_site()
        record, entry = self._begin(call, True)
        try:
            enqueued = self._inner.run(call)
        except BaseException as e:
            self._end(record, call.seq, e)
            raise
        finally:
            self._call(self._returned, record)
        self.waited(record, monotonic() - record.started)
        if enqueued is None:
            self._end(record, call.seq, None)
        else:
            # The device ends the call later, on another thread; on_end of the entry calls the hooks
            # then.
            enqueued.track((entry,))
        return enqueued

    def post(self, calls: Sequence[Call], stream: Any = None) -> Completion:
        completion, begun = self._post(self._inner.post, calls, stream)
        completion.track([entry for _, entry in begun])
        # The batch has one completion. A wait for it counts once, for the first call.
        return self._measured(completion, begun[0][0])

    def post_each(self, calls: Sequence[Call], stream: Any = None) -> list[Completion]:
        completions, begun = self._post(self._inner.post_each, calls, stream)
        for completion, (_, entry) in zip(completions, begun, strict=True):
            completion.track((entry,))
        return [
            self._measured(each, record)
            for each, (record, _) in zip(completions, begun, strict=True)
        ]

    def _post(
        self, post: Callable[[Sequence[Call], Any], T], calls: Sequence[Call], stream: Any
    ) -> tuple[T, list[tuple[HookedCall, PendingEntry]]]:
        """What ``post`` returns for a batch, and the records of its calls."""
        begun: list[tuple[HookedCall, PendingEntry]] = []
        try:
            for call in calls:
                begun.append(self._begin(call, False))
            return post(calls, stream), begun
        except BaseException as e:
            # If a hook has refused a call of the batch, fewer calls have begun than the batch has.
            for call, (record, _) in zip(calls, begun, strict=False):
                self._end(record, call.seq, e)
            raise
        finally:
            for record, _ in begun:
                self._call(self._returned, record)

    def _measured(self, completion: Completion, record: HookedCall) -> Completion:
        return _HookedCompletion(completion, self, record) if self._waited else completion

    def _begin(self, call: Call, blocking: bool) -> tuple[HookedCall, PendingEntry]:
        context = self._context
        record = HookedCall(call, context, self.name, blocking)
        for place, hook in enumerate(self._hooks):
            if hook.before is None:
                continue
            try:
                # A hook is a function of the user and may take any time, so the search for
                # deadlocks does not count this thread as blocked meanwhile.
                with entered(NotBlocked()):
                    hook.before(record)
            except BaseException as e:
                earlier = self._hooks[:place]
                # The hooks before this one have seen the call begin, so they see it end. The later
                # ones know nothing of it.
                self._call([each.returned for each in earlier if each.returned is not None], record)
                self._end(record, 0, e, [each.after for each in earlier if each.after is not None])
                # The hook refuses the call: nothing has been sent, so the group stays usable.
                # KeyboardInterrupt and the like are no refusal, and fail the group.
                if isinstance(e, Exception):
                    mark_unchanged(e)
                raise
        record.inputs, record.outputs = [], []
        # The time of the hooks themselves does not count.
        record.started = monotonic()
        kind = CallKind(call, context.job.number, context.name, context.ranks, self.name)
        # This entry is in no ring. It goes to the completion beside the recorder's own, only to
        # learn when the call ends.
        entry = PendingEntry(kind, call, record.started, record.started, record.site)
        entry.on_end = lambda: self._end(record, entry.seq, entry.error)
        return record, entry

    def _end(
        self,
        record: HookedCall,
        seq: int,
        error: BaseException | str | None,
        after: Iterable[HookFunction] | None = None,
    ) -> None:
        record.ended = monotonic()
        record.seq = seq
        record.error = (
            f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error or ""
        )
        self._call(self._after if after is None else after, record)

    def _call(
        self, functions: Iterable[Callable[..., None]], record: HookedCall, *args: object
    ) -> None:
        for function in functions:
            try:
                with entered(NotBlocked()):
                    function(record, *args)
            except Exception:
                # The call has been made or has ended already, which an exception cannot take back.
                # Raised here, it would end the thread of the library, or be taken for an error of
                # the call.
                log.exception("a hook of %s failed", record)

    def waited(self, record: HookedCall, seconds: float) -> None:
        """Call the hooks for a thread that was blocked."""
        self._call(self._waited, record, seconds)


class _HookedCompletion(Completion):
    """A completion that measures how long threads are blocked in it."""

    def __init__(self, inner: Completion, backend: HookedBackend, record: HookedCall) -> None:
        self._inner = inner
        self._backend = backend
        self._record = record

    def done(self) -> bool:
        return self._inner.done()

    def wait(self, timeout: float | None) -> None:
        begun = monotonic()
        try:
            self._inner.wait(timeout)
        finally:
            self._backend.waited(self._record, monotonic() - begun)

    def synchronize(self, timeout: float | None = None) -> None:
        begun = monotonic()
        try:
            self._inner.synchronize(timeout)
        finally:
            self._backend.waited(self._record, monotonic() - begun)

    def exception(self) -> BaseException | None:
        return self._inner.exception()

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        self._inner.add_done_callback(fn)

    def track(self, entries: Sequence[PendingEntry]) -> None:
        self._inner.track(entries)

    @property
    def orders_streams(self) -> bool:  # type: ignore[override]
        return self._inner.orders_streams

    @property
    def recorded(self) -> bool:
        return self._inner.recorded

    def took(self) -> float:
        return self._inner.took()
