"""Writing to another member's memory, and signals: what only one rank of the two calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .arguments import call_site
from .buffers import as_buffer
from .call import OneSidedCall
from .dispatch import Dispatch, Timeout
from .errors import DistArgumentError
from .ops import Arity, Op, Sizes

__all__ = ["OneSided"]

_PUT, _SIGNAL, _WAIT = (
    Op(name, 0, Arity.ONE, Arity.NONE, Sizes.NONE) for name in ("put", "signal", "wait_signal")
)


class OneSided(Dispatch):
    """The one-sided operations of a group, for memory of GPUs over NCCL 2.29 and later.

    They are put on the current stream of the array's library, and do not block the host. All raise:
        BackendUnavailableError: the group has no NCCL, or one that is older.
        DistArgumentError: an argument does not fit, or NCCL has no one-sided operations between these devices.
    """

    def put(self, tensor: Any, dst: int, window: Any, offset: int = 0, *, timeout: Timeout = None) -> None:
        """Write ``tensor`` into member ``dst``'s memory, and signal that member, which calls nothing for the data.

        Puts and signals to one member take effect in order. NCCL has no counterpart that reads (get). This is
        ncclPutSignal in NCCL's documentation.

        Args:
            tensor: of any shape and dtype, contiguous, in a symmetric window of this group, too.
            dst: rank in the group.
            window: this rank's :meth:`register` (``symmetric=True``) or :meth:`symmetric_empty` of the same number as
                the one of ``dst`` that is written to.
            offset: where, in elements of ``tensor``'s type from the window's begin.
            timeout: as of any call.
        """
        self._one_sided(_PUT, tensor, {dst: 1}, timeout, window, offset)

    def signal(self, dst: int, tensor: Any, *, timeout: Timeout = None) -> None:
        """Signal member ``dst``, behind what the current stream of ``tensor``'s library has to do (ncclSignal).

        Args:
            dst: rank in the group.
            tensor: an array on the group's device, of any size; nothing of it is sent.
            timeout: as of any call.
        """
        self._one_sided(_SIGNAL, tensor, {dst: 1}, timeout)

    def wait_signal(
        self, src: int | Mapping[int, int], tensor: Any, count: int = 1, *, timeout: Timeout = None
    ) -> None:
        """Let the current stream of ``tensor``'s library wait for signals, and with them for what was put before.

        This is ncclWaitSignal in NCCL's documentation.

        Args:
            src: the member that signals, or how many signals of which members.
            tensor: an array on the group's device, of any size, for example what was put to.
            count: how many signals of ``src``; each is waited for once.
            timeout: as of any call.
        """
        self._one_sided(_WAIT, tensor, dict(src) if isinstance(src, Mapping) else {src: count}, timeout)

    def _one_sided(
        self,
        op: Op,
        tensor: Any,
        signals: dict[int, int],
        timeout: Timeout,
        window: Any = None,
        offset: int = 0,
    ) -> None:
        buffer = as_buffer(tensor, f"{op.name}: tensor")
        wrong = [peer for peer in signals if not 0 <= peer < self._size]
        if wrong or not signals:
            raise DistArgumentError(f"{op.name}: no ranks of a group of {self._size}: {wrong}", op=op.name)
        if any(count < 1 for count in signals.values()) or offset < 0:
            raise DistArgumentError(f"{op.name}: {signals} signals at offset {offset}: too few", op=op.name)
        call = OneSidedCall(op, (buffer,), (), self._seconds(timeout))
        call.signals, call.window, call.offset = signals, window, offset
        call.site = call_site()
        self._backends.get("cuda", self._host).one_sided(call)
