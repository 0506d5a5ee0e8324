"""DeviceMesh: the ranks of a job as an n-dimensional grid, with a process group along every
dimension.

Names, arguments and results are torch.distributed's. A mesh and its slices share the flat array of
ranks of the mesh that they were sliced from (the root); each dimension is an axis, which gives
sizes and strides in this array (see :mod:`unicoll.mesh.layout`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from unicoll.api import init, subgroups, world
from unicoll.calls.error_marks import leaves_doubt
from unicoll.calls.status import NO_RANK
from unicoll.errors import DistArgumentError, DistError
from unicoll.mesh.layout import (
    Axis,
    DimensionError,
    Override,
    Positions,
    RankArray,
    as_ranks,
    check_order,
    checked_names,
    dims_create,
    length,
    merged,
    override,
    overrides,
    slice_positions,
)
from unicoll.process.debug_level import DebugLevel, get_debug_level

if TYPE_CHECKING:
    from types import TracebackType

    from unicoll.group.process_group import ProcessGroup

__all__ = ["DeviceMesh", "current_mesh", "dims_create", "init_device_mesh"]


class _Active(threading.local):
    def __init__(self) -> None:
        self.meshes: list[DeviceMesh] = []


_active = _Active()


def current_mesh() -> DeviceMesh:
    """The mesh of the innermost ``with mesh:`` block of this thread.

    Raises:
        DistError: this thread is in no such block.
    """
    if not _active.meshes:
        raise DistError("no device mesh is active in this thread: enter one with `with mesh:`")
    return _active.meshes[-1]


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, Any] | None = None,
) -> DeviceMesh:
    """A mesh of ranks 0, 1, 2... in row-major order; all ranks of the job call this with the same
    arguments.

    Initialises the default process group (from the environment) if there is none yet.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"xpu"``, without an index.
        mesh_shape: size of each dimension. Their product is at most the world size; if it is
            smaller, the other ranks are not part of the mesh.
        mesh_dim_names: a distinct name for each dimension.
        backend_override: backends of single dimensions, by index or name: a backend's name, its
            options, or a pair of both.

    Raises:
        DistArgumentError: sizes, names and overrides contradict each other, or the mesh exceeds the
            world.
        DistError: as :func:`unicoll.init_process_group` and :func:`unicoll.new_group`.

    Example::

        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        dist.all_reduce(x, group=mesh.get_group("tp"))
    """

    def arguments() -> _Arguments:
        if not device_type.isalpha():
            raise DistArgumentError(
                f"device_type {device_type!r}: a device type without an index is needed, such as"
                " 'cpu' or 'cuda'"
            )
        shape = tuple(mesh_shape)
        if any(not hasattr(size, "__index__") or size < 1 for size in shape):
            raise DistArgumentError(f"mesh_shape {shape} must hold positive integers")
        names = checked_names(mesh_dim_names, len(shape), "mesh_shape")
        ranks = np.arange(prod(shape)).reshape(shape)
        return _Arguments(ranks, names, overrides(backend_override, len(shape), names))

    made: list[str] = []
    try:
        # The constructor has a list of names and a handler of its own: after an exception in it,
        # the handler below would reserve names once more.
        mesh = object.__new__(DeviceMesh)
        mesh._create(device_type, arguments, True, None, made)
        return mesh
    except BaseException as e:
        subgroups.fail_listed("init_device_mesh", None, lambda: arguments().listed(), made, e)
        raise


class _Arguments(NamedTuple):
    """What a mesh is made from: the array of ranks, names and overrides of its dimensions."""

    ranks: RankArray
    names: tuple[str, ...] | None
    configs: Sequence[Override] | None

    @property
    def axes(self) -> tuple[Axis, ...]:
        shape = self.ranks.shape
        return tuple(merged([(size, prod(shape[dim + 1 :]))]) for dim, size in enumerate(shape))

    def listed(self) -> list[subgroups.Listed]:
        """The groups of all dimensions."""
        rows = _groups_along(self.ranks.reshape(-1), self.axes, self.names, self.configs)
        return [*chain.from_iterable(rows)]


def _groups_along(
    ranks: RankArray,
    axes: tuple[Axis, ...],
    names: tuple[str, ...] | None,
    configs: Sequence[Override] | None,
) -> list[list[subgroups.Listed]]:
    """The groups along each axis, which all ranks make in this order; none along one that is the
    default group's."""
    rows = []
    for dim, axis in enumerate(axes):
        desc = f"mesh_{names[dim] if names else f'dim_{dim}'}"
        backend, options = configs[dim] if configs else (None, None)
        is_world = length(axis) == world.get_world_size() and backend is None and options is None
        members = [] if is_world else ranks[slice_positions((axis,), ranks.size)].tolist()
        rows.append([subgroups.Listed(row, backend, options, desc) for row in members])
    return rows


