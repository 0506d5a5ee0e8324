"""Object collectives and object messages: on a group of threads for the rules, then on real processes."""

from __future__ import annotations

import os
import struct
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from unicoll.api import collectives, object_payload, objects, p2p
from unicoll.errors import (
    AuthenticationError,
    DistArgumentError,
    DistError,
    DistTypeError,
    PickleRefusedError,
)
from unicoll.group.object_seals import ObjectSeals
from unicoll.net import object_codec

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


class Hub:
    """What the ranks of a :class:`ThreadGroup` share."""

    def __init__(self, size):
        self.slots = [None] * size
        self.barrier = threading.Barrier(size)
        self.boxes = {}
        self.arrived = threading.Condition()
        self.calls = [[] for _ in range(size)]

    def swap(self, rank, value):
        """Every rank's value, on every rank."""
        self.slots[rank] = value
        self.barrier.wait(WAIT)
        values = list(self.slots)
        self.barrier.wait(WAIT)
        return values


class ThreadGroup:
    """A process group whose ranks are threads; global rank = 10 + rank, to tell the two apart."""

    group_name = "threads"

    def __init__(self, hub, rank, allow_pickle):
        self.hub = hub
        self.me = rank
        self.job = SimpleNamespace(fake=False, allows_pickle=allow_pickle)
        self.ranks = tuple(range(10, 10 + len(hub.slots)))
        self.object_seals = ObjectSeals(rank, "threads", b"k" * 32, allow_pickle)

    def rank(self):
        return self.me

    def size(self):
        return len(self.ranks)

    def group_rank(self, rank):
        return self.ranks.index(rank)

    def global_rank(self, rank):
        return self.ranks[rank]

    def _swap(self, name, value):
        self.hub.calls[self.me].append(name)
        called = self.hub.swap(self.me, name)
        assert len(set(called)) == 1, f"ranks called {called}"
        return self.hub.swap(self.me, value)

    def broadcast(self, tensor, *, src, timeout=None):
        source = self._swap("broadcast", tensor.copy())[src]
        assert source.shape == tensor.shape
        assert source.dtype == tensor.dtype
        if self.me != src:
            tensor[:] = source

    def all_gather_into_tensor(self, output, tensor, *, timeout=None):
        for row, value in zip(output, self._swap("all_gather_into_tensor", tensor.copy()), strict=True):
            row[:] = value

    def all_gather(self, tensor_list, tensor, *, timeout=None):
        for target, value in zip(tensor_list, self._swap("all_gather", tensor.copy()), strict=True):
            target[:] = value

    def gather(self, tensor, gather_list, *, dst, timeout=None):
        values = self._swap("gather", tensor.copy())
        self._note_sizes(values)
        assert (gather_list is not None) == (self.me == dst)
        for target, value in zip(gather_list or (), values, strict=False):
            assert target.size == value.size
            target[:] = value

    def scatter(self, tensor, scatter_list, *, src, timeout=None):
        values = self._swap("scatter", scatter_list)
        assert [value is not None for value in values] == [rank == src for rank in range(self.size())]
        self._note_sizes(values[src])
        assert tensor.size == values[src][self.me].size
        tensor[:] = values[src][self.me]

    def _note_sizes(self, parts):
        if len({part.size for part in parts}) > 1:
            self.hub.calls[self.me][-1] += " of different sizes"

    def send(self, tensor, *, dst, tag, timeout=None):
        self.hub.calls[self.me].append("send")
        with self.hub.arrived:
            self.hub.boxes.setdefault(dst, []).append((self.me, tag, tensor.copy()))
            self.hub.arrived.notify_all()

    def recv(self, tensor, *, src, tag, timeout=None):
        def match():
            for message in self.hub.boxes.get(self.me, []):
                if message[0] == src or src is None:
                    return message
            return None

        with self.hub.arrived:
            assert self.hub.arrived.wait_for(match, WAIT)
            message = match()
            self.hub.boxes[self.me].remove(message)
        sender, sent_tag, data = message
        assert (sent_tag, data.shape) == (tag, tensor.shape)
        tensor[:] = data
        return sender

    def batch_isend_irecv(self, ops, *, timeout=None):
        works = []
        for sending, tensor, peer, tag in ops:
            self.hub.calls[self.me].append("batch")
            if sending:
                self.send(tensor, dst=peer, tag=tag)
            else:
                self.recv(tensor, src=peer, tag=tag)
            works.append(SimpleNamespace(wait=lambda: True))
        return works


