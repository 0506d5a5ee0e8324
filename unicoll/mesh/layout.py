"""The arithmetic of :mod:`unicoll.mesh.device_mesh`: axes over a flat array of ranks; checks of the
arguments.

An axis is a sequence of (size, stride), the outermost first. Most dimensions have one pair; a
dimension that was flattened from several that are not contiguous has several, and a dimension of
size 1 has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from unicoll.errors import DistArgumentError, DistError, DistTypeError

Axis = tuple[tuple[int, int], ...]
# It is a backend's name or None, and a backend's options or None.
Override = tuple[Any, Any]
RankArray = npt.NDArray[np.int64]
Positions = npt.NDArray[np.intp]


class DimensionError(DistArgumentError, KeyError, IndexError):
    """There is no such dimension; torch raises KeyError for names and IndexError for numbers."""

    # KeyError would show the message quoted.
    __str__ = DistError.__str__


def merged(pairs: Iterable[tuple[int, int]]) -> Axis:
    """One axis of pairs of (size, stride), outermost first; equal positions give equal axes."""
    axis: list[tuple[int, int]] = []
    for size, stride in pairs:
        if size == 1:
            continue
        if axis and axis[-1][1] == size * stride:
            axis[-1] = (axis[-1][0] * size, stride)
        else:
            axis.append((size, stride))
    return tuple(axis)


def length(axis: Axis) -> int:
    """Number of positions on an axis."""
    return prod(size for size, _ in axis)


def slice_positions(axes: Sequence[Axis], total: int) -> Positions:
    """The positions of all slices with these axes in a root of ``total`` ranks: one row per
    slice."""
    pairs = [pair for axis in axes for pair in axis]
    first = np.array(
        [sum(steps) for steps in product(*(range(0, n * s, s) for n, s in pairs))], np.intp
    )
    free = np.ones(total, bool)
    rows = []
    for start in range(total):
        # The slices are disjoint and cover the root, so the first position that is in none of them
        # begins another one.
        if free[start]:
            rows.append(first + start)
            free[rows[-1]] = False
    return np.array(rows)


def check_order(axes: Sequence[Axis], names: Sequence[str], mesh: object) -> None:
    """Refuse dimensions of a slice that overlap or are not in the order of ``mesh``."""
    pairs = [pair for axis in axes for pair in axis]
    for (_, outer), (size, stride) in pairwise(pairs):
        if outer < stride:
            raise DimensionError(f"mesh_dim_names {names} must be in the order of {mesh!r}")
        # Axes without common ranks nest: the outer stride is a multiple of what the inner axis
        # spans.
        if outer % (size * stride):
            raise DistArgumentError(f"mesh_dim_names {names} overlap in {mesh!r}")


def as_ranks(mesh: Any) -> RankArray:
    """``mesh`` (array, tensor, nested lists) as an int64 array of distinct ranks from 0 on."""
    if mesh is None:
        raise DistTypeError("mesh is needed: an array or nested lists of global ranks")
    # It is a tensor of torch, perhaps on a GPU.
    if hasattr(mesh, "detach"):
        mesh = mesh.detach().cpu()
    try:
        array = np.asarray(mesh.get() if hasattr(mesh, "get") else mesh)
    except ValueError as error:
        raise DistArgumentError(f"mesh must be a regular grid of ranks, got {mesh!r}") from error
    if array.size == 0 or array.dtype.kind not in "iu":
        raise DistTypeError(f"mesh must hold global ranks (integers), got {mesh!r}")
    ranks: RankArray = array.astype(np.int64)
    if np.unique(ranks).size != ranks.size or ranks.min() < 0:
        raise DistArgumentError(f"mesh must hold distinct ranks from 0 on, got {ranks.tolist()}")
    return ranks


def checked_names(names: Sequence[str] | None, ndim: int, what: str) -> tuple[str, ...] | None:
    """Dimension names as a tuple: one for each of ``ndim`` dimensions of ``what``, distinct; or
    None."""
    if not names:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise DistTypeError(f"mesh_dim_names must be a tuple of names, got {names!r}")
    if len(names) != ndim:
        raise DistArgumentError(
            f"mesh_dim_names {tuple(names)} should name the {ndim} dimensions of {what}"
        )
    if len(set(names)) != len(names):
        raise DistArgumentError(f"mesh_dim_names {tuple(names)} must be distinct")
    return tuple(names)


def overrides(
    given: Mapping[int | str, Any] | None, ndim: int, names: tuple[str, ...] | None
) -> list[Override] | None:
    """One override per dimension, from a mapping by index or name."""
    if given is None:
        return None
    result: list[Override] = [(None, None)] * ndim
    labels: dict[int | str, int] = {dim: dim for dim in range(ndim)}
    labels.update((name, dim) for dim, name in enumerate(names or ()))
    seen: set[int] = set()
    for label, value in given.items():
        if label not in labels:
            raise DistArgumentError(f"backend_override: {label!r} is not one of {list(labels)}")
        if labels[label] in seen:
            raise DistArgumentError(
                f"backend_override: dimension {labels[label]} is given by index and by name"
            )
        seen.add(labels[label])
        result[labels[label]] = override(value)
    return result


def override(value: Any) -> Override:
    """A backend's name, its options, or a pair of both, as the pair."""
    if value is None or isinstance(value, str):
        return (value, None)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return (value[0], value[1])
    return (None, value)


def dims_create(size: int, dims: int | Sequence[int]) -> tuple[int, ...]:
    """Sizes of the dimensions of a grid, as near to one another as possible (MPI_Dims_create).

    Args:
        size: number of ranks.
        dims: number of dimensions; or their sizes, of which those that are 0 are to be chosen.

    Returns:
        Sizes whose product is ``size``; the chosen ones do not increase.

    Raises:
        DistArgumentError: the given sizes do not divide ``size``.
    """
    given = [0] * dims if isinstance(dims, int) else list(dims)
    fixed, free = prod(d for d in given if d), given.count(0)
    if size < 1 or fixed < 1 or size % fixed or (not free and fixed != size):
        raise DistArgumentError(f"dims_create: {size} ranks do not fill a grid of sizes {given}")
    chosen = iter(_balanced(size // fixed, free))
    return tuple(d or next(chosen) for d in given)


def _balanced(size: int, count: int, least: int = 1) -> tuple[int, ...]:
    """``count`` factors of ``size`` that do not increase, each at least ``least``, of which the
    first is the smallest possible; () if there are none."""
    if count <= 1:
        return (size,) * count if size >= least else ()
    found: tuple[int, ...] = ()
    for last in range(least, round(size ** (1 / count)) + 1):
        others = _balanced(size // last, count - 1, last) if size % last == 0 else ()
        if others and (not found or others[0] <= found[0]):
            found = (*others, last)
    return found
