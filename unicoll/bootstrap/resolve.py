"""The first step of joining a job: what was asked, and what arguments and environment give for it.

:func:`resolve` says who this process is, where the processes meet, and which backends serve the
default group. It connects to nothing. It is the only place that reads the launcher's variables: all
later steps take what it has found (:class:`Resolved`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlsplit

from unicoll.bootstrap import enclosing_jobs, launchers, mpi_launch, process_end
from unicoll.bootstrap.launcher_table import TORCH_STYLE, Environ
from unicoll.bootstrap.launchers import LaunchInfo
from unicoll.bootstrap.mpi_launch import MPIStart
from unicoll.bootstrap.rendezvous_protocol import StoreLocation
from unicoll.bootstrap.store_locations import (
    BUILT_IN,
    ExistingStoreLocation,
    FileLocation,
    HandlerLocation,
    LauncherStoreLocation,
    LocalLocation,
    MPILocation,
    OpenLocation,
    TCPLocation,
    handlers,
)
from unicoll.errors import DistArgumentError
from unicoll.group import backend_choice
from unicoll.group.backend_choice import BackendChoice
from unicoll.net.control.departures import exit_key
from unicoll.net.stores import Store
from unicoll.net.wire import interfaces
from unicoll.net.wire.secret import Secret, find_secret, new_key
from unicoll.process import debug_level, environment, logs

log = logs.logger("job")

PORTS_TO_TRY = 8
"""Number of ports for rank 0's store if none was specified: rank 0 uses the first free one, the
others search them."""

Backends = str | Sequence[BackendChoice] | None
"""The backends of a group: a text as the user names them, None to choose them, or the choices."""


@dataclass(frozen=True)
class JoinRequest:
    """What was asked of one join.

    Attributes:
        backend: of the default group.
        init_method: ``"env://"`` (None means it), ``"tcp://host:port"``, ``"file:///path"`` or a
            registered scheme; rank and world size may be in the query, ``?rank=0&world_size=4``.
        rank, world_size: -1 if the query or the launcher gives them; these have priority over the
            launcher.
        store: a store that all ranks share, or its location, instead of an init method.
        timeout: default timeout of the group's operations, seconds.
        join_timeout: seconds to join.
        name: of the job, see :func:`unicoll.join`; jobs of different names may use one store at the
            same time. A job with a name whose ranks are given is not the launcher's.
        secret: the job's secret; None reads it from the environment.
        pg_options, device_id: of the default group.
        makes_group: False if the job begins without a default group.
    """

    backend: Backends = None
    init_method: str | None = None
    rank: int = -1
    world_size: int = -1
    store: Store | StoreLocation | None = None
    timeout: float = 1800.0
    join_timeout: float = 300.0
    name: str = ""
    secret: Secret | None = None
    pg_options: Any = None
    device_id: Any = None
    makes_group: bool = True

    override: ClassVar[str | None] = None
    """The backend of every join of this process, whatever the program asks for; None for the
    program's own. For ``python -m unicoll.trace.summary``."""

    @property
    def wanted(self) -> Backends:
        """:attr:`backend`, or :attr:`override`."""
        return self.override or self.backend


@dataclass(frozen=True)
class Resolved:
    """What a join uses, before this process meets the others.

    Attributes:
        rank, world_size: of this process, and of all; -1 if a handler determines them.
        launched: the launcher's information, if it applies.
        secret: the job's secret; empty without one.
        location: of the store.
        backend: :attr:`JoinRequest.wanted`.
        choices: the backends of the default group.
        mpi: how MPI takes part.
        interfaces: the variables that select network interfaces.
        channel: the value of UNICOLL_CHANNEL.
        allows_pickle: the value of UNICOLL_ALLOW_PICKLE.
        notes: what was chosen, from which source and why; one line each.
        given_store: True if the caller gave the store, whose timeout then does not change.
        exit_keys: by rank, the key of the launcher's note on how the process ended.
        fake: True if there are no other processes: this one is alone, as any rank of any world
            size, and every group has the backend ``fake``.
    """

    rank: int
    world_size: int
    launched: LaunchInfo | None
    secret: Secret
    location: StoreLocation
    backend: Backends
    choices: Sequence[BackendChoice]
    mpi: MPIStart
    interfaces: Environ = field(default_factory=dict)
    channel: str = "plain"
    allows_pickle: bool = True
    notes: Sequence[str] = ()
    given_store: bool = False
    exit_keys: Sequence[str] = ()
    fake: bool = False

    @property
    def mpi_started(self) -> bool:
        """True if MPI is used, even if only for the store."""
        return self.mpi.started or isinstance(self.location, MPILocation)

    def choose(self, backend: Backends) -> Sequence[BackendChoice]:
        """The backends of a group of this job."""
        by_mpi = self.launched is not None and self.launched.started_by_mpi
        return _choose(backend, by_mpi, self.mpi.reason)


