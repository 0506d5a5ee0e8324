"""``DistributedDataParallel.join``: ranks with different numbers of inputs end with torch's weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import ddp_join_programs as programs

from unicoll.testing.ranks import Job, Pool, pools

pytestmark = pytest.mark.torch
COUNTS = [3, 1, 5]
"""Steps of each rank. In the second epoch each has those of the next."""


@pytest.fixture(scope="module")
def of() -> Iterator[Callable[[int], Pool]]:
    with pools(_beside_gloo) as made:
        yield made


def _beside_gloo(size: int) -> Job:
    """A job whose processes have used torch's Gloo, of which a thread and its sockets stay."""
    job = Job(size, env={"GLOO_SOCKET_IFNAME": "lo"})
    with tempfile.TemporaryDirectory() as folder:
        job.call(programs.use_gloo, f"{folder}/meeting")
        job.results()
    return job


@pytest.mark.sampled("size", "settings", 2)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"broadcast_buffers": False},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"static_graph": True},
    ],
    ids=lambda settings: "+".join(settings) or "plain",
)
def test_weights_are_torchs(
    of: Callable[[int], Pool], size: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    of(size).run(programs.beside_torch, str(tmp_path / "meeting"), COUNTS[:size], settings)


@pytest.mark.sampled("settings", "counts", 1)
@pytest.mark.parametrize(
    "settings", [{}, {"find_unused_parameters": True}], ids=lambda s: "+".join(s) or "plain"
)
@pytest.mark.parametrize("counts", [[4, 2], [2, 6], [0, 2], [3, 4], [2, 4, 4]], ids=str)
def test_with_accumulated_gradients(
    of: Callable[[int], Pool], counts: list[int], settings: dict[str, Any], tmp_path: Path
) -> None:
    of(len(counts)).run(programs.beside_torch, str(tmp_path / "meeting"), counts, settings, True)


@pytest.mark.parametrize("counts", [[0, 0], [2, 2], [0, 3, 0]], ids=str)
def test_no_inputs_at_all_and_as_many(of: Callable[[int], Pool], counts: list[int], tmp_path: Path) -> None:
    of(len(counts)).run(programs.beside_torch, str(tmp_path / "meeting"), counts, {})


def test_with_a_comm_hook(of: Callable[[int], Pool], tmp_path: Path) -> None:
    of(2).run(programs.beside_torch, str(tmp_path / "meeting"), [1, 3], {}, False, True)


@pytest.mark.parametrize("size", [2, 3])
def test_early_termination_is_thrown_on_all_ranks(
    of: Callable[[int], Pool], size: int, tmp_path: Path
) -> None:
    for rank, (steps, error, theirs, their_error) in enumerate(
        of(size).run(programs.thrown, str(tmp_path / "meeting"))
    ):
        assert steps == theirs == 2
        said = their_error.removeprefix("RuntimeError: ")
        assert error.startswith(f"DistError: {said}"), their_error
        more = "1" if size == 2 else "1, 2"
        others = f"Ranks that have more: {more}" if rank == 0 else "Ranks without further inputs: 0"
        assert others in error


def test_nothing_is_thrown_where_all_end_together(of: Callable[[int], Pool]) -> None:
    assert of(2).run(programs.as_many_inputs) == [1, 1]


@pytest.mark.parametrize("size", [2, 3])
def test_passes_that_torch_could_not_follow(of: Callable[[int], Pool], size: int) -> None:
    of(size).run(programs.several_passes)


def test_ranks_that_make_different_passes_are_told(of: Callable[[int], Pool]) -> None:
    for said in of(2).run(programs.misused, "different"):
        assert said.startswith(
            "DistError: join: rank 0 has come to a backward pass, rank 1 has come to a forward pass"
        )


def test_it_is_entered_once(of: Callable[[int], Pool]) -> None:
    assert of(2).run(programs.misused, "twice") == ["DistArgumentError: join: it is entered already"] * 2
