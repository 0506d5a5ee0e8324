"""docs/benchmark-history.md: the committed runs of the suite as a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unicoll.bench.suite.compare import Measured
from unicoll.bench.suite.rows import ROWS
from unicoll.bench.suite.runs import load_run, ratios_of

_HEAD = """# Benchmark history

The ratios of the committed runs of `python -m unicoll.bench suite` ([benchmarking.md](benchmarking.md#the-suite)). A
ratio compares two times of one run, so it depends less on the machine and its load than a time does; ± is the spread
of the run's repetitions. *gloo* is unicoll's CPU backend, *floor* [a lower bound](benchmarking.md#the-floor).

The command writes this page from the files in `benchmarks/suite`:

```sh
python -m unicoll.bench suite --save benchmarks/suite/DATE.json
python -m unicoll.bench suite --page docs/benchmark-history.md
```

## Runs
"""


def page(folder: Path) -> str:
    """The page of the runs in a folder, the oldest first; ValueError if there is none."""
    runs = sorted((load_run(path) for path in folder.glob("*.json")), key=lambda run: str(run["date"]))
    if not runs:
        raise ValueError(f"there are no runs in {folder}")
    lines = [
        _HEAD,
        *_table(("date", "commit", "machine", "load", "software", "repetitions"), map(_described, runs)),
    ]
    lines += ["", "## Ratios", ""]
    names = [str(run["date"]).split()[0] + f" {run['commit'] or ''}".rstrip() for run in runs]
    ratios = [ratios_of(run) for run in runs]
    rows = (
        (row.name, "larger" if row.larger_is_better else "smaller", *(_cell(r.get(row.name)) for r in ratios))
        for row in ROWS
        if any(row.name in r for r in ratios)  # without rows that no run has measured yet
    )
    lines += _table(("ratio", "better", *names), rows)
    return "\n".join(lines) + "\n"


def _described(run: Mapping[str, Any]) -> tuple[str, ...]:
    machine = run["machine"]
    software = [f"{name} {machine[name]}" for name in ("unicoll", "numpy", "torch", "mpi") if name in machine]
    software.insert(0, f"Python {machine['python']}")
    place = f"{machine['cpu']}, {machine['cores_usable']} cores"
    load = f"{run['load_average'][0]:.1f}"
    repetitions = str(run["repetitions"])
    if "sources" in run:
        repetitions += f", from {' and '.join(run['sources'])}"
    return str(run["date"]), str(run["commit"] or ""), place, load, ", ".join(software), repetitions


def _cell(measured: Measured | None) -> str:
    if measured is None:
        return ""
    return f"{measured.median:.3g}" + (f" ±{measured.spread - 1:.0%}" if len(measured.values) > 1 else "")


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    head = [" | ".join(names), "|".join("---" for _ in names)]
    return [f"| {head[0]} |", f"|{head[1]}|", *(f"| {' | '.join(row)} |" for row in rows)]
