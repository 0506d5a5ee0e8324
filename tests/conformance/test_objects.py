"""Object collectives and object messages, in groups whose ranks are not the global ones; the MACs of objects."""

from __future__ import annotations

import hashlib
import os
import struct
import warnings
from functools import partial
from unittest import mock

import numpy as np
import pytest

import unicoll as dist
from tests.support.calls import COALESCED, COLLECTIVES, invoke
from tests.support.on_ranks import on_ranks
from tests.support.outcomes import failure_of
from tests.support.ranks import ProcessJob, pools
from unicoll.api import object_payload
from unicoll.errors import (
    AuthenticationError,
    DistArgumentError,
    DistError,
    DistTypeError,
    PickleRefusedError,
)
from unicoll.group.object_seals import ObjectSeals
from unicoll.net.objects import object_codec

WAIT = 60  # seconds: a bound on a hang, not an expectation


class Custom:
    """Needs pickle."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Custom) and other.value == self.value

    __hash__ = None


class Broken:
    def __reduce__(self):
        raise OSError("cannot be pickled: " + "long " * 200)


class BrokenOnArrival:
    def __reduce__(self):
        return (_explode, ())


def _explode():
    raise OSError("exploded")


@pytest.fixture(scope="module")
def refusing():
    """Pools of ranks that refuse pickles."""
    with pools(partial(ProcessJob, env={"UNICOLL_ALLOW_PICKLE": "0"})) as made:
        yield made


def reversed_world():
    """A new group of all ranks in which rank i is global rank size - 1 - i; this rank's rank in it."""
    group = dist.new_group(range(dist.get_world_size())[::-1], sort_ranks=False)
    return group, group.rank()


def recorded(group):
    """The calls of a group from now on: the name, and the number of elements of the first argument."""
    calls = []

    def record(name, method, *args, **more):
        calls.append((name, getattr(args[0], "size", None)))
        return method(*args, **more)

    for name in (*COLLECTIVES, "send", "recv", "batch_isend_irecv"):
        setattr(group, name, partial(record, name, getattr(group, name)))
    return calls


def sample(rank):
    return {"rank": rank, "data": np.arange(rank), "text": "é" * rank, "nested": [(rank, None), {rank}]}


def check_sample(obj, rank):
    assert obj["data"].tolist() == list(range(rank))
    assert {**obj, "data": 0} == {**sample(rank), "data": 0}


SIZES = [1, 2, 3, 4]


@pytest.mark.every(n=2)
@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_broadcast(size):
    group, rank = reversed_world()
    mine = [sample(3), "two", Custom(5)] if rank == size - 1 else [None, 0, 0]
    before = list(mine)
    assert dist.broadcast_object_list(mine, src=0, group=group, device="cpu", timeout=WAIT) is None
    assert rank < size - 1 or all(a is b for a, b in zip(mine, before, strict=True))
    check_sample(mine[0], 3)
    assert mine[1:] == ["two", Custom(5)]


@on_ranks(2)
def test_broadcast_of_nothing():
    assert dist.broadcast_object_list([], group_src=0) is None


@pytest.mark.parametrize("size", SIZES)
@on_ranks()
def test_all_gather(size):
    group, rank = reversed_world()
    out = [None] * (size + 1)
    dist.all_gather_object(out, sample(rank), group)
    for i in range(size):
        check_sample(out[i], i)
    assert out[size] is None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("large", [0, 1000, 1 << 20])
@pytest.mark.parametrize("equal", [True, False])
@on_ranks()
def test_all_gather_of_large_objects(size, large, equal):
    """Small objects are in the headers; others are padded, unless that would be more than 64 KiB."""
    group, rank = reversed_world()
    calls = recorded(group)
    expected = [(i, bytes(large) if equal or i == 0 else b"") for i in range(size)]
    out = [None] * size
    dist.all_gather_object(out, expected[rank], group)
    assert out == expected
    bodies = (
        []
        if not large
        else ["all_gather" if large > 1000 and not equal and size > 1 else "all_gather_into_tensor"]
    )
    assert [name for name, _ in calls] == ["all_gather_into_tensor", *bodies]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("large", [0, 1000, 1 << 20])
