"""``await work``, and futures: the scenarios of awaiting.py, each on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import ROOT, environment
from tests.unit.awaiting import SCENARIOS

PROGRAM = str(Path(__file__).with_name("awaiting.py"))


@pytest.mark.every(5)
@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_awaiting(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "unicoll.run", "--nproc-per-node", "2", "--no-prefix", PROGRAM, name],
        env=environment({"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"{name} ok\n" * 2
