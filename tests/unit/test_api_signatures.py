"""Names and signatures against torch.distributed's; how the functions hand over to the group's methods."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import re
from collections.abc import Iterator

import pytest

import unicoll
from unicoll.api import collectives, objects, p2p
from unicoll.arrays.types import ReduceOp
from unicoll.calls.ops import OPS
from unicoll.calls.options import as_options
from unicoll.errors import DistArgumentError, DistTypeError
from unicoll.group import collective_methods


def words(text: str) -> list[str]:
    return text.split()


CALLS = words("""
init_process_group destroy_process_group is_available is_initialized is_nccl_available is_mpi_available
is_gloo_available is_xccl_available is_torchelastic_launched get_backend get_default_backend_for_device
get_rank get_world_size new_group new_subgroups new_subgroups_by_enumeration split_group get_group_rank
get_global_rank get_process_group_ranks init_device_mesh breakpoint
send recv isend irecv batch_isend_irecv send_object_list recv_object_list
broadcast all_reduce reduce all_gather all_gather_into_tensor all_gather_single gather scatter
reduce_scatter reduce_scatter_tensor reduce_scatter_single all_to_all all_to_all_single barrier
monitored_barrier all_reduce_coalesced all_gather_coalesced
broadcast_object_list all_gather_object gather_object scatter_object_list
""")
OTHER_NAMES = words("""
Backend GroupMember P2POp ReduceOp Work Store TCPStore FileStore HashStore PrefixStore DeviceMesh ProcessGroup
DistError DistBackendError DistNetworkError DistStoreError group reduce_op default_pg_timeout CallOptions
DebugLevel get_debug_level set_debug_level set_debug_level_from_env ProcessGroupNCCL
""")
OURS = words("""
broadcast_coalesced all_gather_into_tensor_coalesced reduce_scatter_tensor_coalesced spawn explain
grow_group shrink_group Registration
""")
ROWS = [row for row in OPS.values() if row.parameters]
NAMES = dict.fromkeys(CALLS + OTHER_NAMES + OURS + [row.name for row in ROWS])
COLLECTIVES = {
    *CALLS[CALLS.index("broadcast") : CALLS.index("broadcast_object_list")],
    *OURS[:3],
    *(row.name for row in ROWS),
}
REDUCTIONS = words("SUM AVG PRODUCT MIN MAX BAND BOR BXOR")
WORK_METHODS = words("""
wait synchronize is_completed is_success exception result get_future get_future_result block_current_stream
""")
STORE_METHODS = words("""
set get add compare_set wait check delete_key num_keys append multi_get multi_set set_timeout
""")


@pytest.mark.parametrize("name", NAMES)
def test_name_is_public_and_documented(name):
    thing = getattr(unicoll, name)
    assert name in unicoll.__all__
    if callable(thing):
        assert inspect.getdoc(thing)


@pytest.mark.torch
@pytest.mark.parametrize("name", [*CALLS, "P2POp"])
def test_signature_takes_torchs_arguments(name):
    """The same parameters in the same order with the same defaults; ours may add keyword-only ones."""
    dist = pytest.importorskip("torch.distributed")
    theirs = getattr(dist, name, None)
    if theirs is None:
        from torch.distributed import device_mesh

        theirs = getattr(device_mesh, name)
    expected = parameters(theirs)
    ours = parameters(getattr(unicoll, name))
    assert [p.name for p in ours[: len(expected)]] == [p.name for p in expected]
    for mine, other in zip(ours, expected, strict=False):
        assert mine.kind is other.kind
        assert same_default(mine.default, other.default), (mine, other)
    for extra in ours[len(expected) :]:
        assert extra.kind is inspect.Parameter.KEYWORD_ONLY
        assert extra.default is not inspect.Parameter.empty


@pytest.mark.torch
def test_device_mesh_has_torchs_methods():
    pytest.importorskip("torch")
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    methods = "get_group get_all_groups get_local_rank get_coordinate get_rank size from_group _flatten"
    for name in [*words(methods), "__getitem__"]:
        expected = parameters(getattr(TorchMesh, name))
        ours = parameters(getattr(unicoll.DeviceMesh, name))
        assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in expected], name
    for name in ("mesh", "mesh_dim_names", "device_type", "ndim", "shape"):
        assert isinstance(getattr(unicoll.DeviceMesh, name), property)


def parameters(function):
    """Its parameters, less those that are marked private."""
    return [p for p in inspect.signature(function).parameters.values() if not p.name.startswith("_")]


def same_default(mine, other) -> bool:
    """Equal, or the same reduction, timeout or group in the other library's types."""
    if mine is other or type(mine) is type(other):
        return mine == other
    if isinstance(mine, ReduceOp.RedOpType):
        return mine.name == getattr(other, "name", str(other).rpartition(".")[2])
    return False