def apply_environment(environ: Environ | None = None) -> None:
    """Check unicoll's variables and apply the debug level, before anything else that joining a job
    does.

    Raises:
        DistArgumentError: a variable has an unknown value.
    """
    # This comes first, so that the errors below are shown without unicoll's frames.
    process_end.install_excepthook()
    environment.check(environ)
    debug_level.apply()
    environment.warn_of_unknown(environ)


def resolve(request: JoinRequest, environ: Environ | None = None) -> Resolved:
    """What arguments and environment give for a join; connects to nothing.

    With ``env://`` the store is the launcher's (``UNICOLL_STORE=host:port``), or rank 0 hosts it at
    ``MASTER_ADDR`` and ``MASTER_PORT`` or at the address of the launcher's variables
    (:mod:`unicoll.bootstrap.launchers`). torchrun's agent listens on ``MASTER_PORT`` itself
    (``TORCHELASTIC_USE_AGENT_STORE=True``); then rank 0 uses the first free one of the next eight
    ports. A world of size 1 without an address opens no port.

    Args:
        environ: None: that of this process.

    Raises:
        DistArgumentError: arguments and environment do not give rank and world size, or contradict
            each other; the URL or a variable is invalid; the process is a subprocess of one that
            has joined in its place. The message says what to set.
        BackendUnavailableError: the backend cannot be used on this machine; the message has the
            reason.
    """
    # A copy: each look at os.environ encodes a name and decodes a value. The steps below look some
    # two hundred times.
    environ = {**os.environ} if environ is None else environ
    apply_environment(environ)
    if request.store is not None and request.init_method is not None:
        raise DistArgumentError("give init_method or store, not both")
    url = _parse(request.init_method if request.init_method is not None else "env://")
    given = (request.rank, request.world_size) != (-1, -1) or bool(_query(url))
    use_launcher = not (request.name and given)
    notes: list[str] = []
    launcher = _find_launcher(environ, notes)
    by_mpi = (
        use_launcher
        and launcher.fault is None
        and mpi_launch.is_default(request, launcher.found, launcher.environ)
    )
    # A backend that cannot be used fails before other ranks wait for this one.
    choices = _choose(request.wanted, by_mpi)
    fake, mpi = backend_choice.is_fake(choices), MPIStart()
    if not fake:
        log.info("joining: process %d", os.getpid())
        if not given and request.store is None:
            # This comes before the lines that may start MPI.
            enclosing_jobs.refuse_subprocess(launcher.found, environ)
        if use_launcher:
            mpi = mpi_launch.start(request, launcher.found, choices, by_mpi)
            notes[:0] = mpi.notes
    if mpi.launched is not None:
        launcher = launcher._replace(found=mpi.launched, fault=None, of_mpi=True)
    asked = (-1, -1) if mpi.decides else (request.rank, request.world_size)
    rank, world_size, launched = _members(url, *asked, launcher, notes)
    if not use_launcher:
        launched = None
    of_mpi = launched is not None and launched.started_by_mpi
    if (of_mpi, mpi.reason) != (by_mpi, ""):
        # Only now is it known that MPI's launcher has started other processes than these, or that
        # MPI does not serve the arrays.
        choices = _choose(request.wanted, of_mpi, mpi.reason)
    own = launcher.environ
    if fake:
        secret = Secret(new_key(), "none")
        location: StoreLocation = LocalLocation()
        notes.append("store: in this process, which communicates with no other one")
    else:
        secret = request.secret or find_secret(own)
        location = _location(request, url, (rank, world_size, launched), secret, own, mpi)
    if request.name:
        location.namespace += f"/{request.name}"
    return Resolved(
        rank=rank,
        world_size=world_size,
        launched=launched,
        secret=secret,
        location=location,
        backend=request.wanted,
        choices=choices,
        mpi=mpi,
        interfaces={name: own[name] for name in interfaces.VARIABLES if name in own},
        channel=environment.choice("UNICOLL_CHANNEL", own),
        allows_pickle=bool(environment.flag("UNICOLL_ALLOW_PICKLE", own)),
        notes=notes,
        given_store=request.store is not None,
        exit_keys=[*map(exit_key, range(world_size))],
        fake=fake,
    )


def _choose(backend: Backends, by_mpi: bool, against_mpi: str = "") -> Sequence[BackendChoice]:
    if backend is None or isinstance(backend, str):
        return backend_choice.choose(backend, by_mpi, against_mpi)
    return backend


# --- rank and world size --------------------------------------------------------------------------


