"""A run of the suite: repetitions of all jobs, the ratios of each, and the file of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unicoll.bench import launch
from unicoll.bench.suite.compare import Measured
from unicoll.bench.suite.rows import JOBS, RatioRow, SuiteJob, Timing
from unicoll.run.workers import checkout_path

ROOT = Path(__file__).resolve().parents[3]
COMMITTED = ROOT / "benchmarks" / "suite"
"""The committed runs, one JSON each, in a checkout."""
_FORMAT = 1
_JOB_LIMIT_S = 240.0
_END_S = 15.0


@dataclass
class SuiteRun:
    """The results of a run.

    Attributes:
        values, us: ratios by row, and microseconds by timing; of each one value per repetition.
        skipped: the reason for each contender, timing or job that was not measured.
        failures: the output of jobs that failed, by name.
        load: the machine's load averages at the start.
    """

    values: dict[str, list[float]] = field(default_factory=dict)
    us: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    load: tuple[float, ...] = field(default_factory=lambda: os.getloadavg())
    repetitions: int = 0
    seconds: float = 0.0

    @property
    def ratios(self) -> dict[str, Measured]:
        return {name: Measured(tuple(values)) for name, values in self.values.items()}

    def as_json(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "commit": _commit(),
            "machine": self.machine,
            "load_average": list(self.load),
            "repetitions": self.repetitions,
            "seconds": round(self.seconds, 1),
            "ratios": {
                name: {
                    "median": _rounded(measured.median),
                    "spread": _rounded(measured.spread),
                    "values": [_rounded(value) for value in measured.values],
                }
                for name, measured in self.ratios.items()
            },
            "us": {name: [_rounded(value) for value in values] for name, values in self.us.items()},
            "not_measured": self.skipped,
        }


def timings_of(rows: Sequence[RatioRow], job: SuiteJob) -> list[Timing]:
    """The timings of rows that belong to a job, each once."""
    return list(dict.fromkeys(t for row in rows for t in row.timings if t.job is job))


def take(
    rows: Sequence[RatioRow],
    repetitions: int,
    seconds: float,
    arguments: Sequence[str],
    show: Callable[[str], None],
) -> SuiteRun:
    """Measure rows ``repetitions`` times, and more often while another repetition fits into ``seconds``.

    ``arguments`` are the command line of the ranks, without the job.
    """
    run, begun = SuiteRun(), time.monotonic()
    jobs = [job for job in JOBS if timings_of(rows, job)]
    while run.repetitions < repetitions or _fits(run.repetitions, time.monotonic() - begun, seconds):
        us: dict[str, float] = {}
        for job in [job for job in jobs if job.name not in (run.skipped | run.failures)]:
            show(f"repetition {run.repetitions + 1}: {job.name}")
            us |= _job_times(job, arguments, run)
        for name, value in us.items():
            run.us.setdefault(name, []).append(value)
        for row in rows:
            if str(row.over) in us and str(row.under) in us:
                run.values.setdefault(row.name, []).append(us[str(row.over)] / us[str(row.under)])
        run.repetitions += 1
    run.seconds = time.monotonic() - begun
    return run


def _fits(made: int, elapsed: float, seconds: float) -> bool:
    return made > 0 and elapsed * (made + 1) / made <= seconds


def _job_times(job: SuiteJob, arguments: Sequence[str], run: SuiteRun) -> dict[str, float]:
    """Microseconds by timing of one run of a job; what was not measured is entered in ``run``."""
    if job.mpi and (find_spec("mpi4py") is None or launch.mpirun() is None):
        run.skipped[job.name] = "there is no mpi4py with mpirun"
        return {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        status, output = start(job, [*arguments, "--job", job.name, "--out", str(out)])
        if status or not out.exists():
            run.failures[job.name] = output
            return {}
        data = json.loads(out.read_text(encoding="utf-8"))
    run.skipped |= data["skipped"]
    run.machine |= data["machine"]
    times: dict[str, float] = data["us"]
    return times


def start(job: SuiteJob, arguments: Sequence[str]) -> tuple[int, str]:
    """Start the ranks of a job with ``python -m unicoll.bench``; returns the exit status and the output."""
    others = {name for each in JOBS for name in each.variables}
    environ = {name: value for name, value in os.environ.items() if name not in others} | dict(job.variables)
    environ |= checkout_path(environ)
    program = launch.mpirun() if job.mpi else None
    if program is not None:
        command, variables = launch.mpirun_command(program, job.ranks, arguments)
        environ |= variables
    else:
        command = [sys.executable, "-m", "unicoll.run", "--nproc-per-node", str(job.ranks), "--no-prefix"]
        command += ["-m", "unicoll.bench", *arguments]
    with subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=_JOB_LIMIT_S)
        except subprocess.TimeoutExpired:
            return 1, f"{job.name} has not ended within {_JOB_LIMIT_S:g} s\n{_ended(process)}"
        except BaseException:
            _ended(process)
            raise
        return process.returncode, output


def _ended(process: subprocess.Popen[str]) -> str:
    """The output of a process that is told to end, with its ranks, and killed if it does not."""
    process.terminate()
    try:
        return process.communicate(timeout=_END_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


# --- files ----------------------------------------------------------------------------------------------------------


def load_run(path: Path) -> dict[str, Any]:
    """The content of a run's file; ValueError if it is no run of the suite, OSError if it cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] == _FORMAT and data.keys() >= {"commit", "date", "load_average", "machine"}:
            ratios_of(data)
            return dict(data)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # it is cut off, or another JSON
    raise ValueError(f"{path} is no run of the suite")


def newest(folder: Path) -> Path | None:
    """The committed run with the latest date; None if there is none."""
    return max(folder.glob("*.json"), key=lambda path: str(load_run(path)["date"]), default=None)


def ratios_of(data: Mapping[str, Any]) -> dict[str, Measured]:
    return {name: Measured(tuple(entry["values"])) for name, entry in data["ratios"].items()}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _commit() -> str | None:
    """The commit of the checkout, with ``+`` if its modules differ from it; None outside a checkout."""
    if not (ROOT / ".git").exists():
        return None
    folders = [path for path in ("unicoll", "gloo_fallback", "mpi_comm") if (ROOT / path).is_dir()]
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for arguments in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", *folders])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changes else "")
