"""The stages that need no array library: what is here, and whether the driver and NCCL do as they say."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import unicoll
from unicoll.bench import report
from unicoll.testing.ranks import ROOT, environment

from . import rank_jobs
from .place import Place, joined
from .record import Reporter, Skip

__all__ = ["commit", "look", "one_rank"]

_PACKAGES = (
    "numpy", "ml_dtypes", "torch", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "mpi4py",
    "matplotlib", "pytest",
)  # fmt: skip
_QUERY = (
    "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current,clocks.sm,clocks.max.sm"
)


def look(reporter: Reporter, place: Place) -> None:
    """Hardware and software, as far as they matter."""
    reporter.figure("host", {**report.machine(), "platform": platform.platform()})
    reporter.figure("packages", {name: found for name in _PACKAGES if (found := _version(name))})
    reporter.figure("unicoll", {"version": unicoll.__version__, "commit": commit()})
    reporter.figure("kits", list(place.kits))
    if not place.simulated:
        reporter.figure("nvidia-smi", _smi())
    reporter.check("a rank joins and finds the device", _device, reporter, place)


def _device(reporter: Reporter, place: Place) -> None:
    if not place.kits:
        raise AssertionError("neither CuPy nor torch is installed: there are no arrays to check with")
    with joined(place, 1) as job:
        job.call(rank_jobs.device_facts)
        reporter.figure("device", job.results()[0])
        for name in place.kits:
            job.call(rank_jobs.warm_up, name)
            assert job.results(90.0) == [1.0]


def commit() -> str | None:
    """The commit of the checkout, where there is one."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True
        )  # fmt: skip
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
    """The checks of tests/one_rank.py, each a check here."""
    for line in _simulated_lines() if place.simulated else _lines(reporter.left()):
        if "check" in line:
            reporter.check(line["check"].replace("_", " "), _judge, line["error"])
        else:
            reporter.figure("libraries", line)


def _judge(error: str | None) -> None:
    assert error is None, error


def _lines(timeout: float) -> Iterator[dict[str, Any]]:
    """What tests/one_rank.py prints; what it says at the end if it ends badly."""
    program = [sys.executable, str(Path(ROOT, "tests", "one_rank.py"))]
    with subprocess.Popen(
        program, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        code = process.wait(max(1.0, timeout))
        if code and code < 0:
            yield {"check": "the checks end", "error": f"signal {-code}\n{process.stderr.read()[-2000:]}"}


def _simulated_lines() -> Iterator[dict[str, Any]]:
    import one_rank as checks
    from simulated_cuda import Simulation
    from simulated_nccl import SimulatedNccl

    simulation = Simulation(policy="newest")
    nccl: Any = SimulatedNccl(simulation)
    try:
        for check in checks.CHECKS:
            yield {"check": check.__name__, "error": _error(checks.run, check, simulation.cuda, nccl)}
    finally:
        nccl.close()
        simulation.close()


def _error(function: Callable[..., Any], *args: Any) -> str | None:
    try:
        function(*args)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return None


def skip_without(place: Place, name: str) -> None:
    """Skip the check where an array library is not there."""
    if name not in place.kits:
        raise Skip(f"{name} is not installed")
