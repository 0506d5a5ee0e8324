"""DeviceMesh: layouts, slices and groups, against torch's where torch is installed."""

from __future__ import annotations

import contextlib
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from unicoll.api import subgroups
from unicoll.errors import DistArgumentError, DistError, DistTypeError
from unicoll.mesh import device_mesh as mesh_module
from unicoll.mesh.device_mesh import DeviceMesh, current_mesh, init_device_mesh
from unicoll.process import debug_level

NON_MEMBER = object()


class FakeGroup:
    def __init__(self, ranks, me, **how):
        self.ranks = tuple(sorted(ranks))
        self.me = me
        self.how = how

    def rank(self):
        return self.ranks.index(self.me)

    def size(self):
        return len(self.ranks)


class FakeWorld(SimpleNamespace):
    """What DeviceMesh calls of unicoll.api.world, init and subgroups; remembers the groups that were made."""

    def __init__(self, rank, size):
        super().__init__(rank=rank, size=size, made=[], initialized=True)
        self.default = FakeGroup(range(size), rank)

    def is_initialized(self):
        return self.initialized

    def init_process_group(self):
        self.initialized = True

    def get_rank(self):
        return self.rank

    def get_world_size(self):
        return self.size

    def resolve(self, group):
        assert group is None
        return self.default

    Listed = subgroups.Listed

    def make_listed(self, what, group, listed, names):
        self.made += [(tuple(one.ranks), one.desc) for one in listed]
        return [
            FakeGroup(one.ranks, self.rank, backend=one.backend, options=one.options)
            if self.rank in one.ranks
            else NON_MEMBER
            for one in listed
        ]

    def fail_listed(self, what, group, listed, names, cause):
        assert isinstance(cause, DistError)


@pytest.fixture
def join(monkeypatch):
    """``join(rank, size)`` makes this process that rank of a world of that size."""

    def become(rank, size):
        fake = FakeWorld(rank, size)
        monkeypatch.setattr(mesh_module, "world", fake)
        monkeypatch.setattr(mesh_module, "init", fake)
        monkeypatch.setattr(mesh_module, "subgroups", fake)
        return fake

    return become


def cube():
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))


# Groups ---------------------------------------------------------------------------------------------------


def test_every_rank_makes_the_same_groups_in_the_same_order(join):
    made = []
    for rank in range(8):
        world = join(rank, 8)
        grid = cube()
        grid["dp", "tp"].flatten()
        made.append(world.made)
        for dim, group in enumerate(grid.get_all_groups()):
            assert rank in group.ranks
            assert group.size() == grid.size(dim) == 2
    assert made == [made[0]] * 8
    assert made[0][:4] == [((0, 4), "mesh_dp"), ((1, 5), "mesh_dp"), ((2, 6), "mesh_dp"), ((3, 7), "mesh_dp")]
    assert made[0][12:] == [((0, 1, 4, 5), "mesh_dp_tp"), ((2, 3, 6, 7), "mesh_dp_tp")]


def test_a_dimension_of_the_whole_world_is_the_default_group(join):
    world = join(1, 4)
    assert init_device_mesh("cpu", (4,)).get_group() is world.default
    assert init_device_mesh("cpu", (4, 1)).get_group(0) is world.default
    assert [ranks for ranks, _ in world.made] == [(0,), (1,), (2,), (3,)]
    override = init_device_mesh("cpu", (4,), backend_override={0: "gloo"})
    assert override.get_group() is not world.default
    assert override.get_group().how == {"backend": "gloo", "options": None}


def test_slices_share_groups_and_flattening_is_remembered(join):
    world = join(5, 8)
    grid = cube()
    before = len(world.made)
    assert grid["dp", "tp"].get_group("tp") is grid["tp"].get_group() is grid.get_group(-1)
    assert len(world.made) == before
    flat = grid["dp", "cp"].flatten("dc")
    assert flat is grid["dp", "cp"].flatten("dc") is grid["dp", "cp"]._flatten("dc")
    assert len(world.made) == before + 2
    assert grid["dc"] == flat
    assert grid.get_group("dc") is grid["tp"].get_group("dc") is flat.get_group() is grid["dc"].get_group()
    assert flat.flatten() is flat
    assert grid["dc", "tp"].get_all_groups() == [flat.get_group(), grid.get_group("tp")]


