"""Where a meeting's store is: given, in this process, in a file, at an address, or behind a registered
scheme."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from urllib.parse import SplitResult, parse_qsl, urlencode

from unicoll import net
from unicoll.auth import Secret
from unicoll.errors import DistArgumentError, DistError, DistNetworkError
from unicoll.meeting import Place, Record, seconds_left, was_attended
from unicoll.stores import FileStore, HashStore, PrefixStore, Store, TCPStore

__all__ = ["FilePlace", "GivenPlace", "Handler", "HandlerPlace", "LocalPlace", "MPIPlace", "TCPPlace"]

Handler = Callable[..., Iterator[tuple[Store, int, int]]]

PROBE_SECONDS = 2.0
"""How long a server that may be another program's gets to answer at first; each round gives it more."""


class GivenPlace(Place):
    """A store that the caller made and keeps."""

    def __init__(self, store: Store) -> None:
        if not hasattr(store, "compare_set"):  # torch's stores and look-alikes serve too
            raise DistArgumentError(f"store must be a Store, not {type(store).__name__}")
        self._store = store
        self._inner = inner = _innermost(store)
        self.master_host = "127.0.0.1" if isinstance(inner, HashStore) else None
        self.where = type(inner).__name__
        if isinstance(inner, TCPStore):
            self.where = f"tcp://{net.join_hostport(inner.host, inner.port)}"
            self.master_host = inner.host
            self.warns = True
        elif isinstance(inner, FileStore):
            self.where = f"file://{inner.path}"

    def open(self, rank: int, world_size: int, deadline: float) -> Store:
        return self._store

    def private(self) -> bool:
        if isinstance(self._inner, (FileStore, TCPStore)):
            return self._inner.private
        return isinstance(self._inner, HashStore)

    def describe(self) -> str:
        return f"{self.where} (given)"


class LocalPlace(Place):
    """A world of one process: a store inside it."""

    where = "this process"
    master_host = "127.0.0.1"

    def open(self, rank: int, world_size: int, deadline: float) -> Store:
        return HashStore()

    def private(self) -> bool:
        return True

    def describe(self) -> str:
        return "in this process, which is the only one"


class MPIPlace(Place):
    """A store over MPI, where MPI started the processes: no address is needed, and no port is open.

    Args:
        opener: opens the store, until a deadline.
        master: rank 0's host where the launcher told it; interfaces are chosen by it.
    """

    where = "MPI"

    def __init__(self, opener: Callable[[float], Store], master: str | None) -> None:
        self._opener = opener
        self._store: Store | None = None
        self.master_host = master

    def open(self, rank: int, world_size: int, deadline: float) -> Store:
        self._store = self._opener(deadline)
        return self._store

    def private(self) -> bool:
        return True  # only MPI's own processes can use its communicators

    def describe(self) -> str:
        return "over MPI, kept by rank 0"

    def close(self, linger: bool = False) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()


