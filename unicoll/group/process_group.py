"""The process group: every operation as a method.

Roots and peers of the methods are ranks *in the group*; the functions of the package take global
ranks and call these methods. Methods of a kind are functions of a module of their own:
:mod:`unicoll.group.collective_methods`, :mod:`~unicoll.group.memory_methods`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from unicoll.backend.contract import Backend, Context, Job
from unicoll.backend.operation_errors import announce, member_failed_error
from unicoll.calls.error_marks import leaves_doubt
from unicoll.calls.ops import OPS
from unicoll.calls.options import (
    CallOptions,
    as_call_options,
    compression_of,
    wants_exact_sums,
    wants_timing,
)
from unicoll.calls.status import Status
from unicoll.calls.work import Work
from unicoll.errors import DistArgumentError, DistTypeError, GroupAbortedError
from unicoll.group import collective_methods, memory_methods, resizing
from unicoll.group.arguments import as_integer
from unicoll.group.backend_choice import BackendChoice
from unicoll.group.backends import GroupBackends
from unicoll.group.call_settings import CallSettings
from unicoll.group.dispatcher import Dispatcher
from unicoll.group.registry import BackendType
from unicoll.group.resizing import GrowthRecord
from unicoll.process import logs
from unicoll.process.timeouts import Timeout

if TYPE_CHECKING:
    from unicoll.group.object_seals import ObjectSeals

log = logs.logger("group")

_FORKED = "is not of this process, which was forked from a rank"
_BARRIER = OPS["barrier"]
_SEND, _RECV = OPS["send"], OPS["recv"]


class ProcessGroup:
    """A set of ranks that communicate; made by ``init_process_group`` and ``new_group``, never
    directly.

    Every collective must be called by all members, in the same order. With ``async_op=True`` a
    method returns a :class:`~unicoll.calls.work.Work` at once; otherwise it returns when the
    caller's part is done. ``timeout`` (timedelta or seconds) bounds one call; None takes the
    group's default.

    All operations raise:
        DistArgumentError: an argument does not fit; nothing was sent and the group stays usable.
            The call does not count and concerns this rank alone, unless the argument is the list of
            a :meth:`gather` or :meth:`scatter`, which only the root passes: then the call counts,
            and all other members raise this error in it with the root's message (with NCCL:
            GroupAbortedError).
        CollectiveMismatchError: the ranks called different operations.
        OperationTimeoutError: not done in time; names the ranks that arrived and those that did
            not.
        RankLostError: a member died or left.
        GroupAbortedError: the group was destroyed or aborted.
    After one of the last four the group is of no further use: destroy it and make another.

    A group and its views (:meth:`using`) share context, backends and dispatcher; they differ in
    their settings.
    """

    BackendType = BackendType

    def __init__(
        self,
        context: Context,
        backends: GroupBackends,
        dispatcher: Dispatcher,
        settings: CallSettings,
        base: ProcessGroup | None = None,
    ) -> None:
        self._context = context
        self._backends = backends
        self._dispatcher = dispatcher
        self._settings = settings
        self._base = base

    @classmethod
    def create(
        cls,
        context: Context,
        choices: Sequence[BackendChoice],
        parent: ProcessGroup | None = None,
        excluded: Sequence[int] = (),
        grown: bool = False,
    ) -> ProcessGroup:
        """A new group, added to those of the job; all its members call it.

        :class:`GroupBackends` has the arguments.
        """
        if context.job.forked:
            raise GroupAbortedError(f"group {context.name!r} {_FORKED}", group=context.name)
        parents = parent._backends if parent is not None else None
        backends = GroupBackends(context, choices, parents, excluded, grown)
        try:
            name, options = context.name, context.options
            log.info(
                "created group %r (%s): rank %d of %d",
                name,
                backends.config,
                context.rank,
                context.size,
            )
            settings = CallSettings(
                context.timeout,
                wants_timing(options),
                compression=compression_of(options),
                exact_sums=wants_exact_sums(options),
            )
            made = cls(context, backends, Dispatcher(context, backends), settings)
            # From here on the group is closed when the process leaves the job; before, the handler
            # below does that.
            context.job.groups.append(made)
        except BaseException:
            backends.close()
            raise
        return made

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"group {self.group_name!r} cannot be pickled or copied: it consists of connections of"
            " this process; leave it out of the object (__getstate__, __deepcopy__), and give it"
            " or its name to each process"
        )

    def _pybind11_conduit_v1_(self, *args: Any) -> Any:
        """Called by C++ functions of torch that are given this group in place of one of torch's."""
        raise DistTypeError(
            f"{self!r} is not a process group of torch.distributed:"
            " unicoll.parallel.DistributedDataParallel takes it, and"
            " unicoll.torch_plugin.torch_group(group) is torch's group over it (docs/torch.md)"
        )

    def __repr__(self) -> str:
        context = self._context
        group = (
            f"<ProcessGroup {context.name!r}: rank {context.rank} of {context.size},"
            f" {self.backend_config}"
        )
        if self._base is None:
            return f"{group}>"
        own, shared = self._settings, self._base._settings
        changes = [str(own.options)] if own.options is not None else []
        if own.timeout != shared.timeout:
            changes.append(f"timeout={own.timeout:g}")
        if own.timed != shared.timed:
            changes.append(f"timing={own.timed}")
        return f"{group}, using {', '.join(changes) or 'nothing'}>"

    # --- views and derived groups -----------------------------------------------------------------

    @property
    def object_seals(self) -> ObjectSeals:
        """The MACs of objects that are sent in this group."""
        return self._backends.object_seals

    @property
    def has_tags(self) -> bool:
        """True if messages of host memory have tags; otherwise those between two ranks match in
        order."""
        return self._backends.host.caps.tags

    @property
    def base(self) -> ProcessGroup:
        """The group itself; for a view made by :meth:`using`, the group that it is a view of."""
        return self if self._base is None else self._base

    def using(
        self,
        options: CallOptions | Mapping[str, Any] | None = None,
        *,
        timeout: Timeout = None,
        timing: bool | None = None,
        **named: Any,
    ) -> ProcessGroup:
        """A view of this group whose calls have other settings.

        It is the same group: its members, its order of operations, its life. Pass it as ``group=``
        to any function, or call its methods; keep it for many calls or make it for one.
        ``group.using(max_ctas=4).all_reduce(x)``

        Args:
            options: a :class:`CallOptions`, or a dict with the same names.
            timeout: default timeout of these calls, timedelta or seconds; None keeps the present
                one.
            timing: True if ``Work.duration`` gives how long asynchronous calls took; None keeps the
                present setting.
            named: single options by name, which replace those in ``options`` and those of this
                view; None removes one.

        Raises:
            DistArgumentError: no such option, an impossible value, or an option that no backend of
                the group has.
            DistTypeError: an option of the wrong type.
        """
        changed = as_call_options(self._settings.options, options, named)
        settings = self._settings.changed(timeout, timing, changed)
        if changed is not None:
            self._backends.check_compression("using", changed.compression)
            if settings.passed is not None:
                for backend in self._backends.all:
                    backend.refuse_options(settings.passed)
        return ProcessGroup(self._context, self._backends, self._dispatcher, settings, self.base)

    @cached_property
    def by_functions(self) -> ProcessGroup:
        """The view for public functions: the call site of a call is the caller of the function, not
        of the method (:mod:`unicoll.calls.call_site`)."""
        # Two threads may each make a view at the same time. The views are equal, so either one may
        # stay.
        settings = replace(self._settings, by_functions=True)
        return ProcessGroup(self._context, self._backends, self._dispatcher, settings)

    def shrink(self, ranks_to_exclude: Sequence[int], pg_options: Any = None) -> ProcessGroup:
        """:func:`unicoll.shrink_group` of this group: the remaining members call it and get a group
        of their own."""
        # The list is made here and filled by shrink(), so the handler knows whether the name has
        # been reserved.
        names: list[str] = []
        try:
            return resizing.shrink(self, names, ranks_to_exclude, pg_options)
        except BaseException as e:
            resizing.fail_shrunk(self, names, ranks_to_exclude, e)
            raise

    def grow(self, ranks_to_add: Sequence[int], pg_options: Any = None) -> ProcessGroup:
        """:func:`unicoll.grow_group` of this group, on its members."""
        records: list[GrowthRecord] = []
        try:
            return resizing.grow(self, records, ranks_to_add, pg_options)
        except BaseException as e:
            resizing.fail_grown(self, records, ranks_to_add, e)
            raise

    def _derive(
        self,
        name: str,
        ranks: tuple[int, ...],
        options: Any,
        excluded: Sequence[int] = (),
        grown: bool = False,
    ) -> ProcessGroup:
        """A group made from this one."""
        context = replace(self._context, name=name, ranks=ranks, options=options)
        return ProcessGroup.create(context, self.choices, self, excluded, grown)

    def reserve_parts(self, names: list[str], count: int) -> None:
        """Add the names of the parts that this group is cut into next to ``names``."""
        number = self._backends.children + 1
        made = [f"{self.name}/{number}.{i}" for i in range(count)]
        # Nothing is called from here on: an exception of a signal's handler comes before both or
        # behind both.
        names += made
        self._backends.children = number

    def next_child(self) -> int:
        """Number of the next group derived from this one, from 1; equal on all members that make
        the same calls."""
        self._backends.children += 1
        return self._backends.children

    def fail_derived(
        self, names: list[str], reserve: Callable[[], object], cause: BaseException
    ) -> None:
        """Fail groups that members of this one make, on all of them, if an exception is no refusal.

        Args:
            names: of these groups; empty if they have not been reserved.
            reserve: reserves them.
            cause: the exception, which ends the call on this rank.
        """
        if leaves_doubt(cause):
            if not names:
                # The exception came before the names were reserved. The other members may be making
                # groups of these names, and count them for later names, so this rank reserves them
                # now. Wrong arguments raise here again: the other ranks refuse them, too, and make
                # no group.
                with suppress(Exception):
                    reserve()
            for name in names:
                context = replace(self._context, name=name)
                announce(context, member_failed_error(context, "creating", cause))

    def leave_out(self, choices: Sequence[BackendChoice]) -> None:
        """Take part in making a group of other members of this one; all members do."""
        self._backends.split_without_this_rank(choices)

    # --- collectives ------------------------------------------------------------------------------

    def barrier(self, *, async_op: bool = False, timeout: Timeout = None) -> Work | None:
        """Return when all members have called it (MPI_Barrier)."""
        try:
            return self._dispatcher.start(self._settings, _BARRIER, (), (), async_op, timeout)
        except BaseException as e:
            self.interrupted(e)
            raise

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose timeout error names every missing rank, with or without
        ``wait_all_ranks``."""
        try:
            self._dispatcher.start(self._settings, _BARRIER, (), (), False, timeout)
        except BaseException as e:
            self.interrupted(e)
            raise

    broadcast = collective_methods.broadcast
    all_reduce = collective_methods.all_reduce
    reduce = collective_methods.reduce
    all_gather = collective_methods.all_gather
    all_gather_into_tensor = collective_methods.all_gather_into_tensor
    gather = collective_methods.gather
    scatter = collective_methods.scatter
    reduce_scatter = collective_methods.reduce_scatter
    reduce_scatter_tensor = collective_methods.reduce_scatter_tensor
    all_to_all = collective_methods.all_to_all
    all_to_all_single = collective_methods.all_to_all_single
    scan = collective_methods.scan
    exscan = collective_methods.exscan
    all_reduce_coalesced = collective_methods.all_reduce_coalesced
    broadcast_coalesced = collective_methods.broadcast_coalesced
    all_gather_coalesced = collective_methods.all_gather_coalesced
    all_gather_into_tensor_coalesced = collective_methods.all_gather_into_tensor_coalesced
    reduce_scatter_tensor_coalesced = collective_methods.reduce_scatter_tensor_coalesced

    # --- point to point ---------------------------------------------------------------------------

    def send(self, tensor: Any, dst: int, tag: int = 0, *, timeout: Timeout = None) -> None:
        """Send to member ``dst``; returns when ``tensor`` may be changed (MPI_Send)."""
        try:
            self._dispatcher.run_message(self._settings, (_SEND, tensor, dst, tag, None), timeout)
        except BaseException as e:
            self.interrupted(e)
            raise

    def recv(
        self,
        tensor: Any,
        src: int | None = None,
        tag: int | None = 0,
        *,
        status: Status | None = None,
        timeout: Timeout = None,
    ) -> int:
        """Receive from member ``src``, or from any; returns the sender's rank in the group
        (MPI_Recv).

        Raises:
            MessageMismatchError: the message is of another size or dtype; it is lost, the group
                stays usable.
        """
        try:
            return self._dispatcher.run_message(
                self._settings, (_RECV, tensor, src, tag, status), timeout
            ).source
        except BaseException as e:
            self.interrupted(e)
            raise

    def isend(self, tensor: Any, dst: int, tag: int = 0, *, timeout: Timeout = None) -> Work:
        """:meth:`send` in the background."""
        try:
            return self._dispatcher.start_message(
                self._settings, (_SEND, tensor, dst, tag, None), timeout
            )
        except BaseException as e:
            self.interrupted(e)
            raise

    def irecv(
        self,
        tensor: Any,
        src: int | None = None,
        tag: int | None = 0,
        *,
        status: Status | None = None,
        timeout: Timeout = None,
    ) -> Work:
        """:meth:`recv` in the background; ``work.source_rank()`` is the sender's rank in the
        group."""
        try:
            return self._dispatcher.start_message(
                self._settings, (_RECV, tensor, src, tag, status), timeout
            )
        except BaseException as e:
            self.interrupted(e)
            raise

    def probe(
        self, src: int | None = None, tag: int | None = None, *, timeout: Timeout = None
    ) -> Status:
        """Wait for a message from member ``src``, or from any, and leave it there (MPI_Probe)."""
        try:
            return self._dispatcher.probe(self._settings, src, tag, timeout)
        except BaseException as e:
            self.interrupted(e)
            raise

    def iprobe(self, src: int | None = None, tag: int | None = None) -> Status | None:
        """:meth:`probe` without waiting; None if no such message has come (MPI_Iprobe)."""
        try:
            return self._dispatcher.iprobe(self._settings, src, tag)
        except BaseException as e:
            self.interrupted(e)
            raise

    def batch_isend_irecv(
        self,
        ops: Sequence[tuple[bool, Any, int | None, int | None]],
        *,
        status: Status | None = None,
        timeout: Timeout = None,
    ) -> list[Work]:
        """Start several sends and receives, given as (is send, array, peer's rank in the group,
        tag).

        Args:
            ops: in the order of the messages to, and from, each peer.
            status: of all receives of the batch, of which there should be one.
            timeout: of each.
        """
        try:
            messages = [
                (_SEND if is_send else _RECV, x, peer, tag, None if is_send else status)
                for is_send, x, peer, tag in ops
            ]
            return self._dispatcher.start_messages(self._settings, messages, timeout)
        except BaseException as e:
            self.interrupted(e)
            raise

    # --- symmetric memory, one-sided operations ---------------------------------------------------

    put = memory_methods.put
    signal = memory_methods.signal
    wait_signal = memory_methods.wait_signal
    symmetric_empty = memory_methods.symmetric_empty
    peer_view = memory_methods.peer_view
    fence = memory_methods.fence
    register = memory_methods.register

    # --- properties -------------------------------------------------------------------------------

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._context.rank

    def size(self) -> int:
        """Number of members."""
        return self._context.size

    @property
    def name(self) -> str:
        """The group's own name, unique in the job."""
        return self._context.name

    # This is torch's name of the property.
    group_name = name

    @property
    def group_desc(self) -> str:
        """The user's description."""
        return self._context.desc

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' global ranks, in group order."""
        return self._context.ranks

    @property
    def timeout(self) -> float:
        """Default timeout of its operations, seconds."""
        return self._settings.timeout

    @property
    def job(self) -> Job:
        """The state that all groups of the job share."""
        return self._context.job

    @property
    def choices(self) -> tuple[BackendChoice, ...]:
        """The backend of each device type, with the reason for the choice."""
        return self._backends.choices

    @property
    def bound_device_id(self) -> Any:
        """The device that the group is bound to, or None."""
        return self._context.device

    @property
    def wrapper(self) -> Any:
        """Another library's group over this one, which is closed with it; None if there is none."""
        return self._backends.wrapper

    @wrapper.setter
    def wrapper(self, wrapper: Any) -> None:
        self._backends.wrapper = wrapper

    @property
    def sequence(self) -> int:
        """Number of the last collective that the backend of CPU arrays accepted, from 1."""
        return self._backends.host.sequence

    @property
    def backend_name(self) -> str:
        """``"gloo"``, or ``"cpu:gloo,cuda:nccl"`` where several backends were chosen explicitly."""
        return self._backends.name

    @property
    def backend_config(self) -> str:
        """The backend of each device type: ``"cpu:gloo,cuda:nccl"``."""
        return self._backends.config

    @property
    def backends(self) -> tuple[Backend, ...]:
        """Every backend of the group once, in the order of :attr:`choices`; then one that another
        one uses."""
        return self._backends.all

    def global_rank(self, group_rank: int) -> int:
        """The global rank of a member; DistArgumentError if there is none of that rank."""
        if type(group_rank) is not int:
            group_rank = as_integer("global_rank: group_rank", group_rank)
        ranks = self._context.ranks
        if not 0 <= group_rank < len(ranks):
            raise DistArgumentError(
                f"group rank {group_rank} is not in group {self.name!r} of {len(ranks)}"
            )
        return ranks[group_rank]

    def group_rank(self, global_rank: int) -> int:
        """The rank in the group of a global rank; DistArgumentError if it is not a member."""
        global_rank = as_integer("group_rank: global_rank", global_rank)
        if global_rank not in self.ranks:
            raise DistArgumentError(
                f"rank {global_rank} is not in group {self.name!r} {list(self.ranks)}"
            )
        return self.ranks.index(global_rank)

    def describe(self) -> str:
        """How its data moves, in a few words."""
        return self._backends.describe()

    def staging_bytes(self) -> dict[str, int]:
        """Memory that this rank holds for the group's transfers, by device type, whatever the size
        of the arrays."""
        return self._backends.staging_bytes()

    # --- end --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error with which the group has failed, if it has; else return at once.

        Operations on a device end after their calls have returned, so an error may come when no
        call is left to raise it: check before you save a result, behind the synchronization with
        the device. It asks the library for the state of the communicator, as the watchdog does ten
        times a second, and nothing else, and does not wait for operations. Any member may call it
        at any time, also while a thread is in an operation.

        Raises:
            DistError: the error that calls of the group raise since it has failed, or that the
                library reports now.
            GroupAbortedError: the group was destroyed.
        """
        self._backends.check()

    def abort(self, reason: str = "aborted by the program") -> None:
        """Make every pending and later operation of the group raise GroupAbortedError, on all
        members."""
        context = self._context
        self._backends.fail(
            GroupAbortedError(
                f"group {context.name!r}: {reason}", group=context.name, rank=context.job.rank
            )
        )

    def interrupted(self, error: BaseException) -> None:
        """Fail the group on all members if an exception ends a call of it whose state is then not
        known.

        Called by the function of the call, in its handler of any exception. Refusals, and errors
        that the group has raised, do not fail it (:mod:`unicoll.calls.error_marks`); :meth:`close`
        does not raise the latter again.
        """
        # The outermost frame of the traceback is that of the method whose handler calls this.
        traceback = error.__traceback__
        name = traceback.tb_frame.f_code.co_name if traceback is not None else "a call"
        self._backends.interrupted(error, name)

    def abort_on_this_rank(self, error: Exception) -> None:
        """Make every pending and later operation raise ``error`` without a notice to the other
        members."""
        self._backends.abort(error)

    def forget(self) -> None:
        """Refuse later calls, in a forked child, which is not a member."""
        self._dispatcher.refuse(_FORKED)

    def close(self, raise_failure: bool = True) -> None:
        """Finish pending operations, within bounds, and release everything; idempotent.

        Args:
            raise_failure: False if the error of a group that has failed is not raised.

        Raises:
            DistError: the error with which operations have ended that had been posted, if no call
                has raised it.
        """
        # The mark comes first, since close() of a backend looks at it.
        if not raise_failure:
            self._backends.failure_delivered()
        if not self._backends.closed:
            log.info("destroying group %r", self.name)
        self._dispatcher.close()
