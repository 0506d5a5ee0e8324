"""Options of single calls: views of a group that is the same group, and what NCCL is told."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.nccl import staged
from tests.nccl.nccl_jobs import error_of
from tests.simulated_nccl import arrays, ranks
from tests.simulated_nccl.ranks import Settings, SimulatedJob, run
from tests.support.calls import COALESCED, COLLECTIVES, OBJECTS, invoke
from tests.support.on_ranks import on_ranks
from tests.support.ranks import Pool, ProcessJob, pools
from unicoll.calls.options import as_call_options

Pools = Callable[[int], Pool]


@pytest.fixture(scope="module")
def newest() -> Iterator[Pools]:
    with pools(partial(SimulatedJob, version=23203)) as made:
        yield made


# --- what may be said ---------------------------------------------------------------------------------------------


def test_options_are_given_by_name_or_as_one_and_names_win() -> None:
    one = dist.CallOptions(max_ctas=8, algorithm="ring")
    assert as_call_options(None, one, {}) == one
    assert as_call_options(None, {"max_ctas": 8, "algorithm": "ring"}, {}) == one
    assert as_call_options(None, one, {"max_ctas": 4}) == dist.CallOptions(max_ctas=4, algorithm="ring")
    assert as_call_options(one, None, {"min_ctas": 2}) == dist.CallOptions(2, 8, algorithm="ring")
    assert as_call_options(one, dist.CallOptions(max_ctas=1), {}) == dist.CallOptions(
        max_ctas=1, algorithm="ring"
    )
    assert as_call_options(one, None, {"max_ctas": None, "algorithm": None}) is None
    assert as_call_options(None, None, {}) is None
    assert str(one) == "max_ctas=8, algorithm='ring'"
    assert hash(one) == hash(dist.CallOptions(max_ctas=8, algorithm="ring"))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (
            {"max_ctaz": 4},
            dist.DistArgumentError,
            r"unknown 'max_ctaz'; known are timeout, min_ctas, max_ctas",
        ),
        ({"max_ctas": "4"}, dist.DistTypeError, "max_ctas must be an int, got '4'"),
        ({"max_ctas": True}, dist.DistTypeError, "max_ctas must be an int, got True"),
        ({"force_algorithm": 1}, dist.DistTypeError, "force_algorithm must be a bool"),
        ({"algorithm": 3}, dist.DistTypeError, "algorithm must be a str"),
        ({"max_ctas": 0}, dist.DistArgumentError, "max_ctas=0 is too small"),
        ({"min_ctas": 5, "max_ctas": 4}, dist.DistArgumentError, "min_ctas=5 is more than max_ctas=4"),
        (
            {"cta_policy": "lazy"},
            dist.DistArgumentError,
            "cta_policy='lazy' is none of default, efficiency, zero",
        ),
        ({"profiler_tag": 1 << 63}, dist.DistArgumentError, "is not from 0 to 2"),
        ({"profiler_tag": -1}, dist.DistArgumentError, "is not from 0 to 2"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], error: type[Exception], words: str) -> None:
    for options, named in ((given, {}), (None, given)):
        with pytest.raises(error, match=words):
            as_call_options(None, options, named)


def test_options_are_no_other_thing() -> None:
    with pytest.raises(dist.DistTypeError, match="expected CallOptions or a dict"):
        as_call_options(None, dist.Options(max_ctas=4), {})


def test_every_option_is_described() -> None:
    text = dist.CallOptions.__doc__ or ""
    assert [f.name for f in fields(dist.CallOptions) if f.name not in text] == []


# --- the same group -----------------------------------------------------------------------------------------------


def _world() -> Any:
    """The default group."""
    return dist.group.WORLD


@on_ranks(2)
def test_a_view_is_its_group() -> None:
    whole = _world()
    view = whole.using(max_ctas=4)
    questions: list[Callable[[Any], Any]] = [
        dist.get_rank,
        dist.get_world_size,
        dist.get_process_group_ranks,
        dist.get_backend,
        lambda g: g.group_name,
        lambda g: g.timeout,
        lambda g: g.describe(),
        lambda g: isinstance(g, dist.ProcessGroup),
    ]
    for ask in questions:
        assert ask(view) == ask(whole)
    assert view.base is whole
    assert whole.base is whole
    assert repr(view) == repr(whole)[:-1] + ", using max_ctas=4>"
    more = view.using(timeout=7, min_ctas=2)
    assert repr(more) == repr(whole)[:-1] + ", using min_ctas=2, max_ctas=4, timeout=7>"


@on_ranks(2)
def test_every_function_takes_a_view() -> None:
    """Calls of a view and of its group are one row of operations."""
    view = _world().using(max_ctas=4, timeout=60)
    for name in (*COLLECTIVES, *COALESCED, *OBJECTS, "monitored_barrier", "send and recv"):
        invoke(name, view)
        work = (
            None
            if name in (*OBJECTS, "monitored_barrier", "send and recv")
            else invoke(name, view, async_op=True)
        )
        invoke("all_reduce", None)
        if work is not None:
            work.wait()
    x, y = np.full(3, float(dist.get_rank())), np.empty(3)
    peer = 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, x, peer, view), dist.P2POp(dist.irecv, y, peer, view)]
    for each in dist.batch_isend_irecv(ops):
        each.wait()
    assert (y == peer).all()
    assert dist.new_subgroups(1, group=view)[0].size() == 1


@on_ranks(2)
def test_a_view_for_one_call_is_gone_after_it() -> None:
    """Without a collection of garbage."""
    view = _world().using(timeout=60)
    view.all_reduce(np.ones(2))
    view.all_reduce(np.ones(2), async_op=True).wait()
    left = weakref.ref(view)
    del view
    assert left() is None


@on_ranks(2)
def test_a_view_lives_as_long_as_its_group() -> None:
    """Groups are destroyed by their own name or a view's, and made of views."""
    first: Any = dist.new_group()
    view = first.using(max_ctas=2)
    view.all_reduce(np.ones(2))
    dist.destroy_process_group(first)
    with pytest.raises(dist.GroupAbortedError, match="has been destroyed"):
        view.all_reduce(np.ones(2))
    second: Any = dist.new_group()
    view = second.using(max_ctas=2)
    half: Any = dist.split_group(view, [[0], [1]])
    again: Any = dist.split_group(second, [[0], [1]])
    assert half.size() == 1
    assert half.name != again.name
    groups = dist.get_pg_count()
    dist.destroy_process_group(view)
    for each in (view, second):
        with pytest.raises(dist.DistError, match="has been destroyed"):
            each.all_reduce(np.ones(2))
    assert dist.get_pg_count() == groups - 1


