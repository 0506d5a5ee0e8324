"""Backends by name: registered or installed, loaded on demand, with the reason why one cannot be
used.

A backend comes from the built-in table, from the entry-point group ``unicoll.backends`` of an
installed package (the entry's name is the backend's; it points at a
:class:`unicoll.backend.Backend` subclass), or from ``BackendName.register_backend``. A backend is
imported when it is used first.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from unicoll.backend.contract import Backend as BackendBase
from unicoll.backend.contract import Caps, Context, Job
from unicoll.errors import BackendUnavailableError, DistArgumentError

if TYPE_CHECKING:
    from unicoll.net.stores import Store

_BUILT_IN = {
    "fake": "unicoll.backend.host.fake",
    "gloo": "gloo_fallback",
    "mpi": "mpi_comm",
    "nccl": "nccl_comm",
    "xccl": "xccl_comm",
}
_registered: dict[str, Callable[[], type[BackendBase]]] = {}
_registered_devices: dict[str, frozenset[str]] = {}


class BackendType(IntEnum):
    """Numbers of backends, as torch.distributed has them in ``ProcessGroup.BackendType``."""

    UNDEFINED = 0
    GLOO = 1
    NCCL = 2
    UCC = 3
    MPI = 4
    XCCL = 5
    CUSTOM = 6


class BackendOptions(NamedTuple):
    """What a function registered with ``extended_api`` gets, as torch's
    ``DistributedBackendOptions``.

    Attributes:
        store: the job's store, with keys of this group alone.
        group_rank, group_size: this process's rank in the group, and the number of members.
        timeout: default timeout of the group's operations.
        group_id: the group's name.
        global_ranks_in_group: the members' global ranks, in group order.
    """

    store: Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]


class BackendName(str):
    """A backend's name, as torch.distributed has it: ``BackendName("GLOO") == "gloo"``.

    The known names are attributes: ``BackendName.GLOO``, ``BackendName.MPI``, ``BackendName.NCCL``,
    ``BackendName.FAKE``.
    """

    UNDEFINED = "undefined"
    FAKE = "fake"
    GLOO = "gloo"
    NCCL = "nccl"
    MPI = "mpi"
    UCC = "ucc"
    XCCL = "xccl"
    backend_list: ClassVar[list[str]] = ["undefined", "gloo", "nccl", "xccl", "mpi", "fake"]
    backend_type_map: ClassVar[dict[str, BackendType]] = {
        **{kind.name.lower(): kind for kind in BackendType if kind is not BackendType.CUSTOM},
        "fake": BackendType.CUSTOM,
    }

    def __new__(cls, name: str) -> BackendName:
        if not isinstance(name, str):
            raise DistArgumentError(f"backend: expected a name, got {name!r}")
        return super().__new__(cls, name.lower())

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: type[BackendBase] | Callable[..., Any],
        extended_api: bool = False,
        devices: str | list[str] | None = None,
    ) -> None:
        """Register a third party's backend.

        Args:
            name: of the backend; case is ignored.
            func: a :class:`unicoll.backend.Backend` subclass; a function without arguments that
                returns one; or torch's function, which is called for each group with ``(store,
                rank, world_size, timeout)`` and returns a :class:`unicoll.backend.Backend` object.
            extended_api: torch's function is called with ``(options, pg_options)`` instead, a
                :class:`BackendOptions` and the user's options.
            devices: device types that it serves; None takes them from the class's ``caps``, and for
                torch's function is ``"cpu"``.

        Raises:
            DistArgumentError: the name is taken or not a name.
        """
        key = name.lower()
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", key):
            raise DistArgumentError(f"register_backend: {name!r} is not a valid name of a backend")
        if key in _BUILT_IN or key in _registered:
            raise DistArgumentError(f"register_backend: there is a backend {key!r} already")
        if isinstance(func, type):
            _registered[key] = lambda: func
        elif callable(func):
            if _takes(func, 2 if extended_api else 4):
                # The class is made once, not in each load(), because a group keeps its backends by
                # class.
                made = _from_function(key, func, extended_api, devices)
                _registered[key] = lambda: made
            else:
                _registered[key] = func
        else:
            raise DistArgumentError(
                f"register_backend: {func!r} is neither a Backend class nor a function"
            )
        if devices is not None:
            _registered_devices[key] = frozenset([devices] if isinstance(devices, str) else devices)
        cls.backend_list.append(key)
        cls.backend_type_map[key] = BackendType.CUSTOM
        setattr(cls, name.upper().replace("-", "_"), key)


def _takes(func: Callable[..., Any], count: int) -> bool:
    """True if a function can be called with so many arguments; of a compiled one it is assumed."""
    from inspect import signature

    how: dict[str, Any] = {}
    # By default Python 3.14 evaluates the annotations, which may name what only type checkers
    # import.
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        how["annotation_format"] = Format.FORWARDREF
    try:
        signature(func, **how).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        # A compiled function may have no signature.
        pass
    return True


def _from_function(
    name: str, func: Callable[..., Any], extended: bool, devices: str | list[str] | None
) -> type[BackendBase]:
    """A class whose ``create`` calls torch's kind of function; it has no instances."""

    def create(cls: type[BackendBase], context: Context) -> BackendBase:
        store, timeout = context.store, timedelta(seconds=context.timeout)
        if extended:
            ranks = list(context.ranks)
            options = BackendOptions(
                store, context.rank, context.size, timeout, context.name, ranks
            )
            made = func(options, context.options)
        else:
            made = func(store, context.rank, context.size, timeout)
        if not isinstance(made, BackendBase):
            raise BackendUnavailableError(
                f"backend {name!r}: {func!r} returned {made!r}, which is not a"
                " unicoll.backend.Backend"
            )
        # Groups that are split from this one call the function again, not the constructor of what
        # it returned.
        made.creator = cls
        return made

    caps = Caps(
        frozenset(
            ["cpu"] if devices is None else [devices] if isinstance(devices, str) else devices
        )
    )
    members = {"name": name, "caps": caps, "create": classmethod(create)}
    return type(f"{name}_by_function", (BackendBase,), members)