def test_every_collective_takes_a_timeout():
    for name in {*CALLS[CALLS.index("send") :], *COLLECTIVES}:
        assert "timeout" in inspect.signature(getattr(unicoll, name)).parameters, name


@pytest.mark.torch
def test_backend_types_have_torchs_names_and_numbers():
    dist = pytest.importorskip("torch.distributed")
    theirs = {name: int(kind.value) for name, kind in dist.Backend.backend_type_map.items()}
    ours = {name: kind.value for name, kind in unicoll.Backend.backend_type_map.items()}
    assert (
        theirs.items()
        >= {name: ours[name] for name in words("undefined gloo nccl mpi xccl ucc fake")}.items()
    )
    assert {k.name: k.value for k in unicoll.ProcessGroup.BackendType} == {
        name: int(kind) for name, kind in dist.ProcessGroup.BackendType.__members__.items()
    }


def test_the_module_of_device_meshes():
    from unicoll.device_mesh import DeviceMesh, init_device_mesh

    assert (DeviceMesh, init_device_mesh) == (unicoll.DeviceMesh, unicoll.init_device_mesh)
    assert unicoll.device_mesh.init_device_mesh is init_device_mesh


def test_options_by_the_names_of_torchs_class():
    given = unicoll.ProcessGroupNCCL.Options()
    assert as_options(given) == unicoll.Options()
    given.is_high_priority_stream = True
    given.config.min_ctas, given.config.net_name, given.config.split_share = 2, "ib", True
    assert as_options(given) == unicoll.Options(
        high_priority=True, min_ctas=2, net_name="ib", split_share=True
    )
    with pytest.raises(AttributeError):
        given.config.cta_size = 4


def test_reductions():
    for name in REDUCTIONS:
        assert getattr(unicoll.ReduceOp, name).name == name
        assert getattr(unicoll.ReduceOp.RedOpType, name) is getattr(unicoll.ReduceOp, name)
    assert unicoll.ReduceOp.PREMUL_SUM(0.5).factor == 0.5
    for name in ("SUM", "PRODUCT", "MIN", "MAX"):
        assert getattr(unicoll.reduce_op, name) == getattr(unicoll.ReduceOp, name)


def test_work_and_store_methods():
    for name in [*WORK_METHODS, "__await__"]:
        assert inspect.getdoc(getattr(unicoll.Work, name))
    for store in (unicoll.TCPStore, unicoll.FileStore, unicoll.HashStore, unicoll.PrefixStore):
        assert issubclass(store, unicoll.Store)
        for name in STORE_METHODS:
            assert callable(getattr(store, name)), (store, name)


def test_group_methods_go_by_the_functions_names():
    for name in COLLECTIVES:
        if not name.endswith("_single") or name == "all_to_all_single":
            assert callable(getattr(unicoll.ProcessGroup, name)), name


def test_collectives_say_what_they_raise():
    for name in COLLECTIVES:
        text = inspect.getdoc(getattr(unicoll, name))
        assert "RankLostError" in text, name
        assert "OperationTimeoutError" in text, name
        assert "NotInitializedError" in text, name


# From the functions to the group ----------------------------------------------------------------------------


class Recorder:
    """A group of global ranks 4, 6 and 8, of which this process is 6; remembers the call it gets."""

    group_name = "recorder"
    ranks = (4, 6, 8)
    call = None

    def rank(self):
        return 1

    def size(self):
        return 3

    def group_rank(self, rank):
        return self.ranks.index(rank)

    def global_rank(self, rank):
        return self.ranks[rank]

    def interrupted(self, error):
        """Not a call: each error of a function is passed to the group."""

    def __getattr__(self, method):
        def record(*args, **kwargs):
            self.call = (method, args, kwargs)
            return (
                2 if method == "recv" else [method] if method == "batch_isend_irecv" else f"work of {method}"
            )

        return record


