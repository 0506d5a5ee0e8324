"""Point-to-point functions with torch.distributed's names, argument names, order and defaults, and
more of MPI.

Messages between two ranks of a group match by tag, in the order in which they were sent. A message
to :data:`~unicoll.calls.status.NO_RANK`, or from it, ends at once and moves no data, so a program
needs no special case at the edge of a grid. Probes, ``tag=None`` and ``status`` are of backends
that match messages by tag: not of NCCL, which has messages to oneself only in a batch with their
receives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any

from unicoll.api import world
from unicoll.api.ranks import rank_in_group
from unicoll.arrays.conversion import as_buffer
from unicoll.calls.call import Call
from unicoll.calls.ops import OPS
from unicoll.calls.status import NO_RANK, Status
from unicoll.errors import DistArgumentError, DistTypeError, OperationTimeoutError
from unicoll.process.interrupts import Flag
from unicoll.process.timeouts import Timeout, to_seconds

if TYPE_CHECKING:
    from unicoll.calls.work import Work
    from unicoll.group.process_group import ProcessGroup

Array = Any


def send(
    tensor: Array,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> None:
    """Send ``tensor`` to one rank; returns when the array may be written again.

    Completion does not mean that the receiver has come: a small message is buffered.

    Args:
        tensor: array of any shape; the receiver's must have as many elements of the same type.
        dst: global rank of the receiver; NO_RANK sends nothing. A message to this process itself is
            kept until it is received; over NCCL its receive has to be in the same
            :func:`batch_isend_irecv`.
        group: the process group; None means the default one. Outside it: a warning, and no data
            moves.
        tag: a signed 64-bit integer that the receiver's must equal. The lowest ``2**32`` are of the
            library's messages.
        group_dst: the receiver's rank in the group; give this or ``dst``.
        timeout: how long it may take (timedelta, or seconds); None takes the group's.

    Raises:
        DistArgumentError, DistTypeError: a bad argument; nothing has moved and the group stays
            usable.
        MessageMismatchError: the message does not fit the receiver's array (raised there).
        OperationTimeoutError: time is up.
        RankLostError: the receiver died; names rank, host and pid.
        NotInitializedError: there is no default group.

    MPI's counterpart: MPI_Send.
    """
    try:
        pg = world.resolve(group, True)
        if pg is not None and not _is_no_rank(dst, group_dst):
            pg.send(
                tensor,
                dst=rank_in_group(pg, "send", "dst", dst, group_dst),
                tag=tag,
                timeout=timeout,
            )
    except BaseException as e:
        world.interrupted(group, e)
        raise


def recv(
    tensor: Array,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int | None = 0,
    group_src: int | None = None,
    *,
    status: Status | None = None,
    timeout: Timeout = None,
) -> int:
    """Receive into ``tensor`` from one rank, or from the first rank that sends.

    Args:
        tensor: output of as many elements as the message, of the same type.
        src: global rank of the sender; None (and no ``group_src``) takes any; from NO_RANK nothing
            comes.
        group: the process group; None means the default one.
        tag: only a message with this tag is taken; None takes any.
        group_src: the sender's rank in the group; give this or ``src``.
        status: gets the message's source, tag and number of elements. With it the message may have
            fewer elements than ``tensor``: they are written to its beginning, in C order, and the
            rest is left as it is.
        timeout: how long it may take (timedelta, or seconds); None takes the group's.

    Returns:
        The sender's global rank; NO_RANK from NO_RANK; -1 on a process outside the group, after a
        warning.

    Raises:
        as :func:`send`, and MessageMismatchError: the message does not fit ``tensor``.

    MPI's counterpart: MPI_Recv.
    """
    try:
        pg = world.resolve(group, True)
        if pg is None:
            return -1
        if _is_no_rank(src, group_src):
            return _nothing(status)
        sender = _sender(pg, "recv", src, group_src)
        return pg.global_rank(pg.recv(tensor, src=sender, tag=tag, status=status, timeout=timeout))
    except BaseException as e:
        world.interrupted(group, e)
        raise


def isend(
    tensor: Array,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """:func:`send` in the background: the array must not be written until ``work.wait()`` has
    returned.

    Completion means that the array may be used again, not that the receiver has come.

    Arguments and errors as :func:`send`; errors of the transfer come from the Work.

    Returns:
        The Work; None on a process outside the group.

    MPI's counterpart: MPI_Isend.
    """
    try:
        pg = world.resolve(group)
        if pg is None:
            return None
        if _is_no_rank(dst, group_dst):
            return _ended("send", tensor)
        receiver = rank_in_group(pg, "isend", "dst", dst, group_dst)
        return pg.isend(tensor, dst=receiver, tag=tag, timeout=timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


def irecv(
    tensor: Array,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int | None = 0,
    group_src: int | None = None,
    *,
    status: Status | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """:func:`recv` in the background: the array must not be touched until ``work.wait()`` has
    returned.

    Arguments and errors as :func:`recv`; errors of the transfer come from the Work, and ``status``
    has its values once the Work is done.

    Returns:
        The Work, whose ``source_rank()`` is the sender's rank in the group; None on a process
        outside it.

    MPI's counterpart: MPI_Irecv.
    """
    try:
        pg = world.resolve(group)
        if pg is None:
            return None
        if _is_no_rank(src, group_src):
            _nothing(status)
            return _ended("recv", tensor)
        sender = _sender(pg, "irecv", src, group_src)
        return pg.irecv(tensor, src=sender, tag=tag, status=status, timeout=timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


def sendrecv(
    sendtensor: Array,
    dst: int | None,
    recvtensor: Array,
    src: int | None,
    group: ProcessGroup | None = None,
    sendtag: int = 0,
    recvtag: int | None = 0,
    group_dst: int | None = None,
    group_src: int | None = None,
    *,
    status: Status | None = None,
    timeout: Timeout = None,
) -> int:
    """Send to one rank and receive from one, possibly another, at the same time.

    Args:
        sendtensor, dst, sendtag, group_dst: as in :func:`send`.
        recvtensor, src, recvtag, group_src, status: as in :func:`recv`. Where the two arrays
            overlap, what is sent is copied first.
        group: the process group; None means the default one.
        timeout: how long each of the two may take (timedelta, or seconds); None takes the group's.

    Returns:
        The sender's global rank; NO_RANK from NO_RANK; -1 on a process outside the group, after a
        warning.

    Raises the errors of :func:`send` and :func:`recv`. MPI's counterpart: MPI_Sendrecv.
    """
    try:
        pg = world.resolve(group, True)
        if pg is None:
            return -1
        batch: list[tuple[bool, Array, int | None, int | None]] = []
        if not _is_no_rank(dst, group_dst):
            batch.append(
                (True, sendtensor, rank_in_group(pg, "sendrecv", "dst", dst, group_dst), sendtag)
            )
        receives = not _is_no_rank(src, group_src)
        if receives:
            batch.append((False, recvtensor, _sender(pg, "sendrecv", src, group_src), recvtag))
        # Both start in one batch, so that two ranks which send to each other do not wait for each
        # other's receive.
        works = pg.batch_isend_irecv(batch, status=status, timeout=timeout)
        for work in works:
            work.wait()
        # The receive is the last one of the batch. Where a backend does both as one, its Work is
        # the last one, too.
        return pg.global_rank(works[-1].source_rank()) if receives else _nothing(status)
    except BaseException as e:
        world.interrupted(group, e)
        raise


def probe(
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int | None = None,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Status:
    """Wait for a message without receiving it: a receive of its source and tag then gets it.

    Another thread's receive may get it first.

    Args:
        src: global rank of the sender; None (and no ``group_src``) takes any.
        group: the process group, of which this process is a member; None means the default one.
        tag: of the message; None takes any.
        group_src: the sender's rank in the group; give this or ``src``.
        timeout: how long it may take (timedelta, or seconds); None takes the group's.

    Returns:
        The message's source, tag and number of elements; from NO_RANK at once NO_RANK, -1 and 0.

    Raises:
        BackendUnavailableError: the backend of CPU arrays has no probes.
        OperationTimeoutError: time is up.
        RankLostError: the sender, or for any source a member, has died.
        NotInitializedError: there is no default group.

    MPI's counterpart: MPI_Probe.
    """
    try:
        pg = world.member(group, "probe")
        if _is_no_rank(src, group_src):
            _nothing(status := Status())
            return status
        return pg.probe(_sender(pg, "probe", src, group_src), tag, timeout=timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


def iprobe(
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int | None = None,
    group_src: int | None = None,
) -> Status | None:
    """:func:`probe` without waiting: None if no such message has come.

    MPI's counterpart: MPI_Iprobe.
    """
    try:
        pg = world.member(group, "iprobe")
        if _is_no_rank(src, group_src):
            _nothing(status := Status())
            return status
        return pg.iprobe(_sender(pg, "iprobe", src, group_src), tag)
    except BaseException as e:
        world.interrupted(group, e)
        raise


class P2POp:
    """One transfer for :func:`batch_isend_irecv`.

    Args:
        op: :func:`isend` or :func:`irecv` of this package.
        tensor: array to send or to receive into.
        peer: global rank of the other side.
        group: the process group; None means the default one.
        tag: as in :func:`send`.
        group_peer: the other side's rank in the group; give this or ``peer``.

    Attributes:
        op, tensor, tag: as given.
        group: the group itself; None on a process outside it.
        peer, group_peer: the other side as global rank and as rank in the group.

    Raises:
        DistArgumentError: ``op`` is neither function, or ``peer`` is not a rank of the group.
        NotInitializedError: there is no default group.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Array,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int | None = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv:
            raise DistArgumentError(f"P2POp: op must be unicoll.isend or unicoll.irecv, got {op!r}")
        self.op = op
        self.tensor = tensor
        self.tag = tag
        self.group = world.resolve(group)
        self.peer = peer
        self.group_peer = group_peer
        if self.group is not None and not _is_no_rank(peer, group_peer):
            self.group_peer = rank_in_group(
                self.group, f"P2POp({op.__name__})", "peer", peer, group_peer
            )
            self.peer = self.group.global_rank(self.group_peer)

    def __repr__(self) -> str:
        name = self.group.group_name if self.group is not None else None
        shape, dtype = getattr(self.tensor, "shape", None), getattr(self.tensor, "dtype", None)
        arrow = "to" if self.op is isend else "from"
        return f"P2POp({self.op.__name__} {arrow} {self.group_peer} in {name!r}, {shape}, {dtype})"