def _entry_points() -> dict[str, Callable[[], type[BackendBase]]]:
    from importlib.metadata import entry_points

    return {e.name.lower(): e.load for e in entry_points(group="unicoll.backends")}


def backend_names() -> list[str]:
    """Names of all backends that are registered or installed, available or not."""
    return sorted({*_BUILT_IN, *_registered, *_entry_points()})


def load(name: str) -> type[BackendBase]:
    """The class of a backend.

    Raises:
        BackendUnavailableError: unknown, or it cannot be imported; the message says which and why.
    """
    if name in _registered:
        return _class(name, _registered[name]())
    if name in _BUILT_IN:
        try:
            module = importlib.import_module(_BUILT_IN[name])
        except ImportError as e:
            raise BackendUnavailableError(f"backend {name!r}: {e}") from e
        maker = getattr(module, "backend_class", None)
        if maker is None:
            raise BackendUnavailableError(
                f"backend {name!r} is not part of this version of unicoll"
            )
        return _class(name, maker())
    installed = _entry_points()
    if name in installed:
        loaded: Any = installed[name]()
        return _class(name, loaded if isinstance(loaded, type) else loaded())
    raise BackendUnavailableError(
        f"there is no backend {name!r}; known are {', '.join(backend_names())}"
    )


def _class(name: str, found: Any) -> type[BackendBase]:
    if isinstance(found, type) and issubclass(found, BackendBase):
        return found
    raise BackendUnavailableError(
        f"backend {name!r}: {found!r} is not a class made from unicoll.backend.Backend"
    )


def reason_against(name: str) -> str | None:
    """Why a backend cannot be used here, or None if it can."""
    try:
        reason = load(name).availability()
    except BackendUnavailableError as e:
        return str(e)
    except Exception as e:
        # A third party's loader, or its availability(), may raise anything. That is a reason, too:
        # the choice of a backend goes on with the next one, and explain() shows it.
        reason = f"{type(e).__name__}: {e}"
    return None if reason is None else f"backend {name!r}: {reason}"


def status_line(name: str) -> str:
    """One line on a backend: the reason why it cannot be used in this process, or the library that
    it uses."""
    reason = reason_against(name)
    if reason is not None:
        return reason
    try:
        library = load(name).library()
    except Exception as e:
        library = f"{type(e).__name__}: {e}"
    return f"backend {name!r}: available{f': {library}' if library else ''}"


def devices_of(name: str, cls: type[BackendBase]) -> frozenset[str]:
    """The device types whose arrays a backend takes."""
    return _registered_devices.get(name, cls.caps.devices)


def registered_devices() -> dict[str, frozenset[str]]:
    """The device types of each backend that was registered with device types, by name."""
    return _registered_devices


class MPIWorld(NamedTuple):
    """MPI_COMM_WORLD: this process's rank in it, and the library.

    Attributes:
        rank, size: as MPI counts.
        library: name and version.
        stores: True if :func:`mpi_store` may be used.
        cuda: "direct" if arrays on a GPU are passed to the library by address, or staged, and how
            that is known.
    """

    rank: int
    size: int
    library: str
    stores: bool
    cuda: str


def mpi_world(timeout: float) -> MPIWorld:
    """MPI's processes; initialises MPI, which must be available. The process ends if that takes
    ``timeout`` seconds.

    Raises:
        BackendUnavailableError: it cannot be used in this process.
    """
    return MPIWorld(*importlib.import_module(_BUILT_IN["mpi"]).describe_mpi_world(timeout))


def mpi_store(deadline: float) -> Store:
    """A store over MPI, which all of MPI's processes open until ``deadline``
    (``time.monotonic()``)."""
    store: Store = importlib.import_module(_BUILT_IN["mpi"]).open_store(deadline)
    return store


def register_job_with_mpi(job: Job) -> None:
    """Register a job whose rendezvous was over MPI, with any backends; called on all ranks once
    they have joined.

    Then MPI is not finalised if ranks of the job have died, and an exception that ends all
    processes is sent to the job's ranks first.
    """
    importlib.import_module(_BUILT_IN["mpi"]).register_job(job)
