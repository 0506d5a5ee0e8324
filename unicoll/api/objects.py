"""Collectives of Python objects, with torch.distributed's names, argument names, order and
defaults.

Objects are pickled if the job is trusted (only holders of its secret can have joined) and no rank
sets ``UNICOLL_ALLOW_PICKLE=0``. Otherwise they must be plain (numbers, str, bytes, containers,
NumPy arrays) and are sent in the typed format of :mod:`unicoll.net.objects.object_codec`.

With the backend ``fake`` nothing arrives, so the receivers use what they hold as the sender's
objects.

Every exchange begins with a header of fixed size per sender: the size of its body, or why there is
none. So an object that cannot be serialised on one rank raises on all of them, and no rank waits
for it. Small bodies are in the headers; if one of them is not, all bodies follow.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unicoll.api import world
from unicoll.api.object_payload import (
    HEADER,
    Body,
    ByteArray,
    Deadline,
    Payload,
    body_tag,
    fill,
    fill_each,
    load,
    read_headers,
)
from unicoll.api.ranks import rank_in_group, root_or_zero
from unicoll.calls.error_marks import mark_changed
from unicoll.errors import DistArgumentError, DistTypeError
from unicoll.process.timeouts import Timeout

if TYPE_CHECKING:
    from unicoll.group.process_group import ProcessGroup


def broadcast_object_list(
    object_list: MutableSequence[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: Any = None,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> None:
    """Copy a list of objects from one rank to all others.

    Args:
        object_list: as long on all ranks; input on the source, elsewhere its entries are replaced.
        src: the source's global rank; 0 when neither it nor ``group_src`` is given.
        group: the process group; None means the default one. Outside it: a warning, and no data
            moves.
        device: accepted because torch.distributed has it; objects are sent from host memory.
        group_src: the source's rank in the group.
        timeout: how long it may take (timedelta, or seconds); None takes the group's for each of
            its steps.

    Raises:
        DistArgumentError, DistTypeError: a bad argument, or a list of another length than the
            source's.
        PickleRefusedError, DistError: an object cannot be serialised (on all ranks, naming rank and
            type), or not be loaded (where that happened).
        CollectiveMismatchError, OperationTimeoutError, RankLostError, NotInitializedError: as
            elsewhere.
    """
    try:
        op = "broadcast_object_list"
        pg = world.resolve(group)
        if pg is None:
            return
        root = rank_in_group(pg, op, "src", *root_or_zero(src, group_src))
        _check_list(pg, op, "object_list", object_list, 0)
        clock = Deadline(timeout)
        mine = Payload.of(pg, list(object_list), op) if pg.rank() == root or pg.job.fake else None
        # This comes after what can fail on this rank alone: the number of a collective is a part of
        # the MAC, and must be equal on all ranks, so a refused call takes none.
        call = pg.object_seals.next_collective()
        header = mine.seal(pg, call).header() if mine else np.empty(HEADER.size, np.uint8)
        pg.broadcast(header, src=root, timeout=clock.left())
        sizes, bodies = read_headers(pg, header, [root], mine, op)
        if bodies is None:
            if mine is None:
                body = np.empty(sizes[0], np.uint8)
            else:
                # With the backend fake every rank has a payload, and its body, which is read-only,
                # is an output of the broadcast.
                body = mine.body.copy() if pg.job.fake else mine.body
            pg.broadcast(body, src=root, timeout=clock.left())
            bodies = [body]
        if mine is None:
            fill(pg, object_list, bodies[0], root, op, call)
    except BaseException as e:
        world.interrupted(group, e)
        raise


def all_gather_object(
    object_list: MutableSequence[Any],
    obj: Any,
    group: ProcessGroup | None = None,
    *,
    timeout: Timeout = None,
) -> None:
    """Collect one object of every rank on all ranks.

    Args:
        object_list: output list with at least as many entries as the group has ranks; entry i is
            replaced by rank i's object (this rank's own comes back as a copy).
        obj: this rank's object.
        group, timeout: as in :func:`broadcast_object_list`.

    Raises:
        DistError: as :func:`broadcast_object_list`.
    """
    try:
        op = "all_gather_object"
        pg = world.resolve(group)
        if pg is None:
            return
        _check_list(pg, op, "object_list", object_list, pg.size())
        clock = Deadline(timeout)
        mine = Payload.of(pg, obj, op)
        call = pg.object_seals.next_collective()
        sizes, bodies = _exchange_headers(pg, mine.seal(pg, call), op, clock)
        if bodies is None:
            bodies = _all_bodies(pg, mine, sizes, clock)
        fill_each(pg, object_list, bodies, op, call, mine)
    except BaseException as e:
        world.interrupted(group, e)
        raise


def gather_object(
    obj: Any,
    object_gather_list: MutableSequence[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> None:
    """Collect one object of every rank on one of them.

    Args:
        obj: this rank's object.
        object_gather_list: on the destination, a list with at least as many entries as the group
            has ranks; elsewhere None.
        dst: the destination's global rank; 0 when neither it nor ``group_dst`` is given.
        group_dst: the destination's rank in the group.
        group, timeout: as in :func:`broadcast_object_list`.

    Raises:
        DistError: as :func:`broadcast_object_list`.
    """
    try:
        op = "gather_object"
        pg = world.resolve(group)
        if pg is None:
            return
        root = rank_in_group(pg, op, "dst", *root_or_zero(dst, group_dst))
        receiving = pg.rank() == root
        if receiving:
            _check_list(pg, op, "object_gather_list", object_gather_list, pg.size())
        elif object_gather_list:
            raise DistArgumentError(
                f"{op}: object_gather_list is for the destination (rank {root} of the group) alone",
                group=pg.group_name,
                op=op,
            )
        clock = Deadline(timeout)
        mine = Payload.of(pg, obj, op)
        call = pg.object_seals.next_collective()
        sizes, bodies = _exchange_headers(pg, mine.seal(pg, call), op, clock)
        if bodies is None:
            bodies = [*_gather_bodies(pg, mine.body, sizes, root, clock)]
        if receiving and object_gather_list is not None:
            fill_each(pg, object_gather_list, bodies, op, call, mine)
    except BaseException as e:
        world.interrupted(group, e)
        raise


def scatter_object_list(
    scatter_object_output_list: MutableSequence[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> None:
    """Give each rank its entry of one rank's list.

    Args:
        scatter_object_output_list: non-empty list; its first entry is replaced by this rank's
            object.
        scatter_object_input_list: on the source, one object per rank in group order; ignored
            elsewhere.
        src: the source's global rank; 0 when neither it nor ``group_src`` is given.
        group_src: the source's rank in the group.
        group, timeout: as in :func:`broadcast_object_list`.

    Raises:
        DistError: as :func:`broadcast_object_list`.
    """
    try:
        op = "scatter_object_list"
        pg = world.resolve(group)
        if pg is None:
            return
        root = rank_in_group(pg, op, "src", *root_or_zero(src, group_src))
        _check_list(pg, op, "scatter_object_output_list", scatter_object_output_list, 1)
        clock = Deadline(timeout)
        objects = None
        if pg.rank() == root:
            objects = _one_for_each_rank(pg, scatter_object_input_list, op)
        elif pg.job.fake:
            objects = [scatter_object_output_list[0]] * pg.size()
        payloads = None if objects is None else [Payload.of(pg, obj, op) for obj in objects]
        call = pg.object_seals.next_collective()
        for rank, payload in enumerate(payloads or ()):
            payload.seal(pg, call, rank)
        # If an object failed, every header has its error, so all ranks raise. Else, if the largest
        # is not small, every header has its size, so all ranks take part in the transfer of the
        # bodies.
        largest = max(payloads, key=lambda p: (p.error is not None, p.size)) if payloads else None
        header = np.empty(HEADER.size, np.uint8)
        headers = None
        if payloads and largest:
            headers = [p.header() if largest.is_small else largest.header() for p in payloads]
            # This is so with the backend fake only.
            if pg.rank() != root:
                header, headers = headers[pg.rank()], None
        pg.scatter(header, headers, src=root, timeout=clock.left())
        carried = read_headers(pg, header, [root], largest, op)[1]
        if carried is None:
            # Each rank needs all sizes, from which it decides whether the parts are padded.
            sizes = np.array([p.size for p in payloads] if payloads else [0] * pg.size(), np.int64)
            pg.broadcast(sizes, src=root, timeout=clock.left())
            bodies = [p.body for p in payloads] if payloads else []
            carried = [_scatter_bodies(pg, bodies, [int(size) for size in sizes], root, clock)]
        scatter_object_output_list[0] = load(pg, carried[0], root, op, call, pg.rank())
    except BaseException as e:
        world.interrupted(group, e)
        raise


def send_list(
    pg: ProcessGroup, objects: Sequence[Any], dst: int, batched: bool, tag: int, timeout: Timeout
) -> None:
    """:func:`unicoll.send_object_list` to group rank ``dst``."""
    clock = Deadline(timeout)
    mine = Payload.of(pg, list(objects), "send_object_list").seal(pg, None, dst)
    header = mine.header()
    # A header with an error is sent, too: the receiver waits for it, and raises.
    _transfer(pg, True, header, dst, tag, batched, clock)
    if mine.error is not None:
        raise mine.error
    if not mine.is_small:
        _transfer(pg, True, mine.body, dst, mine.tag, batched, clock)


def recv_list(
    pg: ProcessGroup,
    objects: MutableSequence[Any],
    src: int | None,
    batched: bool,
    tag: int | None,
    timeout: Timeout,
) -> int:
    """:func:`unicoll.recv_object_list` from group rank ``src`` or any; returns the sender's group
    rank."""
    op = "recv_object_list"
    clock = Deadline(timeout)
    mine = Payload.of(pg, list(objects), op) if pg.job.fake else None
    header = mine.header() if mine else np.empty(HEADER.size, np.uint8)
    src = _transfer(pg, False, header, src, tag, batched, clock)
    sizes, bodies = read_headers(pg, header, [src], mine, op)
    if bodies is None:
        # The body is an output, and that of a payload is read-only.
        body = mine.body.copy() if mine else np.empty(sizes[0], np.uint8)
        try:
            _transfer(pg, False, body, src, body_tag(header), batched, clock)
        except BaseException as e:
            # The header was received, so the call has changed something: also an interrupted wait
            # for the body leaves the group in doubt.
            mark_changed(e)
            raise
        bodies = [body]
    fill(pg, objects, bodies[0], src, op, None, pg.rank())
    return src


def _transfer(
    pg: ProcessGroup,
    sending: bool,
    array: ByteArray,
    peer: int | None,
    tag: int | None,
    batched: bool,
    clock: Deadline,
) -> int:
    if batched and peer is not None:
        for work in pg.batch_isend_irecv([(sending, array, peer, tag)], timeout=clock.left()):
            work.wait()
        return peer
    if sending and peer is not None and tag is not None:
        pg.send(array, dst=peer, tag=tag, timeout=clock.left())
        return peer
    return pg.recv(array, src=peer, tag=tag, timeout=clock.left())


def _exchange_headers(
    pg: ProcessGroup, mine: Payload, op: str, clock: Deadline
) -> tuple[list[int], list[Body] | None]:
    """The sizes of all ranks' bodies; and the bodies, if they are small."""
    received = np.empty((pg.size(), HEADER.size), np.uint8)
    pg.all_gather_into_tensor(received, mine.header(), timeout=clock.left())
    return read_headers(pg, received, range(pg.size()), mine, op)


