"""scripts/gpu_check with stages that hang, die or are killed: the others run, and no measurement is lost."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import gpu_jobs as jobs
from tests.gpu.check import machine, programs, rank_jobs, stages
from tests.gpu.check.place import Place, Ranks
from tests.gpu.check.record import Reporter, headline
from tests.gpu.check.stages import Runner
from tests.mpi.mpi_library import descendants, lives
from tests.support.ranks import ROOT, environment

SIMULATED = Place(("simulated",), True, 60.0, devices=2)

# --- a run that gets a signal -----------------------------------------------------------------------------------------


def _ended(folder: Path, number: int) -> tuple[int, str, dict[str, Any], set[int]]:
    """A run that gets a signal during a stage: its exit code, output, JSON file, and surviving processes."""
    options = ["--simulate", "--patience", "60", "--stages", "one-rank,streams"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.check", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=environment({"OUT": str(folder), "PYTHONPATH": f"{ROOT}"}),
    )
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        printed.append(line)
        if "a late producer on a side stream" in line:
            break
    started = descendants(process.pid)
    process.send_signal(number)
    printed += process.stdout
    process.stdout.close()
    code = process.wait(60)
    data = json.loads((folder / "gpu_check_simulated.json").read_text())
    deadline = time.monotonic() + 30.0
    while any(map(lives, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return code, "".join(printed), data, {*filter(lives, started)}


def test_what_a_killed_run_has_shown_is_in_its_json(tmp_path: Path) -> None:
    code, printed, data, left = _ended(tmp_path, signal.SIGKILL)
    assert code == -signal.SIGKILL
    told = [check["name"] for stage in data["stages"].values() for check in stage["checks"]]
    passed = [line.partition("  ok ")[2] for line in printed.splitlines() if "  ok  " in line]
    assert len(passed) >= 10
    assert [name for line in passed if (name := line.rpartition("(")[0].strip()) not in told] == []
    assert data["stages"]["machine"]["figures"]["device"]["nccl"]
    assert data["stages"]["streams"]["state"] == "running"
    assert data["verdict"] == "incomplete"
    assert not left


def test_a_run_that_is_terminated_sums_up(tmp_path: Path) -> None:
    code, printed, data, left = _ended(tmp_path, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert data["stages"]["streams"]["state"] == "cut off"
    assert data["verdict"] == "incomplete"
    end = printed.partition("\nStages (")[2].splitlines()
    assert any("streams" in line and " passed" in line and "cut off" in line for line in end)
    assert end[-1].startswith("incomplete: ")
    assert "Traceback" not in printed
    assert not left


# --- a stage in its process -----------------------------------------------------------------------------------------


@pytest.fixture
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.close()


def test_after_a_stage_that_is_cut_off_comes_the_next(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, Any]] = []
    # the limit is reached once the stage is stopped
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + (1000.0 if lines else 0.0))
    monkeypatch.setattr(stages, "time", clock)

    def stop_it(line: dict[str, Any]) -> None:
        lines.append(line)
        assert runner._job is not None
        runner._job.signal(0, signal.SIGSTOP)

    assert runner.do("faults", 60.0, SIMULATED, 120.0, stop_it)[0] == "cut off"
    assert lines[0] == {"doing": "a killed rank is named"}
    assert runner.do("one-rank", 60.0, SIMULATED, 120.0, lines.append) == ("done", "")
    assert lines[-1]["outcome"] == "passed"


def test_a_stage_that_crashes_tells_why(runner: Runner) -> None:
    state, words = runner.do("nonsense", 60.0, SIMULATED, 60.0, lambda line: None)
    assert state == "crashed"
    assert "KeyError: 'nonsense'" in words


def test_the_probe_is_part_of_the_first_stage(runner: Runner) -> None:
    lines: list[dict[str, Any]] = []
    assert runner.do("machine", 60.0, Place(), 60.0, lines.append)[0] == "done"
    figures = {line["figure"]: line["value"] for line in lines if "figure" in line}
    if "device" in figures:
        pytest.skip("there is a GPU here")
    assert set(figures["without"]) == {"cupy", "torch"}
    assert figures["reason"]


def test_a_library_that_does_not_answer_is_done_without() -> None:
    assert machine.probe(5.0, jobs.first_library_hangs) == {"torch": "did not answer in 5 s"}


def _reported(stage: Any) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    stage(Reporter(lines.append, 60.0))
    return lines


def _outcomes(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Outcomes of the checks with the first lines of the reasons, without the number of the rank."""
    checks = [line for line in lines if "check" in line]
    return [(line["outcome"], re.sub(r"rank \d", "rank N", headline(line["detail"]))) for line in checks]


def test_on_a_gpu_later_stages_have_the_libraries_and_the_sharing_that_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Place.job
    monkeypatch.setattr(Place, "job", lambda self, *args: job(replace(self, simulated=True), *args))
    monkeypatch.setattr(machine, "LIBRARIES", ("torch", "simulated"))
    monkeypatch.setattr(machine, "probe", lambda seconds: {"torch": "is not installed"})
    for stage, figures in (
        (machine.look, {"kits": ["simulated"], "without": {"torch": "is not installed"}}),
        (machine.pair, {"sharing": "native"}),
    ):
        found = _reported(partial(stage, place=replace(SIMULATED, simulated=False)))
        assert {outcome for outcome, _ in _outcomes(found)} == {"passed"}, found
        told = {line["figure"]: line["value"] for line in found if "figure" in line}
        assert figures == {name: told[name] for name in figures}


# --- ranks that hang ------------------------------------------------------------------------------------------------


def test_a_program_that_hangs_costs_itself_alone() -> None:
    def tell(reporter: Reporter) -> None:
        warm = [(rank_jobs.warm_up, "simulated")]
        ranks = Ranks(replace(SIMULATED, patience=3.0), 2, first=warm)
        for program in (jobs.is_wrong, jobs.hangs, jobs.dies):
            programs.run_programs(reporter, ranks, "simulated", [jobs.goes_well, program])
        programs.run_programs(reporter, ranks, "simulated", [jobs.goes_well])
        reporter.check("the ranks leave", ranks.close)

    found = _reported(tell)
    assert _outcomes(found) == [
        ("passed", ""),
        ("failed", "RanksFailed: rank N: AssertionError: nonsense"),
        ("passed", ""),
        ("failed", "RanksFailed: ranks [0, 1] did not end in 3 s"),
        ("passed", ""),
        ("failed", "RanksFailed: rank N ended with 7"),
        ("passed", ""),
        ("passed", ""),
    ]
    pids = [frozenset(line["value"]) for line in found if "figure" in line]
    assert len(pids) == 4
    assert len({*pids}) == 3  # ranks that hung and ranks that died were replaced


def test_ranks_that_cannot_start_are_not_started_again() -> None:
    def tell(reporter: Reporter) -> None:
        ranks = Ranks(replace(SIMULATED, patience=1.0), 1, first=[(jobs.hangs, None)])
        programs.run_programs(reporter, ranks, "simulated", [jobs.goes_well] * 2)
        assert not ranks.running

    assert _outcomes(_reported(tell)) == [
        ("failed", "RanksFailed: ranks [0] did not end in 1 s"),
        ("skipped", "ranks could not be started: RanksFailed: ranks [0] did not end in 1 s"),
    ]