@pytest.fixture
def run(monkeypatch):
    """``run(size, body)`` calls ``body(rank)`` on threads; returns results or errors, and the calls."""
    local = threading.local()
    monkeypatch.setattr(collectives.world, "resolve", lambda group, *_: local.group)

    def start(size, body, allow_pickle=True):
        hub = Hub(size)
        results = [None] * size

        def work(rank):
            local.group = ThreadGroup(hub, rank, allow_pickle)
            try:
                results[rank] = body(rank)
            except DistError as error:
                results[rank] = error
            except BaseException as error:
                hub.barrier.abort()
                results[rank] = error
                raise

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
            assert not thread.is_alive()
        assert not any(hub.boxes.values()), "messages that nobody took"
        return results, hub.calls

    return start


def sample(rank):
    return {"rank": rank, "data": np.arange(rank), "text": "é" * rank, "nested": [(rank, None), {rank}]}


def check_sample(obj, rank):
    assert obj["data"].tolist() == list(range(rank))
    assert {**obj, "data": 0} == {**sample(rank), "data": 0}


SIZES = [1, 2, 3, 4, 7]


@pytest.mark.parametrize("size", SIZES)
def test_broadcast(run, size):
    def body(rank):
        mine = [sample(3), "two", Custom(5)] if rank == size - 1 else [None, 0, 0]
        before = list(mine)
        assert objects.broadcast_object_list(mine, src=10 + size - 1, device="cpu") is None
        if rank == size - 1:
            assert all(a is b for a, b in zip(mine, before, strict=True))
        return mine

    results, _ = run(size, body)
    for mine in results:
        check_sample(mine[0], 3)
        assert mine[1:] == ["two", Custom(5)]


def test_broadcast_of_nothing(run):
    assert run(2, lambda rank: objects.broadcast_object_list([], group_src=0))[0] == [None, None]


@pytest.mark.parametrize("size", SIZES)
def test_all_gather(run, size):
    def body(rank):
        out = [None] * (size + 1)
        objects.all_gather_object(out, sample(rank))
        return out

    for out in run(size, body)[0]:
        for rank in range(size):
            check_sample(out[rank], rank)
        assert out[size] is None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("large", [0, 1000, 1 << 20])
@pytest.mark.parametrize("equal", [True, False])
def test_all_gather_of_large_objects(run, size, large, equal):
    """Small objects are in the headers; others are padded, unless that would be more than 64 KiB."""

    def body(rank):
        out = [None] * size
        objects.all_gather_object(out, (rank, bytes(large) if equal or rank == 0 else b""))
        return out

    results, calls = run(size, body)
    expected = [(rank, bytes(large) if equal or rank == 0 else b"") for rank in range(size)]
    assert results == [expected] * size
    bodies = (
        []
        if not large
        else ["all_gather" if large > 1000 and not equal and size > 1 else "all_gather_into_tensor"]
    )
    assert calls == [["all_gather_into_tensor", *bodies]] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("large", [0, 1000, 1 << 20])
def test_gather_and_scatter_back(run, size, large):
    """Small pieces are in the headers; pieces of similar size are padded; one that is much larger moves no padding."""
    dst = size - 1

    def body(rank):
        out = [None] * size if rank == dst else None
        objects.gather_object((rank, bytes(large) if rank == 0 else b""), out, group_dst=dst)
        back = [None, "kept"]
        objects.scatter_object_list(back, out, group_src=dst)
        return out, back

    results, calls = run(size, body)
    expected = [(rank, bytes(large) if rank == 0 else b"") for rank in range(size)]
    for rank, (out, back) in enumerate(results):
        assert out == (expected if rank == dst else None)
        assert back == [expected[rank], "kept"]
    uneven = large == 1 << 20 and size > 2
    for made in calls:
        for op in ("gather", "scatter"):
            assert (f"{op} of different sizes" in made) == uneven
        assert ("gather" in made) == (large > 0 and not uneven)


def test_roots_default_to_global_rank_0(run):
    for body in (
        lambda rank: objects.broadcast_object_list([None]),
        lambda rank: objects.gather_object(1, [None] * 2),
        lambda rank: objects.scatter_object_list([None], [1, 2]),
    ):
        for error in run(2, body)[0]:
            assert isinstance(error, DistArgumentError)
            assert "=0 is not in group 'threads' (global ranks 10, 11)" in str(error)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("source", [{"src": 10}, {"group_src": 0}, {}])
def test_messages(run, batched, source):
    def body(rank):
        if rank == 0:
            p2p.send_object_list([sample(2), Custom(1)], dst=11, use_batch=batched)
            return None
        received = [None, None]
        assert p2p.recv_object_list(received, use_batch=batched, **source) == 10
        return received

    results, calls = run(2, body)
    check_sample(results[1][0], 2)
    assert results[1][1] == Custom(1)
    assert ("batch" in calls[0]) == batched


