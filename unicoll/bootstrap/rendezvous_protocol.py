"""The rendezvous protocol: ranks that share a store agree on the members and the key of the job.

Rank 0 publishes a record under the key ``generation``: a fresh token that identifies this
rendezvous, the world size, and the key of the data connections if the job has no secret. The other
ranks wait for a record that they have not used before and claim their rank under its token; then
all use the token's namespace. So a second rendezvous at the same address, a server that lingers for
late peers, or a file left over from an earlier job is not confused with this rendezvous, and two
processes with the same rank are detected. Once rank 0 has replaced a record, it removes the claims
under the old token; a rank reads the record again after its claim, so that it never takes part
under an old token.

The job's key is derived from its secret, or the key in the record, and the record: connections and
values of another rendezvous with the same secret have another key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from unicoll.errors import (
    AuthenticationError,
    DistArgumentError,
    DistError,
    DistNetworkError,
    DistStoreError,
    StoreTimeoutError,
)
from unicoll.net.control.departures import publish_refusal
from unicoll.net.stores import PrefixStore, Store
from unicoll.net.stores.signed import SignedStore
from unicoll.net.wire import interfaces
from unicoll.net.wire.handshake import NoAnswerError
from unicoll.net.wire.secret import Key, OwnUserKey, Secret, new_key
from unicoll.process import logs
from unicoll.process.formatting import printable_line
from unicoll.process.timeouts import backoff, seconds_left

log = logs.logger("rendezvous")

_MAGIC = "unicoll1"

MIN_SECONDS = 0.001
"""Shortest timeout at a deadline; to many calls 0 means no limit."""

STALE_SECONDS = 10.0
"""How long a rank that another process has claimed, or that finds another job's record, waits for
rank 0's next record before it reports the conflict."""

# The last rendezvous of this process, as (token, rank). Tokens are random, so the address does not
# matter. A record that this process has used as this rank is that of an earlier rendezvous:
# _await_record() waits for the next one.
_used: deque[tuple[str, int]] = deque(maxlen=1000)
_lock = threading.Lock()


class StoreLocation(ABC):
    """The location of the store of a rendezvous; opens and closes the store.

    Attributes:
        address: for messages.
        master_host: the host that rank 0 or the launcher serves the store on; None if unknown.
        namespace: prefix of every key of the rendezvous.
        reopens: True if opening it again may help after a lost connection.
        warns: True if the store itself warns when it is open to other users.
        members: rank and world size, if opening the store determines them.
        ends_with_rank_0: True if the store may end with rank 0's process.
        refuses_other_users: True if the store, if it is private, accepts only processes of this
            user on this host.
        outlives_jobs: True if it may have the record of an earlier job whose processes were killed.
        found_again: True if a process that is started later, in place of one that died, finds the
            same store.
        wrap: makes the store that the rendezvous uses from the open one.
    """

    address: str
    master_host: str | None = None
    namespace = "unicoll"
    reopens = False
    warns = False
    members: tuple[int, int] | None = None
    ends_with_rank_0 = True
    refuses_other_users = False
    outlives_jobs = False
    found_again = False
    wrap: Callable[[Store], Store] | None = None
    # The open store, which close() closes.
    _store: Store | None = None

    @abstractmethod
    def open(self, rank: int, world_size: int, deadline: float) -> Store:
        """The store, without the namespace; it is closed by :meth:`close`."""

    @abstractmethod
    def private(self) -> bool:
        """True if only processes of this user, or of this job, can have reached the open store.

        This is derived from authentication (the owner of a file, socket or process according to the
        kernel), never from an address.
        """

    def describe(self) -> str:
        """The address and its source."""
        return self.address

    def close(self, linger: bool = False) -> None:
        """Close the store of :meth:`open`; a server may linger until its last client has
        disconnected. Idempotent."""
        store, self._store = self._store, None
        if store is not None:
            store.close()