def _select_device(device_type: str) -> None:
    """Make the device of this process's local rank the current one, if the thread has none (torch's
    rule)."""
    # Programs on CPUs do not need this module.
    from unicoll.devices import runtimes

    job, torch = world.current("DeviceMesh"), sys.modules.get("torch")
    local = job.local_rank
    if local is None or job.fake or runtimes.reason_against(device_type) is not None:
        return
    # If torch uses such devices already, its current one stays.
    if torch is not None and getattr(torch, device_type).is_initialized():
        return
    runtime = runtimes.runtime(device_type)
    count = runtime.device_count()
    # With one device only, the launcher shows each process its own.
    if runtime.current_device() < 0 and (local < count or count == 1):
        runtime.set_device(min(local, count - 1))


class DeviceMesh:
    """An n-dimensional grid of ranks.

    All ranks of the job create it with the same arguments, also those that are not part of it.
    Groups are created for one dimension after the other, in an order that is equal on all ranks.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"xpu"``. If this thread has no current device of the
            type yet, that of the launcher's local rank becomes it.
        mesh: array (or nested lists) of distinct global ranks.
        mesh_dim_names: a distinct name for each dimension of ``mesh``.
        backend_override: per dimension a pair of a backend's name and its options, each or both
            None.
        _init_backend: False creates no groups: the mesh then has only a layout.
        _rank: this process's global rank; None takes it from the default group.

    Raises:
        DistArgumentError, DistTypeError: ``mesh`` does not hold distinct ranks of the world, or
            names and overrides do not fit its dimensions.
        DistError: as :func:`unicoll.init_process_group` and :func:`unicoll.new_group`.
    """

    def __init__(
        self,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Sequence[Override] | None = None,
        _init_backend: bool = True,
        _rank: int | None = None,
    ) -> None:
        def arguments() -> _Arguments:
            ranks = as_ranks(mesh)
            names = checked_names(mesh_dim_names, ranks.ndim, "mesh")
            if backend_override is not None and len(backend_override) != ranks.ndim:
                raise DistArgumentError(
                    f"backend_override has {len(backend_override)} entries for {ranks.ndim}"
                    " dimensions"
                )
            return _Arguments(ranks, names, backend_override)

        made: list[str] = []
        try:
            self._create(device_type, arguments, _init_backend, _rank, made)
        except BaseException as e:
            if _init_backend:
                subgroups.fail_listed("DeviceMesh", None, lambda: arguments().listed(), made, e)
            raise

    def _create(
        self,
        device_type: str,
        arguments: Callable[[], _Arguments],
        has_groups: bool,
        rank: int | None,
        made: list[str],
    ) -> None:
        """Initialise this mesh; the names of its groups are added to ``made``."""
        ranks, names, configs = given = arguments()
        if has_groups:
            _check_world(ranks)
            if device_type in ("cuda", "xpu"):
                _select_device(device_type)
        own = world.get_rank() if rank is None else rank
        self._lay_out(device_type, ranks.reshape(-1), given.axes, names, own, None)
        self._groups: tuple[ProcessGroup, ...] | None = None
        if has_groups:
            self._groups = self._make_groups(configs, made)

    def _lay_out(
        self,
        device_type: str,
        ranks: RankArray,
        axes: tuple[Axis, ...],
        names: tuple[str, ...] | None,
        rank: int,
        root: DeviceMesh | None,
    ) -> None:
        self._device_type = device_type
        self._ranks = ranks
        self._axes = axes
        self._names = names
        self._rank = rank
        self._root = self if root is None else root
        self._positions = _slice_with(rank, ranks, slice_positions(axes, ranks.size))
        # It has flattened meshes by name; those of all slices are in the root's.
        self._flattened: dict[str, DeviceMesh] = {}

    def _derive(self, axes: tuple[Axis, ...], names: tuple[str, ...]) -> DeviceMesh:
        """A mesh with other axes over the root's ranks; without groups."""
        mesh = object.__new__(DeviceMesh)
        mesh._lay_out(self._device_type, self._ranks, axes, names, self._rank, self._root)
        mesh._groups = None
        return mesh

    def _make_groups(
        self, configs: Sequence[Override] | None, made: list[str]
    ) -> tuple[ProcessGroup, ...]:
        """This rank's group along each axis; the names of all of them are added to ``made``."""
        rows = _groups_along(self._ranks, self._axes, self._names, configs)
        groups = iter(subgroups.make_listed("DeviceMesh", None, [*chain.from_iterable(rows)], made))
        mine = []
        for row in rows:
            # In zip() the row comes first: when it ends, no group of the next row has been taken.
            along = {
                rank: group for one, group in zip(row, groups, strict=False) for rank in one.ranks
            }
            # No groups were made along a dimension that the default group serves.
            mine.append(along.get(self._rank) if row else world.resolve(None))
        return tuple(group for group in mine if group is not None)

    # Layout
    # ---------------------------------------------------------------------------------------------

    @property
    def device_type(self) -> str:
        """``"cpu"``, ``"cuda"`` or ``"xpu"``."""
        return self._device_type

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Name of each dimension, or None."""
        return self._names

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        return tuple(length(axis) for axis in self._axes)

    @property
    def mesh(self) -> RankArray:
        """Global ranks, an int64 array of :attr:`shape`; for a slice, those of the slice with this
        rank.

        Raises:
            DistArgumentError: this is a slice, and this rank is not part of the mesh.
        """
        if self._positions is None:
            raise DistArgumentError(
                f"rank {self._rank} is not part of {self!r}, so it is in none of its slices"
            )
        return self._ranks[self._positions].reshape(self.shape)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Number of ranks along a dimension (index or name), or in the whole mesh.

        Raises:
            DistArgumentError: there is no such dimension.
        """
        return prod(self.shape) if mesh_dim is None else self.shape[self._index(mesh_dim)]

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's index along each dimension; None if it is not part of the mesh."""
        if self._positions is None:
            return None
        found = np.flatnonzero(self._ranks[self._positions] == self._rank)
        return tuple(int(i) for i in np.unravel_index(found[0], self.shape)) if found.size else None

    def get_rank(self) -> int:
        """This process's global rank."""
        return self._rank

    def _index(self, mesh_dim: int | str) -> int:
        if isinstance(mesh_dim, str):
            if self._names is None or mesh_dim not in self._names:
                raise DimensionError(f"there is no dimension {mesh_dim!r} in {self!r}")
            return self._names.index(mesh_dim)
        if not hasattr(mesh_dim, "__index__") or not -self.ndim <= mesh_dim < self.ndim:
            raise DimensionError(f"there is no dimension {mesh_dim!r} in {self!r}")
        return range(self.ndim)[mesh_dim]

    def shift(
        self, mesh_dim: int | str, displacement: int = 1, *, periodic: bool = False
    ) -> tuple[int, int]:
        """The neighbours of this rank along a dimension, for :func:`unicoll.sendrecv`
        (MPI_Cart_shift).

        Args:
            mesh_dim: index or name.
            displacement: how far the data moves; negative in the direction of smaller coordinates.
            periodic: True if the last rank of the dimension is followed by the first. A dimension
                of size 1 then gives this rank itself.

        Returns:
            The global rank that this one receives from, and the one that it sends to; NO_RANK
            beyond the edge.

        Raises:
            DistArgumentError: there is no such dimension, or this rank is not part of the mesh.
        """
        axis, here = self._index(mesh_dim), self.get_coordinate()
        if here is None:
            raise DistArgumentError(
                f"rank {self._rank} is not part of {self!r}, so it has no neighbours in it"
            )
        return self._at(here, axis, -displacement, periodic), self._at(
            here, axis, displacement, periodic
        )

    def _at(self, here: tuple[int, ...], axis: int, displacement: int, periodic: bool) -> int:
        """The rank at some distance from a coordinate."""
        size, place = self.shape[axis], here[axis] + displacement
        if periodic:
            place %= size
        elif not 0 <= place < size:
            return NO_RANK
        return int(self.mesh[here[:axis] + (place,) + here[axis + 1 :]])

    # Groups
    # ---------------------------------------------------------------------------------------------

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """This rank's process group along a dimension.

        Args:
            mesh_dim: index or name, also the name of a flattened mesh; not needed if there is one
                dimension.

        Raises:
            DistArgumentError: there is no such dimension, or ``mesh_dim`` is None and there are
                several.
            DistError: this rank is not part of the mesh, or the mesh was created without groups.
        """
        if mesh_dim is None:
            self._check_one_dimensional()
            mesh_dim = 0
        if isinstance(mesh_dim, str) and mesh_dim in self._root._flattened:
            return self._root._flattened[mesh_dim].get_group()
        index = self._index(mesh_dim)
        return self._members_groups()[index]

    def get_all_groups(self) -> list[ProcessGroup]:
        """This rank's process group along each dimension; raises as :meth:`get_group`."""
        return list(self._members_groups())

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This process's rank in its group along a dimension; arguments and errors as
        :meth:`get_group`."""
        return self.get_group(mesh_dim).rank()

    def _members_groups(self) -> tuple[ProcessGroup, ...]:
        if self._groups is None:
            raise DistError(f"{self!r} was made without process groups")
        if len(self._groups) != self.ndim:
            raise DistError(f"rank {self._rank} is not part of {self!r}: it has no group in it")
        return self._groups

    def _check_one_dimensional(self) -> None:
        if self.ndim != 1:
            raise DistArgumentError(
                f"{self!r} has {self.ndim} dimensions: mesh_dim must say which "
                "(get_all_groups() gives all groups)"
            )

    @staticmethod
    def from_group(
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """A mesh over existing groups.

        Args:
            group: one group for a mesh of one dimension, or a list with this rank's group along
                each.
            device_type: ``"cpu"``, ``"cuda"`` or ``"xpu"``.
            mesh: global ranks; needed with a list of groups; None takes those of the group.
            mesh_dim_names: a distinct name for each dimension; needed with a list of groups.

        Raises:
            DistArgumentError: ``mesh`` or ``mesh_dim_names`` is missing or does not fit the groups.
        """
        several = isinstance(group, Sequence)
        groups = tuple(group) if isinstance(group, Sequence) else (group,)
        if not groups:
            raise DistArgumentError("from_group: at least one group is needed")
        if several and (mesh is None or mesh_dim_names is None):
            raise DistArgumentError("from_group: a list of groups needs mesh and mesh_dim_names")
        ranks = list(groups[0].ranks) if mesh is None else as_ranks(mesh).tolist()
        if not several and ranks != list(groups[0].ranks):
            raise DistArgumentError(
                f"from_group: mesh {ranks} is not the group's ranks {groups[0].ranks}"
            )
        result = DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, _init_backend=False)
        if result.ndim != len(groups):
            raise DistArgumentError(
                f"from_group: mesh {ranks} has {result.ndim} dimensions for {len(groups)} groups"
            )
        result._groups = groups
        return result

    # Slices and flattened dimensions
    # --------------------------------------------------------------------

    def __getitem__(self, mesh_dim_names: str | Sequence[str]) -> DeviceMesh:
        """The mesh of the named dimensions, at this rank's coordinates in the others; it shares
        their groups.

        Args:
            mesh_dim_names: one name or several, in the order of this mesh. On a mesh that is not a
                slice, also the names of flattened meshes.

        Raises:
            DistArgumentError: an unknown name (also a KeyError), another order, or dimensions that
                overlap.
        """
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if self._names is None:
            raise DistArgumentError(
                f"{self!r} cannot be sliced: it was made without mesh_dim_names"
            )
        if names == self._names:
            return self
        sources = [self._source_of(name, names) for name in names]
        axes = tuple(mesh._axes[dim] for mesh, dim in sources)
        check_order(axes, names, self)
        result = self._derive(axes, names)
        if all(mesh._groups is not None for mesh, _ in sources):
            result._groups = tuple(mesh._groups[dim] for mesh, dim in sources if mesh._groups)
        return result

    def _source_of(self, name: str, names: tuple[str, ...]) -> tuple[DeviceMesh, int]:
        """The mesh with the dimension of this name, and the index of the dimension."""
        known = self._names or ()
        if name in known:
            return self, known.index(name)
        if self is self._root and name in self._flattened:
            return self._flattened[name], 0
        valid = [*known, *(self._flattened if self is self._root else ())]
        raise DimensionError(f"mesh_dim_names {names}: {name!r} is not one of {valid}")

    def flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> DeviceMesh:
        """A mesh of one dimension with the same ranks, and a new group; all ranks of the job call
        this.

        For example ``mesh["dp", "cp"].flatten("dp_cp")``. The same name returns the same mesh, also
        as ``mesh["dp_cp"]`` and ``mesh.get_group("dp_cp")``.

        Args:
            mesh_dim_name: name of the new dimension; None joins the names of the dimensions by
                ``_``.
            backend_override: the group's backend: its name, its options, or a pair of both.

        Raises:
            DistArgumentError: the dimensions of the mesh have no names, or the name is in use.
            DistError: as :func:`unicoll.new_group`.
        """
        made: list[str] = []
        try:
            return self._flatten_to(mesh_dim_name, backend_override, made)
        except BaseException as e:
            self._fail_flattened(mesh_dim_name, backend_override, made, e)
            raise

    def _flatten_to(
        self, mesh_dim_name: str | None, backend_override: Any, made: list[str]
    ) -> DeviceMesh:
        name, flat = self._flat(mesh_dim_name)
        if flat is self or self._root._flattened.get(name) is flat:
            return flat
        if self._groups is not None:
            flat._groups = flat._make_groups([override(backend_override)], made)
        self._root._flattened[name] = flat
        return flat

    def _flat(self, mesh_dim_name: str | None) -> tuple[str, DeviceMesh]:
        """The mesh that :meth:`flatten` returns, and its name; without groups if it has not been
        made."""
        if self._names is None:
            raise DistArgumentError(
                f"{self!r} cannot be flattened: it was made without mesh_dim_names"
            )
        name = mesh_dim_name or "_".join(self._names)
        if self.ndim == 1 and name in self._names:
            return name, self
        root = self._root
        if name in (root._names or ()):
            raise DistArgumentError(
                f"mesh_dim_name {name!r} is taken: it is a dimension of {root!r}"
            )
        axis = merged([pair for axis in self._axes for pair in axis])
        known = root._flattened.get(name)
        if known is None:
            return name, self._derive((axis,), (name,))
        if known._axes != (axis,):
            raise DistArgumentError(
                f"mesh_dim_name {name!r} is taken by another flattened mesh, {known!r}"
            )
        return name, known

    def _fail_flattened(
        self,
        mesh_dim_name: str | None,
        backend_override: Any,
        made: list[str],
        cause: BaseException,
    ) -> None:
        """Fail the group of :meth:`flatten` after an exception that is no refusal; keep the mesh,
        as others do."""
        if not leaves_doubt(cause) or self._groups is None:
            return
        # A call with wrong arguments, which raises here, is refused by the other ranks, too.
        with suppress(Exception):
            name, flat = self._flat(mesh_dim_name)
            known = self._root._flattened.setdefault(name, flat)
            if flat is self or (known is flat and flat._groups is not None):
                # No group was to be made: this mesh is flat, or the flat one had its group before.
                return
            configs = [override(backend_override)]

            def listed() -> list[subgroups.Listed]:
                return _groups_along(flat._ranks, flat._axes, flat._names, configs)[0]

            subgroups.fail_listed("DeviceMesh", None, listed, made, cause)

    # Torch has this name.
    _flatten = flatten

    # Object protocol
    # ------------------------------------------------------------------------------------

    def __enter__(self) -> DeviceMesh:
        _active.meshes.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _active.meshes.pop()

    def _key(self) -> tuple[Any, ...]:
        return self._ranks.tobytes(), self._axes, self._device_type, self._names

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, DeviceMesh) and self._key() == other._key())

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        if self._names:
            sizes = ", ".join(
                f"{name}={size}" for name, size in zip(self._names, self.shape, strict=True)
            )
            sizes = f"({sizes})"
        else:
            sizes = str(self.shape)
        strides = tuple(
            axis[0][1] if len(axis) == 1 else tuple(stride for _, stride in axis)
            for axis in self._axes
        )
        detail = ""
        if get_debug_level() is DebugLevel.DETAIL and self._positions is not None:
            detail = f", Mesh: {self.mesh.tolist()}"
        return f"DeviceMesh({sizes}, '{self._device_type}', stride={strides}{detail})"


def _check_world(ranks: RankArray) -> None:
    if not world.is_initialized():
        init.init_process_group()
    size = world.get_world_size()
    if ranks.size > size:
        raise DistArgumentError(
            f"a mesh of shape {ranks.shape} should not be bigger than the world: {ranks.size}"
            f" ranks, world size {size}"
        )
    if ranks.max() >= size:
        raise DistArgumentError(f"mesh holds rank {ranks.max()}, the world's are 0 to {size - 1}")


def _slice_with(rank: int, ranks: RankArray, slices: Positions) -> Positions | None:
    """The slice with ``rank``, or None; if there is one slice only, that slice."""
    for positions in slices:
        if len(slices) == 1 or rank in ranks[positions]:
            return np.asarray(positions)
    return None
