"""What every rank does under a launcher: examine, join, compare, move data; rank 0 prints."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import unicoll as dist

from .. import net, registry, world
from . import host, pairs, probes, software
from .hints import LEVELS, Hint, hints
from .page import dumped, entry, hint_lines, unicoll_version
from .pairs import Pair, Verdict
from .probes import Facts

__all__ = ["run"]

_LEAST_PATIENCE_S = 60.0
_CLOCK_S = 1.0
"""How much the clocks of two hosts may differ: the ranks read them at the end of the same barrier."""


@dataclass
class Rank:
    """One rank as rank 0 knows it."""

    host: str
    key: str
    pid: int
    place: str
    now: float
    sections: dict[str, Facts]
    hints: list[Hint]


def run(deadline: float, as_json: bool) -> int:
    """Examine as one rank of a job; the exit status, see :func:`unicoll.doctor.main`."""
    sections = probes.ask({**software.PROBES, **host.PROBES}, deadline)
    try:
        dist.init_process_group(timeout=max(_LEAST_PATIENCE_S, 2 * deadline))
        status = _examine(sections, deadline, as_json)
        dist.destroy_process_group()
    except dist.DistError as e:
        launched = host.launched_or_none()
        rank = launched.rank if launched is not None else "?"
        sys.stdout.flush()
        sys.stderr.write(
            f"unicoll.doctor: rank {rank} (host {net.hostname()}, pid {os.getpid()}): {type(e).__name__}: {e}\n"
        )
        return 2
    return status


def _examine(sections: dict[str, Facts], deadline: float, as_json: bool) -> int:
    group = world.member(None, "doctor")
    _ask_mpi(sections)
    ranks = _gather(group, sections)
    found: dict[tuple[int, int], Pair] = {}
    for meeting in pairs.rounds(group.size()):
        found = pairs.merge(pairs.measure(group, meeting, deadline), found)
    verdict = _judge(group, found, ranks)
    for again in _spread(group, pairs.suspects(verdict) if verdict else []):
        found = pairs.merge(pairs.measure(group, [again], deadline, quiet=True), found)
    verdict = _judge(group, found, ranks)
    if verdict is None:
        return 0
    shared = _shared(ranks)
    status = max(
        [LEVELS.index(hint.level) for hint, _ in shared] + [1 * bool(verdict.slow), 2 * bool(verdict.broken)]
    )
    print(
        _as_json(ranks, shared, verdict, status) if as_json else _as_text(ranks, shared, verdict), flush=True
    )
    return status


def _ask_mpi(sections: dict[str, Facts]) -> None:
    """Where joining has started MPI, it is asked in this process."""
    if world.current("doctor").membership.meeting.mpi_started:
        seen = registry.mpi_world(_LEAST_PATIENCE_S)
        lines = [seen.library, f"arrays on a GPU: {seen.cuda}"]
        sections["mpi"] |= {"library": seen.library, "family": software.mpi_family(seen.library), "cuda": seen.cuda,
                            "lines": lines}  # fmt: skip


def _gather(group: Any, sections: dict[str, Facts]) -> list[Rank]:
    """Every rank's report, on rank 0; [] on the others."""
    address = world.current("doctor").job.addresses[0]
    group.barrier()
    interface = host.interface_of(address)
    mine = {"host": net.hostname(), "key": host.host_key(), "pid": os.getpid(), "now": time.time(),
            "place": f"{interface} {address}".strip(), "sections": sections}  # fmt: skip
    mine["hints"] = [asdict(hint) for hint in hints(sections)]
    reports = _collect(group, mine)
    return [Rank(**{**r, "hints": [Hint(**hint) for hint in r["hints"]]}) for r in reports]


def _collect(group: Any, mine: Any) -> list[Any]:
    """What each rank gives, on rank 0."""
    texts: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(json.dumps(mine, default=str), texts, dst=0)
    return [json.loads(text) for text in texts or []]


def _spread(group: Any, wanted: list[tuple[int, int]]) -> list[tuple[int, int]]:
    box = [json.dumps(wanted)]
    dist.broadcast_object_list(box, src=0)
    return [(low, high) for low, high in json.loads(box[0])]


def _judge(group: Any, found: Mapping[tuple[int, int], Pair], ranks: Sequence[Rank]) -> Verdict | None:
    """The verdict on all pairs, on rank 0."""
    mine = [asdict(pair) for pair in found.values()]
    merged: dict[tuple[int, int], Pair] = {}
    for rank, reports in enumerate(_collect(group, mine)):
        given = [Pair(**report) for report in reports]
        for pair in given:
            if pair.low != rank:  # the lower rank begins, so its times are whole
                pair.latency = pair.transfer = None
        merged = pairs.merge(given, merged)
    return pairs.judge(merged.values(), [r.key for r in ranks]) if ranks else None


# --- what rank 0 prints ------------------------------------------------------------------------------------------


