"""The stages without an array library: the machine, and functions of the driver and NCCL that unicoll relies on."""

from __future__ import annotations

import json
import os
import platform
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import unicoll
from tests.conformance import one_rank as one_rank_checks
from tests.gpu.check import rank_jobs
from tests.gpu.check.place import GPU, Place, Simulation, called, joined, leave
from tests.gpu.check.probe import probe
from tests.gpu.check.record import Reporter, Skip
from tests.nccl.device_ranks import NATIVE_SINCE
from unicoll.bench import report
from unicoll.testing.ranks import ROOT, environment

__all__ = ["commit", "look", "one_rank", "pair"]

_PACKAGES = (
    "numpy",
    "ml_dtypes",
    "torch",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "mpi4py",
    "matplotlib",
    "pytest",
)
_ONE_RANK = (sys.executable, "-m", "tests.conformance.one_rank")
_PROBE_SHARE = 0.7
_QUERY = (
    "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current,clocks.sm,clocks.max.sm"
)


def look(reporter: Reporter, place: Place) -> None:
    """Hardware, software and array libraries."""
    reporter.figure("host", {**report.machine(), "platform": platform.platform()})
    reporter.figure("packages", {name: found for name in _PACKAGES if (found := _version(name))})
    reporter.figure("unicoll", {"version": unicoll.__version__, "commit": commit()})
    if not place.simulated:
        reporter.figure("nvidia-smi", _smi())
        here = probe(_PROBE_SHARE * reporter.left())
        reporter.figure("without", here.without)
        if here.reason is not None:
            reporter.figure("reason", here.reason)
            return
        place = GPU(here.kits, place.patience, place.sharing)
    reporter.figure("kits", list(place.kits))
    reporter.check("a rank joins and finds the device", _device, reporter, place)


def _device(reporter: Reporter, place: Place) -> None:
    with joined(place, 1) as job:
        reporter.figure("device", called(place, job, rank_jobs.device_facts)[0])
        for name in place.kits:
            assert called(place, job, rank_jobs.warm_up, name) == [1.0]
        leave(place, job)


def pair(reporter: Reporter, place: Place) -> None:
    """Two ranks on the one GPU and their first all_reduce, with each kind of sharing; later stages use the last that
    works."""
    ways = (
        ["auto"] if place.simulated else ["hostid", "native"] if place.sharing == "auto" else [place.sharing]
    )
    for way in ways:
        shared = (
            Simulation(patience=place.patience) if place.simulated else GPU(place.kits, place.patience, way)
        )
        seconds = reporter.check(f"two ranks on the one GPU, their first all_reduce ({way})", _pair, shared)
        if seconds is not None:
            reporter.figure("sharing", way)
            reporter.figure(f"seconds ({way})", seconds)


def _pair(place: Place) -> dict[str, float]:
    with joined(place, 2, place.kits[:1]) as job:
        if place.sharing == "native" and called(place, job, rank_jobs.device_facts)[0]["nccl"] < NATIVE_SINCE:
            raise Skip(f"NCCL has it from {NATIVE_SINCE}")
        began = time.monotonic()
        assert called(place, job, rank_jobs.warm_up, place.kits[0]) == [3.0, 3.0]
        found = {"first all_reduce": time.monotonic() - began}
        leave(place, job)
        return found | {"and to leave": time.monotonic() - began}


def commit() -> str | None:
    """The commit of the checkout, or None."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _smi() -> dict[str, str] | str:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=True)
    except (OSError, subprocess.SubprocessError) as e:
        return f"cannot be asked: {e}"
    return dict(
        zip(_QUERY.split(","), (w.strip() for w in done.stdout.splitlines()[0].split(",")), strict=False)
    )


def one_rank(reporter: Reporter, place: Place) -> None:
    """Run the checks of tests/conformance/one_rank.py one by one; after a hang, the rest run in a new process."""
    if place.simulated:
        for line in _simulated_lines():
            _take(reporter, line)
        return
    todo = [check.__name__ for check in one_rank_checks.CHECKS]
    while todo:
        began = False
        for line in _lines([*_ONE_RANK, *todo], place.patience):
            began = True
            if "check" in line:
                todo.remove(line["check"])
            _take(reporter, line)
        if todo:
            name = todo.pop(0) if began else "the driver and NCCL can be loaded"
            _take(reporter, {"check": name, "error": "it did not come to its end: it hung or crashed"})
        if not began:
            return


def _take(reporter: Reporter, line: dict[str, Any]) -> None:
    if "check" in line:
        reporter.check(line["check"].replace("_", " "), _judge, line["error"])
    else:
        reporter.figure("libraries", line)


def _judge(error: str | None) -> None:
    assert error is None, error


def _lines(program: Sequence[str], patience: float) -> Iterator[dict[str, Any]]:
    """The lines of JSON that a program prints, until it ends or the next line takes too long."""
    with subprocess.Popen(program, cwd=ROOT, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        rest = b""
        try:
            while select.select([process.stdout], [], [], patience)[0]:
                data = os.read(process.stdout.fileno(), 1 << 16)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                yield from (json.loads(line) for line in lines if line.startswith(b"{"))
        finally:
            process.kill()


def _simulated_lines() -> Iterator[dict[str, Any]]:
    from tests.simulated_nccl.cuda import Simulation
    from tests.simulated_nccl.nccl import SimulatedNccl

    simulation = Simulation(policy="newest")
    nccl: Any = SimulatedNccl(simulation)
    try:
        for check in one_rank_checks.CHECKS:
            yield {
                "check": check.__name__,
                "error": _error(one_rank_checks.run, check, simulation.cuda, nccl),
            }
    finally:
        nccl.close()
        simulation.close()


def _error(function: Callable[..., Any], *args: Any) -> str | None:
    try:
        function(*args)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return None