@on_ranks()
def test_gather_and_scatter_back(size, large):
    """Small pieces are in the headers; pieces of similar size are padded; one that is much larger moves no padding."""
    group, rank = reversed_world()
    calls = recorded(group)
    dst = size - 1
    expected = [(i, bytes(large) if i == 0 else b"") for i in range(size)]
    out, back = [None] * size if rank == dst else None, [None, "kept"]
    dist.gather_object(expected[rank], out, group=group, group_dst=dst)
    assert out == (expected if rank == dst else None)
    dist.scatter_object_list(back, out, group=group, group_src=dst)
    assert back == [expected[rank], "kept"]
    everyones = [None] * size
    dist.all_gather_object(everyones, calls)
    for op in ("gather", "scatter"):
        sizes = zip(*([n for name, n in made if name == op] for made in everyones), strict=True)
        assert any(len(set(of_call)) > 1 for of_call in sizes) == (large == 1 << 20 and size > 2)
    assert ("gather" in dict(calls)) == (large > 0)


@on_ranks(3)
def test_roots_default_to_global_rank_0():
    group = dist.new_group([2, 1], sort_ranks=False)
    for call in (
        lambda: dist.broadcast_object_list([None], group=group),
        lambda: dist.gather_object(1, [None] * 2, group=group),
        lambda: dist.scatter_object_list([None], [1, 2], group=group),
    ):
        if dist.get_rank() > 0:
            with pytest.raises(DistArgumentError) as caught:
                call()
            assert f"=0 is not in group '{group.group_name}' (global ranks 2, 1)" in str(caught.value)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("source", [{"src": 1}, {"group_src": 0}, {}])
@on_ranks(2)
def test_messages(batched, source):
    group, rank = reversed_world()
    calls = recorded(group)
    if rank == 0:
        dist.send_object_list([sample(2), Custom(1)], dst=0, group=group, use_batch=batched)
        assert ("batch_isend_irecv" in dict(calls)) == batched
    else:
        received = [None, None]
        assert dist.recv_object_list(received, group=group, use_batch=batched, **source) == 1
        check_sample(received[0], 2)
        assert received[1] == Custom(1)


# Failures reach every rank --------------------------------------------------------------------------------


def operations(group, sender, obj):
    """Every operation with ``obj`` sent by ``sender``."""
    rank, size = group.rank(), group.size()
    mine = obj if rank == sender else rank
    everyone = [0] * (size - 1) + [obj]
    return {
        "all_gather": lambda: dist.all_gather_object([None] * size, mine, group),
        "gather": lambda: dist.gather_object(
            mine, [None] * size if rank == 0 else None, group=group, group_dst=0
        ),
        "broadcast": lambda: dist.broadcast_object_list([0, mine], group=group, group_src=sender),
        "scatter": lambda: dist.scatter_object_list(
            [None], everyone if rank == sender else None, group=group, group_src=sender
        ),
    }


@pytest.mark.parametrize("size", [1, 3, 4])
@on_ranks(pool="refusing")
def test_a_refused_pickle_raises_on_all_ranks(size):
    group, rank = reversed_world()
    for operation in operations(group, size - 1, [Custom(1)]).values():
        with pytest.raises(PickleRefusedError) as caught:
            operation()
        error = caught.value
        assert error.rank == 0
        assert error.group == group.group_name
        for word in (error.op, "Custom", "UNICOLL_SECRET", *(["rank 0"] if rank != size - 1 else [])):
            assert word in str(error)


