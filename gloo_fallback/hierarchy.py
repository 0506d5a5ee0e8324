"""The collectives of ranks on several hosts: shared memory within a host, sockets between hosts.

Each host is a *node* with a board; one rank of it, the *leader*, crosses to the other nodes. The leader of the root's
node is the root itself, so that its data takes no further step. Everything is cut into pieces that fit the slots.
While leaders carry one piece over, their neighbours prepare the next and take the one before: in the reductions
three pieces are under way at a time.

No rank comes out before all have agreed on the call: neighbours compare signatures at the first step, leaders in an
exchange, and the step after that tells the neighbours that the leaders agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from unicoll.backend import Call
from unicoll.exchanged import alike
from unicoll.kernels import Flat, Kernel

from . import algorithms
from .algorithms import SEGMENT, SMALL, bounds_of, cut, flat_of, kernel_of, pieces_of
from .board import SLOT, Board
from .cluster import Cluster, Parcels, Sums, Whole, sum_up
from .links import bytes_of
from .shared import exchange_parts
from .team import Bridge


def barrier(cluster: Cluster, call: Call) -> None:
    """Nobody leaves before all have come."""
    cluster.agree(call)
    cluster.board.meet()


# --- broadcast --------------------------------------------------------------------------------------------------------


def broadcast(cluster: Cluster, call: Call) -> None:
    """The root's data to all: from leader to leader in a chain, then through the slots."""
    flat, board, root = flat_of(call.inputs[0]), cluster.board, call.root
    leader, bridge = cluster.leader(root), cluster.bridge(root)
    if flat.nbytes <= SMALL:
        board.meet(call)
        if bridge is not None:
            _small_broadcast(bridge, flat, cluster.node_of(root))
            board.slot(board.rank, 0, flat.size, flat.dtype)[:] = flat
        board.meet()
        if bridge is None:
            flat[:] = board.slot(leader, 0, flat.size, flat.dtype, 0)
        return
    cluster.agree(call, root)
    step = SEGMENT // flat.itemsize
    for start in range(0, flat.size, step):
        piece = flat[start : start + step]
        if bridge is not None:
            node = cluster.node_of(root)
            algorithms.chain_down(bridge, bytes_of(piece), (bridge.rank - node) % bridge.size, node)
            board.slot(board.rank, 0, piece.size, piece.dtype)[:] = piece
        board.meet()
        if bridge is None:
            piece[:] = board.slot(leader, 0, piece.size, piece.dtype, 0)


def _small_broadcast(bridge: Bridge, flat: Flat, root: int) -> None:
    plan = bridge.plan(tuple(flat.nbytes if r == root else 0 for r in range(bridge.size)), flat.dtype)
    if bridge.rank == root:
        plan.mine[:] = flat
        bridge.exchange(plan)
    else:
        flat[:] = bridge.exchange(plan)[root]


# --- reductions -------------------------------------------------------------------------------------------------------


def all_reduce(cluster: Cluster, call: Call) -> None:
    """The reduction of all ranks' data to all."""
    source, out, kernel = flat_of(call.inputs[0]), flat_of(call.outputs[0]), kernel_of(call)
    board, bridge = cluster.board, cluster.bridge()
    if _is_small(cluster, kernel, source):
        sums = _exchange_sums(cluster, call, kernel, source, bridge)
        if sums is not None:
            Sums(kernel, cluster.size).combine(sums, board.slot(board.rank, 0, out.size, out.dtype))
        board.meet()
        out[:] = board.slot(cluster.leader(), 0, out.size, out.dtype, 0)
        return

    def cross(bridge: Bridge, start: int, sums: Flat, result: Flat) -> None:
        bounds = bounds_of(sums.size, bridge.size)
        pieces = [sums[a:b] for a, b in pairwise(bounds)]
        results = [result[a:b] for a, b in pairwise(bounds)]
        algorithms.scatter_reduced(bridge, Sums(kernel, cluster.size), pieces, results[bridge.rank])
        algorithms.gather_all(bridge, results)

    def collect(start: int, result: Flat) -> None:
        out[start : start + result.size] = result

    _flow(cluster, call, kernel, Whole(source, _piece(kernel)), cross, collect)