class AgreedStore(NamedTuple):
    """The result of the protocol: ``store`` in the namespace of the rendezvous, ``root`` without
    it."""

    store: PrefixStore
    root: Store
    rank: int
    world_size: int
    key: Key
    trusted: bool
    token: str

    def is_replaced(self, namespace: str, secret: bytes) -> bool:
        """True if rank 0 has begun another rendezvous, in the same namespace of ``root``; DistError
        without it.

        For rank 0 that is an error, on both processes.

        Raises:
            DistStoreError: this is rank 0; another process has joined as rank 0, too.
        """
        text = PrefixStore(namespace, self.root).try_get("generation")
        if text is None or JobRecord.parse(text).token == self.token:
            return False
        if self.rank == 0:
            raise refuse_second_rank_0(namespace, self.root, secret)
        return True


class Participant(NamedTuple):
    """A process that takes part in the protocol.

    Attributes:
        secret: the job's; empty without one.
        job: the launcher's id of the job, equal on all ranks that have one; "" if unknown.
    """

    rank: int
    world_size: int
    secret: Secret
    job: str = ""


class JobRecord(NamedTuple):
    """Rank 0's record; ``key`` is empty if the job has a secret, which is never sent, but signs the
    record.

    ``job`` is a digest of the launcher's id of the job, or ``-`` without one.
    """

    token: str
    world_size: int
    private: bool
    key: Key
    job: str = "-"
    signature: str = "-"

    def format(self) -> str:
        return f"{self._text()} {self.signature}"

    def _text(self) -> str:
        access = "private" if self.private else "open"
        return (
            f"{_MAGIC} {self.token} {self.world_size} {access} {self.key.hex() or '-'} {self.job}"
        )

    def job_key(self, secret: bytes) -> Key:
        """The key of the job with this secret, or without one."""
        return Key(hmac.digest(secret or self.key, f"job {self._text()}".encode(), "sha256"))

    def signature_by(self, secret: bytes) -> str:
        """Its signature in a job with this secret."""
        return hmac.digest(secret, f"record {self._text()}".encode(), "sha256").hex()

    @classmethod
    def parse(cls, text: bytes) -> JobRecord:
        """The record from its stored form; DistStoreError if it is none."""
        try:
            magic, token, size, access, key, job, signature = text.decode("ascii").split(" ")
            if magic != _MAGIC:
                raise ValueError(magic)
            made = Key(b"" if key == "-" else bytes.fromhex(key))
            return cls(token, int(size), access == "private", made, job, signature)
        except ValueError:
            raise DistStoreError(
                f"the store holds {text[:16]!r}, written by another version of unicoll or by"
                " another program"
            ) from None


def agree_on_store(location: StoreLocation, own: Participant, deadline: float) -> AgreedStore:
    """Open the store and run the protocol, until ``deadline`` (``time.monotonic()``).

    The other ranks wait for rank 0 only. On an error, one of those of
    :func:`unicoll.bootstrap.rendezvous.meet`, the store is closed.
    """
    rank = own.rank
    while True:
        try:
            root = location.open(rank, own.world_size, deadline)
            if location.wrap is not None:
                root = location.wrap(root)
            return _agree_at(location, root, own, deadline)
        except (DistStoreError, DistNetworkError) as error:
            location.close()
            # Rank 0 had time to replace a stale record (STALE_SECONDS), so the store is not opened
            # again.
            if isinstance(error, _OtherJobError):
                raise DistStoreError(str(error), rank=rank) from None
            # A passed deadline and a wrong secret are final. A server that closes the connection
            # before its hello may be one that is shutting down, see below.
            final = isinstance(error, (StoreTimeoutError, AuthenticationError))
            if final and not isinstance(error, NoAnswerError):
                raise
            # This may have been the server of an earlier rendezvous, which has stopped meanwhile;
            # another one may listen at its address soon.
            if not location.reopens or rank == 0 or time.monotonic() >= deadline:
                raise
            time.sleep(0.05)
        except BaseException:
            location.close()
            raise


