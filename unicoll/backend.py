"""The plug-in contract: what a backend is given, and what it must do.

A backend serves one process group. It is created from a :class:`Context`, gets :class:`Call` records whose buffers
are contiguous and whose arguments have been checked, and answers with a :class:`~unicoll.work.Completion`
(:meth:`Backend.post`) or, for blocking calls, when the operation is done (:meth:`Backend.run`).

**Mandatory** are the class attributes ``name`` and ``caps``, the class method ``create``, the methods ``post``,
``abort`` and ``close``, and the property ``sequence``. All other methods have defaults. A backend of the host gets
order, numbers and asynchronous calls from a :class:`~unicoll.lane.Lane`.

**Operations.** No single operation is mandatory: a call of one that is not in ``caps.native`` is refused before the
backend gets it. :class:`~unicoll.ops.Op` says of each operation what goes in and what comes out. Some functions
of the package are made of others and work where those are there: object collectives use ``broadcast``,
``all_gather_into_tensor``, ``all_gather``, ``gather``, ``scatter``, ``all_to_all_single``, ``send`` and ``recv``;
``unicoll.parallel`` uses ``all_reduce``, ``broadcast`` and ``all_gather_into_tensor``;
what is coalesced is a batch of the same operation.

**A call.** A backend reads ``call.inputs`` and writes ``call.outputs`` through ``Buffer.flat`` (CPU) or
``Buffer.ptr`` (CUDA), and nothing else: inputs may be read-only, and an operation in place has the same tuple for both.
Reductions of a type that NumPy lacks are in :mod:`unicoll.kernels`. It calls :meth:`Call.write_back` when the outputs
are there. It must notice a call that differs between ranks (``call.signature`` is equal where calls agree),
``call.timeout`` seconds that have passed, and ``abort``, and then raise the same error on all ranks as far as it can.

:class:`unicoll.testing.Conformance` tests the results of operations, their order and what is refused, and no failures;
docs/cookbook.md shows how.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from .call import Call, OneSidedCall
from .errors import BackendUnavailableError
from .options import CallOptions
from .types import DType, Reduction

if TYPE_CHECKING:
    from .observe.control import Control
    from .stores import Store
    from .work import Completion

__all__ = ["Backend", "Call", "Caps", "Context", "Job", "OneSidedCall", "Registration"]


@dataclass(frozen=True)
class Caps:
    """What a backend can do.

    Attributes:
        devices: device types whose arrays it takes.
        native: names of the operations it has; calls of others are refused with BackendUnavailableError.
        reduces: whether it has this reduction of elements of this type; a call of another is refused with
            DistTypeError. Operations that do not reduce take all types.
    """

    devices: frozenset[str]
    native: frozenset[str]
    reduces: Callable[[DType, Reduction], bool] = field(default=lambda dtype, reduction: True)


class Job:
    """What all groups of one ``init_process_group`` share: who we are, the store, the secret, the control plane.

    Attributes:
        rank, size: of this process in the world.
        store: the job's store, already prefixed; values are signed with the job's key.
        key: secret key of the job's connections, never empty.
        trusted: whether only holders of a secret can have joined, so that pickles may be loaded.
        addresses: this host's addresses to listen on.
        control: liveness and failure notices; None for a world of one.
        timeout: default timeout of the world group, seconds.
        local_rank, local_size: of the processes on this host, where a launcher said.
        post_mortem: asks the launcher how a rank ended; may take a fraction of a second.
        groups: the groups that are in use, in the order in which they were made.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        key: bytes,
        trusted: bool,
        addresses: list[str],
        timeout: float,
        control: Control | None = None,
        local_size: int | None = None,
        post_mortem: Callable[[int], str | None] | None = None,
        local_rank: int | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.store = store
        self.key = key
        self.trusted = trusted
        self.addresses = addresses
        self.timeout = timeout
        self.control = control
        self.local_size = local_size
        self.local_rank = local_rank
        self.groups: list[Any] = []
        self._post_mortem = post_mortem
        self._shared: dict[str, Any] = {}
        self._lock = threading.Lock()

    def cause_of_death(self, rank: int) -> str:
        """What the launcher says of a rank that died, as the end of a sentence; "" where no launcher tells."""
        cause = self._post_mortem(rank) if self._post_mortem is not None else None
        return f" ({cause})" if cause else ""

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """A resource that a backend keeps once per process and job (a listener, say); closed with the job."""
        with self._lock:
            if name not in self._shared:
                self._shared[name] = make()
            return self._shared[name]

    def close(self) -> None:
        """Close what the backends share; idempotent."""
        with self._lock:
            shared, self._shared = self._shared, {}
        with ExitStack() as left:  # whatever fails, the rest is done
            for resource in reversed(shared.values()):
                left.callback(resource.close)