def _one_for_each_rank(pg: ProcessGroup, objects: Sequence[Any] | None, op: str) -> Sequence[Any]:
    if objects is None or len(objects) != pg.size():
        given = "None" if objects is None else str(len(objects))
        raise DistArgumentError(
            f"{op}: scatter_object_input_list must hold an object for each of {pg.size()} ranks,"
            f" not {given}",
            group=pg.group_name,
            op=op,
        )
    return objects


# Gather and scatter are fastest with equal parts, so objects of similar size are padded to the
# largest, unless most of the bytes would be padding. All ranks know all sizes, so they make the
# same choice.


_MOST_PADDING = 65536
"""Bytes of padding, on all ranks together, that cost less than sizes that differ."""


def _even_enough(sizes: Sequence[int]) -> bool:
    return max(sizes) * len(sizes) <= 2 * sum(sizes) + _MOST_PADDING


def _padded(body: ByteArray, size: int) -> ByteArray:
    if body.size == size:
        return body
    padded = np.zeros(size, np.uint8)
    padded[: body.size] = body
    return padded


def _all_bodies(
    pg: ProcessGroup, mine: Payload, sizes: Sequence[int], clock: Deadline
) -> list[Body]:
    """Every rank's body."""
    widest, total = max(sizes), sum(sizes)
    # One array is faster than a list, whose parts MPI gets packed. Where the sizes differ more, the
    # list has parts of one array, which need not be packed either.
    if widest * len(sizes) - total <= _MOST_PADDING:
        received = np.empty((len(sizes), widest), np.uint8)
        pg.all_gather_into_tensor(received, _padded(mine.body, widest), timeout=clock.left())
        return [row[:size] for row, size in zip(received, sizes, strict=True)]
    parts: list[ByteArray] = np.split(np.empty(total, np.uint8), np.cumsum(sizes)[:-1])
    pg.all_gather(parts, mine.body, timeout=clock.left())
    return list(parts)


