"""Collectives of Python objects, with torch.distributed's names, argument names, order and defaults.

Plain objects (numbers, str, bytes, containers, NumPy arrays) travel in the typed format of
:mod:`unicoll.codec`; others are pickled, which is allowed where the group is trusted (only holders of the
job's secret can have joined) and the environment does not say ``UNICOLL_ALLOW_PICKLE=0``.

Every exchange begins with a header of fixed size per sender: how much is coming, or why nothing is. So an
object that cannot be serialised on one rank raises on all of them, instead of leaving the others to wait.
"""

from __future__ import annotations

import struct
import time
from collections.abc import MutableSequence, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from . import codec, settings, world
from .collectives import rank_in_group
from .errors import DistArgumentError, DistError, DistTypeError, PickleRefusedError
from .types import to_seconds

if TYPE_CHECKING:
    from .group import ProcessGroup

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "pickle_allowed",
    "scatter_object_list",
]

Timeout = timedelta | float | None
ByteArray = npt.NDArray[np.uint8]


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
        group: the process group; None means the default one. Outside it: a warning, and nothing moves.
        device: accepted because torch.distributed has it; objects travel from host memory.
        group_src: the source's rank in the group.
        timeout: how long it may take (timedelta, or seconds); None takes the group's for each of its steps.

    Raises:
        DistArgumentError, DistTypeError: a bad argument, or a list of another length than the source's.
        PickleRefusedError, DistError: an object cannot be serialised (on all ranks, naming rank and type), or
            not be loaded (where that happened).
        CollectiveMismatchError, OperationTimeoutError, RankLostError, NotInitializedError: as elsewhere.
    """
    op = "broadcast_object_list"
    pg = world.resolve(group)
    if pg is None:
        return
    root = _root(pg, op, "src", src, group_src)
    clock = _Clock(timeout)
    mine = _Parcel.of(pg, object_list, op) if pg.rank() == root else None
    header = mine.header() if mine else np.empty(_HEADER.size, np.uint8)
    pg.broadcast(header, src=root, timeout=clock.left())
    size = _announced(pg, [header], [root], mine, op)[0]
    body = mine.body if mine else np.empty(size, np.uint8)
    pg.broadcast(body, src=root, timeout=clock.left())
    if mine is None:
        _fill(pg, object_list, body, root, op)


def all_gather_object(
    object_list: MutableSequence[Any], obj: Any, group: ProcessGroup | None = None, *, timeout: Timeout = None
) -> None:
    """Collect one object of every rank on all ranks.

    Args:
        object_list: output list with at least as many entries as the group has ranks; entry i is replaced by
            rank i's object (this rank's own comes back as a copy).
        obj: this rank's object.
        group, timeout: as in :func:`broadcast_object_list`.

    Raises:
        as :func:`broadcast_object_list`.
    """
    op = "all_gather_object"
    pg = world.resolve(group)
    if pg is None:
        return
    _check_room(pg, op, "object_list", object_list)
    clock = _Clock(timeout)
    mine = _Parcel.of(pg, [obj], op)
    sizes = _exchange_headers(pg, mine, op, clock)
    bodies = [np.empty(size, np.uint8) for size in sizes]
    pg.all_gather(bodies, mine.body, timeout=clock.left())
    _fill_each(pg, object_list, bodies, op)


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
        object_gather_list: on the destination, a list with at least as many entries as the group has ranks;
            elsewhere None.
        dst: the destination's global rank; 0 when neither it nor ``group_dst`` is given.
        group_dst: the destination's rank in the group.
        group, timeout: as in :func:`broadcast_object_list`.

    Raises:
        as :func:`broadcast_object_list`.
    """
    op = "gather_object"
    pg = world.resolve(group)
    if pg is None:
        return
    root = _root(pg, op, "dst", dst, group_dst)
    receiving = pg.rank() == root
    if receiving:
        _check_room(pg, op, "object_gather_list", object_gather_list)
    elif object_gather_list:
        raise DistArgumentError(
            f"{op}: object_gather_list is for the destination (rank {root} of the group) alone",
            group=pg.group_name,
            op=op,
        )
    clock = _Clock(timeout)
    mine = _Parcel.of(pg, [obj], op)
    sizes = _exchange_headers(pg, mine, op, clock)
    bodies = _gather_bodies(pg, mine.body, sizes, root, clock)
    if receiving and object_gather_list is not None:
        _fill_each(pg, object_gather_list, bodies, op)


