"""scripts/gpu_check on the simulated device: every stage runs, and its results are summed up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.gpu import gpu_jobs
from tests.gpu.check import command, results, training
from tests.gpu.check.command import CUT, NO_GPU, PASSED, USAGE, main
from tests.gpu.check.record import NoTime, Reporter, Skip
from tests.gpu.check.stages import STAGES
from tests.simulated_nccl.ranks import SimulatedJob
from tests.support.ranks import ROOT, environment, run_ranks
from tests.support.worker import enter
from unicoll.testing.families import CupyFamily, layouts

_TIMEOUT_S = 300


def run_script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / "gpu_check"), *arguments],
        cwd="/",
        env=environment({"PYTHON": sys.executable} | variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


# --- the whole ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The output of a run of all stages but the one that imports torch, and its JSON file."""
    folder = tmp_path_factory.mktemp("rehearsal")
    done = run_script(
        "--simulate", "--without", "plugin", "--budget", "2000", "--patience", "60", OUT=str(folder)
    )
    assert done.returncode == PASSED, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "gpu_check_simulated.json").read_text())


def test_every_stage_runs_without_a_gpu(rehearsal: tuple[str, dict[str, Any]]) -> None:
    printed, data = rehearsal
    names = [name for name in STAGES if name != "plugin"]
    assert (data["verdict"], data["simulated"]) == ("passed", True)
    assert list(data["stages"]) == names
    for name, stage in data["stages"].items():
        assert stage["state"] == "done", name
        assert any(check["outcome"] == "passed" for check in stage["checks"]), name
        assert STAGES[name].title in printed
    end = printed.partition("\nStages (")[2].splitlines()
    assert [line.split()[0] for line in end[1 : len(STAGES)]] == names
    assert end[-1].startswith("passed: ")
    assert end[-1].endswith("gpu_check_simulated.json")


def test_files_of_the_checkout_have_relative_paths_in_the_json(rehearsal: tuple[str, dict[str, Any]]) -> None:
    written = json.dumps(rehearsal[1])
    assert "tests/support/worker.py:" in written
    assert str(ROOT) not in written


def test_the_json_holds_what_was_found(rehearsal: tuple[str, dict[str, Any]]) -> None:
    figures = {name: stage["figures"] for name, stage in rehearsal[1]["stages"].items()}
    assert figures["machine"]["device"]["nccl"] == 23007
    assert figures["machine"]["unicoll"]["version"]
    for size in (1, 2, 4):
        found = figures[f"conformance-{size}"]
        assert found["cases, every type and reduction"]["all"]
        assert found["cases, drawn at random"]["run"] == 20
    enqueue = figures["cost"]["enqueue"]
    assert {"unicoll, simulated", "bare NCCL"} == set(enqueue["blocking all_reduce, 8 B"])
    assert any("2 ranks" in what for what in enqueue)
    assert all(stat["p50_us"] > 0 for row in enqueue.values() for stat in row.values())
    assert all(row["bytes"] for row in figures["device-time"]["device time"].values())
    assert figures["copies"]["pinned copies, bytes/s"]["both at once"] > 0
    assert figures["training"]["simulated"]["relative difference"] <= 1e-9
    late = figures["deadline"]["a missing rank is named at the deadline"]
    assert late["error"] == "OperationTimeoutError"
    assert figures["deadline"]["others shrink the group after the deadline"]["sums"] == [3.0, 3.0]
    assert figures["exit"]["a program may end without leaving"]["standard error"] == ["", ""]


def test_no_operation_asked_the_device_anything(rehearsal: tuple[str, dict[str, Any]]) -> None:
    for size, stage in ((1, "streams"), (2, "streams-2")):
        found = rehearsal[1]["stages"][stage]["figures"]["simulated: no call waits for the device"]
        assert len(found) == size
        for rank in found:
            assert rank["device_still_busy"] is True
            assert rank["asked_of_cuda"]["record"] > 0
            assert "event_done" not in rank["asked_of_cuda"]


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run_script(OUT=str(tmp_path))
    if done.returncode != NO_GPU:
        pytest.skip("there is a GPU here")
    assert "no GPU can be checked here" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
def test_on_this_gpu(tmp_path: Path) -> None:
    stages = "machine,one-rank,conformance-1,streams"
    done = run_script("--budget", "150", "--stages", stages, OUT=str(tmp_path))
    if done.returncode == NO_GPU:
        pytest.skip("there is no GPU here")
    assert done.returncode == PASSED, done.stdout + done.stderr


# --- the command line -----------------------------------------------------------------------------------------------


def test_a_stage_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--simulate", "--stages", "machine,nonsense"]) == USAGE
    assert "no stage 'nonsense'" in capsys.readouterr().err


def test_wheels_that_are_not_there_are_refused() -> None:
    done = run_script("--wheels", "/nowhere")
    assert done.returncode == 1
    assert "/nowhere" in done.stderr


@pytest.mark.parametrize("words", [("--budget", "0"), ("--budget", "60", "--spent", "59")])
def test_a_budget_that_is_spent_leaves_an_incomplete_result(tmp_path: Path, words: tuple[str, ...]) -> None:
    path = tmp_path / "result.json"
    main(["--simulate", *words, "--stages", "faults", "--output", str(path), "--no-plot"])
    data = json.loads(path.read_text())
    assert data["verdict"] == "incomplete"
    assert {stage["state"] for stage in data["stages"].values()} == {"not run"}


