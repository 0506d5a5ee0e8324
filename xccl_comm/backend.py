"""The XCCL backend: XPU arrays over oneCCL, or arrays in host memory over oneCCL's plug-in for the
CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from unicoll.arrays.kernels import Flat, Kernel, kernel_for
from unicoll.arrays.types import Device, DType, Reduction
from unicoll.backend import Call, Caps, Context
from unicoll.backend.host import flat_of
from unicoll.device_collectives.backend import NATIVE_OPERATIONS, DeviceBackend
from unicoll.device_collectives.group_resources import GroupResources
from unicoll.device_collectives.in_flight import PendingWork
from unicoll.device_collectives.interface import CollectiveLibrary
from unicoll.device_collectives.stream_completion import StreamCompletion
from unicoll.devices import runtimes
from unicoll.devices.device_runtime import DeviceRuntime
from unicoll.process.interrupts import Flag
from xccl_comm.host_runtime import HostRuntime, HostStream
from xccl_comm.library import locate
from xccl_comm.library.host_calls import HostOneCCL

_HOST = Device("cpu", 0)
_CHECK_S = 0.1
"""How often a thread that waits for oneCCL looks whether the group has failed."""


def _reduces(dtype: DType, reduction: Reduction) -> bool:
    return locate.oneccl().reduction(dtype, reduction) is not None


class XCCLBackend(DeviceBackend):
    """The XCCL backend of one group on XPUs."""

    name = "xccl"
    caps = Caps(frozenset(("xpu",)), NATIVE_OPERATIONS, _reduces, tags=False, joins_batches=True)

    @classmethod
    def availability(cls) -> str | None:
        found = runtimes.reason_against("xpu") or locate.find()
        return found if isinstance(found, str) else None

    @classmethod
    def load_library(cls) -> CollectiveLibrary:
        return locate.oneccl()

    @classmethod
    def load_runtime(cls) -> DeviceRuntime:
        return runtimes.runtime("xpu")

    def __init__(
        self, context: Context, parent: DeviceBackend | None = None, connect: bool = True
    ) -> None:
        self._host_stream = HostStream(f"unicoll-xccl-{context.name}")
        super().__init__(context, parent, connect)

    def run(self, call: Call) -> PendingWork | None:
        arrays = call.inputs or call.outputs
        # On a queue that is not in order a kernel would not wait for the events before it. So the
        # call runs on the group's own stream, which is.
        if arrays and not self.runtime.in_order(arrays[0].stream):
            made = self.post((call,))
            made.wait(None)
            return made.work
        return super().run(call)

    def _issue(self, calls: tuple[Call, ...], resources: GroupResources, stream: int) -> None:
        """On a thread of the group: a call of oneCCL may wait for a rank that is gone, and nothing
        ends it."""
        issue = super()._issue
        errors: list[BaseException] = []
        issued = Flag()

        def run() -> bool:
            try:
                self.runtime.set_device(resources.device)
                issue(calls, resources, stream)
            except BaseException as e:
                # It is raised on the thread that waits.
                errors.append(e)
            finally:
                issued.set()
            # This is true also after an error, or the stream would drop all later functions.
            return True

        self._host_stream.put(run)
        while not issued.wait(_CHECK_S):
            # The watchdog fails the group at the deadline. Then the thread stays in oneCCL; `run`
            # refers to the calls, so their arrays are kept until it returns.
            self.state.check()
        if errors:
            raise errors[0]

    def close(self) -> None:
        super().close()
        self._host_stream.close()


class HostXCCLBackend(DeviceBackend):
    """The XCCL backend of one group on host memory: a call is on the group's stream, for which the
    host waits.

    oneCCL's plug-in for the CPU has no averages: they are sums, which the stream divides.
    """

    name = "xccl"
    caps = Caps(
        frozenset(("cpu",)),
        NATIVE_OPERATIONS,
        _reduces,
        tags=False,
        joins_batches=True,
        fallbacks=False,
    )

    @classmethod
    def availability(cls) -> str | None:
        found = locate.find()
        return found if isinstance(found, str) else None

    @classmethod
    def load_library(cls) -> CollectiveLibrary:
        return locate.oneccl()

    @classmethod
    def load_runtime(cls) -> DeviceRuntime:
        return cast(HostOneCCL, locate.oneccl()).runtime

    def run(self, call: Call) -> None:
        self.post((call,)).wait(None)

    def post(self, calls: Sequence[Call], stream: Any = None) -> StreamCompletion:
        for call in calls:
            for buffer in (*call.inputs, *call.outputs):
                # The base uses addresses and devices, which buffers in host memory do not have.
                if buffer.flat is not None:
                    buffer.ptr, buffer.device = buffer.flat.ctypes.data, _HOST
        return super().post(calls, stream)

    def _issue(self, calls: tuple[Call, ...], resources: GroupResources, stream: int) -> None:
        super()._issue(calls, resources, stream)
        functions: list[Callable[[], None]] = []
        for call in calls:
            for buffer in call.outputs:
                if call.reduce is not None and call.reduce.name == "AVG":
                    kernel = kernel_for(buffer.dtype, call.reduce)
                    functions.append(partial(_divide, kernel, flat_of(buffer), self.context.size))
                if buffer.unpack is not None:
                    functions.append(buffer.unpack)
                    # The stream unpacks it, before the event that wait() waits for, so wait() must
                    # not do it again.
                    buffer.unpack = None
        cast(HostRuntime, self.runtime).stream(stream).put(partial(_finish, functions, calls))


def _divide(kernel: Kernel, sum_: Flat, ranks: int) -> None:
    kernel.finish(kernel.widen(sum_), sum_, ranks)


def _finish(functions: Sequence[Callable[[], None]], calls: tuple[Call, ...]) -> bool:
    """Do what is left after calls. It keeps their arrays until then, since oneCCL cannot be stopped
    writing to them."""
    # Overflow and NaN are results, not faults.
    with np.errstate(all="ignore"):
        for function in functions:
            function()
    return True
