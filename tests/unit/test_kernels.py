"""Reductions and half types: against definitions, and all ways of computing them against each other, bit by bit."""

from __future__ import annotations

import contextvars
import importlib
import itertools
import math
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from unicoll.arrays import half_precision
from unicoll.arrays.kernels import kernel_for, quiet_runner
from unicoll.arrays.types import BY_NAME, DTYPES, ReduceOp, Reduction
from unicoll.errors import DistTypeError

Array = npt.NDArray[Any]

PACKAGES = ("numpy", "ml_dtypes", "torch")
HALVES = ("bfloat16", "float16")
FORMATS = {"bfloat16": (8, 7), "float16": (5, 10)}
"""Bits of the exponent and of the mantissa."""
NAN = {"bfloat16": 0x7FC0, "float16": 0x7E00}
OPS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PREMUL_SUM(0.3))
BORDERS = (
    1,
    4,
    511,
    513,
    4097,
    *(half_precision.BLOCK + i for i in (-1, 0, 1)),
    2 * half_precision.BLOCK + 5,
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Warnings off, as in all callers of kernels."""
    with np.errstate(all="ignore"):
        yield


def use(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Convert with the conversions of one package, or with NumPy only."""
    for name, make in (("ml_dtypes", half_precision._of_ml_dtypes), ("torch", half_precision._of_torch)):
        if name == package:
            pytest.importorskip(name)
        module = name if name == package else "unicoll.there_is_no_such_module"
        monkeypatch.setattr(half_precision, f"_{name}", half_precision._Package(module, make))


@pytest.fixture(params=[pytest.param(w, marks=[pytest.mark.torch] if w == "torch" else []) for w in PACKAGES])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use(monkeypatch, request.param)
    return str(request.param)


# --- the definition of a half type --------------------------------------------------------------------------------


def magnitudes_of(name: str) -> Array:
    """The magnitude of every code from zero to infinity; infinity's is the next power after the largest number."""
    exponents, mantissas = FORMATS[name]
    codes = np.arange((((1 << exponents) - 1) << mantissas) + 1)
    exponent, mantissa = codes >> mantissas, codes & ((1 << mantissas) - 1)
    implicit = np.where(exponent > 0, 1 << mantissas, 0)
    bias = (1 << (exponents - 1)) - 1
    return np.ldexp((mantissa + implicit).astype(np.float64), np.maximum(exponent, 1) - bias - mantissas)


def nearest(name: str, values: Array) -> Array:
    """The codes that float32 values round to, by comparison with the midpoints of neighbouring values."""
    steps = magnitudes_of(name)
    size = np.minimum(np.abs(values.astype(np.float64)), steps[-1])
    lower = np.minimum(np.searchsorted(steps, size, side="right") - 1, steps.size - 2)
    middle = (steps[lower] + steps[lower + 1]) / 2
    codes = lower + ((size > middle) | ((size == middle) & (lower % 2 == 1)))
    codes = np.where(np.signbit(values), codes | 0x8000, codes)
    return np.where(np.isnan(values), NAN[name], codes).astype(np.uint16)


def decoded(name: str, codes: Array) -> Array:
    """The float32 values of codes."""
    steps = magnitudes_of(name)
    steps[-1] = np.inf
    magnitudes = np.concatenate([steps, np.full(0x8000 - steps.size, np.nan)])
    signed: Array = np.copysign(magnitudes[codes & 0x7FFF], np.where(codes & 0x8000, -1.0, 1.0))
    return signed.astype(np.float32)


def stored(name: str, codes: Array) -> Array:
    return codes.view(BY_NAME[name].storage)


def codes_of(array: Array) -> Array:
    return array.view(np.uint16)


ALL = np.arange(1 << 16, dtype=np.uint16)


def difficult(name: str) -> Array:
    """Every value of the type, every tie between two, their neighbours; infinities, many NaNs; random bits."""
    steps = magnitudes_of(name)
    exact = np.concatenate([steps[:-1], (steps[:-1] + steps[1:]) / 2]).astype(np.float32)
    up, down = np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(0))
    extremes = np.array([np.inf, 3.4028235e38, 65536, 65520, 65519.996, 1e-45, 1.17549435e-38], np.float32)
    nans = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7FC00001, 0x7F80FFFF], np.uint32).view(np.float32)
    positive = np.concatenate([exact, up, down, extremes, nans])
    rng = np.random.default_rng(5)
    random = rng.integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
    return np.concatenate([positive, -positive, random])