def test_overrides(join):
    join(0, 4)
    grid = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override={"a": ("gloo", "options"), 1: "mpi"}
    )
    assert grid.get_group("a").how == {"backend": "gloo", "options": "options"}
    assert grid.get_group("b").how == {"backend": "mpi", "options": None}
    flat = grid.flatten("ab", backend_override="gloo")
    assert flat.get_group().how == {"backend": "gloo", "options": None}
    for wrong, message in (
        ({"c": "gloo"}, "'c' is not one of"),
        ({2: "gloo"}, "2 is not one of"),
        ({"a": "gloo", 0: "gloo"}, "by index and by name"),
    ):
        with pytest.raises(DistArgumentError, match=message):
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override=wrong)
    with pytest.raises(DistArgumentError, match="1 entries for 2 dimensions"):
        DeviceMesh("cpu", [[0, 1], [2, 3]], backend_override=(("gloo", None),))


def test_ranks_outside_the_mesh(join):
    world = join(3, 4)
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    assert [ranks for ranks, _ in world.made] == [(0, 1), (0,), (1,)]
    assert grid.get_coordinate() is None
    assert grid["a"].get_coordinate() is None
    assert grid.mesh.tolist() == [[0], [1]]
    for ask in (lambda: grid.get_group("a"), grid.get_all_groups, lambda: grid["a"].get_local_rank()):
        with pytest.raises(DistError, match="rank 3 is not part of"):
            ask()
    with pytest.raises(DistArgumentError, match="rank 3 is not part of"):
        _ = grid["b"].mesh
    assert grid["a"].mesh.tolist() == [0, 1]


def test_a_mesh_without_groups(join):
    world = join(2, 8)
    grid = DeviceMesh("cpu", [[2, 3], [4, 5]], mesh_dim_names=("a", "b"), _init_backend=False)
    assert world.made == []
    assert grid["a"].mesh.tolist() == [2, 4]
    assert grid.flatten().shape == (4,)
    for view in (grid["a"], grid.flatten()):
        with pytest.raises(DistError, match="without process groups"):
            view.get_group()
    assert DeviceMesh("cpu", [7, 9], _init_backend=False, _rank=9).get_coordinate() == (1,)


def test_init_device_mesh_initialises_the_world(join):
    world = join(0, 2)
    world.initialized = False
    assert init_device_mesh("cpu", (2,)).size() == 2
    assert world.initialized


def test_from_group(join):
    world = join(3, 4)
    line = DeviceMesh.from_group(world.default, "cpu", mesh_dim_names=("w",))
    assert line.get_group() is line["w"].get_group() is world.default
    assert line.mesh.tolist() == [0, 1, 2, 3]
    groups = [FakeGroup((1, 3), 3), FakeGroup((2, 3), 3)]
    grid = DeviceMesh.from_group(groups, "cuda", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    assert grid.get_all_groups() == groups
    assert grid["b"].get_group() is groups[1]
    assert (grid.device_type, grid.get_coordinate()) == ("cuda", (1, 1))
    assert world.made == []
    for group, mesh, names, message in (
        ([], None, None, "at least one"),
        (groups, None, ("a", "b"), "needs mesh"),
        (groups, [[0, 1], [2, 3]], None, "needs mesh"),
        (groups, [0, 1, 2, 3], ("a",), "1 dimensions for 2 groups"),
        (world.default, [0, 1], None, "not the group's ranks"),
    ):
        with pytest.raises(DistArgumentError, match=message):
            DeviceMesh.from_group(group, "cpu", mesh, mesh_dim_names=names)


# Arguments ------------------------------------------------------------------------------------------------


def test_bad_layouts(join):
    world = join(0, 8)
    for make, error, message in (
        (lambda: init_device_mesh("cpu", (3, 3)), DistArgumentError, "bigger than the world: 9 ranks"),
        (lambda: init_device_mesh("cpu:0", (8,)), DistArgumentError, "without an index"),
        (lambda: init_device_mesh("cpu", (8, 0)), DistArgumentError, "positive"),
        (lambda: init_device_mesh("cpu", (2.0, 4)), DistArgumentError, "positive integers"),
        (
            lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "a")),
            DistArgumentError,
            "must be distinct",
        ),
        (lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=("a",)), DistArgumentError, "2 dimensions"),
        (lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names="ab"), DistTypeError, "tuple of names"),
        (lambda: DeviceMesh("cpu"), DistTypeError, "needed"),
        (lambda: DeviceMesh("cpu", []), DistTypeError, "integers"),
        (lambda: DeviceMesh("cpu", [0.5]), DistTypeError, "integers"),
        (lambda: DeviceMesh("cpu", [[0, 1], [2]]), DistArgumentError, "regular grid"),
        (lambda: DeviceMesh("cpu", [0, 0]), DistArgumentError, "distinct"),
        (lambda: DeviceMesh("cpu", [-1, 0]), DistArgumentError, "distinct ranks from 0"),
        (lambda: DeviceMesh("cpu", [0, 8]), DistArgumentError, "rank 8, the world's are 0 to 7"),
    ):
        with pytest.raises(error, match=message):
            make()
    assert world.made == []


