"""Messages that have arrived before their receive, for backends whose library does not match
messages by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from unicoll.backend.operation_errors import check_message
from unicoll.calls.call import Call
from unicoll.process.interrupts import Changes

if TYPE_CHECKING:
    from unicoll.backend.host.host_backend import HostBackend

_TICK_S = 0.1


class _Message(NamedTuple):
    peer: int
    tag: int
    code: int
    data: bytearray


class Inbox:
    """The messages that have arrived at a rank of a group and are not received yet, in the order of
    their arrival.

    Args:
        backend: of the group.
    """

    def __init__(self, backend: HostBackend) -> None:
        self._backend = backend
        # This is no Condition: an interrupt of a receive could leave the lock of one held.
        self._arrived = Changes()
        self._messages: list[_Message] = []

    def put(self, peer: int, tag: int, code: int, data: bytearray) -> None:
        """Add a message; called on any thread.

        Args:
            peer: the sender's rank in the group.
            tag: of the send.
            code: of the element type, :attr:`unicoll.arrays.types.DType.code`.
            data: the elements.
        """
        with self._arrived.lock:
            self._messages.append(_Message(peer, tag, code, data))
        self._arrived.notify_all()

    def receive(self, call: Call, deadline: float) -> None:
        """Do a receive: wait for the first message that matches it and copy the message to the
        array of the call.

        Raises:
            OperationTimeoutError: none has come by the deadline, a value of time.monotonic.
            RankLostError: its sender has died, or left the job.
            MessageMismatchError: it has another size or element type than the array.
        """
        found = self._await(call, deadline, self._take)
        size = len(found.data)
        call.matched(found.peer, found.tag, found.code, size)
        check_message(self._backend.context, call, size, found.code)
        buffer = call.outputs[0]
        assert buffer.flat is not None
        buffer.flat.view(np.uint8)[:size] = np.frombuffer(found.data, np.uint8)
        call.write_back()

    def probe(self, call: Call, deadline: float) -> None:
        """Do a probe: wait for the first message that matches it, and leave it here; raises as
        :meth:`receive`."""
        found = self._await(call, deadline, self._find)
        call.matched(found.peer, found.tag, found.code, len(found.data))

    def iprobe(self, call: Call) -> bool:
        """:meth:`probe` without waiting; False if no message matches."""
        with self._arrived.lock:
            found = self._find(call)
        if found is None:
            return False
        call.matched(found.peer, found.tag, found.code, len(found.data))
        return True

    def _await(
        self, call: Call, deadline: float, find: Callable[[Call], _Message | None]
    ) -> _Message:
        while (found := self._arrived.wait_for(lambda: find(call), _TICK_S)) is None:
            self._backend.check(call, deadline)
        return found

    def _take(self, call: Call) -> _Message | None:
        found = self._find(call)
        if found is not None:
            self._messages.remove(found)
        return found

    def _find(self, call: Call) -> _Message | None:
        for message in self._messages:
            if call.tag in (message.tag, None) and call.peer in (message.peer, -1):
                return message
        return None
