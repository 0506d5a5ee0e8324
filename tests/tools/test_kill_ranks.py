"""The training whose processes are killed: its weights have the bits of trainings in which nothing was killed."""

from __future__ import annotations

import pytest

from tests.support.programs import python


@pytest.mark.every(n=0)
def test_weights_do_not_depend_on_kills_or_processes() -> None:
    done = python("scripts/kill_ranks.py", "--kills", "3", "--epochs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "all weights are equal"
    assert [line.partition(":")[0].rpartition(",")[0] for line in lines[1:-2]] == [
        f"{processes} processes" for processes in (1, 2, 3, 4)
    ]
    assert lines[-2].startswith("4 processes, 3 kills")
