"""The summary at the end of a run: checks that passed and failed with reasons, and five figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.gpu.check.record import headline

__all__ = ["figures", "lines"]

_MOST = 20
_LARGE = "all_reduce (with a factor), "
Stages = dict[str, Any]


def lines(data: dict[str, Any], path: str) -> Iterator[str]:
    """The summary of a run whose JSON is at a path."""
    stages = data["stages"]
    yield ""
    yield f"Stages ({data['seconds']:.0f} s of {data['budget_s']:.0f}):"
    for name, stage in stages.items():
        yield f"  {name:14} {_stage(stage)}"
    failures = [*_failures(stages)]
    if failures:
        yield "Failed:"
        yield from (f"  {text}" for text in failures[:_MOST])
        if len(failures) > _MOST:
            yield f"  and {len(failures) - _MOST} more, in the JSON"
    yield "Figures:"
    yield from (f"  {what}: {value}" for what, value in figures(stages).items())
    bars = Counter(bar["met"] for bar in data["bars"])
    if bars:
        worst = max(data["bars"], key=lambda bar: bar["ratio"] / bar["most"])
        yield f"Bars: {bars[True]} met, {bars[False]} missed; the worst is {worst['ratio']:.3f}"
        yield f"  (at most {worst['most']:g}): {worst['what']}"
    yield f"{data['verdict']}: {path}"


def _stage(stage: dict[str, Any]) -> str:
    counts = Counter(check["outcome"] for check in stage["checks"])
    parts = [f"{counts[word]} {word}" for word in ("passed", "failed", "skipped", "not run") if counts[word]]
    if stage["state"] != "done":
        parts.append(stage["state"] + (f" in: {stage['doing']}" if "doing" in stage else ""))
    return ", ".join(parts) or "nothing to check"


def _failures(stages: Stages) -> Iterator[str]:
    for name, stage in stages.items():
        for check in stage["checks"]:
            if check["outcome"] == "failed":
                yield f"{name}, {check['name']}: {headline(check['detail'])}"
        if stage["state"] == "crashed":
            yield f"{name} crashed: {headline(stage.get('stderr', ''))}"


# --- the five figures -------------------------------------------------------------------------------------------


def figures(stages: Stages) -> dict[str, str]:
    """The five figures as text; those that were not measured say so."""
    found = {
        "us of the host for an all_reduce of 8 B in the background": _host(stages),
        "device time of a large all_reduce, over bare NCCL's": _device(stages),
        "a missing rank": _missing(stages),
        "conformance cases": _cases(stages),
        "share of bus and host that gloo makes of CUDA arrays": _shares(stages),
    }
    return {what: text or "not measured" for what, text in found.items()}


def _of(stages: Stages, name: str) -> dict[str, Any]:
    found: dict[str, Any] = stages.get(name, {}).get("figures", {})
    return found


def _host(stages: Stages) -> str:
    row = _of(stages, "cost").get("enqueue", {}).get("all_reduce in the background and wait, 8 B", {})
    return "; ".join(f"{name} {stat['p50_us']:.1f}" for name, stat in row.items())


def _device(stages: Stages) -> str:
    rows = _of(stages, "device-time").get("device time", {})
    for what, row in reversed(rows.items()):
        floor = row["contenders"].get("bare NCCL", {}).get("p50_us")
        if what.startswith(_LARGE) and floor:
            others = [
                (name, stat["p50_us"]) for name, stat in row["contenders"].items() if name != "bare NCCL"
            ]
            return f"{what[len(_LARGE) :]}: " + "; ".join(f"{name} {us / floor:.3f}" for name, us in others)
    return ""


def _missing(stages: Stages) -> str:
    found = _of(stages, "deadline")
    late = found.get("a missing rank is named at the deadline", {}).get("seconds after the deadline")
    after = found.get("others shrink the group after the deadline", {}).get("seconds")
    parts = [f"{late:.1f} s from the deadline to the error"] if late is not None else []
    return ", ".join([*parts, *([f"{after:.1f} s to go on without it"] if after is not None else [])])


def _cases(stages: Stages) -> str:
    parts = []
    for size in (1, 2, 4):
        found = _of(stages, f"conformance-{size}")
        runs = [figure for what, figure in found.items() if what.startswith("cases, ")]
        if runs:
            failed = sum(run["batches failed"] for run in runs)
            parts.append(f"{sum(run['run'] for run in runs)} on {size} ({failed} batches failed)")
    return ", ".join(parts)


def _shares(stages: Stages) -> str:
    return "; ".join(
        f"{what.partition(':')[0]} {row['share of the slower of bus and host']:.2f}"
        for what, row in _of(stages, "copies").items()
        if what.endswith("backend gloo")
    )
