"""Compares the collectives that the ranks of a group have made, after they were made.

This is for libraries that do not compare them (NCCL), whose ranks hang if their calls differ, or
get wrong results. The calls are those that the flight recorder has. A few times a second each rank
sends signatures of its recorded calls to the comparing rank over the control plane: the first rank
of the group that has not ended. That rank compares those of equal numbers. On a difference it asks
for the calls, and the group fails. If calls are made faster than that, some are compared: those
whose numbers are multiples of a power of two, the last one, and the one in which a rank is blocked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol
from zlib import crc32

from unicoll.backend import operation_errors
from unicoll.backend.contract import Context
from unicoll.calls.flight_recorder import CallKind
from unicoll.calls.ops import OPS, Sizes
from unicoll.errors import CollectiveMismatchError
from unicoll.net.control.wait_graph import backend_group_of
from unicoll.process.formatting import printable_line, ranks_text

Message = dict[str, Any]
Signature = tuple[int, int]

_MOST = 64
"""Calls in one message."""
_KEPT = 1024
"""Numbers of which signatures are kept."""
_SIGNATURES = 64 * _KEPT
"""Most signatures of other ranks that are kept."""
_AGAIN_S = 2.0
"""After this time the last call is sent again, if one is in progress: the comparing rank may not
have had the group."""
_OTHERS_S = 1.0
"""How long a difference waits for the signatures of the other ranks, which show whose call
differs."""
_SHOWN = 16
"""Different calls that an error lists."""
_LAST = 16
"""Calls that a rank describes when it closes the group."""


class Recorded(Protocol):
    """A collective in the flight recorder: of unicoll a
    :class:`~unicoll.calls.flight_recorder.PendingEntry`, of torch a ``TorchCall``."""

    @property
    def seq(self) -> int:
        """Its number in the group, from 1."""

    @property
    def kind(self) -> CallKind:
        """What it has in common with other calls."""

    @property
    def site(self) -> str:
        """``file:line`` of the caller."""


class CallInProgress(NamedTuple):
    """A collective in progress that the flight recorder does not have yet; the attributes are those
    of :class:`Recorded`."""

    seq: int
    kind: CallKind
    site: str


class _Compared(NamedTuple):
    """A call of this rank, and its signature: a number, and 1 for one that was recorded, else 0."""

    call: Recorded
    signature: Signature

    def differs(self, other: Signature) -> bool:
        """True if another rank's call does not fit this one."""
        return self.signature[0] != other[0] and self.signature[1] == other[1]


class _Difference(NamedTuple):
    """A number whose calls differ: this rank's, and the signatures of others, by rank; and since
    when it is known."""

    number: int
    mine: _Compared
    others: dict[int, Signature]
    since: float


