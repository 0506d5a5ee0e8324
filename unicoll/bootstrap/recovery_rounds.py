"""The members of a group that replaces one that has lost ranks, agreed on in a store that outlives
the lost ranks.

Recoveries are numbered rounds. Each process that takes part stores a record of itself under its
launcher's rank in the next round. The process whose record completes the round, or with fewer
members one whose deadline has passed, stores the list of members, with compare_set: all see one
list, and those that are in it form the group. A process that is not in the list goes on to the next
round. So a process that died after it had stored its record is replaced in the same round by the
record of the process started in its place, or else the members miss it when they join, and meet in
the next round. A member that gives up a round, and a process whose rank has another process in the
list, announce it.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import NamedTuple

from unicoll.bootstrap.rendezvous_protocol import StoreLocation
from unicoll.bootstrap.resolve import Resolved
from unicoll.errors import (
    DistError,
    GroupAbortedError,
    OperationTimeoutError,
    RankLostError,
    StoreTimeoutError,
)
from unicoll.net.control.departures import ENDED_KEY
from unicoll.net.control.join_warnings import warn_while_waiting
from unicoll.net.objects.received_json import foreign_value, from_store
from unicoll.net.stores import PrefixStore, Store
from unicoll.net.stores.base import seconds_of
from unicoll.net.stores.signed import SignedStore
from unicoll.process import logs
from unicoll.process.formatting import ranks_text
from unicoll.process.timeouts import Timeout, seconds_left

log = logs.logger("job")

_WAIT_S = 0.25
"""Seconds of one wait for the list of members; then the round's number and the deadline are
checked."""


@dataclass(frozen=True)
class Member:
    """A process that takes part in a round.

    Attributes:
        rank: the launcher's rank of the process.
        is_member: True if it was in the group that is replaced, so that its state counts.
        is_damaged: True if a transfer to it has failed, so that its state is partly overwritten.
        step: number of steps that its state has.
        digest: of its state's arrays.
        exit_key: of the launcher's note on the end of this process.
        token: distinguishes this process and call from others of its rank.
    """

    rank: int
    is_member: bool
    is_damaged: bool
    step: int
    digest: str
    exit_key: str
    token: str = field(default_factory=lambda: secrets.token_hex(8))


_MEMBER = {
    "rank": int,
    "is_member": bool,
    "is_damaged": bool,
    "step": int,
    **dict.fromkeys(("digest", "exit_key", "token"), str),
}


class Round(NamedTuple):
    """A round and its members, by rank in the new group.

    Attributes:
        store: of all rounds.
    """

    number: int
    members: list[Member]
    store: Store

    def apply_to(self, found: Resolved) -> Resolved:
        """Rank, size and the namespace in the store for the rendezvous of the members; ``found`` is
        the launcher's."""
        # Each round is a rendezvous of its own: records and claims of a round whose members did not
        # all join have no effect on the next one.
        found.location.namespace += f"/recovery/{self.number}"
        ranks = [member.rank for member in self.members]
        return replace(
            found,
            rank=ranks.index(found.rank),
            world_size=len(ranks),
            exit_keys=[member.exit_key for member in self.members],
        )

    def give_up(self) -> None:
        """Announce to the other members that not all will join."""
        with suppress(DistError):
            self.store.set(f"{self.number}/given-up", "1")

    @contextmanager
    def watched(self, location: StoreLocation) -> Iterator[None]:
        """In the block, calls of the location's store raise GroupAbortedError once a member has
        given up the round."""
        watching: list[_WatchedStore] = []

        def wrap(store: Store) -> Store:
            watching.append(_WatchedStore(store, self.store, f"{self.number}/given-up"))
            return watching[-1]

        location.wrap = wrap
        yield
        # The job goes on using the store. This process has joined the others now, so it need not
        # ask before each operation whether one has given up.
        for store in watching:
            store.flag = ""