class _Launcher(NamedTuple):
    """The launcher of this process.

    Attributes:
        environ: the environment without variables of launchers of enclosing jobs.
        found: the launcher's information; None without a launcher.
        fault: why its variables are wrong; None if they are not.
        of_mpi: True if MPI has confirmed the information, or is its source.
    """

    environ: Environ
    found: LaunchInfo | None
    fault: DistArgumentError | None
    of_mpi: bool = False


def _find_launcher(environ: Environ, notes: list[str]) -> _Launcher:
    own = environ
    try:
        own = enclosing_jobs.own_environment(environ)
        if ignored := [f"{name}={environ[name]}" for name in sorted(environ.keys() - own.keys())]:
            notes.append(f"variables of an enclosing job are ignored: {', '.join(ignored)}")
        return _Launcher(own, launchers.first_complete(own), None)
    except DistArgumentError as fault:
        # It is raised if the launcher is needed; with complete arguments it is not.
        return _Launcher(own, None, fault)


def _members(
    url: SplitResult, rank: int, world_size: int, launcher: _Launcher, notes: list[str]
) -> tuple[int, int, LaunchInfo | None]:
    """Rank and world size from arguments, query and launcher; and the launcher's information if it
    applies."""
    environ, launched, fault, of_mpi = launcher
    values = {"rank": _argument("rank", rank), "world_size": _argument("world_size", world_size)}
    sources = ["arguments"] if any(value is not None for value in values.values()) else []
    for name, value in _query(url).items():
        if values[name] not in (None, value):
            raise DistArgumentError(f"{name}={values[name]} contradicts init_method={url.geturl()}")
        values[name] = value
        sources.append("init_method")
    complete = None not in values.values()
    if not complete:
        # as in torch.distributed, one of the two may be in the call and the other one in the
        # environment
        variables = {"rank": TORCH_STYLE.rank, "world_size": TORCH_STYLE.size[0]}
        given = {variables[name]: str(value) for name, value in values.items() if value is not None}
        environ = {**environ, **given}
        if given and not of_mpi:
            launched = launchers.detect(environ)
        elif fault is not None:
            raise fault
    elif fault is not None:
        notes.append(f"launcher ignored: {fault}")
    if launched is not None and not complete:
        sources.append(f"{launched.source} ({launched.name})")
    this_rank = _default(values["rank"], launched.rank if launched else None)
    size = _default(values["world_size"], launched.world_size if launched else None)
    if this_rank is None or size is None:
        if url.scheme in BUILT_IN:
            raise DistArgumentError(_missing_members_message(values, environ))
        # The handler may determine them; torch passes -1 for that.
        return -1 if this_rank is None else this_rank, -1 if size is None else size, None
    if not 0 <= this_rank < size:
        raise DistArgumentError(f"rank {this_rank} is not below world_size {size}")
    notes.append(f"rank {this_rank} of {size}: from {', '.join(dict.fromkeys(sources))}")
    if launched is not None and (launched.rank, launched.world_size) != (this_rank, size):
        notes.append(
            f"different from the launcher: rank {launched.rank} of {launched.world_size}, "
            f"from {launched.source} ({launched.name})"
        )
        if launched.world_size != size:
            # These are other processes than the launcher's, with their own hosts, store and job.
            launched = None
    return this_rank, size, launched


def _default(value: int | None, default: int | None) -> int | None:
    return default if value is None else value


def _argument(name: str, value: int) -> int | None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise DistArgumentError(f"{name} must be a whole number, not {value!r}")
    number = value.__index__()
    if number < -1 or (name == "world_size" and number == 0):
        raise DistArgumentError(
            f"{name} must be {0 if name == 'rank' else 1} or more, not {number}"
        )
    return None if number == -1 else number


def _query(url: SplitResult) -> dict[str, int]:
    """rank and world_size from the URL; torch's use_libuv is accepted without effect."""
    found: dict[str, int] = {}
    for name, text in parse_qsl(url.query, keep_blank_values=True):
        if name in ("rank", "world_size"):
            if not (text.isascii() and text.isdigit()) or (name == "world_size" and int(text) == 0):
                raise DistArgumentError(
                    f"init_method {url.geturl()}: {name}={text!r} is not a valid number"
                )
            found[name] = int(text)
        elif name != "use_libuv" and url.scheme in BUILT_IN:
            raise DistArgumentError(
                f"init_method {url.geturl()}: unknown parameter {name!r}; known are rank and"
                " world_size"
            )
    return found


def _missing_members_message(values: Mapping[str, int | None], environ: Environ) -> str:
    missing = " and ".join(name for name, value in values.items() if value is None)
    reasons = launchers.near_misses(environ)
    seen = f" (seen: {'; '.join(reasons)})" if reasons else ""
    return (
        f"unknown {missing} of this process: no launcher was recognised{seen}. Start the processes"
        " with `unirun --nproc-per-node N script.py`, mpirun, srun or torchrun; or set RANK,"
        " WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each (rank or size may be in the call); or"
        " pass rank= and world_size= together with init_method='tcp://host:port',"
        " init_method='file:///path' or store="
    )


