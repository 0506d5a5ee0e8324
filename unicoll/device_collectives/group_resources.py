"""The resources of a group on its device, once its ranks have connected: communicator, streams,
memory."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache, partial

from unicoll.backend.group_state import GroupState
from unicoll.device_collectives.communicators.communicator import (
    Communicator,
    CommunicatorWithOptions,
)
from unicoll.device_collectives.in_flight import InFlight
from unicoll.device_collectives.memory.group_memory import GroupMemory
from unicoll.device_collectives.memory.one_sided import set_up
from unicoll.device_collectives.stream_order import StreamOrder

SCRATCH_BYTES = 512
"""Device memory for barriers."""
_OPTIONS_CACHED = 64
"""Different options of calls for which a group keeps the library's structures."""
_device_locks: defaultdict[int, threading.RLock] = defaultdict(threading.RLock)
"""By device. NCCL forbids two threads to issue operations on one device at once, whatever their
communicators.

A group whose library cannot abort has a lock of its own: a call that waits for a rank that is gone
keeps it.
"""


class GroupResources:
    """A group's communicator, stream, operations in flight and registered memory.

    Attributes:
        device: ordinal of the device.
        least_capability: the least compute capability of the members' devices.
        device_lock: held by a thread that issues operations on the device.
        stream: the group's own stream, for asynchronous operations.
        streams: order between streams.
        in_flight: operations that have not ended.
        memory: memory that is registered with the communicator.
        with_options: the communicator for calls with given options.
    """

    def __init__(
        self,
        comm: Communicator,
        state: GroupState,
        high_priority: bool,
        blocking: bool,
        sweep_often: Callable[[], None],
    ) -> None:
        runtime, device = comm.runtime, comm.device
        self.comm = comm
        self.device = device
        self.least_capability = min(comm.origin.capabilities[rank] for rank in comm.context.ranks)
        # The lock of the device is shared by all groups on it; a call that no abort can end must
        # not keep it from the others.
        self.device_lock = (
            _device_locks[device] if comm.library.has("comm_abort") else threading.RLock()
        )
        self.stream = runtime.create_stream(device, high_priority=high_priority)
        comm.scratch = runtime.allocate(device, SCRATCH_BYTES)
        self.streams = StreamOrder(runtime, device)
        self.in_flight = InFlight(runtime, device, self.stream, state, self.streams, sweep_often)
        self.memory = GroupMemory(
            comm, self.in_flight, partial(set_up, comm, blocking, self.stream, self.device_lock)
        )
        self.with_options = lru_cache(_OPTIONS_CACHED)(partial(CommunicatorWithOptions, comm))

    def release(self) -> None:
        """Give back the device's resources; the communicator has ended, and nothing uses them."""
        self.in_flight.close()
        runtime = self.comm.runtime
        runtime.destroy_stream(self.stream)
        runtime.free(self.comm.scratch)
        self.streams.close()
