"""What a run has found: the verdict, the bars, the summary at the end, and a plot of the costs.

``python -m tests.gpu.check.results FILE`` plots the costs of a JSON file, next to it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.check.record import headline

Stages = dict[str, Any]
_DEVICE_TIME = 1.01
_LARGE = 16 << 20
_STAGED = 64 << 20
_STAGED_TIME = 1 / 0.8
_MOST = 20
"""The most failures that the summary lists."""


def verdict(stages: Stages, wanted: Sequence[str]) -> str:
    """ "failed" if a check failed or a stage crashed, "incomplete" if not all stages and checks were finished."""
    found = [stages.get(name, {"state": "not run", "checks": []}) for name in wanted]
    outcomes = {check["outcome"] for stage in found for check in stage["checks"]}
    states = {stage["state"] for stage in found}
    if "failed" in outcomes or "crashed" in states:
        return "failed"
    return "passed" if "not run" not in outcomes and states <= {"done"} else "incomplete"


def _figures(stages: Stages, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = stages.get(stage, {}).get("figures", {})
    return found


def _ratios(row: dict[str, Any], to: str) -> Iterator[tuple[str, float]]:
    """The other contenders' medians, relative to that of one, if that was measured."""
    base = (row.get(to) or {}).get("p50_us")
    for name, stat in row.items():
        if base and name != to and stat.get("p50_us"):
            yield name, stat["p50_us"] / base


# --- bars -------------------------------------------------------------------------------------------------------


def bars(stages: Stages) -> list[dict[str, Any]]:
    """The bars with figures: what, the ratio, its maximum, and whether it is met."""
    return [
        {"what": what, "ratio": ratio, "most": most, "met": ratio <= most}
        for what, ratio, most in _bars(stages)
    ]


def _bars(stages: Stages) -> Iterator[tuple[str, float, float]]:
    for what, row in _figures(stages, "cost").get("enqueue", {}).items():
        for name, ratio in _ratios(row, "torch.distributed"):
            if name.startswith("unicoll"):
                yield f"host time to enqueue, {what}, {name} over torch.distributed", ratio, 1.0
    for what, row in _figures(stages, "device-time").get("device time", {}).items():
        for name, ratio in _ratios(row["contenders"], "bare NCCL") if row.get("bytes", 0) >= _LARGE else ():
            if name.startswith("unicoll"):
                yield f"device time, {what}, {name} over bare NCCL", ratio, _DEVICE_TIME
    for what, row in _figures(stages, "copies").items():
        share = row.get("share of the slower of bus and host")
        if share and row["bytes"] >= _STAGED:
            words = f"time of a broadcast of 64 MiB, {what}, over the slower of bus and host"
            yield words, 1 / share, _STAGED_TIME


# --- the summary ------------------------------------------------------------------------------------------------


def summary(data: dict[str, Any], path: str) -> Iterator[str]:
    """The lines of the summary of a run whose JSON is at a path."""
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
    met = Counter(bar["met"] for bar in data["bars"])
    if met:
        worst = max(data["bars"], key=lambda bar: bar["ratio"] / bar["most"])
        yield f"Bars: {met[True]} met, {met[False]} missed; the worst is {worst['ratio']:.3f}"
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


# --- the plot ---------------------------------------------------------------------------------------------------


def draw(data: dict[str, Any], path: Path) -> Path | None:
    """Plot the enqueue costs of a run; None if there are none, or matplotlib is missing."""
    rows = _figures(data["stages"], "cost").get("enqueue")
    if not rows:
        return None
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return None
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    figure, axes = pyplot.subplots(
        figsize=(11, 0.9 + 0.25 * len(rows) * (len(names) + 1)), layout="constrained"
    )
    thick = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [-(row + i * thick) for row, by_name in enumerate(rows.values()) if name in by_name]
        values = [by_name[name]["p50_us"] for by_name in rows.values() if name in by_name]
        axes.bar_label(axes.barh(places, values, thick, label=name), fmt="%.1f", padding=2, fontsize=7)
    axes.set_yticks([-(row + 0.4 - thick / 2) for row in range(len(rows))], list(rows), fontsize=8)
    axes.set_xlabel("microseconds of the host per call, median")
    device = _figures(data["stages"], "machine").get("device") or {}
    axes.set_title("Host time to enqueue" + (f" on {device['name']}" if "name" in device else ""))
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    given = Path(sys.argv[1])
    if made := draw(json.loads(given.read_text()), given.with_suffix(".png")):
        print(f"drawn: {made}")
