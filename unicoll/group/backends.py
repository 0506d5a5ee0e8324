"""The backends of one process group, by the type of the device whose arrays they serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unicoll.backend.contract import Backend, Context
from unicoll.backend.operation_errors import announce, member_failed_error
from unicoll.calls.call import Call
from unicoll.calls.error_marks import is_delivered, leaves_doubt, mark_delivered
from unicoll.calls.options import compression_of, wants_exact_sums, wants_order
from unicoll.calls.reduce_ops import only_on_host
from unicoll.errors import (
    BackendUnavailableError,
    DistArgumentError,
    DistError,
    DistTypeError,
    GroupAbortedError,
)
from unicoll.group.backend_choice import DEFAULTS, STAGED, BackendChoice
from unicoll.group.registry import load, reason_against
from unicoll.process.debug_level import DebugLevel, get_debug_level

if TYPE_CHECKING:
    from unicoll.group.call_log import CallLog
    from unicoll.staging.backend import Staged


class GroupBackends:
    """Creates, selects, aborts and closes the backends of one group.

    Args:
        context: the group.
        choices: the backend of each device type.
        parent: the backends of the group that this one is derived from, or None.
        excluded: ranks in the parent that a shrink leaves out.
        grown: True if the group is the result of a grow.

    Attributes:
        closed: why every later call is refused, once the group is being destroyed, and in a forked
            child; else "".
        children: number of groups split or grown from this one so far; numbers their names.
        shrinks: number of groups shrunk from this one so far, by their members.
        wrapper: another library's group over this one, closed with it; None if there is none.
        host: the backend of CPU arrays, barriers and objects; the first backend where none serves
            CPU arrays.
        object_seals: the MACs of objects.
    """

    def __init__(
        self,
        context: Context,
        choices: Sequence[BackendChoice],
        parent: GroupBackends | None = None,
        excluded: Sequence[int] = (),
        grown: bool = False,
    ) -> None:
        self.choices = tuple(choices)
        self.closed = ""
        self.wrapper: Any = None
        self.children = 0
        self.shrinks: Counter[tuple[int, ...]] = Counter()
        self._context = context
        self._by_class: dict[type[Backend], Backend] = {}
        self._by_device: dict[str, Backend] = {}
        self._staged: dict[str, Staged] = {}
        self._failure_delivered = False
        self._call_log: CallLog | None = None
        self.check_compression("pg_options", compression_of(context.options))
        self.debug_level_changed()
        try:
            self.host = self._create(parent, excluded, grown)
            # This is not imported with the module, because it loads hashlib.
            from unicoll.group.object_seals import ObjectSeals, needs_seals

            self.object_seals = ObjectSeals(
                context.rank, context.name, context.job.key, needs_seals(context, self.host)
            )
        except BaseException:
            # This closes the backends that have been created.
            self.close()
            raise

    def _create(
        self, parent: GroupBackends | None, excluded: Sequence[int], grown: bool
    ) -> Backend:
        """Create the backends; returns :attr:`host`."""
        for choice in self.choices:
            # Device types with the same backend share one object, so that one queue orders all
            # their calls.
            if choice.cls not in self._by_class:
                context = replace(self._context, explicit=choice.explicit, backend=choice.cls.name)
                parents = parent._by_class.get(choice.cls) if parent is not None else None
                self._by_class[choice.cls] = _create(choice.cls, context, parents, excluded, grown)
            # Staging for the other devices is made for their first array (for_device).
            if not choice.staged:
                self._by_device[choice.device] = self._by_class[choice.cls]
        host = self._by_device.get("cpu") or next(iter(self._by_class.values()))
        delegate = self._delegate_of(host)
        if delegate is not None:
            # The job has prepared the backends that were chosen when it was joined, without this
            # one.
            delegate.prepare(self._context.job)
            self._by_class[delegate] = made = delegate.create(
                replace(self._context, backend=delegate.name)
            )
            host.set_delegate(made)
        return host

    def debug_level_changed(self) -> None:
        """Have later calls logged at debug level DETAIL."""
        if self._call_log is None and get_debug_level() is DebugLevel.DETAIL:
            from unicoll.group.call_log import CallLog

            self._call_log = CallLog(self._context)

    def _delegate_of(self, backend: Backend) -> type[Backend] | None:
        """The class of the backend that a backend has in addition; None if it has none, or there is
        one already."""
        job, ranks = self._context.job, self._context.ranks
        if not backend.delegate or len(ranks) == 1 or job.control is None or not job.control.peers:
            return None
        if len({job.control.peers[rank].host for rank in ranks}) > 1 or reason_against(
            backend.delegate
        ):
            return None
        found = load(backend.delegate)
        return found if found not in self._by_class else None

    def check_compression(self, where: str, compression: str | None) -> None:
        """Raise DistArgumentError if the group cannot have a compression; ``where``: argument or
        function."""
        if compression in (None, "", "none"):
            return
        if not any(choice.cls.caps.compresses for choice in self.choices):
            names = ", ".join(sorted({choice.cls.name for choice in self.choices}))
            raise DistArgumentError(
                f"{where}: compression={compression!r}: backend {names} does not support"
                " compression; backend gloo does"
            )
        if wants_order(self._context.options):
            raise DistArgumentError(
                f"{where}: compression={compression!r}: the reductions of this group are"
                " deterministic, and the result of a compressed one depends on the transport"
            )
        if wants_exact_sums(self._context.options):
            raise DistArgumentError(
                f"{where}: compression={compression!r}: the sums of this group are exact"
            )

    @property
    def all(self) -> tuple[Backend, ...]:
        """Every backend of the group once, without staging."""
        return tuple(self._by_class.values())

    def for_device(self, device: str) -> Backend | None:
        """The backend that serves arrays of a device type, staged through host memory if need be;
        None if none does."""
        return self._by_device.get(device) or self._stage(device)

    def unstaged(self, device: str) -> Backend:
        """The backend of a device type, without staging; :attr:`host` if none serves it."""
        return self._by_device.get(device, self.host)

    @property
    def on_device(self) -> Backend:
        """The backend of arrays on a device, without staging; :attr:`host` if the group has
        none."""
        return next((self._by_device[d] for d in DEFAULTS if d in self._by_device), self.host)

    def route(self, call: Call) -> Backend:
        """The backend that serves a call.

        Raises:
            GroupAbortedError: the group has been destroyed.
            BackendUnavailableError: no backend serves the device, or the backend lacks the
                operation.
            DistTypeError: the backend lacks the reduction for the element type.
        """
        name = call.op.name
        if self.closed:
            raise self._destroyed(name)
        buffers = call.inputs or call.outputs
        backend: Backend | None = self.host
        if buffers:
            device = buffers[0].device.type
            backend = self.for_device(device)
        if backend is None:
            raise BackendUnavailableError(
                f"{name}: no backend of group {self._context.name!r} ({self.config}) serves"
                f" {device} arrays",
                op=name,
            )
        # The ways out below depend only on the operation, the element type and the reduction, which
        # are equal on all ranks, so all ranks take the same backend.
        if not _serves(backend, name) and buffers:
            backend = self._through_host(device) or backend
        if not _serves(backend, name):
            raise BackendUnavailableError(
                f"{name}: backend {backend.name} does not have this operation", op=name
            )
        if call.reduce is not None and not backend.caps.reduces(buffers[0].dtype, call.reduce):
            through_host = None
            if only_on_host(buffers[0].dtype, call.reduce):
                through_host = self._through_host(buffers[0].device.type)
            if through_host is None or not through_host.caps.reduces(buffers[0].dtype, call.reduce):
                raise DistTypeError(
                    f"{name}: backend {backend.name} does not reduce {buffers[0].dtype} by"
                    f" {call.reduce.name}",
                    op=name,
                )
            backend = through_host
        return backend if self._call_log is None else self._call_log.wrap(backend)

    def _destroyed(self, op: str | None) -> GroupAbortedError:
        name = self._context.name
        return GroupAbortedError(f"group {name!r} {self.closed}", group=name, op=op)

    def _stage(self, device: str) -> Backend | None:
        """Staging of device arrays for all operations; None if the host's backend does not support
        it."""
        staged = self._through_host(device)
        if staged is not None:
            self._by_device[device] = staged
        return staged

    def _through_host(self, device: str) -> Backend | None:
        """The host's backend with device arrays staged through host memory; None if it does not
        support that."""
        host = next((self._by_class[c.cls] for c in self.choices if c.staged), self.host)
        if device not in STAGED or not host.stages:
            return None
        if device not in self._staged:
            from unicoll.backend.host import HostBackend
            from unicoll.staging.backend import Staged

            assert isinstance(host, HostBackend)
            context = self._context
            self._staged[device] = Staged(host, device, context.rank, context.ranks, context.name)
        return self._staged[device]

    # --- descriptions -----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """``"gloo"``, or ``"cpu:gloo,cuda:nccl"`` where several backends were chosen explicitly."""
        names = {c.name for c in self.choices if not c.implicit}
        return names.pop() if len(names) == 1 else self.config

    @property
    def config(self) -> str:
        """The backend of each device type: ``"cpu:gloo,cuda:nccl"``."""
        return ",".join(f"{c.device}:{c.name}" for c in self.choices)

    def describe(self) -> str:
        """How the backends move data, for ``explain()``."""
        backends = [*self.all, *self._staged.values()]
        return "; ".join(backend.describe() for backend in backends)

    def staging_bytes(self) -> dict[str, int]:
        """Bytes of memory that this rank holds for transfers, by device type."""
        return {device: backend.staging for device, backend in self._by_device.items()}

    # --- life -------------------------------------------------------------------------------------

    def split_without_this_rank(self, choices: Sequence[BackendChoice]) -> None:
        """Take part in a split whose group this rank is not a member of."""
        for cls in dict.fromkeys(choice.cls for choice in choices):
            if cls in self._by_class:
                self._by_class[cls].split(None)

    def check(self) -> None:
        """Raise the error with which a backend has failed."""
        if self.closed:
            raise self._destroyed(None)
        try:
            for backend in self.all:
                backend.raise_failure()
        except DistError:
            self.failure_delivered()
            raise

    def fail(self, error: DistError) -> None:
        """End the group with an error, on all members."""
        # The error comes from the program, or is raised to it, so close() does not raise it again.
        mark_delivered(error)
        self.abort(announce(self._context, error))
        self.failure_delivered()

    def failure_delivered(self) -> None:
        """The error has been raised to the program, or is not wanted: :meth:`close` does not raise
        it."""
        self._failure_delivered = True
        for error in self._failures():
            mark_delivered(error)

    def _failures(self) -> list[DistError]:
        """The error of each backend that has failed: each has an object of its own."""
        return [error for backend in self.all if (error := backend.failure) is not None]

    def interrupted(self, cause: BaseException, operation: str) -> None:
        """End the group on all members if ``cause``, which ends a call of it, leaves its state
        unknown.

        The other ranks may be in the call, and would else take this rank's next one for it.
        """
        mark_delivered(cause)
        # A refused call on a failed group does not say that the group has failed. An exception that
        # is not the library's does not, either. The program knows nothing of the failure then, so
        # close() still raises it.
        if (
            isinstance(cause, DistError)
            and not isinstance(cause, DistArgumentError)
            and self._failures()
        ):
            # The program has got the failure from one backend. Each backend has an error object of
            # its own, so all of them are marked.
            self.failure_delivered()
        if not leaves_doubt(cause) or self.closed:
            return
        error = member_failed_error(self._context, f"calling {operation} on", cause)
        try:
            error = announce(self._context, error)
        finally:
            # The group ends on this rank also if a second interrupt ends the wait for the first
            # error of the group.
            self.abort(error)
            # The program gets the cause, so close() does not raise the group's error.
            self.failure_delivered()

    def abort(self, error: Exception) -> None:
        """End the group with an error, on this rank."""
        for backend in self._by_class.values():
            backend.abort(error)

    def close(self) -> None:
        """Finish pending operations, within bounds, and release everything."""
        # A failure does not keep the others from being closed. The stack calls the last function
        # first: the group of another library, which uses this one, is closed first. The backends
        # follow in the order in which they were made, since a delegate is
        # closed after the backend that passes calls to it. Staging is last: its memory may be used
        # until the host's backend has been closed.
        with ExitStack() as closing:
            for staged in self._staged.values():
                closing.callback(staged.close)
            for backend in reversed(self._by_class.values()):
                closing.callback(self._close, backend)
            if self.wrapper is not None:
                closing.callback(self.wrapper.close)

    def _close(self, backend: Backend) -> None:
        # One error that has been raised is enough: the others of this group have the same cause.
        delivered = any(map(is_delivered, self._failures()))
        try:
            backend.close()
        except DistError:
            if not (delivered or self._failure_delivered):
                raise


def _serves(backend: Backend, name: str) -> bool:
    """True if a backend has an operation, or a fallback for it."""
    if name in backend.caps.native:
        return True
    from unicoll.backend.host import available

    return name in available(backend.caps)


def _create(
    cls: type[Backend],
    context: Context,
    parent: Backend | None,
    excluded: Sequence[int],
    grown: bool,
) -> Backend:
    """The backend of a new group, derived from the parent's backend of the same class if there is
    one."""
    # This is not imported with the module, which keeps `import unicoll` short.
    from unicoll.backend.host import with_fallbacks

    made: Backend | None
    if parent is None:
        made = cls.join_grown(context) if grown else cls.create(context)
    elif grown:
        made = parent.grow(context)
    elif excluded:
        made = parent.shrink(context, excluded)
    else:
        made = parent.split(context)
    assert made is not None
    return with_fallbacks(made, context)