@pytest.fixture
def group(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(collectives.world, "resolve", lambda group, *_: group)
    return recorder


SUM, MAX = ReduceOp.SUM, ReduceOp.MAX
HANDED_OVER = [
    ("barrier", (), {"device_ids": [0]}, (), {}),
    ("all_reduce_coalesced", (["x"],), {}, (["x"],), {"op": SUM}),
    ("broadcast_coalesced", (["x"], 8), {}, (["x"],), {"src": 2}),
    (
        "all_gather_coalesced",
        ([["a4", "b4"], ["a6", "b6"], ["a8", "b8"]], ["a", "b"]),
        {},
        ([["a4", "a6", "a8"], ["b4", "b6", "b8"]], ["a", "b"]),
        {},
    ),
    ("all_gather_into_tensor_coalesced", (["y"], ["x"]), {}, (["y"], ["x"]), {}),
    ("reduce_scatter_tensor_coalesced", (["y"], ["x"]), {}, (["y"], ["x"]), {"op": SUM}),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_collectives_hand_over(group, row):
    """All arguments by position, with a global root; then what is not optional, with a root in the group."""
    function = getattr(unicoll, row.name)
    arrays = [f"the {p.name}" for p in row.parameters if p.side != "splits"]
    splits = {p.name: [1] for p in row.parameters if p.side == "splits"}
    root = {row.root_name: 2} if row.rooted else {}
    roots = (group.global_rank(r) for r in root.values())
    given = (*arrays, *splits.values(), *roots, *([MAX] if row.reduces else []))
    assert function(*given, group=group) == f"work of {row.name}"
    options = {**splits, **root, "async_op": False, "timeout": None} | ({"op": MAX} if row.reduces else {})
    assert group.call == (row.name, tuple(arrays), options)

    if row.root_has_sizes:
        arrays[1] = None
    more = {
        "group": group,
        "async_op": True,
        "timeout": 3.5,
        **{f"group_{name}": r for name, r in root.items()},
    }
    assert function(*(a for a in arrays if a), **more) == f"work of {row.name}"
    options = {**dict.fromkeys(splits), **root, "async_op": True, "timeout": 3.5}
    assert group.call == (row.name, tuple(arrays), options | ({"op": SUM} if row.reduces else {}))


@pytest.mark.parametrize(("name", "args", "kwargs", "arrays", "options"), HANDED_OVER)
def test_other_collectives_hand_over(group, name, args, kwargs, arrays, options):
    function = getattr(unicoll, name)
    for how in ({"async_op": False, "timeout": None}, {"async_op": True, "timeout": 3.5}):
        given = how if how["async_op"] else {}
        assert function(*args, **kwargs, group=group, **given) == f"work of {name}"
        assert group.call == (name, arrays, {**options, **how})


def test_all_gather_coalesced_wants_a_list_per_rank(group):
    for outputs in ([["y"]], [["y"], ["y"], []]):
        with pytest.raises(DistArgumentError, match="3 lists"):
            collectives.all_gather_coalesced(outputs, ["x"], group)
    assert group.call is None


def test_monitored_barrier_hands_over(group):
    assert collectives.monitored_barrier(group, 2.5, True) is None
    assert group.call == ("monitored_barrier", (), {"timeout": 2.5, "wait_all_ranks": True})


@pytest.mark.parametrize(
    ("name", "root"),
    [*((row.name, row.root_name) for row in ROWS if row.rooted), ("isend", "dst")],
)
def test_roots_are_checked(group, name, root):
    function = getattr(p2p if name == "isend" else collectives, name)
    for given, error, message in (
        ({root: 5}, DistArgumentError, f"{name}: {root}=5 is not in group 'recorder' .global ranks 4, 6, 8"),
        ({f"group_{root}": 3}, DistArgumentError, f"{name}: group_{root}=3 is not in group"),
        ({f"group_{root}": -1}, DistArgumentError, f"{name}: group_{root}=-1 is not in group"),
        ({root: 4, f"group_{root}": 0}, DistArgumentError, f"{name}: give {root} or group_{root}, not both"),
        ({root: "4"}, DistTypeError, f"{name}: {root} must be an integer"),
        ({f"group_{root}": 1.0}, DistTypeError, f"{name}: group_{root} must be an integer"),
    ):
        with pytest.raises(error, match=message) as caught:
            function("x", group=group, **given)
        assert (caught.value.op, caught.value.group) == (name, "recorder")
    with pytest.raises(ValueError, match=root):
        function("x", group=group)  # 0, the default of gather and scatter, is not a member either
    assert group.call is None


def test_point_to_point_hands_over(group):
    assert p2p.send("x", 4, group, 7) is None
    assert group.call == ("send", ("x",), {"dst": 0, "tag": 7, "timeout": None})
    assert p2p.recv("y", 8, group, timeout=2) == 8
    assert group.call == ("recv", ("y",), {"src": 2, "tag": 0, "status": None, "timeout": 2})
    assert p2p.recv("y", group=group) == 8
    assert group.call == ("recv", ("y",), {"src": None, "tag": 0, "status": None, "timeout": None})
    assert p2p.isend("x", group=group, group_dst=1) == "work of isend"
    assert group.call == ("isend", ("x",), {"dst": 1, "tag": 0, "timeout": None})
    assert p2p.irecv("y", 4, group, 5) == "work of irecv"
    assert group.call == ("irecv", ("y",), {"src": 0, "tag": 5, "status": None, "timeout": None})
    assert p2p.irecv("y", group=group) == "work of irecv"
    assert group.call[2]["src"] is None
    p2p.send("x", 6, group)  # to itself
    assert group.call == ("send", ("x",), {"dst": 1, "tag": 0, "timeout": None})


def test_batches(group):
    ops = [
        p2p.P2POp(p2p.isend, "x", 8, group, 3),
        p2p.P2POp(p2p.irecv, "y", group=group, group_peer=0),
    ]
    assert (ops[0].group_peer, ops[1].peer, ops[1].group) == (2, 4, group)
    assert "isend to 2 in 'recorder'" in repr(ops[0])
    assert p2p.batch_isend_irecv(ops) == ["batch_isend_irecv"]
    expected = [(True, "x", 2, 3), (False, "y", 0, 0)]
    assert group.call == ("batch_isend_irecv", (expected,), {"timeout": None})
    assert p2p.batch_isend_irecv([]) == []
    with pytest.raises(DistArgumentError, match="one group"):
        p2p.batch_isend_irecv([*ops, p2p.P2POp(p2p.isend, "x", 8, Recorder())])
    with pytest.raises(DistTypeError, match="not a P2POp"):
        p2p.batch_isend_irecv([ops[0], "x"])
    for wrong in (p2p.send, print, "isend"):
        with pytest.raises(DistArgumentError, match=r"op must be unicoll\.isend or unicoll\.irecv"):
            p2p.P2POp(wrong, "x", 8, group)
    for peer in ({"peer": 5}, {"group_peer": 3}, {}, {"peer": 4, "group_peer": 0}):
        with pytest.raises(DistArgumentError, match="peer"):
            p2p.P2POp(p2p.isend, "x", group=group, **peer)


# Functions and methods of the table ------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_function_and_method_are_those_of_the_row(row):
    """The method has the row's parameters; the function documents each of its own; both name MPI's counterpart."""
    method = getattr(unicoll.ProcessGroup, row.name)
    names = list(inspect.signature(method).parameters)[1 : 1 + len(row.parameters)]
    assert names == [parameter.name for parameter in row.parameters]
    assert {*row.aliases} <= {
        name for name, value in vars(collectives).items() if value is getattr(unicoll, row.name)
    }
    function = getattr(unicoll, row.name)
    text = inspect.getdoc(function)
    for name in inspect.signature(function).parameters:
        assert f"{name}:" in text, name
    assert row.mpi in text
    assert row.mpi in inspect.getdoc(method)


@pytest.mark.parametrize(
    ("place", "name", "here"),
    [
        (unicoll, "Allreduce", "all_reduce"),
        (unicoll, "Iallgatherv", "all_gather with async_op=True"),
        (unicoll, "Isend", "isend (docs"),
        (unicoll, "COMM_WORLD", "the default group"),
        (unicoll, "bcast", "broadcast_object_list"),
        (ReduceOp, "MAXLOC", "argmax"),
        (ReduceOp, "PROD", "PRODUCT"),
    ],
)
def test_names_of_mpi4py_are_explained(place, name, here):
    with pytest.raises(AttributeError, match=f"{name}.*{re.escape(here)}.*hpc.md") as raised:
        getattr(place, name)
    assert (raised.value.name, raised.value.obj) == (name, place)


@pytest.mark.parametrize("place", [unicoll, ReduceOp])
def test_other_names_are_not_explained(place):
    with pytest.raises(AttributeError) as raised:
        getattr(place, "Impossible")  # noqa: B009 - it does not exist
    assert "mpi4py" not in str(raised.value)
    assert not hasattr(place, "I")


def test_a_group_is_not_pickled_or_copied():
    """The error named a lock, and not the group that some attribute holds."""
    unicoll.init_process_group(rank=0, world_size=1, store=unicoll.HashStore())
    try:
        held = {"trainer": [unicoll.group.WORLD]}
        for function in (pickle.dumps, copy.deepcopy, lambda each: copy.copy(each["trainer"][0])):
            with pytest.raises(TypeError, match=r"group 'world' cannot be pickled or copied"):
                function(held)
    finally:
        unicoll.destroy_process_group()


def _functions_of_groups() -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods that make calls of a group."""
    for module in (collectives, p2p, objects, collective_methods):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                names = {a.arg for a in (*node.args.args, *node.args.kwonlyargs)}
                if names & {"group", "self", "p2p_op_list"}:
                    yield f"{module.__name__}.{node.name}", node


def test_each_function_of_a_group_fails_it_if_interrupted():
    """Its body, but for the docstring, is a try whose handler of all exceptions calls ``interrupted``."""
    found = list(_functions_of_groups())
    assert len(found) > 40
    for name, node in found:
        last = node.body[-1]
        assert isinstance(last, ast.Try), name
        assert len(node.body) <= 2, name
        (handler,) = last.handlers
        assert "BaseException" in ast.unparse(handler), name
        assert "interrupted(" in ast.unparse(handler), name
