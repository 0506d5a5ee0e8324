"""Ranks that are forks of an interpreter are processes as those that are started for them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.support import forkserver
from tests.support.ranks import ProcessJob
from tests.support.worker import rank_and_size

pytestmark = pytest.mark.skipif(
    not forkserver.is_supported(), reason="this kernel has no descriptors of processes"
)


def test_a_fork_has_its_own_session_folder_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {"UNICOLL_TRANSPORT": "tcp", "TMPDIR": str(tmp_path)}
    with ProcessJob(2, fresh=False) as without, ProcessJob(2, fresh=False, env=variables) as job:
        assert [job.forks, without.forks] == [2, 2]
        for function, arguments, expected in (
            (rank_and_size, (), [(0, 2), (1, 2)]),
            (os.getsid, (0,), job.pids),
            (os.getpgid, (0,), job.pids),
            (os.getcwd, (), [str(tmp_path)] * 2),
            (os.getenv, ("UNICOLL_TRANSPORT",), ["tcp"] * 2),
            (tempfile.gettempdir, (), [str(tmp_path)] * 2),
        ):
            job.call(function, *arguments)
            assert job.results() == expected
        without.call(os.getenv, "UNICOLL_TRANSPORT", "none")
        assert without.results() == [os.environ.get("UNICOLL_TRANSPORT", "none")] * 2


@pytest.mark.parametrize("options", [{"fresh": True}, {"fresh": False, "env": {"PYTHONHASHSEED": "5"}}])
def test_what_an_interpreter_reads_when_it_starts_needs_a_fresh_one(options: dict[str, object]) -> None:
    with ProcessJob(1, **options) as job:  # type: ignore[arg-type]
        assert job.forks == 0
        job.call(os.getppid)
        assert job.results() == [os.getpid()]
