"""Debug level DETAIL: logs the calls of a group, and compares the ranks' calls for a backend that
does not (NCCL).

A backend that does not compare the ranks' calls (NCCL, which hangs or returns wrong results if they
differ) gets a group of the CPU backend beside it, over the same members. Before each collective the
ranks compare their calls there, on the host; a difference raises the error that the CPU backend
itself raises, and fails the group on all ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from unicoll.backend.contract import Backend, Context, Tracker
from unicoll.backend.host import HostBackend, check_sizes
from unicoll.backend.operation_errors import announce
from unicoll.calls.call import Call, ProxyCall
from unicoll.calls.call_site import call_site
from unicoll.calls.ops import OPS, Sizes
from unicoll.calls.work import Completion
from unicoll.errors import (
    DistArgumentError,
    DistError,
    OperationTimeoutError,
    RankLostError,
    StoreTimeoutError,
)
from unicoll.group import registry
from unicoll.net.stores import Store
from unicoll.process import logs
from unicoll.process.debug_level import DebugLevel, get_debug_level

log = logs.logger("calls")

_BARRIER = OPS["barrier"]
_POLL_S = 1.0
"""How often a rank that waits for the others' levels looks whether they are alive."""

Fail = Callable[[DistError], None]


class CallChecks:
    """Wraps the backends of one group.

    Args:
        fail: ends the group with an error, on all members.
        compare: True if all members had DETAIL when the group was made; else calls are only logged.
    """

    def __init__(self, context: Context, fail: Fail, compare: bool) -> None:
        self._context = context
        self._fail = fail
        self._compare = compare
        self._wrapped: dict[Backend, _ComparedBackend] = {}

    def wrap(self, backend: Backend) -> Backend:
        """The wrapped backend, the same object for each call with one backend; the backend if
        nothing is to be done."""
        # A comparison costs a group of connections, so a backend that compares the calls itself has
        # none.
        compare = self._compare and self._context.size > 1 and not backend.compares
        if not compare and get_debug_level() is not DebugLevel.DETAIL:
            return backend
        # Each backend has one wrapper, since calls are put together in batches by the identity of
        # their backend (Dispatcher.start_batch).
        if backend not in self._wrapped:
            comparison = None
            if compare:
                comparison = _Comparison(self._context, backend.name, self._fail)
            self._wrapped[backend] = _ComparedBackend(backend, self._context, comparison)
        return self._wrapped[backend]

    def abort(self, error: Exception) -> None:
        """End the comparisons with an error; any thread."""
        for checked in [*self._wrapped.values()]:
            if checked.comparison is not None:
                checked.comparison.host.abort(error)

    def close(self) -> None:
        """Release the groups of the comparisons."""
        with ExitStack() as closing:
            for checked in self._wrapped.values():
                if checked.comparison is not None:
                    closing.callback(checked.comparison.host.close)


class _ComparedBackend(Backend):
    """A backend whose calls are logged before they start, and compared unless it does so itself.

    Attributes:
        comparison: compares the calls; None if the backend does.
    """

    def __init__(self, inner: Backend, context: Context, comparison: _Comparison | None) -> None:
        self.name = inner.name  # type: ignore[misc]
        self.caps = inner.caps  # type: ignore[misc]
        self.compares = inner.compares or comparison is not None  # type: ignore[misc]
        self.comparison = comparison
        self._inner = inner
        self._context = context

    def run(self, call: Call) -> Tracker | None:
        call.site = call.site or call_site()
        self._begin((call,))
        return self._inner.run(call)

    def post(self, calls: Sequence[Call], stream: Any = None) -> Completion:
        # The root has refused its list. The comparison tells the other ranks, whose calls end in
        # it. The inner backend gets the call on no rank, so its order stays the same on all.
        if self.comparison is not None and calls[0].refused:
            return self.comparison.post(calls)
        self._begin(calls)
        return self._inner.post(calls, stream)

    def post_each(self, calls: Sequence[Call], stream: Any = None) -> list[Completion]:
        self._log(calls)
        return self._inner.post_each(calls, stream)

    def iprobe(self, call: Call) -> bool:
        return self._inner.iprobe(call)

    @property
    def executing_backend(self) -> Backend | None:
        return self._inner.executing_backend if self.comparison is None else None

    def abort(self, error: Exception) -> None:
        self._inner.abort(error)

    def close(self) -> None:
        self._inner.close()

    def _begin(self, calls: Sequence[Call]) -> None:
        self._log(calls)
        # An asynchronous call, too, waits here for the other ranks: the inner backend, which would
        # hang, gets a call only once all ranks have made the same one. Messages are not compared,
        # since only two ranks take part.
        if self.comparison is not None and not calls[0].op.message:
            self.comparison.run(calls)

    def _log(self, calls: Sequence[Call]) -> None:
        if not log.isEnabledFor(logging.DEBUG):
            return
        # The inner backend numbers the calls when it gets them, after this.
        number = self._inner.sequence
        for i, call in enumerate(calls, 1):
            at = "" if call.op.message else f" #{number + i}"
            where = call.site or calls[0].site
            log.debug(
                "%s%s on group %r, %s, at %s",
                call.describe(),
                at,
                self._context.name,
                self.name,
                where,
            )


