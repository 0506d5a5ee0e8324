"""How the processes of a job meet: from an init method, a store or the launcher to a store that all ranks
share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from urllib.parse import SplitResult, parse_qsl, urlsplit

from unicoll import net, settings
from unicoll.auth import Secret, find_secret
from unicoll.errors import DistArgumentError
from unicoll.launchers import Launched, detect, near_misses
from unicoll.meeting import Place, meet
from unicoll.places import FilePlace, GivenPlace, Handler, HandlerPlace, LocalPlace, MPIPlace, TCPPlace
from unicoll.stores import PrefixStore, Store

__all__ = ["Rendezvous", "refuse_protection", "register_rendezvous_handler", "rendezvous"]

Environ = Mapping[str, str]

PORTS_TO_TRY = 8
"""Where no port was given for our store, rank 0 takes the first free one of so many, and the others look
there."""

_BUILT_IN = ("env", "file", "tcp")
_handlers: dict[str, Handler] = {}


@dataclass
class Rendezvous:
    """A meeting that took place.

    Attributes:
        store: the store that all ranks share, in a name space of this meeting.
        root: the same store without the name space; what our launcher publishes is there.
        rank, world_size: of this process, and the number of processes.
        secret: the key under which the data connections prove themselves (never empty), and its source.
        trusted: whether only holders of the job's secret, processes that MPI started, or processes of this user
            (known by the owner of their sockets, of the store's open file, or since they are threads of this
            process) can have taken part. Equal on all ranks unless one cannot tell.
        listen_addresses, listen_reason: where this process accepts data connections, best first, and why
            there.
        local_rank, local_world_size: among the processes of this host; None where no launcher said.
        launched: what the launcher said, where it applies to this meeting.
        notes: what was chosen, from which source, why; one line each.
        mpi_started: whether MPI is used, be it only for the store.
        mpi_but: why MPI does not serve the arrays, though its launcher started us; "" otherwise.
    """

    store: PrefixStore
    root: Store
    rank: int
    world_size: int
    secret: Secret
    trusted: bool
    listen_addresses: list[str]
    listen_reason: str
    local_rank: int | None
    local_world_size: int | None
    launched: Launched | None
    notes: list[str]
    _close: Callable[[], None] = field(repr=False)
    mpi_started: bool = False
    mpi_but: str = ""

    @property
    def listen_host(self) -> str:
        """The first of :attr:`listen_addresses`."""
        return self.listen_addresses[0]

    def close(self) -> None:
        """Close what the meeting opened, but not a store that the caller gave; again, it does nothing.

        Where rank 0 hosts the store, its server goes on until late peers have left.
        """
        close, self._close = self._close, lambda: None
        close()


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Make ``init_method="<scheme>://..."`` known (torch.distributed's function).

    ``handler(url, rank=..., world_size=..., timeout=...)`` is a generator function that yields one
    ``(store, rank, world_size)``. The URL carries rank and world size in its query too, as torch's handlers
    expect; ``timeout`` is a ``timedelta``. The generator is closed when the meeting is.

    Raises:
        DistArgumentError: the scheme is taken or is no word.
    """
    if not scheme.replace("+", "").replace("-", "").replace(".", "").isalnum():
        raise DistArgumentError(f"{scheme!r} is not a URL scheme")
    if scheme in _handlers or scheme in _BUILT_IN:
        raise DistArgumentError(f"there is a rendezvous handler for {scheme}:// already")
    _handlers[scheme] = handler