@on_ranks(3)
def test_a_failing_pickle_raises_on_all_ranks():
    group, rank = reversed_world()
    for operation in operations(group, 2, Broken()).values():
        with pytest.raises(DistError) as caught:
            operation()
        assert type(caught.value) is DistError
        assert caught.value.rank == 0
        assert "Broken: OSError: cannot be pickled" in str(caught.value)
        assert rank == 2 or "rank 0 has nothing to send: " in str(caught.value)
    dist.all_gather_object(found := [None] * 3, rank, group)
    assert found == [0, 1, 2]


@on_ranks(4)
def test_what_cannot_be_loaded_raises_where_it_should_be():
    group, rank = reversed_world()
    loading = {"all_gather": [0, 1, 2, 3], "gather": [0], "broadcast": [0, 2, 3], "scatter": [3]}
    for name, operation in operations(group, 1, BrokenOnArrival()).items():
        failure = failure_of(operation)
        assert (failure is not None) == (rank in loading[name])
        if failure is not None:
            assert "DistError" in failure.bases
            assert "from rank 2: cannot unpickle an object: OSError: exploded" in failure.message


@on_ranks(2, pool="refusing")
def test_a_failing_sender_tells_the_receiver():
    group, rank = reversed_world()
    with pytest.raises(PickleRefusedError, match="Custom") as caught:
        if rank == 0:
            dist.send_object_list([Custom(1)], group=group, group_dst=1)
        else:
            dist.recv_object_list([None], group=group)
    assert caught.value.rank == 1


@on_ranks(2)
def test_lists_of_another_length():
    group, rank = reversed_world()
    if rank == 0:
        dist.broadcast_object_list([1, 2], group=group, group_src=0)
        dist.send_object_list([1, 2], group=group, group_dst=1)
    else:
        with pytest.raises(DistArgumentError, match="rank 1 sent 2 objects, object_list has 1"):
            dist.broadcast_object_list([None], group=group, group_src=0)
        with pytest.raises(DistArgumentError):
            dist.recv_object_list([None] * 3, group=group, group_src=0)


@on_ranks(2)
def test_bad_arguments_are_refused_before_anything_moves():
    group, rank = reversed_world()
    calls = recorded(group)
    for name, arguments, settings, error, message in (
        ("all_gather_object", ([None], 1), {}, DistArgumentError, "object_list has 1 entries, 2"),
        ("all_gather_object", (None, 1), {}, DistTypeError, "object_list must be a list"),
        ("all_gather_object", ([0, 0], 1), {"timeout": -1}, DistArgumentError, "positive time"),
        ("gather_object", (1, [0, 0]), {"group_dst": 1 - rank}, DistArgumentError, "for the destination"),
        ("gather_object", (1, None), {"group_dst": rank}, DistTypeError, "must be a list"),
        ("gather_object", (1, (0, 0)), {"group_dst": rank}, DistTypeError, "must be a list"),
        ("gather_object", (1, []), {"group_dst": rank}, DistArgumentError, "0 entries"),
        ("scatter_object_list", ([], [1, 2]), {"group_src": 0}, DistArgumentError, "0 entries"),
        ("scatter_object_list", ([0], [1]), {"group_src": rank}, DistArgumentError, "not 1"),
        ("scatter_object_list", ([0],), {"group_src": rank}, DistArgumentError, "not None"),
        ("broadcast_object_list", ([0],), {"src": 1, "group_src": 0}, DistArgumentError, "not both"),
        ("broadcast_object_list", ([0],), {"group_src": 2}, DistArgumentError, "group_src=2"),
        ("broadcast_object_list", ([0],), {"group_src": -1}, DistArgumentError, "group_src=-1"),
        ("broadcast_object_list", ([0],), {"group_src": "0"}, DistTypeError, "an integer"),
        ("broadcast_object_list", ([0],), {"src": "1"}, DistTypeError, "an integer"),
    ):
        with pytest.raises(error, match=message):
            getattr(dist, name)(*arguments, group=group, **settings)
        assert calls == []


