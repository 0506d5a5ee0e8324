"""A plot of the costs: microseconds per call, by operation and library.

``python -m tests.gpu.check.plot FILE`` plots the figures of a JSON file, next to it.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["draw"]


def draw(data: dict[str, Any], path: Path) -> Path | None:
    """Plot the enqueue costs of a run; None if there are none, or matplotlib is missing."""
    rows = data["stages"].get("cost", {}).get("figures", {}).get("enqueue")
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
        bars = axes.barh(places, values, thick, label=name)
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
    axes.set_yticks([-(row + 0.4 - thick / 2) for row in range(len(rows))], list(rows), fontsize=8)
    axes.set_xlabel("microseconds of the host per call, median")
    device = data["stages"].get("machine", {}).get("figures", {}).get("device") or {}
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