def batch_isend_irecv(p2p_op_list: Sequence[P2POp], *, timeout: Timeout = None) -> list[Work]:
    """Start several sends and receives together, so that they cannot wait for one another.

    Args:
        p2p_op_list: :class:`P2POp` records, all of one group; the order of those to one peer is
            kept.
        timeout: how long each may take (timedelta, or seconds); None takes the group's.

    Returns:
        Works to wait for, in the order of the list; fewer than it is long where the backend does
        several as one, and where a peer is NO_RANK. None of them on a process outside the group.

    Raises:
        DistArgumentError, DistTypeError: an entry is not a P2POp, or they are of several groups.

    NCCL's counterpart: sends and receives between ncclGroupStart and ncclGroupEnd.
    """
    try:
        for entry in p2p_op_list:
            if not isinstance(entry, P2POp):
                raise DistTypeError(
                    f"batch_isend_irecv: p2p_op_list holds {entry!r}, which is not a P2POp"
                )
            if entry.group is not p2p_op_list[0].group:
                raise DistArgumentError(
                    "batch_isend_irecv: all entries of p2p_op_list must be of one group"
                )
        pg = p2p_op_list[0].group if p2p_op_list else None
        if pg is None:
            return []
        batch = [
            (entry.op is isend, entry.tensor, entry.group_peer, entry.tag)
            for entry in p2p_op_list
            if not _is_no_rank(entry.peer, entry.group_peer)
        ]
        return pg.batch_isend_irecv(batch, timeout=timeout)
    except BaseException as e:
        # The function has no argument for the group: it is that of the first entry, if there is
        # one.
        for entry in p2p_op_list[:1]:
            if isinstance(entry, P2POp) and entry.group is not None:
                entry.group.interrupted(e)
        raise