class _WatchedStore(PrefixStore):
    """A view of a store, with the same keys; its calls raise GroupAbortedError once another store
    has a key."""

    def __init__(self, store: Store, other: Store, flag: str) -> None:
        super().__init__("", store)
        self._other = other
        self.flag = flag

    # Operations of PrefixStore pass each key here, so the flag is checked before each one.
    def _full_key(self, key: str, op: str) -> str:
        if self.flag and self._other.check([self.flag]):
            raise GroupAbortedError(
                "recover: a rank ended, or gave up, while it joined the others", op="recover"
            )
        return key

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        # The flag is checked only where an operation begins, so a long wait is made of short ones.
        # The last one raises the error of the caller's timeout, and has a positive length, because
        # 0 means no limit to some stores.
        deadline = time.monotonic() + seconds_of(self.timeout if timeout is None else timeout)
        while self.flag and seconds_left(deadline) > _WAIT_S:
            with suppress(StoreTimeoutError):
                return super().wait(keys, _WAIT_S)
        return super().wait(keys, seconds_left(deadline, 0.001))

    def list_keys(self) -> list[str]:
        return self._store.list_keys()

    def clone(self) -> PrefixStore:
        # A clone would be a store without the check.
        raise self._unsupported("clone")


def form_round(
    found: Resolved,
    root: Store,
    own: Member,
    last: int,
    deadline: float,
    min_size: int | None = None,
) -> Round:
    """Take part in the next round whose members are not known yet; returns once this process is one
    of them.

    Args:
        found: rank, size and the location of the store as the launcher gives them.
        root: the open store.
        own: this process.
        last: number of the last round that this process has seen, 0 without one: the store may be a
            new one.
        deadline: on the clock of ``time.monotonic``.
        min_size: from the deadline on this number of members suffices; None: all are needed.

    Raises:
        OperationTimeoutError: too few processes took part until the deadline; names those that did
            not.
        RankLostError: a rank will not take part: its program has ended without an error.
        DistStoreError, DistNetworkError: the store cannot be reached, or has other values.
    """
    store: Store = PrefixStore(f"{found.location.namespace}/recovery", root)
    # The members' records, and so the state that all take over, come from holders of the secret
    # only. The rounds have a key of their own: the job's key does not exist before its members are
    # known.
    if found.secret.key:
        assert isinstance(store, PrefixStore)
        store = SignedStore(store, hmac.digest(found.secret.key, b"recovery", "sha256"))
    # If a new store has replaced the one of a lost rank, its numbers begin anew. Processes that
    # were in earlier rounds move the number forward, so that all wait in one round.
    _skip_to(store, last)
    number = _last_formed(store)
    # A process that was started in place of one that died while it joined finds its own rank in the
    # list of the last round. The other members of that round wait for the dead process.
    if number and (found_list := store.try_get(f"{number}/members")) is not None:
        _announce_loss(Round(number, _unpacked(found_list), store), own)
    while True:
        number = max(number, _last_formed(store)) + 1
        log.info("recovery round %d: waiting for %d ranks", number, found.world_size)
        with warn_while_waiting("", partial(_describe_wait, store, number, found.world_size), _say):
            members = _take_part(store, number, own, found.world_size, deadline, min_size, root)
        formed = Round(number, members, store)
        # The comparison includes the token, so the record of another process with this rank does
        # not count as this one's.
        if own in formed.members:
            return formed
        _announce_loss(formed, own)


def _announce_loss(formed: Round, own: Member) -> None:
    """If another process of this rank is a member of the round, announce that it has ended: the
    others may wait."""
    if own.rank in [member.rank for member in formed.members]:
        formed.give_up()


