"""The contract of backends: what a backend is created from, what it gets, and what it must provide.

A backend serves one process group. It is created from a :class:`Context` and gets :class:`Call`
records, whose buffers are contiguous and whose arguments have been checked.

**Required** are a class attribute ``name`` and three methods: ``post`` (starts calls and returns a
:class:`~unicoll.calls.work.Completion`), ``abort`` and ``close``. Everything else has a default. A
backend of arrays in host memory derives from
:class:`~unicoll.backend.host.host_backend.HostBackend`, which gives it order, numbers, asynchronous
calls and fallbacks; instead of ``post`` it defines ``execute``, which does one call and blocks.

**Operations.** ``caps.native`` names the operations that the backend has. At least ``send`` and
``recv``, or one collective that moves data (``broadcast``, ``all_gather`` or
``all_gather_into_tensor``) must be among them: a collective that is not native runs as a fallback
(:mod:`unicoll.backend.host.fallbacks`) over those. Where that is not possible the call is refused
with BackendUnavailableError. :class:`~unicoll.calls.ops.Op` describes the inputs and outputs of
each operation.

**A call.** A backend reads ``call.inputs`` and writes ``call.outputs`` through ``Buffer.flat``
(CPU) or ``Buffer.ptr`` (CUDA), and nothing else: inputs may be read-only, and an operation in place
has the same tuple for both. :mod:`unicoll.arrays.kernels` reduces arrays of every element type,
also those that NumPy lacks. After it has written the outputs it calls :meth:`Call.write_back`. It
must notice calls that differ between ranks (``call.signature`` is equal on all ranks if the calls
agree; fallbacks compare it), a deadline (``call.timeout`` seconds) and ``abort``, and then raise
the same error on all ranks as far as possible.

**Messages.** ``send`` and ``recv`` match by (``call.peer``, ``call.tag``) in the order of the
calls; a receive with ``peer`` -1 takes a message from any member and sets ``call.source``. Tags are
signed 64-bit integers; the lowest one is for fallbacks. A message that comes before its receive is
kept. With ``probe`` among ``caps.native`` the backend also has :meth:`Backend.iprobe`, messages of
a rank to itself, receives and probes whose ``tag`` is None (any), and receives with
``call.partial``, which take shorter messages; it calls :meth:`Call.matched`. Without ``probe``
these are refused.

:class:`unicoll.testing.Conformance` tests the results of operations, their order and what is
refused, but no failures. docs/writing-a-backend.md builds a backend and tests it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from unicoll.arrays.buffer import Buffer
from unicoll.arrays.types import DType, Reduction
from unicoll.calls.call import Call, OneSidedCall
from unicoll.calls.error_marks import mark_delivered
from unicoll.calls.options import CallOptions
from unicoll.errors import BackendUnavailableError, DistError

if TYPE_CHECKING:
    from unicoll.calls.flight_recorder import PendingEntry
    from unicoll.calls.ops import Op
    from unicoll.calls.work import Completion
    from unicoll.net.control.client import ControlClient
    from unicoll.net.stores import Store


def host_reduces(dtype: DType, reduction: Reduction) -> bool:
    """True if :mod:`unicoll.arrays.kernels` reduces elements of this type: all types but float8."""
    return dtype.native or (dtype.half and dtype.itemsize == 2)


@dataclass(frozen=True)
class Caps:
    """The capabilities of a backend.

    Attributes:
        devices: device types whose arrays it takes.
        native: names of the operations that it has itself.
        reduces: ``reduces(dtype, reduction)`` is False for reductions that are refused with
            DistTypeError. Operations that do not reduce take all types.
        compresses: True if it takes calls with a :attr:`Call.compression`, and keeps the error
            bounds of :mod:`unicoll.arrays.compression`; it need not compress.
        tags: False if messages between two ranks match in order, and a tag other than 0 is refused.
        joins_batches: True if a batch of sends and receives is one operation, in which a message to
            oneself is received in the same batch. With ``probe`` among ``native`` these need no
            batch.
        fallbacks: False if operations that are not native are refused, as those of arrays on a
            device are.
    """

    devices: frozenset[str] = frozenset({"cpu"})
    native: frozenset[str] = frozenset({"send", "recv"})
    reduces: Callable[[DType, Reduction], bool] = host_reduces
    compresses: bool = False
    tags: bool = True
    joins_batches: bool = False
    fallbacks: bool = True


@dataclass(eq=False, repr=False)
class Job:
    """A job that this process has joined: what all its groups share.

    Attributes:
        rank, size: of this process in the world.
        first_store: the store with which the job began, see :attr:`store`.
        key: secret key of the job's connections, never empty.
        allows_pickle: True if all ranks trust the job and none has ``UNICOLL_ALLOW_PICKLE=0``.
        addresses: this host's addresses to listen on.
        timeout: default timeout of the world group, seconds.
        control: liveness and failure notices; None for a world of one, and if ``fake``.
        local_rank, local_size: of the processes on this host; None if the launcher does not set
            them.
        exit_cause: asks the launcher how a rank ended; may take a fraction of a second.
        fake: True if there are no other processes: every group has the backend ``fake``.
        rendezvous: how the processes have found each other
            (:class:`unicoll.bootstrap.rendezvous.Rendezvous`).
        choices: the backends of the default group.
        notes: what was chosen, from which source and why; one line each.
        groups: the open groups, in the order in which they were created.
        ended: for the orders of operations of groups that this process has destroyed, the last
            number that it posted.
        default: the group of all ranks with which the job begins, and ends; None until it is made,
            and in a job that the torch plug-in has joined for a group of its own.
        named: how often each name of a group was used on this rank, for numbering.
        hooks: the hooks of all groups, also of later ones (:mod:`unicoll.group.call_hooks`).
        error: the exception or SystemExit because of which this process leaves the job; None
            before, and if the program goes on.
        on_leave: called first when this process leaves the job, and in a forked child of it.
        cleanup: what is closed when this process leaves the job.
        number: of the job in this process, never used again.
        forked: True in a forked child, which is not a member.
        name: with which it was joined (:func:`unicoll.join`), or "".
    """

    rank: int
    size: int
    first_store: Store
    key: bytes
    addresses: list[str]
    timeout: float
    control: ControlClient | None = None
    local_size: int | None = None
    exit_cause: Callable[[int], str | None] | None = None
    local_rank: int | None = None
    fake: bool = False
    allows_pickle: bool = False
    rendezvous: Any = None
    choices: Sequence[Any] = ()
    notes: list[str] = field(default_factory=list)
    groups: list[Any] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    default: Any = None
    named: Counter[str] = field(default_factory=Counter)
    hooks: tuple[Any, ...] = ()
    error: BaseException | None = None
    on_leave: list[Callable[[], None]] = field(default_factory=list)
    cleanup: ExitStack = field(default_factory=ExitStack)
    number: int = field(default_factory=count(1).__next__)
    forked: bool = False
    name: str = ""
    _shared: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def exiting(self) -> bool:
        """True once the program ends without having left the job."""
        return self.error is not None

    @property
    def store(self) -> Store:
        """The job's store, prefixed, its values signed; another one once the process that hosted it
        has died."""
        replacement = self.control.replacement_store() if self.control is not None else None
        return self.first_store if replacement is None else replacement

    def cause_of_death(self, rank: int) -> str:
        """The launcher's report on a rank that died, as the end of a sentence; "" without one."""
        cause = self.exit_cause(rank) if self.exit_cause is not None else None
        return f" ({cause})" if cause else ""

    def close_group(self, group: Any, reason: str = "", *, stays: bool = False) -> None:
        """Close a group of this job. The last one leaves the job, and so does the default group
        without a reason.

        Args:
            reason: why the calls of other ranks in the group raise, which may not know of a loss
                yet; "" if all its members close it.
            stays: True if the job is not left even if it has no group any more.

        Raises:
            DistError: of the group, if it has failed and no call has raised it; not with a reason.
        """
        if group is self.default and not reason:
            self.leave()
            return
        # An exception of a signal's handler may come in any of these lines: what was registered
        # before is called all the same. The callbacks run in reverse order.
        with ExitStack() as ending:
            if not stays:
                ending.callback(self._leave_if_empty)
            ending.callback(group.close, raise_failure=not reason)
            if reason:
                self._abort(group, reason)
            if group in self.groups:
                self.groups.remove(group)

    def _leave_if_empty(self) -> None:
        if not self.groups:
            self.leave()

    def _abort(self, group: Any, reason: str) -> None:
        control = self.control
        if control is not None and control.group_failure(group.name) is None:
            died = [rank for rank in control.died if rank in group.ranks]
            group.abort(f"{control.departed[died[0]]}; {reason}" if died else reason)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the job: close its groups, the control plane and the store; idempotent.

        Args:
            error: the exception that has ended the program, or SystemExit; None if the program goes
                on.

        Raises:
            DistError: of a group that has failed, if no call has raised it.
        """
        self.error = self.error or error
        for call in [*self.on_leave]:
            call()
        # A second call has no effect on a job that has become the default one meanwhile.
        self.on_leave.clear()
        groups = [*self.groups]
        self.groups.clear()
        # An exception in one of these does not keep the others open.
        with self.cleanup.pop_all() as cleanup:
            for group in groups:
                cleanup.callback(group.close)
            if error is not None and not isinstance(error, SystemExit):
                ended = DistError(f"this process ended with {type(error).__name__}: {error}")
                mark_delivered(ended)
                for group in groups:
                    # Pending operations must not block the exit.
                    group.abort_on_this_rank(ended)

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """A resource of which a backend has one per process and job, a listener for example; closed
        with the job."""
        # The resource is made with the lock, so that two threads do not make two of it.
        with self._lock:
            if name not in self._shared:
                self._shared[name] = make()
            return self._shared[name]

    def close_shared(self) -> None:
        """Close the shared resources; idempotent."""
        with self._lock:
            shared, self._shared = self._shared, {}
        # An error in one does not keep the others open.
        with ExitStack() as cleanup:
            for resource in reversed(shared.values()):
                cleanup.callback(resource.close)


@dataclass
class Context:
    """The group that a backend is created for.

    Attributes:
        job: state shared by all groups of the job.
        name: the group's name, equal on all its members and unique in the job.
        ranks: the members' global ranks, in group order.
        timeout: default timeout of the group's operations, seconds.
        options: the user's ``pg_options``.
        device: device that the group is bound to, or None.
        explicit: True if the user named the backend.
        backend: name of the backend; a group may have several.
        desc: the user's description.
        rank: this process's rank in the group.
        size: number of members.
    """

    job: Job
    name: str
    ranks: tuple[int, ...]
    timeout: float
    options: Any = None
    device: Any = None
    explicit: bool = False
    backend: str = ""
    desc: str = "undefined"
    rank: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank = self.ranks.index(self.job.rank)
        self.size = len(self.ranks)

    @property
    def store(self) -> Store:
        """The job's store, with keys of this group alone: every key gets the group's name as a
        prefix."""
        # It is imported here because few backends need it.
        from unicoll.net.stores import PrefixStore

        return PrefixStore(f"group/{self.name}", self.job.store)

    def who(self, group_rank: int) -> str:
        """A member as text: rank, and host and pid if they are known."""
        control = self.job.control
        rank = self.ranks[group_rank]
        return control.describe(rank) if control is not None else f"rank {rank}"


class Tracker(Protocol):
    """An enqueued call that marks its end in the flight recorder."""

    def track(self, entries: Sequence[PendingEntry]) -> None:
        """Mark the entries as ended when the call has ended."""


class Registration(ABC):
    """Memory registered with a group's library (:meth:`ProcessGroup.register`); ``with`` closes it
    at the end."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Its bytes."""

    @property
    @abstractmethod
    def symmetric(self) -> bool:
        """True if it is in symmetric windows."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """True once it has been deregistered, by :meth:`close` or the end of the group."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the group's operations in flight, then deregister the memory; idempotent.

        Graphs that use the memory must have been destroyed. The array, or the pool's object, is
        kept alive until then.

        Raises:
            OperationTimeoutError: an operation does not end; the memory is still registered.
        """

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *rest: object) -> None:
        self.close()


class Backend(ABC):
    """The transport of one process group."""

    name: ClassVar[str]
    caps: ClassVar[Caps] = Caps()
    compares: ClassVar[bool] = False
    """True if the ranks compare their calls before data moves. Then the backend also gets a gather
    or scatter whose list the root has refused (:attr:`Call.refused`), in the place of the call: the
    others' calls raise, and the group stays usable. Otherwise such a refusal fails the group. See
    :func:`unicoll.backend.host.size_agreement.exchange_sizes`."""
    fake: ClassVar[bool] = False
    """True for a backend that exchanges nothing (:mod:`unicoll.backend.host.fake`)."""
    stages: ClassVar[bool] = False
    """True for a :class:`~unicoll.backend.host.host_backend.HostBackend`: arrays of a GPU can be
    served through host memory (:mod:`unicoll.staging.backend`)."""

    creator: type[Backend] | None = None
    """The class whose :meth:`create` makes the backends of further groups; None: this object's."""

    is_protected: bool = False
    """True if what it sends between hosts has a MAC or is encrypted."""

    delegate: ClassVar[str] = ""
    """Name of a backend of host arrays that each group has in addition if its ranks are on one
    host; see :meth:`set_delegate`."""

    @classmethod
    def availability(cls) -> str | None:
        """The reason why this backend cannot be used on this machine, or None if it can."""
        return None

    @classmethod
    def library(cls) -> str:
        """Name, version and path of the library that moves the data, for ``explain()``; "" for
        unicoll itself.

        Called only if the backend can be used.
        """
        return ""

    @classmethod  # noqa: B027 - optional
    def prepare(cls, job: Job) -> None:
        """Called on every process of a job, once, before the ranks wait for each other and before
        any group exists.

        For data that the members look up and that is the same for all groups, an address for
        example: a value that is published here in ``job.store`` is there for all ranks when the
        first :meth:`create` is called, so that :meth:`create` and the first operation need not wait
        for it. ``job.control`` is not set yet.
        """

    @classmethod
    def create(cls, context: Context) -> Backend:
        """The backend of a new group: ``cls(context)``. Every member calls this; it need not wait
        for the others.

        Data for the members of this group belongs in ``context.store``.
        """
        return cls(context)  # type: ignore[call-arg]

    @abstractmethod
    def post(self, calls: Sequence[Call], stream: Any = None) -> Completion:
        """Start the calls, in order and as one batch, and return at once.

        A batch has one operation, or consists of sends and receives. The backend numbers the calls,
        keeps their buffers until it no longer needs them, and writes packed results back before the
        completion is done.
        """

    def run(self, call: Call) -> Tracker | None:
        """Do one call; return when it is done (CPU) or ordered on the current stream (CUDA).

        Returns:
            None if the call is done; else an object that marks it as ended in the flight recorder
            when it is.
        """
        self.post((call,)).wait(None)
        return None

    def runner(self, op: Op) -> Callable[[Call], Tracker | None]:
        """The function for calls of an operation that does what :meth:`run` does; looked up once
        for a kind of call."""
        return self.run

    def post_each(self, calls: Sequence[Call], stream: Any = None) -> list[Completion]:
        """Start a batch of sends and receives; one completion each (they may be the same
        object)."""
        return [self.post((call,), stream) for call in calls]

    def iprobe(self, call: Call) -> bool:
        """True if a message that a probe matches has come; sets :meth:`Call.matched`. Never blocks.

        Called only if ``probe`` is native.
        """
        raise BackendUnavailableError(
            f"{call.op.name}: backend {self.name} has no probes", op=call.op.name
        )

    def split(self, context: Context | None) -> Backend | None:
        """The backend of a group made of some of this group's members.

        All members of this group call it, at the same place in their programs; those outside the
        new group with None.
        """
        return (self.creator or type(self)).create(context) if context is not None else None

    def shrink(self, context: Context, excluded: Sequence[int]) -> Backend:
        """The backend of the group of the remaining members of this one, which may have failed;
        they all call it.

        ``excluded`` are ranks in this group, in order.
        """
        return (self.creator or type(self)).create(context)

    def grow(self, context: Context) -> Backend:
        """The backend of a group of this one's members, with the same ranks, followed by others;
        all members call it.

        The others call :meth:`join_grown` at the same time.
        """
        return (self.creator or type(self)).create(context)

    @classmethod
    def join_grown(cls, context: Context) -> Backend:
        """The backend of a rank that was not in the group that has grown."""
        return cls.create(context)

    def symmetric_empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        """Memory of one size on all ranks, that the other members reach without copies; all members
        call it.

        Raises:
            BackendUnavailableError: the backend has none; the message has the reason.
        """
        raise BackendUnavailableError(
            f"symmetric_empty: backend {self.name} has no symmetric memory"
        )

    def peer_view(self, buffer: Buffer, rank: int) -> Any:
        """Member ``rank``'s array at the place of ``buffer``, which is in this rank's symmetric
        memory.

        Raises:
            DistArgumentError: ``buffer`` is not.
            BackendUnavailableError: this process cannot address that member's memory.
        """
        raise BackendUnavailableError(
            f"peer_view: backend {self.name} does not support access to other ranks' memory"
        )

    def register(self, memory: Any, symmetric: bool) -> Registration:
        """Register existing memory with the library; all members call it.

        Raises:
            BackendUnavailableError: the backend registers none; the message has the reason.
        """
        raise BackendUnavailableError(
            f"register: backend {self.name} does not support memory registration; backend nccl does"
        )

    def one_sided(self, call: OneSidedCall) -> None:
        """Enqueue a put, a signal or a wait for signals on the stream of its array.

        Raises:
            BackendUnavailableError: the backend has no one-sided operations; the message has the
                reason.
        """
        raise BackendUnavailableError(
            f"{call.op.name}: backend {self.name} does not support one-sided operations; backend"
            " nccl does, from NCCL 2.29 on",
            op=call.op.name,
        )

    def refuse_options(self, options: CallOptions) -> None:  # noqa: B027 - optional
        """Raise DistArgumentError if calls cannot take these options; a backend that ignores them
        takes all."""

    def takes_device(self, call: Call) -> bool:
        """True if a collective or message on arrays of a GPU can be given to it by address: with a
        :class:`~unicoll.arrays.device_flat.DeviceFlat` as each buffer's ``flat``. For collectives
        the answer is equal on all members."""
        return False

    @property
    def direct(self) -> bool:
        """True if :meth:`takes_device` is True for some calls of this group; equal on all
        members."""
        return False

    def keeps(self, call: Call) -> bool:
        """True if it may use the arrays of a call that has just failed until the process ends."""
        return False

    def set_delegate(self, backend: Any) -> None:  # noqa: B027 - optional
        """Called once after :meth:`create` with the group's backend of the name :attr:`delegate`.

        ``backend`` gets only the calls that this backend passes to it, and is closed after this
        one.
        """

    @property
    def executing_backend(self) -> Backend | None:
        """The backend of host arrays that executes its calls one after another; None if the library
        does."""
        return None

    @property
    def shares_memory(self) -> bool:
        """True if all members exchange host arrays through shared memory; equal on all of them
        after a collective."""
        return False

    @property
    def failure(self) -> DistError | None:
        """The error that calls raise since the group has failed or been closed, else None."""
        return None

    def raise_failure(self) -> None:
        """Raise :attr:`failure`, if there is one, also one that this backend learns of by asking
        its library."""
        if (error := self.failure) is not None:
            # All calls raise this one object: see GroupState.check().
            raise error.with_traceback(None) from error.__cause__

    @property
    def sequence(self) -> int:
        """Number of the last collective accepted, from 1; equal on all members that have made the
        same calls.

        0 for a backend that does not number its calls.
        """
        return 0

    @property
    def staging(self) -> int:
        """Upper bound on the bytes of this rank's buffers for the group, independent of array
        sizes."""
        return 0

    def describe(self) -> str:
        """A short description of the group's transports, for ``explain()``."""
        return self.name

    @abstractmethod
    def abort(self, error: Exception) -> None:
        """Make every pending and later call of this group raise ``error``; any thread,
        idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was posted, within bounds, and release all resources; idempotent."""
