"""The process group: every operation as a method.

Roots and peers of the methods are ranks *in the group*; the functions of the package take global ranks and call
these methods. A method makes buffers of its arrays and says which of them go in and come out;
:mod:`unicoll.dispatch` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from .arguments import buffers_of, call_site, check_ranks, pairs_of, same_length, splits_of
from .buffers import as_buffer
from .call import calls_with
from .dispatch import Timeout
from .errors import DistArgumentError, GroupAbortedError
from .invitations import Invitation
from .one_sided import OneSided
from .ops import OPS
from .options import CallOptions, as_call_options
from .types import ReduceOp
from .work import Completion, Work

__all__ = ["ProcessGroup"]

_BARRIER = OPS["barrier"]
_ALL_REDUCE = OPS["all_reduce"]
_SEND, _RECV = OPS["send"], OPS["recv"]


class ProcessGroup(OneSided):
    """A set of ranks that communicate; made by ``init_process_group`` and ``new_group``, never directly.

    Every collective must be called by all members, in the same order. With ``async_op=True`` a method returns a
    :class:`~unicoll.work.Work` at once; without, it returns when the caller's part is done. ``timeout`` (timedelta
    or seconds) bounds one call; the group's own default holds where it is None.

    All operations raise:
        DistArgumentError: an argument does not fit; nothing was sent and the group stays usable. The call does not
            count and concerns this rank alone, unless the argument is the list of a :meth:`gather` or
            :meth:`scatter`, which the root alone gives: then the call counts, and all other members raise this error
            in it with the root's message (with NCCL: GroupAbortedError).
        CollectiveMismatchError: the ranks called different operations.
        OperationTimeoutError: not done in time; names who arrived and who did not.
        RankLostError: a member died or left.
        GroupAbortedError: the group was destroyed or aborted.
    After one of the last four the group is of no further use: destroy it and make another.
    """

    _options: CallOptions | None = None

    def __repr__(self) -> str:
        return f"<ProcessGroup {self._name!r}: rank {self._rank} of {self._size}, {self.backend_config}>"

    @property
    def whole(self) -> ProcessGroup:
        """The group itself; of what :meth:`using` gives, the group that it is a view of."""
        return self

    def using(
        self,
        options: CallOptions | Mapping[str, Any] | None = None,
        *,
        timeout: Timeout = None,
        timing: bool | None = None,
        **named: Any,
    ) -> ProcessGroup:
        """This group with options for the calls that are made through what is returned.

        It is the same group: its members, its order of operations, its life. Take it for ``group=`` of any function, or
        call its methods; keep it for many calls or make it for one. ``group.using(max_ctas=4).all_reduce(x)``

        Args:
            options: a :class:`CallOptions`, or a dict with the same names.
            timeout: default timeout of these calls, timedelta or seconds; None keeps the group's.
            timing: whether ``Work.duration`` tells how long asynchronous calls took; None keeps the group's.
            named: single options by name, in place of those in ``options`` and those of the view that this is; None
                takes one back.

        Raises:
            DistArgumentError: no such option, an impossible value, or an option for which NCCL is too old.
            DistTypeError: an option of the wrong type.
        """
        told = as_call_options(self._options, options, named)
        if told is not None:
            for backend in self._served.values():
                backend.refuse_options(told)
        return _View(self.whole, told, self._seconds(timeout), self._timed if timing is None else bool(timing))

    def shrink(self, ranks_to_exclude: Sequence[int], pg_options: Any = None) -> ProcessGroup:
        """:func:`unicoll.shrink_group` of this group: those that are left call it, and get a group of their own."""
        excluded = sorted(ranks_to_exclude)
        check_ranks("shrink_group", excluded, self._size)
        if self._rank in excluded:
            raise DistArgumentError("shrink_group: the caller is among the excluded ranks, who do not call it")
        parent = self.whole
        parent.splits += 1
        made = ProcessGroup(
            parent.job,
            f"{parent.name}/shrunk-{parent.splits}",
            tuple(r for i, r in enumerate(parent.ranks) if i not in excluded),
            parent.choices,
            parent.timeout,
            parent.group_desc,
            pg_options,
            parent.bound_device_id,
            parent,
            excluded,
        )
        parent.job.groups.append(made)
        return made

    def grow(self, ranks_to_add: Sequence[int], pg_options: Any = None) -> ProcessGroup:
        """:func:`unicoll.grow_group` of this group, on its members."""
        parent = self.whole
        job, added = parent.job, [int(r) for r in ranks_to_add]
        check_ranks("grow_group", added, job.size)
        known = [r for r in added if r in parent.ranks]
        if known:
            raise DistArgumentError(f"grow_group: ranks {known} are in group {parent.name!r} already")
        if parent._closed:
            raise GroupAbortedError(f"group {parent.name!r} has been destroyed", group=parent.name)
        parent.splits += 1
        invitation = Invitation(
            f"{parent.name}/grown-{parent.splits}", (*parent.ranks, *added), len(parent.ranks), parent.timeout,
            parent.group_desc, parent.backend_config,
        )  # fmt: skip
        if parent._rank == 0:
            invitation.send(job.store)
        made = ProcessGroup(
            job, invitation.name, invitation.ranks, parent.choices, parent.timeout, parent.group_desc, pg_options,
            parent.bound_device_id, parent, grown=True,
        )  # fmt: skip
        job.groups.append(made)
        return made

    # --- collectives ------------------------------------------------------------------------------------------

    def barrier(self, *, async_op: bool = False, timeout: Timeout = None) -> Work | None:
        """Return when all members have called it (MPI_Barrier)."""
        return self._start(_BARRIER, (), (), async_op, timeout)

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose timeout names every rank that has not come; ``wait_all_ranks`` is always honoured."""
        self._start(_BARRIER, (), (), False, timeout)

    def broadcast(
        self, tensor: Any, src: int, *, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """``tensor`` of member ``src`` to all, in place; same shape and dtype everywhere (MPI_Bcast)."""
        buffers = (as_buffer(tensor, "broadcast: tensor"),)
        outputs = () if src == self._rank else buffers
        return self._start(OPS["broadcast"], buffers, outputs, async_op, timeout, root=src)

    def all_reduce(
        self, tensor: Any, op: Any = ReduceOp.SUM, *, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """Reduce element by element over all members, in place, the same bits on every rank (MPI_Allreduce)."""
        buffers = (as_buffer(tensor, "all_reduce: tensor"),)
        return self._start(_ALL_REDUCE, buffers, buffers, async_op, timeout, op)

    def reduce(
        self,
        tensor: Any,
        dst: int,
        op: Any = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Reduce over all members to ``dst``, in place there; elsewhere ``tensor`` is left as it is (MPI_Reduce)."""
        buffers = (as_buffer(tensor, "reduce: tensor"),)
        outputs = buffers if dst == self._rank else ()
        return self._start(OPS["reduce"], buffers, outputs, async_op, timeout, op, root=dst)

    def all_gather(
        self, tensor_list: Sequence[Any], tensor: Any, *, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """``tensor_list[i]`` becomes member i's ``tensor``, on all; sizes may differ by member (MPI_Allgatherv)."""
        outputs = buffers_of("all_gather: tensor_list", tensor_list)
        return self._start(
            OPS["all_gather"], (as_buffer(tensor, "all_gather: tensor"),), outputs, async_op, timeout
        )

    def all_gather_into_tensor(
        self, output: Any, input: Any, *, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """``output`` becomes all members' ``input``, one after another (MPI_Allgather)."""
        op = OPS["all_gather_into_tensor"]
        return self._start(
            op,
            (as_buffer(input, "all_gather_into_tensor: input"),),
            (as_buffer(output, "all_gather_into_tensor: output"),),
            async_op,
            timeout,
        )

    def gather(
        self,
        tensor: Any,
        gather_list: Sequence[Any] | None,
        dst: int,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """``gather_list[i]`` on ``dst`` becomes member i's ``tensor``; elsewhere it is None (MPI_Gatherv).

        Sizes may differ by member.
        """
        own = (as_buffer(tensor, "gather: tensor"),)
        return self._start_listed(
            OPS["gather"], own, "gather: gather_list", gather_list, async_op, timeout, dst
        )

    def scatter(
        self,
        tensor: Any,
        scatter_list: Sequence[Any] | None,
        src: int,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """``tensor`` on member i becomes ``scatter_list[i]`` of ``src``; elsewhere it is None (MPI_Scatterv).

        Sizes may differ by member.
        """
        own = (as_buffer(tensor, "scatter: tensor"),)
        return self._start_listed(
            OPS["scatter"], own, "scatter: scatter_list", scatter_list, async_op, timeout, src
        )

    def reduce_scatter(
        self,
        output: Any,
        input_list: Sequence[Any],
        op: Any = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """``output`` on member i is the reduction of all members' ``input_list[i]``; sizes may differ by i."""
        inputs = buffers_of("reduce_scatter: input_list", input_list)
        return self._start(
            OPS["reduce_scatter"],
            inputs,
            (as_buffer(output, "reduce_scatter: output"),),
            async_op,
            timeout,
            op,
        )

    def reduce_scatter_tensor(
        self,
        output: Any,
        input: Any,
        op: Any = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """``output`` on member i is the i-th part of the reduction of all members' ``input``."""
        row = OPS["reduce_scatter_tensor"]
        return self._start(
            row,
            (as_buffer(input, "reduce_scatter_tensor: input"),),
            (as_buffer(output, "reduce_scatter_tensor: output"),),
            async_op,
            timeout,
            op,
        )

    def all_to_all(
        self,
        output_list: Sequence[Any],
        input_list: Sequence[Any],
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """``output_list[i]`` becomes member i's ``input_list[my rank]``; all sizes may differ (MPI_Alltoallw)."""
        outputs = buffers_of("all_to_all: output_list", output_list)
        inputs = buffers_of("all_to_all: input_list", input_list)
        return self._start(OPS["all_to_all"], inputs, outputs, async_op, timeout)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Part i of ``input`` to member i, cut along dimension 0, evenly or as the split sizes say (MPI_Alltoallv)."""
        splits = (
            splits_of("input_split_sizes", input_split_sizes),
            splits_of("output_split_sizes", output_split_sizes),
        )
        op = OPS["all_to_all_single"]
        return self._start(
            op,
            (as_buffer(input, "all_to_all_single: input"),),
            (as_buffer(output, "all_to_all_single: output"),),
            async_op,
            timeout,
            splits=splits,
        )

    # --- several at once ----------------------------------------------------------------------------------------

    def all_reduce_coalesced(
        self,
        tensors: Sequence[Any],
        op: Any = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """:meth:`all_reduce` of each array, as one operation."""
        pairs = [((b,), (b,)) for b in buffers_of("all_reduce_coalesced: tensors", tensors)]
        return self._batch(_ALL_REDUCE, pairs, async_op, timeout, op)

    def broadcast_coalesced(
        self, tensors: Sequence[Any], src: int, *, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """:meth:`broadcast` of each array, as one operation."""
        buffers = buffers_of("broadcast_coalesced: tensors", tensors)
        pairs = [((b,), () if src == self._rank else (b,)) for b in buffers]
        return self._batch(OPS["broadcast"], pairs, async_op, timeout, root=src)

    def all_gather_coalesced(
        self,
        output_lists: Sequence[Sequence[Any]],
        inputs: Sequence[Any],
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """:meth:`all_gather` of ``inputs[k]`` into ``output_lists[k]`` for each k, as one operation."""
        same_length("all_gather_coalesced: output_lists", output_lists, inputs)
        what = "all_gather_coalesced: output_lists"
        sources = buffers_of("all_gather_coalesced: inputs", inputs)
        pairs = [((x,), buffers_of(what, outs)) for outs, x in zip(output_lists, sources, strict=True)]
        return self._batch(OPS["all_gather"], pairs, async_op, timeout)

    def all_gather_into_tensor_coalesced(
        self,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """:meth:`all_gather_into_tensor` of each pair, as one operation."""
        return self._batch(
            OPS["all_gather_into_tensor"],
            pairs_of("all_gather_into_tensor_coalesced", outputs, inputs),
            async_op,
            timeout,
        )

    def reduce_scatter_tensor_coalesced(
        self,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        op: Any = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """:meth:`reduce_scatter_tensor` of each pair, as one operation."""
        return self._batch(
            OPS["reduce_scatter_tensor"],
            pairs_of("reduce_scatter_tensor_coalesced", outputs, inputs),
            async_op,
            timeout,
            op,
        )

    # --- point to point ---------------------------------------------------------------------------------------

    def send(self, tensor: Any, dst: int, tag: int = 0, *, timeout: Timeout = None) -> None:
        """Send to member ``dst``; returns when ``tensor`` may be changed (MPI_Send)."""
        call = self._message(_SEND, tensor, dst, tag, timeout)
        self._route(call).run(call)

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> int:
        """Receive from member ``src``, or from anyone; returns the sender's rank in the group (MPI_Recv).

        Raises:
            MessageMismatchError: the message is of another size or dtype; it is gone, the group stays usable.
        """
        call = self._message(_RECV, tensor, src, tag, timeout)
        self._route(call).run(call)
        return call.source

    def isend(self, tensor: Any, dst: int, tag: int = 0, *, timeout: Timeout = None) -> Work:
        """:meth:`send` in the background."""
        call = self._message(_SEND, tensor, dst, tag, timeout)
        return self._post(call, self._route(call))

    def irecv(self, tensor: Any, src: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Work:
        """:meth:`recv` in the background; ``work.source_rank()`` tells the sender's rank in the group."""
        call = self._message(_RECV, tensor, src, tag, timeout)
        return self._post(call, self._route(call))

    def batch_isend_irecv(
        self, ops: Sequence[tuple[bool, Any, int | None, int]], *, timeout: Timeout = None
    ) -> list[Work]:
        """Start several sends and receives, given as (is send, array, peer's rank in the group, tag)."""
        calls = [self._message(_SEND if s else _RECV, x, peer, tag, timeout) for s, x, peer, tag in ops]
        if not calls:
            return []
        site = call_site()
        for call in calls:
            call.site = site
        completions: list[Completion] = []
        routed = [(self._route(call), call) for call in calls]  # all, before any is sent
        for backend, some in groupby(routed, itemgetter(0)):  # arrays of device and host may come together
            completions += backend.post_each([call for _, call in some])
        return [Work(done, (call,)) for done, call in zip(completions, calls, strict=True)]


class _View(ProcessGroup):
    """A group whose calls carry options: all that it knows is the group's."""

    def __init__(self, whole: ProcessGroup, options: CallOptions | None, timeout: float, timed: bool) -> None:
        self.__dict__.update(whole.__dict__)
        for name in _CHANGING:
            del self.__dict__[name]
        self._whole = whole
        self._options = options
        self._timeout = timeout
        self._timed = timed
        self._new_call = calls_with(options, timed)

    def __repr__(self) -> str:
        said = [str(self._options)] if self._options is not None else []
        if self._timeout != self._whole.timeout:
            said.append(f"timeout={self._timeout:g}")
        if self._timed != self._whole._timed:
            said.append(f"timing={self._timed}")
        return f"{repr(self._whole)[:-1]}, using {', '.join(said) or 'nothing'}>"

    @property
    def whole(self) -> ProcessGroup:
        return self._whole


_CHANGING = ("_closed", "_staged", "splits")
"""What a group changes while it lives: its views look it up there."""


def _delegated(name: str) -> property:
    return property(lambda view: getattr(view._whole, name), lambda view, value: setattr(view._whole, name, value))


for _name in _CHANGING:
    setattr(_View, _name, _delegated(_name))