# Failures reach every rank --------------------------------------------------------------------------------


def operations(sender, obj, size):
    """Every operation with ``obj`` sent by ``sender``."""

    def all_gather(rank):
        objects.all_gather_object([None] * size, obj if rank == sender else rank)

    def gather(rank):
        out = [None] * size if rank == 0 else None
        objects.gather_object(obj if rank == sender else rank, out, group_dst=0)

    def broadcast(rank):
        objects.broadcast_object_list([0, obj] if rank == sender else [0, 0], group_src=sender)

    def scatter(rank):
        everyone = [0] * (size - 1) + [obj]
        objects.scatter_object_list([None], everyone if rank == sender else None, group_src=sender)

    return {"all_gather": all_gather, "gather": gather, "broadcast": broadcast, "scatter": scatter}


@pytest.mark.parametrize("operation", ["all_gather", "gather", "broadcast", "scatter"])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_refused_pickle_raises_on_all_ranks(run, operation, size):
    sender = size - 1
    results, _ = run(size, operations(sender, [Custom(1)], size)[operation], allow_pickle=False)
    for rank, error in enumerate(results):
        assert isinstance(error, PickleRefusedError)
        assert error.rank == 10 + sender
        assert error.group == "threads"
        assert error.op in str(error)
        assert "Custom" in str(error)
        assert "UNICOLL_SECRET" in str(error)
        assert rank == sender or f"rank {10 + sender}" in str(error)


@pytest.mark.parametrize("operation", ["all_gather", "gather", "broadcast", "scatter"])
def test_a_failing_pickle_raises_on_all_ranks(run, operation):
    results, _ = run(3, operations(2, Broken(), 3)[operation])
    for error in results:
        assert type(error) is DistError
        assert error.rank == 12
        assert "Broken: OSError: cannot be pickled" in str(error)


@pytest.mark.parametrize("operation", ["all_gather", "gather", "broadcast", "scatter"])
def test_what_cannot_be_loaded_raises_where_it_should_be(run, operation):
    results, _ = run(3, operations(1, BrokenOnArrival(), 3)[operation])
    loading = {"all_gather": [0, 1, 2], "gather": [0], "broadcast": [0, 2], "scatter": [2]}[operation]
    for rank, error in enumerate(results):
        assert isinstance(error, DistError) == (rank in loading)
        assert rank not in loading or "from rank 11: cannot unpickle an object: OSError: exploded" in str(
            error
        )


def test_a_failing_sender_tells_the_receiver(run):
    def body(rank):
        if rank == 0:
            p2p.send_object_list([Custom(1)], group_dst=1)
        else:
            p2p.recv_object_list([None])

    for error in run(2, body, allow_pickle=False)[0]:
        assert isinstance(error, PickleRefusedError)
        assert "Custom" in str(error)
        assert error.rank == 10


def test_lists_of_another_length(run):
    def body(rank):
        objects.broadcast_object_list([1, 2] if rank == 0 else [None], group_src=0)

    results, _ = run(2, body)
    assert results[0] is None
    assert isinstance(results[1], DistArgumentError)
    assert "rank 10 sent 2 objects, object_list has 1" in str(results[1])

    def message(rank):
        if rank == 0:
            p2p.send_object_list([1, 2], group_dst=1)
        else:
            p2p.recv_object_list([None] * 3, group_src=0)

    assert isinstance(run(2, message)[0][1], DistArgumentError)


def test_bad_arguments_are_refused_before_anything_moves(run):
    for body, error, message in (
        (
            lambda rank: objects.all_gather_object([None], 1),
            DistArgumentError,
            "object_list has 1 entries, 2",
        ),
        (lambda rank: objects.all_gather_object(None, 1), DistTypeError, "object_list must be a list"),
        (
            lambda rank: objects.gather_object(1, [None] * 2, group_dst=1 - rank),
            DistArgumentError,
            "for the destination",
        ),
        (lambda rank: objects.scatter_object_list([], [1, 2], group_src=0), DistArgumentError, "0 entries"),
        (lambda rank: objects.scatter_object_list([0], [1], group_src=rank), DistArgumentError, "not 1"),
        (lambda rank: objects.scatter_object_list([0], group_src=rank), DistArgumentError, "not None"),
        (lambda rank: objects.broadcast_object_list([0], src=10, group_src=0), DistArgumentError, "not both"),
        (lambda rank: objects.broadcast_object_list([0], group_src=2), DistArgumentError, "group_src=2"),
        (lambda rank: objects.broadcast_object_list([0], group_src=-1), DistArgumentError, "group_src=-1"),
        (lambda rank: objects.broadcast_object_list([0], group_src="0"), DistTypeError, "an integer"),
        (lambda rank: objects.broadcast_object_list([0], src="10"), DistTypeError, "an integer"),
        (lambda rank: objects.all_gather_object([0, 0], 1, timeout=-1), DistArgumentError, "positive time"),
    ):
        results, calls = run(2, body)
        refused = [result for result in results if result is not None]
        assert refused
        for result in refused:
            assert isinstance(result, error)
            assert message in str(result)
        assert calls == [[], []] or len(refused) < 2


