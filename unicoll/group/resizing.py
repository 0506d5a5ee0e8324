"""Groups with fewer or more members than an existing one.

Ranks that are added to a group get a record with its name, members and backends through the job's
signed store.

Each of the public functions has a handler of exceptions in its own body: a signal's handler may
raise where a function that it calls begins.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from unicoll.backend.contract import Context, Job
from unicoll.backend.operation_errors import announce, member_failed_error
from unicoll.calls.error_marks import leaves_doubt
from unicoll.errors import (
    DistArgumentError,
    DistError,
    GroupAbortedError,
    OperationTimeoutError,
    StoreTimeoutError,
)
from unicoll.group.arguments import check_ranks
from unicoll.net.objects.received_json import from_store
from unicoll.net.stores import Store
from unicoll.process.formatting import rank_spans

if TYPE_CHECKING:
    from unicoll.group.process_group import ProcessGroup


@dataclass
class GrowthRecord:
    """The larger group, as the ranks that join it need to know it.

    Attributes:
        name: of the larger group.
        ranks: its members' global ranks, in group order.
        before: number of them that are members of the smaller group.
        timeout, desc, backends: of both groups.
        id: no other record has it.
    """

    name: str
    ranks: tuple[int, ...]
    before: int
    timeout: float
    desc: str
    backends: str
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        # This is the number at which a record was first tried, by rank. It is no field, so it is
        # not sent.
        self._first: dict[int, int] = {}

    @property
    def added(self) -> list[int]:
        """The global ranks that join."""
        return list(self.ranks[self.before :])

    def context(self, job: Job, options: Any = None, device: Any = None) -> Context:
        """The larger group on one of its members."""
        return Context(job, self.name, self.ranks, self.timeout, options, device, desc=self.desc)

    def fail(self, job: Job, cause: BaseException) -> None:
        """Fail the group on all its members because of an exception on this one."""
        context = self.context(job)
        announce(context, member_failed_error(context, "creating", cause))

    def send(self, store: Store) -> None:
        """Write the record for each joining rank, at the end of its records; it may have been
        written before.

        So a call of this that was interrupted can be repeated. A rank reads its records in order.
        How many it has read is in the store, not in the process: that begins anew if another store
        replaces this one.
        """
        text = json.dumps(asdict(self))
        for rank in self.added:
            # A repeated call begins where the first one did. If the rank has read the record
            # meanwhile, its next number is a later one, at which the record would be written a
            # second time.
            if rank not in self._first:
                self._first[rank] = store.add(_received(rank), 0) + 1
            number = self._first[rank]
            # Another group may have written a record for this rank at this number. The text has the
            # record's id, so a repeated call finds its own record and ends.
            while store.compare_set(f"grow/{rank}/{number}", "", text).decode() != text:
                number += 1

    @classmethod
    def receive(
        cls, store: Store, rank: int, added: list[int], timeout: float, into: list[GrowthRecord]
    ) -> None:
        """Add the next record of a rank, which no other call receives, to ``into``.

        Raises:
            OperationTimeoutError: no record arrived in ``timeout`` seconds.
            DistArgumentError: the record adds other ranks than this rank passed.
            DistStoreError: the record is another program's.
        """
        key = f"grow/{rank}/{store.add(_received(rank), 0) + 1}"
        try:
            store.wait([key], timeout)
        except StoreTimeoutError:
            raise OperationTimeoutError(
                f"grow_group: timed out on rank {rank} after {timeout:g} s: no group was grown by"
                f" ranks {added}",
                op="grow_group",
            ) from None
        fields = from_store(key, store.get(key), _RECORD)
        made = cls(**{**{name: fields[name] for name in _RECORD}, "ranks": tuple(fields["ranks"])})
        # The record is kept before it counts as read, so an interrupt in between does not lose it.
        into += [made]
        store.add(_received(rank), 1)
        # A record for other ranks counts as read, too. Otherwise each later call would find it
        # again.
        if made.added != added:
            raise DistArgumentError(
                f"grow_group: this rank adds ranks {added}, but the group of ranks"
                f" {list(made.ranks[: made.before])} adds {made.added}"
            )


_RECORD = {
    "name": str,
    "ranks": [int],
    "before": int,
    "timeout": float,
    "desc": str,
    "backends": str,
    "id": str,
}


def _received(rank: int) -> str:
    """Key for the number of records that a rank has read."""
    return f"grow/{rank}/received"


def shrink(
    group: ProcessGroup, names: list[str], ranks_to_exclude: Sequence[int], pg_options: Any
) -> ProcessGroup:
    """:func:`unicoll.shrink_group`; adds the group's name to ``names`` before anything can fail on
    this rank alone."""
    context = group._context
    excluded = _excluded(group, ranks_to_exclude)
    left = _reserve_without(group, names, excluded)
    # Until this process knows that the relay's process has ended, Job.store is the store that may
    # have ended with it, and the new group would be made through that.
    if context.job.control is not None:
        context.job.control.await_relay_loss([context.ranks[r] for r in excluded])
    return group._derive(names[0], left, pg_options, excluded=excluded)


def fail_shrunk(
    group: Any, names: list[str], ranks_to_exclude: Sequence[int], cause: BaseException
) -> None:
    """Fail the group of :func:`shrink`, or of its caller before it, after an exception that is no
    refusal."""

    def reserve() -> None:
        _reserve_without(group, names, _excluded(group, ranks_to_exclude))

    group.fail_derived(names, reserve, cause)


def _excluded(group: ProcessGroup, ranks: Sequence[int]) -> list[int]:
    excluded = sorted(check_ranks("shrink_group", ranks, group.size()))
    if group.rank() in excluded:
        raise DistArgumentError(
            "shrink_group: the caller is among the excluded ranks, who do not call it"
        )
    return excluded


def _reserve_without(
    group: ProcessGroup, names: list[str], excluded: Sequence[int]
) -> tuple[int, ...]:
    """Add the name of a group without some members to ``names``; returns the global ranks of the
    others.

    The name is equal on these, although the excluded ranks do not count the call.
    """
    ranks, shrinks = group.ranks, group._backends.shrinks
    left = tuple(r for i, r in enumerate(ranks) if i not in excluded)
    # The count is by the members that remain. One count for the group, as for its parts, would
    # differ on the excluded ranks, which may make other groups of it later.
    number = shrinks[left] + 1
    spans = [
        f"{low}-{high}" if high > low else f"{low}"
        for low, high in rank_spans([ranks[r] for r in excluded])
    ]
    times = f".{number}" if number > 1 else ""
    made = [f"{group.name}/without-{','.join(spans)}{times}"]
    # Nothing is called from here on: an exception of a signal's handler comes before both or behind
    # both.
    names += made
    shrinks[left] = number
    return left


def grow(
    group: ProcessGroup, records: list[GrowthRecord], ranks_to_add: Sequence[int], pg_options: Any
) -> ProcessGroup:
    """:func:`unicoll.grow_group` on a member; adds the larger group to ``records``, as
    :func:`shrink` its name."""
    _reserve_grown(group, records, ranks_to_add)
    record = records[0]
    if group.rank() == 0:
        record.send(group.job.store)
    return group._derive(record.name, record.ranks, pg_options, grown=True)


def fail_grown(
    group: ProcessGroup,
    records: list[GrowthRecord],
    ranks_to_add: Sequence[int],
    cause: BaseException,
) -> None:
    """Fail the group of :func:`grow`, or of its caller before it, after an exception that is no
    refusal.

    The added ranks know it only once they have its record.
    """
    if not leaves_doubt(cause):
        return
    if not records:
        # As in ProcessGroup.fail_derived(): wrong arguments raise here again, and the other ranks
        # refuse them, too.
        with suppress(Exception):
            _reserve_grown(group, records, ranks_to_add)
    for record in records:
        # The failure is announced before the record is sent. So an added rank that gets the record,
        # and makes the group, finds that it has failed. Without the record it would wait for one
        # until its timeout.
        record.fail(group.job, cause)
        # The store may be what has failed. The cause is raised in any case.
        if group.rank() == 0:
            with suppress(DistError):
                record.send(group.job.store)


def _reserve_grown(
    group: ProcessGroup, records: list[GrowthRecord], ranks_to_add: Sequence[int]
) -> None:
    context = group._context
    added = check_ranks("grow_group", ranks_to_add, context.job.size)
    present = [r for r in added if r in context.ranks]
    if present:
        raise DistArgumentError(
            f"grow_group: ranks {present} are in group {context.name!r} already"
        )
    if group._backends.closed:
        raise GroupAbortedError(f"group {context.name!r} has been destroyed", group=context.name)
    number = group._backends.children + 1
    record = GrowthRecord(
        f"{context.name}/grown-{number}",
        (*context.ranks, *added),
        context.size,
        context.timeout,
        context.desc,
        group.backend_config,
    )
    # Nothing is called from here on: an exception of a signal's handler comes before both or behind
    # both.
    records += [record]
    group._backends.children = number