def scatter_object_list(
    scatter_object_output_list: MutableSequence[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> None:
    """Hand each rank its entry of one rank's list.

    Args:
        scatter_object_output_list: non-empty list; its first entry is replaced by this rank's object.
        scatter_object_input_list: on the source, one object per rank in group order; ignored elsewhere.
        src: the source's global rank; 0 when neither it nor ``group_src`` is given.
        group_src: the source's rank in the group.
        group, timeout: as in :func:`broadcast_object_list`.

    Raises:
        as :func:`broadcast_object_list`.
    """
    op = "scatter_object_list"
    pg = world.resolve(group)
    if pg is None:
        return
    root = _root(pg, op, "src", src, group_src)
    _check_list(pg, op, "scatter_object_output_list", scatter_object_output_list, 1)
    clock = _Clock(timeout)
    parcels = None
    if pg.rank() == root:
        parcels = _parcels_for_each(pg, scatter_object_input_list, op)
    first = next((p for p in parcels if p.error), parcels[0]) if parcels else None  # the first that failed
    header = first.header() if first else np.empty(_HEADER.size, np.uint8)
    pg.broadcast(header, src=root, timeout=clock.left())
    _announced(pg, [header], [root], first, op)
    sizes = np.array([p.body.size for p in parcels] if parcels else [0] * pg.size(), np.int64)
    pg.broadcast(sizes, src=root, timeout=clock.left())
    bodies = [p.body for p in parcels] if parcels else []
    body = _scatter_bodies(pg, bodies, [int(size) for size in sizes], root, clock)
    scatter_object_output_list[0] = _load_one(pg, body, root, op)


def pickle_allowed(group: ProcessGroup) -> bool:
    """Whether objects that are not plain may travel: the group is trusted, and the environment agrees."""
    return group.trusted and bool(settings.flag("UNICOLL_ALLOW_PICKLE"))


def send_list(pg: ProcessGroup, objects: Sequence[Any], dst: int, batched: bool, timeout: Timeout) -> None:
    """:func:`unicoll.send_object_list` to group rank ``dst``."""
    clock = _Clock(timeout)
    mine = _Parcel.of(pg, objects, "send_object_list")
    _transfer(pg, True, mine.header(), dst, batched, clock)
    if mine.error is not None:
        raise mine.error
    _transfer(pg, True, mine.body, dst, batched, clock)


def recv_list(
    pg: ProcessGroup, objects: MutableSequence[Any], src: int | None, batched: bool, timeout: Timeout
) -> int:
    """:func:`unicoll.recv_object_list` from group rank ``src`` or any; returns the sender's group rank."""
    op = "recv_object_list"
    clock = _Clock(timeout)
    header = np.empty(_HEADER.size, np.uint8)
    src = _transfer(pg, False, header, src, batched, clock)
    body = np.empty(_announced(pg, [header], [src], None, op)[0], np.uint8)
    _transfer(pg, False, body, src, batched, clock)
    _fill(pg, objects, body, src, op)
    return src


def _transfer(
    pg: ProcessGroup, sending: bool, array: ByteArray, peer: int | None, batched: bool, clock: _Clock
) -> int:
    if batched and peer is not None:
        for work in pg.batch_isend_irecv([(sending, array, peer, 0)], timeout=clock.left()):
            work.wait()
        return peer
    if sending and peer is not None:
        pg.send(array, dst=peer, tag=0, timeout=clock.left())
        return peer
    return pg.recv(array, src=peer, tag=0, timeout=clock.left())


# Headers and bodies ---------------------------------------------------------------------------------------


_OK, _FAILED, _REFUSED = range(3)
_HEADER = struct.Struct("<qq240s")  # status, bytes in the body, why there is none
_SIZE = struct.Struct("<Q")


class _Clock:
    """Splits a call's timeout over its steps."""

    def __init__(self, timeout: Timeout) -> None:
        seconds = to_seconds(timeout)
        if seconds is not None and seconds <= 0:
            raise DistArgumentError(f"timeout: {timeout} is not a positive time")
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        return None if self._end is None else max(self._end - time.monotonic(), 0.001)


class _Parcel:
    """Serialised objects, or the error that prevented it.

    The body is the number of objects, the size of each, and their bytes.
    """

    def __init__(self, body: ByteArray, error: DistError | None = None) -> None:
        self.body = body
        self.error = error

    @classmethod
    def of(cls, pg: ProcessGroup, objects: Sequence[Any], op: str) -> _Parcel:
        try:
            allowed = pickle_allowed(pg)
            pieces = [codec.dumps(obj, allowed) for obj in objects]
        # Whatever a user's object raises must reach the other ranks, which are about to wait for us.
        except Exception as error:
            kind = PickleRefusedError if isinstance(error, PickleRefusedError) else DistError
            reason = str(error) if isinstance(error, DistError) else f"{type(error).__name__}: {error}"
            wrapped = kind(f"{op}: {reason}", group=pg.group_name, rank=pg.global_rank(pg.rank()), op=op)
            wrapped.__cause__ = error
            return cls(np.empty(0, np.uint8), wrapped)
        table = struct.pack(f"<{1 + len(pieces)}Q", len(pieces), *map(len, pieces))
        return cls(
            np.frombuffer(bytearray().join((table, *pieces)), np.uint8)
        )  # writable, as broadcast wants

    def header(self) -> ByteArray:
        if self.error is None:
            packed = _HEADER.pack(_OK, self.body.size, b"")
        else:
            status = _REFUSED if isinstance(self.error, PickleRefusedError) else _FAILED
            reason = str(self.error).partition(": ")[2].removesuffix(codec.HOW_TO_ALLOW).rstrip()
            packed = _HEADER.pack(status, 0, reason.encode("utf-8", "replace")[:240])
        return np.frombuffer(packed, np.uint8).copy()


def _announced(
    pg: ProcessGroup, headers: Sequence[ByteArray], senders: Sequence[int], mine: _Parcel | None, op: str
) -> list[int]:
    """Sizes of the bodies that the headers announce; raises if one of them announces an error."""
    if mine is not None and mine.error is not None:
        raise mine.error
    sizes = []
    for header, sender in zip(headers, senders, strict=True):
        status, size, reason = _HEADER.unpack(header.tobytes())
        if status != _OK or size < _SIZE.size:
            _raise_for(pg, sender, status, reason.rstrip(b"\0").decode("utf-8", "replace"), op)
        sizes.append(size)
    return sizes


def _raise_for(pg: ProcessGroup, sender: int, status: int, reason: str, op: str) -> NoReturn:
    rank = pg.global_rank(sender)
    kind = PickleRefusedError if status == _REFUSED else DistError
    advice = f" {codec.HOW_TO_ALLOW}" if status == _REFUSED else ""
    raise kind(
        f"{op}: rank {rank} has nothing to send: {reason or 'malformed header'}{advice}",
        group=pg.group_name,
        rank=rank,
        op=op,
    )


def _exchange_headers(pg: ProcessGroup, mine: _Parcel, op: str, clock: _Clock) -> list[int]:
    headers = np.empty((pg.size(), _HEADER.size), np.uint8)
    pg.all_gather_into_tensor(headers, mine.header(), timeout=clock.left())
    return _announced(pg, list(headers), range(pg.size()), mine, op)


def _parcels_for_each(pg: ProcessGroup, objects: Sequence[Any] | None, op: str) -> list[_Parcel]:
    if objects is None or len(objects) != pg.size():
        given = "None" if objects is None else str(len(objects))
        raise DistArgumentError(
            f"{op}: scatter_object_input_list must hold an object for each of {pg.size()} ranks, not {given}",
            group=pg.group_name,
            op=op,
        )
    return [_Parcel.of(pg, [obj], op) for obj in objects]


# gather and scatter are quickest with equal pieces. Padding to the largest is right for objects of similar size;
# where it would mostly move padding, all_to_all with sizes moves the bytes alone. All ranks know all sizes, so they
# choose alike.


def _even_enough(sizes: Sequence[int]) -> bool:
    return max(sizes) * len(sizes) <= 2 * sum(sizes) + 65536


def _padded(body: ByteArray, size: int) -> ByteArray:
    padded = np.zeros(size, np.uint8)
    padded[: body.size] = body
    return padded


def _gather_bodies(
    pg: ProcessGroup, body: ByteArray, sizes: Sequence[int], dst: int, clock: _Clock
) -> list[ByteArray]:
    """Every rank's body on ``dst``, nothing elsewhere."""
    receiving = pg.rank() == dst
    if _even_enough(sizes):
        widest = max(sizes)
        pieces = [np.empty(widest, np.uint8) for _ in sizes] if receiving else None
        pg.gather(_padded(body, widest), pieces, dst=dst, timeout=clock.left())
        return [piece[:size] for piece, size in zip(pieces or (), sizes, strict=False)]
    incoming = list(sizes) if receiving else [0] * len(sizes)
    outgoing = [body.size if rank == dst else 0 for rank in range(len(sizes))]
    return np.split(_exchange(pg, body, outgoing, incoming, clock), np.cumsum(incoming)[:-1])


def _scatter_bodies(
    pg: ProcessGroup, bodies: Sequence[ByteArray], sizes: Sequence[int], src: int, clock: _Clock
) -> ByteArray:
    """This rank's body; ``bodies`` holds all of them on ``src`` and nothing elsewhere."""
    mine = sizes[pg.rank()]
    if _even_enough(sizes):
        widest = max(sizes)
        output = np.empty(widest, np.uint8)
        pieces = [_padded(body, widest) for body in bodies] or None
        pg.scatter(output, pieces, src=src, timeout=clock.left())
        return output[:mine]
    incoming = [mine if rank == src else 0 for rank in range(len(sizes))]
    outgoing = list(sizes) if bodies else [0] * len(sizes)
    joined = np.concatenate(bodies) if bodies else np.empty(0, np.uint8)
    return _exchange(pg, joined, outgoing, incoming, clock)


def _exchange(
    pg: ProcessGroup, body: ByteArray, outgoing: list[int], incoming: list[int], clock: _Clock
) -> ByteArray:
    output = np.empty(sum(incoming), np.uint8)
    pg.all_to_all_single(
        output, body, output_split_sizes=incoming, input_split_sizes=outgoing, timeout=clock.left()
    )
    return output


# Loading and checks ---------------------------------------------------------------------------------------


def _load(pg: ProcessGroup, body: ByteArray, sender: int, op: str) -> list[Any]:
    """The objects of a body."""
    rank = pg.global_rank(sender)
    try:
        data = np.ascontiguousarray(body).data
        (count,) = _SIZE.unpack(data[: _SIZE.size]) if len(data) >= _SIZE.size else (1,)
        start = _SIZE.size * (1 + count)
        sizes = struct.unpack(f"<{count}Q", data[_SIZE.size : start]) if start <= len(data) else ()
        if start + sum(sizes) != len(data):
            raise DistError("malformed object data: the sizes do not add up")
        allowed = pickle_allowed(pg)
        objects = []
        for size in sizes:
            objects.append(codec.loads(data[start : start + size], allowed))
            start += size
        return objects
    except DistError as error:
        raise type(error)(
            f"{op}: from rank {rank}: {error}", group=pg.group_name, rank=rank, op=op
        ) from error


def _load_one(pg: ProcessGroup, body: ByteArray, sender: int, op: str) -> Any:
    """The object of a body that must hold exactly one."""
    objects = _load(pg, body, sender, op)
    if len(objects) != 1:
        rank = pg.global_rank(sender)
        raise DistError(
            f"{op}: from rank {rank}: malformed object data: {len(objects)} objects in place of one",
            group=pg.group_name,
            rank=rank,
            op=op,
        )
    return objects[0]


def _fill(pg: ProcessGroup, target: MutableSequence[Any], body: ByteArray, sender: int, op: str) -> None:
    objects = _load(pg, body, sender, op)
    if len(objects) != len(target):
        raise DistArgumentError(
            f"{op}: rank {pg.global_rank(sender)} sent {len(objects)} objects, object_list has {len(target)}",
            group=pg.group_name,
            op=op,
        )
    for i, obj in enumerate(objects):
        target[i] = obj


def _fill_each(pg: ProcessGroup, target: MutableSequence[Any], bodies: Sequence[ByteArray], op: str) -> None:
    """One object of each rank; the list is filled only when all of them could be loaded."""
    objects = [_load_one(pg, body, rank, op) for rank, body in enumerate(bodies)]
    for i, obj in enumerate(objects):
        target[i] = obj


def _root(pg: ProcessGroup, op: str, name: str, rank: int | None, group_rank: int | None) -> int:
    if rank is None and group_rank is None:
        rank = 0
    return rank_in_group(pg, op, name, rank, group_rank)


def _check_room(pg: ProcessGroup, op: str, name: str, target: Any) -> None:
    _check_list(pg, op, name, target, pg.size())


def _check_list(pg: ProcessGroup, op: str, name: str, target: Any, length: int) -> None:
    if not isinstance(target, MutableSequence):
        raise DistTypeError(
            f"{op}: {name} must be a list, got {type(target).__name__}", group=pg.group_name, op=op
        )
    if len(target) < length:
        raise DistArgumentError(
            f"{op}: {name} has {len(target)} entries, {length} are needed", group=pg.group_name, op=op
        )
