"""One operation on symmetric and on ordinary arrays, with a comparison of the results."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

import unicoll as dist
from gloo_fallback.algorithms import peer_memory
from gloo_fallback.shm.process_memory import is_readable
from gloo_fallback.transport.selection import OPERATIONS as ALGORITHMS
from unicoll.calls.ops import OPS, Arity, Sizes
from unicoll.testing import reference

Array = Any

TAKEN: list[str] = []
"""The functions of ``peer_memory`` that have moved data, in order."""


def watch() -> None:
    """Note in TAKEN which functions of ``peer_memory`` move data."""
    if hasattr(peer_memory.all_reduce, "watched"):
        return
    for name, function in inspect.getmembers(peer_memory, inspect.isfunction):
        if function.__module__ != peer_memory.__name__ or name.startswith("_") or name == "arrays_of_all":
            continue

        def watched(*args: Any, _function: Any = function, _name: str = name) -> bool:
            done: bool = _function(*args)
            if done:
                TAKEN.append(_name)
            return done

        watched.watched = True  # type: ignore[attr-defined]
        setattr(peer_memory, name, watched)


def _program(name: str, count: int, reduction: Any, root: int, even: bool) -> tuple[list[int], Any]:
    """The sizes of an operation's arrays on this rank, and the call."""
    row, rank, size = OPS[name], dist.get_rank(), dist.get_world_size()
    uneven = row.uneven and not row.root_has_sizes and not even  # uneven gathers and scatters use the slots
    exchanged = row.sizes is Sizes.EXCHANGED
    sends, gets = (
        [count + ((3 * a + 5 * b) % 7 if uneven else 0) for a, b in pairs]
        for pairs in ([(rank, r) for r in range(size)], [(r, rank) for r in range(size)])
    )
    arguments: list[tuple[Arity, list[int]]] = []
    for parameter in row.parameters:
        if parameter.side == "splits":
            continue
        arity = row.outputs if parameter.side == "output" else row.inputs
        parts = [count + (r if uneven else 0) for r in range(size)]
        if exchanged:
            parts = sends if parameter.side == "input" else gets
        if arity is Arity.PER_RANK_AT_ROOT and rank != root:
            parts = []
        elif arity is Arity.ONE:
            larger = exchanged or (parameter.side == "input") == row.scattered
            parts = [sum(parts)] if row.joined and larger else [parts[rank]]
        arguments.append((arity, parts))
    options: dict[str, Any] = {row.root_name: root} if row.rooted else {}
    if row.reduces:
        options["op"] = reduction
    if exchanged and row.joined:
        options |= {"output_split_sizes": gets, "input_split_sizes": sends}

    def call(arrays: list[Array]) -> None:
        left = iter(arrays)
        given = [(arity, [next(left) for _ in parts]) for arity, parts in arguments]
        getattr(dist, name)(
            *(own[0] if arity is Arity.ONE else own or None for arity, own in given), **options
        )

    return [part for _, parts in arguments for part in parts], call


OPERATIONS = tuple(name for name in ALGORITHMS if OPS[name].moves_data)


class Parts:
    """Cuts arrays from one symmetric array, at offsets that differ between the ranks."""

    def __init__(self, itemsize: int, nbytes: int, group: Any = None) -> None:
        group = group or dist.group.WORLD
        self._left = group.symmetric_empty(nbytes + 4096, "uint8")[dist.get_rank() * 16 * itemsize :]

    def __call__(self, count: int, dtype: np.dtype[Any]) -> Array:
        nbytes = count * dtype.itemsize
        part, self._left = self._left[:nbytes], self._left[-(-nbytes // 16) * 16 :]
        return part.view(dtype)


def read_from(nbytes: int, group: Any = None) -> None:
    """Let collectives of a group (the world) from a number of bytes on read the memory of other processes."""
    group = group or dist.group.WORLD
    dist.all_reduce(np.zeros(1 << 15), group=group)  # selects the transport
    backend: Any = group._dispatcher._backends.all[-1]
    slots = backend._transport.slots
    if slots is not None and slots.peers is not None:
        slots.peers.minimum = slots.peers.scatter_minimum = nbytes


def equal_results(
    name: str,
    count: int,
    dtype: str,
    reduction: str,
    root: int,
    even: bool,
    ordinary_rank: int | None,
    reads: bool = False,
) -> list[str]:
    """One operation through the slots and without them gives the same bytes; returns the direct functions that ran.

    Args:
        ordinary_rank: a rank that has ordinary arrays both times; with ``reads`` arrays that others cannot read.
        reads: the arrays are read from the processes' memory; False: they are in symmetric memory.
    """
    watch()
    read_from(1 << 60)
    rank, size = dist.get_rank(), dist.get_world_size()
    counts, call = _program(name, count, getattr(dist.ReduceOp, reduction), root, even)
    kind: Any = reference.numpy_dtype(dtype)
    cut = Parts(kind.itemsize, (3 * size + 2) * (count + 16) * kind.itemsize)
    results: list[list[Array]] = []
    TAKEN.clear()
    for symmetric in (False, True):
        ordinary = not symmetric or reads or rank == ordinary_rank
        if symmetric and reads:
            read_from(1)
            peer_memory.is_readable = is_readable if rank != ordinary_rank else lambda array: False
        arrays = [np.empty(n, kind) if ordinary else cut(n, kind) for n in counts]
        for i, array in enumerate(arrays):
            rng = np.random.default_rng([rank, i])
            array[:] = reference.values(dtype, reduction, array.shape, rng, False)
        call(arrays)
        results.append([array.copy() for array in arrays])
        if not symmetric:
            assert not TAKEN, TAKEN
    peer_memory.is_readable = is_readable
    for ordinary_array, symmetric_array in zip(*results, strict=True):
        np.testing.assert_array_equal(ordinary_array.view("u1"), symmetric_array.view("u1"))
    return list(TAKEN)
