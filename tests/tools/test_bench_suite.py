"""The suite of the benchmark: its table, what counts as moved, its files and page, and a small run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.ranks import ROOT, environment
from tests.tools.test_bench import bench
from unicoll.bench import contenders, main
from unicoll.bench.operations import OPERATIONS
from unicoll.bench.suite import BETTER, WORSE, rows, runs
from unicoll.bench.suite.compare import LEAST, Change, Measured, compared, report_lines
from unicoll.bench.suite.page import page
from unicoll.bench.suite.rows import JOBS, ROWS, RatioRow, SuiteJob, Timing

# --- the table ------------------------------------------------------------------------------------------------------


def test_the_table() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    timings = {timing for row in ROWS for timing in row.timings}
    assert {timing.contender for timing in timings} <= set(contenders.TABLE)
    assert {timing.op for timing in timings} == set(OPERATIONS)
    assert {timing.job for timing in timings} == set(JOBS)
    assert len({str(timing) for timing in timings}) == len(timings)
    for row in ROWS:
        assert row.larger_is_better == row.over.contender.startswith("torch-"), row.name


# --- what has moved -------------------------------------------------------------------------------------------------

GLOO, TORCH = Timing("gloo", "all_reduce", 8), Timing("torch-gloo", "all_reduce", 8)
SPEED = RatioRow("speed", TORCH, GLOO, larger_is_better=True)
COST = RatioRow("cost", GLOO, TORCH)


def verdicts(now: Mapping[str, Sequence[float]], then: Mapping[str, Sequence[float]]) -> dict[str, str]:
    def measured(values: Mapping[str, Sequence[float]]) -> dict[str, Measured]:
        return {name: Measured(tuple(v)) for name, v in values.items()}

    changes = compared([SPEED, COST], measured(now), measured(then))
    return {change.row.name: change.verdict for change in changes}


def test_the_spread_is_three_median_distances() -> None:
    assert Measured((2.0,)).spread == 1.0
    assert Measured((1.8, 2.0, 2.0, 2.0, 2.2)).spread == 1.0
    assert Measured((1.6, 1.8, 2.0, 2.2, 2.4)).spread == pytest.approx(1.1**3, rel=0.05)
    assert Measured((1.6, 1.8, 2.0, 2.2, 200.0)).spread == pytest.approx(1.1**3, rel=0.05)


@pytest.mark.parametrize(
    ("now", "then", "speed", "cost"),
    [
        ([10, 10, 10], [10, 10, 10], "", ""),
        ([10.9, 10.9, 10.9], [10, 10, 10], "", ""),  # less than LEAST
        ([11.2, 11.2, 11.2], [10, 10, 10], "better", "worse"),
        ([8.9, 8.9, 8.9], [10, 10, 10], "worse", "better"),
        ([9, 10, 11.5, 12.5], [9, 10, 11], "", ""),  # both vary
        ([7, 8, 9], [9, 10, 11], "", ""),
        ([2, 2.2, 2.4], [9, 10, 11], "worse", "better"),  # far beyond what both vary
        ([8.9, 8.9, 8.9], [10], "worse", "better"),
    ],
)
def test_only_changes_beyond_the_noise_of_both_runs_count(
    now: list[float], then: list[float], speed: str, cost: str
) -> None:
    found = verdicts({"speed": now, "cost": now}, {"speed": then, "cost": then})
    assert found == {"speed": speed, "cost": cost}


def test_ratios_that_only_one_run_has_are_not_compared() -> None:
    assert verdicts({"speed": [1.0]}, {"cost": [1.0]}) == {"speed": ""}
    assert Change(COST, Measured((5.0,)), None).noise == LEAST


def test_the_report() -> None:
    now, steady = Measured((5.0, 5.0, 5.0)), Measured((3.0, 3.0, 3.1))
    lines = report_lines([Change(SPEED, now, Measured((10.0,))), Change(COST, steady, Measured((3.0,)))])
    assert lines[1].split() == ["speed", "larger", "5", "10", "-50%", "10%", "worse"]
    assert lines[2].split() == ["cost", "smaller", "3", "3", "+0%", "10%"]
    assert lines[3:] == ["# worse by more than the noise: speed"]
    assert report_lines([Change(SPEED, now, None)])[-1] == "# there is no earlier run of these ratios"
    assert report_lines([Change(SPEED, now, now)])[-1] == "# nothing has moved by more than the noise"


# --- runs with times that are given ---------------------------------------------------------------------------------

FEW = ("--repetitions", "3", "--seconds", "0")


class GivenTimes:
    """Takes the place of the jobs: every time is 10, or the one that is given for its name, in microseconds."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.failing = ""
        self.jobs: list[str] = []

    def __call__(self, job: SuiteJob, arguments: Sequence[str], run: runs.SuiteRun) -> dict[str, float]:
        self.jobs.append(job.name)
        if job.name == self.failing:
            run.failures[job.name] = "rank 1 has failed"
            return {}
        if job.mpi:
            run.skipped[job.name] = "there is no mpi4py with mpirun"
            return {}
        run.machine |= {"cpu": "a CPU", "cores_usable": 2, "python": "3", "unicoll": "1"}
        repetition = run.repetitions
        return {
            str(t): self.times.get(str(t), [10.0] * 9)[repetition] for t in runs.timings_of(rows.ROWS, job)
        }


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> GivenTimes:
    for name in [name for name in os.environ if name not in environment()]:
        monkeypatch.delenv(name)
    times = GivenTimes()
    monkeypatch.setattr(runs, "_job_times", times)
    return times