@dataclass
class Context:
    """What a backend is created from.

    Attributes:
        job: what all groups of the job share.
        name: the group's name, equal on all its members and unique in the job.
        rank: this process's rank in the group.
        ranks: the members' global ranks, in group order.
        timeout: default timeout of the group's operations, seconds.
        options: the user's ``pg_options``.
        device: device that the group is bound to, or None.
        asked: whether the user named the backend.
    """

    job: Job
    name: str
    rank: int
    ranks: tuple[int, ...]
    timeout: float
    options: Any = None
    device: Any = None
    asked: bool = False

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def who(self, group_rank: int) -> str:
        """A member in words: rank, host and pid as far as they are known."""
        control = self.job.control
        rank = self.ranks[group_rank]
        return control.who(rank) if control is not None else f"rank {rank}"


class Registration(ABC):
    """Memory that a group's library knows (:meth:`ProcessGroup.register`); ``with`` closes it at the end."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of it."""

    @property
    @abstractmethod
    def symmetric(self) -> bool:
        """Whether it is in symmetric windows."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether it has been taken back, by :meth:`close` or the end of the group."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the operations of the group that are on their way, and take it back; idempotent.

        Graphs that use the memory must be gone. The array, or the pool's object, is kept alive until here.

        Raises:
            OperationTimeoutError: an operation does not end; the memory is still registered.
        """

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *rest: object) -> None:
        self.close()


