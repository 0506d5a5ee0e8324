"""The rendezvous: from an init method, a store or the launcher to a store that all ranks share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from urllib.parse import SplitResult, parse_qsl, urlsplit

from unicoll.bootstrap.enclosing_jobs import own_environment
from unicoll.bootstrap.launcher_table import TORCH_STYLE
from unicoll.bootstrap.launchers import LaunchInfo, address_hint, detect, master_of, near_misses
from unicoll.bootstrap.rendezvous_protocol import StoreLocation, agree_on_store
from unicoll.bootstrap.store_locations import (
    ExistingStoreLocation,
    FileLocation,
    Handler,
    HandlerLocation,
    LocalLocation,
    MPILocation,
    TCPLocation,
)
from unicoll.errors import DistArgumentError
from unicoll.net.control.departures import exit_key
from unicoll.net.control.join_warnings import warn_while_waiting
from unicoll.net.stores import PrefixStore, Store
from unicoll.net.wire import interfaces
from unicoll.net.wire.secret import Secret, find_secret
from unicoll.process import environment, logs

log = logs.logger("job")

Environ = Mapping[str, str]

PORTS_TO_TRY = 8
"""Number of ports for rank 0's store if none was specified: rank 0 uses the first free one, the
others search them."""

_BUILT_IN = ("env", "file", "tcp")
_handlers: dict[str, Handler] = {}


@dataclass
class Rendezvous:
    """The result of a rendezvous.

    Attributes:
        store: the store that all ranks share, in the namespace of this rendezvous.
        root: the same store without the namespace, for keys of unicoll's launcher.
        secret: the key of the data connections' handshakes (never empty), and its source.
        trusted: True if only holders of the job's secret, processes that MPI has started, or
            processes of this user (verified by the owner of their sockets or of the store's open
            file, or since they are threads of this process) can have taken part. Equal on all
            ranks, unless one of them cannot verify it.
        listen_addresses: the addresses of data connections, best first.
        launched: the launcher's information, if it applies to this rendezvous.
        notes: what was chosen, from which source and why; one line each.
        mpi_started: True if MPI is used, even if only for the store.
        mpi_reason: why MPI is not used for arrays although its launcher started the job; ""
            otherwise.
        store_ends_with_rank_0: True if the store may end with rank 0's process.
        address: of the store, and its source, for messages.
        exit_keys: those of :class:`Members`.
        replaced: returns True once another rendezvous has begun in the store (on rank 0: raises
            DistStoreError); None on other ranks if the store has no earlier job's values.
        fake: True if there are no other processes (:mod:`unicoll.bootstrap.fake_job`).
    """

    store: PrefixStore
    root: Store
    rank: int
    world_size: int
    secret: Secret
    trusted: bool
    listen_addresses: list[str]
    launched: LaunchInfo | None
    notes: list[str]
    _close: Callable[[], None] = field(repr=False)
    mpi_started: bool = False
    mpi_reason: str = ""
    store_ends_with_rank_0: bool = True
    address: str = ""
    exit_keys: Sequence[str] = ()
    replaced: Callable[[], bool] | None = None
    fake: bool = False

    def close(self) -> None:
        """Close the store, unless it is the caller's. Idempotent.

        If rank 0 hosts the store, its server runs until its last client has disconnected.
        """
        close, self._close = self._close, lambda: None
        close()


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Register a handler for ``init_method="<scheme>://..."`` (torch.distributed's function).

    ``handler(url, rank=..., world_size=..., timeout=...)`` is a generator function that yields one
    ``(store, rank, world_size)``. The URL also has rank and world size in its query, as torch's
    handlers expect; ``timeout`` is a ``timedelta``. The generator is closed together with the
    rendezvous.

    Raises:
        DistArgumentError: the scheme has a handler, or is not a valid scheme.
    """
    if not scheme.replace("+", "").replace("-", "").replace(".", "").isalnum():
        raise DistArgumentError(f"{scheme!r} is not a URL scheme")
    if scheme in _handlers or scheme in _BUILT_IN:
        raise DistArgumentError(f"a rendezvous handler for {scheme}:// is registered already")
    _handlers[scheme] = handler


@dataclass
class Members:
    """The members of a rendezvous and the location of its store, before this process meets the
    others.

    Attributes:
        rank, world_size: of this process, and of all.
        launched: the launcher's information, if it applies.
        secret: the job's secret; empty without one.
        location: of the store.
        notes: what was chosen, from which source and why.
        given_store: True if the caller gave the store, whose timeout then does not change.
        exit_keys: by rank, the key of the launcher's note on how the process ended.
    """

    rank: int
    world_size: int
    launched: LaunchInfo | None
    secret: Secret
    location: StoreLocation
    notes: list[str]
    given_store: bool
    exit_keys: Sequence[str]