def test_unknown_dimensions(join):
    join(0, 8)
    grid, bare = cube(), init_device_mesh("cpu", (2, 4))
    grid["dp", "cp"].flatten("dc")
    for ask, error, message in (
        (lambda: grid["xx"], KeyError, "xx"),
        (lambda: grid.get_group("xx"), KeyError, "xx"),
        (lambda: grid.size("xx"), KeyError, "xx"),
        (lambda: grid["tp", "dp"], KeyError, "tp"),
        (lambda: grid.get_group(3), IndexError, "."),
        (grid.get_group, DistArgumentError, "mesh_dim must say which"),
        (lambda: grid["dp", "dp"], DistArgumentError, "overlap"),
        (lambda: grid["cp", "tp"].flatten("dc"), DistArgumentError, "taken by another"),
        (lambda: grid.flatten("dp"), DistArgumentError, "is a dimension of"),
        (lambda: bare["a"], DistArgumentError, "without mesh_dim_names"),
        (bare.flatten, DistArgumentError, "without mesh_dim_names"),
    ):
        with pytest.raises(error, match=message) as caught:
            ask()
        assert isinstance(caught.value, (DistArgumentError, IndexError))
        assert str(caught.value)[:1] not in ("'", '"')  # which KeyError alone would add


# Object protocol ------------------------------------------------------------------------------------------


def test_equality_and_hash(join):
    join(0, 8)
    grid, twin = cube(), cube()
    assert grid == twin != "mesh"
    assert grid != init_device_mesh("cpu", (2, 2, 2))
    assert len({grid, twin, grid["tp"], twin["tp"]}) == 2


def test_as_context_manager(join):
    join(0, 8)
    grid = cube()
    with pytest.raises(DistError, match="no device mesh is active"):
        current_mesh()
    seen = []
    with grid as entered, grid["tp"] as inner:
        assert entered is grid
        assert current_mesh() is inner
        thread = threading.Thread(target=lambda: seen.append(mesh_module._active.meshes))
        thread.start()
        thread.join()
    assert seen == [[]]
    with pytest.raises(DistError), grid:
        assert current_mesh() is grid
        raise DistError("inside")
    with pytest.raises(DistError, match="no device mesh is active"):
        current_mesh()


def test_mesh_is_a_numpy_array_of_its_own(join, monkeypatch):
    join(6, 8)
    grid = cube()
    grid.mesh[:] = -1
    assert grid.mesh.tolist() == np.arange(8).reshape(2, 2, 2).tolist()
    assert repr(grid) == "DeviceMesh((dp=2, cp=2, tp=2), 'cpu', stride=(4, 2, 1))"
    monkeypatch.setattr(debug_level, "_level", debug_level.DebugLevel.DETAIL)
    assert repr(grid["tp"]) == "DeviceMesh((tp=2), 'cpu', stride=(1,), Mesh: [6, 7])"


# Against torch --------------------------------------------------------------------------------------------

