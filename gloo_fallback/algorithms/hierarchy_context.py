"""State of the hierarchical algorithms: nodes, sums of their ranks' contributions, and arrays split
into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from gloo_fallback.shm.slots import Slots
from gloo_fallback.transport.connections import GroupConnections, SubsetConnections
from unicoll.arrays.kernels import Flat, Kernel
from unicoll.backend import Call


class HierarchyContext:
    """The nodes of a group and this rank's place in them.

    Attributes:
        connections, slots: this rank's connections and its node's shared memory.
        nodes: the group's ranks by node.
        node_index: index of this rank's node.
    """

    def __init__(
        self, connections: GroupConnections, slots: Slots, nodes: Sequence[tuple[int, ...]]
    ) -> None:
        self.connections = connections
        self.slots = slots
        self.nodes = tuple(nodes)
        self.size = connections.size
        self.node_index = next(
            i for i, members in enumerate(self.nodes) if connections.rank in members
        )
        self._internode: dict[int, SubsetConnections | None] = {}

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks (in the group) of this node."""
        return self.nodes[self.node_index]

    def node_of(self, rank: int) -> int:
        """Index of a rank's node."""
        return next(i for i, members in enumerate(self.nodes) if rank in members)

    def leader(self, root: int = -1) -> int:
        """This node's leader, as a rank in the slots; ``root`` is the leader of its node."""
        return self.members.index(root) if root in self.members else 0

    def internode(self, root: int = -1) -> SubsetConnections | None:
        """The connections between the leaders, in the order of the nodes; None on ranks that are
        not leaders."""
        # There is one object for each root, because it has the memory and the plans of exchanges.
        if root not in self._internode:
            self._internode[root] = self._find_internode(root)
        return self._internode[root]

    def _find_internode(self, root: int) -> SubsetConnections | None:
        # Such a root is the leader of its node anyway. All these roots share one object, and with
        # it one memory for exchanges.
        if any(root == members[0] for members in self.nodes):
            return self.internode()
        leaders = tuple(root if root in members else members[0] for members in self.nodes)
        return (
            SubsetConnections(self.connections, leaders)
            if self.connections.rank in leaders
            else None
        )

    def agree(self, call: Call, root: int = -1) -> None:
        """Check that all ranks are in this call; complete on all ranks after the next step of the
        slots.

        The ranks may differ in the root, so the first ranks of the nodes compare their calls,
        whatever the root is. A root that is not the first rank of its node waits for the result in
        one more step of its node.
        """
        # The first step compares the calls within the node, so the first rank speaks for all of its
        # node in the exchange. It makes its next step only after the exchange has succeeded, so
        # whoever completes that step knows that all ranks agree.
        self.slots.sync_step(call)
        if (first := self.internode()) is not None:
            first.agree()
        if self.leader(root):
            self.slots.sync_step()

    def sync_step_checked(self, call: Call, value: int) -> bool:
        """One step of the slots that compares ``value``; after one more step :meth:`sizes_agree`
        has the result.

        Returns the result at once on the first rank of each node, False on other ranks.
        """
        same = self.slots.sync_step_checked(call, value)
        if (first := self.internode()) is None:
            return False
        none = (0,) * first.size
        # A difference within the node goes on as -1, which is different from the value of every
        # other node, so all first ranks get None.
        found = first.exchange_checked(value if same else -1, 0, lambda _: none, np.dtype(np.uint8))
        # The others read it after the next step, which this rank makes when it has the result.
        self.slots.publish_value(found is not None)
        return found is not None

    def sizes_agree(self) -> bool:
        """The result of :meth:`sync_step_checked` that the first rank of this node has
        published."""
        return bool(self.slots.published_value(0))


def reduce_node(kernel: Kernel, parts: Sequence[Flat], acc: Flat) -> None:
    """Reduce a node's contributions in rank order into an accumulator."""
    if kernel.storage == kernel.acc and kernel.plain and len(parts) > 1:
        # This is one pass over the accumulator less than a copy and an addition.
        kernel.ufunc(parts[0], parts[1], out=acc)
        parts = parts[2:]
    else:
        kernel.begin(acc, parts[0])
        parts = parts[1:]
    for part in parts:
        kernel.reduce_into(acc, part)


class ChunkedArray:
    """An array split into chunks of ``chunk_size`` elements."""

    def __init__(self, source: Flat, chunk_size: int) -> None:
        self.source = source
        self.starts = range(0, source.size, chunk_size)
        self.chunk_size = chunk_size

    def size(self, start: int) -> int:
        return min(self.chunk_size, self.source.size - start)

    def pack(self, start: int, into: Flat) -> None:
        into[:] = self.source[start : start + into.size]


class PackedBlocks:
    """Arrays of all ranks in chunks of ``chunk_size`` elements; a packed chunk has a block per
    rank, by node."""

    def __init__(
        self, arrays: Sequence[Flat], hierarchy: HierarchyContext, chunk_size: int
    ) -> None:
        self.arrays = [arrays[r] for members in hierarchy.nodes for r in members]
        self._sizes = np.array([array.size for array in self.arrays])
        self._shortest = int(self._sizes.min())
        self.starts = range(0, int(self._sizes.max()), chunk_size)
        self._chunk_size = chunk_size
        # These are the indices of each node's first block.
        self._firsts = [0, *accumulate(map(len, hierarchy.nodes))]
        first, last = self._firsts[hierarchy.node_index : hierarchy.node_index + 2]
        self._local = slice(first, last + 1)
        self._local_rank = hierarchy.slots.rank
        self._cached_bounds: dict[int, list[int]] = {}

    def _bounds(self, start: int) -> list[int]:
        """The bounds of the blocks in a packed chunk; computed once for all full chunks."""
        key = -1 if start + self._chunk_size <= self._shortest else start
        bounds = self._cached_bounds.get(key)
        if bounds is None:
            # Chunks are used in their order, so few that are not full are in use at the same time.
            if len(self._cached_bounds) >= 8:
                self._cached_bounds.clear()
            lengths = np.clip(self._sizes - start, 0, self._chunk_size)
            bounds = self._cached_bounds[key] = [0, *np.cumsum(lengths).tolist()]
        return bounds

    def size(self, start: int) -> int:
        return self._bounds(start)[-1]

    def pack(self, start: int, into: Flat) -> None:
        for array, (low, high) in zip(self.arrays, pairwise(self._bounds(start)), strict=True):
            into[low:high] = array[start : start + high - low]

    def node_bounds(self, start: int) -> list[int]:
        """The bounds of the nodes' blocks in a packed chunk."""
        bounds = self._bounds(start)
        return [bounds[i] for i in self._firsts]

    def unpack(self, start: int, chunk: Flat) -> None:
        """The reverse of :meth:`pack`."""
        for array, (low, high) in zip(self.arrays, pairwise(self._bounds(start)), strict=True):
            array[start : start + high - low] = chunk[low:high]

    def local_sizes(self, start: int) -> list[int]:
        """Lengths of the blocks of this node's ranks."""
        return [high - low for low, high in pairwise(self._bounds(start)[self._local])]

    def own_bounds(self, start: int) -> tuple[int, int]:
        """The bounds of this rank's block within those of its node."""
        bounds = self._bounds(start)[self._local]
        return bounds[self._local_rank] - bounds[0], bounds[self._local_rank + 1] - bounds[0]