@on_ranks(2, pool="refusing")
def test_a_lying_sender_is_refused():
    """Bodies that contradict themselves are refused, whatever they claim."""
    group, _ = reversed_world()
    for body in (
        b"",
        struct.pack("<Q", 1 << 63),
        struct.pack("<QQ", 1, 1 << 63),
        struct.pack("<Q", 0) + b"x",
    ):
        with pytest.raises(DistError, match="malformed"):
            object_payload.load(group, np.frombuffer(body, np.uint8), 0, "test", 0)


@on_ranks(2, pool="refusing")
def test_a_list_is_expected_where_lists_are_sent():
    group, _ = reversed_world()
    body = np.frombuffer(object_codec.dumps(3, False), np.uint8)
    with pytest.raises(DistError) as caught:
        object_payload.fill(group, [None], body, 0, "test", 0)
    assert type(caught.value) is DistError
    assert str(caught.value) == "test: rank 1 sent int in place of a list"


@on_ranks(2)
def test_outside_the_group_nothing_happens():
    few = dist.new_group([0])
    arrays = [array := np.ones(2)]

    def made(count, dtype):
        arrays.append(np.ones(abs(count), dtype))  # the size of the group is -1 here
        return arrays[-1]

    if dist.get_rank() == 0:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert dist.broadcast_object_list([1], group=few) is None
        assert dist.all_gather_object([None], 1, few) is None
        assert dist.gather_object(1, group=few) is None
        assert dist.scatter_object_list([None], group=few) is None
        assert dist.send(array, 1, few) is None
        assert dist.recv(array, group=few) == -1
        assert dist.isend(array, 1, few) is None
        assert dist.irecv(array, group=few) is None
        assert dist.send_object_list([1], 1, few) is None
        assert dist.recv_object_list([1], group=few) == -1
        assert dist.batch_isend_irecv([dist.P2POp(dist.isend, array, 1, few)]) == []
        assert dist.monitored_barrier(few) is None
        for name in (*COLLECTIVES, *COALESCED):
            assert invoke(name, few, make=made) is None
    assert all((each == 1).all() for each in arrays)


@on_ranks(2, pool="refusing")
def test_plain_objects_need_no_pickle():
    group, rank = reversed_world()
    out = [None] * 2
    with mock.patch.multiple(object_codec.pickle, dumps=None, loads=None):
        dist.all_gather_object(out, sample(rank), group)
    check_sample(out[1], 1)


@on_ranks(3)
def test_a_call_that_fails_before_it_sends_can_be_repeated():
    group, rank = reversed_world()
    if rank == 0:
        with pytest.raises(TypeError):
            dist.broadcast_object_list(None, src=2, group=group)
        with pytest.raises(DistArgumentError):
            dist.scatter_object_list([None], [1], src=2, group=group)
    dist.broadcast_object_list(found := [rank] * 2, src=2, group=group)
    dist.scatter_object_list(part := [None], np.arange(3) if rank == 0 else None, src=2, group=group)
    dist.all_gather_object(everything := [None] * 3, Custom(rank), group)
    assert (found, part, [custom.value for custom in everything]) == ([0, 0], [rank], [0, 1, 2])