def reduce(cluster: Cluster, call: Call) -> None:
    """The reduction of all ranks' data to the root."""
    source, kernel, root = flat_of(call.inputs[0]), kernel_of(call), call.root
    out = flat_of(call.outputs[0]) if call.outputs else None
    node = cluster.node_of(root)
    if _is_small(cluster, kernel, source):
        sums = _exchange_sums(cluster, call, kernel, source, cluster.bridge(root))
        if sums is not None and out is not None:
            Sums(kernel, cluster.size).combine(sums, out)
        cluster.board.meet()
        return

    def cross(bridge: Bridge, start: int, sums: Flat, result: Flat) -> None:
        target = None if out is None else out[start : start + sums.size]
        algorithms.chain_reduce(bridge, Sums(kernel, cluster.size), sums, target, node)

    _flow(cluster, call, kernel, Whole(source, _piece(kernel)), cross, None)


def reduce_scatter(cluster: Cluster, call: Call) -> None:
    """Each rank gets its own piece of the reduction."""
    out, kernel = flat_of(call.outputs[0]), kernel_of(call)
    pieces = pieces_of(call.inputs, call.op.name == "reduce_scatter_tensor", cluster.size)
    parcel = Parcels(pieces, cluster, max(1, _piece(kernel) // cluster.size))

    def cross(bridge: Bridge, start: int, sums: Flat, result: Flat) -> None:
        bounds = parcel.node_bounds(start)
        blocks = [sums[a:b] for a, b in pairwise(bounds)]
        mine = result[: blocks[cluster.mine].size]
        algorithms.scatter_reduced(bridge, Sums(kernel, cluster.size), blocks, mine)

    def collect(start: int, result: Flat) -> None:
        low, high = parcel.mine(start)
        out[start : start + high - low] = result[low:high]

    _flow(cluster, call, kernel, parcel, cross, collect)


def _is_small(cluster: Cluster, kernel: Kernel, source: Flat) -> bool:
    return source.size * kernel.acc.itemsize * len(cluster.nodes) <= SMALL


def _exchange_sums(
    cluster: Cluster, call: Call, kernel: Kernel, source: Flat, bridge: Bridge | None
) -> list[Flat] | None:
    """Every node's sum, to the leaders."""
    mine, contributions = cluster.board.rows(source.size, source.dtype)
    mine[:] = source
    cluster.board.meet(call)
    if bridge is None:
        return None
    plan = bridge.plan((source.size * kernel.acc.itemsize,) * bridge.size, kernel.acc)
    sum_up(kernel, contributions, plan.mine)
    return bridge.exchange(plan)


def _piece(kernel: Kernel) -> int:
    """Elements of a piece: contribution and sum (or result) fit a slot."""
    return (SLOT - 64) // (kernel.acc.itemsize + kernel.dtype.itemsize)


Cross = Callable[[Bridge, int, Flat, Flat], None]
Collect = Callable[[int, Flat], None]


def _flow(
    cluster: Cluster,
    call: Call,
    kernel: Kernel,
    cargo: Whole | Parcels,
    cross: Cross,
    collect: Collect | None,
) -> None:
    """Reduce piece by piece: all contribute; neighbours sum up; leaders cross with the sums; all collect.

    At step s all contribute piece s, then the neighbours sum it up while the leader crosses with piece s-1, and all
    collect piece s-2. A slot holds a contribution, and behind it a neighbour's part of the sum or the leader's result.

    ``cross(bridge, start, sums, result)`` reduces a node's sums with the other nodes' into ``result``;
    ``collect(start, result)`` takes what it needs from it.
    """
    board, root = cluster.board, call.root
    leader, bridge = cluster.leader(root), cluster.bridge(root)
    neighbours = [r for r in range(board.size) if r != leader]
    dtype, starts, sizes = kernel.storage, cargo.starts, [cargo.size(start) for start in cargo.starts]
    behind = -(-max(sizes, default=0) * dtype.itemsize // 64) * 64
    sums = np.empty(max(sizes, default=0) if bridge is not None else 0, kernel.acc)
    for s in range(len(sizes) + 2):
        if s < len(sizes):
            cargo.fill(starts[s], board.slot(board.rank, 0, sizes[s], dtype))
        board.meet(None if s else call)
        if s == 0 and bridge is not None:
            bridge.agree()
        if bridge is None and s < len(sizes):
            _sum_my_part(board, kernel, neighbours, sizes[s], behind)
        if bridge is not None and 1 <= s <= len(sizes):
            size = sizes[s - 1]
            if neighbours:
                _gather_sums(board, neighbours, sums[:size], behind)
            else:  # what this rank wrote for the step before
                sum_up(kernel, [board.slot(board.rank, 0, size, dtype, 1)], sums[:size])
            cross(bridge, starts[s - 1], sums[:size], board.slot(board.rank, behind, size, dtype))
        if collect is not None and s >= 2:
            collect(starts[s - 2], board.slot(leader, behind, sizes[s - 2], dtype, 0))


def _sum_my_part(board: Board, kernel: Kernel, neighbours: Sequence[int], size: int, behind: int) -> None:
    bounds = bounds_of(size, len(neighbours))
    i = neighbours.index(board.rank)
    low, high = bounds[i], bounds[i + 1]
    parts = [board.slot(r, 0, size, kernel.storage, 0)[low:high] for r in range(board.size)]
    sum_up(kernel, parts, board.slot(board.rank, behind, high - low, kernel.acc))


def _gather_sums(board: Board, neighbours: Sequence[int], sums: Flat, behind: int) -> None:
    bounds = bounds_of(sums.size, len(neighbours))
    for i, r in enumerate(neighbours):
        low, high = bounds[i], bounds[i + 1]
        sums[low:high] = board.slot(r, behind, high - low, sums.dtype, 0)


# --- moving -----------------------------------------------------------------------------------------------------------


def all_gather(cluster: Cluster, call: Call) -> None:
    """Every rank's data to all; sizes may differ. Leaders pass their nodes' pieces round a ring."""
    source, board, bridge = flat_of(call.inputs[0]), cluster.board, cluster.bridge()
    targets = pieces_of(call.outputs, call.op.name == "all_gather_into_tensor", cluster.size)
    dtype = source.dtype
    step = max(1, (SLOT - 64) // dtype.itemsize // (cluster.size + 1))
    parcels = Parcels(targets, cluster, step)
    behind = -(-step * dtype.itemsize // 64) * 64
    starts = parcels.starts or range(1)
    for s in range(len(starts) + 1):
        if s < len(starts):
            piece = source[starts[s] : starts[s] + step]
            board.slot(board.rank, 0, piece.size, dtype)[:] = piece
        board.meet(None if s else call)
        if bridge is not None and s < len(starts):
            if s == 0:
                bridge.agree()
            _pass_round(cluster, bridge, parcels, starts[s], behind, dtype)
        if s > 0:
            start = starts[s - 1]
            whole = board.slot(cluster.leader(), behind, parcels.size(start), dtype, 0)
            parcels.empty(start, whole)


def _pass_round(
    cluster: Cluster, bridge: Bridge, parcels: Parcels, start: int, behind: int, dtype: np.dtype[Any]
) -> None:
    board = cluster.board
    whole = board.slot(board.rank, behind, parcels.size(start), dtype)
    blocks = [whole[a:b] for a, b in pairwise(parcels.node_bounds(start))]
    mine, low = blocks[cluster.mine], 0
    for r, size in enumerate(parcels.sizes_here(start)):
        mine[low : low + size] = board.slot(r, 0, size, dtype, 0)
        low += size
    algorithms.gather_all(bridge, blocks)


def gather(cluster: Cluster, call: Call, counts: Sequence[int] | None = None) -> bool:
    """Every rank's data to the root: each leader sends its neighbours' slots.

    False, and not done, where sizes differ and ``counts`` is not given.
    """
    source, board, root = flat_of(call.inputs[0]), cluster.board, call.root
    targets = [flat_of(b) for b in call.outputs]
    bridge, home = cluster.bridge(root), cluster.node_of(root)
    step = SLOT // source.itemsize
    sizes = counts or (source.size,) * cluster.size
    same = True
    for i, start in enumerate(chain(range(0, max(1, *sizes), step), (None,))):
        if start is not None:
            piece = source[start : start + step]
            board.slot(board.rank, 0, piece.size, piece.dtype)[:] = piece
        if counts is None and i == 0:
            same = cluster.meet_alike(call, alike(call), root)
        else:
            board.meet()
        if counts is None and i == 1 and not cluster.alike(root):
            return False
        if start is not None and bridge is not None and same:
            parts = [min(max(n - start, 0), step) for n in sizes]
            here = [board.slot(r, 0, parts[rank], source.dtype, 0) for r, rank in enumerate(cluster.members)]
            _collect(cluster, bridge, targets, start, parts, here, home)
    return True


def _collect(
    cluster: Cluster,
    bridge: Bridge,
    targets: Sequence[Flat],
    start: int,
    parts: Sequence[int],
    here: Sequence[Flat],
    home: int,
) -> None:
    """A piece of every rank's data, of ``parts[rank]`` elements, to the root, which has ``targets``."""
    if not targets:
        for part in here:
            bridge.send(home, bytes_of(part))
        return
    for node, members in enumerate(cluster.nodes):
        for r, rank in enumerate(members):
            target = targets[rank][start : start + parts[rank]]
            if node == home:
                target[:] = here[r]
            else:
                bridge.receive(node, bytes_of(target), target.nbytes)


def scatter(cluster: Cluster, call: Call, counts: Sequence[int] | None = None) -> bool:
    """The root's i-th array to rank i: each leader receives into its slot what its neighbours take from there.

    False, and not done, where sizes differ and ``counts`` is not given.
    """
    out, board, root = flat_of(call.outputs[0]), cluster.board, call.root
    sources = [flat_of(b) for b in call.inputs]
    bridge, home, leader = cluster.bridge(root), cluster.node_of(root), cluster.leader(root)
    lane = SLOT // max(len(members) for members in cluster.nodes) // out.itemsize * out.itemsize
    step = lane // out.itemsize
    sizes = counts or (out.size,) * cluster.size
    same = counts is not None or cluster.meet_alike(call, alike(call), root)
    for start in range(0, max(1, *sizes), step):
        if bridge is not None and same:
            parts = [min(max(n - start, 0), step) for n in sizes]
            here = [board.slot(board.rank, r * lane, parts[rank], out.dtype) for r, rank in enumerate(cluster.members)]
            _deal(cluster, bridge, sources, start, parts, here, home)
        board.meet()
        if counts is None and start == 0 and not cluster.alike(root):
            return False
        mine = out[start : start + step]
        mine[:] = board.slot(leader, board.rank * lane, mine.size, out.dtype, 0)
    return True


def _deal(
    cluster: Cluster,
    bridge: Bridge,
    sources: Sequence[Flat],
    start: int,
    parts: Sequence[int],
    here: Sequence[Flat],
    home: int,
) -> None:
    """The reverse of :func:`_collect`: ``here`` is filled from the root's ``sources``."""
    if not sources:
        for part in here:
            bridge.receive(home, bytes_of(part), part.nbytes)
        return
    for node, members in enumerate(cluster.nodes):
        for r, rank in enumerate(members):
            part = sources[rank][start : start + parts[rank]]
            if node == home:
                here[r][:] = part
            else:
                bridge.send(node, bytes_of(part))


def all_to_all(cluster: Cluster, call: Call) -> None:
    """The j-th part of rank i becomes the i-th part of rank j: within a node through the slots, else directly."""
    assert call.in_counts is not None
    assert call.out_counts is not None
    team, size, rank = cluster.team, cluster.size, cluster.team.rank
    single = call.op.name == "all_to_all_single"
    sources = cut(call.inputs, call.in_counts, single)
    targets = cut(call.outputs, call.out_counts, single)
    table = algorithms.agree_on_counts(team, call.in_counts, call.out_counts)
    here = cluster.members
    targets[rank][:] = sources[rank]
    longest = int(table[np.ix_(here, here)].max())
    exchange_parts(cluster.board, [sources[r] for r in here], [targets[r] for r in here], longest)
    for distance in range(1, size):
        to, frm = (rank + distance) % size, (rank - distance) % size
        giving, taking = bytes_of(sources[to]), bytes_of(targets[frm])
        if to in here and frm in here:
            continue
        if to in here:
            team.receive(frm, taking, len(taking))
        elif frm in here:
            team.send(to, giving)
        else:
            team.duplex(to, giving, frm, taking)