class Backend(ABC):
    """One process group's way of moving data."""

    name: ClassVar[str]
    caps: ClassVar[Caps]
    compares: ClassVar[bool] = False
    """Whether the ranks compare their calls before data moves. Then it is given a gather or scatter whose list the root
    has refused (:attr:`Call.refused`), in the place of the call: the others' calls raise, and the group stays usable.
    Else such a refusal fails the group. See :func:`unicoll.exchanged.exchange_sizes`."""
    stages: ClassVar[bool] = False
    """Whether it can serve arrays of a GPU through the host's memory (:mod:`unicoll.staging`): its collectives go
    through a :class:`~unicoll.lane.Lane`."""

    @classmethod
    def availability(cls) -> str | None:
        """Why this backend cannot be used on this machine, or None if it can."""
        return None

    @classmethod
    def library(cls) -> str:
        """What moves the data, with its version and place, for ``explain()``; "" for nothing but unicoll itself.

        Asked only where the backend can be used.
        """
        return ""

    @classmethod  # noqa: B027 - optional
    def prepare(cls, job: Job) -> None:
        """Called on every process of a job, once, before the ranks wait for each other and before any group is made.

        Needed where members look for something of each other that is the same for all groups, an address for example:
        what is published here in ``job.store`` is there for everybody when the first :meth:`create` is called, so
        that :meth:`create` and the first operation need not wait for it. Not needed where members exchange nothing
        but what they publish for one group, or look for it when they need it. ``job.control`` is not there yet.
        """

    @classmethod
    @abstractmethod
    def create(cls, context: Context) -> Backend:
        """The backend of a new group; every member calls this. It may return before the others have come.

        Names in ``context.job.store`` must contain ``context.name``, which no other group of the job has.
        """

    @abstractmethod
    def post(self, calls: Sequence[Call], stream: Any = None) -> Completion:
        """Start the calls, in order and as one batch, and return at once.

        A batch has one operation, or is made of sends and receives. The backend numbers the calls, keeps their buffers
        until it no longer needs them, and writes packed results back before the completion is done.
        """

    def run(self, call: Call) -> None:
        """Do one call; return when it is done (CPU) or ordered on the current stream (CUDA)."""
        self.post((call,)).wait(None)

    def post_each(self, calls: Sequence[Call], stream: Any = None) -> list[Completion]:
        """Start a batch of sends and receives; one completion each (they may be one and the same)."""
        return [self.post((call,), stream) for call in calls]

    def split(self, context: Context | None) -> Backend | None:
        """The backend of a group made of some of this one's members.

        All members of this one call it, at the same place in their programs; those outside the new group with None.
        """
        return type(self).create(context) if context is not None else None

    def shrink(self, context: Context, excluded: Sequence[int]) -> Backend:
        """The backend of the group of those that are left of this one, which may have failed; they all call it.

        ``excluded`` are ranks in this group, in order.
        """
        return type(self).create(context)

    def grow(self, context: Context) -> Backend:
        """The backend of a group of this one's members, with the same ranks, and others behind them; they all call it.

        The others call :meth:`join_grown` meanwhile.
        """
        return type(self).create(context)

    @classmethod
    def join_grown(cls, context: Context) -> Backend:
        """The backend of a rank that was not in the group that has grown."""
        return cls.create(context)

    def symmetric_empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        """Device memory that the library may reach from all members' devices at once; all members call it.

        Raises:
            BackendUnavailableError: the backend has none, and why.
        """
        raise BackendUnavailableError(f"symmetric_empty: backend {self.name} has no symmetric memory")

    def register(self, memory: Any, symmetric: bool) -> Registration:
        """Tell the library of memory that there is already; all members call it.

        Raises:
            BackendUnavailableError: the backend registers none, and why.
        """
        raise BackendUnavailableError(f"register: backend {self.name} registers no memory; the backend nccl does")

    def one_sided(self, call: OneSidedCall) -> None:
        """Put a put, a signal or a wait for signals on the stream of its array.

        Raises:
            BackendUnavailableError: the backend has no one-sided operations, and why.
        """
        raise BackendUnavailableError(
            f"{call.op.name}: backend {self.name} has no one-sided operations; the backend nccl has, from NCCL 2.29 on",
            op=call.op.name,
        )

    def refuse_options(self, options: CallOptions) -> None:  # noqa: B027 - optional
        """Raise DistArgumentError if calls cannot be told these; a backend that they do not concern takes them all."""

    def takes_device(self, call: Call) -> bool:
        """Whether a call on arrays of a GPU can be given to it by address: with a
        :class:`~unicoll.device_memory.DeviceFlat` as each buffer's ``flat``. For collectives equal on all members."""
        return False

    @property
    def direct(self) -> bool:
        """Whether there are such calls in this group; equal on all members."""
        return False

    def keeps(self, call: Call) -> bool:
        """Whether it may go on using the arrays of a call that has just failed, until the process ends."""
        return False

    @property
    @abstractmethod
    def sequence(self) -> int:
        """Number of the last collective accepted, from 1; equal on all members that have made the same calls."""

    @property
    def staging(self) -> int:
        """Bytes of memory that this rank holds for the group's transfers, whatever the size of the arrays."""
        return 0

    def describe(self) -> str:
        """How it moves this group's data, in a few words, for ``explain()``."""
        return self.name

    @abstractmethod
    def abort(self, error: Exception) -> None:
        """Make every pending and later call of this group raise ``error``; any thread, idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was posted, within bounds, and give everything back; idempotent."""