def converted(convert: half_precision.Convert, values: Array, out: Array, step: int) -> Array:
    for start in range(0, values.size, step):
        convert(values[start : start + step], out[start : start + step])
    return out


STEPS = (half_precision.BLOCK, 5000, 3000, 700, 100)
"""Numbers of elements for which different conversions are chosen."""


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", HALVES)
def test_widening_is_exact(name: str, step: int, package: str) -> None:
    given = stored(name, ALL.copy())
    wide = converted(half_precision.HALVES[name].widen, given, np.empty(ALL.size, np.float32), step)
    expected = decoded(name, ALL)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(wide), nan)
    assert np.array_equal(wide[~nan].view(np.uint32), expected[~nan].view(np.uint32))


@pytest.mark.every(n=2)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", HALVES)
def test_narrowing_rounds_to_the_nearest_even(name: str, step: int, package: str) -> None:
    """Overflow and NaN have separate code paths; the blocks of the second array contain neither."""
    narrow = half_precision.HALVES[name].narrow
    every = difficult(name)
    for values in (every, every[np.abs(every) < magnitudes_of(name)[-2]]):
        assert values.size > 100_000
        kept = values.copy()
        got = converted(narrow, values, stored(name, np.empty(values.size, np.uint16)), step)
        expected = nearest(name, values)
        wrong = np.flatnonzero(codes_of(got) != expected)
        assert not wrong.size, (values[wrong[0]], codes_of(got)[wrong[0]], expected[wrong[0]])
        assert np.array_equal(values.view(np.uint32), kept.view(np.uint32))