@on_ranks(2)
def test_a_view_may_have_a_timeout_of_its_own() -> None:
    group: Any = dist.new_group()
    if dist.get_rank() == 1:
        with pytest.raises(dist.OperationTimeoutError, match=r"timed out after 0\.2 s"):
            group.using(timeout=0.2).all_reduce(np.ones(2))
    dist.barrier()


@on_ranks(2)
def test_who_is_not_in_a_group_is_not_in_its_views() -> None:
    group: Any = dist.new_group([0])
    view = group.using(max_ctas=2)
    assert (dist.get_rank(view), dist.get_world_size(view)) == ((-1, -1) if dist.get_rank() else (0, 1))


# --- what NCCL is told --------------------------------------------------------------------------------------------


class _Told:
    """The options with which NCCL's functions are called here, by function."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Any]] = {}
        nccl: Any = ranks.nccl()
        for name in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all"):
            setattr(nccl, name, self._recorded(name, getattr(nccl, name)))

    def _recorded(self, name: str, function: Any) -> Any:
        def call(*arguments: Any, options: Any = None) -> Any:
            self.calls.setdefault(name, []).append(None if options is None else str(options))
            return function(*arguments, options=options)

        return call

    def during(self, attempt: Any) -> dict[str, list[Any]]:
        """What was told during something."""
        self.calls.clear()
        attempt()
        return dict(self.calls)


@on_ranks(2, pool="newest")
def test_each_collective_of_a_view_is_told_its_options() -> None:
    me, n = dist.get_rank(), dist.get_world_size()
    record = _Told()
    view = _world().using(max_ctas=2, profiler_tag=7)

    def x(times: int = 1) -> Any:
        return arrays.full(4 * times, 1.0, np.float32)

    def several() -> list[Any]:
        return [x() for _ in range(n)]

    calls: dict[str, Any] = {
        "all_reduce": lambda g: dist.all_reduce(x(), group=g),
        "broadcast": lambda g: dist.broadcast(x(), 0, group=g),
        "reduce": lambda g: dist.reduce(x(), 0, group=g),
        "all_gather": lambda g: dist.all_gather(several(), x(), group=g),
        "all_gather_into_tensor": lambda g: dist.all_gather_into_tensor(x(n), x(), group=g),
        "reduce_scatter": lambda g: dist.reduce_scatter(x(), several(), group=g),
        "reduce_scatter_tensor": lambda g: dist.reduce_scatter_tensor(x(), x(n), group=g),
        "all_to_all": lambda g: dist.all_to_all(several(), several(), group=g),
        "all_to_all_single": lambda g: dist.all_to_all_single(x(n), x(n), group=g),
        "uneven": lambda g: dist.all_to_all_single(x(n), x(n), [4] * n, [4] * n, group=g),
        "gather": lambda g: dist.gather(x(), several() if me == 0 else None, 0, group=g),
        "scatter": lambda g: dist.scatter(x(), several() if me == 0 else None, 0, group=g),
        "coalesced": lambda g: dist.all_reduce_coalesced([x(), x()], group=g),
        "asynchronous": lambda g: dist.all_reduce(x(), group=g, async_op=True).wait(),
    }
    found = {
        name: (record.during(lambda c=call: c(view)), record.during(lambda c=call: c(None)))
        for name, call in calls.items()
    }
    alone: Any = dist.new_group(backend="cuda:nccl", device_id=me)
    found["barrier"] = (
        record.during(lambda: alone.using(max_ctas=2, profiler_tag=7).barrier()),
        record.during(alone.barrier),
    )
    said = "max_ctas=2, profiler_tag=7"
    for name, (of_view, plain) in found.items():
        assert of_view.keys() == plain.keys(), name
        for function, options in of_view.items():
            assert options == [said] * len(plain[function]), (name, function)
            assert plain[function] == [None] * len(options), (name, function)
        assert bool(of_view) == (name not in ("all_to_all", "uneven", "gather", "scatter")), name
    assert found["all_gather"][0] == {"broadcast": [said] * 2}
    assert found["coalesced"][0] == {"all_reduce": [said] * 2}


@on_ranks(2, pool="newest")
def test_an_algorithm_that_cannot_be_had_is_refused_and_the_group_goes_on() -> None:
    n = dist.get_world_size()

    def x(times: int = 1) -> Any:
        return arrays.full(2 * times, 1.0)

    def several() -> list[Any]:
        return [x() for _ in range(n)]

    ring, nvls = _world().using(algorithm="ring"), _world().using(algorithm="NVLS")
    unforced = ring.using(force_algorithm=False)
    messages = "consists of sends and receives, to which algorithm='ring' does not apply"
    for call, words in (
        (lambda: ring.all_reduce(x()), "nothing"),
        (lambda: nvls.all_reduce(x()), "DistArgumentError: all_reduce.*algSelection 'NVLS'"),
        (lambda: ring.all_to_all(several(), several()), f".*{messages}"),
        (lambda: ring.all_to_all_single(x(n), x(n)), "DistArgumentError: all_to_all_single"),
        (lambda: ring.all_to_all_single(x(n), x(n), [2] * n, [2] * n), f".*{messages}"),
        (lambda: unforced.all_to_all_single(x(n), x(n), [2] * n, [2] * n), "nothing"),
        (lambda: unforced.all_to_all_single(x(n), x(n)), "nothing"),
    ):
        assert re.match(words, said := error_of(call), re.DOTALL), said
    y = x()
    _world().all_reduce(y)
    assert y.numpy().tolist() == [2.0, 2.0]


@on_ranks(2, start=partial(run, version=23007))
def test_an_older_nccl_says_which_it_would_have_to_be() -> None:
    words = r"^using\(max_ctas=4\): options of single calls need NCCL 2\.31; this is 2\.30\.7$"
    with pytest.raises(dist.DistArgumentError, match=words):
        _world().using(max_ctas=4)
    x = arrays.full(2, 1.0)
    _world().using(timeout=20).all_reduce(x)
    assert x.numpy().tolist() == [2.0, 2.0]


# --- compression --------------------------------------------------------------------------------------------------

_THIRD = pytest.approx(1 / 3, rel=1e-6)
_ROUNDED = 0.333984375
"""The average of 1/3 and 1/3 rounded to bfloat16, rounded to bfloat16."""


def _average(group: Any, on_device: bool) -> float:
    """The average of 1/3 over the ranks."""
    x = arrays.full(100_000, 1 / 3, np.float32) if on_device else np.full(100_000, 1 / 3, np.float32)
    dist.all_reduce(x, op="AVG", group=group)
    return float((x.numpy() if on_device else x)[0])


@on_ranks(2, start=partial(run, version=23203), env={"UNICOLL_TRANSPORT": "tcp"})
def test_gloo_compresses_and_nccl_does_not() -> None:
    group: Any = dist.new_group(pg_options={"compression": "bfloat16"})
    view = _world().using(compression="bfloat16")
    assert [_average(group, False), _average(group, True)] == [_ROUNDED, _THIRD]
    assert _average(view, False) == _ROUNDED
    assert [_average(group.using(compression="none"), on) for on in (False, True)] == [_THIRD, _THIRD]
    said = error_of(lambda: _average(view, True))
    assert said.startswith("DistArgumentError: all_reduce(float32[100000] on cuda:")
    assert said.endswith("compression='bfloat16': backend nccl does not support compression")
    nccl: Any = dist.new_group(backend="cuda:nccl")
    words = ": compression='int8': backend nccl does not support compression; backend gloo does"
    options = {"compression": "int8"}
    said = error_of(lambda: dist.new_group(backend="cuda:nccl", pg_options=options))
    assert said == f"DistArgumentError: pg_options{words}"
    assert error_of(lambda: nccl.using(**options)) == f"DistArgumentError: using{words}"
    assert _average(None, True) == _THIRD


@pytest.fixture
def over_gloo() -> Iterator[Pools]:
    """Ranks whose device arrays go through host memory to gloo."""
    settings = Settings(backend="gloo")
    start = partial(ProcessJob, env={"UNICOLL_TRANSPORT": "tcp"}, prepare=(staged.prepare, settings, 1 << 18))
    with pools(start) as made:
        yield made


@on_ranks(2, pool="over_gloo")
def test_device_arrays_over_gloo_are_compressed() -> None:
    view = _world().using(compression="bfloat16")
    assert [_average(view, True), _average(None, True)] == [_ROUNDED, _THIRD]
