"""Texts about a call and the state of the other ranks, for errors and warnings.

Nothing here communicates or waits: what the other ranks have reported is in :class:`Learned`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from unicoll.backend.contract import Context
    from unicoll.calls.call import Call

MOST_RANKS = 64
"""Maximum number of ranks that a text lists."""

Report = dict[str, Any]


class Learned(NamedTuple):
    """What this rank has learned of the others before an error is made.

    Attributes:
        reports: by global rank (see :func:`unicoll.backend.operation_errors.report`); a rank that
            has not replied is not in it, and neither is this rank.
        silence: why a rank may not have replied.
        links: this rank's connections that are not acknowledged, and addresses that do not answer.
        device: the part of this rank's report that is about its device.
    """

    reports: dict[int, Report]
    silence: str = ""
    links: str = ""
    device: Report = {}


def mismatch_text(
    context: Context, call: Call, position: tuple[int, int], own_site: str, learned: Learned
) -> str:
    """A line for each rank with what it does.

    Args:
        position: a member, and the number of the call in which it is.
        own_site: ``file:line`` of this rank's call.
    """
    lines = []
    for member, rank in enumerate(context.ranks[:MOST_RANKS]):
        if member == context.rank:
            doing = f"{call.describe_with_number()}{at(own_site)}"
        else:
            seq = position[1] if member == position[0] else None
            doing = state_text(context, rank, learned, seq)
        lines.append(f"rank {rank}: {doing}")
    return "\n  ".join(lines)


def progress_text(
    call: Call, arrived: Sequence[int], absent: dict[int, str], learned: Learned, own: int
) -> str:
    """Who has reached a collective and who has not, and why that may be.

    Args:
        arrived, absent: of :func:`arrived_and_absent`.
        own: this rank in the job.
    """
    more = ", ..." if len(arrived) > MOST_RANKS else ""
    names = ", ".join(map(str, arrived[:MOST_RANKS]))
    return (
        f"; arrived: {'ranks' if len(arrived) > 1 else 'rank'} {names}{more}"
        f"; missing: {list_text(list(absent.values()))}{_differing(call, learned)}"
        f"{_on_devices(call, arrived, learned, own)}{_without_answer(learned, own)}"
    )


def _on_devices(call: Call, arrived: Sequence[int], learned: Learned, own: int) -> str:
    """What the devices of the ranks do that have put the call there; "" for calls on the host."""
    found = {**learned.reports, own: learned.device}
    states = [
        f"rank {rank}: {_on_device(call, found[rank])}"
        for rank in arrived
        if "pending" in found.get(rank, {})
    ]
    return f"; on the devices: {'; '.join(states[:MOST_RANKS])}" if states else ""


def _on_device(call: Call, report: Report) -> str:
    pending = report["pending"]
    if report.get("in_library") == call.seq:
        return "its thread is in the library, which has not enqueued it"
    if not pending or pending > call.seq:
        return "it has ended"
    what = "it has not ended" if pending == call.seq else f"#{pending} has not ended"
    return f"{what}, behind {report['behind']}" if report.get("behind") else what


def arrived_and_absent(
    context: Context, call: Call, learned: Learned
) -> tuple[list[int], dict[int, str]]:
    """Global ranks that have reached this call, and a description of the state of each other
    rank."""
    arrived: list[int] = []
    absent: dict[int, str] = {}
    for member, rank in enumerate(context.ranks):
        answer = learned.reports.get(rank)
        if member == context.rank or (answer is not None and answer.get("seq", 0) >= call.seq):
            arrived.append(rank)
        else:
            absent[rank] = f"{context.who(member)}: {state_text(context, rank, learned)}"
    return arrived, absent


def state_text(context: Context, rank: int, learned: Learned, seq: int | None = None) -> str:
    """What a rank does, which is at least in its call ``seq`` if that is known."""
    control, answer = context.job.control, learned.reports.get(rank)
    if control is not None and rank in control.departed:
        return control.departed[rank]
    if answer is None:
        place = f"; is at #{seq}" if seq else ""
        return f"sends no report ({learned.silence}){place}"
    if answer.get("unknown"):
        return "has not created this group yet, or has destroyed it"
    before = f", last was {answer['last']}" if answer.get("last") else ""
    place = at(answer["where"])
    if answer["call"]:
        return f"{answer['call']}{place}{before}"
    return f"not in a collective of this group{place and '; is'}{place}{before}"


def _differing(call: Call, learned: Learned) -> str:
    """The ranks whose call has this number and differs, for backends that do not compare calls."""
    mine = call.describe_with_number()
    others = [
        f"rank {rank} is in {answer['call']}{at(answer['where'])}"
        for rank, answer in sorted(learned.reports.items())
        if answer.get("seq") == call.seq and answer.get("call") not in (None, mine)
    ]
    return f"; the calls differ: {'; '.join(others[:MOST_RANKS])}" if others else ""


def _without_answer(learned: Learned, own: int) -> str:
    """The connections and addresses of all ranks on which nothing is acknowledged or answered."""
    found = {
        rank: answer["links"]
        for rank, answer in learned.reports.items()
        if not answer.get("unknown")
    }
    found[own] = learned.links
    lines = [f"rank {rank}: {links}" for rank, links in sorted(found.items()) if links]
    return f"; connections without an answer: {'; '.join(lines[:MOST_RANKS])}" if lines else ""


def list_text(missing: Sequence[str]) -> str:
    """Descriptions of ranks as a list, shortened."""
    more = f"; and {len(missing) - MOST_RANKS} more" if len(missing) > MOST_RANKS else ""
    return "; ".join(missing[:MOST_RANKS]) + more if missing else "none (all are waiting)"


def cause_text(cause: BaseException) -> str:
    """An exception with its type."""
    return f"{type(cause).__name__}: {cause}".removesuffix(": ")


def at(place: str) -> str:
    """A place in a program as the end of a text."""
    return f" at {place}" if place else ""