def test_the_destination_needs_a_list(run):
    for target, error in ((None, DistTypeError), ((None,), DistTypeError), ([], DistArgumentError)):
        results, calls = run(1, lambda rank, target=target: objects.gather_object(1, target, group_dst=0))
        assert isinstance(results[0], error)
        assert calls == [[]]


def test_a_lying_sender_is_refused(run):
    """Bodies that contradict themselves are refused, whatever they claim."""
    for body in (
        b"",
        struct.pack("<Q", 1 << 63),
        struct.pack("<QQ", 1, 1 << 63),
        struct.pack("<Q", 0) + b"x",
    ):

        def receive(rank, body=body):
            group = objects.world.resolve(None)
            object_payload.load(group, np.frombuffer(body, np.uint8), 0, "test", 0)

        error = run(1, receive, allow_pickle=False)[0][0]
        assert isinstance(error, DistError)
        assert "malformed" in str(error)


def test_a_list_is_expected_where_lists_are_sent(run):
    def receive(rank):
        body = np.frombuffer(object_codec.dumps(3, False), np.uint8)
        object_payload.fill(objects.world.resolve(None), [None], body, 0, "test", 0)

    error = run(1, receive, allow_pickle=False)[0][0]
    assert type(error) is DistError
    assert str(error) == "test: rank 10 sent int in place of a list"


def test_outside_the_group_nothing_happens(monkeypatch):
    monkeypatch.setattr(collectives.world, "resolve", lambda group, *_: None)
    array, out = np.ones(2), [np.zeros(2)]
    assert objects.broadcast_object_list([1]) is None
    assert objects.all_gather_object([None], 1) is None
    assert objects.gather_object(1) is None
    assert objects.scatter_object_list([None]) is None
    assert p2p.send(array, 1) is None
    assert p2p.recv(array) == -1
    assert p2p.isend(array, 1) is None
    assert p2p.irecv(array) is None
    assert p2p.send_object_list([1], 1) is None
    assert p2p.recv_object_list([1]) == -1
    assert p2p.batch_isend_irecv([p2p.P2POp(p2p.isend, array, 1)]) == []
    for function, arguments in (
        (collectives.all_reduce, (array,)),
        (collectives.broadcast, (array, 0)),
        (collectives.reduce, (array, 0)),
        (collectives.all_gather, (out, array)),
        (collectives.all_gather_into_tensor, (array, array)),
        (collectives.gather, (array,)),
        (collectives.scatter, (array,)),
        (collectives.reduce_scatter, (array, out)),
        (collectives.reduce_scatter_tensor, (array, array)),
        (collectives.all_to_all, (out, out)),
        (collectives.all_to_all_single, (array, array)),
        (collectives.barrier, ()),
        (collectives.monitored_barrier, ()),
        (collectives.all_reduce_coalesced, (out,)),
        (collectives.broadcast_coalesced, (out, 0)),
        (collectives.all_gather_coalesced, ([out], out)),
        (collectives.all_gather_into_tensor_coalesced, (out, out)),
        (collectives.reduce_scatter_tensor_coalesced, (out, out)),
    ):
        assert function(*arguments) is None
    np.testing.assert_array_equal(array, 1)


def test_plain_objects_need_no_pickle(run, monkeypatch):
    monkeypatch.setattr(object_codec.pickle, "dumps", None)
    monkeypatch.setattr(object_codec.pickle, "loads", None)

    def body(rank):
        out = [None] * 2
        objects.all_gather_object(out, sample(rank))
        return out

    for out in run(2, body, allow_pickle=False)[0]:
        check_sample(out[1], 1)


# On real processes ----------------------------------------------------------------------------------------


