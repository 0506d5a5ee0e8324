"""Who is in a process group, which backends serve it, and the way of a call to them.

A call is checked by the table (:mod:`unicoll.ops`), goes to the backend of its arrays' device, and is either run here
and now or posted, which gives a :class:`~unicoll.work.Work`. The operations themselves are in :mod:`unicoll.group`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from .arguments import buffers_of, call_site
from .backend import Backend, Context, Job, Registration
from .buffers import Buffer, as_buffer
from .call import Call, calls_with
from .checks import check, sign
from .errors import BackendUnavailableError, DistArgumentError, DistError, DistTypeError, GroupAbortedError
from .ops import OPS, Op, Sizes, as_reduce_op
from .options import wants_timing
from .registry import Choice
from .staging import Staged
from .types import BY_NAME, Reduction, to_seconds
from .work import Work

__all__ = ["Buffers", "Dispatch", "Timeout"]

Timeout = timedelta | float | None
Buffers = tuple[Buffer, ...]

_RECV = OPS["recv"]
_REMEMBERED = 1024
"""Kinds of calls whose checks a group remembers."""


def _make_backend(
    cls: type[Backend], context: Context, parent: Dispatch | None, excluded: Sequence[int], grown: bool
) -> Backend:
    """The backend of a new group; from the parent's where that has one of the kind."""
    above = parent._served.get(cls) if parent is not None else None
    if above is None:
        return cls.join_grown(context) if grown else cls.create(context)
    if grown:
        return above.grow(context)
    if excluded:
        return above.shrink(context, excluded)
    made = above.split(context)
    assert made is not None
    return made


