"""The locations of a rendezvous' store: a store argument, this process, a file, MPI, an address, or
a handler."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from urllib.parse import SplitResult, parse_qsl, urlencode

from unicoll.bootstrap.launchers import LaunchInfo
from unicoll.bootstrap.rendezvous_protocol import MIN_SECONDS, JobRecord, StoreLocation, was_used
from unicoll.errors import DistArgumentError, DistError, DistNetworkError
from unicoll.net.stores import FileStore, HashStore, PrefixStore, Store, TCPStore
from unicoll.net.wire import interfaces
from unicoll.net.wire.secret import Secret
from unicoll.process.timeouts import backoff, seconds_left

Handler = Callable[..., Iterator[tuple[Store, int, int]]]

handlers: dict[str, Handler] = {}
"""By URL scheme the handlers that the program has registered."""
BUILT_IN = ("env", "file", "tcp")
"""The schemes that need no handler."""

PROBE_SECONDS = 2.0
"""First timeout for the reply of a server that may be another program's; it grows with each
round."""


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
    if scheme in handlers or scheme in BUILT_IN:
        raise DistArgumentError(f"a rendezvous handler for {scheme}:// is registered already")
    handlers[scheme] = handler


class ExistingStoreLocation(StoreLocation):
    """A store of the caller, who closes it."""

    found_again = True

    def __init__(self, store: Store) -> None:
        # Stores of torch and compatible objects are accepted, too.
        if not hasattr(store, "compare_set"):
            raise DistArgumentError(f"store must be a Store, not {type(store).__name__}")
        self._given = store
        self._inner = inner = _innermost(store)
        self.master_host = "127.0.0.1" if isinstance(inner, HashStore) else None
        self.outlives_jobs = not isinstance(inner, HashStore)
        self.address = type(inner).__name__
        if isinstance(inner, TCPStore):
            self.address = f"tcp://{interfaces.join_hostport(inner.host, inner.port)}"
            self.master_host = inner.host
            self.warns = True
            self.refuses_other_users = not inner.has_secret
        elif isinstance(inner, FileStore):
            self.address = f"file://{inner.path}"
            self.ends_with_rank_0 = False

    def open(self, rank: int, world_size: int, deadline: float) -> Store:
        return self._given

    def private(self) -> bool:
        if isinstance(self._inner, (FileStore, TCPStore)):
            return self._inner.private
        return isinstance(self._inner, HashStore)

    def describe(self) -> str:
        return f"{self.address} (given)"


class LocalLocation(ExistingStoreLocation):
    """A store in this process, for a world of size 1."""

    def __init__(self) -> None:
        super().__init__(HashStore())
        self.address = "this process"

    def describe(self) -> str:
        return "in this process, which is the only one"


class MPILocation(StoreLocation):
    """A store over MPI, for processes that MPI has started; it needs no address and opens no port.

    ``master`` is rank 0's host if the launcher gives it, for the choice of interfaces.
    """

    address = "MPI"

    def __init__(self, opener: Callable[[float], Store], master: str | None) -> None:
        self._opener = opener
        self.master_host = master

    def open(self, rank: int, world_size: int, deadline: float) -> Store:
        self._store = self._opener(deadline)
        return self._store

    def private(self) -> bool:
        # Only MPI's own processes can use its communicators.
        return True

    def describe(self) -> str:
        return "over MPI, held by rank 0"


class FileLocation(StoreLocation):
    """A FileStore in a file that all ranks can lock."""

    ends_with_rank_0 = False
    outlives_jobs = True
    _store: FileStore | None = None

    def __init__(self, path: str) -> None:
        self._path = path
        self.address = f"file://{path}"

    def open(self, rank: int, world_size: int, deadline: float) -> Store:
        self._store = FileStore(self._path, world_size)
        return self._store

    def private(self) -> bool:
        return self._store is not None and self._store.private


class HandlerLocation(StoreLocation):
    """The store of a registered handler, which also determines rank and world size."""

    def __init__(self, handler: Handler, url: SplitResult) -> None:
        self._handler = handler
        self._url = url
        self._generator: Iterator[tuple[Store, int, int]] | None = None
        self.address = url._replace(query="").geturl()

    def open(self, rank: int, world_size: int, deadline: float) -> Store:
        query = {**dict(parse_qsl(self._url.query)), "rank": rank, "world_size": world_size}
        url = self._url._replace(query=urlencode(query)).geturl()
        timeout = timedelta(seconds=seconds_left(deadline, MIN_SECONDS))
        self._generator = iter(
            self._handler(url, rank=rank, world_size=world_size, timeout=timeout)
        )
        try:
            store, *members = next(self._generator)
            self.members = int(members[0]), int(members[1])
        except (StopIteration, IndexError, TypeError, ValueError) as error:
            raise DistArgumentError(
                f"the rendezvous handler of {self.address} did not yield (store, rank, world_size)"
            ) from error
        if not 0 <= self.members[0] < self.members[1]:
            raise DistArgumentError(
                f"the rendezvous handler of {self.address} yielded rank {self.members[0]} of"
                f" {self.members[1]}"
            )
        return store

    def private(self) -> bool:
        return False

    def close(self, linger: bool = False) -> None:
        generator, self._generator = self._generator, None
        close = getattr(generator, "close", None)
        if close is not None:
            close()


class TCPLocation(StoreLocation):
    """A TCPStore at the first of ``ports`` that works.

    Args:
        host: rank 0's host, or the launcher's.
        ports: the ports to try, in this order; equal on all ranks.
        source: where host and ports come from, for messages.
        secret: the job's secret.
        launched: the launcher's information. Its job distinguishes the stores of several jobs,
            where each may use one of several ports.
    """

    reopens = True
    warns = True
    refuses_other_users = True
    server = "rank 0"

    def __init__(
        self,
        host: str,
        ports: Sequence[int],
        source: str,
        secret: Secret,
        launched: LaunchInfo | None = None,
    ) -> None:
        self.master_host: str = host
        self._ports, self._source, self._secret = ports, source, secret
        self._single_host = launched is not None and launched.single_host
        self.found_again = len(ports) == 1
        self._store: TCPStore | None = None
        self.address = f"tcp://{interfaces.join_hostport(host, ports[0])}"
        if len(ports) > 1:
            self.address += f" to {ports[-1]}"
            job = launched.job if launched is not None else ""
            self.namespace = f"unicoll/{hashlib.blake2s(job.encode(), digest_size=6).hexdigest()}"

    def open(self, rank: int, world_size: int, deadline: float) -> Store:
        self.close()
        if rank == 0 and self.ends_with_rank_0:
            self._store = self._serve(world_size, deadline)
        elif len(self._ports) == 1:
            self._store = self._open_store(self._ports[0], world_size, deadline)
        else:
            self._store = self._search(rank, world_size, deadline)
        return self._store

    def private(self) -> bool:
        return self._store is not None and self._store.private

    def describe(self) -> str:
        port = self._ports[0] if self._store is None else self._store.port
        return (
            f"tcp://{interfaces.join_hostport(self.master_host, port)} ({self._source}), hosted by"
            f" {self.server}"
        )

    def close(self, linger: bool = False) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close(linger)

    def _bind(self) -> str | None:
        """The narrowest address that all ranks can certainly reach; None for the store's own rule
        (loopback for a loopback address, else all interfaces)."""
        host = self.master_host
        if interfaces.is_loopback(host):
            # A host's own name may resolve to loopback on this host only (127.0.1.1 in /etc/hosts).
            return host if self._single_host and not interfaces.is_loopback_name(host) else None
        addresses = {str(address[0]) for _, address in interfaces.resolve(host, 0)}
        return host if len(addresses) == 1 and interfaces.is_local_address(host) else None

    def _serve(self, world_size: int, deadline: float) -> TCPStore:
        # for the connections of the store and of the control plane
        interfaces.require_descriptors(2 * world_size, f"rank 0 of {world_size} ranks")
        bind = interfaces.once_resolved(self.master_host, self._bind, deadline)
        for port in self._ports[:-1]:
            try:
                return self._open_store(port, world_size, deadline, is_master=True, bind=bind)
            except (DistError, OSError):
                continue
        return self._open_store(self._ports[-1], world_size, deadline, is_master=True, bind=bind)

    def _open_store(
        self,
        port: int,
        world_size: int,
        deadline: float,
        *,
        is_master: bool = False,
        bind: str | None = None,
    ) -> TCPStore:
        return TCPStore(
            self.master_host,
            port,
            world_size,
            is_master,
            timedelta(seconds=seconds_left(deadline, MIN_SECONDS)),
            wait_for_workers=False,
            # This process may be rank 0 of several jobs at this address.
            multi_tenant=is_master,
            secret=self._secret,
            bind=bind,
        )

    def _search(self, rank: int, world_size: int, deadline: float) -> TCPStore:
        """The store at the first port whose server has a record of this job that this rank has not
        used."""
        last_error: Exception | None = None
        pauses, timeouts = backoff(0.02, 0.5), backoff(PROBE_SECONDS, 15.0, 1.5)
        while True:
            timeout = next(timeouts)
            for port in self._ports:
                try:
                    # Most ports refuse connections; a plain socket shows that without the store's
                    # retries.
                    probe = (self.master_host, port)
                    socket.create_connection(
                        probe, min(timeout, seconds_left(deadline, MIN_SECONDS))
                    ).close()
                    store = self._open_store(
                        port, world_size, min(deadline, time.monotonic() + timeout)
                    )
                except (DistError, OSError) as error:
                    last_error = error
                    continue
                if self._has_new_record(store, rank):
                    return store
                store.close()
            if time.monotonic() >= deadline:
                raise DistNetworkError(
                    f"rank {rank} found no store of this job at {self.address} (last error:"
                    f" {last_error})",
                    rank=0,
                )
            time.sleep(next(pauses))

    def _has_new_record(self, store: TCPStore, rank: int) -> bool:
        try:
            text = PrefixStore(self.namespace, store).try_get("generation")
            return text is not None and not was_used(JobRecord.parse(text).token, rank)
        except DistError:
            # The connection was lost, or the server is another program's.
            return False


class LauncherStoreLocation(TCPLocation):
    """The launcher's TCPStore, which exists before the ranks and outlives them."""

    server = "the launcher"
    ends_with_rank_0 = False


class OpenLocation(TCPLocation):
    """A TCPStore of rank 0 that listens on all interfaces, since no address was given."""

    def _bind(self) -> str | None:
        return "*"


def _innermost(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