def test_no_stage_goes_beyond_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = command._parser().parse_args(
        ["--simulate", "--budget", "400", "--output", str(tmp_path / "result.json")]
    )
    run = command.Run(given, [])
    now = run.began
    monkeypatch.setattr(command.time, "monotonic", lambda: now)
    orders = []

    def do(name: str, seconds: float, place: Any, limit: float, take: Any) -> tuple[str, str]:
        nonlocal now
        assert now + limit <= run.end
        if name == "machine":
            take({"figure": "kits", "value": ["simulated"]})
        orders.append(name)
        now += limit  # every stage hangs
        return "cut off", ""

    run.runner = SimpleNamespace(do=do, close=lambda: None)  # type: ignore[assignment]
    assert run.go() == CUT
    assert now <= run.end
    assert orders[:4] == ["machine", "one-rank", "pair", "several"]


# --- results --------------------------------------------------------------------------------------------------------


def test_checks_pass_fail_or_are_skipped() -> None:
    def raising(error: Exception) -> None:
        raise error

    lines: list[dict[str, Any]] = []
    reporter = Reporter(lines.append, 60.0)
    assert reporter.check("good", lambda: 5) == 5
    for name, error in (("bad", ValueError("wrong")), ("none", Skip("not here")), ("later", NoTime("none"))):
        assert reporter.check(name, raising, error) is None
    assert reporter.check("late", lambda: 5, needs=1000.0) is None
    reporter.figure("numbers", {1: (np.float64(np.nan), np.int64(2))})
    checks = {line["check"]: (line["outcome"], line["detail"]) for line in lines if "check" in line}
    assert checks.pop("bad")[1].startswith("ValueError: wrong\n")
    assert checks == {
        "good": ("passed", ""),
        "none": ("skipped", "not here"),
        "later": ("not run", "none"),
        "late": ("not run", "60 s are left of 60"),
    }
    assert lines[-1] == {"figure": "numbers", "value": {"1": [None, 2]}}


def _stage(*outcomes: str, state: str = "done", **figures: Any) -> dict[str, Any]:
    checks = [{"name": f"#{i}", "outcome": outcome} for i, outcome in enumerate(outcomes)]
    return {"state": state, "checks": checks, "figures": figures}


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ({"a": _stage("passed", "skipped"), "b": _stage("passed")}, "passed"),
        ({"a": _stage("passed"), "b": _stage("passed", state="cut off")}, "incomplete"),
        ({"a": _stage("passed")}, "incomplete"),
        ({"a": _stage("passed", "not run"), "b": _stage("passed")}, "incomplete"),
        ({"a": _stage("failed"), "b": _stage(state="cut off")}, "failed"),
        ({"a": _stage("passed"), "b": _stage(state="crashed")}, "failed"),
    ],
)
def test_the_verdict(stages: dict[str, Any], expected: str) -> None:
    assert results.verdict(stages, ["a", "b"]) == expected


# --- mutations ------------------------------------------------------------------------------------


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("mutation", "program", "policy"),
    [
        ("producers", "a_late_producer_and_an_early_consumer", "newest"),
        ("end", "a_late_producer_and_an_early_consumer", "oldest"),
        ("hold", "memory_in_flight_is_not_used_again", "oldest"),
    ],
)
def test_a_program_fails_without_the_safeguard_that_it_is_about(
    mutation: str, program: str, policy: str
) -> None:
    with SimulatedJob(2, policy=policy, devices="shared", env={"UNICOLL_NCCL_SHARE_DEVICE": "1"}) as job:
        job.call(enter)
        job.results()
        job.call(gpu_jobs.fails, program, None)
        assert job.results() == [None, None]
        job.call(gpu_jobs.fails, program, mutation)
        assert all(error == "AssertionError" for error in job.results())


# --- training -------------------------------------------------------------------------------------------------------


@pytest.mark.every(n=0)
@pytest.mark.torch
def test_a_transformer_on_two_ranks_ends_where_it_does_on_one() -> None:
    pytest.importorskip("torch")
    for found in run_ranks(2, training.transformer, "torch", "cpu", timeout=120.0):
        assert found["relative difference"] <= 1e-9


# --- families and ranks of a device ---------------------------------------------------------------------------------


class _DeviceArray(np.ndarray[Any, Any]):
    """A NumPy array with CuPy's method for the copy to the host."""

    def get(self) -> Any:
        return np.array(self)


_STAND_IN = SimpleNamespace(asarray=lambda x, order="C": np.array(x, order=order).view(_DeviceArray))


@pytest.mark.parametrize("layout", [*CupyFamily.layouts, "scalar"])
def test_cupys_layouts_hold_values_and_notice_what_is_written_around_them(layout: str) -> None:
    family = CupyFamily(_STAND_IN)
    values = np.float32(3.0) if layout == "scalar" else np.arange(6, dtype=np.float32).reshape(3, 2)
    held = family.hold(np.asarray(values), layout)
    assert held.array.shape == np.shape(values)
    assert np.array_equal(np.reshape(held.read(), np.shape(values)), values)
    held.array[...] = 1
    assert held.intact()
    assert (held.read() == 1).all()
    if layout in ("step", "rows"):
        held.array.base[...] = 2
        assert not held.intact()
    if layout != "scalar":
        assert np.array_equal(family.part(held, 1, 2).read(), held.read()[1:2])
    if layout in ("step", "rows", "transposed"):
        assert not held.array.flags.c_contiguous


def test_every_family_has_layouts() -> None:
    for name in ("numpy", "torch", "torch_cuda", "cupy", "simulated"):
        assert "contiguous" in layouts(name)
