"""scripts/gpu_check with stages that hang, die or are killed: the others run, and no measurement is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import gpu_hanging_jobs as jobs
from tests.gpu.check import copies, costs, faults, machine, process, rank_jobs, streaming, training
from tests.gpu.check.place import GPU, Ranks, Simulation
from tests.gpu.check.probe import Found, probe
from tests.gpu.check.process import Runner
from tests.gpu.check.record import Reporter, headline
from tests.gpu.gpu_reports import reported
from unicoll.testing.ranks import ROOT, ProcessJob, environment

# --- a run that gets a signal -----------------------------------------------------------------------------------------


def _ended(folder: Path, number: int) -> tuple[int, str, dict[str, Any], set[int]]:
    """A run that gets a signal during a stage: its exit code, output, JSON file, and surviving processes."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.gpu.check",
            "--simulate",
            "--patience",
            "60",
            "--stages",
            "one-rank,streams",
        ],
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
    started = _descendants(process.pid)
    process.send_signal(number)
    printed += process.stdout
    process.stdout.close()
    code = process.wait(60)
    data = json.loads((folder / "gpu_check_simulated.json").read_text())
    return code, "".join(printed), data, _still(started)


def _descendants(pid: int) -> set[int]:
    found = {pid}
    parents = {
        p: parent for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if (parent := _parent(p))
    }
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def _parent(pid: int) -> int | None:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)


def _still(pids: set[int]) -> set[int]:
    """The processes that are alive after some seconds."""
    deadline = time.monotonic() + 30.0
    while (left := {pid for pid in pids if _parent(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _passed(printed: str) -> list[str]:
    return [
        line.split("ok", 1)[1].rpartition("(")[0].strip() for line in printed.splitlines() if "  ok  " in line
    ]


def test_what_a_killed_run_has_shown_is_in_its_json(tmp_path: Path) -> None:
    code, printed, data, left = _ended(tmp_path, signal.SIGKILL)
    assert code == -signal.SIGKILL
    told = [check["name"] for stage in data["stages"].values() for check in stage["checks"]]
    assert len(_passed(printed)) >= 10
    assert [name for name in _passed(printed) if name not in told] == []
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
    made = Runner(["--simulate"])
    yield made
    made.close()


def _order(stage: str, **more: Any) -> dict[str, Any]:
    defaults = {"stage": stage, "seconds": 60.0, "kits": ["simulated"], "sharing": "auto", "devices": 0}
    return defaults | more


def test_after_a_stage_that_is_cut_off_comes_the_next(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, Any]] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + (1000.0 if lines else 0.0))
    monkeypatch.setattr(process, "time", clock)  # the limit is reached once the stage is stopped

    def stop_it(line: dict[str, Any]) -> None:
        lines.append(line)
        assert runner._process is not None
        runner._process.send_signal(signal.SIGSTOP)

    assert runner.do(_order("faults"), 120.0, stop_it)[0] == "cut off"
    assert lines[0] == {"doing": "a killed rank is named"}
    assert runner.do(_order("one-rank"), 120.0, lines.append) == ("done", "")
    assert lines[-1]["outcome"] == "passed"


def test_a_stage_that_crashes_tells_why() -> None:
    made = Runner([])
    state, words = made.do(_order("pair", kits=["nonsense"]), 60.0, lambda line: None)
    assert state == "crashed"
    assert "nonsense" in words
    assert made.do(_order("nonsense"), 60.0, lambda line: None)[0] == "crashed"
    made.close()


def test_the_probe_is_part_of_the_first_stage() -> None:
    made = Runner([])
    figures: dict[str, Any] = {}
    state, _ = made.do(
        _order("machine", kits=[]), 60.0, lambda line: figures.update({line.get("figure", ""): line})
    )
    made.close()
    assert state == "done"
    if "device" in figures:
        pytest.skip("there is a GPU here")
    assert set(figures["without"]["value"]) == {"cupy", "torch"}
    assert figures["reason"]["value"]


def test_a_library_that_does_not_answer_is_done_without() -> None:
    found = probe(3.0, "tests.gpu.gpu_hanging_jobs")
    assert found.kits == ("cupy",)
    assert found.without == {"torch": "did not answer in 3 s"}
    assert found.reason is None


class Pretended(GPU):
    """The simulated device in the place of a GPU."""

    def __init__(self, kits: Sequence[str], patience: float = 10.0, sharing: str = "auto") -> None:
        super().__init__([], 60.0, sharing)
        self.kits = ("simulated",)

    def job(self, size: int, backend: str, *args: Any) -> ProcessJob:
        return Simulation().job(size, backend)


def test_on_a_gpu_later_stages_have_the_libraries_and_the_sharing_that_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "GPU", Pretended)
    monkeypatch.setattr(
        machine, "probe", lambda seconds: Found(None, ("simulated",), {"torch": "is not installed"})
    )
    for stage, figures in (
        (machine.look, {"kits": ["simulated"], "without": {"torch": "is not installed"}}),
        (machine.pair, {"sharing": "native"}),
    ):
        found = reported(60.0, partial(stage, place=Pretended([])))
        assert {outcome for outcome, _ in _outcomes(found)} == {"passed"}, found
        told = {line["figure"]: line["value"] for line in found if "figure" in line}
        assert figures == {name: told[name] for name in figures}


