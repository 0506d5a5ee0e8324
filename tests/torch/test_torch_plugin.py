"""unicoll's backends in torch.distributed: every operation, every start, errors and shutdown."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.programs import python
from tests.support.ranks import ProcessJob

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

from tests.torch import torch_jobs as jobs
from unicoll.torch_plugin.register import _members_name

pytestmark = pytest.mark.torch
Run = Callable[..., list[Any]]


def test_the_names_of_large_groups_are_short_and_differ() -> None:
    short, even, odd = (_members_name(list(range(*each))) for each in ((512,), (0, 99, 2), (1, 99, 2)))
    assert short == "ranks 0-511"
    assert even.startswith("ranks 0, 2, 4, ")
    assert ", ... (50 ranks, " in even
    assert len(even) < 100
    others = _members_name([*range(0, 97, 2), 99])
    assert others.partition("(")[0] == even.partition("(")[0]
    assert len({even, odd, others}) == 3


def ended(job: ProcessJob) -> None:
    """All ranks leave without leaked resources."""
    job.call(jobs.leave)
    assert job.results() == [[]] * job.size


@pytest.fixture(scope="module", params=[2, 3])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """``run(function, ...)``: the results of a call on ranks that all tests of the module share."""
    with ProcessJob(request.param, join="env", quiet=False, modules=["torch"]) as job:
        job.call(jobs.join, "unicoll-gloo")
        assert job.results() == [(rank, job.size, "unicoll-gloo") for rank in range(job.size)]

        def call(function: Callable[..., Any], *args: Any) -> list[Any]:
            job.call(function, *args)
            return job.results()

        yield call
        ended(job)


@pytest.mark.every(n=8)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("collective", jobs.COLLECTIVES, ids=lambda f: f.__name__)
def test_collectives(run: Run, collective: Callable[[bool], None], async_op: bool) -> None:
    run(collective, async_op)


@pytest.mark.parametrize(
    "job", [jobs.messages, jobs.objects, jobs.groups, jobs.futures, jobs.flight_recorder, jobs.recovery]
)
def test_other_operations(run: Run, job: Callable[[], None]) -> None:
    run(job)


def test_properties_of_a_group(run: Run) -> None:
    for facts in run(jobs.facts):
        assert facts["backend"] == facts["name"] == "unicoll-gloo"
        assert facts["devices"] == ["cpu"]
        assert "torch's tcp://127.0.0.1" in facts["explained"]
        assert "shared memory" in facts["explained"]
        assert facts["available"]


def test_functions_of_unicoll_serve_the_job(run: Run, tmp_path: Path) -> None:
    run(jobs.unicoll_functions, str(tmp_path))


@pytest.mark.parametrize("by_unicoll", [False, True], ids=["torch", "unicoll"])
def test_one_call_destroys_the_groups_of_both(by_unicoll: bool, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics_{rank}.prom"
    with ProcessJob(2, join="env", modules=["torch"], env={"UNICOLL_METRICS_FILE": str(metrics)}) as job:
        job.call(jobs.join, "unicoll")
        job.results()
        job.call(jobs.both_ways_end, by_unicoll)
        job.results()
        ended(job)
    assert len(list(tmp_path.glob("metrics_?.prom"))) == 2


def test_gradients_of_gathers(run: Run) -> None:
    run(jobs.gradients_of_gathers)


def test_types_that_are_not_reduced(run: Run) -> None:
    run(jobs.moved_types)


def test_timeouts_that_torch_sets() -> None:
    with ProcessJob(2, join="env", modules=["torch"]) as job:
        job.call(jobs.join, "unicoll-gloo")
        job.results()
        job.call(jobs.timeouts)
        found, _ = job.results()
        ended(job)
    for error in found:
        assert "after 0.4 s" in error


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_join_again_at_once(late: int) -> None:
    """They do not use the store of the job before, which rank 0 is about to end; a client of torch may log its end."""
    with ProcessJob(3, join="env", modules=["torch"], quiet=False) as job:
        job.call(jobs.join, "unicoll-gloo")
        job.results()
        job.call(jobs.join_again, 10, late)
        job.results()
        ended(job)


def test_a_part_that_torch_has_not_registered_ends_with_the_job() -> None:
    with ProcessJob(2, join="env", modules=["torch"]) as job:
        job.call(jobs.joined_without_metrics, "unicoll-gloo")
        assert all("there is no directory /nowhere" in error for error in job.results())
        job.call(jobs.join, "unicoll-gloo")
        job.results()
        job.call(jobs.a_part_that_torch_has_not_registered)
        job.results()
        ended(job)


def test_invalid_arguments_raise(run: Run) -> None:
    for said in run(jobs.refusals):
        assert "complex" in said[0]
        assert "DistTypeError: all_reduce: ReduceOp.BOR is not defined for float32" in said[1]
        assert "meta" in said[2]
        assert "DistArgumentError: all_gather_into_tensor: output" in said[3]
        assert "sparse_csr" in said[4]
        assert said[5].startswith("DistArgumentError: explain")
        assert said[6].startswith("DistArgumentError: send: tag 9223372036854775808")
        assert said[7].startswith("DistArgumentError: recv: tag -9223372036854775809")
        assert "the shapes of the sparse tensors differ:\n  rank 0: [4]\n  rank 1: [5]" in said[8]


def test_a_process_in_place_of_a_lost_one_needs_a_group_that_reconfigures() -> None:
    program = "import torch.distributed as dist, unicoll.torch_plugin; dist.init_process_group('unicoll')"
    ended = python("-c", program, RANK="0", WORLD_SIZE="2", UNICOLL_REPLACEMENT="1")
    assert ended.returncode == 1
    assert (
        "DistArgumentError: init_process_group: this process replaces a rank that has ended" in ended.stderr
    )


# --- the launcher's store ---------------------------------------------------------------------------------------------


def _store_calls(store: Any) -> list[Any]:
    """Results of all calls of a store, also within a timeout of 0.3 s; errors by type."""
    found: list[Any] = []

    def note(call: Callable[[], Any]) -> None:
        try:
            found.append(call())
        except Exception as e:
            found.append(type(e).__name__)

    before = store.num_keys()
    store.set("a", "1")
    store.set("b", b"2")
    note(lambda: store.num_keys() - before)
    note(lambda: sorted(store.list_keys()))
    note(lambda: [store.get("a"), store.add("n", 2), store.add("n", 3), store.check(["a", "n"])])
    note(lambda: [store.delete_key("a"), store.delete_key("a"), store.check(["a"])])
    note(lambda: store.compare_set("b", "2", "3"))
    for value in ("first", "second", "third"):
        note(lambda v=value: store.queue_push("q", v))  # type: ignore[misc]
    note(
        lambda: [
            store.queue_len("q"),
            store.queue_pop("q"),
            store.queue_pop("q", False),
            store.queue_len("q"),
        ]
    )
    note(lambda: [store.queue_pop(key="q", block=True), store.queue_len("q"), store.queue_len("none")])
    note(lambda: store.queue_pop("q", False))
    store.set_timeout(timedelta(seconds=0.3))
    note(lambda: store.timeout)
    note(lambda: store.queue_pop("q"))
    note(lambda: sorted(key for key in store.list_keys() if not key.startswith("q")))
    return found


def test_the_launchers_store_has_all_calls_of_torchs() -> None:
    import torch.distributed as dist

    from unicoll.net.stores import HashStore
    from unicoll.torch_plugin.stores import UnicollBackedStore

    ours: Any = UnicollBackedStore(SimpleNamespace(store=HashStore()))  # type: ignore[arg-type]
    torchs = dist.HashStore()
    for prefixes in (("x",), ("x", "y")):
        wrapped = [ours, torchs]
        for prefix in prefixes:
            wrapped = [dist.PrefixStore(prefix, store) for store in wrapped]
        found, expected = map(_store_calls, wrapped)
        assert found == expected
    assert expected[0] == 2  # it has raised nothing
    assert _store_calls(dist.PrefixStore("z", torchs)) == expected  # of a PrefixStore of torch's own


def test_values_of_a_queue_go_to_one_thread_each() -> None:
    import torch.distributed as dist

    from unicoll.net.stores import HashStore
    from unicoll.torch_plugin.stores import UnicollBackedStore

    ours: Any = UnicollBackedStore(SimpleNamespace(store=HashStore()))  # type: ignore[arg-type]
    store: Any = dist.PrefixStore("x", ours)
    if not hasattr(store, "queue_push"):
        pytest.skip("this torch's stores have no queues")
    popped: list[bytes] = []
    takers = [
        threading.Thread(target=lambda: popped.extend(store.queue_pop("q") for _ in range(50)))
        for _ in range(4)
    ]
    givers = [
        threading.Thread(target=lambda k=k: [store.queue_push("q", f"{k} {i}") for i in range(100)])
        for k in range(2)
    ]
    for thread in (*takers, *givers):
        thread.start()
    for thread in (*takers, *givers):
        thread.join()
    assert sorted(popped) == sorted(f"{k} {i}".encode() for k in range(2) for i in range(100))
    assert store.queue_len("q") == 0
