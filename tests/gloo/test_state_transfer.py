"""The transfer of a state dict from rank to rank."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any
from unittest import mock

import numpy as np
import pytest

import unicoll as dist
from tests.support.on_ranks import on_ranks
from tests.support.other_arrays import KINDS, Exported
from unicoll.errors import DistArgumentError, DistError
from unicoll.parallel.state import State, _described, _new_array


def example() -> dict[str, Any]:
    return {
        "step": 7,
        "weights": OrderedDict(a=np.arange(6.0).reshape(2, 3), b=np.zeros((0, 4), np.float32)),
        "optimizer": {
            "state": {0: {"m": np.full(70_000, 2, np.float16)}, 1: {}},
            "groups": [{"lr": 0.1, "params": [0]}],
        },
        "mixed": (np.int64(3), np.array(True), None, [np.array(1 + 2j), "x"], b"bytes"),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    }


def transfer(state: dict[str, Any]) -> None:
    """From rank 0 to rank 1."""
    own = State(state)
    if dist.get_rank() == 0:
        own.digest()
        own.send(dist.group.WORLD, 1)
    else:
        own.receive(dist.group.WORLD, 0)


def same(a: Any, b: Any) -> bool:
    if isinstance(b, np.ndarray):
        return (
            isinstance(a, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
        )
    if isinstance(b, dict):
        return isinstance(a, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in b)
    if isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


@on_ranks(2)
@pytest.mark.parametrize("filled", [False, True])
def test_nested_state(filled: bool) -> None:
    state: dict[str, Any] = example() if filled or dist.get_rank() == 0 else {}
    weights = state.get("weights")
    if dist.get_rank() == 1 and filled:
        state["step"], state["extra"], state["fortran"] = 0, np.zeros(3), np.zeros(2)
        state["optimizer"]["groups"].append(1)
        weights["a"][:] = -1
        array = weights["a"]
    transfer(state)
    assert same(state, example() | {"fortran": np.arange(6).reshape(2, 3)}), state
    assert State(state).digest() == State(example()).digest()
    if dist.get_rank() == 1 and filled:
        assert state["weights"] is weights
        assert weights["a"] is array


@on_ranks(2)
def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    if dist.get_rank() == 0:
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "half": torch.ones(2).bfloat16(),
    }
    transfer(state)
    optimizer.load_state_dict(state["optimizer"])
    found = [
        *model.state_dict().values(),
        *(each["exp_avg"] for each in optimizer.state.values()),
        state["half"],
    ]
    assert len(found) == 5
    dist.parallel.check_identical(found)


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_other_arrays(kind: str, filled: bool) -> None:
    """They are overwritten, and NumPy arrays where the receiver has none."""
    rank = dist.get_rank()
    values = np.full((2, 3), rank, np.float32)
    given = KINDS[kind](values)
    state: dict[str, Any] = {"a": given, "b": bytearray(b"xy")} if filled or rank == 0 else {}
    transfer(state)
    assert state["b"] == b"xy"
    if rank == 0 or filled:
        assert state["a"] is given
        assert values.tolist() == [[0.0] * 3] * 2
    else:
        assert type(state["a"]) is np.ndarray
        assert (state["a"].dtype, state["a"].tolist()) == (np.float32, [[0.0] * 3] * 2)


@on_ranks(2)
def test_types_of_ml_dtypes() -> None:
    types = pytest.importorskip("ml_dtypes")
    arrays = {name: np.arange(5).astype(getattr(types, name)) for name in ("bfloat16", "float8_e4m3fnuz")}
    state = {} if dist.get_rank() else dict(arrays)
    transfer(state)
    for name, array in arrays.items():
        assert state[name].dtype == array.dtype
        assert state[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_a_new_tensor_is_on_the_senders_type_of_device(device: str) -> None:
    torch = pytest.importorskip("torch")

    where = torch.device(device) if device == "cpu" else torch.device(device, 1)
    elsewhere = type("Elsewhere", (torch.Tensor,), {"device": where})
    described = _described((), torch.ones(2, 3).bfloat16().as_subclass(elsewhere), b"digest")
    with mock.patch.object(torch, "empty") as empty:
        _new_array(described)
    empty.assert_called_once_with((2, 3), dtype=torch.bfloat16, device=device)


@pytest.mark.filterwarnings("ignore")  # torch is to drop quantized tensors
def test_quantized_tensors_are_refused() -> None:
    """The receiver would not get scale and zero point."""
    torch = pytest.importorskip("torch")
    tensor = torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.quint8)
    with pytest.raises(
        DistArgumentError, match=r"state\['a'\]: arrays of torch quint8 cannot be communicated"
    ):
        State({"a": tensor})


@on_ranks(2)
def test_an_array_that_does_not_have_its_digest() -> None:
    """It has changed since the sender computed the digest."""
    own = State({"a": np.zeros(2), "b": np.zeros(3)})
    if dist.get_rank() == 0:
        own.digest()
        own._state["b"][1] = 1
        own.send(dist.group.WORLD, 1)
    else:
        with pytest.raises(DistError, match=r"state\['b'\] received from rank 0 does not have the digest"):
            own.receive(dist.group.WORLD, 0)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ([np.zeros(1)], "state: expected a dict, got list"),
        (
            {"a": [{"b": np.zeros(1, "datetime64[s]")}]},
            r"state\['a'\]\[0\]\['b'\]: arrays of numpy datetime64",
        ),
        (
            {"a": KINDS["registered"](np.ones((2, 2)).T)},
            r"state\['a'\]: Registered: its memory is not contiguous",
        ),
        ({"a": memoryview(b"xy").cast("c")}, r"state\['a'\]: arrays of dtype \|S1"),
        (
            {"a": Exported(np.zeros(1, "M8[s]"))},
            r"state\['a'\]: .*Exported cannot be communicated: its __dlpack__ raises",
        ),
    ],
)
def test_refused_states(state: Any, text: str) -> None:
    with pytest.raises(DistArgumentError, match=text):
        State(state)


def test_classes_are_plain_values() -> None:
    torch = pytest.importorskip("torch")
    plain = {"a": np.ndarray, "b": torch.Tensor, "c": np.float32, "d": Exported, "e": mock.Mock(spec=[])}
    assert State(plain).digest() == State({}).digest()


def test_the_digest_covers_places_types_and_shapes() -> None:
    arrays = [np.zeros(2), np.zeros(2, np.float32), np.zeros((2, 1)), -np.zeros(2)]
    states = [
        *({"a": array} for array in arrays),
        {"b": arrays[0]},
        {"a": {"a": arrays[0]}},
        {"a": [arrays[0]]},
        {},
    ]
    digests = [State(state).digest() for state in states]
    assert len({*digests}) == len(states)
    assert State({"a": np.zeros(2), "step": 3}).digest() == digests[0]