def rendezvous(
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    store: Store | StoreLocation | None = None,
    timeout: float = 300.0,
    environ: Environ = os.environ,
    launched: LaunchInfo | None = None,
    mpi_store: Callable[[float], Store] | None = None,
    spare_store: Callable[[float], Store] | None = None,
    name: str = "",
    secret: Secret | None = None,
    use_launcher: bool = True,
) -> Rendezvous:
    """Find the other processes of the job: :func:`find_members`, then :func:`meet`, with all their
    errors."""
    found = find_members(
        init_method,
        rank,
        world_size,
        store,
        environ,
        launched,
        mpi_store,
        spare_store,
        secret,
        use_launcher,
    )
    if name:
        found.location.namespace += f"/{name}"
    return meet(found, timeout, environ, name)


def find_members(
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    store: Store | StoreLocation | None = None,
    environ: Environ = os.environ,
    launched: LaunchInfo | None = None,
    mpi_store: Callable[[float], Store] | None = None,
    spare_store: Callable[[float], Store] | None = None,
    secret: Secret | None = None,
    use_launcher: bool = True,
) -> Members:
    """Rank, world size and location of the store, from the arguments and the environment; opens
    nothing.

    Args:
        init_method: ``"env://"`` (None means it), ``"tcp://host:port"``, ``"file:///path"`` or a
            registered scheme; rank and world size may be in the query, ``?rank=0&world_size=4``.
        rank, world_size: -1 if the query or the launcher gives them; arguments have priority over
            the launcher.
        store: a store that all ranks share, or its location, instead of an init method.
        launched: the launcher's information; None reads it from the environment.
        mpi_store: opens a store over MPI, if MPI has been chosen; used if MASTER_ADDR is not set.
        spare_store: opens a store over MPI; used if ``env://`` gives no address at all.
        secret: the job's secret; None reads it from the environment.
        use_launcher: False if the launcher has started other processes than those of this job.

    With ``env://`` the store is the launcher's (``UNICOLL_STORE=host:port``), or rank 0 hosts it at
    ``MASTER_ADDR`` and ``MASTER_PORT`` or at the address of the launcher's variables
    (:mod:`unicoll.bootstrap.launchers`). torchrun's agent listens on ``MASTER_PORT`` itself
    (``TORCHELASTIC_USE_AGENT_STORE=True``); then rank 0 uses the first free one of the next eight
    ports. A world of size 1 without an address opens no port.

    Raises:
        DistArgumentError: rank or world size is missing, contradictory or out of range, the URL or
            a variable is invalid; the message says what to set.
    """
    if store is not None and init_method is not None:
        raise DistArgumentError("give init_method or store, not both")
    url = parse_init_method(init_method if init_method is not None else "env://")
    notes: list[str] = []
    environ = _own_environment(environ, notes)
    rank, world_size, launched = members(url, rank, world_size, environ, notes, launched)
    if not use_launcher:
        launched = None
    secret = secret or find_secret(environ)
    location = _location(
        url, rank, world_size, store, launched, secret, environ, mpi_store, spare_store
    )
    exit_keys = [*map(exit_key, range(world_size))]
    return Members(
        rank, world_size, launched, secret, location, notes, store is not None, exit_keys
    )


def meet(
    found: Members, timeout: float = 300.0, environ: Environ = os.environ, name: str = ""
) -> Rendezvous:
    """The rendezvous of these members.

    Args:
        timeout: seconds for the whole rendezvous.
        name: of the job; jobs of different names may use one store at the same time.

    Raises:
        AuthenticationError: the ranks have different secrets.
        StoreTimeoutError, DistNetworkError: rank 0 or its store did not appear in time; the message
            names the address.
        DistStoreError: another process has this rank.
    """
    rank, world_size, launched = found.rank, found.world_size, found.launched
    secret, location, notes = found.secret, found.location, found.notes
    deadline = time.monotonic() + timeout
    single_host = world_size == 1 or (launched is not None and launched.single_host)
    # Only the processes of MPI's own launcher use such a store, so no launcher's job is compared.
    over_mpi = isinstance(location, MPILocation)
    job = launched.job if launched is not None and not over_mpi else ""
    with warn_while_waiting(
        name, lambda: f"{'rank 0; ' if rank else ''}the store: {location.describe()}"
    ):
        choose = partial(
            interfaces.listen_addresses, location.master_host, environ, single_host=single_host
        )
        if isinstance(location, TCPLocation):
            listen = interfaces.once_resolved(location.master_host, choose, deadline, log.warning)
        else:
            listen = choose()
        if (
            not secret.key
            and location.master_host is not None
            and not interfaces.is_loopback(location.master_host)
        ):
            # The check is made now: later, rank 0 would end before the others have connected.
            refuse_protection(environ)
        agreed = agree_on_store(location, rank, world_size, secret, deadline, job)
    if not found.given_store:
        agreed.store.set_timeout(timedelta(seconds=timeout))
    notes.append(f"store: {location.describe()}")
    notes.append(f"secret: {_describe_secret(secret, agreed.trusted)}")
    if (channel := environment.choice("UNICOLL_CHANNEL", environ)) != "plain":
        notes.append(f"connections between hosts: {channel}, from UNICOLL_CHANNEL")
    notes.append(f"interface: {', '.join(listen.addresses)}: {listen.reason}")
    return Rendezvous(
        store=agreed.store,
        root=agreed.root,
        rank=agreed.rank,
        world_size=agreed.world_size,
        secret=Secret(agreed.key, secret.source if secret.key else "rank 0, through the store"),
        trusted=agreed.trusted,
        listen_addresses=listen.addresses,
        launched=launched,
        notes=notes,
        _close=lambda: location.close(linger=True),
        store_ends_with_rank_0=location.ends_with_rank_0,
        mpi_started=over_mpi,
        address=location.describe(),
        exit_keys=found.exit_keys,
        replaced=(
            partial(agreed.is_replaced, location.namespace, secret.key)
            if location.outlives_jobs or agreed.rank == 0
            else None
        ),
    )


