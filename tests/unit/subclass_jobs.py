"""Rank functions with arrays of subclasses, and with objects that raise on access."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import unicoll as dist
from tests.support.order import await_word, send_word

Array = Any


class Hostile(np.ndarray):
    """Once ``armed``, raises on any access except by NumPy's methods of the base class."""

    armed = False

    def __array_finalize__(self, obj: Any) -> None:
        refuse()

    def __getattribute__(self, name: str) -> Any:
        if Hostile.armed:
            raise ZeroDivisionError(name)
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        refuse()
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        refuse()
        super().__setitem__(key, value)

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError

    def __array_function__(self, *args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError

    def __len__(self) -> int:
        raise ZeroDivisionError

    def __buffer__(self, flags: int) -> memoryview:
        raise ZeroDivisionError


def refuse() -> None:
    if Hostile.armed:
        raise ZeroDivisionError


class Quantity(np.ndarray):
    """An array with a unit, whose methods and attributes are not those of its base class."""

    unit = ""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return "no memory"

    @property
    def shape(self) -> Any:  # type: ignore[override]
        return "metres"

    @property
    def dtype(self) -> Any:  # type: ignore[override]
        return self.unit

    def reshape(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def view(self, *args: Any, **kwargs: Any) -> Any:
        return None


def plain(array: Array) -> Array:
    return np.ndarray.view(array, np.ndarray)


KINDS: dict[str, Callable[[Array], Array]] = {
    "matrix": lambda values: values.view(np.matrix),
    "hostile": lambda values: values.view(Hostile),
    "quantity": lambda values: values.view(Quantity),
}


def every_operation(kind: str, strided: bool) -> None:
    """Operations on arrays of a subclass, which are communicated as plain arrays."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def full(value: float, rows: int = 2) -> Array:
        base = np.full((rows, 6), float(value))
        return KINDS[kind](base[:, ::2] if strided else base[:, :3].copy())

    def result(call: Callable[[], Any], *arrays: Array) -> list[list[float]]:
        Hostile.armed = True
        try:
            call()
        finally:
            Hostile.armed = False
        return [plain(array)[:, 0].tolist() for array in arrays]

    total = float(sum(range(1, size + 1)))
    x = full(rank + 1)
    assert result(lambda: dist.all_reduce(x), x) == [[total] * 2]
    y = full(rank + 1)
    assert result(lambda: dist.broadcast(y, src=1), y) == [[2.0] * 2]
    outs, mine = [full(0) for _ in range(size)], full(rank + 1)
    assert result(lambda: dist.all_gather(outs, mine), *outs) == [[r + 1.0] * 2 for r in range(size)]
    whole = full(0, 2 * size)
    expected = [r + 1.0 for r in range(size) for _ in range(2)]
    assert result(lambda: dist.all_gather_into_tensor(whole, mine), whole) == [expected]
    pair = [full(1), full(2)]
    assert result(lambda: dist.all_reduce_coalesced(pair), *pair) == [[1.0 * size] * 2, [2.0 * size] * 2]
    if rank < 2:
        z = full(rank + 1)
        if rank == 0:
            result(lambda: dist.send(z, 1))
            result(lambda: dist.isend(z, 1).wait())
        else:
            assert result(lambda: dist.recv(z, 0), z) == [[1.0] * 2]
            assert result(lambda: dist.irecv(z, 0).wait(), z) == [[1.0] * 2]


# --- what fails on one rank before anything is sent ------------------------------------------------------------------


class Raises:
    """Raises on access to its memory."""

    def __init__(self, error: type[BaseException], attribute: str) -> None:
        self._what = error, attribute

    def __getattr__(self, name: str) -> Any:
        error, attribute = self._what
        if name == attribute:
            raise error(name)
        raise AttributeError(name)


class RaisesDlpack(Raises):
    def __dlpack__(self, **options: Any) -> Any:
        raise self._what[0]

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def calls_with(bad: Any) -> list[Callable[[Any], Any]]:
    """Calls of each operation of a group with an argument that raises on the calling rank.

    The list of a gather or scatter is not among them: the root alone gives it, and what is wrong with it reaches all.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    other = 1 - rank

    def good() -> Array:
        return np.zeros(3)

    def each() -> list[Any]:
        return [*(good() for _ in range(size - 1)), bad]

    return [
        lambda g: g.all_reduce(bad),
        lambda g: g.all_reduce(bad, async_op=True),
        lambda g: g.broadcast(bad, 0),
        lambda g: g.reduce(bad, 0),
        lambda g: g.all_gather(each(), good()),
        lambda g: g.all_gather([good()], bad),
        lambda g: g.all_gather_into_tensor(bad, good()),
        lambda g: g.gather(bad, [good()] * size, 0),
        lambda g: g.scatter(bad, [good()] * size, 0),
        lambda g: g.reduce_scatter(bad, [good()] * size),
        lambda g: g.reduce_scatter(good(), each()),
        lambda g: g.reduce_scatter_tensor(good(), bad),
        lambda g: g.all_to_all(each(), each()),
        lambda g: g.all_to_all_single(bad, good()),
        lambda g: g.all_reduce_coalesced(each()),
        lambda g: g.broadcast_coalesced(each(), 0),
        lambda g: g.all_gather_coalesced([each()], [good()]),
        lambda g: g.all_gather_into_tensor_coalesced([good()], [bad]),
        lambda g: g.reduce_scatter_tensor_coalesced([bad], [good()]),
        lambda g: g.send(bad, other),
        lambda g: g.recv(bad, other),
        lambda g: g.isend(bad, other),
        lambda g: g.irecv(bad, other),
        lambda g: g.batch_isend_irecv([(True, good(), other, 0), (False, bad, other, 0)]),
        lambda g: g.all_reduce(good(), timeout=bad),
        lambda g: g.all_reduce(good(), op=bad),
        lambda g: g.send(good(), bad),
        lambda g: g.send(good(), other, tag=bad),
        lambda g: g.all_to_all_single(good(), good(), [bad], [bad]),
    ]


def exceptions_of_an_argument() -> list[str]:
    """An argument of rank 0 raises an exception that is no error of the library: the group fails on all ranks."""
    bad_ones: list[Any] = [Raises(KeyboardInterrupt, "__dlpack_device__"), RaisesDlpack(MemoryError, "")]
    bad_ones += [Raises(OSError, "__cuda_array_interface__")]
    wrong = []
    for bad in bad_ones:
        for i, call in enumerate(calls_with(bad)):
            group: Any = dist.new_group()
            raised = [""]
            if dist.get_rank() == 0:
                try:
                    call(group)
                except BaseException as e:
                    raised = ["refused" if isinstance(e, dist.DistError) else type(e).__name__]
            dist.broadcast_object_list(raised, 0)
            x = np.ones(3)
            try:
                group.all_reduce(x, timeout=20)
                found = "refused" if (x == dist.get_world_size()).all() else "wrong"
            except dist.GroupAbortedError as e:
                found = raised[0] if raised[0] in str(e) and "rank 0 " in str(e) else str(e)
            if found != raised[0]:
                wrong.append(f"call {i} with {bad} raised {raised[0]}; then {found}")
            dist.destroy_process_group(group)
    return wrong


def errors_of_one_rank() -> list[str]:
    """Calls that are refused on rank 0; then the group works, and its sequence numbers agree."""
    group: Any = dist.new_group()
    wrong = []
    if dist.get_rank() == 0:
        bad = np.ma.ones(3)
        for i, call in enumerate(calls_with(bad)):
            try:
                call(group)
                wrong.append(f"call {i} with {bad} was accepted")
            except dist.DistArgumentError:
                continue
    x = np.ones(3)
    group.all_reduce(x, timeout=20)
    assert (x == dist.get_world_size()).all()
    numbers = np.zeros(dist.get_world_size(), np.int64)
    group.all_gather_into_tensor(numbers, np.array([group.sequence]))
    assert len(set(numbers.tolist())) == 1, numbers
    if dist.get_rank() == 0:
        group.send(x, 1)
    elif dist.get_rank() == 1:
        group.recv(x, 0)
    dist.destroy_process_group(group)
    return wrong


def _broken(owner: Any, name: str, times: int) -> Callable[[], None]:
    """Make a function of a module or class raise MemoryError in the next calls; returns a function to restore it."""
    kept = getattr(owner, name)
    left = [times]

    def fails(*args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise MemoryError("no room")
        return kept(*args, **kwargs)

    setattr(owner, name, fails)
    return lambda: setattr(owner, name, kept)


def failures_inside() -> None:
    """The backend fails on rank 0 before sending: the other ranks get the error, in later calls, too."""
    rank = dist.get_rank()
    for async_op in (False, True):
        group: Any = dist.new_group()
        group.barrier()  # selects the transport
        # A rank that is still in the barrier when rank 0 fails would get the error there.
        if rank != 0:
            send_word(0)
        else:
            for _ in range(dist.get_world_size() - 1):
                await_word()
        restore = _broken(*_before_sending(group._backends.for_device("cpu")), 1 if rank == 0 else 0)
        expected: type[Exception] = MemoryError if rank == 0 else dist.GroupAbortedError
        error = ""
        try:
            work = group.all_reduce(np.ones(5, np.float32), async_op=async_op, timeout=20)
            if work is not None:
                work.wait()
        except expected as e:
            error = str(e)
        finally:
            restore()
        assert "no room" in error
        try:
            group.barrier(timeout=20)
        except dist.GroupAbortedError as e:
            error = str(e)
        assert "rank 0 " in error
        assert "MemoryError: no room" in error
        dist.destroy_process_group(group)


def _before_sending(backend: Any) -> tuple[Any, str]:
    """The (owner, name) of a function that a backend calls in an all_reduce before sending."""
    if backend.name == "mpi":
        return type(backend.communicator.agreement), "agree"
    return sys.modules[backend._transport.table["all_reduce"].__module__], "kernel_of"


def failures_after_sending() -> None:
    """The backend fails on rank 0 after sending: the other ranks get the error."""
    from unicoll.arrays.kernels import Kernel

    rank = dist.get_rank()
    group: Any = dist.new_group()
    group.barrier()
    restore = _broken(Kernel, "combine", 1 if rank == 0 else 0)
    expected: type[Exception] = MemoryError if rank == 0 else dist.GroupAbortedError
    try:
        for _ in range(2):
            try:
                group.all_reduce(np.ones(5, np.float32), timeout=20)
            except expected:
                return
            except dist.GroupAbortedError:
                return
    finally:
        restore()
        dist.destroy_process_group(group)
    raise AssertionError("it did not fail")
