"""torchfrtrace, the analyser of PyTorch's flight recorder, on unicoll's dumps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import python
from tests.support.ranks import end_cleanly, joined
from tests.tools import dump_jobs as jobs

pytestmark = pytest.mark.torch
pytest.importorskip("torch.distributed.flight_recorder.fr_trace")


def analysed(directory: Path, *options: str) -> str:
    """What torchfrtrace prints about the dumps."""
    program = "import sys; from torch.distributed.flight_recorder.fr_trace import main; main(sys.argv[1:])"
    done = python("-c", program, directory, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_good_run_has_no_errors(tmp_path: Path) -> None:
    with joined(3) as job:
        job.call(jobs.some_calls, str(tmp_path))
        job.results()
        end_cleanly(job)
    output = analysed(tmp_path, "-v")
    for text in ("missing ranks", "errors", "mismatch", "Not all ranks", "cannot decide"):
        assert text not in output.replace("type_of_mismatch", "").replace("mismatch_collectives", ""), output
    for name in (
        "gloo:all_reduce",
        "gloo:broadcast",
        "gloo:all_gather",
        "gloo:allreduce_coalesced",
        "gloo:all_to_all",
        "gloo:coalesced",
        "gloo:barrier",
        "gloo:send 0->1",
        "gloo:recv 0<-1",
    ):
        assert name in output
    assert (
        "collective_name='gloo:allreduce_coalesced', input_sizes=[[4], [2]], output_sizes=[[4], [2]]"
        in output
    )


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("function", "texts"),
    [
        (
            jobs.one_is_missing,
            [
                "Not all ranks joining collective, sequence number: 2",
                "collective: gloo:all_reduce",
                "missing ranks: {2}",
                "collective state: started",
            ],
        ),
        (
            jobs.one_calls_another,
            [
                "Collective sequence number: 2 has errors",
                "Culprit rank 2; Error type: COLLECTIVE_TYPE_MISMATCH",
                "Expected collective type: 'all_reduce' does not match found collective type: 'broadcast'",
            ],
        ),
    ],
)
def test_a_failure_is_found(tmp_path: Path, function: Any, texts: list[str]) -> None:
    arguments = [str(tmp_path)] if function is jobs.one_is_missing else []
    with joined(3, env={"UNICOLL_TRACE_DIR": str(tmp_path)}) as job:
        job.call(function, *arguments)
        job.results()
        end_cleanly(job)
    output = analysed(tmp_path)
    for text in [*texts, f"all_reduce at {jobs.__file__}:"]:
        assert text in output
