"""Arrays of subclasses are seen as plain arrays or refused by name; errors before a byte is sent are one rank's own."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ranks import Pool, ProcessJob, pools
from tests.unit import subclass_jobs as jobs
from unicoll.arrays import conversion
from unicoll.arrays.conversion import as_buffer
from unicoll.errors import DistTypeError


@pytest.fixture(scope="module", params=["shm", "tcp", "hierarchical"])
def ways(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Pool]]:
    with pools(partial(ProcessJob, env={"UNICOLL_TRANSPORT": request.param})) as made:
        yield made


# --- NumPy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("kind", jobs.KINDS)
def test_every_operation_on_a_subclass(kind: str, strided: bool, pool: Callable[[int], Pool]) -> None:
    pool(2).run(jobs.every_operation, kind, strided)


def test_a_subclass_is_communicated_as_its_memory(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "data", np.float32, "w+", shape=(2, 3))
    buffer = as_buffer(mapped)
    assert type(buffer.flat) is np.ndarray
    assert buffer.shape == (2, 3)
    assert buffer.owner is mapped
    buffer.flat[:] = 5
    assert (np.asarray(mapped) == 5).all()
    for order in ("C", "F"):
        values = np.arange(6.0).reshape(2, 3, order=order)
        given = values.view(jobs.Hostile)
        jobs.Hostile.armed = True
        try:
            buffer = as_buffer(given)
            flat: Any = buffer.flat
            flat += 1
            buffer.write_back()
        finally:
            jobs.Hostile.armed = False
        assert (values == np.arange(6.0).reshape(2, 3, order=order) + 1).all()
    read_only = np.ones((2, 2)).view(np.matrix)
    read_only.flags.writeable = False
    assert not as_buffer(read_only).writable


class Masked(np.ma.MaskedArray):  # type: ignore[type-arg]
    pass


class Convertible:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise AssertionError("a copy would not be written back")


class Frame(Convertible):
    """As those of pandas, polars and xarray."""

    def to_numpy(self) -> Any:
        return self.__array__()


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: np.ma.ones(3), "masked arrays cannot be communicated"),
        (lambda: Masked([1.0, 2.0]), "masked arrays cannot be communicated"),
        (
            lambda: np.recarray(3, [("a", "f4"), ("b", "i4")]),
            r"arrays of dtype .*record.* cannot be communicated",
        ),
        (
            lambda: np.array(["a", "b"]).view(np.char.chararray),
            "arrays of dtype .*str.* cannot be communicated",
        ),
        (lambda: np.random.default_rng(), "expected an array .*, got Generator"),
        (lambda: np.dtype("f4"), "expected an array .*, got Float32DType"),
        (Frame, r"expected an array .*, got Frame; give its \.to_numpy\(\)"),
        (Convertible, r"expected an array .*, got Convertible; give np\.asarray of it"),
    ],
)
def test_unsupported_subclasses_raise_with_their_name(made: Callable[[], Any], says: str) -> None:
    with pytest.raises(DistTypeError, match=says):
        as_buffer(made(), "all_reduce: tensor")


# --- CuPy: a stand-in with its documented attributes ------------------------------------------------------------------


class _CupyArray:
    """A stand-in for ``cupy.ndarray`` with the attributes that the adapter uses."""

    def __init__(self, values: Any) -> None:
        self.values = values
        self.device = types.SimpleNamespace(id=1)
        self.data = types.SimpleNamespace(ptr=values.ctypes.data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values, name)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.values[key] = value.values

    def view(self, dtype: Any = None, array_class: Any = None) -> Any:
        assert array_class is None
        return dtype(self.values)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = types.ModuleType("cupy")
    module.ndarray = type("ndarray", (_CupyArray,), {"__module__": "cupy"})
    module.now = [0]  # current device: CuPy allocates and runs kernels on it, not on its arrays' device

    @contextmanager
    def device(index: int) -> Iterator[None]:
        module.now.append(index)
        yield
        module.now.pop()

    def ascontiguousarray(array: Any) -> Any:
        made = module.ndarray(np.ascontiguousarray(array.values))
        made.device = types.SimpleNamespace(id=module.now[-1])
        module.made.append(made)
        return made

    def setitem(self: Any, key: Any, value: Any) -> None:
        module.wrote.append((self.device.id, module.now[-1]))
        _CupyArray.__setitem__(self, key, value)

    module.made, module.wrote = [], []
    module.ascontiguousarray = ascontiguousarray
    module.ndarray.__setitem__ = setitem
    module.cuda = types.SimpleNamespace(
        get_current_stream=lambda index: types.SimpleNamespace(ptr=7), Device=device
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(conversion, "_ADAPTERS", dict(conversion._ADAPTERS))
    return module


def test_a_strided_cupy_array_is_packed_and_unpacked_on_its_device(cupy: Any) -> None:
    buffer = as_buffer(cupy.ndarray(np.arange(6.0)[::2]))
    (packed,) = cupy.made
    assert buffer.device.index == packed.device.id == 1
    buffer.write_back()
    assert cupy.wrote == [(1, 1)]
    assert cupy.now == [0]


def test_a_subclass_of_cupy_arrays_is_communicated_as_its_memory(cupy: Any) -> None:
    class Quantity(cupy.ndarray):  # type: ignore[misc, name-defined]
        dtype = shape = size = flags = device = property(lambda self: 1 / 0)

        def __init__(self, values: Any) -> None:
            self.values = values

        @property
        def data(self) -> Any:
            raise ZeroDivisionError

        def view(self, *args: Any) -> Any:
            raise ZeroDivisionError

        def __setitem__(self, key: Any, value: Any) -> None:
            raise ZeroDivisionError

    values = np.arange(6.0).reshape(2, 3)
    for given, strided in ((Quantity(values), False), (Quantity(values.T), True)):
        buffer = as_buffer(given)
        assert buffer.owner is given
        assert buffer.shape == ((3, 2) if strided else (2, 3))
        assert (buffer.ptr == values.ctypes.data) != strided
        assert (buffer.unpack is not None) == strided
        buffer.write_back()
    assert as_buffer(cupy.ndarray(values)).ptr == values.ctypes.data


# --- errors of one rank ----------------------------------------------------------------------------------------------


def test_an_argument_error_is_raised_on_one_rank_only(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.errors_of_one_rank) == [[], []]


def test_an_exception_of_an_argument_is_raised_on_all_ranks(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.exceptions_of_an_argument) == [[], []]


@pytest.mark.parametrize("size", [2, 3])
def test_a_failure_before_sending_is_raised_on_all_ranks(size: int, ways: Callable[[int], Pool]) -> None:
    ways(size).run(jobs.failures_inside)


def test_a_failure_after_sending_is_raised_on_all_ranks(ways: Callable[[int], Pool]) -> None:
    ways(2).run(jobs.failures_after_sending)
