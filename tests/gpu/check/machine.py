"""The stages on the machine: array libraries, what unicoll relies on in the driver and NCCL, and two first ranks."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import unicoll
from tests.conformance import one_rank as one_rank_checks
from tests.gpu.check import rank_jobs
from tests.gpu.check.place import Place, Process, Ranks, called, joined, leave
from tests.gpu.check.record import Reporter, Skip
from tests.nccl.device_ranks import NATIVE_SINCE
from tests.support import worker
from tests.support.ranks import ROOT, RanksFailed
from unicoll.bench import report

_PACKAGES = "numpy ml_dtypes torch cupy-cuda12x cupy-cuda13x nvidia-nccl-cu12 nvidia-nccl-cu13 mpi4py matplotlib pytest"
_PROBE_SHARE = 0.7
_QUERY = (
    "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current,clocks.sm,clocks.max.sm"
)
LIBRARIES = ("torch", "cupy")


def look(reporter: Reporter, place: Place) -> None:
    """Hardware, software and array libraries."""
    reporter.figure("host", {**report.machine(), "platform": platform.platform()})
    reporter.figure("packages", {name: found for name in _PACKAGES.split() if (found := _version(name))})
    commit = _output("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    reporter.figure("unicoll", {"version": unicoll.__version__, "commit": commit})
    if not place.simulated:
        listed = _output("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader") or ","
        values = listed.splitlines()[0].split(",")
        reporter.figure("nvidia-smi", dict(zip(_QUERY.split(","), map(str.strip, values), strict=False)))
        without = probe(_PROBE_SHARE * reporter.left())
        kits = tuple(sorted({*LIBRARIES} - {*without}))
        reporter.figure("without", without)
        if not kits:
            reporter.figure("reason", "; ".join(f"{name}: {why}" for name, why in without.items()))
            return
        place = replace(place, kits=kits)
    reporter.figure("kits", list(place.kits))
    reporter.check("a rank joins and finds the device", _device, reporter, place)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints, or None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _device(reporter: Reporter, place: Place) -> None:
    with joined(place, 1) as job:
        reporter.figure("device", called(place, job, rank_jobs.device_facts)[0])
        for name in place.kits:
            assert called(place, job, rank_jobs.warm_up, name) == [1.0]
        leave(place, job)


# --- array libraries --------------------------------------------------------------------------------------------------


def probe(seconds: float, work: Callable[[], str | None] | None = None) -> dict[str, str]:
    """The array libraries that do not work, with reasons.

    Each is checked in a process of its own, in parallel; CUDA's state ends with the process.

    Args:
        seconds: the time after which a library counts as one that does not work.
        work: the function that checks one.
    """
    without = {}
    with Process(len(LIBRARIES), quiet=False, fresh=True) as job:
        job.call(work or reason_against)
        try:
            job.collect(seconds)
        except RanksFailed:
            pass  # a late one has no outcome
        for name, outcome in zip(LIBRARIES, job.outcomes, strict=True):
            why = outcome.value
            if outcome.failure is not None:
                why = f"{outcome.failure.type}: {outcome.failure.message}"[:500]
            elif outcome.returncode is not None:
                why = f"ended with {outcome.returncode}: {job.stderr(outcome.rank).strip()[-500:]}"
            elif not outcome.finished:
                why = f"did not answer in {seconds:.0f} s"
            if why is not None:
                without[name] = why
    return without


def reason_against() -> str | None:
    """The reason why the library of this process does not work, or None."""
    from unicoll.devices import runtimes

    name = LIBRARIES[worker.rank_and_size()[0]]
    if (reason := runtimes.reason_against("cuda")) is not None:
        return reason
    if importlib.util.find_spec(name) is None:
        return "is not installed"
    library: Any = importlib.import_module(name)
    if name == "torch" and not library.cuda.is_available():
        return f"torch {library.__version__} has no CUDA here"
    numbers = library.arange(4, device="cuda") if name == "torch" else library.arange(4)
    assert int((numbers + 1).sum()) == 10  # runs a kernel; CuPy compiles it
    from nccl_comm.library import locate  # after torch, whose NCCL is then used

    found = locate.find()
    return found if isinstance(found, str) else None


# --- one rank, and two ------------------------------------------------------------------------------------------------


def one_rank(reporter: Reporter, place: Place) -> None:
    """Run the checks of tests/conformance/one_rank.py one by one; after a hang, the rest run in a new process."""
    ranks = Ranks(place, 1, kits=[], enter=())
    try:
        facts = reporter.check("the driver and NCCL can be loaded", ranks.run, rank_jobs.device_facts)
        reporter.figure("libraries", facts and facts[0])
        for check in one_rank_checks.CHECKS if facts is not None else ():
            reporter.check(check.__name__.replace("_", " "), ranks.run, run_alone, check.__name__)
    finally:
        ranks.kill()


def run_alone(name: str) -> None:
    """Run one of the checks of tests/conformance/one_rank.py."""
    from nccl_comm.library import locate
    from unicoll.devices import runtimes

    (check,) = (check for check in one_rank_checks.CHECKS if check.__name__ == name)
    one_rank_checks.run(check, runtimes.runtime("cuda"), locate.nccl())


def pair(reporter: Reporter, place: Place) -> None:
    """Two ranks on the one GPU and their first all_reduce, with each kind of sharing; later stages use the last that
    works."""
    both = ["hostid", "native"] if place.sharing == "auto" else [place.sharing]
    for way in ["auto"] if place.simulated else both:
        words = f"two ranks on the one GPU, their first all_reduce ({way})"
        seconds = reporter.check(words, _pair, replace(place, sharing=way))
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
