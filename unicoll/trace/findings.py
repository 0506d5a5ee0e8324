"""What happened, in one sentence: the first call that has not completed on all ranks, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from unicoll.calls.ops import OPS
from unicoll.trace.dumps import Call, Group, Trace, name_ranks

_SLOW_SHARE, _SLOW_S = 0.2, 0.1
"""A rank is slow if the others wait for it alone for this share of the time, and for this many
seconds."""


class Diagnosis(NamedTuple):
    """What happened.

    Attributes:
        kind: "missing_call", "mismatch", "missing_dump", "message", "in_progress", "slow" or
            "completed".
        sentence: for people.
        group, seq: of the call, or "" and 0.
        ranks: the ranks that caused it, as far as the dumps show.
        since: when the first rank began to wait, on rank 0's clock.
    """

    kind: str
    sentence: str
    group: str = ""
    seq: int = 0
    ranks: tuple[int, ...] = ()
    since: float = 0.0

    @property
    def is_good(self) -> bool:
        """True if all calls have completed."""
        return self.kind in ("completed", "slow")


def diagnose(trace: Trace) -> list[Diagnosis]:
    """What happened first, then what else has not completed."""
    found = [_diagnose_group(trace, group) for group in trace.groups.values()]
    diagnoses = sorted((v for v in found if v is not None), key=lambda diagnosis: diagnosis.since)
    diagnoses.sort(key=lambda diagnosis: diagnosis.kind == "in_progress")
    # a rank that waits for a message makes others wait in the collective that it has not reached
    if not diagnoses and (waiting := _diagnose_messages(trace)):
        diagnoses = [waiting]
    named = {rank for diagnosis in diagnoses for rank in diagnosis.ranks}
    missing = tuple(rank for rank in trace.missing if rank not in named)
    if diagnoses and missing:
        return [*diagnoses, Diagnosis("missing_dump", _no_dump(trace, missing), ranks=missing)]
    if diagnoses:
        return diagnoses
    if missing:
        sentence = f"{_no_dump(trace, missing)}; all calls of the other ranks have completed"
        return [Diagnosis("missing_dump", sentence, ranks=missing)]
    return [_slow(trace) or Diagnosis("completed", f"all calls have completed: {_count(trace)}")]


def _diagnose_group(trace: Trace, group: Group) -> Diagnosis | None:
    """The first collective of the group that has not completed on all ranks; None if there is
    none."""
    by_rank = trace.collectives(group)
    unfinished = [seq for calls in by_rank.values() for seq, call in calls.items() if call.is_open]
    if not unfinished:
        return None
    seq = min(unfinished)
    there = {rank: calls[seq] for rank, calls in by_rank.items() if seq in calls}
    absent = [rank for rank, calls in by_rank.items() if max(calls, default=0) < seq]
    lost = [rank for rank in trace.missing if rank in group.ranks]
    waiting = [call for call in there.values() if call.is_open]
    first = min(waiting, key=lambda call: call.created)
    name = f"{first.op} #{seq} of group {group.name!r} ({first.arguments})"
    waited = _waited(trace, waiting)

    def diagnosis(kind: str, sentence: str, ranks: Sequence[int]) -> Diagnosis:
        whole = "; ".join([sentence, *_different_lines(by_rank, seq)])
        return Diagnosis(kind, whole, group.name, seq, tuple(ranks), first.created)

    if len(sides := _sides(there.values())) > 1:
        texts = [
            f"{name_ranks([c.rank for c in side])} {side[0].text} at {side[0].place}"
            for side in sides
        ]
        called = f"the ranks called different operations as #{seq} of group {group.name!r}"
        smallest = min(sides, key=len)
        return diagnosis("mismatch", f"{called}: {'; '.join(texts)}", [c.rank for c in smallest])
    died = [rank for rank in lost if rank in trace.departed]
    if died or (lost and not absent):
        ranks = died or lost
        return diagnosis("missing_dump", f"{_no_dump(trace, ranks)}; {waited} in {name}", ranks)
    if absent:
        called = f"{name_ranks(absent)} {_have(absent)} not called {name}"
        parts = [called, f"{waited} in it", *[_where(trace, rank) for rank in absent[:4]]]
        return diagnosis("missing_call", "; ".join(parts), absent)
    last = max(there.values(), key=lambda call: call.created)
    came = (
        f"{name_ranks([last.rank])} was the last, {last.created - first.created:.3g} s after the"
        " first"
    )
    return diagnosis(
        "in_progress", f"all ranks have called {name}; {came}; {waited} in it", [last.rank]
    )


def _different_lines(by_rank: Mapping[int, Mapping[int, Call]], seq: int) -> list[str]:
    """From which call on, up to ``seq``, the ranks made each call from different lines, if a rank
    has skipped a call.

    After a skipped call a rank's line is that of another rank's next or previous call. Two branches
    of a condition have different lines, too, but not such ones.
    """
    first: list[Call] = []
    skipped = False
    for number in range(seq, 0, -1):
        calls = [made[number] for made in by_rank.values() if number in made]
        # Some ranks have not called it.
        if number == seq and len(calls) < len(by_rank):
            continue
        if len({call.place for call in calls}) < 2:
            break
        first = calls
        for made in by_rank.values():
            others = {call.place for call in calls} - {made[number].place if number in made else ""}
            skipped |= any(made[n].place in others for n in (number - 1, number + 1) if n in made)
    if not skipped or len(_sides(first)) > 1:
        return []
    places: dict[str, list[int]] = defaultdict(list)
    for call in first:
        places[call.place].append(call.rank)
    texts = [f"{name_ranks(ranks)} at {place}" for place, ranks in places.items()]
    return [
        f"since {first[0].op} #{first[0].seq} the ranks call from different lines:"
        f" {'; '.join(texts)}"
    ]


def _key(call: Call) -> Any:
    """What ranks that agree have in common."""
    op = OPS.get(call.op)
    arrays = call.inputs or call.outputs
    types = {dtype for dtype, _ in arrays}
    shapes = arrays if op is not None and not op.uneven else ()
    return call.op, call.reduce, call.root, frozenset(types), shapes


def _sides(calls: Iterable[Call]) -> list[list[Call]]:
    found: dict[Any, list[Call]] = defaultdict(list)
    for call in calls:
        found[_key(call)].append(call)
    return sorted(found.values(), key=lambda side: (-len(side), side[0].rank))


def _diagnose_messages(trace: Trace) -> Diagnosis | None:
    """The messages that wait, if no collective does."""
    waiting = [c for d in trace.dumps.values() for c in d.calls if c.is_message and c.is_open]
    if not waiting:
        return None
    waiting.sort(key=lambda call: call.created)
    first = waiting[0]
    parts = [
        f"rank {c.rank} has waited for {_seconds(trace, c):.3g} s in {c.text} of group {c.group!r}"
        f" at {c.place}"
        for c in waiting[:4]
    ]
    ranks = {c.rank for c in waiting}
    peers = {c.ranks[c.peer] for c in waiting[:4] if c.peer >= 0} - ranks
    parts += [_where(trace, rank) for rank in sorted(peers & trace.dumps.keys())]
    parts += (
        [_no_dump(trace, sorted(peers - trace.dumps.keys()))] if peers - trace.dumps.keys() else []
    )
    return Diagnosis(
        "message", "; ".join(parts), first.group, 0, tuple(sorted(peers or ranks)), first.created
    )


def _where(trace: Trace, rank: int) -> str:
    """Where a rank is that has not made a call."""
    dump = trace.dumps[rank]
    inside = [call for call in dump.calls if call.is_open]
    if inside:
        call = inside[0]
        number = f" #{call.seq}" if call.seq else ""
        return f"rank {rank} is in {call.text}{number} of group {call.group!r} at {call.place}"
    if rank in trace.departed:
        return trace.departed[rank]
    return (
        f"rank {rank} is at {dump.place}"
        if dump.place
        else f"rank {rank} is in no code of the user"
    )


def _no_dump(trace: Trace, ranks: Sequence[int]) -> str:
    texts = [trace.departed[rank] for rank in ranks if rank in trace.departed]
    silent = [rank for rank in ranks if rank not in trace.departed]
    if silent:
        why = "it died or was not reached" if len(silent) == 1 else "they died or were not reached"
        texts.append(f"{name_ranks(silent)} left no dump: {why}")
    return "; ".join(texts)


def _waited(trace: Trace, calls: Sequence[Call]) -> str:
    ranks = [call.rank for call in calls]
    longest = max(_seconds(trace, call) for call in calls)
    return f"{name_ranks(ranks)} {_have(ranks)} waited for {longest:.3g} s"


def _seconds(trace: Trace, call: Call) -> float:
    return max(0.0, (call.ended or trace.dumps[call.rank].written) - call.created)


def _have(ranks: Sequence[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _count(trace: Trace) -> str:
    calls = sum(len(dump.calls) for dump in trace.dumps.values())
    return f"{calls} of {name_ranks(list(trace.dumps))}"


def _slow(trace: Trace) -> Diagnosis | None:
    """The rank for which the others wait, if there is one."""
    alone: Counter[int] = Counter()
    times: list[float] = []
    uncertain = trace.clock_error or 0.0
    for calls in trace.complete_collectives():
        if len(calls) > 1:
            *_, second, last = sorted(calls, key=lambda call: call.created)
            alone[last.rank] += max(0.0, last.created - second.created - uncertain)  # type: ignore[assignment]
            times += [second.created, last.ended or last.created]
    if not times:
        return None
    (rank, seconds), *_ = alone.most_common(1)
    span = max(times) - min(times)
    if seconds < max(_SLOW_S, _SLOW_SHARE * span) or seconds < sum(alone.values()) / 2:
        return None
    waited = f"the other ranks have waited for it alone for {seconds:.3g} s of {span:.3g} s"
    sentence = f"all calls have completed: {_count(trace)}; rank {rank} is slow: {waited}"
    return Diagnosis("slow", sentence, ranks=(rank,))