def _gather_bodies(
    pg: ProcessGroup, body: ByteArray, sizes: Sequence[int], dst: int, clock: Deadline
) -> list[ByteArray]:
    """Every rank's body on ``dst``, nothing elsewhere."""
    widths = [max(sizes)] * len(sizes) if _even_enough(sizes) else sizes
    parts = [np.empty(width, np.uint8) for width in widths] if pg.rank() == dst else None
    pg.gather(_padded(body, widths[pg.rank()]), parts, dst=dst, timeout=clock.left())
    return [part[:size] for part, size in zip(parts or (), sizes, strict=False)]


def _scatter_bodies(
    pg: ProcessGroup, bodies: Sequence[ByteArray], sizes: Sequence[int], src: int, clock: Deadline
) -> ByteArray:
    """This rank's body; ``bodies`` holds all of them on ``src`` and nothing elsewhere."""
    widths = [max(sizes)] * len(sizes) if _even_enough(sizes) else sizes
    output = np.empty(widths[pg.rank()], np.uint8)
    parts = [_padded(body, width) for body, width in zip(bodies, widths, strict=False)] or None
    # With the backend fake a rank that is not the source has all parts, too, and gets its own.
    if parts and pg.rank() != src:
        output, parts = parts[pg.rank()].copy(), None
    pg.scatter(output, parts, src=src, timeout=clock.left())
    return output[: sizes[pg.rank()]]


def _check_list(pg: ProcessGroup, op: str, name: str, target: Any, length: int) -> None:
    if type(target) is not list and not isinstance(target, MutableSequence):
        raise DistTypeError(
            f"{op}: {name} must be a list, got {type(target).__name__}", group=pg.group_name, op=op
        )
    if len(target) < length:
        raise DistArgumentError(
            f"{op}: {name} has {len(target)} entries, {length} are needed",
            group=pg.group_name,
            op=op,
        )