def rendezvous(
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    store: Store | Place | None = None,
    timeout: float = 300.0,
    environ: Environ = os.environ,
    launched: Launched | None = None,
    mpi_store: Callable[[float], Store] | None = None,
) -> Rendezvous:
    """Meet the other processes of the job.

    Args:
        init_method: ``"env://"`` (None means it), ``"tcp://host:port"``, ``"file:///path"`` or a registered
            scheme; rank and world size may stand in the query, ``?rank=0&world_size=4``.
        rank, world_size: -1 where the query or the launcher gives them; what is given here wins over the
            launcher.
        store: a store that all ranks share, or the place where it is, instead of an init method.
        timeout: seconds for the whole meeting.
        launched: the launcher, where the caller knows it; None looks into the environment.
        mpi_store: opens a store over MPI, where MPI has been chosen; it serves where ``env://`` gives no address.

    With ``env://`` the store is the launcher's (``UNICOLL_STORE=host:port``), or rank 0 hosts it at
    ``MASTER_ADDR`` and ``MASTER_PORT`` or where the launcher's variables say (:mod:`unicoll.launchers`).
    torchrun's agent keeps ``MASTER_PORT`` for itself (``TORCHELASTIC_USE_AGENT_STORE=True``); there rank 0
    takes the first free one of the eight ports after it. A single process with no address meets nobody and
    opens no port.

    Raises:
        DistArgumentError: rank or world size is missing, contradictory or out of range, the URL or a variable
            is wrong; the message says what to set.
        AuthenticationError: the ranks do not hold the same secret.
        StoreTimeoutError, DistNetworkError: rank 0 or its store did not appear in time; the message names the
            address.
        DistStoreError: another process has this rank.
    """
    if store is not None and init_method is not None:
        raise DistArgumentError("give init_method or store, not both")
    deadline = time.monotonic() + timeout
    url = _parse(init_method if init_method is not None else "env://")
    notes: list[str] = []
    rank, world_size, launched = _members(url, rank, world_size, environ, notes, launched)
    secret = find_secret(environ)
    place = _place(url, world_size, store, launched, secret, environ, mpi_store)
    single_host = world_size == 1 or (launched is not None and launched.single_host)
    listen = net.listen_addresses(place.master_host, environ, single_host=single_host)
    if not secret.key and place.master_host is not None and not net.is_loopback(place.master_host):
        refuse_protection(environ)  # here, since rank 0 would leave before the others have come
    meeting = meet(place, rank, world_size, secret, deadline)
    if store is None:
        meeting.store.set_timeout(timedelta(seconds=timeout))
    notes.append(f"store: {place.describe()}")
    notes.append(f"secret: {_describe_secret(secret, meeting.trusted)}")
    if (channel := settings.choice("UNICOLL_CHANNEL", environ)) != "plain":
        notes.append(f"connections between hosts: {channel}, from UNICOLL_CHANNEL")
    notes.append(f"interface: {', '.join(listen.addresses)}: {listen.reason}")
    return Rendezvous(
        store=meeting.store,
        root=meeting.root,
        rank=meeting.rank,
        world_size=meeting.world_size,
        secret=Secret(meeting.key, secret.source if secret.key else "rank 0, through the store"),
        trusted=meeting.trusted,
        listen_addresses=listen.addresses,
        listen_reason=listen.reason,
        local_rank=launched.local_rank if launched else None,
        local_world_size=launched.local_world_size if launched else None,
        launched=launched,
        notes=notes,
        _close=lambda: place.close(linger=True),
    )


def refuse_protection(environ: Environ = os.environ) -> None:
    """Refuse to protect the connections of a job whose key others may have.

    Raises:
        DistArgumentError: ``UNICOLL_CHANNEL`` asks for it.
    """
    wanted = settings.choice("UNICOLL_CHANNEL", environ)
    if wanted != "plain":
        raise DistArgumentError(
            f"UNICOLL_CHANNEL={wanted} protects nothing here, since whoever reaches the store can join this job; "
            "give every rank the same UNICOLL_SECRET or UNICOLL_SECRET_FILE"
        )


def _describe_secret(secret: Secret, trusted: bool) -> str:
    if secret.key:
        return secret.source
    channel = "which nobody else can reach" if trusted else "which is OPEN to everybody who can reach it"
    return f"none was given; rank 0 made a key and gave it to the others through the store, {channel}"


def _parse(init_method: str) -> SplitResult:
    known = ", ".join(f"{scheme}://" for scheme in (*_BUILT_IN, *sorted(_handlers)))
    if not isinstance(init_method, str):
        raise DistArgumentError(f"init_method must be a string such as 'env://', not {init_method!r}")
    try:
        url = urlsplit(init_method)
    except ValueError as error:
        raise DistArgumentError(f"init_method {init_method!r} cannot be read: {error}") from error
    if url.scheme not in _BUILT_IN and url.scheme not in _handlers:
        raise DistArgumentError(f"init_method {init_method!r} has no known scheme; known are {known}")
    return url


