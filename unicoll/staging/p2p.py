"""Sends and receives of device arrays over a backend of host arrays, which may take device
addresses.

The message is the same in both cases, so each side chooses for itself: a message may be sent by
address and be received through pinned memory, or by a host array.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from unicoll.arrays.conversion import Buffer
from unicoll.arrays.device_flat import DeviceFlat
from unicoll.backend.group_state import TICK_S
from unicoll.backend.host import HostBackend
from unicoll.calls.call import Call, ProxyCall
from unicoll.calls.error_marks import leaves_doubt
from unicoll.calls.work import Completion, HostCompletion
from unicoll.devices.device_runtime import on_device
from unicoll.errors import CollectiveMismatchError, MessageMismatchError
from unicoll.process.interrupts import LazyThread
from unicoll.staging.copier import HostCopier
from unicoll.staging.device_pointers import DirectCalls
from unicoll.staging.pinned_pool import PinnedBlock

HARMLESS = (CollectiveMismatchError, MessageMismatchError)
"""Errors after which no backend uses the arrays any more."""
_SETTLE_S = 5.0
"""How long closing waits for receives that are being copied to the device."""


class DeviceP2P:
    """The sends and receives of a group on device arrays."""

    def __init__(
        self, host: HostBackend, copier: HostCopier, direct: DirectCalls, group: str
    ) -> None:
        self._host = host
        self._copier = copier
        self._direct = direct
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = LazyThread(f"unicoll-{group}-staging")

    def run(self, call: Call) -> None:
        """Send or receive; the array may be used on any stream when it returns."""
        if call.inputs:
            made = self._outgoing(call)
            self._run_host(made)
            self._free(made)
        else:
            device = self._copier.begin(call)
            made = self._incoming(call, device, may_wait=True)
            self._run_host(made)
            self._deliver(call, device, made)

    def post(self, call: Call) -> Completion:
        """Send or receive in the background; a send returns after the work that produces the
        array."""
        return self._post_send(call) if call.inputs else self._post_receive(call)

    def close(self) -> None:
        """End the thread; the backend has been closed."""
        self._tasks.put(None)
        self._thread.join(_SETTLE_S)

    # --- as calls of the backend ------------------------------------------------------------------

    def _outgoing(self, call: Call) -> Call:
        """A send as the backend gets it; returns after the work that produces the array."""
        buffer, device = call.inputs[0], self._copier.begin(call)
        if self._host.takes_device(call):
            return self._by_address(call, device)
        pinned = self._copier.pinned.take(buffer.nbytes)
        self._copier.move(call, device, buffer, pinned, to_device=False)
        return self._through_host(call, pinned)

    def _incoming(self, call: Call, device: int, may_wait: bool) -> Call:
        """A receive as the backend gets it.

        Messages are matched in the order of the receives, so a receive cannot wait for the device
        while others wait behind it: unless ``may_wait``, a receive whose array is still in use goes
        through pinned memory.
        """
        if self._host.takes_device(call):
            with on_device(self._copier.runtime, device):
                unused = may_wait or self._direct.unused(device)
            if unused:
                return self._by_address(call, device)
        return self._through_host(call, self._copier.pinned.take(call.outputs[0].nbytes))

    def _by_address(self, call: Call, device: int) -> Call:
        deadline = time.monotonic() + call.timeout
        with on_device(self._copier.runtime, device):
            self._direct.await_producers(call, device, self._direct.mark(device), deadline)
        return self._direct.by_address(call, device, deadline)

    def _through_host(self, call: Call, pinned: PinnedBlock) -> Call:
        """A send or receive of pinned memory."""
        buffer = (call.inputs or call.outputs)[0]
        flat = pinned.bytes[: buffer.nbytes].view(buffer.dtype.storage)
        buffers = (Buffer(pinned, buffer.dtype, buffer.shape, flat),)
        return ProxyCall(
            call,
            call.op,
            buffers if call.inputs else (),
            buffers if call.outputs else (),
            call.timeout,
        )

    def _deliver(self, call: Call, device: int, made: Call) -> None:
        """Copy a received message to the device, if it is in host memory."""
        call.source, call.envelope = made.source, made.envelope
        buffer = call.outputs[0]
        # The message may be shorter than the array.
        if call.envelope is not None:
            buffer = buffer.first(call.envelope[2] // buffer.dtype.itemsize)
        pinned = self._on_host(made)
        if pinned is not None:
            self._copier.move(call, device, buffer, pinned, to_device=True)
            # If the copy fails, move() keeps the memory, and this line is not reached.
            self._copier.pinned.give(pinned)

    def _on_host(self, made: Call) -> PinnedBlock | None:
        """A received message in host memory; None if it is in the device's."""
        buffer = made.outputs[0]
        if isinstance(buffer.owner, PinnedBlock):
            return buffer.owner
        flat = buffer.flat
        assert isinstance(flat, DeviceFlat)
        if flat.memory.received is None:
            return None
        pinned = self._copier.pinned.take(buffer.nbytes)
        received = flat.memory.received
        pinned.bytes[: len(received)] = received
        return pinned

    def _free(self, made: Call) -> None:
        """Return pinned memory that the backend has finished with."""
        owner = (made.inputs or made.outputs)[0].owner
        if isinstance(owner, PinnedBlock):
            self._copier.pinned.give(owner)

    # --- completion -------------------------------------------------------------------------------

    def _run_host(self, made: Call) -> None:
        try:
            self._host.run(made)
        except BaseException as e:
            self._failed(made, e)
            raise

    def _failed(self, made: Call, error: BaseException) -> None:
        """Return the pinned memory of a failed call, unless the backend may still use it, as after
        an interrupt."""
        if isinstance(error, HARMLESS) or not (leaves_doubt(error) or self._host.keeps(made)):
            self._free(made)

    def _post_host(self, made: Call) -> Completion:
        try:
            return self._host.post((made,))
        except BaseException as e:
            self._failed(made, e)
            raise

    def _post_send(self, call: Call) -> Completion:
        made = self._outgoing(call)
        done = self._post_host(made)

        def settle() -> None:
            error = done.exception()
            if error is None:
                self._free(made)
            else:
                self._failed(made, error)

        done.add_done_callback(settle)
        return done

    def _post_receive(self, call: Call) -> Completion:
        device = self._copier.begin(call)
        made = self._incoming(call, device, may_wait=False)
        completion = HostCompletion((call,))
        # An exception of a signal's handler may end the callback, and then nothing delivers the
        # message. So a wait also checks whether the group has failed.
        completion.before_wait = partial(
            HostCompletion.check_until_done, check=self._host.state.check, seconds=TICK_S
        )

        def deliver() -> None:
            try:
                self._deliver(call, device, made)
            except BaseException as e:
                completion.finish(e)
            else:
                completion.finish()

        def received() -> None:
            error = done.exception()
            if error is None:
                # This may be the thread that runs the callbacks of all messages of the group. The
                # copy waits for the device, which would delay the other callbacks.
                self._run_later(deliver)
                return
            self._failed(made, error)
            completion.finish(error)

        done = self._post_host(made)
        done.add_done_callback(received)
        return completion

    def _run_later(self, task: Callable[[], None]) -> None:
        """Run a task that may wait for the device on the group's staging thread."""
        with self._lock:
            self._thread.start(self._work)
        self._tasks.put(task)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            # The task refers to arrays, which a thread that waits for the next task would keep
            # alive.
            del task
