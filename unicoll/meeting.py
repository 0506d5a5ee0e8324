"""The protocol of a meeting: how ranks that share a store agree on who takes part, and on the key of the job.

Rank 0 publishes a record under the key ``generation``: a fresh token that names this meeting, the world size,
and the key of the data connections where the job has no secret. The others wait for a record that they have
not used yet, claim their rank under its token, and all go on in the token's name space. So a second meeting
on the same address, a server that lingers for late peers, or a file that an earlier job left behind is not
mixed up with this meeting, and two processes that were given the same rank find out.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import NamedTuple

from unicoll import net
from unicoll.auth import Key, NoAnswerError, Secret, new_key
from unicoll.errors import (
    AuthenticationError,
    DistArgumentError,
    DistNetworkError,
    DistStoreError,
    StoreTimeoutError,
)
from unicoll.stores import PrefixStore, Store

__all__ = ["Meeting", "Place", "Record", "meet", "seconds_left", "was_attended"]

log = logging.getLogger("unicoll")

_MAGIC = "unicoll1"

STALE_SECONDS = 10.0
"""How long a rank that finds its place taken waits for rank 0 to open a new meeting before it reports the
clash."""

# Meetings that this process has been to, as (token, rank); tokens are random, so the address does not matter.
_attended: set[tuple[str, int]] = set()
_lock = threading.Lock()


class Place(ABC):
    """Where the store of a meeting is; opens it, closes what it opened.

    Attributes:
        where: its address, for messages.
        master_host: the host of rank 0's side; None where unknown.
        namespace: prefix of every key of the meeting.
        reopens: whether a lost connection is worth another try.
        warns: whether the store itself warns where it is open to everybody.
        members: rank and world size, where opening the place decides them.
    """

    where: str
    master_host: str | None = None
    namespace = "unicoll"
    reopens = False
    warns = False
    members: tuple[int, int] | None = None

    @abstractmethod
    def open(self, rank: int, world_size: int, deadline: float) -> Store:
        """The store, without the namespace; the place keeps and closes it."""

    @abstractmethod
    def private(self) -> bool:
        """Whether only processes of this user, or of this job, can have reached the open store.

        The answer comes from how they were authenticated (the kernel's word on the owner of a file or socket, or of a
        process), never from an address.
        """

    def describe(self) -> str:
        """The address and where it comes from."""
        return self.where

    def close(self, linger: bool = False) -> None:  # noqa: B027 - optional
        """Close what :meth:`open` opened; a server may linger until its last client has gone. Idempotent."""


class Meeting(NamedTuple):
    """What the ranks agreed on: the store in the meeting's name space, ``root`` the same store without it."""

    store: PrefixStore
    root: Store
    rank: int
    world_size: int
    key: Key
    trusted: bool


class Record(NamedTuple):
    """What rank 0 publishes; ``key`` is empty where the job has a secret, which then never travels, but signs."""

    token: str
    world_size: int
    private: bool
    key: Key
    signature: str = "-"

    def format(self) -> str:
        """The record as the store keeps it."""
        return f"{self._text()} {self.signature}"

    def _text(self) -> str:
        access = "private" if self.private else "open"
        return f"{_MAGIC} {self.token} {self.world_size} {access} {self.key.hex() or '-'}"

    def signature_by(self, secret: bytes) -> str:
        """What its signature must be in a job with this secret."""
        return hmac.digest(secret, f"record {self._text()}".encode(), "sha256").hex()

    @classmethod
    def parse(cls, text: bytes) -> Record:
        """The record back from the store.

        Raises:
            DistStoreError: it is not one.
        """
        try:
            magic, token, size, access, key, signature = text.decode("ascii").split(" ")
            if magic != _MAGIC:
                raise ValueError(magic)
            made = Key(b"" if key == "-" else bytes.fromhex(key))
            return cls(token, int(size), access == "private", made, signature)
        except ValueError:
            raise DistStoreError(
                f"the store holds {text[:16]!r}, written by another version of unicoll or by another program"
            ) from None


def meet(place: Place, rank: int, world_size: int, secret: Secret, deadline: float) -> Meeting:
    """Open ``place`` and meet the other ranks there, until ``deadline`` (``time.monotonic()``).

    Only rank 0's coming is waited for. On an error the place is closed.

    Raises:
        DistArgumentError: rank 0 has another world size.
        AuthenticationError: the ranks do not hold the same secret.
        StoreTimeoutError, DistNetworkError: rank 0 or its store did not appear in time.
        DistStoreError: another process has this rank.
    """
    while True:
        try:
            root = place.open(rank, world_size, deadline)
            return _meet_at(place, root, rank, world_size, secret, deadline)
        except (DistStoreError, DistNetworkError) as error:
            place.close()
            settled = isinstance(error, (StoreTimeoutError, AuthenticationError, _TakenError))
            if settled and not isinstance(error, NoAnswerError):
                raise
            # The server of an earlier meeting may have gone away under us.
            if not place.reopens or rank == 0 or time.monotonic() >= deadline:
                raise
            time.sleep(0.05)
        except BaseException:
            place.close()
            raise