def _take_part(
    store: Store,
    number: int,
    own: Member,
    size: int,
    deadline: float,
    min_size: int | None,
    root: Store,
) -> list[Member]:
    """The members of a round; none if later rounds have been formed and this one has not."""
    list_key = f"{number}/members"
    own_key = _key(number, own.rank)
    # The record of a process that died is overwritten, so this is no compare_set. Each process
    # first stores its record and then looks for the others': at least the last one sees all, so a
    # complete round is formed without a wait.
    store.set(own_key, _packed([own]))
    # This is true for the last one that arrives, and maybe for several at the same time, which
    # _form() allows.
    if store.check([_key(number, rank) for rank in range(size)]):
        members = _form(store, number, size, size)
    else:
        members = None
    while members is None:
        with suppress(StoreTimeoutError):
            store.wait([list_key], max(0.001, min(_WAIT_S, deadline - time.monotonic())))
            return _unpacked(store.get(list_key))
        # The list is stored before the number of the last round moves on. So a list that is not
        # there now will not come: the number has jumped over this round (_skip_to), and the process
        # goes on to a later one.
        if _last_formed(store) >= number:
            found = store.try_get(list_key)
            return [] if found is None else _unpacked(found)
        # The launcher replaces no rank once a program has ended in order, so the round would never
        # be complete. With min_size the others can go on without that rank.
        if min_size is None and root.check([ENDED_KEY]):
            rank = int(root.get(ENDED_KEY))
            raise RankLostError(
                f"recover: rank {rank} has ended its program", rank=rank, op="recover"
            )
        if time.monotonic() >= deadline:
            members = _form(store, number, size, size if min_size is None else min_size)
            if members is None:
                # Otherwise a later process would count this one, which does not wait any more, as a
                # member.
                store.delete_key(own_key)
                raise _timeout(store, number, own, size, min_size)
    return members


def _form(store: Store, number: int, size: int, least: int) -> list[Member] | None:
    """The members of a round, from now on unchangeable: those that have taken part, or a list
    stored before.

    None: there are fewer than ``least``.
    """
    records = [store.try_get(_key(number, rank)) for rank in range(size)]
    members = [_unpacked(record)[0] for record in records if record is not None]
    if len(members) < least:
        return None
    # Several processes may form the round at the same time, with different lists at a deadline. The
    # first one to store its list decides, and the others take that list. It is stored before the
    # number moves on, on which the waiting processes rely (_take_part).
    found = store.compare_set(f"{number}/members", "", _packed(members))
    _skip_to(store, number)
    return _unpacked(found)


def _timeout(
    store: Store, number: int, own: Member, size: int, min_size: int | None
) -> OperationTimeoutError:
    missing = [rank for rank in _missing(store, number, size) if rank != own.rank]
    least = f"at least {min_size} of " if min_size is not None else ""
    error = OperationTimeoutError(
        f"recover: {least}{size} ranks are needed, and {ranks_text(missing)} did not take part in"
        " time",
        op="recover",
    )
    error.missing = missing
    return error


def _missing(store: Store, number: int, size: int) -> list[int]:
    return [rank for rank in range(size) if not store.check([_key(number, rank)])]


def _describe_wait(store: Store, number: int, size: int) -> str:
    # This runs on the thread of the warnings; an error of the store is raised by the call that
    # waits.
    with suppress(DistError):
        if missing := _missing(store, number, size):
            return ranks_text(missing)
    return ""


def _say(text: str) -> None:
    log.warning("recover %s", text)


def _key(number: int, rank: int) -> str:
    return f"{number}/rank/{rank}"


def _last_formed(store: Store) -> int:
    """Number of the last round that has been formed."""
    try:
        return int(store.try_get("last") or 0)
    except ValueError as error:
        raise foreign_value("number of the last recovery", error) from error


def _skip_to(store: Store, number: int) -> None:
    """Mark the rounds up to ``number`` as formed: no process waits in them."""
    # Several processes may move the number at once. compare_set never moves it back, and who loses
    # reads it again.
    while (last := _last_formed(store)) < number:
        store.compare_set("last", str(last) if last else "", str(number))


def _packed(members: Sequence[Member]) -> bytes:
    return json.dumps([asdict(member) for member in members]).encode()


def _unpacked(value: bytes) -> list[Member]:
    found = from_store("members of a recovery", value, [_MEMBER])
    return [Member(**{name: fields[name] for name in _MEMBER}) for fields in found]
