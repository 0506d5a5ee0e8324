"""The stage on several GPUs: programs under ``unicoll.run``, with a GPU for each rank."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gpu.check.place import Place
from tests.gpu.check.process import ROOT, environment
from tests.gpu.check.record import Reporter, Skip

__all__ = ["each_its_own"]

_MODULE = "tests.gpu.check.several_program"
_NEEDS_S = 5.0
_WRITTEN = 4000
"""The most characters that are reported of a program's output."""


def each_its_own(reporter: Reporter, place: Place) -> None:
    """The checks of the program over unicoll, and of the one over torch.distributed."""
    if place.devices < 2:
        reporter.check("ranks with a GPU each", _one_device)
        return
    for name in place.kits:
        _program(reporter, place, "unicoll", name)
    if "torch" in place.kits:
        _program(reporter, place, "torch", "torch")


def _one_device() -> None:
    raise Skip("there is one device")


def _program(reporter: Reporter, place: Place, what: str, name: str) -> None:
    """Run a program, and report its checks; a check passes if it has passed on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        words = f"{place.devices} ranks with a GPU each, {what}, {name}"
        reporter.check(words, _run, reporter, place, [folder, what, name], needs=_NEEDS_S)
        for check, errors, found in _results(Path(folder)):
            reporter.check(f"{check} ({what}, {name})", _judge, errors)
            if found is not None:
                reporter.figure(f"{check} ({what}, {name})", found)


def _run(reporter: Reporter, place: Place, arguments: list[str]) -> None:
    launcher = [sys.executable, "-m", "unicoll.run", f"--nproc-per-node={place.devices}", "-m", _MODULE]
    done = subprocess.run(
        [*launcher, *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=max(1.0, reporter.left()),
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-_WRITTEN:]}"


def _results(folder: Path) -> Iterator[tuple[str, dict[int, Any], Any]]:
    """Each check, what is wrong by rank, and the result on rank 0."""
    by_rank = {int(path.stem): json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    for check in dict.fromkeys(check for results in by_rank.values() for check in results):
        given = {rank: results.get(check, {"error": "not run"}) for rank, results in by_rank.items()}
        errors = {rank: result for rank, result in given.items() if set(result) & {"error", "skip"}}
        yield check, errors, given.get(0, {}).get("value")


def _judge(errors: dict[int, Any]) -> None:
    if errors and all("skip" in result for result in errors.values()):
        raise Skip(next(iter(errors.values()))["skip"])
    assert not errors, "\n".join(f"rank {rank}: {result}" for rank, result in errors.items())
