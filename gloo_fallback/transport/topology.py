"""The nodes of a group: sets of ranks that share memory, equal on all ranks, determined in the
first collective.

The ranks exchange their hosts and settings over sockets and compute the same topology from them.
The first rank of each node creates the node's segment, the others map it, and a second exchange
collects the results. If a rank could not map its segment, the ranks of its node use sockets.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from gloo_fallback.shm.process_memory import find_peer_memory
from gloo_fallback.shm.segment import (
    SharedSegment,
    can_share,
    create_private,
    create_published,
    has_strong_ordering,
    open_published,
)
from gloo_fallback.shm.slots import SemaphoreSlots, Slots, size_of
from gloo_fallback.transport.connections import GroupConnections
from unicoll.backend import Context
from unicoll.errors import BackendUnavailableError, CollectiveMismatchError, DistNetworkError
from unicoll.process import environment
from unicoll.process.host_identity import boot_id

_SIMULATED_HOST_SIZE = 2
"""Ranks of each simulated host under UNICOLL_TRANSPORT=hierarchical."""


class TransportPreference(IntEnum):
    """The value of ``UNICOLL_TRANSPORT``; empty is AUTO."""

    AUTO = 0
    TCP = 1
    SHM = 2
    HIERARCHICAL = 3


def transport_preference() -> TransportPreference:
    """The transport preference of this process.

    Raises:
        DistArgumentError: the value of ``UNICOLL_TRANSPORT`` is invalid.
    """
    return TransportPreference[environment.choice("UNICOLL_TRANSPORT").upper()]


@dataclass(frozen=True)
class HostInfo:
    """What a rank contributes to the first exchange.

    Attributes:
        host: a hash of its host name and boot.
        preference: the user's setting.
        can_share: True if its system supports shared memory.
        strong_ordering: True if its processor keeps stores in order.
        deterministic: an option that must be equal on all ranks.
    """

    host: int
    preference: TransportPreference = TransportPreference.AUTO
    can_share: bool = True
    strong_ordering: bool = True
    deterministic: bool = False


@dataclass(frozen=True)
class Topology:
    """Ranks of the group by node, in the order of the nodes' first ranks, and the reason for this
    topology."""

    members: tuple[tuple[int, ...], ...]
    reason: str

    @property
    def all_separate(self) -> bool:
        """True if no two ranks share memory."""
        return all(len(m) == 1 for m in self.members)

    def of(self, rank: int) -> tuple[int, ...]:
        """The node of a rank."""
        return next(m for m in self.members if rank in m)


def plan_topology(infos: Sequence[HostInfo], names: Sequence[str]) -> Topology:
    """The topology that follows from all ranks' infos; ``names`` describe the ranks."""
    # All ranks compute this from the same infos, in the same order, so they get the same topology
    # without another exchange. One rank that does not share memory decides for the whole group.
    apart = tuple((r,) for r in range(len(infos)))
    for info, name in zip(infos, names, strict=True):
        if info.preference is TransportPreference.TCP:
            return Topology(apart, f"UNICOLL_TRANSPORT=tcp on {name}")
        if not info.can_share:
            return Topology(apart, f"{name} cannot share memory")
    simulated = any(b.preference is TransportPreference.HIERARCHICAL for b in infos)
    found: dict[tuple[int, int], list[int]] = {}
    for rank, info in enumerate(infos):
        found.setdefault((info.host, rank // _SIMULATED_HOST_SIZE if simulated else 0), []).append(
            rank
        )
    members = tuple(tuple(m) for m in found.values())
    if simulated:
        return Topology(members, "UNICOLL_TRANSPORT=hierarchical: every two ranks count as a host")
    hosts = len(members)
    return Topology(
        members, "all ranks are on one host" if hosts == 1 else f"the ranks are on {hosts} hosts"
    )


def without_ranks(topology: Topology, unable: Sequence[int], name: str) -> Topology:
    """The topology after some ranks could not map their node's memory; ``name`` describes the first
    of them."""
    # Other than in plan_topology only the nodes of these ranks are split: the memory of the others
    # is mapped already.
    members: list[tuple[int, ...]] = []
    for m in topology.members:
        members += [(r,) for r in m] if set(m) & set(unable) else [m]
    return Topology(tuple(sorted(members)), f"{name} could not map the shared memory of its host")


def build_topology(connections: GroupConnections, spins: int) -> tuple[Topology, Slots | None]:
    """Determine the nodes of a group; returns the topology, and this rank's slots if any ranks
    share memory.

    Raises:
        BackendUnavailableError: ``UNICOLL_TRANSPORT=shm``, but not all ranks share memory.
        CollectiveMismatchError: the options of the group differ between ranks.
    """
    context = connections.context
    names = [context.who(r) for r in range(connections.size)]
    # These are the first bytes of the group's collectives. The exchange compares the user's call
    # like that of any collective, so ranks in different calls raise an error here.
    infos = _exchange_host_info(connections)
    if len({b.deterministic for b in infos}) > 1:
        connections.state.fail(_options_differ(context, infos))
    topology = plan_topology(infos, names)
    segment = None
    try:
        if not topology.all_separate:
            node_ranks = topology.of(connections.rank)
            segment = _segment(connections, node_ranks)
            # This exchange also tells the first rank of each node that all others have mapped its
            # segment, so that it may close the descriptor by which they find it.
            unable = _ranks_without_segment(
                connections, segment is not None or len(node_ranks) == 1
            )
            if unable:
                topology = without_ranks(topology, unable, names[unable[0]])
        if len(topology.members) > 1 and any(
            b.preference is TransportPreference.SHM for b in infos
        ):
            reason = f"group {context.name!r}: UNICOLL_TRANSPORT=shm, but {topology.reason}"
            connections.state.fail(BackendUnavailableError(reason, group=context.name))
        if topology.all_separate:
            return topology, None
        # All ranks of a node have to signal in the same way. One with UNICOLL_MEMORY_ORDER=weak is
        # enough for all ranks of the group to use semaphores.
        kind = Slots if all(b.strong_ordering for b in infos) else SemaphoreSlots
        node_ranks = topology.of(connections.rank)
        # A rank that is alone on its host has slots, too, so that the hierarchical algorithms need
        # no other way for it.
        memory = create_private(size_of(1)) if len(node_ranks) == 1 else segment
        assert memory is not None
        slots = kind(connections.state, node_ranks, memory, spins)
        slots.peers = find_peer_memory(slots, not spins)
        return topology, slots
    finally:
        if segment is not None:
            segment.close_descriptor()


def _exchange_host_info(connections: GroupConnections) -> list[HostInfo]:
    """Exchange the infos of all ranks over sockets."""
    try:
        wanted = transport_preference()
    except BackendUnavailableError as e:
        connections.state.fail(e)
    # Without /proc there is no identifier of the boot, and the ranks do not share memory
    # (can_share).
    boot = ""
    with suppress(OSError):
        boot = boot_id()
    # The host is given by a hash, because an exchange has a fixed size. If two hosts have the same
    # one, their ranks find other boots in the addresses of the segments, cannot map them, and use
    # sockets.
    host = zlib.crc32(socket.gethostname().encode()) << 32 | zlib.crc32(boot.encode())
    plan = connections.plan((5 * 8,) * connections.size, np.dtype(np.uint64))
    plan.mine[:] = (
        host,
        wanted,
        can_share() is None,
        has_strong_ordering(),
        connections.deterministic,
    )
    found = [tuple(map(int, vote)) for vote in connections.exchange(plan)]
    infos, context = [], connections.context
    for r, (h, number, shares, strong_ordering, fixed) in enumerate(found):
        try:
            preference = TransportPreference(number)
        except ValueError:
            message = f"{context.who(r)} sent invalid host information"
            connections.state.fail(
                DistNetworkError(message, group=context.name, rank=context.ranks[r])
            )
        infos.append(HostInfo(h, preference, bool(shares), bool(strong_ordering), bool(fixed)))
    return infos


def _segment(connections: GroupConnections, members: tuple[int, ...]) -> SharedSegment | None:
    """The segment of this rank's node; None for a node of one rank, or if it cannot be created or
    mapped."""
    if len(members) == 1:
        return None
    ranks = len(members)
    if connections.rank == members[0]:
        return create_published(
            connections.context,
            str(members[0]),
            size_of(ranks),
            lambda segment: SemaphoreSlots.prepare(segment, ranks),
        )
    context, state, publisher = connections.context, connections.state, members[0]

    def check() -> None:
        state.tick()
        # The first rank of the node may have left before it has published the segment. Nothing is
        # received from it in this wait, so its end is looked for in the control plane.
        control = context.job.control
        if control is not None and (reason := control.departed.get(context.ranks[publisher])):
            state.fail_peer(publisher, reason)

    return open_published(context, str(publisher), check)


def _ranks_without_segment(connections: GroupConnections, could: bool) -> list[int]:
    plan = connections.plan((1,) * connections.size, np.dtype(np.uint8))
    plan.mine[0] = could
    return [r for r, vote in enumerate(connections.exchange(plan)) if not vote[0]]


def _options_differ(context: Context, infos: Sequence[HostInfo]) -> CollectiveMismatchError:
    yes = [context.ranks[r] for r, b in enumerate(infos) if b.deterministic]
    return CollectiveMismatchError(
        f"the ranks of group {context.name!r} were given different options: deterministic on ranks"
        f" {', '.join(map(str, yes))} only",
        group=context.name,
    )
