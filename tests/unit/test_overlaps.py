"""Memory that elements of an array, or arrays of a call, have in common: what is found, against sets of addresses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.support.other_arrays import Exported
from unicoll.arrays.buffer import has_shared_elements
from unicoll.arrays.conversion import as_buffer
from unicoll.calls.call import Call
from unicoll.calls.ops import OPS
from unicoll.errors import DistArgumentError
from unicoll.group.overlaps import separate


def test_elements_that_share_memory_are_found() -> None:
    for strides in itertools.product((-7, -2, 0, 1, 3, 4, 6, 8, 12), repeat=3):
        for shape in ((2, 3, 2), (1, 4, 1), (3, 1, 2), (0, 2, 2)):
            used: list[int] = []
            for index in np.ndindex(*shape):
                first = sum(i * step for i, step in zip(index, strides, strict=True))
                used += range(first, first + 2)
            assert has_shared_elements(shape, strides, 2) == (len(set(used)) < len(used)), (shape, strides)


def _call(op: str, inputs: list[slice], outputs: list[slice], memory: np.ndarray) -> Call:
    return Call(
        OPS[op],
        tuple(as_buffer(memory[each], op) for each in inputs),
        tuple(as_buffer(memory[each], op) for each in outputs),
        1.0,
    )


def _at(start: int, count: int) -> slice:
    return slice(start, start + count)


HALVES = [_at(0, 4), _at(4, 4)]


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "copied"),
    [
        ("all_gather", [_at(4, 4)], HALVES, [False]),
        ("all_gather", [_at(0, 4)], HALVES, [True]),
        ("all_gather", [_at(8, 4)], HALVES, [False]),
        ("all_gather_into_tensor", [_at(4, 4)], [_at(0, 8)], [False]),
        ("all_gather_into_tensor", [_at(0, 4)], [_at(0, 8)], [True]),
        ("all_gather_into_tensor", [_at(5, 4)], [_at(0, 8)], [True]),
        ("all_gather_into_tensor", [_at(8, 4)], [_at(0, 8)], [False]),
        ("gather", [_at(4, 4)], [], [False]),
        ("scatter", HALVES, [_at(4, 4)], [False, False]),
        ("scatter", HALVES, [_at(0, 4)], [True, False]),
        ("scatter", HALVES, [_at(3, 4)], [True, True]),
        ("reduce_scatter", HALVES, [_at(4, 4)], [False, False]),
        ("reduce_scatter_tensor", [_at(0, 8)], [_at(4, 4)], [False]),
        ("reduce_scatter_tensor", [_at(0, 8)], [_at(0, 4)], [True]),
        ("all_to_all_single", [_at(0, 8)], [_at(0, 8)], [True]),
        ("all_to_all", HALVES, [_at(8, 4), _at(4, 4)], [False, True]),
        ("send", [_at(0, 4)], [], [False]),
    ],
)
def test_inputs_are_copied_where_an_output_overlaps_them(
    op: str, inputs: list[slice], outputs: list[slice], copied: list[bool]
) -> None:
    """On rank 1, whose own part stays where it is."""
    memory = np.arange(12)
    call = _call(op, inputs, outputs, memory)
    separate((call,), 1)
    found = []
    for buffer, place in zip(call.inputs, inputs, strict=True):
        assert buffer.flat is not None
        assert buffer.flat.tolist() == memory[place].tolist()
        found.append(not np.shares_memory(buffer.flat, memory))
    assert found == copied


def test_calls_that_start_together() -> None:
    memory = np.arange(12)
    calls = [_call("send", [_at(0, 5)], [], memory), _call("recv", [], [_at(4, 4)], memory)]
    separate(calls, 0)
    assert calls[0].inputs[0].flat is not None
    assert not np.shares_memory(calls[0].inputs[0].flat, memory)
    calls = [_call("recv", [], [_at(i, 4)], memory) for i in (8, 0, 3)]
    with pytest.raises(DistArgumentError, match="outputs 1 and 2 overlap each other, of 3 calls"):
        separate(calls, 0)


@pytest.mark.parametrize("family", ["numpy", "torch", "DLPack"])
@pytest.mark.parametrize(
    ("places", "overlap"),
    [
        ([np.s_[0:4:2], np.s_[2:6:2]], True),  # of element 2
        ([np.s_[0:8:2], np.s_[1:8:2]], False),
        ([np.s_[0:8:2], np.s_[3:5]], True),  # one is contiguous
        ([np.s_[0:8:4], np.s_[5:7]], False),
        ([np.s_[8:0:-2], np.s_[1:9:2], np.s_[9:12]], False),
        ([np.s_[8:0:-2], np.s_[1:9:2], np.s_[4:5]], True),
        ([np.s_[0:0:2], np.s_[0:4:2]], False),
    ],
)
def test_strided_outputs(family: str, places: list[slice], overlap: bool) -> None:
    memory = np.arange(12)
    if family == "torch":
        if any(place.step is not None and place.step < 0 for place in places):
            pytest.skip("torch has no negative strides")
        given = [pytest.importorskip("torch").from_numpy(memory)[place] for place in places]
    else:
        given = [memory[place] for place in places]
    made = [Exported(each) for each in given] if family == "DLPack" else given
    outputs = tuple(as_buffer(each) for each in made)
    call = Call(OPS["all_gather"], (as_buffer(np.zeros(2, int)),), outputs, 1.0)
    taken = [set(np.arange(12)[place].tolist()) for place in places]
    assert overlap == (len(set().union(*taken)) < sum(map(len, taken)))
    if not overlap:
        separate((call,), 0)
        return
    with pytest.raises(DistArgumentError, match=r"all_gather: outputs \d and \d overlap each other$"):
        separate((call,), 0)


def test_columns_of_a_matrix_do_not_overlap() -> None:
    matrix = np.zeros((5, 4, 3))
    columns = [as_buffer(matrix[:, i, j]) for i in range(4) for j in range(3)]
    separate((Call(OPS["all_gather"], (as_buffer(np.zeros(5)),), tuple(columns), 1.0),), 0)
    columns.append(as_buffer(matrix[2, 1:, 2]))
    with pytest.raises(DistArgumentError, match="outputs 5 and 12 overlap each other"):
        separate((Call(OPS["all_gather"], (as_buffer(np.zeros(5)),), tuple(columns), 1.0),), 0)
