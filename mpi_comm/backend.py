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
        # True once the call executed last has begun to move data: after a failure MPI may then
        # still use its arrays (keeps()).
        self._moving = False
        # HostBackend would make the state, but the communicator needs it before: a failure of the
        # group on another rank has to end the waits in its creation.
        engine, state = None, GroupState(context)
        if context.size > 1:
            self._members = members = world_ranks_of(context.job)
            self.communicator = GroupCommunicator(state, members)
            # What all members can do replaces what this process can. A rank that passed addresses
            # to MPI, or blocked in it, while others do not, would make calls that match none of
            # theirs.
            self.cuda, self._single_threaded = members.cuda(context), members.single_threaded
            engine = MPIP2PEngine(self.communicator, self.thread_failed)
        self._direct = self.cuda.direct
        super().__init__(context, engine, state)
        # The exchanges of an allocation of symmetric memory have this name. They pass the queue and
        # the agreement as every collective does, so the calls of the group have one order.
        self._collectives["symmetric_empty"] = self.execute
        if self.communicator is not None:
            # This is last, because the watchdog's thread and the one that makes all calls of MPI
            # may use the backend from here on.
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
        # HostBackend.create() would register abort() now. The communicator has registered the state
        # before, so that a failure on another rank also ends the waits in its creation.
        return cls(context)

    def set_delegate(self, backend: HostBackend) -> None:
        assert self.communicator is not None
        self._large_host_arrays = LargeHostArrays(self.communicator, backend)
        # A call of this group may be waiting in the delegate, which has a state of its own: a
        # failure that this rank finds has to end that wait, too.
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
            # An array of so few elements is smaller than _LONG whatever its type, so the common
            # small call pays one comparison and no look at its bytes.
            self.queue.run(execute, call)
        else:
            self.run_with(call, execute)

    def run_with(self, call: Call, execute: Execute) -> None:
        if self.needs_thread(call):
            # The caller waits for the queue's thread and does not execute the call itself: if the
            # call never returns from MPI, the watchdog can end this wait, but not a call of MPI on
            # this thread.
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
            # An eager message is packed behind its header in host memory.
            return arrays[0].nbytes > EAGER_LIMIT
        if self._single_threaded and not self.mpi.nonblocking_takes_device:
            # On some rank one thread makes all calls of MPI, so no call of MPI may block. But only
            # MPI's blocking collectives take addresses here.
            return False
        return call.reduce is None or is_native(communicator, call)

    def keeps(self, call: Call) -> bool:
        # MPI cannot cancel a message: it may use the array until the peer has taken the message.
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
            # Nothing has told the other ranks: a device of this rank alone has failed, or a copy on
            # it was not done by the deadline. An error of the group is in the state already, and
            # all ranks have it.
            if state.error is None:
                self.give_up(call, e)
            raise
        except DistError:
            # The other ranks raise it, too: where it was made it has failed the group, or all ranks
            # have found it.
            raise
        except self.mpi.MPI.Exception as e:
            raise self._mpi_error(communicator, call, e) from e
        except BaseException as e:
            # A signal's handler has raised, or an array has. The others would take this rank's next
            # call for this one, so the group fails.
            if state.error is None:
                withdrawn = self.withdraw_or_give_up(
                    call, e, communicator.agreement.has_started(call)
                )
            raise
        finally:
            if not withdrawn:
                # This is call.ended without the property, whose call costs more.
                state.last = call.seq, call.kind or call
            state.call = None

    def _perform(self, communicator: GroupCommunicator, call: Call) -> bool:
        """Compare the ranks' calls, then do this one; returns True if packed results have been
        copied back."""
        # All ranks have to choose the same way, because each way is another sequence of calls of
        # MPI. So what decides is the signature, which the agreement compares, and where that does
        # not suffice one more value. A kind of small call that was made before has its memory in
        # the agreement (small_calls), and a new one gets it from prepare_small_call(). Every other
        # call is agreed on first, and then done by the delegate or by MPI's collective, which
        # cannot be cancelled.
        small = communicator.small_calls.get(call.signature)
        # Internal calls may have the signature of a call of another size, so operation, size and
        # type are compared, too.
        if small is not None and small.op is call.op:
            inputs = call.inputs
            # A barrier has no data, so the agreement is all of it.
            if not inputs:
                communicator.agreement.agree(call)
                return False
            first = inputs[0]
            if first.count == small.count and first.dtype is small.dtype:
                # MPI uses this memory only during an agreement, so it may be written now. The parts
                # of the other ranks are overwritten by the next agreement, which starts after
                # finish() has read them. No value is compared here, so the result of agree() says
                # nothing.
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
                # The sizes or splits of the ranks differ, so what the agreement has carried does
                # not fit the calls. It is not used, and the call starts again.
                self._move(communicator, call, False)
        return False

    def _move(self, communicator: GroupCommunicator, call: Call, equal: bool) -> None:
        """Do a call by MPI's collectives; ``equal``: the values that the ranks have agreed on are,
        and not negative."""
        name = call.op.name
        counts = None if equal or name not in ROOT_SIZED else self._sizes(communicator, call)
        # From here on MPI may use the arrays of the call, also after an error.
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
            # All ranks have found the same difference; they raise one error, that of rank 0.
            communicator.mismatch(-1, 0, str(e))
        finally:
            # The exchange, an internal call, may have set this. MPI has not had the arrays of the
            # user's call yet.
            self._moving = False

    def _prepare_for(self, communicator: GroupCommunicator, call: Call) -> None:
        """Prepare the thread and the communicator for device addresses, if the call has any."""
        memory = device_memory(call)
        # This is equal on all ranks that agree, because the signature covers whether arrays are
        # passed by address.
        communicator.requires_blocking = (
            memory is not None and not self.mpi.nonblocking_takes_device
        )
        mpi_thread = self.mpi.mpi_thread
        if memory is not None and mpi_thread is not None:
            # The device has to be current on the thread that calls MPI, which is not this one.
            mpi_thread.call(memory.bind)

    def _mpi_error(
        self, communicator: GroupCommunicator, call: Call, error: Exception
    ) -> DistError:
        """The error that all ranks raise after an error of MPI."""
        # MPI may notice the end of a rank before the control plane's notice arrives. The error has
        # to name that rank if there is one.
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