def on_each_rank(rank, size):
    import unicoll as dist

    dist.init_process_group("gloo")
    try:
        gathered = [None] * size
        dist.all_gather_object(gathered, (sample(rank), Custom(rank)))
        for i, (obj, custom) in enumerate(gathered):
            check_sample(obj, i)
            assert custom == Custom(i)

        out = [None] * size if rank == 1 else None
        dist.gather_object(bytes(1 << 20) if rank == 0 else rank, out, dst=1)
        assert rank != 1 or out == [bytes(1 << 20), *range(1, size)]
        back = [None]
        dist.scatter_object_list(back, out, src=1)
        assert back[0] == (bytes(1 << 20) if rank == 0 else rank)

        news = [sample(5), Custom(6)] if rank == size - 1 else [None, None]
        dist.broadcast_object_list(news, src=size - 1, timeout=WAIT)
        check_sample(news[0], 5)
        if rank == 0:
            dist.send_object_list([sample(1), Custom(2)], dst=1)
            dist.send_object_list([3], dst=1, use_batch=True)
        elif rank == 1:
            letters = [None, None]
            assert dist.recv_object_list(letters) == 0
            assert letters[1] == Custom(2)
            assert dist.recv_object_list(letters[:1], src=0, use_batch=True) == 0

        text = "Broken: OSError" if rank == 1 else "rank 1 has nothing to send: .*Broken: OSError"
        with pytest.raises(DistError, match=text):
            dist.all_gather_object(gathered, Broken() if rank == 1 else rank)
        dist.all_gather_object(gathered, rank)
        assert gathered == list(range(size))

        arrays = [np.full(2, rank), np.full((3, 1), 10 * rank)]
        lists = [[np.zeros_like(a) for a in arrays] for _ in range(size)]
        dist.all_gather_coalesced(lists, arrays)
        assert [[a.max() for a in row] for row in lists] == [[i, 10 * i] for i in range(size)]

        grid = dist.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        for name, expected in (("dp", [rank % 2, rank % 2 + 2]), ("tp", [rank // 2 * 2, rank // 2 * 2 + 1])):
            total = np.array([rank])
            dist.all_reduce(total, group=grid.get_group(name))
            assert total.tolist() == [sum(expected)]
            assert dist.get_process_group_ranks(grid.get_group(name)) == expected
            assert grid[name].mesh.tolist() == expected
        flat = grid.flatten()
        assert flat.get_group() is dist.group.WORLD
        assert grid.get_local_rank("tp") == grid.get_coordinate()[1] == rank % 2

        few = dist.new_group([0, 2])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            total = np.array([rank])
            dist.all_reduce(total, group=few)
        assert len(caught) == rank % 2
        assert all(entry.filename == __file__ for entry in caught)
        assert total.tolist() == [2 if rank in (0, 2) else rank]
    finally:
        dist.destroy_process_group()


def pickle_refused_by_one(rank, size):
    import unicoll as dist

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
    from unicoll import spawn

    spawn(pickle_refused_by_one, (3,), nprocs=3)


def test_on_processes():
    from unicoll import spawn

    spawn(on_each_rank, (4,), nprocs=4)


def test_a_call_that_fails_before_it_sends_can_be_repeated(run):
    def body(rank):
        group = objects.world.resolve(None)
        if rank == 0:
            with pytest.raises(TypeError):
                objects.broadcast_object_list(None, src=10)
            with pytest.raises(DistArgumentError):
                objects.scatter_object_list([None], [1], src=10)
        objects.broadcast_object_list(found := [group.rank()] * 2, src=10)
        objects.scatter_object_list(part := [None], np.arange(3) if rank == 0 else None, src=10)
        objects.all_gather_object(everything := [None] * 3, Custom(rank))
        return found, part, [custom.value for custom in everything]

    assert run(3, body)[0] == [([0, 0], [rank], [0, 1, 2]) for rank in range(3)]


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


def test_a_message_is_accepted_once():
    sender, receiver = seals(0), seals(1)
    bodies = [sender.seal(b"%d" % i, None, 1) for i in range(3000)]

    def accepted(i):
        try:
            return bytes(receiver.open(bodies[i], 0, None, 1)) == b"%d" % i
        except AuthenticationError:
            return False

    assert accepted(1)
    assert accepted(0)  # another thread's receive may be earlier
    assert not accepted(0)
    assert not accepted(1)
    assert accepted(2999)
    assert accepted(2999 - 63)
    assert not accepted(2999 - 63)
    assert not accepted(2999 - 64)  # too old for that to be known
    assert bytes(seals(2).open(sender.seal(b"first", None, 2), 0, None, 2)) == b"first"
    with pytest.raises(AuthenticationError, match="changed, repeated or inserted"):
        seals(2).open(bodies[0], 0, None, 2)