class _Comparison:
    """Compares the collectives of a backend between the ranks, by a group of the CPU backend.

    Attributes:
        host: that group's backend.
    """

    def __init__(self, context: Context, backend: str, fail: Fail) -> None:
        self._context = context
        self._fail = fail
        cls = registry.load("gloo")
        cls.prepare(context.job)
        # The name is derived from the group's, so it is equal on all members and unique in the job.
        name = f"{context.name}/{backend}"
        made = cls.create(Context(context.job, name, context.ranks, context.timeout))
        assert isinstance(made, HostBackend)
        self.host = made

    def run(self, calls: Sequence[Call]) -> None:
        """Compare a call, or a batch, with those of the other ranks, which come within its timeout.

        Raises, on all ranks:
            CollectiveMismatchError, OperationTimeoutError, RankLostError: as the CPU backend; the
                group has failed.
            DistArgumentError: the root has refused its list of a gather or scatter; the group stays
                usable.
        """
        check, execute = self._check(calls)
        try:
            self.host.run_with(check, execute)
        except DistArgumentError:
            # The root has refused its list. All ranks raise, and the inner backend has not got the
            # call.
            raise
        except DistError as e:
            # The program knows the user's group, not the one that compares. Both are ended: a rank
            # that goes on would wait in one of them.
            e.group = self._context.name
            self.host.abort(e)
            self._fail(e)
            raise

    def post(self, calls: Sequence[Call]) -> Completion:
        """:meth:`run` in the background."""
        check, execute = self._check(calls)
        return self.host.post_with((check,), execute)

    def _check(self, calls: Sequence[Call]) -> tuple[Call, Callable[[Call], None]]:
        """The call that compares, and the function that executes it."""
        first = calls[0]
        check = ProxyCall(first, _BARRIER, (), (), first.timeout)
        # NCCL does an all_to_all_single with split sizes by other calls than one without, so
        # ``even`` has to agree, too.
        check.signature = hash(tuple((call.signature, call.even) for call in calls))
        return check, partial(self._execute, calls)

    def _execute(self, calls: Sequence[Call], check: Call) -> None:
        self.host.perform(check)
        context = self._context
        for call in calls:
            if call.op.root_has_sizes or call.op.sizes is Sizes.EXCHANGED:
                # The user's call has no number yet. The exchange of its sizes and its errors take
                # that of the comparison.
                call.seq = check.seq
                check_sizes(call, context.rank, context.ranks, context.name, self.host.perform)


def agree_on_level(context: Context, connects: bool) -> None:
    """Check that all ranks of a new group whose backend does not compare calls have DETAIL, or
    none.

    All members call this. Ranks with DETAIL wait for the levels of the others, and fail the group
    if they differ.

    Args:
        connects: True if the backend connects the ranks when the group is made: then all of them
            wait.

    Raises:
        DistArgumentError: the levels differ.
        OperationTimeoutError, RankLostError: not all ranks come.
    """
    name = context.name
    store = context.store
    level = get_debug_level()
    # All ranks publish their levels. A rank without DETAIL need not wait for the others: if the
    # levels differ, the ranks with DETAIL fail the group, which ends its first call. But if the
    # backend connects now, this rank would wait there for ranks that raise here and do not connect.
    store.set(f"debug_level/{context.rank}", level.name)
    if level is not DebugLevel.DETAIL and not connects:
        return
    keys = [f"debug_level/{rank}" for rank in range(context.size)]
    _await_members(store, keys, context)
    levels = [found.decode() for found in store.multi_get(keys)]
    detail = levels.count("DETAIL")
    if detail in (0, context.size):
        return
    some = ", ".join(
        f"rank {rank}: {found}" for rank, found in zip(context.ranks, levels, strict=True)
    )
    error = DistArgumentError(
        f"group {name!r}: the debug level (UNICOLL_DEBUG, set_debug_level) is DETAIL on {detail} of"
        f" {context.size} ranks: with DETAIL the ranks compare their calls, so all must have it"
        f" ({some})",
        group=name,
    )
    raise announce(context, error)


def _await_members(store: Store, keys: list[str], context: Context) -> None:
    name, timeout, control = context.name, context.timeout, context.job.control
    deadline = time.monotonic() + timeout
    while True:
        try:
            # The wait is cut into short ones, because a store does not know that a rank has died.
            store.wait(keys, max(0.0, min(_POLL_S, deadline - time.monotonic())))
            return
        except StoreTimeoutError:
            missing = [
                rank
                for rank, key in zip(context.ranks, keys, strict=True)
                if not store.check([key])
            ]
        for rank in missing:
            if control is not None and rank in control.departed:
                why = control.departed[rank]
                raise RankLostError(f"while group {name!r} was made: {why}", group=name, rank=rank)
        if time.monotonic() >= deadline:
            error = OperationTimeoutError(
                f"group {name!r} was not made by all its ranks in {timeout:g} s; missing:"
                f" {missing}",
                group=name,
            )
            error.missing = missing
            raise error
