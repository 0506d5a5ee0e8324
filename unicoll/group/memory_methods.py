"""Methods of :class:`~unicoll.group.process_group.ProcessGroup`: symmetric memory, and one-sided
operations of GPUs.

One-sided operations (``put``, ``signal``, ``wait_signal``) need NCCL 2.29. They are put on the
current stream of the array's library and do not block the host. They raise:
    BackendUnavailableError: the group has no NCCL, or one that is older.
    DistArgumentError: an argument does not fit, or NCCL has no one-sided operations between these
        devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unicoll.arrays.conversion import as_buffer
from unicoll.arrays.types import BY_NAME, DType
from unicoll.calls.call import OneSidedCall
from unicoll.calls.call_site import call_site
from unicoll.calls.ops import Arity, Op, Sizes
from unicoll.errors import DistArgumentError, DistTypeError
from unicoll.group.arguments import as_integer
from unicoll.process.timeouts import Timeout

if TYPE_CHECKING:
    from unicoll.backend.contract import Registration
    from unicoll.group.process_group import ProcessGroup

_PUT, _SIGNAL, _WAIT_SIGNAL = (
    Op(name, 0, Arity.ONE, Arity.NONE, Sizes.NONE) for name in ("put", "signal", "wait_signal")
)


def put(
    self: ProcessGroup,
    tensor: Any,
    dst: int,
    window: Any,
    offset: int = 0,
    *,
    timeout: Timeout = None,
) -> None:
    """Write ``tensor`` into member ``dst``'s memory and signal that member, which makes no matching
    call.

    Puts and signals to one member take effect in order. NCCL has no counterpart that reads (get).
    This is ncclPutSignal in NCCL's documentation.

    Args:
        tensor: of any shape and dtype, contiguous, in a symmetric window of this group, too.
        dst: rank in the group.
        window: this rank's :meth:`register` (``symmetric=True``) or :meth:`symmetric_empty` of the
            same number as the one of ``dst`` that is written to.
        offset: where, in elements of ``tensor``'s type from the window's begin.
        timeout: as of any call.
    """
    try:
        _start_one_sided(self, _PUT, tensor, {dst: 1}, timeout, window, offset)
    except BaseException as e:
        self.interrupted(e)
        raise


def signal(self: ProcessGroup, dst: int, tensor: Any, *, timeout: Timeout = None) -> None:
    """Signal member ``dst``, behind what the current stream of ``tensor``'s library has to do
    (ncclSignal).

    Args:
        dst: rank in the group.
        tensor: an array on the group's device, of any size; nothing of it is sent.
        timeout: as of any call.
    """
    try:
        _start_one_sided(self, _SIGNAL, tensor, {dst: 1}, timeout)
    except BaseException as e:
        self.interrupted(e)
        raise


def wait_signal(
    self: ProcessGroup,
    src: int | Mapping[int, int],
    tensor: Any,
    count: int = 1,
    *,
    timeout: Timeout = None,
) -> None:
    """Let the current stream of ``tensor``'s library wait for signals, and with them for what was
    put before.

    This is ncclWaitSignal in NCCL's documentation.

    Args:
        src: the member that signals, or how many signals of which members.
        tensor: an array on the group's device, of any size, for example what was put to.
        count: how many signals of ``src``; each is waited for once.
        timeout: as of any call.
    """
    try:
        signals = dict(src) if isinstance(src, Mapping) else {src: count}
        _start_one_sided(self, _WAIT_SIGNAL, tensor, signals, timeout)
    except BaseException as e:
        self.interrupted(e)
        raise


def _start_one_sided(
    self: ProcessGroup,
    op: Op,
    tensor: Any,
    signals: dict[int, int],
    timeout: Timeout,
    window: Any = None,
    offset: int = 0,
) -> None:
    """Check a one-sided operation and hand it to the group's backend of its device."""
    buffer = as_buffer(tensor, f"{op.name}: tensor")
    signals = {
        as_integer(f"{op.name}: a rank", peer): as_integer(f"{op.name}: count", count)
        for peer, count in signals.items()
    }
    offset = as_integer(f"{op.name}: offset", offset)
    size = self._context.size
    wrong = [peer for peer in signals if not 0 <= peer < size]
    if wrong or not signals:
        raise DistArgumentError(f"{op.name}: no ranks of a group of {size}: {wrong}", op=op.name)
    if any(count < 1 for count in signals.values()) or offset < 0:
        raise DistArgumentError(
            f"{op.name}: {signals} signals at offset {offset}: too few", op=op.name
        )
    call = OneSidedCall(op, (buffer,), (), self._settings.seconds(timeout))
    call.signals, call.window, call.offset = signals, window, offset
    call.site = call_site()
    self._backends.on_device.one_sided(call)