def _shared(ranks: Sequence[Rank]) -> list[tuple[Hint, str]]:
    """Each hint once, with the ranks that have it where not all do; the worst first."""
    owners: dict[Hint, list[int]] = {}
    for number, rank in enumerate(ranks):
        for hint in rank.hints:
            owners.setdefault(hint, []).append(number)
    for number, rank in enumerate(ranks):
        ahead = rank.now - ranks[0].now
        first_of_host = all(other.key != rank.key for other in ranks[:number])
        if first_of_host and abs(ahead) > _CLOCK_S:
            way = "ahead of" if ahead > 0 else "behind"
            text = f"the clock of {rank.host} is {abs(ahead):.1f} s {way} that of {ranks[0].host}"
            owners[Hint("warning", "clocks", text, "run chrony or ntpd on all hosts")] = [number]
    order = sorted(owners, key=lambda hint: -LEVELS.index(hint.level))
    return [(hint, "" if len(owners[hint]) == len(ranks) else _ranks(owners[hint])) for hint in order]


def _ranks(numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-3, 7``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'' if len(numbers) == 1 else 's'} {text}"


def _hosts(ranks: Sequence[Rank]) -> list[str]:
    by_host: dict[tuple[str, str, str], list[int]] = {}
    for number, rank in enumerate(ranks):
        by_host.setdefault((rank.key, rank.host, rank.place), []).append(number)
    return [f"{_ranks(numbers)}: {name} ({place})" for (_, name, place), numbers in by_host.items()]


def _variants(ranks: Sequence[Rank], name: str) -> dict[tuple[str, ...], list[int]]:
    """The lines of a section, with the ranks that have them."""
    found: dict[tuple[str, ...], list[int]] = {}
    for number, rank in enumerate(ranks):
        facts = rank.sections[name]
        found.setdefault(tuple(facts["same"] if "same" in facts else facts["lines"]), []).append(number)
    return found


def _as_text(ranks: Sequence[Rank], shared: list[tuple[Hint, str]], verdict: Verdict) -> str:
    lines = [f"unicoll {unicoll_version()}, {len(ranks)} ranks", "", *entry("hosts", _hosts(ranks))]
    differences: list[str] = []
    for name in ranks[0].sections:
        variants = _variants(ranks, name)
        if len(variants) == 1 and name != "choice":
            lines += entry(name, next(iter(variants)) or ["nothing is known"])
        elif len(variants) > 1:
            said = [f"{_ranks(numbers)}: {'; '.join(text)}" for text, numbers in variants.items()]
            differences += entry(name, said)
    lines += ["", "init_process_group() chose, on rank 0:", *entry("", dist.explain().splitlines())]
    if differences:
        lines += ["", "what differs by rank:", *differences]
    lines += ["", *_pair_lines(ranks, verdict)]
    lines += ["", *hint_lines(shared)] if shared else ["", "no hints"]
    return "\n".join(lines)


def _pair_lines(ranks: Sequence[Rank], verdict: Verdict) -> list[str]:
    if len(ranks) == 1:
        return list(entry("pairs", ["none: there is one rank"]))
    medians = "; ".join(
        f"{kind} {latency * 1e6:.1f} us, {pairs.rate(transfer)}"
        for kind, (latency, transfer) in verdict.medians.items()
    )
    bad = len(verdict.slow) + len(verdict.broken)
    if bad:
        state = f"{verdict.checked - bad} of {verdict.checked} pairs are well"
    else:
        every = f"all {verdict.checked} pairs are" if verdict.checked > 1 else "the pair is"
        state = f"{every} well, every byte was right"
    lines = list(entry("pairs", [f"{state}{f' (median {medians})' if medians else ''}"]))
    for pair in verdict.broken:
        lines += entry("broken", [f"{_named(ranks, pair)}: {'; '.join(pair.errors)}"])
    for pair, why in verdict.slow:
        lines += entry("slow", [f"{_named(ranks, pair)}: {why}"])
    return lines


def _named(ranks: Sequence[Rank], pair: Pair) -> str:
    low, high = (f"rank {n} (host {ranks[n].host}, {ranks[n].place})" for n in (pair.low, pair.high))
    return f"{low} and {high}"


def _as_json(ranks: Sequence[Rank], shared: list[tuple[Hint, str]], verdict: Verdict, status: int) -> str:
    names = list(ranks[0].sections)
    equal = {name: ranks[0].sections[name] for name in names if len(_variants(ranks, name)) == 1}
    different = {
        name: [{"ranks": numbers, "lines": list(text)} for text, numbers in _variants(ranks, name).items()]
        for name in names
        if name not in equal
    }
    about = {
        "checked": verdict.checked,
        "medians": {kind: {"latency": a, "bandwidth": pairs.LARGE / b} for kind, (a, b) in verdict.medians.items()},
        "slow": [{"ranks": [p.low, p.high], "latency": p.latency, "bandwidth": p.bandwidth, "why": why}
                 for p, why in verdict.slow],
        "broken": [{"ranks": [p.low, p.high], "errors": p.errors} for p in verdict.broken],
    }  # fmt: skip
    listed = [{"rank": n, "host": r.host, "pid": r.pid, "interface": r.place} for n, r in enumerate(ranks)]
    content = {"ranks": listed, "sections": equal, "differences": different,
               "chosen": dist.explain().splitlines(), "pairs": about}  # fmt: skip
    return dumped(content, [{**asdict(hint), "ranks": where} for hint, where in shared], status)
