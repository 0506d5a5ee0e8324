"""Sends and receives of device arrays over a backend that moves the host's memory, or takes addresses on a device.

What travels is the same either way, so each side goes its own: a message may leave by address and come ashore through
page-locked memory, or be for an array of the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from .backend import Backend
from .buffers import Buffer
from .call import Call, ProxyCall
from .device_memory import DeviceFlat
from .direct import Direct
from .dock import Dock
from .errors import CollectiveMismatchError, MessageMismatchError
from .pinned import Pinned
from .streams import on_device
from .work import Completion, HostCompletion

__all__ = ["HARMLESS", "Messages"]

HARMLESS = (CollectiveMismatchError, MessageMismatchError)
"""Errors after which no backend uses the arrays any more."""
_SETTLE_S = 5.0


class Messages:
    """The messages of a group that are in the memory of a device.

    Args:
        host: the backend.
        dock, direct: of the group.
        group: its name.
    """

    def __init__(self, host: Backend, dock: Dock, direct: Direct, group: str) -> None:
        self._host = host
        self._dock = dock
        self._direct = direct
        self._group = group
        self._lock = threading.Lock()
        self._landings: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, call: Call) -> None:
        """Send or receive; the array may be used on any stream when it returns."""
        if call.inputs:
            made = self._leave(call)
            self._run_host(made)
            self._free(made)
        else:
            device = self._dock.begin(call)
            made = self._room(call, device, patient=True)
            self._run_host(made)
            self._land(call, device, made)

    def post(self, call: Call) -> Completion:
        """Send or receive in the background; a send returns when what produces the array has come to its end."""
        return self._post_send(call) if call.inputs else self._post_receive(call)

    def close(self) -> None:
        """End the thread; the backend has been closed."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._landings.put(None)
            thread.join(_SETTLE_S)

    # --- both ways ---------------------------------------------------------------------------------------------------

    def _leave(self, call: Call) -> Call:
        """A send as the backend gets it, once the message is there."""
        buffer, device = call.inputs[0], self._dock.begin(call)
        if self._host.takes_device(call):
            return self._by_address(call, device)
        pinned = self._dock.pins.take(buffer.nbytes)
        self._dock.move(call, device, buffer, pinned, back=False)
        return self._through_host(call, pinned)

    def _room(self, call: Call, device: int, patient: bool) -> Call:
        """A receive as the backend gets it.

        Messages are matched in the order of the receives, so none can wait for the device with the others behind it:
        unless ``patient``, one whose array is still in use goes through the host's memory.
        """
        if self._host.takes_device(call):
            with on_device(self._dock.cuda, device):
                free = patient or self._direct.unused(device)
            if free:
                return self._by_address(call, device)
        return self._through_host(call, self._dock.pins.take(call.outputs[0].nbytes))

    def _by_address(self, call: Call, device: int) -> Call:
        deadline = time.monotonic() + call.timeout
        with on_device(self._dock.cuda, device):
            self._direct.await_producers(call, device, self._direct.mark(device), deadline)
        return self._direct.by_address(call, device, deadline)

    def _through_host(self, call: Call, pinned: Pinned) -> Call:
        """A send or receive as one of the host's memory."""
        buffer = (call.inputs or call.outputs)[0]
        flat = pinned.bytes[: buffer.nbytes].view(buffer.dtype.storage)
        rooms = (Buffer(pinned, buffer.dtype, buffer.shape, flat),)
        return ProxyCall(
            call, call.op, rooms if call.inputs else (), rooms if call.outputs else (), call.timeout
        )

    def _land(self, call: Call, device: int, got: Call) -> None:
        """The message of a receive to the device, if it is not there."""
        call.source = got.source
        buffer = call.outputs[0]
        pinned = self._ashore(got)
        if pinned is not None:
            self._dock.move(call, device, buffer, pinned, back=True)
            self._dock.pins.give(pinned)

    def _ashore(self, got: Call) -> Pinned | None:
        """What has come to the host's memory; None if it has come to the device's."""
        buffer = got.outputs[0]
        if isinstance(buffer.owner, Pinned):
            return buffer.owner
        flat = buffer.flat
        assert isinstance(flat, DeviceFlat)
        if flat.memory.came is None:
            return None
        pinned = self._dock.pins.take(buffer.nbytes)
        pinned.bytes[: buffer.nbytes] = flat.memory.came
        return pinned

    def _free(self, made: Call) -> None:
        """The backend uses the host's memory no more; a device's is the user's."""
        owner = (made.inputs or made.outputs)[0].owner
        if isinstance(owner, Pinned):
            self._dock.pins.give(owner)

    # --- and their ends ----------------------------------------------------------------------------------------------

    def _run_host(self, made: Call) -> None:
        try:
            self._host.run(made)
        except BaseException as e:
            self._failed(made, e)
            raise

    def _failed(self, made: Call, error: BaseException) -> None:
        """A message that has failed: its memory is free, unless the backend may use it still."""
        if isinstance(error, HARMLESS) or not self._host.keeps(made):
            self._free(made)

    def _post_send(self, call: Call) -> Completion:
        made = self._leave(call)
        done = self._host.post((made,))

        def settle() -> None:
            error = done.exception()
            if error is None:
                self._free(made)
            else:
                self._failed(made, error)

        done.add_done_callback(settle)
        return done

    def _post_receive(self, call: Call) -> Completion:
        device = self._dock.begin(call)
        made = self._room(call, device, patient=False)
        landed = HostCompletion((call,))

        def land() -> None:
            try:
                self._land(call, device, made)
            except BaseException as e:
                landed.finish(e)
            else:
                landed.finish()

        def came() -> None:
            error = done.exception()
            if error is None:
                self._later(land)
                return
            self._failed(made, error)
            landed.finish(error)

        done = self._host.post((made,))
        done.add_done_callback(came)
        return landed

    def _later(self, task: Callable[[], None]) -> None:
        """Do something that may wait for the device on a thread of our own."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name=f"unicoll-{self._group}-staging", daemon=True
                )
                self._thread.start()
        self._landings.put(task)

    def _work(self) -> None:
        while (task := self._landings.get()) is not None:
            task()