def _parse(init_method: str) -> SplitResult:
    if not isinstance(init_method, str):
        raise DistArgumentError(
            f"init_method must be a string such as 'env://', not {init_method!r}"
        )
    try:
        url = urlsplit(init_method)
    except ValueError as error:
        raise DistArgumentError(f"init_method {init_method!r} cannot be read: {error}") from error
    if url.scheme not in BUILT_IN and url.scheme not in handlers:
        known = ", ".join(f"{scheme}://" for scheme in (*BUILT_IN, *sorted(handlers)))
        raise DistArgumentError(
            f"init_method {init_method!r} has no known scheme; known are {known}"
        )
    return url


# --- the location of the store -----------------------------------------------------------------------


def _location(
    request: JoinRequest,
    url: SplitResult,
    members: tuple[int, int, LaunchInfo | None],
    secret: Secret,
    environ: Environ,
    mpi: MPIStart,
) -> StoreLocation:
    given = request.store
    if given is not None:
        return given if isinstance(given, StoreLocation) else ExistingStoreLocation(given)
    if url.scheme == "tcp":
        return _tcp_location(url, secret, members[2])
    if url.scheme == "file":
        return FileLocation(_file_path(url))
    if url.scheme == "env":
        return _env_location(members, secret, environ, mpi)
    return HandlerLocation(handlers[url.scheme], url)


def _tcp_location(url: SplitResult, secret: Secret, launched: LaunchInfo | None) -> TCPLocation:
    form = "write tcp://host:port, an IPv6 address in brackets as in tcp://[::1]:29500"
    if url.path not in ("", "/"):
        raise DistArgumentError(f"init_method {url.geturl()}: {form}")
    try:
        host, port = interfaces.split_hostport(url.netloc)
    except DistArgumentError as error:
        raise DistArgumentError(f"init_method {url.geturl()}: {error}; {form}") from error
    return TCPLocation(host, [port], "init_method", secret, launched)


def _file_path(url: SplitResult) -> str:
    if url.netloc not in ("", "localhost") or not url.path.startswith("/"):
        wanted = os.path.abspath(url.netloc + url.path)
        raise DistArgumentError(
            f"init_method {url.geturl()}: the path must be absolute, with three slashes:"
            f" file://{wanted}"
        )
    if url.path.endswith("/"):
        raise DistArgumentError(f"init_method {url.geturl()} names no file")
    return url.path


def _env_location(
    members: tuple[int, int, LaunchInfo | None], secret: Secret, environ: Environ, mpi: MPIStart
) -> StoreLocation:
    rank, world_size, launched = members
    host: str | None
    port: int | None
    if launched is not None and environ.get("UNICOLL_STORE"):
        host, port = interfaces.split_hostport(environ["UNICOLL_STORE"])
        return LauncherStoreLocation(host, [port], "UNICOLL_STORE", secret, launched)
    if world_size == 1:
        return LocalLocation()
    if mpi.store is not None and not environ.get("MASTER_ADDR", "").strip():
        return MPILocation(mpi.store, launched.master_addr if launched is not None else None)
    if launched is None:
        host, port = launchers.master_of(environ)
        ports: Sequence[int] = () if port is None else (port,)
        source = "MASTER_ADDR, MASTER_PORT"
        hint = launchers.address_hint(TORCH_STYLE, host, port)
    else:
        host, ports = launched.master_addr, _ports(launched, environ)
        source, hint = launched.master_source, launched.master_hint
        if launched.port_fixed and len(ports) > 1:
            source += "; torchrun's agent uses that port itself"
    if (host is None or not ports) and mpi.spare_store is not None:
        return MPILocation(mpi.spare_store, None)
    if (
        host is None
        and ports
        and rank == 0
        and (launched is None or launched.name == TORCH_STYLE.name)
    ):
        own = interfaces.listen_addresses(None, environ).addresses[0]
        source = "MASTER_PORT; MASTER_ADDR is not set on rank 0, which listens on all interfaces"
        return OpenLocation(own, ports, source, secret, launched)
    if host is None or not ports:
        raise DistArgumentError(f"no address for the rendezvous: {hint}")
    return TCPLocation(host, ports, source, secret, launched)


def _ports(launched: LaunchInfo, environ: Environ) -> Sequence[int]:
    """The ports that rank 0's store may use; equal on all ranks."""
    port = launched.master_port
    if port is None:
        return ()
    if not launched.port_fixed:
        return range(port, port + PORTS_TO_TRY)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        last = min(port + PORTS_TO_TRY, 65535)
        return range(port + 1, last + 1) if last > port else range(port - PORTS_TO_TRY, port)
    return range(port, port + 1)
