"""scripts/gpu_check on the simulated device: every stage runs, errors are reported, time limits hold."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.gpu import gpu_mutation_jobs as mutations
from tests.gpu.check import command, several, summary, training, training_jobs, verdict
from tests.gpu.check.command import CUT, FAILED, NO_GPU, PASSED, main
from tests.gpu.check.record import Document, NoTime, Reporter, Skip, plain
from tests.gpu.check.stages import STAGES
from tests.gpu.gpu_reports import reported
from tests.nccl.device_ranks import shared_environment
from tests.simulated_nccl.ranks import SimulatedJob
from unicoll.testing.families import CupyFamily, layouts
from unicoll.testing.ranks import ROOT, ProcessJob, environment, run_ranks
from unicoll.testing.worker import enter

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
    assert data["verdict"] == "passed"
    assert data["simulated"] is True
    assert list(data["stages"]) == [name for name in STAGES if name != "plugin"]
    for name, stage in data["stages"].items():
        assert stage["state"] == "done", name
        assert any(check["outcome"] == "passed" for check in stage["checks"]), name
        assert STAGES[name].title in printed


def test_the_summary_comes_last(rehearsal: tuple[str, dict[str, Any]]) -> None:
    printed, _ = rehearsal
    end = printed.partition("\nStages (")[2].splitlines()
    assert len(end) < 40
    assert [line.split()[0] for line in end[1 : len(STAGES)]] == [name for name in STAGES if name != "plugin"]
    assert "not measured" not in printed
    assert end[-1].startswith("passed: ")
    assert end[-1].endswith("gpu_check_simulated.json")


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
    assert figures["cost"]["profile, simulated"]["functions"]
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


def test_what_is_cheap_and_tells_most_comes_first() -> None:
    first = ["machine", "one-rank", "pair", "several", "streams", "deadline", "exit", "plugin"]
    assert list(STAGES)[: len(first)] == first
    later = [
        "conformance-1",
        "conformance-2",
        "conformance-4",
        "mixed",
        "staged",
        "cost",
        "training",
        "copies",
    ]
    assert [name for name in STAGES if name in later] == later


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run_script(OUT=str(tmp_path))
    if done.returncode != NO_GPU:
        pytest.skip("there is a GPU here")
    assert "no GPU can be checked here" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
def test_on_this_gpu(tmp_path: Path) -> None:
    without_gpu = (
        subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode if _has_smi() else 1
    )
    if without_gpu:
        pytest.skip("there is no GPU here")
    done = run_script(
        "--budget", "150", "--stages", "machine,one-rank,conformance-1,streams", OUT=str(tmp_path)
    )
    assert done.returncode == PASSED, done.stdout + done.stderr


def _has_smi() -> bool:
    return any(Path(folder, "nvidia-smi").exists() for folder in os.environ.get("PATH", "").split(os.pathsep))


# --- the command line -----------------------------------------------------------------------------------------------


def test_a_stage_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--simulate", "--stages", "machine,nonsense"]) == 2
    assert "no stage 'nonsense'" in capsys.readouterr().err


def test_help_tells_all_options() -> None:
    done = run_script("--help")
    assert done.returncode == 0
    for option in ("--wheels", "--stages", "--budget", "--simulate", "--sharing"):
        assert option in done.stdout


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

    def do(order: dict[str, Any], limit: float, take: Any) -> tuple[str, str]:
        nonlocal now
        assert now + limit <= run.end
        if order["stage"] == "machine":
            take({"figure": "kits", "value": ["simulated"]})
        orders.append(order["stage"])
        now += limit  # every stage hangs
        return "cut off", ""

    run.runner = SimpleNamespace(do=do, close=lambda: None)  # type: ignore[assignment]
    assert run.go() == CUT
    assert now <= run.end
    assert orders[:4] == ["machine", "one-rank", "pair", "several"]


def test_a_check_of_a_program_passes_if_it_has_passed_on_all_ranks(tmp_path: Path) -> None:
    by_rank = {
        0: {"sums": {"value": 1.5}, "contexts": {"skip": "not listed"}, "messages": {"value": None}},
        1: {"sums": {"value": 2.5}, "contexts": {"skip": "not listed"}},
    }
    for rank, results in by_rank.items():
        (tmp_path / f"{rank}.json").write_text(json.dumps(results))
    skipped = {"skip": "not listed"}
    assert list(several._results(tmp_path)) == [
        ("sums", {}, 1.5),
        ("contexts", {0: skipped, 1: skipped}, None),
        ("messages", {1: {"error": "not run"}}, None),
    ]
    with pytest.raises(AssertionError, match=r"rank 1: .*not run"):
        several._judge({1: {"error": "not run"}})
    with pytest.raises(Skip):
        several._judge({0: skipped, 1: skipped})


# --- reports of stages -------------------------------------------------------------------------------------------


def test_checks_pass_fail_or_are_skipped() -> None:
    def skip() -> None:
        raise Skip("not here")

    def fail() -> None:
        raise ValueError("wrong")

    def late() -> None:
        raise NoTime("there was none")

    def tell(reporter: Reporter) -> None:
        assert reporter.check("good", lambda: 5) == 5
        assert reporter.check("bad", fail) is None
        assert reporter.check("none", skip) is None
        assert reporter.check("late", lambda: 5, needs=1000.0) is None
        assert reporter.check("later", late) is None
        reporter.figure("number", np.float64(math.nan))

    found = reported(60.0, tell)
    checks = {line["check"]: line for line in found if "check" in line}
    assert [checks[name]["outcome"] for name in ("good", "bad", "none", "late", "later")] == [
        "passed",
        "failed",
        "skipped",
        "not run",
        "not run",
    ]
    assert "ValueError: wrong" in checks["bad"]["detail"]
    assert checks["none"]["detail"] == "not here"
    assert checks["late"]["detail"] == "60 s are left of 60"
    assert found[-1] == {"figure": "number", "value": None}


def test_the_document_is_whole_at_every_moment(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    document = Document(path, {"simulated": True})
    record = document.begin("one", 5.0)

    def read() -> Any:
        data = json.loads(path.read_text())
        assert data["verdict"] == "incomplete"
        return data["stages"]["one"]

    document.take(record, {"doing": "something"})
    assert read()["doing"] == "something"
    document.take(record, {"figure": "number", "value": 5})
    assert read()["figures"] == {"number": 5}
    document.take(record, {"check": "something", "outcome": "passed", "seconds": 0.1, "detail": ""})
    assert "doing" not in read()
    document.move(tmp_path / "other.json")
    assert not path.exists()
    path = document.path
    assert read()["checks"][0]["name"] == "something"


def test_values_become_json() -> None:
    assert plain({1: (np.int64(2), math.inf, {"a"}, None, b"x")}) == {"1": [2, None, ["a"], None, "b'x'"]}


# --- the verdict ----------------------------------------------------------------------------------------------------


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
    assert verdict.verdict(stages, ["a", "b"]) == expected


def test_bars_are_ratios_to_torch_and_to_bare_nccl() -> None:
    host = {"all_reduce": {"unicoll, cupy": {"p50_us": 12.0}, "torch.distributed": {"p50_us": 16.0}}}
    large = {
        "unicoll, cupy": {"p50_us": 103.0},
        "async unicoll, cupy": {"p50_us": 300.0},
        "bare NCCL": {"p50_us": 100.0},
    }
    device = {"big": {"bytes": 1 << 24, "contenders": large}, "small": {"bytes": 8, "contenders": large}}
    stages = {"cost": _stage(enqueue=host), "device-time": _stage(**{"device time": device})}
    found = verdict.bars(stages)
    assert [(bar["ratio"], bar["met"]) for bar in found] == [(0.75, True), (1.03, False)]
    data = {"stages": stages, "bars": found, "seconds": 1.0, "budget_s": 2.0, "verdict": "passed"}
    text = "\n".join(summary.lines(data, "file"))
    assert "Bars: 1 met, 1 missed; the worst is 1.030" in text
    assert "(at most 1.01): device time, big, unicoll, cupy over bare NCCL" in text


def test_the_summary_says_what_failed_and_the_first_line_of_why() -> None:
    stages = {
        "good": _stage("passed", "skipped"),
        "bad": _stage("passed", "failed"),
        "ill": _stage("passed", state="cut off") | {"doing": "something long"},
        "worse": _stage(state="crashed") | {"stderr": "\nSegmentation fault\nmore"},
    }
    stages["bad"]["checks"][1]["detail"] = "AssertionError: " + "x" * 500 + "\nTraceback"
    data = {"stages": stages, "bars": [], "seconds": 61.0, "budget_s": 400.0, "verdict": "failed"}
    text = [*summary.lines(data, "file.json")]
    assert text[1:6] == [
        "Stages (61 s of 400):",
        "  good           1 passed, 1 skipped",
        "  bad            1 passed, 1 failed",
        "  ill            1 passed, cut off in: something long",
        "  worse          crashed",
    ]
    assert text[6] == "Failed:"
    assert text[7].startswith("  bad, #1: AssertionError: xxx")
    assert text[7].endswith("x...")
    assert text[8:10] == ["  worse crashed: Segmentation fault", "Figures:"]
    assert text[-1] == "failed: file.json"


def test_the_five_figures_that_matter() -> None:
    line = {"unicoll, cupy": {"p50_us": 12.04}, "bare NCCL": {"p50_us": 8.0}}
    late = {
        "a missing rank is named at the deadline": {"seconds after the deadline": 1.26},
        "others shrink the group after the deadline": {"seconds": 2.0},
    }
    share = {"share of the slower of bus and host": 0.876}
    stages = {
        "cost": _stage(enqueue={"all_reduce in the background and wait, 8 B": line}),
        "device-time": _stage(
            **{
                "device time": {
                    "all_reduce (with a factor), 16 MiB": {"contenders": {}},
                    "all_reduce (with a factor), 256 MiB": {"contenders": line},
                }
            }
        ),
        "deadline": _stage(**late),
        "conformance-2": _stage(**{"cases, drawn": {"run": 40, "batches failed": 1}, "seed": 5}),
        "copies": _stage(**{"cupy: staged by the backend gloo": share}),
    }
    assert [*summary.figures(stages).values()] == [
        "unicoll, cupy 12.0; bare NCCL 8.0",
        "256 MiB: unicoll, cupy 1.505",
        "1.3 s from the deadline to the error, 2.0 s to go on without it",
        "40 on 2 (1 batches failed)",
        "cupy 0.88",
    ]
    assert {*summary.figures({}).values()} == {"not measured"}


# --- mutations ------------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("mutation", "program", "policy"),
    [
        ("producers", "a_late_producer_on_the_current_stream", "newest"),
        ("end", "the_result_is_used_right_after_wait", "oldest"),
        ("hold", "memory_in_flight_is_not_used_again", "oldest"),
    ],
)
def test_a_program_fails_without_the_safeguard_that_it_is_about(
    mutation: str, program: str, policy: str
) -> None:
    with SimulatedJob(2, policy=policy, devices="shared", env={"UNICOLL_NCCL_SHARE_DEVICE": "1"}) as job:
        job.call(enter)
        job.results()
        job.call(mutations.fails, program, None)
        assert job.results() == [None, None]
        job.call(mutations.fails, program, mutation)
        assert all(error == "AssertionError" for error in job.results())


# --- training -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.torch
def test_a_transformer_on_two_ranks_ends_where_it_does_on_one() -> None:
    pytest.importorskip("torch")
    results = {n: run_ranks(n, training_jobs.transformer, "torch", "cpu", timeout=120.0) for n in (1, 2)}
    assert training.same(results)["relative difference"] <= 1e-9


def test_runs_that_differ_are_told_apart() -> None:
    good = {"parameters": [np.ones(3)], "losses": [2.0, 1.0]}
    assert training.same({1: [good], 2: [good, good]})["losses"] == [2.0, 1.0]
    with pytest.raises(AssertionError, match=r"differ by 0\.5"):
        training.same({1: [good], 2: [good, {**good, "parameters": [np.array([1, 1.5, 1])]}]})
    with pytest.raises(AssertionError, match="the loss went"):
        training.same({1: [{**good, "losses": [1.0, 1.0]}], 2: [good]})


def test_overlap_counts_what_goes_on_at_once() -> None:
    spans = [(False, 0.0, 10.0), (False, 5.0, 12.0), (True, 8.0, 20.0), (True, 30.0, 31.0), (True, 3.0, 3.0)]
    assert training_jobs.overlap(spans) == {"computing_us": 12.0, "travelling_us": 13.0, "both_us": 4.0}


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


def test_ranks_on_one_device_tell_nccl_so() -> None:
    new, old = partial(shared_environment, 1, "auto"), partial(shared_environment, 0, "hostid")
    assert new(23007)["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_HOSTID" not in new(23007)
    assert new(22809)["NCCL_HOSTID"] != shared_environment(0, "auto", 22809)["NCCL_HOSTID"]
    assert old(23007)["NCCL_NET"] == "Socket"


def test_exit_codes_differ() -> None:
    assert len({PASSED, FAILED, 2, NO_GPU, CUT}) == 5
    assert issubclass(SimulatedJob, ProcessJob)