# --- ranks that hang ------------------------------------------------------------------------------------------------


class Apart(Simulation):
    """The simulation, with ranks that are not forks of the test's process."""

    def job(
        self,
        size: int,
        backend: str,
        kits: Sequence[str] | None = None,
        env: dict[str, str] | None = None,
        fresh: bool = True,
    ) -> ProcessJob:
        return super().job(size, backend, kits, env, True)


def _outcomes(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Outcomes of the checks with the first lines of the reasons, without the number of the rank."""
    checks = [line for line in lines if "check" in line]
    return [(line["outcome"], re.sub(r"rank \d", "rank N", headline(line["detail"]))) for line in checks]


def test_a_program_that_hangs_costs_itself_alone() -> None:
    def tell(reporter: Reporter) -> None:
        ranks = Ranks(Apart(patience=3.0), 2, ["simulated"], [(rank_jobs.warm_up, "simulated")])
        for program in (jobs.is_wrong, jobs.hangs, jobs.dies):
            streaming.work_through(reporter, ranks, "simulated", jobs.goes_well)
            streaming.work_through(reporter, ranks, "simulated", program)
        streaming.work_through(reporter, ranks, "simulated", jobs.goes_well)
        reporter.check("the ranks leave", ranks.close)

    found = reported(60.0, tell)
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
        ranks = Ranks(Apart(patience=1.0), 1, ["simulated"], [(jobs.hangs, None)])
        for _ in range(2):
            streaming.work_through(reporter, ranks, "simulated", jobs.goes_well)
        assert not ranks.running

    assert _outcomes(reported(60.0, tell)) == [
        ("failed", "RanksFailed: ranks [0] did not end in 1 s"),
        ("skipped", "ranks could not be started: RanksFailed: ranks [0] did not end in 1 s"),
    ]


def test_a_line_of_costs_that_hangs_costs_itself_alone() -> None:
    told: list[Any] = []

    def tell(reporter: Reporter) -> None:
        costs._lines(
            reporter,
            Apart(patience=3.0),
            1,
            ["good", "bad", "better"],
            jobs.line,
            0.5,
            lambda *line: told.append(line),
        )

    outcomes = [outcome for outcome, _ in _outcomes(reported(60.0, tell))]
    assert outcomes == ["passed", "passed", "failed", "passed", "passed"]
    assert told == [(what, {what: {"p50_us": 0.5}}) for what in ("good", "better")]


def test_a_check_without_array_libraries_that_hangs_costs_itself_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("one", "two", "three", "four")
    monkeypatch.setattr(machine.one_rank_checks, "CHECKS", [SimpleNamespace(__name__=name) for name in names])
    monkeypatch.setattr(
        machine, "_ONE_RANK", (sys.executable, str(ROOT / "tests" / "gpu" / "gpu_hanging_jobs.py"))
    )
    place = GPU([], patience=2.0)
    found = reported(60.0, lambda reporter: machine.one_rank(reporter, place))
    checks = {line["check"]: line["outcome"] for line in found if "check" in line}
    assert checks == {"one": "passed", "two": "failed", "three": "failed", "four": "passed"}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("stage", "module", "check", "figure"),
    [
        (copies.measure, copies, "pinned copies", "pinned copies, bytes/s"),
        (training.both, training, "simulated: two ranks train as one", "simulated"),
        (
            faults.deadline,
            faults,
            "a missing rank is named at the deadline",
            "a missing rank is named at the deadline",
        ),
    ],
)
def test_what_was_measured_is_told_before_the_ranks_leave(
    stage: Any, module: Any, check: str, figure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(place: Any, job: ProcessJob, ranks: Any = None) -> None:
        if job.size == 2 or module is copies:
            raise RuntimeError("stays")
        place_leave(place, job, ranks)

    place_leave = module.leave
    monkeypatch.setattr(module, "leave", leave)
    found = reported(60.0, lambda reporter: stage(reporter, Apart(patience=60.0)))
    outcomes = {line["check"]: headline(line["detail"]) for line in found if "check" in line}
    assert outcomes[check] == "RuntimeError: stays"
    assert any(line.get("figure") == figure for line in found)