QUESTIONS = """
m
m.mesh
m.shape
m.ndim
m.size()
m.size(0)
m.mesh_dim_names
m.device_type
m.get_rank()
m.get_coordinate()
m.get_all_groups()
m.get_group()
m.get_group(0)
m.get_group(-1)
m.get_group(5)
m.get_local_rank()
m.get_local_rank(0)
m.get_local_rank("b")
m["a"]
m["a"].mesh
m["b"].get_coordinate()
m["a"].get_group()
m["a", "c"]
m["a", "c"].mesh
m["a", "c"].get_coordinate()
m["a", "c"].get_local_rank("c")
m["c", "a"]
m["a", "a"]
m["nope"]
m["a", "b"]["b"] == m["b"]
m["a", "c"]._flatten()
m["a", "c"]._flatten().mesh
m["a_c"].mesh
m["a_c"].get_group()
m["a_c"].get_coordinate()
m["a_c"].get_local_rank()
m["a"].get_group("a_c")
m["a"]["a_c"]
m["a_c", "b"]
m["b", "a_c"]
m["b", "c"]._flatten("bc")
m["a", "bc"].mesh
m["bc", "a"]
m["a", "b"]._flatten("bc")
m._flatten("a")
m._flatten("all").get_group()
m._flatten("all")
m["b"]._flatten("solo").get_group()
m["b"]._flatten("b")
m["a"] == m["b"]
""".strip().splitlines()

LAYOUTS = [
    ((8,), None),
    ((8,), ("a",)),
    ((2, 4), ("a", "b")),
    ((2, 2, 2), ("a", "b", "c")),
    ((4, 1, 2), ("a", "b", "c")),
    ((1, 2, 4), ("a", "b", "c")),
    ((2, 2, 2), None),
    ((1, 8, 1), ("a", "b", "c")),
]
GRIDS = [
    ([[0, 2, 4, 6], [1, 3, 5, 7]], ("a", "b")),
    ([[[7, 6], [5, 4]], [[3, 2], [1, 0]]], ("a", "b", "c")),
    ([[[4, 0], [5, 1]], [[6, 2], [7, 3]]], ("a", "b", "c")),
    ([3, 1, 5], ("a",)),
]


def plain(answer, ranks_of):
    """An answer in terms that both libraries share."""
    if isinstance(answer, list):
        return [plain(entry, ranks_of) for entry in answer]
    if hasattr(answer, "tolist"):
        return answer.tolist()
    if type(answer).__name__ == "DeviceMesh":
        return repr(answer)
    ranks = ranks_of(answer)
    return answer if ranks is None else ("group", tuple(ranks))


def answers(mesh, ranks_of):
    result = {}
    for question in QUESTIONS:
        try:
            result[question] = plain(eval(question, {"m": mesh}), ranks_of)
        except (RuntimeError, LookupError, ValueError, TypeError) as error:
            result[question] = ("refused", isinstance(error, KeyError))
    return result


def check_against_torch(ours, theirs):
    for question, expected in theirs.items():
        got = ours[question]
        if isinstance(expected, tuple) and expected and expected[0] == "refused":
            assert got[0] == "refused", question
            assert got[1] >= expected[1], question  # whoever catches torch's KeyError catches ours
        else:
            assert got == expected, question


@contextlib.contextmanager
def torch_world(rank, size):
    import torch.distributed as torch_dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch_dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield torch_dist
    finally:
        torch_dist.destroy_process_group()


@pytest.mark.every(n=2)
@pytest.mark.torch
@pytest.mark.parametrize("rank", [0, 3, 5, 7])
def test_answers_are_torchs(join, rank):
    torch = pytest.importorskip("torch")

    def our_ranks(answer):
        return answer.ranks if isinstance(answer, FakeGroup) else None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.device_mesh import DeviceMesh as TorchMesh
        from torch.distributed.device_mesh import init_device_mesh as torch_init

        with torch_world(rank, 8) as torch_dist:

            def torch_ranks(answer):
                is_group = isinstance(answer, torch_dist.ProcessGroup)
                return torch_dist.get_process_group_ranks(answer) if is_group else None

            join(rank, 8)
            for shape, names in LAYOUTS:
                theirs = answers(torch_init("cpu", shape, mesh_dim_names=names), torch_ranks)
                ours = answers(init_device_mesh("cpu", shape, mesh_dim_names=names), our_ranks)
                check_against_torch(ours, theirs)
            for grid, names in GRIDS:
                theirs = answers(TorchMesh("cpu", grid, mesh_dim_names=names), torch_ranks)
                for form in (grid, np.array(grid), torch.tensor(grid)):
                    ours = answers(DeviceMesh("cpu", form, mesh_dim_names=names), our_ranks)
                    check_against_torch(ours, theirs)