def _members(
    url: SplitResult,
    rank: int,
    world_size: int,
    environ: Environ,
    notes: list[str],
    launched: Launched | None = None,
) -> tuple[int, int, Launched | None]:
    """Rank and world size from arguments, query and launcher, and the launcher where it applies."""
    given = {"rank": _argument("rank", rank), "world_size": _argument("world_size", world_size)}
    sources = ["arguments"] if any(value is not None for value in given.values()) else []
    for name, value in _query(url).items():
        if given[name] not in (None, value):
            raise DistArgumentError(f"{name}={given[name]} contradicts init_method={url.geturl()}")
        given[name] = value
        sources.append("init_method")
    complete = None not in given.values()
    launched = launched or _detect(environ, needed=not complete, notes=notes)
    if launched is not None and not complete:
        sources.append(f"{launched.source} ({launched.name})")
    this_rank = _or(given["rank"], launched.rank if launched else None)
    size = _or(given["world_size"], launched.world_size if launched else None)
    if this_rank is None or size is None:
        if url.scheme in _BUILT_IN:
            raise DistArgumentError(_how_to_say(given, environ))
        # The handler may know; -1 is torch's word for that.
        return -1 if this_rank is None else this_rank, -1 if size is None else size, None
    if not 0 <= this_rank < size:
        raise DistArgumentError(f"rank {this_rank} is not below world_size {size}")
    notes.append(f"rank {this_rank} of {size}: from {', '.join(dict.fromkeys(sources))}")
    if launched is not None and (launched.rank, launched.world_size) != (this_rank, size):
        notes.append(
            f"the launcher says otherwise: rank {launched.rank} of {launched.world_size}, "
            f"from {launched.source} ({launched.name})"
        )
        if launched.world_size != size:
            launched = None  # another set of processes: its hosts, its store and its job are not ours
    return this_rank, size, launched


def _or(value: int | None, default: int | None) -> int | None:
    return default if value is None else value


def _detect(environ: Environ, *, needed: bool, notes: list[str]) -> Launched | None:
    try:
        return detect(environ)
    except DistArgumentError as error:
        if needed:
            raise
        notes.append(f"launcher ignored: {error}")
        return None


def _argument(name: str, value: int) -> int | None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise DistArgumentError(f"{name} must be a whole number, not {value!r}")
    number = value.__index__()
    if number < -1 or (name == "world_size" and number == 0):
        raise DistArgumentError(f"{name} must be {0 if name == 'rank' else 1} or more, not {number}")
    return None if number == -1 else number


def _query(url: SplitResult) -> dict[str, int]:
    """rank and world_size from the URL; torch's use_libuv is accepted and means nothing here."""
    found: dict[str, int] = {}
    for name, text in parse_qsl(url.query, keep_blank_values=True):
        if name in ("rank", "world_size"):
            if not (text.isascii() and text.isdigit()) or (name == "world_size" and int(text) == 0):
                raise DistArgumentError(
                    f"init_method {url.geturl()}: {name}={text!r} is not a fitting number"
                )
            found[name] = int(text)
        elif name != "use_libuv" and url.scheme in _BUILT_IN:
            raise DistArgumentError(
                f"init_method {url.geturl()}: unknown parameter {name!r}; known are rank and world_size"
            )
    return found


def _how_to_say(given: Mapping[str, int | None], environ: Environ) -> str:
    missing = " and ".join(name for name, value in given.items() if value is None)
    reasons = near_misses(environ)
    seen = f" (seen: {'; '.join(reasons)})" if reasons else ""
    return (
        f"cannot tell this process's {missing}: no launcher was recognised{seen}. Start the processes with "
        "`python -m unicoll.run --nproc-per-node N script.py`, mpirun, srun or torchrun; or set RANK, "
        "WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each; or pass rank= and world_size= together with "
        "init_method='tcp://host:port', init_method='file:///path' or store="
    )


