"""The MPI backend of one group: collectives of the MPI library, and point-to-point messages."""

from __future__ import annotations

from typing import Any

from mpi_comm import watchdog
from mpi_comm.collectives import COLLECTIVES, LAYOUT_DEPENDENT, ROOT_SIZED
from mpi_comm.flat_memory import device_memory
from mpi_comm.group_communicator import GroupCommunicator
from mpi_comm.large_host_arrays import LargeHostArrays
from mpi_comm.p2p.engine import MPIP2PEngine
from mpi_comm.p2p.matcher import EAGER_LIMIT
from mpi_comm.reductions import REDUCTIONS, is_native, method_for, value_to_agree
from mpi_comm.runtime import library
from mpi_comm.runtime.communicators import WorldRanks, publish, world_ranks_of
from mpi_comm.runtime.cuda_aware import user_setting
from mpi_comm.runtime.init_finalize import runtime
from mpi_comm.small_arrays import pack_inputs, prepare_small_call
from unicoll.arrays.buffer import Buffer
from unicoll.arrays.kernels import quiet_runner
from unicoll.arrays.types import DType
from unicoll.backend import Call, Caps, Context, Job
from unicoll.backend.group_state import GroupState
from unicoll.backend.host import Execute, HostBackend, exchange_sizes, one_rank, shape_hash
from unicoll.calls.ops import PROBE
from unicoll.devices import runtimes
from unicoll.devices.device_runtime import DeviceError
from unicoll.errors import (
    BackendUnavailableError,
    CollectiveMismatchError,
    DistBackendError,
    DistError,
    OperationTimeoutError,
)

_MESSAGES = frozenset(("send", "recv"))
_PROBE = frozenset((PROBE.name,))
_NATIVE = frozenset((*REDUCTIONS, *COLLECTIVES, *LAYOUT_DEPENDENT, *ROOT_SIZED, *_MESSAGES))
_LONG = 1 << 25
"""Bytes from which a blocking call runs on the queue's thread, so that it can be given up at its
deadline."""
_FEW = _LONG // 16
"""Elements up to which an array of any type is smaller."""