def _meet_at(
    place: Place, root: Store, rank: int, world_size: int, secret: Secret, deadline: float
) -> Meeting:
    if place.members is not None:
        rank, world_size = place.members
    store = PrefixStore(place.namespace, root)
    if rank == 0:
        record = _publish(place, store, world_size, secret)
    else:
        record = _await_record(place, store, rank, secret, deadline)
    with _lock:
        _attended.add((record.token, rank))
    if record.world_size != world_size:
        raise DistArgumentError(
            f"rank 0 says that world_size is {record.world_size}, rank {rank} says {world_size}", rank=rank
        )
    trusted = record.private and (bool(secret.key) or place.private())
    if record.private and not trusted:
        log.warning(
            "rank %d cannot tell that the store at %s is its own user's: it unpickles nothing; give every rank the "
            "same UNICOLL_SECRET or UNICOLL_SECRET_FILE",
            rank,
            place.where,
        )
    inner = PrefixStore(f"{place.namespace}/{record.token}", root)
    return Meeting(inner, root, rank, world_size, Key(secret.key or record.key), trusted)


def _check_secrets(place: Place, record: Record, rank: int, secret: Secret) -> None:
    """Refuse a record that is not of a job with this secret, or without one."""
    rank0_has_one = not record.key
    if rank0_has_one == bool(secret.key):
        if not secret.key or hmac.compare_digest(record.signature, record.signature_by(secret.key)):
            return
        raise AuthenticationError(
            f"rank 0's record in the store at {place.where} is not signed with the secret of rank {rank} "
            f"({secret.source}): the ranks have different secrets, or somebody without it has forged the value",
            rank=rank,
        )
    mine = f"one ({secret.source})" if secret.key else "none"
    raise AuthenticationError(
        f"rank 0 has {'a' if rank0_has_one else 'no'} job secret and rank {rank} has {mine}: give every rank "
        "the same UNICOLL_SECRET or UNICOLL_SECRET_FILE, or none",
        rank=rank,
    )


class _TakenError(DistStoreError):
    """Another process has this rank."""


def _publish(place: Place, store: Store, world_size: int, secret: Secret) -> Record:
    private = bool(secret.key) or place.private()
    if not private and world_size > 1 and not place.warns:
        log.warning(
            "the store at %s is OPEN: whoever can reach it can join the job; give every rank the same "
            "UNICOLL_SECRET or UNICOLL_SECRET_FILE (unicoll's launcher does)",
            place.where,
        )
    record = Record(secrets.token_hex(8), world_size, private, Key() if secret.key else new_key())
    if secret.key:
        record = record._replace(signature=record.signature_by(secret.key))
    _claim(place, PrefixStore(record.token, store), 0)
    store.set("generation", record.format())
    return record


def _await_record(place: Place, store: Store, rank: int, secret: Secret, deadline: float) -> Record:
    """Rank 0's record of a meeting that has a place for this rank, which is then this process's."""
    give_up = deadline
    taken: _TakenError | None = None
    refused = ""
    pause = 0.005
    while True:
        # Never in a local variable as text: it may hold the key.
        record = Record.parse(store.try_get("generation") or _wait(place, store, rank, deadline))
        if record.token != refused and not was_attended(record.token, rank):
            _check_secrets(place, record, rank, secret)
            try:
                _claim(place, PrefixStore(record.token, store), rank)
                return record
            except _TakenError as error:
                # The meeting may be an earlier job's; rank 0 then opens another one soon.
                taken, refused = error, record.token
                give_up = min(deadline, time.monotonic() + STALE_SECONDS)
        if time.monotonic() >= give_up:
            raise taken or StoreTimeoutError(
                f"rank {rank} waited at {place.where} for rank 0 to open a new meeting, in vain", rank=0
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _wait(place: Place, store: Store, rank: int, deadline: float) -> bytes:
    left = seconds_left(deadline)
    try:
        store.wait(["generation"], timedelta(seconds=left))
    except StoreTimeoutError as error:
        raise StoreTimeoutError(
            f"rank {rank} waited {left:.1f} s at {place.where} for rank 0, which did not come "
            f"(key {place.namespace}/generation)",
            rank=0,
        ) from error
    return store.get("generation")


def _claim(place: Place, store: Store, rank: int) -> None:
    me = f"{net.hostname()}, pid {os.getpid()}, {secrets.token_hex(4)}"
    holder = store.compare_set(f"rank/{rank}", "", me).decode(errors="replace")
    if holder != me:
        raise _TakenError(
            f"rank {rank} at {place.where} is taken already, by a process on {holder.rpartition(', ')[0]}: "
            "two processes were given the same rank, or the store is left over from an earlier job",
            rank=rank,
        )


def was_attended(token: str, rank: int) -> bool:
    """Whether this process has been to the meeting ``token`` as ``rank``."""
    with _lock:
        return (token, rank) in _attended


def seconds_left(deadline: float) -> float:
    """Seconds until ``deadline`` (``time.monotonic()``), never 0 or less: to many calls that would mean "no
    limit"."""
    return max(deadline - time.monotonic(), 0.001)