# -------------------------------------------------------------------------------------------------- where we
# meet


def _place(
    url: SplitResult,
    world_size: int,
    store: Store | Place | None,
    launched: Launched | None,
    secret: Secret,
    environ: Environ,
    mpi_store: Callable[[float], Store] | None = None,
) -> Place:
    if store is not None:
        return store if isinstance(store, Place) else GivenPlace(store)
    if url.scheme == "tcp":
        return _tcp_place(url, secret, launched)
    if url.scheme == "file":
        return FilePlace(_file_path(url))
    if url.scheme == "env":
        return _env_place(world_size, launched, secret, environ, mpi_store)
    return HandlerPlace(_handlers[url.scheme], url)


def _tcp_place(url: SplitResult, secret: Secret, launched: Launched | None) -> TCPPlace:
    try:
        host, port = url.hostname, url.port
    except ValueError as error:
        raise DistArgumentError(f"init_method {url.geturl()}: {error}") from error
    if not host or port is None or url.path not in ("", "/"):
        raise DistArgumentError(
            f"init_method {url.geturl()}: write tcp://host:port, an IPv6 address in brackets as in tcp://[::1]:29500"
        )
    single_host = launched is not None and launched.single_host
    return TCPPlace(host, [port], "init_method", secret, single_host=single_host)


def _file_path(url: SplitResult) -> str:
    if url.netloc not in ("", "localhost") or not url.path.startswith("/"):
        wanted = os.path.abspath(url.netloc + url.path)
        raise DistArgumentError(
            f"init_method {url.geturl()}: the path must be absolute, with three slashes: file://{wanted}"
        )
    if url.path.endswith("/"):
        raise DistArgumentError(f"init_method {url.geturl()} names no file")
    return url.path


def _env_place(
    world_size: int,
    launched: Launched | None,
    secret: Secret,
    environ: Environ,
    mpi_store: Callable[[float], Store] | None = None,
) -> Place:
    single_host = launched is not None and launched.single_host
    if launched is not None and environ.get("UNICOLL_STORE"):
        host, port = net.split_hostport(environ["UNICOLL_STORE"])
        return TCPPlace(host, [port], "UNICOLL_STORE", secret, hosted=True, single_host=single_host)
    if world_size == 1:
        return LocalPlace()
    if mpi_store is not None and not environ.get("MASTER_ADDR", "").strip():
        return MPIPlace(mpi_store, launched.master_addr if launched is not None else None)
    if launched is None:
        host, port = _given_master(environ)
        return TCPPlace(host, [port], "MASTER_ADDR, MASTER_PORT", secret)
    ports = _ports(launched, environ)
    if launched.master_addr is None or not ports:
        raise DistArgumentError(f"no place to meet the other ranks: {launched.master_hint}")
    why = launched.master_source
    if launched.port_fixed and len(ports) > 1:
        why += "; torchrun's agent has that port itself"
    return TCPPlace(launched.master_addr, ports, why, secret, single_host=single_host, job=launched.job)


def _given_master(environ: Environ) -> tuple[str, int]:
    host = environ.get("MASTER_ADDR", "").strip().strip("[]")
    port = environ.get("MASTER_PORT", "").strip()
    missing = [name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if not value]
    if missing:
        raise DistArgumentError(
            f"no place to meet the other ranks: set {' and '.join(missing)} on every rank (the address of "
            "rank 0's host, and a free port there), or pass init_method='tcp://host:port' or 'file:///path'"
        )
    return host, net.parse_port(port, f"MASTER_PORT={port}")


def _ports(launched: Launched, environ: Environ) -> Sequence[int]:
    """The ports where rank 0's store may be; every rank derives the same."""
    port = launched.master_port
    if port is None:
        return ()
    if not launched.port_fixed:
        return range(port, port + PORTS_TO_TRY)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        last = min(port + PORTS_TO_TRY, 65535)
        return range(port + 1, last + 1) if last > port else range(port - PORTS_TO_TRY, port)
    return range(port, port + 1)