class FilePlace(Place):
    """A file that all ranks can lock."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._store: FileStore | None = None
        self.where = f"file://{path}"

    def open(self, rank: int, world_size: int, deadline: float) -> Store:
        self._store = FileStore(self._path, world_size)
        return self._store

    def private(self) -> bool:
        return self._store is not None and self._store.private

    def close(self, linger: bool = False) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()


class HandlerPlace(Place):
    """What a registered handler yields; it may decide rank and world size too."""

    def __init__(self, handler: Handler, url: SplitResult) -> None:
        self._handler = handler
        self._url = url
        self._meeting: Iterator[tuple[Store, int, int]] | None = None
        self.where = url._replace(query="").geturl()

    def open(self, rank: int, world_size: int, deadline: float) -> Store:
        query = {**dict(parse_qsl(self._url.query)), "rank": rank, "world_size": world_size}
        url = self._url._replace(query=urlencode(query)).geturl()
        timeout = timedelta(seconds=seconds_left(deadline))
        self._meeting = iter(self._handler(url, rank=rank, world_size=world_size, timeout=timeout))
        try:
            store, *members = next(self._meeting)
            self.members = int(members[0]), int(members[1])
        except (StopIteration, IndexError, TypeError, ValueError) as error:
            raise DistArgumentError(
                f"the rendezvous handler of {self.where} did not yield (store, rank, world_size)"
            ) from error
        if not 0 <= self.members[0] < self.members[1]:
            raise DistArgumentError(
                f"the rendezvous handler of {self.where} yielded rank {self.members[0]} of {self.members[1]}"
            )
        return store

    def private(self) -> bool:
        return False

    def close(self, linger: bool = False) -> None:
        meeting, self._meeting = self._meeting, None
        close = getattr(meeting, "close", None)
        if close is not None:
            close()


class TCPPlace(Place):
    """A TCPStore at the first of ``ports`` that works.

    Args:
        host: rank 0's host, or the launcher's.
        ports: where to look, in this order; every rank has the same.
        why: where host and ports come from, for messages.
        secret: the job's.
        hosted: whether the store is there already; else rank 0 hosts it.
        single_host: whether all ranks are known to be on this host.
        job: text that tells this job from others whose store may have taken one of several ports.
    """

    reopens = True
    warns = True

    def __init__(
        self,
        host: str,
        ports: Sequence[int],
        why: str,
        secret: Secret,
        *,
        hosted: bool = False,
        single_host: bool = False,
        job: str = "",
    ) -> None:
        self.master_host: str = host
        self._ports, self._why, self._secret = ports, why, secret
        self._hosted, self._single_host = hosted, single_host
        self._store: TCPStore | None = None
        self.where = f"tcp://{net.join_hostport(host, ports[0])}"
        if len(ports) > 1:
            self.where += f" to {ports[-1]}"
            self.namespace = f"unicoll/{hashlib.blake2s(job.encode(), digest_size=6).hexdigest()}"

    def open(self, rank: int, world_size: int, deadline: float) -> Store:
        self.close()
        if rank == 0 and not self._hosted:
            self._store = self._serve(world_size, deadline)
        elif len(self._ports) == 1:
            self._store = self._connect(self._ports[0], world_size, deadline)
        else:
            self._store = self._search(rank, world_size, deadline)
        return self._store

    def private(self) -> bool:
        return self._store is not None and self._store.private

    def describe(self) -> str:
        port = self._ports[0] if self._store is None else self._store.port
        host = "the launcher" if self._hosted else "rank 0"
        return f"tcp://{net.join_hostport(self.master_host, port)} ({self._why}), hosted by {host}"

    def close(self, linger: bool = False) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close(linger)

    def _bind(self) -> str | None:
        """The address to serve on, as narrow as the others are sure to reach; None leaves it to the store,
        which takes loopback for a loopback address and else every interface."""
        host = self.master_host
        if net.is_loopback(host):
            # A host's own name may be on loopback only here (127.0.1.1 in /etc/hosts).
            return host if self._single_host and not net.is_loopback_name(host) else None
        addresses = {str(address[0]) for _, address in net.resolve(host, 0)}
        return host if len(addresses) == 1 and net.is_local_address(host) else None

    def _serve(self, world_size: int, deadline: float) -> TCPStore:
        bind = self._bind()
        for port in self._ports[:-1]:
            try:
                return self._make(port, world_size, deadline, is_master=True, bind=bind)
            except (DistError, OSError):
                continue
        return self._make(self._ports[-1], world_size, deadline, is_master=True, bind=bind)

    def _connect(self, port: int, world_size: int, deadline: float) -> TCPStore:
        return self._make(port, world_size, deadline, is_master=False, bind=None)

    def _make(
        self, port: int, world_size: int, deadline: float, *, is_master: bool, bind: str | None
    ) -> TCPStore:
        return TCPStore(
            self.master_host,
            port,
            world_size,
            is_master,
            timedelta(seconds=seconds_left(deadline)),
            wait_for_workers=False,
            secret=self._secret,
            bind=bind,
        )

    def _search(self, rank: int, world_size: int, deadline: float) -> TCPStore:
        """The first of the ports whose server holds a meeting of this job that this rank has not been to."""
        seen: Exception | None = None
        pause, patience = 0.02, PROBE_SECONDS
        while True:
            for port in self._ports:
                try:
                    # Most ports refuse, which a bare connection finds out without a store's own retries.
                    probe = (self.master_host, port)
                    socket.create_connection(probe, min(patience, seconds_left(deadline))).close()
                    store = self._connect(port, world_size, min(deadline, time.monotonic() + patience))
                except (DistError, OSError) as error:
                    seen = error
                    continue
                if self._is_ours(store, rank):
                    return store
                store.close()
            if time.monotonic() >= deadline:
                raise DistNetworkError(
                    f"rank {rank} found no store of this job at {self.where} (last: {seen})", rank=0
                )
            time.sleep(pause)
            pause, patience = min(2 * pause, 0.5), min(1.5 * patience, 15.0)

    def _is_ours(self, store: TCPStore, rank: int) -> bool:
        try:
            text = PrefixStore(self.namespace, store).try_get("generation")
        except DistError:
            return False
        return text is not None and not was_attended(Record.parse(text).token, rank)


def _innermost(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store