class MPIBackend(HostBackend):
    """Collectives of an MPI library, through mpi4py."""

    name = "mpi"
    caps = Caps(native=_NATIVE | _PROBE)
    delegate = "gloo"

    def __init__(self, context: Context) -> None:
        self.mpi = runtime()
        self.communicator: GroupCommunicator | None = None
        self.cuda = self.mpi.cuda
        self._single_threaded = self.mpi.mpi_thread is not None
        self._quietly = quiet_runner()
        self._members: WorldRanks | None = None
        self._large_host_arrays: LargeHostArrays | None = None
        # True once the call executed last has begun to move data.
        self._moving = False
        engine, state = None, GroupState(context)
        if context.size > 1:
            self._members = members = world_ranks_of(context.job)
            self.communicator = GroupCommunicator(state, members)
            self.cuda, self._single_threaded = members.cuda(context), members.single_threaded
            engine = MPIP2PEngine(self.communicator, self.thread_failed)
        self._direct = self.cuda.direct
        super().__init__(context, engine, state)
        # The exchanges of an allocation.
        self._collectives["symmetric_empty"] = self.execute
        if self.communicator is not None:
            self.mpi.groups.add(self)
            watchdog.watch(self)

    @classmethod
    def availability(cls) -> str | None:
        return library.reason_against()

    @classmethod
    def prepare(cls, job: Job) -> None:
        publish(job)

    @classmethod
    def create(cls, context: Context) -> MPIBackend:
        # The communicator watches the group, from before it is made.
        return cls(context)

    def set_delegate(self, backend: HostBackend) -> None:
        assert self.communicator is not None
        self._large_host_arrays = LargeHostArrays(self.communicator, backend)
        self.state.add_listener(backend.abort)

    def allocate(self, execute: Execute, shape: tuple[int, ...], dtype: DType) -> Any:
        return self._symmetric_backend("symmetric_empty").allocate(execute, shape, dtype)

    def peer_view(self, buffer: Buffer, rank: int) -> Any:
        if self.communicator is None:
            return super().peer_view(buffer, rank)
        return self._symmetric_backend("peer_view").peer_view(buffer, rank)

    def _symmetric_backend(self, what: str) -> HostBackend:
        """The backend with the group's symmetric memory."""
        if self._large_host_arrays is None:
            context, control = self.context, self.context.job.control
            hosts = (
                {control.peers[rank].host for rank in context.ranks} if control is not None else ()
            )
            raise BackendUnavailableError(
                f"{what}: backend mpi has symmetric memory in groups of one host, where it uses"
                f" that of gloo; the ranks of group {context.name!r} are on"
                f" {', '.join(sorted(hosts))}"
            )
        return self._large_host_arrays.backend

    def run(self, call: Call) -> None:
        execute = self._collectives.get(call.op.name)
        buffers = call.inputs or call.outputs
        if execute is None:
            self._p2p.run(call)
        elif not buffers or buffers[0].count < _FEW:
            self.queue.run(execute, call)
        else:
            self.run_with(call, execute)

    def run_with(self, call: Call, execute: Execute) -> None:
        if self.needs_thread(call):
            self.queue.post((call,), execute, on_thread=True).wait(None)
        else:
            self.queue.run(execute, call)

    def needs_thread(self, call: Call) -> bool:
        buffers = call.inputs or call.outputs
        long = bool(buffers) and buffers[0].nbytes >= _LONG
        return long and self.communicator is not None and not self.mpi.prefers_nonblocking

    @property
    def direct(self) -> bool:
        return self.communicator is not None and self.cuda.direct and _allows_addresses()

    def takes_device(self, call: Call) -> bool:
        communicator, arrays = self.communicator, call.inputs or call.outputs
        if communicator is None or not self.direct or arrays[0].device.type != "cuda":
            return False
        if call.op.name not in _NATIVE:
            return False
        if call.op.name in _MESSAGES:
            # an eager message is in host memory
            return arrays[0].nbytes > EAGER_LIMIT
        if self._single_threaded and not self.mpi.nonblocking_takes_device:
            # No call of MPI may block.
            return False
        return call.reduce is None or is_native(communicator, call)

    def keeps(self, call: Call) -> bool:
        return self._moving or call.op.name in _MESSAGES

    def execute(self, call: Call) -> None:
        communicator, state = self.communicator, self.state
        if communicator is None:
            state.check()
            # Overflow and NaN are results, as on a GPU.
            self._quietly(one_rank, call)
            call.write_back()
            return
        self._moving = withdrawn = False
        communicator.begin(call, self.queue.in_background)
        try:
            if self._direct:
                self._prepare_for(communicator, call)
            if not self._perform(communicator, call):
                for buffer in call.outputs:
                    if buffer.unpack is not None:
                        buffer.unpack()
        except (DeviceError, OperationTimeoutError) as e:
            # An error of this rank's device alone.
            if state.error is None:
                self.give_up(call, e)
            raise
        except DistError:
            raise
        except self.mpi.MPI.Exception as e:
            raise self._mpi_error(communicator, call, e) from e
        except BaseException as e:
            if state.error is None:
                withdrawn = self.withdraw_or_give_up(
                    call, e, communicator.agreement.has_started(call)
                )
            raise
        finally:
            if not withdrawn:
                # As call.ended, which costs more.
                state.last = call.seq, call.kind or call
            state.call = None

    def _perform(self, communicator: GroupCommunicator, call: Call) -> bool:
        """Compare the ranks' calls, then do this one; returns True if packed results have been
        copied back."""
        small = communicator.small_calls.get(call.signature)
        # Internal calls may have the signature of another size.
        if small is not None and small.op is call.op:
            inputs = call.inputs
            # A barrier.
            if not inputs:
                communicator.agreement.agree(call)
                return False
            first = inputs[0]
            if first.count == small.count and first.dtype is small.dtype:
                small.own[...] = first.flat
                communicator.agreement.agree(call)
                small.finish(call)
                return False
        if (made := prepare_small_call(communicator, call)) is None:
            equal = communicator.agreement.agree(call, _value_to_agree(communicator, call))
            if self._large_host_arrays is not None and self._large_host_arrays.move(call, equal):
                return True
            self._move(communicator, call, equal)
        else:
            pack_inputs(call, made.own)
            if communicator.agreement.agree(call, made.value):
                made.finish(call)
            else:
                self._move(communicator, call, False)
        return False

    def _move(self, communicator: GroupCommunicator, call: Call, equal: bool) -> None:
        """Do a call by MPI's collectives; ``equal``: the values that the ranks have agreed on are,
        and not negative."""
        name = call.op.name
        counts = None if equal or name not in ROOT_SIZED else self._sizes(communicator, call)
        self._moving = True
        if (reduction := REDUCTIONS.get(name)) is not None:
            reduction(communicator, call, method_for(communicator, call, equal))
        elif (collective := COLLECTIVES.get(name)) is not None:
            collective(communicator, call)
        elif name in LAYOUT_DEPENDENT:
            LAYOUT_DEPENDENT[name][1](communicator, call, equal)
        else:
            ROOT_SIZED[name](communicator, call, counts)

    def _sizes(self, communicator: GroupCommunicator, call: Call) -> list[int]:
        """All ranks' sizes in a gather or scatter in which they differ."""

        def execute(small: Call) -> None:
            self._perform(communicator, small)

        context = self.context
        try:
            return exchange_sizes(call, context.rank, context.ranks, context.name, execute)
        except CollectiveMismatchError as e:
            communicator.mismatch(-1, 0, str(e))
        finally:
            self._moving = False

    def _prepare_for(self, communicator: GroupCommunicator, call: Call) -> None:
        """Prepare the thread and the communicator for device addresses, if the call has any."""
        memory = device_memory(call)
        communicator.requires_blocking = (
            memory is not None and not self.mpi.nonblocking_takes_device
        )
        mpi_thread = self.mpi.mpi_thread
        if memory is not None and mpi_thread is not None:
            mpi_thread.call(memory.bind)

    def _mpi_error(
        self, communicator: GroupCommunicator, call: Call, error: Exception
    ) -> DistError:
        """The error that all ranks raise after an error of MPI."""
        peer = communicator.await_departure_notice()
        if peer is None:
            cause: DistError = DistBackendError(
                f"{call.describe()} #{call.seq} on group {self.context.name!r}: MPI failed:"
                f" {error}",
                group=self.context.name,
                op=call.op.name,
                seq=call.seq,
            )
            self.give_up(call, cause)
            return cause
        try:
            self.state.fail(communicator.lost_error(peer))
        except DistError as agreed:
            return agreed

    def describe(self) -> str:
        if self.communicator is None:
            return f"mpi, one rank: {self.mpi.describe()}"
        oversubscribed = (
            "; more ranks than cores, so waiting yields at once"
            if self.communicator.oversubscribed
            else ""
        )
        large = (
            f"; {self._large_host_arrays.describe()}" if self._large_host_arrays is not None else ""
        )
        return (
            f"mpi: {self.mpi.describe()}; every call is compared across"
            f" ranks{oversubscribed}{large}; cuda arrays that it serves are {self.cuda}"
        )

    @property
    def staging(self) -> int:
        return self._large_host_arrays.backend.staging if self._large_host_arrays is not None else 0

    @property
    def stuck(self) -> bool:
        return self.communicator is not None and self.communicator.abandoned_seq != 0

    def release(self, clean: bool, failure: DistError | None) -> None:
        if self._members is not None:
            self._members.record_departed()
        if self.communicator is not None:
            self.communicator.close(not (clean and self._idle()), failure is not None)
        self.mpi.groups.discard(self)


def _allows_addresses() -> bool:
    """True if MPI was asked about the devices in use, NVIDIA's; for AMD's it is the user who
    knows."""
    runtime = runtimes.loaded("cuda")
    return runtime is None or runtime.name != "HIP" or bool(user_setting())


def _value_to_agree(communicator: GroupCommunicator, call: Call) -> int:
    """The number that the ranks compare, where how a call is done depends on more than its
    signature; else 0."""
    name = call.op.name
    if name in REDUCTIONS:
        return value_to_agree(communicator, call)
    if name in LAYOUT_DEPENDENT:
        return LAYOUT_DEPENDENT[name][0](call)
    return shape_hash(call) if name in ROOT_SIZED else 0