def open_store(found: Members, timeout: float) -> Rendezvous:
    """The store of these members, in the namespace ``shared``, before any of the others is met."""
    location = found.location
    root = location.open(found.rank, found.world_size, time.monotonic() + timeout)
    return Rendezvous(
        PrefixStore("shared", root),
        root,
        found.rank,
        found.world_size,
        found.secret,
        bool(found.secret.key) or location.private(),
        [location.master_host or "127.0.0.1"],
        found.launched,
        found.notes,
        lambda: location.close(linger=True),
        store_ends_with_rank_0=location.ends_with_rank_0,
        address=location.describe(),
        exit_keys=found.exit_keys,
    )


def refuse_protection(environ: Environ = os.environ) -> None:
    """Raise DistArgumentError if UNICOLL_CHANNEL is set in a job whose key other processes may
    have."""
    wanted = environment.choice("UNICOLL_CHANNEL", environ)
    if wanted != "plain":
        raise DistArgumentError(
            f"UNICOLL_CHANNEL={wanted} cannot protect this job: any process that reaches the store"
            " can join; give every rank the same UNICOLL_SECRET or UNICOLL_SECRET_FILE"
        )


def _describe_secret(secret: Secret, trusted: bool) -> str:
    if secret.key:
        return secret.source
    access = (
        "which no other user can reach"
        if trusted
        else "which is OPEN to all processes that can reach it"
    )
    return (
        f"none was given; rank 0 made a key and sent it to the others through the store, {access}"
    )


def parse_init_method(init_method: str) -> SplitResult:
    known = ", ".join(f"{scheme}://" for scheme in (*_BUILT_IN, *sorted(_handlers)))
    if not isinstance(init_method, str):
        raise DistArgumentError(
            f"init_method must be a string such as 'env://', not {init_method!r}"
        )
    try:
        url = urlsplit(init_method)
    except ValueError as error:
        raise DistArgumentError(f"init_method {init_method!r} cannot be read: {error}") from error
    if url.scheme not in _BUILT_IN and url.scheme not in _handlers:
        raise DistArgumentError(
            f"init_method {init_method!r} has no known scheme; known are {known}"
        )
    return url


def gives_members(init_method: str | None, rank: int, world_size: int) -> bool:
    """True if arguments or URL give the rank or the world size."""
    url = parse_init_method(init_method if init_method is not None else "env://")
    return (rank, world_size) != (-1, -1) or bool(_query(url))


def members(
    url: SplitResult,
    rank: int,
    world_size: int,
    environ: Environ,
    notes: list[str],
    launched: LaunchInfo | None = None,
) -> tuple[int, int, LaunchInfo | None]:
    """Rank and world size from arguments, query and launcher; and the launcher's information if it
    applies."""
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
    launched = launched or _detect(environ, needed=not complete, notes=notes)
    if launched is not None and not complete:
        sources.append(f"{launched.source} ({launched.name})")
    this_rank = _default(values["rank"], launched.rank if launched else None)
    size = _default(values["world_size"], launched.world_size if launched else None)
    if this_rank is None or size is None:
        if url.scheme in _BUILT_IN:
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


def _detect(environ: Environ, *, needed: bool, notes: list[str]) -> LaunchInfo | None:
    try:
        return detect(environ)
    except DistArgumentError as error:
        if needed:
            raise
        notes.append(f"launcher ignored: {error}")
        return None