@pytest.mark.torch
@pytest.mark.parametrize("way_of_half", ["numpy", "torch"])
@pytest.mark.parametrize("name", HALVES)
def test_flushing_subnormals_does_not_change_results(
    name: str, way_of_half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    use(monkeypatch, way_of_half)
    half, values = half_precision.HALVES[name], difficult("float16")
    values = values[np.abs(values) < magnitudes_of("float16")[-2]]
    expected = nearest(name, values)
    narrow, wide = stored(name, np.empty(values.size, np.uint16)), np.empty(ALL.size, np.float32)
    converted(half.narrow, values[:10000], narrow[:10000], half_precision.BLOCK)  # the package is checked now
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormals")
    try:
        converted(half.narrow, values, narrow, half_precision.BLOCK)
        converted(half.widen, stored(name, ALL.copy()), wide, half_precision.BLOCK)
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(codes_of(narrow), expected)
    exact = decoded(name, ALL)
    assert np.array_equal(wide.view(np.uint32)[exact == exact], exact[exact == exact].view(np.uint32))


# --- packages ---------------------------------------------------------------------------------------------------------


def test_packages_with_correct_conversions_are_used(package: str) -> None:
    expected = {
        "numpy": [],
        "ml_dtypes": ["widen bfloat16", "narrow bfloat16"],
        "torch": ["widen float16", "narrow float16", "narrow bfloat16"],
    }
    for each in (half_precision._ml_dtypes, half_precision._torch):
        wanted = expected[package] if each.name == package else []
        assert [name for name in half_precision._CHECKS if each.conversion(name)] == sorted(
            wanted, key=list(half_precision._CHECKS).index
        )


def _fake(
    monkeypatch: pytest.MonkeyPatch, conversions: dict[str, half_precision.Convert]
) -> half_precision._Package:
    monkeypatch.setitem(sys.modules, "fake_package", types.ModuleType("fake_package"))
    return half_precision._Package("fake_package", lambda module: conversions)


def _truncating(values: Array, out: Array) -> None:
    out[...] = values.view(np.uint32) >> 16


def _flushing(values: Array, out: Array) -> None:
    half_precision._widen_bfloat16(np.where(values & 0x7F80, values, 0).astype(np.uint16), out)


def _broken(*_: Any) -> Any:
    raise RuntimeError("built for another NumPy")


def test_a_package_with_wrong_conversions_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, wrong in (
        ("narrow bfloat16", _truncating),
        ("widen bfloat16", _flushing),
        ("narrow float16", _broken),
    ):
        right = half_precision._widen_bfloat16 if name == "narrow bfloat16" else half_precision._cast
        other = "widen bfloat16" if name == "narrow bfloat16" else "widen float16"
        package = _fake(monkeypatch, {name: wrong, other: right})
        assert package.conversion(name) is None
        assert package.conversion(other) is right
    assert half_precision._Package("fake_package", _broken).conversion("narrow float16") is None


def test_a_package_imported_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    package = half_precision._Package("fake_package", lambda module: {"narrow float16": half_precision._cast})
    assert package.conversion("narrow float16") is None
    module = types.ModuleType("fake_package")
    module.__spec__ = importlib.machinery.ModuleSpec("fake_package", None)
    module.__spec__._initializing = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_package", module)
    assert package.conversion("narrow float16") is None
    module.__spec__._initializing = False  # type: ignore[attr-defined]
    assert package.conversion("narrow float16") is half_precision._cast


@pytest.mark.torch
@pytest.mark.parametrize("name", HALVES)
def test_torch_modes_and_read_only_memory_are_respected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Forbid(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("the reduction is visible to a torch mode")

    use(monkeypatch, "torch")
    rng = np.random.default_rng(0)
    pieces = [stored(name, nearest(name, rng.standard_normal(9000).astype(np.float32))) for _ in range(2)]
    kernel = kernel_for(BY_NAME[name], ReduceOp.SUM)
    expected, got = folded(name, ReduceOp.SUM, pieces), np.empty_like(pieces[0])
    for loaded in (False, True):
        with Forbid():
            kernel.combine(pieces, got, disjoint=True)
            assert bool(half_precision._torch.conversion(f"narrow {name}")) == loaded
        assert np.array_equal(codes_of(got), expected)
        kernel.combine(pieces, got, disjoint=True)
        assert half_precision._torch.conversion(f"narrow {name}")
    for piece in pieces:
        piece.flags.writeable = False
    kernel.combine(pieces, got, disjoint=True)
    assert np.array_equal(codes_of(got), expected)


# --- reductions of half types ---------------------------------------------------------------------------------------


def specials(name: str, ranks: int, size: int, seed: int = 0) -> list[Array]:
    """Contributions of numbers, subnormals, zeros of both signs, infinities and NaNs."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(ranks):
        codes = nearest(
            name, (rng.standard_normal(size) * 10.0 ** rng.integers(-6, 4, size)).astype(np.float32)
        )
        odd = rng.random(size) < 0.3
        codes = np.where(odd, rng.integers(0, 1 << 16, size).astype(np.uint16), codes)
        result.append(stored(name, codes))
    return result


def folded(name: str, op: Reduction, pieces: list[Array]) -> Array:
    """The codes of the reduction: in rank order, each step in float32, one rounding."""
    wide = [decoded(name, codes_of(p)) for p in pieces]
    if op.factor is not None:
        wide = [w * np.float32(op.factor) for w in wide]
    fold = {"PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}.get(op.name, np.add)
    acc = wide[0]
    for w in wide[1:]:
        acc = fold(acc, w)
    if op.name == "AVG":
        acc = acc / np.float32(len(pieces))
    return nearest(name, acc)


@pytest.mark.every(n=4)
@pytest.mark.parametrize("op", OPS, ids=str)
@pytest.mark.parametrize("name", HALVES)
def test_half_types_accumulate_in_float32(name: str, op: Reduction, package: str) -> None:
    kernel = kernel_for(BY_NAME[name], op)
    for ranks, size in itertools.chain(((2, s) for s in BORDERS), ((r, 5000) for r in (1, 3, 4, 7))):
        pieces = specials(name, ranks, size, seed=size)
        out = np.empty_like(pieces[0])
        kernel.combine(pieces, out, disjoint=True)
        assert np.array_equal(codes_of(out), folded(name, op, pieces)), (ranks, size)


# --- all types --------------------------------------------------------------------------------------------------------


NATIVE = tuple(d.name for d in DTYPES if d.native and d.name not in ("bool", "float16"))


def numbers(name: str, ranks: int, size: int) -> list[Array]:
    rng = np.random.default_rng(size)
    dtype = BY_NAME[name].storage
    if dtype.kind in "ui":
        info = np.iinfo(dtype)
        return [rng.integers(info.min // ranks, info.max // ranks, size, dtype) for _ in range(ranks)]
    parts = [rng.standard_normal(size) + 1j * rng.standard_normal(size) for _ in range(ranks)]
    return [(p if dtype.kind == "c" else p.real).astype(dtype) for p in parts]


def reference(op: Reduction, pieces: list[Array]) -> Array:
    dtype, ranks = pieces[0].dtype, len(pieces)
    if op.name == "AVG" and dtype.kind in "ui":
        columns = zip(*(p.tolist() for p in pieces), strict=True)
        return np.array([int(Fraction(sum(column), ranks)) for column in columns], dtype)
    if op.factor is not None:
        pieces = [p * dtype.type(op.factor) for p in pieces]
    fold = {"PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}.get(op.name, np.add)
    acc = pieces[0].copy()
    for piece in pieces[1:]:
        acc = fold(acc, piece)
    if op.name != "AVG":
        return acc
    part = acc.real.dtype if dtype.kind == "c" else dtype
    return (acc.view(part) / part.type(ranks)).view(dtype)


def _ops(name: str) -> list[Reduction]:
    kind = BY_NAME[name].kind
    factor = {"c": 0.5 - 1.5j, "f": 0.3}.get(kind, 3)
    ops = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.PREMUL_SUM(factor)]
    return ops if kind == "c" else [*ops, ReduceOp.MIN, ReduceOp.MAX]


@pytest.mark.parametrize("name", NATIVE)
def test_reductions_match_numpy(name: str) -> None:
    step = half_precision.BLOCK * 4 // BY_NAME[name].itemsize
    for op, (ranks, size) in itertools.product(
        _ops(name), ((1, 5), (2, 3), (2, step + 1), (3, 7), (3, step), (5, 2 * step + 3))
    ):
        pieces = numbers(name, ranks, size)
        if op.name == "AVG" and BY_NAME[name].kind in "ui":
            size = min(size, 2000)
            pieces = [p[:size] for p in pieces]
        expected = reference(op, pieces)
        for apart in (True, False):
            out = np.empty_like(expected)
            kernel_for(BY_NAME[name], op).combine(pieces, out, disjoint=apart)
            assert out.tobytes() == expected.tobytes(), (op, ranks, size, apart)


@pytest.mark.every(n=2)
@pytest.mark.parametrize("size", [3, 5000, half_precision.BLOCK + 3])
@pytest.mark.parametrize("name", ["float32", "float64", "int32", "complex64", *HALVES])
def test_the_result_may_overwrite_a_contribution(name: str, size: int) -> None:
    for op, ranks in itertools.product(_ops(name), (1, 2, 3, 4)):
        given = specials(name, ranks, size) if name in HALVES else numbers(name, ranks, size)
        kernel, expected = kernel_for(BY_NAME[name], op), np.empty_like(given[0])
        kernel.combine(given, expected, disjoint=True)
        for place in range(ranks):
            pieces = [p.copy() for p in given]
            kernel.combine(pieces, pieces[place])
            assert pieces[place].tobytes() == expected.tobytes(), (op, ranks, place)
            for i in set(range(ranks)) - {place}:
                assert pieces[i].tobytes() == given[i].tobytes(), (op, ranks, place)


@pytest.mark.parametrize("name", ["float32", "int64", "uint8", "complex128", *HALVES])
def test_folding_step_by_step_is_the_same(name: str) -> None:
    for op, size in itertools.product(_ops(name), (0, 6, half_precision.BLOCK + 9)):
        pieces = specials(name, 4, size) if name in HALVES else numbers(name, 4, size)
        kernel, expected = kernel_for(BY_NAME[name], op), np.empty_like(pieces[0])
        if kernel.at_once:
            continue
        kernel.combine(pieces, expected, disjoint=True)
        begun = np.empty(size, kernel.acc)
        kernel.begin(begun, pieces[0])
        widened = kernel.widen(pieces[0])
        assert widened.dtype == kernel.acc
        assert np.array_equal(widened, begun, equal_nan=kernel.acc.kind in "fc")
        for piece in pieces[1:]:
            kernel.reduce_into(begun, piece)
        kept, out = begun.copy(), np.empty_like(expected)
        kernel.finish(begun, out, 4)
        assert out.tobytes() == expected.tobytes(), op
        assert begun.tobytes() == kept.tobytes(), op
        if name not in HALVES:
            kernel.finish(begun, begun, 4)
            assert begun.tobytes() == expected.tobytes(), op


@pytest.mark.parametrize("ranks", [1, 2, 3, 127, 128, 129, 300])
def test_integer_averages_are_exact_and_round_towards_zero(ranks: int) -> None:
    for name in (name for name in NATIVE if BY_NAME[name].kind in "ui"):
        dtype = BY_NAME[name].storage
        info, rng = np.iinfo(dtype), np.random.default_rng(ranks)
        pieces = [rng.integers(info.min, info.max, 300, dtype, endpoint=True) for _ in range(ranks)]
        for i, (first, others) in enumerate(
            itertools.product((info.min, info.min + 1, 0, 1, info.max), repeat=2)
        ):
            for piece in pieces:
                piece[i] = others
            pieces[0][i] = first
        out = np.empty(300, dtype)
        kernel_for(BY_NAME[name], ReduceOp.AVG).combine(pieces, out)
        assert out.tobytes() == reference(ReduceOp.AVG, pieces).tobytes(), name


def test_averages_equal_divisions_bitwise() -> None:
    """Of complex numbers part by part: an infinite part does not change the other."""
    pieces = [np.array([complex(np.inf, 2.0)], np.complex64), np.array([complex(1.0, 4.0)], np.complex64)]
    out = np.empty(1, np.complex64)
    kernel_for(BY_NAME["complex64"], ReduceOp.AVG).combine(pieces, out)
    assert (out[0].real, out[0].imag) == (np.inf, 3.0)
    values = difficult("bfloat16")
    values = values[values == values]
    for ranks in (2, 3, 4, 7, 8, 1024):
        out = np.empty_like(values)
        kernel_for(BY_NAME["float32"], ReduceOp.AVG).finish(values, out, ranks)
        assert np.array_equal(out.view(np.uint32), (values / np.float32(ranks)).view(np.uint32))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_unsupported_types_raise(name: str) -> None:
    with pytest.raises(DistTypeError, match=f"SUM of {name}"):
        kernel_for(BY_NAME[name], ReduceOp.SUM)


@pytest.mark.parametrize("name", ["float32", *HALVES])
def test_threads_have_separate_scratch_memory(name: str, package: str) -> None:
    size, turns = 2 * half_precision.BLOCK + 7, 15
    begin = threading.Barrier(2, timeout=30)

    def reduce(seed: int) -> bool:
        with np.errstate(all="ignore"):
            pieces = specials(name, 3, size, seed) if name in HALVES else numbers(name, 3, size + seed)
            kernel, out = kernel_for(BY_NAME[name], ReduceOp.AVG), np.empty_like(pieces[0])
            fold = folded(name, ReduceOp.AVG, pieces) if name in HALVES else reference(ReduceOp.AVG, pieces)
            begin.wait()
            for _ in range(turns):
                kernel.combine(pieces, out)
                if out.tobytes() != fold.tobytes():
                    return False
            return True

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(reduce, (1, 2)))


# --- warnings ---------------------------------------------------------------------------------------------------------


Run = Callable[..., Any]


@pytest.fixture(params=[np.__version__, "1.26.4"], ids=["installed", "numpy-1"])
def quiet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A quiet_runner as for the installed NumPy and as for NumPy 1; outside it warnings are errors."""
    monkeypatch.setattr(np, "__version__", request.param)
    with np.errstate(all="raise"):
        yield quiet_runner()


def overflow(times: int = 1) -> float:
    """Raises unless warnings are off."""
    big = np.full(3, 3e38, np.float32)
    return float((big * np.float32(10 * times))[0])


def test_warnings_are_off_within_a_call_only(quiet: Run) -> None:
    for _ in range(3):
        with pytest.raises(FloatingPointError):
            overflow()
        assert quiet(overflow, 2) == np.inf
    assert set(np.geterr().values()) == {"raise"}


def test_results_and_exceptions_pass_through(quiet: Run) -> None:
    def fail() -> None:
        raise RuntimeError("not a context's")

    assert quiet(divmod, 7, 3) == (2, 1)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="not a context's"):
            quiet(fail)
    assert quiet(overflow) == np.inf


def test_context_variables_of_the_caller_are_not_kept() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("outside")

    def look() -> str:
        seen = variable.get()
        variable.set("inside")
        return seen

    in_context = int(np.__version__.partition(".")[0]) >= 2
    assert quiet_runner()(look) == ("unset" if in_context else "outside")
    assert variable.get() == ("outside" if in_context else "inside")


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (-1.0, -2.0, False),
        (0.0, -0.0, False),
        (2**60 + 1, 2**60, False),
        (1 + 2j, 1 - 2j, False),
        (2, 2.0, True),
        (math.nan, float("nan"), True),
        (np.float32(0.5), 0.5, True),
    ],
)
def test_factors_are_compared_by_their_bits(first: Any, second: Any, equal: bool) -> None:
    one, other = ReduceOp.PREMUL_SUM(first), ReduceOp.PREMUL_SUM(second)
    assert (one == other) == (hash(one.key) == hash(other.key)) == equal
