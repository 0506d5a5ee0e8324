"""Latency and bus bandwidth over the size, one curve per contender, both axes logarithmic.

Contenders differ in marker, dash and shade, so that the plot is readable in black and white. Its
only input is the JSON of a run.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

from unicoll.bench.args import short
from unicoll.bench.contenders import label
from unicoll.bench.operations import OPERATIONS
from unicoll.bench.table import compared_result, time_us
from unicoll.process.files import write_whole

_STYLES = (
    ("o", "-", "#000000"),
    ("s", "--", "#444444"),
    ("^", "-.", "#777777"),
    ("D", ":", "#000000"),
    ("v", "--", "#777777"),
    ("P", "-.", "#444444"),
)


def plot_problem(path: str) -> str | None:
    """The reason why a plot cannot be written to this path, or None."""
    if find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib"
    if Path(path).suffix.lower() not in (".png", ".pdf", ".svg", ".jpg", ".webp"):
        return f"--plot {path}: the name must end in .png, .pdf, .svg, .jpg or .webp"
    return None


def curves(data: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The entries of each curve, sorted by size. A label is a contender, with type, reduction and
    root if they vary.

    Each entry has ``us`` and ``bus`` of the placement by which contenders are compared.
    """
    op = OPERATIONS[data["operation"]]
    kinds = {(e["type"], e["redop"], e["root"]) for e in data["results"]}
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for entry in data["results"]:
        result = compared_result(op, entry)
        if result is None:
            continue
        name = label(entry["contender"])
        if len(kinds) > 1:
            name += f" {entry['type']} {entry['redop']} {entry['root'].strip()}"
        times = {"us": time_us(result), "bus": result["bus_bw"]}
        found.setdefault(name, {})[entry["size"]] = entry | times
    return {name: [entries[size] for size in sorted(entries)] for name, entries in found.items()}


def draw(data: Mapping[str, Any], path: str) -> None:
    """Plot a run, from its JSON, into a file whose suffix selects the format; OSError if it cannot
    be written."""
    import_module("matplotlib").use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    lines = curves(data)
    bandwidth = any(e["bus"] for entries in lines.values() for e in entries)
    figure, axes = pyplot.subplots(
        1, 1 + bandwidth, figsize=(6.4 * (1 + bandwidth), 4.8), layout="constrained", squeeze=False
    )
    try:
        _panel(axes[0][0], lines, "us", "microseconds per call")
        _ratios(axes[0][0], lines)
        if bandwidth:
            _panel(axes[0][1], lines, "bus", "bus bandwidth, GB/s")
        figure.legend(
            *axes[0][0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=len(lines),
            frameon=False,
        )
        figure.suptitle(_title(data, 90 * (1 + bandwidth)), fontsize=9)
        image = io.BytesIO()
        figure.savefig(image, format=Path(path).suffix[1:].lower(), dpi=120)
        write_whole(path, image.getvalue(), mode=0o644)
    finally:
        pyplot.close(figure)


def _panel(
    axes: Any, lines: Mapping[str, Sequence[Mapping[str, Any]]], key: str, label: str
) -> None:
    for (marker, dash, shade), (name, entries) in zip(cycle(_STYLES), lines.items()):
        points = [(e["size"], e[key]) for e in entries if e[key]]
        axes.plot(
            [p[0] for p in points],
            [p[1] for p in points],
            dash,
            marker=marker,
            color=shade,
            label=name,
            markersize=5,
            markerfacecolor="white" if marker in "sDv" else shade,
            linewidth=1.3,
        )
    sizes = sorted({e["size"] for entries in lines.values() for e in entries})
    if sizes[0] > 0:
        axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = _thinned(sizes, 12)
    axes.set_xticks(ticks, [short(size) for size in ticks])
    axes.minorticks_off()
    axes.set_xlabel("size, bytes")
    axes.set_ylabel(label)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _ratios(axes: Any, lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Below the curves, one row of numbers per curve except the first: its time divided by the
    first's."""
    names = [
        name for name, entries in lines.items() if any(e["ratio"] is not None for e in entries)
    ][1:]
    if not names:
        return
    first = next(iter(lines))
    share = 0.1 * len(names) + 0.02
    bottom, top = axes.get_ylim()
    ticks = [tick for tick in axes.get_yticks() if bottom <= tick <= top]
    axes.set_ylim(bottom * (bottom / top) ** (share / (1 - share)), top)
    axes.set_yticks(ticks)
    axes.axhline(bottom, color="#bbbbbb", linewidth=0.6)
    across = axes.get_xaxis_transform()
    for k, name in enumerate(reversed(names)):
        foot = 0.02 + 0.1 * k
        axes.text(
            0.012,
            foot + 0.045,
            f"{name}: time / {first}'s",
            transform=axes.transAxes,
            fontsize=7,
            style="italic",
        )
        ratios = {e["size"]: e["ratio"] for e in lines[name] if e["ratio"] is not None}
        for size in _thinned(sorted(ratios), 12):
            text = f"{ratios[size]:.3g}" if ratios[size] < 1000 else f"{ratios[size]:.0f}"
            axes.text(size, foot, text, transform=across, fontsize=8, ha="center")


def _thinned(values: Sequence[int], limit: int) -> list[int]:
    """At most ``limit`` of the values, evenly spaced, including the last."""
    step = -(-len(values) // limit) if values else 1
    return list(values[::-1][::step][::-1])


def _title(data: Mapping[str, Any], columns: int) -> str:
    """Operation, type, ranks and machine; below, each contender's transport in a line of
    ``columns`` characters."""
    results, machine = data["results"], data["machine"]
    types = sorted({e["type"] for e in results})
    redops = sorted({e["redop"] for e in results} - {"none"})
    hosts = {d["hostname"] for d in data["devices"]}
    hosts_text = "one host" if len(hosts) == 1 else f"{len(hosts)} hosts"
    subject = ", ".join(
        [data["operation"], *(["/".join(types)] if len(types) < 4 else []), *redops[:3]]
    )
    plotted = {e["contender"] for e in results}
    transports = "\n".join(
        textwrap.shorten(f"{label(name)}: {one['transport']}", columns, placeholder=" ...")
        for name, one in data["contenders"].items()
        if name in plotted
    )
    statistic = data["config"]["statistic"]
    return (
        f"{subject}, {data['ranks']} ranks on {hosts_text} ({machine['cpu']}, {machine['cores']}"
        f" cores), {statistic} of calls\n{transports}"
    )