def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: ProcessGroup | None = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    *,
    tag: int = 0,
    timeout: Timeout = None,
) -> None:
    """Send Python objects to one rank, which must call :func:`recv_object_list` with as many.

    Objects are pickled where that is allowed; else they must be plain (see
    :mod:`unicoll.api.objects`).

    Args:
        object_list: the objects.
        dst: global rank of the receiver.
        group: the process group; None means the default one.
        device: accepted because torch.distributed has it; objects are sent from host memory.
        group_dst: the receiver's rank in the group; give this or ``dst``.
        use_batch: send with :func:`batch_isend_irecv`; the receiver may do either.
        tag: as of :func:`send`; the objects are received by :func:`recv_object_list` with this tag.
        timeout: how long it may take (timedelta, or seconds); None takes the group's.

    Raises:
        PickleRefusedError, DistError: an object cannot be serialised; the receiver raises too.
        DistError: as :func:`send`.
    """
    try:
        from unicoll.api import objects

        pg = world.resolve(group)
        if pg is not None:
            receiver = rank_in_group(pg, "send_object_list", "dst", dst, group_dst)
            objects.send_list(pg, object_list, receiver, use_batch, tag, timeout)
    except BaseException as e:
        world.interrupted(group, e)
        raise


def recv_object_list(
    object_list: MutableSequence[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    *,
    tag: int | None = 0,
    timeout: Timeout = None,
) -> int:
    """Receive what one rank sends with :func:`send_object_list`.

    Args:
        object_list: list as long as the sender's; its entries are replaced.
        src: global rank of the sender; None (and no ``group_src``) takes any.
        group, device, use_batch, timeout: as in :func:`send_object_list`; ``use_batch`` needs a
            sender.
        group_src: the sender's rank in the group; give this or ``src``.
        tag: of the objects to receive; None takes any.

    Returns:
        The sender's global rank; -1 on a process outside the group, after a warning.

    Raises:
        DistArgumentError: the sender's list is of another length.
        PickleRefusedError, DistError: an object could not be serialised there or loaded here.
        DistError: as :func:`recv`.
    """
    try:
        from unicoll.api import objects

        pg = world.resolve(group)
        if pg is None:
            return -1
        sender = _sender(pg, "recv_object_list", src, group_src)
        return pg.global_rank(objects.recv_list(pg, object_list, sender, use_batch, tag, timeout))
    except BaseException as e:
        world.interrupted(group, e)
        raise


def waitany(works: Sequence[Work | None], timeout: Timeout = None) -> int:
    """Wait until one of several operations has ended, as :meth:`Work.wait` does.

    Args:
        works: of any functions and groups; None where there is nothing to wait for, so that a
            program can replace those that have ended.
        timeout: how long to wait (timedelta, or seconds); None waits for the operations' own
            deadlines.

    Returns:
        The index of the first that has ended; others may have, too.

    Raises:
        DistArgumentError: there is no Work.
        OperationTimeoutError: none has ended in time; the operations are still running.
        DistError: the error of the operation that has ended.

    MPI's counterpart: MPI_Waitany.
    """
    present = [work for work in works if work is not None]
    if not present:
        raise DistArgumentError("waitany: no Work is given", op="waitany")
    if not any(work.is_completed() for work in present):
        # This is no threading.Event: an exception of a signal's handler may leave the lock of one
        # held (unicoll.process.interrupts).
        ended = Flag()
        for work in present:
            work.completion.add_done_callback(ended.set)
        if not ended.wait(to_seconds(timeout) or math.inf):
            raise OperationTimeoutError(
                f"waitany: none of {len(present)} operations was done after waiting {timeout} s",
                op="waitany",
            )
    index = next(i for i, work in enumerate(works) if work is not None and work.is_completed())
    chosen = works[index]
    assert chosen is not None
    chosen.wait()
    return index


def _is_no_rank(rank: int | None, group_rank: int | None) -> bool:
    """True if a pair of arguments such as ``src`` and ``group_src`` means no process."""
    return (rank == NO_RANK and group_rank is None) or (group_rank == NO_RANK and rank is None)


def _nothing(status: Status | None) -> int:
    """The result of a receive from NO_RANK."""
    if status is not None:
        status.follow(None)
    return NO_RANK


def _ended(op: str, tensor: Array) -> Work:
    """The Work of a message to or from NO_RANK."""
    from unicoll.calls.work import HostCompletion, Work

    buffers = (as_buffer(tensor, f"{op}: tensor"),)
    inputs, outputs = (buffers, ()) if op == "send" else ((), buffers)
    call = Call(OPS[op], inputs, outputs, 0.0)
    call.source = NO_RANK
    completion = HostCompletion((call,))
    completion.finish()
    return Work(completion, (call,))


def _sender(pg: ProcessGroup, op: str, src: int | None, group_src: int | None) -> int | None:
    if src is None and group_src is None:
        return None
    return rank_in_group(pg, op, "src", src, group_src)
