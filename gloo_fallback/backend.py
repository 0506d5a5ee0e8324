"""The CPU backend of one group: collectives through shared memory or sockets, and point-to-point
messages."""

from __future__ import annotations

import os
from typing import Any

from gloo_fallback.p2p.engine import P2PEngine
from gloo_fallback.shm.symmetric_segments import ROW, SymmetricMemory
from gloo_fallback.transport.connections import GroupConnections
from gloo_fallback.transport.selection import OPERATIONS, Transport, select_transport
from gloo_fallback.transport.topology import transport_preference
from unicoll.arrays.buffer import Buffer
from unicoll.arrays.kernels import quiet_runner
from unicoll.arrays.types import DType
from unicoll.backend import Call, Caps, Context, Job
from unicoll.backend.connections import Endpoint
from unicoll.backend.group_state import GroupState
from unicoll.backend.host import Execute, HostBackend, exchange_sizes, one_rank
from unicoll.calls.options import as_options
from unicoll.errors import (
    BackendUnavailableError,
    CollectiveMismatchError,
    DistArgumentError,
    DistError,
)
from unicoll.process import environment
from unicoll.process.formatting import backend_text

_NAME = backend_text("gloo")
_SPINS = 50


class GlooBackend(HostBackend):
    """Collectives between processes, through shared memory within a host and TCP between hosts."""

    name = "gloo"
    caps = Caps(native=frozenset((*OPERATIONS, "send", "recv", "probe")), compresses=True)

    def __init__(self, context: Context) -> None:
        self._connections: GroupConnections | None = None
        # The first collective selects it: the selection is an exchange of all members, and no rank
        # waits for others when it creates a group.
        self._transport: Transport | None = None
        self._quietly = quiet_runner()
        self._spins = 0
        self._symmetric = SymmetricMemory()
        self.is_protected = environment.choice("UNICOLL_CHANNEL") != "plain"
        engine, state = None, GroupState(context)
        options = as_options(context.options)
        in_order = options.in_order
        self._compression = f", compression {options.compression}" if options.compression else ""
        if context.size > 1:
            endpoint = Endpoint.of(context.job)
            # One request to the store reads the addresses that prepare() has published on all
            # ranks, so the connections that follow need none.
            endpoint.read_directory()
            self._spins = 0 if _oversubscribed(context) else _SPINS
            # An invalid setting raises here, before any rank waits for this one.
            transport_preference()
            self._connections = GroupConnections(state, endpoint, self._spins)
            self._connections.deterministic = in_order
            # The engine calls thread_failed() on its progress thread only. That starts with the
            # first message, when the queue, which thread_failed() uses, exists.
            engine = P2PEngine(state, endpoint, self._spins, self.thread_failed)
        super().__init__(context, engine, state)
        # The exchanges of an allocation are not in the table of operations, so the base class has
        # no function for them.
        self._collectives[ROW.name] = self._execute_allocation

    @classmethod
    def prepare(cls, job: Job) -> None:
        if job.size > 1:
            Endpoint.of(job)

    @property
    def staging(self) -> int:
        return self._transport.buffer_bytes if self._transport is not None else 0

    @property
    def shares_memory(self) -> bool:
        return self._transport is not None and self._transport.target is self._transport.slots

    def execute(self, call: Call) -> None:
        connections, state = self._connections, self.state
        if state.error is not None:
            state.check()
        if connections is None:
            self._quietly(one_rank, call)
            call.write_back()
            return
        # The transports take number and signature from here; the control thread and the wait
        # monitor read it at any time.
        state.call = call
        # The deadline is set when the call waits for the first time.
        state.deadline = 0.0
        withdrawn = False
        try:
            transport = self._transport
            if transport is None:
                self._transport = transport = select_transport(connections, self._spins)
                if transport.slots is not None:
                    # The slots ask it whether a call runs in the background, where a waiting thread
                    # sleeps sooner.
                    transport.slots.queue = self.queue
            if call.reduce is not None:
                # Overflow and NaN are results, as on a GPU, so NumPy's warnings are off.
                self._quietly(transport.table[call.op.name], transport.target, call)
            else:
                done = transport.table[call.op.name](transport.target, call)
                # The sizes differ. All ranks know that now, before anything is written, so all of
                # them exchange the sizes and start the transfer again.
                if done is False:
                    sizes = self._sizes(transport, call)
                    transport.table[call.op.name](transport.target, call, sizes)
            # These lines are call.write_back() without the call of a function.
            for buffer in call.outputs:
                if buffer.unpack is not None:
                    buffer.unpack()
        except BaseException as e:
            # If the group has failed, the other ranks have the error already. Else they have to
            # learn that this rank leaves the call, or its number is taken back if none can have
            # seen it.
            if state.error is None:
                withdrawn = self.withdraw_or_give_up(call, e, self._begun(connections, call))
            raise
        finally:
            if not withdrawn:
                # This is call.ended, which costs more. A call whose number was taken back does not
                # count as the last one.
                state.last = call.seq, call.kind or call
            state.call = None

    def allocate(self, execute: Execute, shape: tuple[int, ...], dtype: DType) -> Any:
        return self._symmetric.allocate(self.context, execute, self._near, shape, dtype)

    def _execute_allocation(self, call: Call) -> None:
        """Execute an exchange of an allocation; all later calls in the group's order may have
        symmetric arrays."""
        self.execute(call)
        if self._transport is not None and self._transport.slots is not None:
            self._transport.slots.symmetric = self._symmetric

    def peer_view(self, buffer: Buffer, rank: int) -> Any:
        if self._connections is None:
            return super().peer_view(buffer, rank)
        near, flat = self._near(), buffer.flat
        assert flat is not None
        if rank not in near:
            context = self.context
            raise BackendUnavailableError(
                f"peer_view: {context.who(rank)} shares no memory with {context.who(context.rank)}"
            )
        # A buffer that has to be unpacked is a packed copy of the user's array, and is not in
        # symmetric memory itself.
        location = self._symmetric.locate(flat) if buffer.unpack is None else -1
        if location < 0:
            raise DistArgumentError(
                f"peer_view: {buffer} is not in symmetric memory of group {self.context.name!r}"
            )
        view = self._symmetric.view(location, near.index(rank), buffer.count, flat.dtype)
        assert view is not None
        return view.reshape(buffer.shape)

    def _near(self) -> tuple[int, ...]:
        """The ranks of the group that share memory with this one, itself included."""
        slots = self._transport.slots if self._transport is not None else None
        return slots.members if slots is not None else (self.context.rank,)

    def _begun(self, connections: GroupConnections, call: Call) -> bool:
        """True if other ranks may have received something of a call."""
        slots = self._transport.slots if self._transport is not None else None
        return connections.begun(call) or (slots is not None and slots.begun(call))

    def _sizes(self, transport: Transport, call: Call) -> list[int]:
        """All ranks' sizes in a gather or scatter in which they differ."""
        context, state = self.context, self.state

        def execute(small: Call) -> None:
            # The exchange compares the signature of the call in progress, so that is the small one
            # until it has ended.
            state.call = small
            try:
                transport.table[small.op.name](transport.target, small)
            finally:
                state.call = call

        try:
            return exchange_sizes(call, context.rank, context.ranks, context.name, execute)
        except CollectiveMismatchError as e:
            state.fail_mismatch(-1, 0, str(e))

    def links(self) -> str:
        return "" if self._connections is None else self._connections.links()

    def describe(self) -> str:
        if self._connections is None:
            return f"{_NAME}, one rank"
        if self._transport is None:
            return f"{_NAME}; its first collective selects shared memory or sockets"
        in_order = ", deterministic" if self._connections.deterministic else ""
        return f"{_NAME}{in_order}{self._compression} {self._transport.description}"

    def release(self, clean: bool, failure: DistError | None) -> None:
        if self._connections is None:
            return
        # This wakes a thread that sleeps in a send or receive, without closing the descriptor.
        self._connections.shut_down()
        # If the queue is not idle, an operation still uses the sockets and the memory. The system
        # would give a closed socket's descriptor to the next file, so the sockets stay open until
        # the job is closed.
        if self._idle():
            self._connections.close()
            if self._transport is not None:
                self._transport.close()


def _oversubscribed(context: Context) -> bool:
    """True if this host runs more ranks of the group than it has cores: waiting then must not
    spin."""
    control = context.job.control
    local = context.size
    if control is not None and control.peers:
        mine = control.peers[context.job.rank].host
        local = sum(control.peers[r].host == mine for r in context.ranks)
    return local > len(os.sched_getaffinity(0))
