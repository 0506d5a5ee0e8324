"""The conformance suite's oracle: it accepts what the backends' arithmetics give, and nothing that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nccl_comm.library.nccl import nccl_reduction
from tests.simulated_nccl import reductions
from tests.simulated_nccl.reductions import Signature
from unicoll.arrays.kernels import kernel_for, quiet_runner
from unicoll.arrays.types import BY_NAME, DTYPES
from unicoll.calls.reduce_ops import supported_reductions
from unicoll.device_collectives.reductions import factor_bytes
from unicoll.testing.conformance import has
from unicoll.testing.reference import (
    NCCL,
    STRICT,
    Arithmetic,
    complaint,
    factor_of,
    numpy_dtype,
    reduction_of,
    values,
)

_COUNT = 1000
_NCCL = 23007
_quietly = quiet_runner()
Array = Any


def _given(
    name: str, reduction: str, ranks: int, special: bool = False, seed: int = 0, scale: float = 1
) -> list[Array]:
    rng = np.random.default_rng([seed, ranks])
    made = [values(name, reduction, (_COUNT,), rng, special) for _ in range(ranks)]
    with np.errstate(all="ignore"):
        return made if scale == 1 else [(x.astype(np.float32) * scale).astype(x.dtype) for x in made]


def _by_kernel(name: str, reduction: str, given: list[Array]) -> Array:
    """What the CPU backend computes."""
    dtype = BY_NAME[name]
    out = np.empty(_COUNT, dtype.storage)
    pieces = [x.view(dtype.storage) for x in given]
    _quietly(kernel_for(dtype, reduction_of(reduction, name)).combine, pieces, out, True)
    return out.view(given[0].dtype)


def _by_nccl(name: str, reduction: str, given: list[Array]) -> Array:
    """What NCCL computes, on every rank."""
    how = nccl_reduction(BY_NAME[name], reduction_of(reduction, name), _NCCL)
    assert how is not None
    factor = factor_bytes(BY_NAME[name], float(factor_of(name).real)) if how.has_factor else None
    signature = Signature("all_reduce", _COUNT * how.parts, how.type, how.op)
    whole, *others = reductions.results(signature, [(x.tobytes(), factor) for x in given])
    assert set(others) <= {whole}
    return np.frombuffer(whole, given[0].dtype)


def _by_truncation(name: str, reduction: str, given: list[Array]) -> Array:
    """What oneCCL computes without AVX-512, in bfloat16."""
    one_by_one = np.multiply if reduction == "PRODUCT" else np.add
    bits = given[0].view(np.uint16)
    for x in given[1:]:
        partial, term = (
            np.left_shift(b, 16, dtype=np.uint32).view(np.float32) for b in (bits, x.view(np.uint16))
        )
        with np.errstate(all="ignore"):
            bits = (one_by_one(partial, term).view(np.uint32) >> 16).astype(np.uint16)
    total: Array = bits.view(given[0].dtype)
    return (total / given[0].dtype.type(len(given))).astype(total.dtype) if reduction == "AVG" else total


def _pairs(backend: str) -> Iterator[tuple[str, str]]:
    """Element types and reductions that a backend has."""
    if backend == "oneccl":
        yield from (("bfloat16", each) for each in ("SUM", "PRODUCT", "AVG") if has("bfloat16"))
        return
    for dtype in DTYPES:
        for reduction in supported_reductions()[dtype.name] if has(dtype.name) else ():
            if backend == "cpu":
                known = not dtype.name.startswith("float8")
            else:
                known = nccl_reduction(dtype, reduction_of(reduction, dtype.name), _NCCL) is not None
            if known:
                yield dtype.name, reduction


_BACKENDS: dict[str, tuple[Callable[[str, str, list[Array]], Array], Arithmetic]] = {
    "cpu": (_by_kernel, STRICT),
    "nccl": (_by_nccl, NCCL),
    "oneccl": (_by_truncation, replace(NCCL, truncates=True)),
}


@pytest.mark.every(n=2)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("backend", _BACKENDS)
def test_what_a_backend_computes_is_right(backend: str, ranks: int) -> None:
    compute, arithmetic = _BACKENDS[backend]
    for name, reduction in _pairs(backend):
        scales = (1, 1e-3, 60, 3e4) if BY_NAME[name].half else (1,)
        for special in (False, True):
            for scale in scales:
                given = _given(name, reduction, ranks, special, scale=scale)
                wrong = complaint(name, reduction, given, compute(name, reduction, given), arithmetic)
                assert wrong is None, (name, reduction, special, scale, wrong)


@pytest.mark.parametrize(
    ("name", "reduction", "ranks", "special"),
    [
        ("float16", "PREMUL_SUM", 2, False),
        ("float16", "SUM", 3, False),
        ("bfloat16", "SUM", 4, False),
        ("bfloat16", "PRODUCT", 4, False),
        ("float16", "AVG", 3, False),
        ("float8_e4m3fn", "AVG", 3, False),
        ("float8_e5m2", "MAX", 2, True),
        ("float32", "MIN", 2, True),
        ("float64", "MAX", 4, True),
    ],
)
def test_nccl_is_not_held_to_the_arithmetic_of_the_cpu(
    name: str, reduction: str, ranks: int, special: bool
) -> None:
    if not has(name):
        pytest.skip("needs ml_dtypes")
    given = _given(name, reduction, ranks, special)
    got = _by_nccl(name, reduction, given)
    assert complaint(name, reduction, given, got) is not None
    assert complaint(name, reduction, given, got, NCCL) is None


@pytest.mark.parametrize("reduction", ["SUM", "PRODUCT", "AVG"])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_the_ranks_may_be_taken_in_any_order(name: str, reduction: str) -> None:
    """NCCL has trees, too; here any two partial results are put together, and some not rounded."""
    if not has(name):
        pytest.skip("needs ml_dtypes")
    rng, numbers = np.random.default_rng(5), reductions.Numbers(name)
    for ranks in (3, 4, 7, 8):
        given = _given(name, reduction, ranks, seed=ranks, scale=rng.choice([0.01, 1, 8]))
        terms = [x.astype(np.float32) for x in given]
        if reduction == "AVG":
            inverse = numbers.rounded(np.float32(1 / ranks))
            terms = [numbers.rounded(x * inverse) for x in terms]
        with np.errstate(all="ignore"):
            while len(terms) > 1:
                a, b = (terms.pop(int(rng.integers(len(terms)))) for _ in range(2))
                both = a * b if reduction == "PRODUCT" else a + b
                terms.append(numbers.rounded(both) if rng.random() < 0.7 else both)
            got = numbers.rounded(terms[0]).astype(given[0].dtype)
        assert complaint(name, reduction, given, got, NCCL) is None


# --- errors ---------------------------------------------------------------------------------------------------------


def _wrong_element(name: str, reduction: str, got: Array, given: list[Array], compute: Any) -> Array:
    wide = got.astype(np.float64) if got.dtype.kind != "c" else got
    wrong = got.copy()
    wrong[np.argmax(np.abs(wide))] = got[np.argmin(np.abs(wide))]
    return wrong


def _missing(name: str, reduction: str, got: Array, given: list[Array], compute: Any) -> Array:
    neutral = given[0] if reduction in ("MIN", "MAX", "BAND", "BOR") else np.zeros(_COUNT, given[0].dtype)
    return compute(name, reduction, [*given[:-1], neutral])


def _twice(name: str, reduction: str, got: Array, given: list[Array], compute: Any) -> Array:
    return compute(name, reduction, [*given[:-1], given[0]])


def _shifted(name: str, reduction: str, got: Array, given: list[Array], compute: Any) -> Array:
    return np.roll(got, 1)


_ERRORS = {
    "a wrong element": _wrong_element,
    "a missing contribution": _missing,
    "a contribution in place of another": _twice,
    "shifted": _shifted,
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("error", _ERRORS)
@pytest.mark.parametrize("backend", _BACKENDS)
def test_an_error_is_found(backend: str, error: str, ranks: int) -> None:
    compute, arithmetic = _BACKENDS[backend]
    for name, reduction in _pairs(backend):
        given = _given(name, reduction, ranks, seed=1)
        got = compute(name, reduction, given)
        wrong = _ERRORS[error](name, reduction, got, given, compute)
        assert complaint(name, reduction, given, wrong, arithmetic) is not None, (name, reduction)


@pytest.mark.parametrize("backend", _BACKENDS)
def test_an_average_is_divided_by_the_number_of_ranks_once(backend: str) -> None:
    compute, arithmetic = _BACKENDS[backend]
    for name in (name for name, reduction in _pairs(backend) if reduction == "AVG"):
        for ranks in (2, 3, 4):
            given = _given(name, "AVG", ranks, seed=2)
            whole = compute(name, "SUM", given)
            got = compute(name, "AVG", given)
            assert complaint(name, "AVG", given, got, arithmetic) is None
            assert complaint(name, "AVG", given, whole, arithmetic) is not None, (name, ranks)
            again = (got / np.asarray(ranks, got.dtype)).astype(got.dtype)
            assert complaint(name, "AVG", given, again, arithmetic) is not None, (name, ranks)


@pytest.mark.parametrize("reduction", ["SUM", "PRODUCT", "AVG", "PREMUL_SUM"])
@pytest.mark.parametrize("arithmetic", [STRICT, NCCL])
@pytest.mark.parametrize(
    ("name", "shorter"),
    [
        ("float64", "float32"),
        ("float32", "float16"),
        ("float32", "bfloat16"),
        ("float16", "bfloat16"),
        ("complex128", "complex64"),
        ("bfloat16", "float8_e4m3fn"),
        ("float16", "float8_e4m3fn"),
    ],
)
def test_a_type_is_not_computed_in_a_shorter_one(
    name: str, shorter: str, arithmetic: Arithmetic, reduction: str
) -> None:
    if not (has(name) and has(shorter)):
        pytest.skip("needs ml_dtypes")
    for ranks in (2, 4):
        given = _given(name, reduction, ranks, seed=3)
        got = _by_kernel(name, reduction, given).astype(numpy_dtype(shorter)).astype(given[0].dtype)
        assert complaint(name, reduction, given, got, arithmetic) is not None


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_sum_is_rounded_to_the_nearest(name: str) -> None:
    """Cut off in place of rounded, a sum of two is off by more than half a unit."""
    if not has(name):
        pytest.skip("needs ml_dtypes")
    given = _given(name, "SUM", 2, seed=4)
    exact = given[0].astype(np.float64) + given[1].astype(np.float64)
    got = exact.astype(given[0].dtype)
    further = np.abs(got.astype(np.float64)) > np.abs(exact)
    cut = np.where(further, np.nextafter(got, np.zeros_like(got)), got)
    assert complaint(name, "SUM", given, cut, NCCL) is not None
    assert complaint(name, "SUM", given, got, NCCL) is None


@pytest.mark.parametrize(
    "name", ["float16", "bfloat16", "float32", "float64", "float8_e5m2", "float8_e4m3fn"]
)
def test_nan_and_infinity_come_from_somewhere(name: str) -> None:
    if not has(name):
        pytest.skip("needs ml_dtypes")
    for reduction in ("SUM", "PRODUCT", "AVG", "MIN", "MAX"):
        given = _given(name, reduction, 3, seed=6)
        got = _by_nccl(name, reduction, given)
        for odd in (np.nan, np.inf, -np.inf, 448):
            wrong = got.copy()
            wrong[17] = np.asarray(odd).astype(got.dtype)
            assert complaint(name, reduction, given, wrong, NCCL) is not None, (reduction, odd)


@pytest.mark.parametrize("name", ["float16", "float32", "float8_e5m2"])
def test_a_nan_is_dropped_by_min_and_max_alone(name: str) -> None:
    if not has(name):
        pytest.skip("needs ml_dtypes")

    def array(*numbers: float) -> Array:
        return np.array(numbers).astype(numpy_dtype(name))

    given = [array(np.nan, 1, 2), array(3, np.nan, 1)]
    for reduction, numbers in (("MIN", (3, 1, 1)), ("MAX", (3, 1, 2))):
        assert complaint(name, reduction, given, array(*numbers), NCCL) is None
        assert complaint(name, reduction, given, array(np.nan, np.nan, numbers[2]), NCCL) is None
        assert complaint(name, reduction, given, array(*numbers)) is not None
        assert complaint(name, reduction, given, array(np.nan, np.nan, numbers[2])) is None
        assert complaint(name, reduction, given, array(*numbers[:2], np.nan), NCCL) is not None
        assert complaint(name, reduction, given, array(1, *numbers[1:]), NCCL) is not None
    for reduction, numbers in (("SUM", (3, 1, 3)), ("PRODUCT", (3, 1, 2))):
        assert complaint(name, reduction, given, array(*numbers), NCCL) is not None
        assert complaint(name, reduction, given, array(np.nan, np.nan, numbers[2]), NCCL) is None