class Dispatch:
    """The members of a group and the backends that serve it."""

    def __init__(
        self,
        job: Job,
        name: str,
        ranks: tuple[int, ...],
        choices: Sequence[Choice],
        timeout: float,
        desc: str = "",
        options: Any = None,
        device: Any = None,
        parent: Dispatch | None = None,
        excluded: Sequence[int] = (),
        grown: bool = False,
    ) -> None:
        self._job = job
        self._name = name
        self._desc = desc or "undefined"
        self._ranks = ranks
        self._rank = ranks.index(job.rank)
        self._size = len(ranks)
        self._timeout = timeout
        self._closed = False
        self.bound_device_id = device
        self.choices = tuple(choices)
        self.splits = 0  # how often this group has been split; numbers the children
        self._timed = wants_timing(options)
        # views of the group make others
        self._new_call: Callable[..., Call] = calls_with(None, True) if self._timed else Call
        self._known: dict[Any, tuple[int, Backend]] = {}
        self._served: dict[type[Backend], Backend] = {}
        self._backends: dict[str, Backend] = {}
        for choice in choices:
            if choice.cls not in self._served:
                context = Context(job, name, self._rank, ranks, timeout, options, device, choice.asked)
                self._served[choice.cls] = _make_backend(choice.cls, context, parent, excluded, grown)
            if not choice.staged:
                self._backends[choice.device] = self._served[choice.cls]
        self._host = self._backends.get("cpu") or next(iter(self._served.values()))
        self._staged: Staged | None = None

    def leave_out(self, choices: Sequence[Choice]) -> None:
        """A group is made of other members of this one; all members take part in that."""
        for cls in dict.fromkeys(choice.cls for choice in choices):
            if cls in self._served:
                self._served[cls].split(None)

    # --- who is in it ----------------------------------------------------------------------------------------

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Number of members."""
        return self._size

    @property
    def name(self) -> str:
        """The group's own name, unique in the job."""
        return self._name

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' global ranks, in group order."""
        return self._ranks

    @property
    def group_name(self) -> str:
        """The same as :attr:`name` (torch's spelling)."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the user called it."""
        return self._desc

    @property
    def timeout(self) -> float:
        """Default timeout of its operations, seconds."""
        return self._timeout

    @property
    def trusted(self) -> bool:
        """Whether only holders of the job's secret can be members, so that pickles may be loaded."""
        return self._job.trusted

    @property
    def job(self) -> Job:
        """What all groups of the job share."""
        return self._job

    @property
    def backend_name(self) -> str:
        """``"gloo"``, or ``"cpu:gloo,cuda:nccl"`` where several backends serve it."""
        names = {c.name for c in self.choices if not c.beside}
        return names.pop() if len(names) == 1 else self.backend_config

    @property
    def backend_config(self) -> str:
        """The backend of each device type: ``"cpu:gloo,cuda:nccl"``."""
        return ",".join(f"{c.device}:{c.name}" for c in self.choices)

    def global_rank(self, group_rank: int) -> int:
        """The global rank of a member; DistArgumentError if there is none of that rank."""
        if not 0 <= group_rank < self._size:
            raise DistArgumentError(f"group rank {group_rank} is not in group {self._name!r} of {self._size}")
        return self._ranks[group_rank]

    def group_rank(self, global_rank: int) -> int:
        """A global rank's rank in the group; DistArgumentError if it is no member."""
        try:
            return self._ranks.index(global_rank)
        except ValueError:
            raise DistArgumentError(
                f"rank {global_rank} is not in group {self._name!r} {list(self._ranks)}"
            ) from None

    def describe(self) -> str:
        """How its data moves, in a few words."""
        backends = [*self._served.values(), *([self._staged] if self._staged is not None else [])]
        return "; ".join(backend.describe() for backend in backends)

    def staging_bytes(self) -> dict[str, int]:
        """Memory that this rank holds for the group's transfers, by device type, whatever the size of the arrays."""
        return {device: backend.staging for device, backend in self._backends.items()}

    def symmetric_empty(self, shape: int | Sequence[int], dtype: str = "float32") -> Any:
        """Memory on this rank's GPU, of one size on all ranks, that NCCL moves faster (``ncclCommWindowRegister``).

        All members call it. The array has ``__cuda_array_interface__``: ``torch.as_tensor(x, device="cuda")`` and
        ``cupy.asarray(x)`` use it in place. It lasts until nothing refers to it; its window until the group is closed.

        Args:
            shape: of the array.
            dtype: name of an element type; those that NumPy lacks come as unsigned integers of their size.

        Raises:
            BackendUnavailableError: the group has no NCCL, or one that is older than 2.27.
            DistTypeError: no such element type.
        """
        found = BY_NAME.get(dtype)
        if found is None:
            raise DistTypeError(f"symmetric_empty: {dtype!r} is no element type; known are {', '.join(BY_NAME)}")
        sizes = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        backend = self._backends.get("cuda", self._host)
        return backend.symmetric_empty(sizes, found)

    def register(self, memory: Any, *, symmetric: bool = False) -> Registration:
        """Register memory of this rank's GPU with NCCL, which then moves it with fewer copies.

        All members call it, each with memory of its own. It lasts until :meth:`Registration.close`, or until the group
        is closed, and keeps ``memory`` alive. Arrays of parts of the memory are known, too.

        Args:
            memory: a contiguous array, or a ``torch.cuda.MemPool``: the memory that it holds now, which is to be kept
                (no ``torch.cuda.empty_cache()``). CuPy's pools do not tell what they hold.
            symmetric: register it as a symmetric window (``ncclCommWindowRegister``), which needs memory of the
                CUDA driver's ``cuMemCreate`` on all ranks, as ``ncclMemAlloc`` gives it; NCCL before 2.27, and
                communicators that have no use for windows, register it by ``ncclCommRegister``. ``symmetric`` of what
                is returned says which.

        Raises:
            BackendUnavailableError: the group has no NCCL, or one that is older than 2.19.
            DistTypeError: no array and no pool that tells its memory.
            DistArgumentError: it is empty, not contiguous, not on the group's device, or in a window already.
            DistError: NCCL refuses it, and why.
        """
        return self._backends.get("cuda", self._host).register(memory, symmetric)

    # --- the way of a call ----------------------------------------------------------------------------------------

    def _start(
        self,
        op: Op,
        inputs: Buffers,
        outputs: Buffers,
        async_op: bool,
        timeout: Timeout,
        reduce: Any = None,
        root: int = -1,
        splits: tuple[tuple[int, ...] | None, tuple[int, ...] | None] | None = None,
    ) -> Work | None:
        """Check a call, hand it to its backend, and wait for it unless ``async_op``."""
        if reduce is not None and type(reduce) is not Reduction:
            reduce = as_reduce_op(reduce)
        if inputs is not outputs or not inputs or not inputs[0].writable:
            call = self._call(op, inputs, outputs, timeout, reduce, root, splits)
            backend = self._route(call)
        else:  # one array in place: what has been found out once holds for its like
            first = inputs[0]
            call = self._new_call(
                op,
                inputs,
                outputs,
                self._timeout if timeout is None else self._seconds(timeout),
                reduce,
                root,
            )
            kind = None if reduce is None else reduce.key
            key = (op, first.dtype, first.shape, first.device.type, kind, root)
            known = self._known.get(key)
            if known is None:
                known = self._find_out(key, call)
            call.signature, backend = known
        if async_op:
            return self._post(call, backend)
        backend.run(call)
        return None

    def _start_listed(
        self, op: Op, own: Buffers, what: str, arrays: Sequence[Any] | None, async_op: bool, timeout: Timeout, root: int
    ) -> Work | None:
        """:meth:`_start` of a gather or scatter: ``own`` is what every rank gives, ``arrays`` what the root alone does.

        What is wrong with the latter, the other ranks are told.
        """
        gathers = op.sizes is Sizes.GATHERED
        try:
            several = buffers_of(what, () if arrays is None else arrays)
            inputs, outputs = (own, several) if gathers else (several, own)
            call = self._call(op, inputs, outputs, timeout, None, root)
        except Exception as e:
            if root == self._rank and self._size > 1:
                self._refuse(op, own, timeout, root, e)
            raise
        backend = self._route(call)
        if async_op:
            return self._post(call, backend)
        backend.run(call)
        return None

    def _refuse(self, op: Op, own: Buffers, timeout: Timeout, root: int, reason: Exception) -> None:
        """This rank, the root, refuses a gather or scatter: if it is for its list, let the others' calls raise.

        Returns at once. The call has its place in the group's order, as on the other ranks.
        """
        inputs, outputs = (own, ()) if op.sizes is Sizes.GATHERED else ((), own)
        try:
            call = self._new_call(op, inputs, outputs, self._seconds(timeout), None, root)
            check(call, -1, self._size)
            backend = self._route(call)
        except DistError:
            return  # any rank's call would be refused for that
        call.signature = sign(call)
        call.site = call_site()
        kind = "" if isinstance(reason, DistError) else f"{type(reason).__name__}: "
        call.refused = f"at {call.site}: {kind}{reason}"
        if backend.compares:
            backend.post((call,))
            return
        self._fail(
            GroupAbortedError(
                f"{call.describe()} on group {self._name!r}: rank {self._job.rank}, the root, refused its call"
                f" {call.refused}",
                group=self._name,
                rank=self._job.rank,
                op=op.name,
            )
        )

    def _find_out(self, key: Any, call: Call) -> tuple[int, Backend]:
        """Check a call; its signature and backend, remembered."""
        check(call, self._rank, self._size)
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        known = self._known[key] = sign(call), self._route(call)
        return known

    def _call(
        self,
        op: Op,
        inputs: Buffers,
        outputs: Buffers,
        timeout: Timeout,
        reduce: Any,
        root: int,
        splits: tuple[tuple[int, ...] | None, tuple[int, ...] | None] | None = None,
    ) -> Call:
        if reduce is not None and type(reduce) is not Reduction:
            reduce = as_reduce_op(reduce)
        call = self._new_call(op, inputs, outputs, self._seconds(timeout), reduce, root)
        if splits is not None:
            call.in_counts, call.out_counts = splits
            call.even = splits == (None, None)
        check(call, self._rank, self._size)
        call.signature = sign(call)
        return call

    def _batch(
        self,
        op: Op,
        pairs: Sequence[tuple[Buffers, Buffers]],
        async_op: bool,
        timeout: Timeout,
        reduce: Any = None,
        root: int = -1,
    ) -> Work | None:
        if not pairs:
            raise DistArgumentError(f"{op.name}: no arrays given", op=op.name)
        calls = tuple(self._call(op, i, o, timeout, reduce, root) for i, o in pairs)
        backend, *others = dict.fromkeys(map(self._route, calls))
        if others:
            raise DistArgumentError(
                f"{op.name}: arrays on {calls[0].inputs[0].device} and on other devices in one call", op=op.name
            )
        calls[0].site = call_site()
        work = Work(backend.post(calls), calls)
        if async_op:
            return work
        work.wait()
        return None

    def _message(self, op: Op, tensor: Any, peer: int | None, tag: int, timeout: Timeout) -> Call:
        buffers = (as_buffer(tensor, f"{op.name}: tensor"),)
        if peer is None and op is _RECV:
            peer = -1
        elif peer is None or not 0 <= peer < self._size:
            raise DistArgumentError(
                f"{op.name}: peer {peer} is not a rank of a group of {self._size}", op=op.name
            )
        elif peer == self._rank:
            raise DistArgumentError(f"{op.name}: a rank cannot exchange messages with itself", op=op.name)
        if not isinstance(tag, int):
            raise DistTypeError(f"{op.name}: tag must be an integer, not {tag!r}", op=op.name)
        inputs, outputs = (buffers, ()) if op is not _RECV else ((), buffers)
        call = self._new_call(op, inputs, outputs, self._seconds(timeout), peer=peer, tag=tag)
        check(call, self._rank, self._size)
        return call

    def _post(self, call: Call, backend: Backend) -> Work:
        call.site = call_site()
        calls = (call,)
        return Work(backend.post(calls), calls)

    def _route(self, call: Call) -> Backend:
        """The backend that serves the call's arrays."""
        if self._closed:
            raise GroupAbortedError(
                f"group {self._name!r} has been destroyed", group=self._name, op=call.op.name
            )
        buffers = call.inputs or call.outputs
        backend: Backend | None = self._host
        if buffers:
            device = buffers[0].device.type
            backend = self._backends.get(device) or self._stage(device)
        if backend is None:
            raise BackendUnavailableError(
                f"{call.op.name}: no backend of group {self._name!r} ({self.backend_config}) serves {device} arrays",
                op=call.op.name,
            )
        if call.op.name not in backend.caps.native:
            raise BackendUnavailableError(
                f"{call.op.name}: backend {backend.name} does not have this operation", op=call.op.name
            )
        if call.reduce is not None and not backend.caps.reduces(buffers[0].dtype, call.reduce):
            raise DistTypeError(
                f"{call.op.name}: backend {backend.name} does not reduce {buffers[0].dtype} by {call.reduce.name}",
                op=call.op.name,
            )
        return backend

    def _stage(self, device: str) -> Backend | None:
        """The last resort for arrays of a GPU: through the host's memory."""
        host = next((self._served[c.cls] for c in self.choices if c.staged), self._host)
        if device != "cuda" or not host.stages:
            return None
        self._staged = Staged(host, self._rank, self._ranks, self._name)
        self._backends[device] = self._staged
        return self._staged

    def _seconds(self, timeout: Timeout) -> float:
        if timeout is None:
            return self._timeout
        seconds = to_seconds(timeout)
        assert seconds is not None
        if seconds <= 0:
            raise DistArgumentError(f"timeout: {timeout} is not a positive time")
        return seconds

    # --- ends -----------------------------------------------------------------------------------------------------

    def abort(self, reason: str = "aborted by the program") -> None:
        """Make every pending and later operation of the group raise GroupAbortedError, on all members."""
        self._fail(GroupAbortedError(f"group {self._name!r}: {reason}", group=self._name, rank=self._job.rank))

    def _fail(self, error: DistError) -> None:
        """End the group with an error, on all members."""
        if self._job.control is not None:
            error = self._job.control.fail(self._name, self._ranks, error)
        for backend in self._served.values():
            backend.abort(error)

    def close(self) -> None:
        """Finish what is pending, within bounds, and give everything back; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._known.clear()
        with ExitStack() as left:  # whatever fails, the rest is done
            if self._staged is not None:
                left.callback(self._staged.close)
            for backend in reversed(self._served.values()):
                left.callback(backend.close)