def _agree_at(
    location: StoreLocation, root: Store, own: Participant, deadline: float
) -> AgreedStore:
    # A handler may determine rank and world size only when it opens the store.
    if location.members is not None:
        own = Participant(*location.members, own.secret, own.job)
    rank, world_size, secret, _ = own
    store = PrefixStore(location.namespace, root)
    if rank == 0:
        record = _publish(location, store, own)
    else:
        record = _await_record(location, store, own, deadline)
    # The record counts as used also if this rank refuses it below: a repeated call needs a new one.
    with _lock:
        _used.append((record.token, rank))
    namespace = PrefixStore(f"{location.namespace}/{record.token}", root)
    trusted = record.private and (bool(secret.key) or location.private())
    key = record.job_key(secret.key)
    if trusted and not secret.key and location.refuses_other_users:
        key = OwnUserKey(key)
    if record.world_size != world_size:
        error = DistArgumentError(
            f"world_size is {record.world_size} on rank 0 and {world_size} on rank {rank}",
            rank=rank,
        )
        # Rank 0 has published its record, and would wait for this rank until its deadline.
        with suppress(DistError):
            publish_refusal(SignedStore(namespace, key), rank, error)
        raise error
    if record.private and not trusted:
        log.warning(
            "rank %d cannot verify that the store at %s is its own user's: it refuses pickles; give"
            " every rank the same UNICOLL_SECRET or UNICOLL_SECRET_FILE",
            rank,
            location.address,
        )
    return AgreedStore(namespace, root, rank, world_size, key, trusted, record.token)


def _check_secrets(location: StoreLocation, record: JobRecord, rank: int, secret: Secret) -> None:
    """Refuse the record of a job with another secret; if ``secret`` is empty, of a job with a
    secret."""
    # The record has a key exactly if rank 0 has no secret (_publish).
    rank0_has_secret = not record.key
    if rank0_has_secret == bool(secret.key):
        if not secret.key or hmac.compare_digest(record.signature, record.signature_by(secret.key)):
            return
        raise AuthenticationError(
            f"rank 0's record in the store at {location.address} is not signed with the secret of"
            f" rank {rank} ({secret.source}): the ranks have different secrets, or a process"
            " without it has forged the value",
            rank=rank,
        )
    mine = f"one ({secret.source})" if secret.key else "none"
    raise AuthenticationError(
        f"rank 0 has {'a' if rank0_has_secret else 'no'} job secret and rank {rank} has {mine}:"
        " give every rank the same UNICOLL_SECRET or UNICOLL_SECRET_FILE, or none",
        rank=rank,
    )


class _OtherJobError(DistStoreError):
    """The record is another job's: another process has this rank, or the launcher's ids of the job
    differ."""


def _digest(job: str) -> str:
    return hashlib.sha256(job.encode("utf-8", "surrogateescape")).hexdigest()[:16] if job else "-"


def _publish(location: StoreLocation, store: Store, own: Participant) -> JobRecord:
    _, world_size, secret, job = own
    private = bool(secret.key) or location.private()
    if not private and world_size > 1 and not location.warns:
        log.warning(
            "the store at %s is OPEN: any process that can reach it can join the job; give every"
            " rank the same UNICOLL_SECRET or UNICOLL_SECRET_FILE (unicoll's launcher sets one)",
            location.address,
        )
    key = Key() if secret.key else new_key()
    record = JobRecord(secrets.token_hex(8), world_size, private, key, _digest(job))
    if secret.key:
        record = record._replace(signature=record.signature_by(secret.key))
    # The order of the next steps matters. The claim comes before the record, so whoever reads the
    # record finds who holds rank 0 (refuse_second_rank_0). The earlier record is read before it is
    # overwritten. Its claims are removed only after that: a rank that claims under the old token
    # afterwards reads the record once more, and finds the new one (_await_record). Without the
    # removal a store that many jobs use one after another would grow.
    replaced = store.try_get("generation")
    _claim(location, PrefixStore(record.token, store), 0)
    store.set("generation", record.format())
    if replaced:
        with suppress(DistError):
            earlier = JobRecord.parse(replaced)
            for rank in range(min(earlier.world_size, world_size)):
                PrefixStore(earlier.token, store).delete_key(f"rank/{rank}")
    return record


