"""Selection of a group's transport: sockets, shared memory, or shared memory within hosts and
sockets between them.

:mod:`gloo_fallback.transport.topology` decides which ranks share memory, by setting, host and
ability.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from gloo_fallback.algorithms import (
    circulant,
    compressed,
    hierarchical,
    over_sockets,
    rings,
    shared_memory,
)
from gloo_fallback.algorithms.hierarchy_context import HierarchyContext
from gloo_fallback.shm import symmetric_segments
from gloo_fallback.shm.slots import SLOT, Slots, size_of
from gloo_fallback.transport.connections import GroupConnections
from gloo_fallback.transport.exchange import HEADER_SIZE
from gloo_fallback.transport.topology import Topology, build_topology
from unicoll.process import logs

log = logs.logger("gloo")

OPERATIONS = {
    "barrier": "barrier",
    "broadcast": "broadcast",
    "all_reduce": "all_reduce",
    "reduce": "reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "scan": "scan",
    "exscan": "scan",
}
"""Operation name to function name, in each module of algorithms."""


def _table(module: ModuleType) -> dict[str, Callable[..., bool | None]]:
    found = {operation: getattr(module, name) for operation, name in OPERATIONS.items()}
    # The exchanges of an allocation are executed as all_gathers.
    found[symmetric_segments.ROW.name] = found["all_gather"]
    return found


class Transport:
    """The algorithms of a group: ``table[operation](target, call)`` executes a collective.

    A gather or scatter whose sizes differ is not executed and returns False on all ranks, unless
    ``counts`` is passed.

    Args:
        module: the module of algorithms.
        target: their first argument: connections, slots, or a hierarchy.
        description: the transport and the reason for it, for :func:`unicoll.explain`.
        buffer_bytes: maximum bytes that this rank allocates besides the arrays, whatever their
            size. Not included: of an all_to_all the size tables (two of 16 n^2 bytes for n ranks,
            over sockets or by host) and copies of inputs that the outputs overlap; Python objects
            such as the plans of exchanges; a thread's buffers for the conversion of float16 and
            bfloat16.
        slots: the shared memory, or None.
    """

    def __init__(
        self,
        module: ModuleType,
        target: Any,
        description: str,
        buffer_bytes: int,
        slots: Slots | None = None,
    ) -> None:
        self.description = description
        self.buffer_bytes = buffer_bytes
        self.slots = slots
        self.target = target
        self.table = _table(module)

    def close(self) -> None:
        """Release the shared memory; idempotent."""
        if self.slots is not None:
            self.slots.close()


def select_transport(connections: GroupConnections, spins: int) -> Transport:
    """Select the transport together with the other ranks, and log it; called in the group's first
    collective."""
    transport = _select(connections, spins)
    log.info("group %r %s", connections.context.name, transport.description)
    return transport


def _select(connections: GroupConnections, spins: int) -> Transport:
    topology, slots = build_topology(connections, spins)
    if slots is not None and len(topology.members) == 1:
        buffer_bytes = -(-size_of(slots.size) // slots.size)
        copies = "" if slots.peers is not None else ", and cannot read each other's memory"
        return Transport(
            shared_memory,
            slots,
            f"over shared memory: {topology.reason}{copies}",
            buffer_bytes,
            slots,
        )
    # Sums of hosts depend on which ranks are on which host, so they are not deterministic. Within
    # one host reductions are in rank order anyway.
    if slots is not None and not connections.deterministic:
        description = (
            f"over shared memory within {_host_counts(topology)}, sockets between them:"
            f" {topology.reason}"
        )
        target = HierarchyContext(connections, slots, topology.members)
        buffer_bytes = -(-size_of(slots.size) // slots.size) + leader_buffer_bytes(
            len(topology.members)
        )
        return Transport(hierarchical, target, description, buffer_bytes, slots)
    reason = topology.reason
    if slots is not None:
        # The topology was made together with the slots, which nothing uses now.
        slots.close()
        reason = "deterministic between hosts"
    buffer_bytes = socket_buffer_bytes(connections.size, connections.deterministic)
    return Transport(over_sockets, connections, f"over sockets: {reason}", buffer_bytes)


def socket_buffer_bytes(size: int, deterministic: bool) -> int:
    """Maximum bytes that one of ``size`` ranks allocates for a collective over sockets.

    The buffers of the exchanges and the buffers of one algorithm. A ring needs two segments of
    sums, and with float16 or bfloat16 the first segment received. The circulant algorithm needs the
    array of sums and a receive buffer, which is half as large for equal blocks and at most as large
    for unequal ones. A deterministic or exact reduction needs all ranks' contributions to a chunk,
    and the chunk. A compressed one needs messages to and from all ranks.
    """
    ring = rings.SEGMENT * 5 // 2
    direct = over_sockets.DIRECT_BYTES + over_sockets.DIRECT_BYTES // size
    rounds = min(circulant.LIMIT, size * circulant.BLOCK) if size > 2 else 0
    work = (
        max(direct, rounds)
        if deterministic
        else max(ring, 2 * rounds, compressed.working_memory(size))
    )
    return _exchange_buffers(over_sockets.SMALL * size // (size - 1)) + work


def leader_buffer_bytes(nodes: int) -> int:
    """Maximum bytes that a leader allocates for the traffic between hosts, besides its slots.

    The sums of its node take up to two thirds of a slot (float16, bfloat16: a chunk and its sums
    fill one), and the buffers of the algorithm twice as much, which exceeds two segments of a ring,
    or those of a compressed reduction of such a chunk; then the buffers of the exchanges. Every
    rank can be a leader.
    """
    sums = SLOT * 2 // 3
    work = max(2 * sums, compressed.streaming_memory(nodes, SLOT // 2))
    return sums + work + _exchange_buffers(over_sockets.SMALL)


def _exchange_buffers(contributions: int) -> int:
    """Bytes of the buffers of the exchanges, which grow by doubling."""
    return 2 * (HEADER_SIZE + contributions)


def _host_counts(topology: Topology) -> str:
    ranks = [len(members) for members in topology.members]
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"{len(ranks)} hosts (ranks: {shown})"