class CallComparison:
    """The comparison of one group's calls on one rank; one thread uses it, others :meth:`report`
    and :meth:`lacks`.

    Attributes:
        name: backend and group, in messages.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.name = backend_group_of(context.backend, context.name)
        # The rank that the signatures were sent to.
        self._comparing = -1
        # Number of the last call in _calls.
        self._newest = 0
        self._sent_at = 0.0
        self._calls: dict[int, _Compared] = {}
        # Signatures of other ranks on the comparing rank, by number and rank.
        self._others: dict[int, dict[int, Signature]] = {}
        # On the comparing rank, of ranks that have closed the group: texts by rank and number, and
        # the number of the last call by rank.
        self._texts: dict[tuple[int, int], str] = {}
        self._final: dict[int, int] = {}
        # When the comparing rank was asked, and how many ranks had ended.
        self._asked = (0.0, 0)
        self._difference: _Difference | None = None
        self._key = f"{context.backend} calls"
        if context.job.control is not None:
            context.job.control.watch(context.name, self._key, lambda error: None, self.report)

    def add(
        self,
        calls: Sequence[Recorded],
        oldest: int = 0,
        unrecorded: CallInProgress | None = None,
    ) -> None:
        """Keep the calls that are new among ``calls``, this rank's last ones, and send their
        signatures.

        Args:
            oldest: number of the oldest call in progress; 0 if there is none.
            unrecorded: that call, if it was not recorded, as another library's recorder has it.
                That may have another operation for it: torch's has an all_reduce for Gloo's
                reduce_scatter. So it is compared with others of this kind only.
        """
        # Coalesced calls have one number in torch, and the first of them is compared.
        by_number: dict[int, Recorded] = {}
        for call in calls:
            by_number.setdefault(call.seq, call)
        new = [number for number in by_number if number > self._newest]
        self._newest, step = max(new, default=self._newest), 1
        # Ranks with different steps have numbers in common, since the steps are powers of two.
        while sum(number % step == 0 for number in new) > _MOST:
            step *= 2
        chosen = {
            number for number in new if number % step == 0 or number == self._newest
        } | self._others.keys()
        if oldest:
            chosen.add(oldest)
        fresh = sorted(number for number in chosen & by_number.keys() if number not in self._calls)
        for number in fresh:
            made = by_number[number]
            self._calls[number] = _Compared(made, (_signature(made.kind), 1))
        if unrecorded is not None and unrecorded.seq not in self._calls:
            fresh.append(unrecorded.seq)
            self._calls[unrecorded.seq] = _Compared(unrecorded, (_signature(unrecorded.kind), 0))
        _shorten(self._calls)
        last = max(self._calls, default=0)
        if last and oldest and not fresh:
            fresh = [last] if time.monotonic() - self._sent_at >= _AGAIN_S else []
        comparing = next(self._remaining(), self._context.job.rank)
        # The last comparing rank, if there was one, has ended, and the new one has none of these
        # signatures.
        if comparing != self._comparing:
            self._comparing = comparing
            fresh = sorted(self._calls)[-_MOST:]
        if fresh and comparing != self._context.job.rank:
            self._sent_at = time.monotonic()
            self.send([comparing], {"calls": self._signatures(fresh)})

    @property
    def known_until(self) -> int:
        """The recorded calls up to this number need not be given to :meth:`add` again."""
        return min([self._newest, *(n - 1 for n in [*self._others] if n not in self._calls)])

    def _remaining(self) -> Iterator[int]:
        """The ranks that have not ended, in order of the group."""
        control = self._context.job.control
        departed = control.departed if control is not None else {}
        return (rank for rank in self._context.ranks if rank not in departed)

    def _signatures(self, numbers: Sequence[int]) -> list[list[int]]:
        return [[number, *self._calls[number].signature] for number in numbers]

    def send(self, ranks: Sequence[int], what: Message) -> None:
        """Send a message about this rank's calls to members."""
        control = self._context.job.control
        if control is not None and ranks:
            header = {
                "t": "calls",
                "to": [*ranks],
                "group": self.name,
                "from": self._context.job.rank,
            }
            control.send({**header, **what})

    def receive(self, rank: int, message: Message) -> None:
        """Signatures of another rank, on the comparing one; with more if that rank has closed the
        group."""
        for number, signature, recorded in message.get("calls", ()):
            self._others.setdefault(int(number), {})[rank] = int(signature), int(recorded)
        # Other ranks may be far ahead of this one.
        _shorten(self._others, max(_MOST, _SIGNATURES // self._context.size))
        texts, final = message.get("texts", {}), message.get("final", {})
        self._texts.update(
            {(rank, int(number)): printable_line(text) for number, text in texts.items()}
        )
        self._final.update({int(closed): int(number) for closed, number in final.items()})

    def lacks(self, number: int) -> int | None:
        """A rank that has left the job without this collective, or None; the comparing rank is
        asked.

        The ranks that leave do not tell all others: a job's end would need as many messages as it
        has pairs of ranks.
        """
        control = self._context.job.control
        departed = [
            rank for rank in self._context.ranks if control is not None and rank in control.departed
        ]
        if not departed or control is None:
            return None
        comparing, now = next(self._remaining()), time.monotonic()
        # The answer may take a second, so the question is repeated only after a while, or when
        # another rank has ended.
        if comparing != self._context.job.rank and (
            now - self._asked[0] >= _AGAIN_S or self._asked[1] != len(departed)
        ):
            self._asked = now, len(departed)
            reports = control.request_reports(self._context.name, self._key, {comparing})
            final = reports.get(comparing, {}).get("final", {})
            self._final.update({int(closed): int(last) for closed, last in final.items()})
        # A rank whose last number is not known counts as one that has made the call.
        return next((rank for rank in departed if self._final.get(rank, number) < number), None)

    def find_difference(self) -> CollectiveMismatchError | None:
        """The error of calls that differ; on the comparing rank only."""
        found = self._difference = self._difference or self._first_difference()
        if found is None:
            return None
        absent = {*self._remaining()} - {self._context.job.rank, *found.others}
        if absent and time.monotonic() - found.since < _OTHERS_S:
            return None
        self._difference = None
        return self._error(found)

    def _first_difference(self) -> _Difference | None:
        for number in sorted(self._calls.keys() & self._others.keys()):
            mine, others = self._calls[number], self._others[number]
            if any(map(mine.differs, others.values())):
                return _Difference(number, mine, others, time.monotonic())
            # All members have made the call, and none differs.
            if len(others) == self._context.size - 1:
                del self._others[number]
        return None

    def _error(self, found: _Difference) -> CollectiveMismatchError:
        context, number, own = self._context, found.number, self._context.job.rank
        signatures = {own: found.mine.signature, **found.others}
        alike: dict[Signature, list[int]] = {}
        for rank in sorted(signatures):
            alike.setdefault(signatures[rank], []).append(rank)
        shown = [*alike.values()][:_SHOWN]
        texts = self._request_texts(number, {ranks[0] for ranks in shown} - {own})
        texts[own] = _text(found.mine)
        lines = [f"{self._who(ranks)}: {texts.get(ranks[0], 'another call')}" for ranks in shown]
        return CollectiveMismatchError(
            f"the calls #{number} of the ranks of group {context.name!r} differ:\n  "
            + "\n  ".join(lines),
            group=context.name,
            rank=operation_errors.only_different(
                {rank: str(one) for rank, one in signatures.items()}
            ),
            op=found.mine.call.kind.op,
            seq=number,
        )

    def _who(self, ranks: Sequence[int]) -> str:
        context = self._context
        return ranks_text(ranks) if ranks[1:] else context.who(context.ranks.index(ranks[0]))

    def _request_texts(self, number: int, ranks: set[int]) -> dict[int, str]:
        control = self._context.job.control
        # Without a control plane there are no signatures of other ranks.
        assert control is not None
        known = {rank: self._texts[rank, number] for rank in ranks if (rank, number) in self._texts}
        reports = control.request_reports(self._context.name, self._key, ranks - known.keys())
        texts = {rank: found.get("texts", {}).get(str(number)) for rank, found in reports.items()}
        return {rank: text for rank, text in (known | texts).items() if isinstance(text, str)}

    def report(self, most: int = 2 * _MOST) -> Message:
        """What other ranks ask for (on the control thread): the last calls whose signatures were
        sent, and more."""
        # A copy in one step, because the thread that compares changes it meanwhile.
        calls = dict(self._calls)
        texts = {str(number): _text(calls[number]) for number in sorted(calls)[-most:]}
        return {
            "texts": texts,
            "final": {str(rank): number for rank, number in [*self._final.items()]},
        }

    def close(self, calls: Sequence[Recorded], final: int | None) -> None:
        """Send what is needed after this rank has gone to the rank that compares then.

        Args:
            calls: as for :meth:`add`.
            final: number of this rank's last collective; None if it is not known.
        """
        self.add(calls)
        own = self._context.job.rank
        if final is not None:
            self._final[own] = final
        comparing = next((rank for rank in self._remaining() if rank != own), None)
        if comparing is not None:
            signatures = self._signatures(sorted(self._calls)[-_MOST:])
            self.send([comparing], {"calls": signatures, **self.report(_LAST)})
        if self._context.job.control is not None:
            self._context.job.control.unwatch(self._context.name, self._key)


_FAMILIES = {
    "all_gather_into_tensor": OPS["all_gather"].code,
    "reduce_scatter_tensor": OPS["reduce_scatter"].code,
    "all_to_all_single": OPS["all_to_all"].code,
}
"""Operations that fit others."""


def _shorten(by_number: dict[int, Any], most: int = _KEPT) -> None:
    while len(by_number) > most:
        del by_number[min(by_number)]


def _text(compared: _Compared) -> str:
    call = compared.call
    return f"{call.kind.describe()[:400]}{call.site and f' at {call.site}'}"


def _signature(kind: CallKind) -> int:
    """A number that is equal on ranks whose calls fit each other.

    It covers the operation, the root, and what torch and its backends need to be equal: element
    type and number of elements of reductions, the bytes of other collectives, and nothing where the
    ranks' sizes may differ. Hashes of tuples of numbers do not depend on PYTHONHASHSEED.
    """
    op = OPS[kind.op]
    code = _FAMILIES.get(kind.op, op.code)
    if op.root_has_sizes or op.sizes is Sizes.EXCHANGED:
        return hash((code, kind.root))
    listed = kind.outputs if op.sizes in (Sizes.GATHERED, Sizes.GATHERED_FLAT) else kind.inputs
    if not op.reduces:
        return hash((code, kind.root, sum(prod(shape) * d.itemsize for d, shape in listed)))
    types = {dtype.code for dtype, _ in listed}
    count = sum(prod(shape) for _, shape in listed)
    # The reduction is known as text only.
    return hash((code, kind.root, crc32(kind.reduce.encode()), *types, count))
