"""torch's enable_reconfigure (2.14): a default group with members that change."""

from __future__ import annotations

import json
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.programs import python
from tests.support.ranks import ProcessJob

dist = pytest.importorskip("torch.distributed")
if not hasattr(dist, "_reconfigure"):
    pytest.skip("reconfigure is in torch 2.14 and newer", allow_module_level=True)

from tests.torch import reconfigure_jobs as jobs  # noqa: E402 - needs torch
from tests.torch import torch_jobs  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ProcessJob]:
    with ProcessJob(3, join="env", quiet=False, modules=["torch"]) as job:
        job.call(jobs.join, str(tmp_path / "store"))
        job.results()
        yield job


def test_members_change(job: ProcessJob) -> None:
    calls: list[Callable[[], None]] = [
        jobs.members_change,
        jobs.refusals,
        jobs.a_member_is_late,
        jobs.after_abort,
        jobs.other_groups_stay,
    ]
    for call in calls:
        job.call(call)
        job.results()
    job.call(torch_jobs.leave)
    assert job.results() == [[]] * 3


def test_a_rank_is_lost(job: ProcessJob) -> None:
    job.call(jobs.reconfigure, jobs.ALL)
    job.results()
    job.call(jobs.a_rank_is_lost, ranks=[0, 2])
    job.call(jobs.handles_of, jobs.ALL, "before the loss", ranks=[1])
    for rank in (0, 2):
        job.await_note(rank)
    job.signal(1, signal.SIGKILL)
    for outcome in job.collect(ranks=[0, 2]):
        assert outcome.failure is None, job.report()
    job.call(torch_jobs.leave, ranks=[0, 2])
    assert [outcome.value for outcome in job.collect(ranks=[0, 2])] == [[], []]


PROGRAM = """
    import json, os, signal, sys
    import torch
    import torch.distributed as dist
    import unicoll.torch_plugin

    dist.init_process_group("unicoll", enable_reconfigure=True)
    store = dist.distributed_c10d._get_default_store()
    process, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first = "UNICOLL_REPLACEMENT" not in os.environ

    def meet(number):
        store.set(f"{number}/{process}", dist._get_reconfigure_handle())
        dist._reconfigure(number, [store.get(f"{number}/{each}").decode() for each in range(size)]).wait()
        dist.broadcast(step, src=1)

    number = 1 if first else 2
    step = torch.zeros(1)
    meet(number)
    lost = None
    while step < 4:
        if first and process == 0 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.ones(1)
        try:
            dist.all_reduce(total)
        except unicoll.RankLostError as error:
            lost, number = error.rank, number + 1
            meet(number)
            continue
        step += total.item() / size
    print(json.dumps([dist.get_rank(), dist.get_world_size(), step.item(), lost]))
    dist.destroy_process_group()
    """


def test_the_launcher_replaces_rank_0(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM))
    done = python("-m", "unicoll.run", "-n", "3", "--replace", "--no-prefix", script)
    assert done.returncode == 0, done.stderr
    found = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert found == [[0, 3, 4.0, None], [1, 3, 4.0, 0], [2, 3, 4.0, 0]]
