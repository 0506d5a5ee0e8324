"""The report of a job: every rank runs the probes, joins and exchanges data; rank 0 compares and
prints."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import unicoll as dist
from unicoll.api import world
from unicoll.doctor import host, pairs, probes, software
from unicoll.doctor.hints import Hint, hints
from unicoll.doctor.hints import status as worst
from unicoll.doctor.output import dumped, entry, hint_lines
from unicoll.doctor.pairs import PairSummary, RankPair
from unicoll.doctor.probes import Facts
from unicoll.group import registry
from unicoll.net.wire import interfaces
from unicoll.process.formatting import print_text, ranks_text

Key = TypeVar("Key", bound=Hashable)
Summaries = Mapping[str, PairSummary]
""""pairs": over the default group; "pairs_mpi": over MPI, if that is another backend and has
started the job."""

_MIN_TIMEOUT_S = 60.0
_CLOCK_S = 1.0
"""Tolerated difference between the clocks of two hosts; the ranks read them after the same
barrier."""
_MOST_AGAIN = 64
"""Slow pairs that are measured again."""


@dataclass
class Rank:
    """The report of one rank, as rank 0 receives it."""

    host: str
    host_key: str
    pid: int
    interface: str
    now: float
    sections: dict[str, Facts]
    hints: list[Hint]


def run(deadline: float, as_json: bool) -> int:
    """Run as one rank of a job; returns the exit status, see :func:`unicoll.doctor.main`."""
    sections = probes.run_probes({**software.PROBES, **host.PROBES}, deadline)
    try:
        dist.init_process_group(timeout=max(_MIN_TIMEOUT_S, 2 * deadline))
        status = _report(sections, deadline, as_json)
        dist.destroy_process_group()
    except dist.DistError as e:
        launched = host.launched_or_none()
        rank = launched.rank if launched is not None else "?"
        sys.stdout.flush()
        sys.stderr.write(
            f"unicoll.doctor: rank {rank} (host {interfaces.hostname()}, pid {os.getpid()}):"
            f" {type(e).__name__}: {e}\n"
        )
        return 2
    return status


def _report(sections: dict[str, Facts], deadline: float, as_json: bool) -> int:
    group = world.member(None, "doctor")
    _add_facts_of_joining(sections)
    ranks = _gather(group, sections)
    summaries = {"pairs": _measure(group, ranks, deadline)}
    if _mpi_is_beside(group):
        summaries["pairs_mpi"] = _measure(dist.new_group(backend="mpi"), ranks, deadline)
    if not ranks:
        return 0
    shared = _shared(ranks)
    status = worst(hint for hint, _ in shared)
    for summary in summaries.values():
        status = max(status, 1 * bool(summary.slow), 2 * bool(summary.broken))
    print_text(
        _as_json(ranks, shared, summaries, status)
        if as_json
        else _as_text(ranks, shared, summaries)
    )
    return status


def _mpi_is_beside(group: Any) -> bool:
    """True if MPI has started this job of several ranks and its default group uses another
    backend."""
    started: bool = world.current("doctor").rendezvous.found.mpi_started
    return started and group.size() > 1 and group.backend_name != "mpi"


def _measure(group: Any, ranks: Sequence[Rank], deadline: float) -> PairSummary:
    """Measure all pairs over a group's backend, slow ones again; the summary is complete on rank
    0."""
    measured: dict[tuple[int, int], RankPair] = {}
    for round_pairs in pairs.rounds(group.size()):
        measured = pairs.merge(pairs.measure(group, round_pairs, deadline), measured)
    summary = _summarize(group, measured, ranks)
    slow = [[(pair.low, pair.high) for pair, _ in summary.slow[:_MOST_AGAIN]]]
    dist.broadcast_object_list(slow, src=0)
    for pair in slow[0]:
        measured = pairs.merge(pairs.measure(group, [pair], deadline, quiet=True), measured)
    return _summarize(group, measured, ranks)


def _add_facts_of_joining(sections: dict[str, Facts]) -> None:
    """Add who can join, and the facts about MPI if joining has initialised MPI in this process."""
    rendezvous = world.current("doctor").rendezvous
    sections["environment"]["trusted"] = rendezvous.trusted
    if rendezvous.found.mpi_started:
        mpi = registry.mpi_world(_MIN_TIMEOUT_S)
        lines = [mpi.library, f"arrays on a GPU: {mpi.cuda}"]
        sections["mpi"] |= {
            "library": mpi.library,
            "family": software.mpi_family(mpi.library),
            "cuda": mpi.cuda,
            "lines": lines,
        }


def _gather(group: Any, sections: dict[str, Facts]) -> list[Rank]:
    """The reports of all ranks, on rank 0; [] on the others."""
    address = world.current("doctor").addresses[0]
    group.barrier()
    interface_name = host.interface_of(address)
    own = Rank(
        host=interfaces.hostname(),
        host_key=host.host_key(),
        pid=os.getpid(),
        interface=f"{interface_name} {address}".strip(),
        now=time.time(),
        sections=sections,
        hints=hints(sections),
    )
    reports = _collect(group, asdict(own))
    return [Rank(**{**r, "hints": [Hint(**hint) for hint in r["hints"]]}) for r in reports]


def _collect(group: Any, own: Any) -> list[Any]:
    """Gather a value of plain types from each rank on rank 0; [] on the others."""
    gathered: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(own, gathered, dst=0)
    return gathered or []


def _summarize(
    group: Any, measured: Mapping[tuple[int, int], RankPair], ranks: Sequence[Rank]
) -> PairSummary:
    """The summary of all pairs, on rank 0; that of no pairs on the others."""
    own = [asdict(pair) for pair in measured.values()]
    merged: dict[tuple[int, int], RankPair] = {}
    for rank, reports in enumerate(_collect(group, own)):
        reported = [RankPair(**report) for report in reports]
        for pair in reported:
            # The lower rank starts the round trips, so only its times are complete.
            if pair.low != rank:
                pair.latency = pair.transfer = None
        merged = pairs.merge(reported, merged)
    return pairs.summarize(merged.values(), [r.host_key for r in ranks])


# --- output of rank 0 -----------------------------------------------------------------------------


def _shared(ranks: Sequence[Rank]) -> list[tuple[Hint, str]]:
    """Each hint once, with its ranks unless all ranks have it; sorted by severity."""
    owners: dict[Hint, list[int]] = {}
    for number, rank in enumerate(ranks):
        for hint in rank.hints:
            owners.setdefault(hint, []).append(number)
    for number, rank in enumerate(ranks):
        ahead = rank.now - ranks[0].now
        first_of_host = all(other.host_key != rank.host_key for other in ranks[:number])
        if first_of_host and abs(ahead) > _CLOCK_S:
            relation = "ahead of" if ahead > 0 else "behind"
            text = (
                f"the clock of {rank.host} is {abs(ahead):.1f} s {relation} that of {ranks[0].host}"
            )
            owners[Hint("warning", "clocks", text, "run chrony or ntpd on all hosts")] = [number]
    order = sorted(owners, key=lambda hint: -hint.severity)
    return [
        (hint, "" if len(owners[hint]) == len(ranks) else ranks_text(owners[hint]))
        for hint in order
    ]


def _grouped(keys: Iterable[Key]) -> dict[Key, list[int]]:
    """The distinct keys of the ranks, each with its ranks."""
    found: dict[Key, list[int]] = {}
    for rank, key in enumerate(keys):
        found.setdefault(key, []).append(rank)
    return found


def _hosts(ranks: Sequence[Rank]) -> list[str]:
    by_host = _grouped((rank.host_key, rank.host, rank.interface) for rank in ranks)
    return [
        f"{ranks_text(numbers)}: {name} ({interface})"
        for (_, name, interface), numbers in by_host.items()
    ]


def _variants(ranks: Sequence[Rank], name: str) -> dict[tuple[str, ...], list[int]]:
    """The distinct texts of a section, with their ranks."""
    sections = [rank.sections[name] for rank in ranks]
    return _grouped(tuple(facts["same" if "same" in facts else "lines"]) for facts in sections)


def _as_text(ranks: Sequence[Rank], shared: list[tuple[Hint, str]], summaries: Summaries) -> str:
    lines = [f"unicoll {dist.__version__}, {len(ranks)} ranks", "", *entry("hosts", _hosts(ranks))]
    differences: list[str] = []
    for name in ranks[0].sections:
        variants = _variants(ranks, name)
        if len(variants) == 1 and name != "choice":
            lines += entry(name, next(iter(variants)) or ["unknown"])
        elif len(variants) > 1:
            texts = [
                f"{ranks_text(numbers)}: {'; '.join(text)}" for text, numbers in variants.items()
            ]
            differences += entry(name, texts)
    lines += ["", "init_process_group() chose, on rank 0:", *entry("", dist.explain().splitlines())]
    if differences:
        lines += ["", "differences between ranks:", *differences]
    lines += [""]
    for name, summary in summaries.items():
        lines += _pair_lines(name.replace("_", ", "), ranks, summary)
    lines += ["", *hint_lines(shared)] if shared else ["", "no hints"]
    return "\n".join(lines)


def _pair_lines(name: str, ranks: Sequence[Rank], summary: PairSummary) -> list[str]:
    if len(ranks) == 1:
        return list(entry(name, ["none: the job has one rank"]))
    medians = "; ".join(
        f"{kind} {latency * 1e6:.1f} us, {pairs.rate(transfer)}"
        for kind, (latency, transfer) in summary.medians.items()
    )
    bad = len(summary.slow) + len(summary.broken)
    if bad:
        state = f"{summary.checked - bad} of {summary.checked} pairs are ok"
    else:
        subject = f"all {summary.checked} pairs are" if summary.checked > 1 else "the pair is"
        state = f"{subject} ok, all bytes were correct"
    lines = list(entry(name, [f"{state}{f' (median {medians})' if medians else ''}"]))
    for pair in summary.broken:
        lines += entry("broken", [f"{_pair_text(ranks, pair)}: {'; '.join(pair.errors)}"])
    for pair, why in summary.slow:
        lines += entry("slow", [f"{_pair_text(ranks, pair)}: {why}"])
    return lines


def _pair_text(ranks: Sequence[Rank], pair: RankPair) -> str:
    low, high = (
        f"rank {n} (host {ranks[n].host}, {ranks[n].interface})" for n in (pair.low, pair.high)
    )
    return f"{low} and {high}"


def _pair_facts(summary: PairSummary) -> Facts:
    return {
        "checked": summary.checked,
        "medians": {
            kind: {"latency": a, "bandwidth": pairs.LARGE / b}
            for kind, (a, b) in summary.medians.items()
        },
        "slow": [
            {"ranks": [p.low, p.high], "latency": p.latency, "bandwidth": p.bandwidth, "why": why}
            for p, why in summary.slow
        ],
        "broken": [{"ranks": [p.low, p.high], "errors": p.errors} for p in summary.broken],
    }


def _as_json(
    ranks: Sequence[Rank], shared: list[tuple[Hint, str]], summaries: Summaries, status: int
) -> str:
    names = list(ranks[0].sections)
    equal = {name: ranks[0].sections[name] for name in names if len(_variants(ranks, name)) == 1}
    different = {
        name: [
            {"ranks": numbers, "lines": list(text)}
            for text, numbers in _variants(ranks, name).items()
        ]
        for name in names
        if name not in equal
    }
    listed = [
        {"rank": n, "host": r.host, "pid": r.pid, "interface": r.interface}
        for n, r in enumerate(ranks)
    ]
    content = {
        "ranks": listed,
        "sections": equal,
        "differences": different,
        "chosen": dist.explain().splitlines(),
    }
    content |= {name: _pair_facts(summary) for name, summary in summaries.items()}
    return dumped(content, [{**asdict(hint), "ranks": where} for hint, where in shared], status)