def symmetric_empty(
    self: ProcessGroup,
    shape: int | Sequence[int],
    dtype: Any = "float32",
    *,
    device: str | None = None,
) -> Any:
    """An array in memory that the other ranks reach directly, of one size on all ranks; all members
    call it.

    On the CPU it is a NumPy array of zeros in memory shared by the ranks of a host: with the
    backend gloo, and with the backend mpi if all ranks are on one host. Collectives of arrays
    larger than 64 KiB that lie in such memory on all ranks, whole or in part, need no copies (with
    mpi from 256 KiB of each rank on, if nothing is reduced); their results are the same.
    ``torch.from_numpy(x)`` and ``torch.from_dlpack(x)`` use it in place. The memory lasts until no
    rank refers to it any more, also after the end of the group. After a collective that has failed,
    other ranks may still write to it until they have noticed the failure.

    On a GPU (NCCL) it is uninitialized memory in a window of the group
    (``ncclCommWindowRegister``), with ``__cuda_array_interface__``: ``torch.as_tensor(x,
    device="cuda")`` and ``cupy.asarray(x)`` use it in place. It lasts until nothing refers to it on
    any rank, and then until the group's next symmetric memory or its end; its window ends with the
    group.

    Args:
        shape: of the array.
        dtype: an element type, or its name; those that NumPy lacks come as unsigned integers of
            their size.
        device: "cpu" or "cuda"; None is "cuda" in a group with NCCL.

    Raises:
        DistArgumentError: the ranks pass different sizes, or a size is negative.
        DistTypeError: no such element type.
        DistBackendError: there is not enough memory.
        BackendUnavailableError: the group's backend has no symmetric memory. NCCL has it since
            2.27, the backend mpi if all ranks share the memory of one host.
    """
    try:
        several = shape if isinstance(shape, Sequence) else (shape,)
        sizes = tuple(as_integer("symmetric_empty: shape", n) for n in several)
        if any(n < 0 for n in sizes):
            raise DistArgumentError(
                f"symmetric_empty: shape {list(sizes)} has a negative size", op="symmetric_empty"
            )
        if device not in (None, "cpu", "cuda", "xpu"):
            raise DistArgumentError(
                f"symmetric_empty: device {device!r} is not 'cpu', 'cuda' or 'xpu'",
                op="symmetric_empty",
            )
        backend = (
            self._backends.unstaged(device) if device is not None else self._backends.on_device
        )
        return backend.symmetric_empty(sizes, _element_type(dtype))
    except BaseException as e:
        self.interrupted(e)
        raise


def _element_type(dtype: Any) -> DType:
    """An element type by its name, or by what NumPy or torch has for it."""
    name = (
        dtype
        if isinstance(dtype, str)
        else str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    )
    found = BY_NAME.get(name)
    if found is None:
        raise DistTypeError(
            f"symmetric_empty: {dtype!r} is no element type; known are {', '.join(BY_NAME)}"
        )
    return found


def peer_view(self: ProcessGroup, tensor: Any, rank: int) -> Any:
    """The array of another rank of this host at the place of ``tensor``, for algorithms of your
    own.

    Reading and writing it needs no call of the other rank. :meth:`fence` orders the accesses of all
    ranks.

    Args:
        tensor: contiguous, from :meth:`symmetric_empty` on the CPU, or a part of such an array.
        rank: in the group; this rank gives ``tensor`` itself.

    Returns:
        A NumPy array of the shape and type of ``tensor``.

    Raises:
        DistArgumentError: ``tensor`` is not in symmetric memory of this group, or there is no such
            rank.
        BackendUnavailableError: that rank is on another host, or the group's backend has no such
            memory.
    """
    buffer = as_buffer(tensor, "peer_view: tensor")
    place = as_integer("peer_view: rank", rank)
    self.global_rank(place)
    return self._backends.unstaged(buffer.device.type).peer_view(buffer, place)


def fence(self: ProcessGroup, *, timeout: Timeout = None) -> None:
    """Wait for all members: what any of them wrote to symmetric memory on the CPU before is visible
    to all after.

    It is a barrier. It does not order the work of a GPU.
    """
    self.barrier(timeout=timeout)


def register(self: ProcessGroup, memory: Any, *, symmetric: bool = False) -> Registration:
    """Register memory of this rank's GPU with NCCL or oneCCL, which then moves it with fewer
    copies.

    All members call it, each with memory of its own; with ``symmetric`` it has one size on all of
    them, and begins at the same multiple of 4096 bytes in its allocation. It lasts until
    :meth:`Registration.close`, or until the group is closed, and keeps ``memory`` alive. Arrays of
    parts of the memory are known, too.

    Args:
        memory: a contiguous array, or a ``torch.cuda.MemPool``: the memory that it holds now, which
            is to be kept (no ``torch.cuda.empty_cache()``). CuPy's pools do not list their memory.
        symmetric: register it as a symmetric window (``ncclCommWindowRegister``), which needs
            memory of the CUDA driver's ``cuMemCreate`` on all ranks, as ``ncclMemAlloc`` gives it;
            NCCL before 2.27, and communicators that have no use for windows, register it by
            ``ncclCommRegister``. ``symmetric`` of what is returned says which.

    Raises:
        BackendUnavailableError: the group has neither oneCCL nor an NCCL from 2.19 on.
        DistTypeError: neither an array nor a pool that lists its memory.
        DistArgumentError: it is empty, not contiguous, not on the group's device, in a window
            already, or would be a window that differs between the ranks.
        DistError: NCCL refuses it, and why.
    """
    try:
        return self._backends.on_device.register(memory, symmetric)
    except BaseException as e:
        self.interrupted(e)
        raise
