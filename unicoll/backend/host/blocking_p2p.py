"""Sends and receives of a group whose backend has none that run at the same time as others."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from unicoll.backend.host.inbox import Inbox
from unicoll.backend.host.op_queue import Execute
from unicoll.calls.call import Call
from unicoll.calls.ops import PROBE
from unicoll.calls.work import HostCompletion
from unicoll.errors import BackendUnavailableError

if TYPE_CHECKING:
    from unicoll.backend.host.host_backend import HostBackend


class BlockingP2P:
    """Sends and receives by a function that blocks until one of them is done.

    A blocking call runs on the caller's thread, one in the background on a thread of its own. Sends
    to one peer run one after another, and so do receives of one peer and tag; all others run at the
    same time. A receive from any member is not ordered with receives from a certain one.
    """

    def __init__(self, name: str, execute: Execute) -> None:
        self._name = name
        self._execute = execute
        self._lock = threading.Lock()
        # By _order(call): a key is there while one of its calls runs, with those behind it.
        self._waiting: dict[tuple[int, int | None], deque[HostCompletion]] = {}

    def run(self, call: Call) -> None:
        """Send or receive; return when the array may be used again."""
        completion = HostCompletion((call,))
        # The call in front of it starts a thread for this one when it is over.
        if not self._is_next(completion):
            completion.wait(None)
            return
        try:
            self._execute(call)
        finally:
            self._start_next(call)

    def post(self, call: Call) -> HostCompletion:
        """Send or receive in the background."""
        completion = HostCompletion((call,))
        if self._is_next(completion):
            self._start(completion)
        return completion

    def iprobe(self, call: Call) -> bool:
        """A function that blocks cannot do this."""
        raise BackendUnavailableError(
            f"{call.op.name}: not over a function that blocks", op=call.op.name
        )

    def _is_next(self, completion: HostCompletion) -> bool:
        """True if nothing is before a send or receive; else it is queued."""
        order = _order(completion.calls[0])
        with self._lock:
            if order in self._waiting:
                self._waiting[order].append(completion)
                return False
            self._waiting[order] = deque()
            return True

    def _start(self, completion: HostCompletion) -> None:
        name = f"unicoll-{self._name}-messages"
        threading.Thread(target=self._work, args=(completion,), name=name, daemon=True).start()

    def _start_next(self, call: Call) -> None:
        """Start the one behind a send or receive that is over."""
        with self._lock:
            waiting = self._waiting[_order(call)]
            following = waiting.popleft() if waiting else None
            if following is None:
                del self._waiting[_order(call)]
        if following is not None:
            self._start(following)

    def _work(self, completion: HostCompletion) -> None:
        completion.begin()
        call, error = completion.calls[0], None
        try:
            self._execute(call)
        except BaseException as e:
            error = e
        # This comes before the callbacks, which finish() runs: one may wait for the call that is
        # next.
        self._start_next(call)
        completion.finish(error)

    @property
    def has_callbacks(self) -> bool:
        """True if messages are in flight, which may have callbacks."""
        return bool(self._waiting)

    def abort(self) -> None:
        """Nothing to do: the function raises."""

    def drain(self, timeout: float) -> None:
        """Wait for the sends, up to ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and any(peer >= 0 for peer, _ in [*self._waiting]):
            time.sleep(0.001)

    def close(self) -> bool:
        """Nothing to do: the function raises."""
        return not self._waiting


def _order(call: Call) -> tuple[int, int | None]:
    """Equal for sends, and for receives and probes, that run one after another."""
    # Keys of receives are negative, so that they differ from those of sends.
    return (call.peer, 0) if call.inputs else (-2 - call.peer, call.tag)


class MessagesToSelf(BlockingP2P):
    """The messages of a group of one rank.

    Args:
        name, backend: of the group.
    """

    def __init__(self, name: str, backend: HostBackend) -> None:
        super().__init__(name, self._do)
        self._inbox = Inbox(backend)

    def _do(self, call: Call) -> None:
        deadline = time.monotonic() + call.timeout
        if call.op is PROBE:
            self._inbox.probe(call, deadline)
        elif call.outputs:
            self._inbox.receive(call, deadline)
        else:
            buffer = call.inputs[0]
            assert buffer.flat is not None
            assert call.tag is not None
            # The message is a copy, because the send is over then and the array may be written.
            self._inbox.put(
                call.peer, call.tag, buffer.dtype.code, bytearray(buffer.flat.view(np.uint8))
            )

    def iprobe(self, call: Call) -> bool:
        return self._inbox.iprobe(call)