@on_ranks(4)
def test_collectives_in_the_dimensions_of_a_mesh():
    rank = dist.get_rank()
    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, expected in (("dp", [rank % 2, rank % 2 + 2]), ("tp", [rank // 2 * 2, rank // 2 * 2 + 1])):
        total = np.array([rank])
        dist.all_reduce(total, group=grid.get_group(name))
        assert total.tolist() == [sum(expected)]
        assert dist.get_process_group_ranks(grid.get_group(name)) == expected
        assert grid[name].mesh.tolist() == expected
    flat = grid.flatten()
    assert flat.get_group() is dist.group.WORLD
    assert grid.get_local_rank("tp") == grid.get_coordinate()[1] == rank % 2


@on_ranks(4)
def test_arrays_of_several_shapes_are_gathered_in_one_call():
    arrays = [np.full(2, dist.get_rank()), np.full((3, 1), 10 * dist.get_rank())]
    lists = [[np.zeros_like(a) for a in arrays] for _ in range(4)]
    dist.all_gather_coalesced(lists, arrays)
    assert [[a.tolist() for a in row] for row in lists] == [[[i] * 2, [[10 * i]] * 3] for i in range(4)]


@on_ranks(4)
def test_the_warning_outside_a_group_is_of_the_line_of_the_call():
    few = dist.new_group([0, 2])
    total = np.array([dist.get_rank()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.all_reduce(total, group=few)
    assert [entry.filename for entry in caught] == [__file__] * (dist.get_rank() % 2)
    assert total.tolist() == [2 if dist.get_rank() in (0, 2) else dist.get_rank()]


def pickle_refused_by_one(rank, size):
    if rank == 1:
        os.environ["UNICOLL_ALLOW_PICKLE"] = "0"
    dist.init_process_group("gloo")
    try:
        gathered = [None] * size
        dist.all_gather_object(gathered, sample(rank))
        for i, obj in enumerate(gathered):
            check_sample(obj, i)
        for source in range(size):
            text = "Custom" if rank == source else rf"rank {source} has nothing to send: .*Custom"
            with pytest.raises(PickleRefusedError, match=text) as raised:
                dist.broadcast_object_list([Custom(1) if rank == source else None], src=source)
            assert raised.value.rank == source
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_one_rank_can_refuse_pickle_for_all():
    dist.spawn(pickle_refused_by_one, (3,), nprocs=3)


# --- MACs -------------------------------------------------------------------------------------------------------------

KEY = b"k" * 32


def seals(rank, name="group", key=KEY):
    return ObjectSeals(rank, name, key, True)


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_an_object_is_accepted_from_its_sender_in_its_call_only(size):
    data = (bytes(range(250)) * 20)[:size]

    def accepted(body, receiver=-1, sender=0, call=0, group=("group", KEY)):
        try:
            return bytes(seals(1, *group).open(body, sender, call, receiver)) == data
        except AuthenticationError:
            return False

    for receiver in (-1, 1, 2):
        body = seals(0).seal(data, 0, receiver)
        assert accepted(body, receiver)
        assert accepted(memoryview(body), receiver)
        assert not accepted(body, receiver + 3)
        assert not accepted(body, receiver, sender=1)
        assert not accepted(body, receiver, call=1)
        assert not accepted(body, receiver, call=None)
        assert not accepted(body, receiver, group=("other", KEY))
        assert not accepted(body, receiver, group=("group", b"o" * 32))
        assert not accepted(seals(0).seal(data, None, receiver), receiver)
        flipped = [
            body[:i] + bytes([body[i] ^ 1]) + body[i + 1 :] for i in range(max(0, size - 9), len(body))
        ]
        for changed in (b"", body[:-1], body[1:], body + b"x", *flipped):
            assert not accepted(changed, receiver)
        with pytest.raises(AuthenticationError):
            seals(1).open(hashlib.sha256(data).digest() + body[size:], 0, 0, receiver)


def test_a_message_is_accepted_once():
    sender, receiver = seals(0), seals(1)
    bodies = [sender.seal(b"%d" % i, None, 1) for i in range(3000)]

    def accepted(i):
        try:
            return bytes(receiver.open(bodies[i], 0, None, 1)) == b"%d" % i
        except AuthenticationError:
            return False

    order = [1, 0, 2999, 2, *range(2998, 2, -1)]  # threads, and tags, receive in any order
    assert all(accepted(i) for i in order)
    assert not any(accepted(i) for i in order)
    assert bytes(seals(2).open(sender.seal(b"first", None, 2), 0, None, 2)) == b"first"
    with pytest.raises(AuthenticationError, match="changed, repeated or inserted"):
        seals(2).open(bodies[0], 0, None, 2)