def test_what_has_moved_since_a_saved_run(
    given: GivenTimes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = str(tmp_path / "first.json"), str(tmp_path / "second.json")
    given.times["gloo broadcast 8 (shared memory)"] = [10, 11, 12]
    main(("suite", *FEW, "--save", first))
    assert given.jobs == [job.name for job in JOBS] + [job.name for job in JOBS if not job.mpi] * 2
    data = json.loads(Path(first).read_text())
    assert data["ratios"]["broadcast 8 / all_reduce"] == {
        "median": 1.1,
        "spread": 1.298,
        "values": [1, 1.1, 1.2],
    }
    assert data["us"]["gloo broadcast 8 (shared memory)"] == [10, 11, 12]
    assert data["machine"]["cpu"] == "a CPU"
    assert data["repetitions"] == 3
    assert data["not_measured"] == {"mpirun": "there is no mpi4py with mpirun"}
    assert not [name for name in data["ratios"] if "mpi4py" in name]

    capsys.readouterr()
    given.times["gloo broadcast 8 (shared memory)"] = [12, 13, 13]  # within what the first run varied
    assert main(("suite", *FEW, "--against", first)) == 0
    printed = capsys.readouterr().out
    assert "# nothing has moved by more than the noise" in printed
    assert "# not measured: mpirun: there is no mpi4py with mpirun" in printed

    given.times["gloo scan 16K (shared memory)"] = [15, 15, 15]
    given.times["torch-gloo all_reduce 4M (shared memory)"] = [20, 20, 20]
    assert main(("suite", *FEW, "--against", first, "--save", second)) == WORSE
    printed = capsys.readouterr().out.splitlines()
    assert "# worse by more than the noise: scan 16K / all_reduce" in printed
    assert "# better by more than the noise: all_reduce 4M: torch-gloo / gloo" in printed

    del given.times["gloo scan 16K (shared memory)"]
    assert main(("suite", *FEW, "--against", second)) == BETTER
    assert "# better by more than the noise: scan 16K / all_reduce" in capsys.readouterr().out


def test_a_job_that_fails(given: GivenTimes, capsys: pytest.CaptureFixture[str]) -> None:
    given.failing = "tcp"
    assert main(("suite", *FEW, "--only", "all_reduce 64M")) == WORSE
    assert given.jobs.count("tcp") == 1, "it is not repeated"
    seen = capsys.readouterr()
    assert "unicoll.bench: the job tcp failed\nrank 1 has failed" in seen.err
    assert "all_reduce 64M: gloo / floor" in seen.out


def test_only_some_ratios(given: GivenTimes, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert (
        main(("suite", *FEW, "--only", "recorder", "--against", str(saved(tmp_path)), "--save", str(out)))
        == 0
    )
    assert set(given.jobs) == {"one rank"}
    assert [name.rpartition(" ")[2] for name in json.loads(out.read_text())["ratios"]] == ["recorder"]


def saved(folder: Path) -> Path:
    path = folder / "empty.json"
    run = runs.SuiteRun(machine={"cpu": "a CPU", "cores_usable": 2}, repetitions=1)
    path.write_text(json.dumps(run.as_json()))
    return path


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--only", "nonsense"], "there is no such ratio"),
        (["--repetitions", "0"], "--repetitions must be at least 1"),
        (["--factor", "0"], "--factor positive"),
        (["--against", "/nonexistent/run.json"], "No such file"),
        (["--save", "/nonexistent/run.json"], "cannot be written"),
        (["--against", str(ROOT / "benchmarks" / "overlap_2ranks.json")], "is no run of the suite"),
        (["--no-such-flag"], "unrecognized arguments"),
    ],
)
def test_invalid_arguments_are_one_line(
    given: GivenTimes, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(("suite", *arguments))
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    assert text in error
    assert given.jobs == []


@pytest.mark.parametrize("text", ["", '{"format": 1', '{"format": 1, "ratios": {}}', "[]"])
def test_a_file_that_is_cut_off_is_no_run(
    given: GivenTimes, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(SystemExit):
        main(("suite", *FEW, "--against", str(path)))
    assert f"{path} is no run of the suite" in capsys.readouterr().err
    assert given.jobs == []


def test_it_starts_its_own_ranks(
    given: GivenTimes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(("suite",))
    assert "the suite starts its own ranks" in capsys.readouterr().err


def test_repetitions_are_made_while_they_fit(given: GivenTimes, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(runs.time, "monotonic", lambda: 10 * next(clock))
    assert runs.take(ROWS[:1], 2, 60, [], print).repetitions >= 3
    assert runs.take(ROWS[:1], 2, 0, [], print).repetitions == 2


# --- real runs ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    small = ("suite", "--only", "async", "--repetitions", "2", "--seconds", "0", "--factor", "0.02")
    (row,) = [row for row in ROWS if "async" in row.name]
    done = bench(*small, "--against", str(saved(tmp_path)), "--save", str(first))
    assert done.returncode == 0, done.stderr
    assert "2 repetitions" in done.stdout.splitlines()[0]
    assert "# there is no earlier run of these ratios" in done.stdout
    data = json.loads(first.read_text())
    over, under = (data["us"][str(timing)] for timing in row.timings)
    assert min(over + under) > 0
    found = data["ratios"][row.name]["values"]
    assert found == pytest.approx([a / b for a, b in zip(over, under, strict=True)], rel=1e-2)
    assert len(found) == 2
    data["ratios"][row.name]["values"] = [value / 1e6 for value in found]
    second.write_text(json.dumps(data))
    done = bench(*small, "--against", str(second))
    assert done.returncode == WORSE, done.stdout
    assert f"# worse by more than the noise: {row.name}" in done.stdout


@pytest.mark.every(3)
@pytest.mark.parametrize("text", ["tcp", "recorder", " 8 / all_reduce"])
def test_the_jobs(text: str) -> None:
    """Each job without torch and MPI, once: every ratio is measured."""
    chosen = [row for row in ROWS if text in row.name]
    run = runs.take(chosen, 1, 0, ["suite", "--only", text, "--factor", "0.02"], print)
    assert run.failures == run.skipped == {}
    assert list(run.values) == [row.name for row in chosen]
    assert all(value > 0 for values in run.us.values() for value in values)


def test_the_commit_of_an_installation_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    assert runs.SuiteRun().as_json()["commit"] is None


def test_a_page_needs_runs(
    given: GivenTimes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "COMMITTED", tmp_path / "none")
    with pytest.raises(SystemExit):
        main(("suite", "--page", str(tmp_path / "page.md")))
    assert "there are no runs in" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_other_load_is_mentioned(
    given: GivenTimes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for load, count in ((0.5, 0), (1.5, 1)):
        monkeypatch.setattr(runs.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        main(("suite", *FEW))
        assert capsys.readouterr().out.count("# warning: load average 1.5 on ") == count


def test_the_output_of_a_job_that_fails() -> None:
    job = SuiteJob("one rank", 1, {"UNICOLL_TRANSPORT": "nonsense"})
    status, output = runs.start(job, ["all_reduce", "--sizes", "8"])
    assert status != 0
    assert "UNICOLL_TRANSPORT" in output


# --- committed runs -------------------------------------------------------------------------------------------------


def test_the_page_of_the_committed_runs() -> None:
    text = (ROOT / "docs" / "benchmark-history.md").read_text()
    assert text == page(runs.COMMITTED), "python -m unicoll.bench suite --page docs/benchmark-history.md"
    newest = runs.newest(runs.COMMITTED)
    assert newest is not None
    data = runs.load_run(newest)
    assert data["commit"] in next(line for line in text.splitlines() if line.startswith("| ratio |"))
    for name, measured in runs.ratios_of(data).items():
        assert f"| {name} | " in text
        assert data["ratios"][name]["median"] == pytest.approx(measured.median, rel=1e-3)
