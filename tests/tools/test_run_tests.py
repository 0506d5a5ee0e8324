"""scripts/run_tests.py: tests that fail run again alone; what then passes is flaky, and does not fail the run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import ROOT, environment

FAILS_IN_COMPANY = """
import pytest

@pytest.mark.parametrize("number", range({flaky}))
def test_flaky(number, request):
    print("the reason")
    assert len(request.session.items) == 1

def test_good():
    pass

def test_other():
    assert {right}
"""
APPENDS_ITS_SEED = """
import os

def test_x():
    with open("seeds", "a") as file:
        file.write(os.environ["UNICOLL_TEST_SEED"] + " ")
    assert False
"""


def run(folder: Path, program: str) -> tuple[int, str]:
    """The exit status and the output of the script in a small project."""
    for file in ("scripts/run_tests.py", "tests/support/failed_tests.py"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(f"{ROOT}/{file}", folder / file)
    (folder / "tests" / "test_x.py").write_text(program)
    variables = environment({"UNICOLL_TEST_FLAKY": str(folder / "flaky")})
    variables.pop("UNICOLL_TEST_SEED", None)
    ended = subprocess.run(
        [sys.executable, "scripts/run_tests.py", "tests"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not ended.stderr
    return ended.returncode, ended.stdout


@pytest.mark.every(n=5)
@pytest.mark.parametrize(
    ("flaky", "right", "status"), [(0, True, 0), (3, True, 0), (4, True, 1), (1, False, 1), (30, True, 1)]
)
def test_the_status_of_a_run(tmp_path: Path, flaky: int, right: bool, status: int) -> None:
    ended, output = run(tmp_path, FAILS_IN_COMPANY.format(flaky=flaky, right=right))
    assert ended == status, output
    repeated = flaky if flaky < 20 else 0
    assert output.count("FLAKY: tests/test_x.py::test_flaky[") == repeated
    assert ("FAILED: tests/test_x.py::test_other fails alone, too" in output) == (not right)
    kept = sorted((tmp_path / "flaky").glob("*")) if repeated or not right else []
    assert len(kept) == repeated
    assert all("the reason" in file.read_text() for file in kept)


def test_tests_that_cannot_be_collected_fail_the_run(tmp_path: Path) -> None:
    ended, output = run(tmp_path, "import nothing_of_this_name")
    assert ended == 2, output


@pytest.mark.every(n=0)
def test_a_test_runs_again_with_the_same_seed(tmp_path: Path) -> None:
    ended, output = run(tmp_path, APPENDS_ITS_SEED)
    assert ended == 1, output
    seeds = (tmp_path / "seeds").read_text().split()
    assert len(seeds) == 3
    assert len({*seeds}) == 1