def _await_record(
    location: StoreLocation, store: Store, own: Participant, deadline: float
) -> JobRecord:
    """Rank 0's record, once this process has claimed its rank under the record's token."""
    rank, _, secret, job = own
    give_up = deadline
    other: _OtherJobError | None = None
    refused = ""
    pauses = backoff(0.005, 0.1)
    digest = _digest(job)
    while True:
        # The text is in no local variable, because it may contain the key, and tracebacks may show
        # local variables. JobRecord has it as a Key, whose repr hides it.
        record = JobRecord.parse(
            store.try_get("generation") or _wait(location, store, rank, deadline)
        )
        if record.token != refused and not was_used(record.token, rank):
            _check_secrets(location, record, rank, secret)
            try:
                # Ids that are unknown on one of the two sides prove nothing: only two known ids
                # that differ do.
                if len({record.job, digest, "-"}) == 3:
                    raise _OtherJobError(
                        f"rank 0's record in the store at {location.address} is another job's than"
                        f" that of rank {rank} ({job}): the store has the values of another job, or"
                        " two launches use it at once",
                        rank=rank,
                    )
                claims = PrefixStore(record.token, store)
                _claim(location, claims, rank)
                # Rank 0 may have replaced the record between the first look and the claim. It has
                # removed the claims under the old token by then, or is about to, so this one is
                # removed here.
                if JobRecord.parse(store.get("generation")).token == record.token:
                    return record
                claims.delete_key(f"rank/{rank}")
            except _OtherJobError as error:
                # The record may be an earlier job's; then rank 0 publishes another one soon. Until
                # then the same record is not tried again, and the conflict is reported if no other
                # one comes.
                other, refused = error, record.token
                give_up = min(deadline, time.monotonic() + STALE_SECONDS)
        if time.monotonic() >= give_up:
            raise other or StoreTimeoutError(
                f"rank {rank} waited at {location.address} for a new record of rank 0, which has"
                " not published one",
                rank=0,
            )
        time.sleep(next(pauses))


def _wait(location: StoreLocation, store: Store, rank: int, deadline: float) -> bytes:
    left = seconds_left(deadline, MIN_SECONDS)
    try:
        store.wait(["generation"], timedelta(seconds=left))
    except StoreTimeoutError as error:
        raise StoreTimeoutError(
            f"rank {rank} waited {left:.1f} s at {location.address} for rank 0, which has not"
            f" published its record (key {location.namespace}/generation)",
            rank=0,
        ) from error
    return store.get("generation")


def refuse_to_join(
    namespace: str, root: Store, secret: bytes, rank: int, error: BaseException
) -> None:
    """Let rank 0 of the rendezvous in a store know that ``rank`` will not take part because of
    ``error``."""
    text = PrefixStore(namespace, root).try_get("generation")
    if text is not None:
        record = JobRecord.parse(text)
        store = PrefixStore(f"{namespace}/{record.token}", root)
        publish_refusal(SignedStore(store, record.job_key(secret)), rank, error)


def refuse_second_rank_0(namespace: str, root: Store, secret: bytes) -> DistStoreError:
    """The error of a rank 0 that finds the record of another process with rank 0, which gets it,
    too."""
    records = PrefixStore(namespace, root)
    own, other = f"{interfaces.hostname()}, pid {os.getpid()}", "another host"
    # The other process is named if its record can still be read; the error is raised in any case.
    with suppress(DistError):
        token = JobRecord.parse(records.get("generation")).token
        other = _holder(PrefixStore(token, records).get("rank/0"))
    error = DistStoreError(
        f"two processes have joined as rank 0: one on {own}, one on {other}", rank=0
    )
    with suppress(DistError):
        refuse_to_join(namespace, root, secret, 0, error)
    return error


def _holder(claim: bytes) -> str:
    """Host and process of a claim; anyone may have written it."""
    return printable_line(claim.decode(errors="replace").rpartition(", ")[0], 200)


def _claim(location: StoreLocation, store: Store, rank: int) -> None:
    # The random part tells two claims of one process apart, as threads of it may be several ranks.
    claim = f"{interfaces.hostname()}, pid {os.getpid()}, {secrets.token_hex(4)}"
    holder = store.compare_set(f"rank/{rank}", "", claim)
    if holder != claim.encode():
        raise _OtherJobError(
            f"rank {rank} at {location.address} is taken by a process on {_holder(holder)}: "
            "two processes have the same rank, or the store is left over from an earlier job",
            rank=rank,
        )


def was_used(token: str, rank: int) -> bool:
    """True if this process has taken part in the rendezvous ``token`` as ``rank``."""
    with _lock:
        return (token, rank) in _used
