"""The second step of joining a job: the processes meet in a store, and agree on a key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from unicoll.bootstrap.rendezvous_protocol import Participant, agree_on_store
from unicoll.bootstrap.resolve import JoinRequest, Resolved
from unicoll.bootstrap.store_locations import MPILocation, TCPLocation
from unicoll.errors import DistArgumentError
from unicoll.net.control.join_warnings import warn_while_waiting
from unicoll.net.stores import PrefixStore, Store
from unicoll.net.wire import interfaces
from unicoll.net.wire.secret import Secret
from unicoll.process import logs

log = logs.logger("job")


@dataclass
class Rendezvous:
    """The result of a rendezvous.

    Attributes:
        found: what the processes have met with.
        store: the store that all ranks share, in the namespace of this rendezvous.
        root: the same store without the namespace, for keys of unicoll's launcher.
        rank, world_size: of this process, and of all; those of ``found``, unless a handler has
            determined them.
        secret: the key of the data connections' handshakes (never empty), and its source.
        trusted: True if only holders of the job's secret, processes that MPI has started, or
            processes of this user (verified by the owner of their sockets or of the store's open
            file, or since they are threads of this process) can have taken part. Equal on all
            ranks, unless one of them cannot verify it.
        listen_addresses: the addresses of data connections, best first.
        notes: what was chosen, from which source and why; one line each.
        replaced: returns True once another rendezvous has begun in the store (on rank 0: raises
            DistStoreError); None on other ranks if the store has no earlier job's values.
    """

    found: Resolved
    store: PrefixStore
    root: Store
    rank: int
    world_size: int
    secret: Secret
    trusted: bool
    listen_addresses: list[str]
    notes: list[str]
    replaced: Callable[[], bool] | None = None

    @property
    def address(self) -> str:
        """The address of the store, and its source, for messages."""
        return self.found.location.describe()

    def close(self) -> None:
        """Close the store, unless it is the caller's. Idempotent.

        If rank 0 hosts the store, its server runs until its last client has disconnected.
        """
        self.found.location.close(linger=True)


def meet(found: Resolved, request: JoinRequest, deadline: float) -> Rendezvous:
    """Meet the other processes.

    Args:
        found: the result of :func:`unicoll.bootstrap.resolve.resolve`.
        deadline: of the whole rendezvous (``time.monotonic()``).

    Raises:
        AuthenticationError: the ranks have different secrets.
        DistArgumentError: the ranks have different world sizes; or UNICOLL_CHANNEL requires
            protection, but other processes may have the job's key.
        StoreTimeoutError, DistNetworkError: rank 0 or its store did not appear in time; the message
            names the address.
        DistStoreError: another process has this rank.
    """
    location, secret, launched = found.location, found.secret, found.launched
    if found.fake:
        root = location.open(found.rank, found.world_size, deadline)
        return _of_one_process(found, PrefixStore("fake", root), root)
    single_host = found.world_size == 1 or (launched is not None and launched.single_host)
    # Only the processes of MPI's own launcher use such a store, so no launcher's job is compared.
    compares = launched is not None and not isinstance(location, MPILocation)
    job = launched.job if launched is not None and compares else ""
    participant = Participant(found.rank, found.world_size, secret, job)
    with warn_while_waiting(
        request.name, lambda: f"{'rank 0; ' if found.rank else ''}the store: {location.describe()}"
    ):
        choose = partial(
            interfaces.listen_addresses,
            location.master_host,
            found.interfaces,
            single_host=single_host,
        )
        if isinstance(location, TCPLocation):
            listen = interfaces.once_resolved(location.master_host, choose, deadline, log.warning)
        else:
            listen = choose()
        if (
            found.channel != "plain"
            and not secret.key
            and location.master_host is not None
            and not interfaces.is_loopback(location.master_host)
        ):
            # The check is made now: later, rank 0 would end before the others have connected.
            refuse_protection(found.channel)
        agreed = agree_on_store(location, participant, deadline)
    if not found.given_store:
        agreed.store.set_timeout(timedelta(seconds=request.join_timeout))
    notes = [
        *found.notes,
        f"store: {location.describe()}",
        f"secret: {_describe_secret(secret, agreed.trusted)}",
    ]
    if found.channel != "plain":
        notes.append(f"connections between hosts: {found.channel}, from UNICOLL_CHANNEL")
    notes.append(f"interface: {', '.join(listen.addresses)}: {listen.reason}")
    # Rank 0 learns here of a second rank 0, even where the store has no earlier job's values.
    looks = location.outlives_jobs or agreed.rank == 0
    return Rendezvous(
        found=found,
        store=agreed.store,
        root=agreed.root,
        rank=agreed.rank,
        world_size=agreed.world_size,
        secret=Secret(agreed.key, secret.source if secret.key else "rank 0, through the store"),
        trusted=agreed.trusted,
        listen_addresses=listen.addresses,
        notes=notes,
        replaced=partial(agreed.is_replaced, location.namespace, secret.key) if looks else None,
    )


def open_store(found: Resolved, deadline: float) -> Rendezvous:
    """The store of these processes, in the namespace ``shared``, before any of the others is
    met."""
    root = found.location.open(found.rank, found.world_size, deadline)
    met = _of_one_process(found, PrefixStore("shared", root), root)
    return replace(
        met,
        trusted=bool(found.secret.key) or found.location.private(),
        listen_addresses=[found.location.master_host or "127.0.0.1"],
    )


def _of_one_process(found: Resolved, store: PrefixStore, root: Store) -> Rendezvous:
    return Rendezvous(
        found,
        store,
        root,
        found.rank,
        found.world_size,
        found.secret,
        trusted=True,
        listen_addresses=["127.0.0.1"],
        notes=[*found.notes],
    )


def refuse_protection(channel: str) -> None:
    """Raise DistArgumentError if UNICOLL_CHANNEL is set in a job whose key other processes may
    have."""
    if channel != "plain":
        raise DistArgumentError(
            f"UNICOLL_CHANNEL={channel} cannot protect this job: any process that reaches the store"
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