def _own_environment(environ: Environ, notes: list[str]) -> Environ:
    try:
        own = own_environment(environ)
    except DistArgumentError:
        # The launcher's variables raise it if they are needed.
        return environ
    ignored = [f"{name}={environ[name]}" for name in sorted(environ.keys() - own.keys())]
    if ignored:
        notes.append(f"variables of an enclosing job are ignored: {', '.join(ignored)}")
    return own


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
        elif name != "use_libuv" and url.scheme in _BUILT_IN:
            raise DistArgumentError(
                f"init_method {url.geturl()}: unknown parameter {name!r}; known are rank and"
                " world_size"
            )
    return found


def _missing_members_message(values: Mapping[str, int | None], environ: Environ) -> str:
    missing = " and ".join(name for name, value in values.items() if value is None)
    reasons = near_misses(environ)
    seen = f" (seen: {'; '.join(reasons)})" if reasons else ""
    return (
        f"unknown {missing} of this process: no launcher was recognised{seen}. Start the processes"
        " with `unirun --nproc-per-node N script.py`, mpirun, srun or torchrun; or set RANK,"
        " WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each (rank or size may be in the call); or"
        " pass rank= and world_size= together with init_method='tcp://host:port',"
        " init_method='file:///path' or store="
    )


# --- locations of the store -----------------------------------------------------------------------


def _location(
    url: SplitResult,
    rank: int,
    world_size: int,
    store: Store | StoreLocation | None,
    launched: LaunchInfo | None,
    secret: Secret,
    environ: Environ,
    mpi_store: Callable[[float], Store] | None,
    spare_store: Callable[[float], Store] | None,
) -> StoreLocation:
    if store is not None:
        return store if isinstance(store, StoreLocation) else ExistingStoreLocation(store)
    if url.scheme == "tcp":
        return _tcp_location(url, secret, launched)
    if url.scheme == "file":
        return FileLocation(_file_path(url))
    if url.scheme == "env":
        return _env_location(rank, world_size, launched, secret, environ, mpi_store, spare_store)
    return HandlerLocation(_handlers[url.scheme], url)


def _tcp_location(url: SplitResult, secret: Secret, launched: LaunchInfo | None) -> TCPLocation:
    form = "write tcp://host:port, an IPv6 address in brackets as in tcp://[::1]:29500"
    if url.path not in ("", "/"):
        raise DistArgumentError(f"init_method {url.geturl()}: {form}")
    try:
        host, port = interfaces.split_hostport(url.netloc)
    except DistArgumentError as error:
        raise DistArgumentError(f"init_method {url.geturl()}: {error}; {form}") from error
    single_host = launched is not None and launched.single_host
    return TCPLocation(host, [port], "init_method", secret, single_host=single_host)


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
    rank: int,
    world_size: int,
    launched: LaunchInfo | None,
    secret: Secret,
    environ: Environ,
    mpi_store: Callable[[float], Store] | None,
    spare_store: Callable[[float], Store] | None,
) -> StoreLocation:
    single_host = launched is not None and launched.single_host
    host: str | None
    port: int | None
    if launched is not None and environ.get("UNICOLL_STORE"):
        host, port = interfaces.split_hostport(environ["UNICOLL_STORE"])
        return TCPLocation(
            host, [port], "UNICOLL_STORE", secret, hosted=True, single_host=single_host
        )
    if world_size == 1:
        return LocalLocation()
    if mpi_store is not None and not environ.get("MASTER_ADDR", "").strip():
        return MPILocation(mpi_store, launched.master_addr if launched is not None else None)
    if launched is None:
        host, port = master_of(environ)
        ports: Sequence[int] = () if port is None else (port,)
        source, job, hint = "MASTER_ADDR, MASTER_PORT", "", address_hint(TORCH_STYLE, host, port)
    else:
        host, ports = launched.master_addr, _ports(launched, environ)
        source, job, hint = launched.master_source, launched.job, launched.master_hint
        if launched.port_fixed and len(ports) > 1:
            source += "; torchrun's agent uses that port itself"
    if (host is None or not ports) and spare_store is not None:
        return MPILocation(spare_store, None)
    if (
        host is None
        and ports
        and rank == 0
        and (launched is None or launched.name == TORCH_STYLE.name)
    ):
        own = interfaces.listen_addresses(None, environ).addresses[0]
        source = "MASTER_PORT; MASTER_ADDR is not set on rank 0, which listens on all interfaces"
        return TCPLocation(own, ports, source, secret, all_interfaces=True, job=job)
    if host is None or not ports:
        raise DistArgumentError(f"no address for the rendezvous: {hint}")
    return TCPLocation(host, ports, source, secret, single_host=single_host, job=job)


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
