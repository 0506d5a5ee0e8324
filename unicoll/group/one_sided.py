"""One-sided operations: writing to another member's memory, and signals. Only one of the two ranks makes the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unicoll.arrays.conversion import as_buffer
from unicoll.backend.call import OneSidedCall
from unicoll.backend.ops import Arity, Op, Sizes
from unicoll.errors import DistArgumentError
from unicoll.group.arguments import as_integer, call_site
from unicoll.group.backends import GroupBackends
from unicoll.group.call_settings import CallSettings, Timeout
from unicoll.group.members import GroupMembers

__all__ = ["OneSidedOperations"]

_PUT, _SIGNAL, _WAIT = (
    Op(name, 0, Arity.ONE, Arity.NONE, Sizes.NONE) for name in ("put", "signal", "wait_signal")
)


class OneSidedOperations:
    """Validates the one-sided operations of a group and hands them to its CUDA backend.

    The operations are put on the current stream of the array's library and do not block the host.
    """

    def __init__(self, members: GroupMembers, backends: GroupBackends) -> None:
        self._members = members
        self._backends = backends

    def put(
        self, settings: CallSettings, tensor: Any, dst: int, window: Any, offset: int, timeout: Timeout
    ) -> None:
        """:meth:`ProcessGroup.put`."""
        self._start(settings, _PUT, tensor, {dst: 1}, timeout, window, offset)

    def signal(self, settings: CallSettings, tensor: Any, dst: int, timeout: Timeout) -> None:
        """:meth:`ProcessGroup.signal`."""
        self._start(settings, _SIGNAL, tensor, {dst: 1}, timeout)

    def wait_signal(
        self, settings: CallSettings, tensor: Any, src: int | Mapping[int, int], count: int, timeout: Timeout
    ) -> None:
        """:meth:`ProcessGroup.wait_signal`."""
        signals = dict(src) if isinstance(src, Mapping) else {src: count}
        self._start(settings, _WAIT, tensor, signals, timeout)

    def _start(
        self,
        settings: CallSettings,
        op: Op,
        tensor: Any,
        signals: dict[int, int],
        timeout: Timeout,
        window: Any = None,
        offset: int = 0,
    ) -> None:
        buffer = as_buffer(tensor, f"{op.name}: tensor")
        signals = {
            as_integer(f"{op.name}: a rank", peer): as_integer(f"{op.name}: count", count)
            for peer, count in signals.items()
        }
        offset = as_integer(f"{op.name}: offset", offset)
        size = self._members.size
        wrong = [peer for peer in signals if not 0 <= peer < size]
        if wrong or not signals:
            raise DistArgumentError(f"{op.name}: no ranks of a group of {size}: {wrong}", op=op.name)
        if any(count < 1 for count in signals.values()) or offset < 0:
            raise DistArgumentError(f"{op.name}: {signals} signals at offset {offset}: too few", op=op.name)
        call = OneSidedCall(op, (buffer,), (), settings.seconds(timeout))
        call.signals, call.window, call.offset = signals, window, offset
        call.site = call_site()
        self._backends.unstaged("cuda").one_sided(call)
