"""The conformance suite: which cases every backend must pass. A backend's test module subclasses
:class:`Conformance`.

    from unicoll.testing import Conformance

    class TestMine(Conformance):
        backend = "mine"

The small product (operation x dtype x reduction x sync/async) is covered whole for every group
size; sizes, layouts, sub-groups, places and families are drawn at random on top of it, from a seed
that is printed.

One run does a part of that (:mod:`sampling`, by the same seed): for each backend or transport,
every operation with every element type and reduction, sync and async, in two of the group sizes;
every layout sync or async; around every switch and with large arrays in one of the group sizes. The
transports of the CPU backend run disjoint parts, which together are the whole suite. The two MPI
libraries also run disjoint parts, except that each runs two of three group sizes around the
switches.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

from unicoll.arrays.types import BY_NAME, DTYPES
from unicoll.backend.contract import Caps
from unicoll.backend.host import available
from unicoll.calls.ops import OPS, Arity, Sizes
from unicoll.calls.reduce_ops import supported_reductions
from unicoll.group import registry
from unicoll.testing import conformance_jobs as jobs
from unicoll.testing import reference, sampling
from unicoll.testing.cases import Case, run_cases
from unicoll.testing.families import NumpyFamily, TorchFamily, layouts
from unicoll.testing.ranks import Pool, Runner, pools
from unicoll.testing.sampling import SEED_VARIABLE, sample_seed, sampled

COLLECTIVES = [name for name, row in OPS.items() if not row.message]
DATA = [name for name in COLLECTIVES if OPS[name].moves_data]
REDUCING = [name for name in DATA if OPS[name].reduces]
SIZES = (1, 2, 3, 4, 7)

_SCALARS = [name for name in DATA if not (OPS[name].sizes is Sizes.EXCHANGED and OPS[name].joined)]
"""Operations on arrays without dimensions, which cannot be cut into parts for the ranks."""
_IN_PLACE = [
    name for name in DATA if not OPS[name].in_place and OPS[name].sizes is not Sizes.EXCHANGED
]
"""Operations whose output may be a part of the input, or the other way round."""


Pools = Callable[[int], Runner]


_TYPES = [d.name for d in DTYPES]
_MOVED = ["float8_e4m3fnuz", "uint4", "complex32"]
"""Examples of the types that are moved, and not reduced."""


def has(dtype: str) -> bool:
    """Whether NumPy arrays of the type can be made here (ml_dtypes has those that NumPy lacks)."""
    return reference.numpy_dtype(dtype) is not None


class Conformance:
    """Subclasses give the backend's facts; pytest runs what they inherit.

    Ranks are processes of this host that join by ``init_process_group(backend)``. Where they have
    to be started in another way, a subclass has a fixture ``pool`` of its own: a function of the
    number of ranks that returns a :class:`unicoll.testing.ranks.Runner`, see
    :func:`unicoll.testing.ranks.pools`.
    """

    backend: str = ""
    """Name of the backend that all ranks join with."""
    imports: Sequence[str] = ()
    """Modules that register the backend when they are imported; none where an entry point does."""
    families: Sequence[str] = ("numpy",)
    arithmetic = reference.STRICT
    """What the backend's documentation leaves open in reductions, a
    :class:`reference.Arithmetic`."""
    sample = 60
    """Random cases for each operation and group size."""
    turn = 0
    """Which part of the tables a run does, see :mod:`sampling`: other classes of the same suite
    have other numbers."""
    whole: Sequence[str] = ()
    """Tests of which a run does everything all the same."""
    sizes: Sequence[int] = SIZES
    switch_sizes: Sequence[int] = (2, 3, 4)
    large_sizes: Sequence[int] = (2, 3)
    coalesced_sizes: Sequence[int] = (1, 2, 3, 4)
    barrier_sizes: Sequence[int] = (1, 2, 3, 7)
    """Group sizes of the tests; a backend may have reasons for others."""
    layouts: Sequence[str] = (*NumpyFamily.layouts, "scalar")

    @classmethod
    def axes(cls, test: str) -> dict[str, Sequence[Any]]:
        """Parameters of a test and their values, where these depend on the backend."""
        known: dict[str, dict[str, Sequence[Any]]] = {
            "test_every_type_and_reduction": {"op": cls.among(COLLECTIVES), "size": cls.sizes},
            "test_layouts_groups_and_sizes": {"op": cls.among(DATA), "size": cls.sizes},
            "test_every_layout": {"async_op": (False, True), "layout": cls.layouts},
            "test_sizes_around_the_switches": {"op": cls.among(DATA), "size": cls.switch_sizes},
            "test_large_arrays": {"op": cls.among(DATA), "size": cls.large_sizes},
            "test_torch_tensors": {"size": cls.large_sizes},
            "test_refuses_what_it_does_not_reduce": {"op": cls.among(REDUCING)},
            "test_messages": {"size": cls.large_sizes},
            "test_coalesced_calls": {"size": cls.coalesced_sizes},
            "test_inputs_that_overlap_outputs_are_read_first": {
                "size": cls.large_sizes,
                "async_op": (False, True),
            },
            "test_nobody_leaves_a_barrier_before_all_have_come": {"size": cls.barrier_sizes},
        }
        return known.get(test, {})

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        test, axes = metafunc.function, self.axes(metafunc.function.__name__)
        whole_table = test.__name__ in self.whole or sampling.wants_all(metafunc.config.args)
        if whole_table or not hasattr(test, "table"):
            for name, values in axes.items():
                metafunc.parametrize(name, values)
        else:
            metafunc.parametrize(
                list(axes), [*sampling.cells(test, axes, self.turn, self.table_seed())]
            )

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls) -> Iterator[Pools]:
        """``pool(n)`` is n ranks that have joined, for all tests of the class."""
        with pools(lambda size: Pool(size, cls.backend, cls.imports)) as made:
            yield made

    @pytest.fixture(scope="class")
    @classmethod
    def seed(cls) -> int:
        """The seed of this run's samples."""
        return sample_seed()

    @classmethod
    def table_seed(cls) -> int:
        """The seed by which a run selects parts of the tables."""
        return sample_seed()

    @classmethod
    def caps(cls) -> Caps:
        """What the backend says that it can do."""
        for name in cls.imports:
            importlib.import_module(name)
        return registry.load(cls.backend).caps

    @classmethod
    def among(cls, operations: Sequence[str]) -> list[str]:
        """Those of some operations that the backend has, by itself or by fallbacks."""
        found = available(cls.caps()) if cls.backend else OPS
        return [op for op in operations if op in found]

    def needs(self, *operations: str) -> None:
        """Skip a test that needs operations which the backend lacks."""
        if missing := set(operations) - set(self.among(operations)):
            pytest.skip(f"{self.backend} lacks {', '.join(sorted(missing))}")

    def reduces(self, dtype: str, reduction: str) -> bool:
        """Whether the backend has this reduction of this type; by default what its ``caps`` say."""
        return self.caps().reduces(BY_NAME[dtype], reference.reduction_of(reduction, dtype))

    def boundaries(self, op: str, itemsize: int, size: int) -> Sequence[int]:
        """Counts of elements around which the backend changes its algorithm, and a few others."""
        switches = [nbytes // itemsize for nbytes in (1 << 12, 1 << 16)]
        return [0, 1, 7, 1000, *(count + more for count in switches for more in (-1, 0, 1))]

    def large(self, itemsize: int) -> int:
        """A count of elements that the backend works on piece by piece, not divisible by
        anything."""
        return ((5 << 20) // itemsize + 11) | 1

    # --- choosing cases ---------------------------------------------------------------------------

    def pairs(self, op: str) -> list[tuple[str, str | None]]:
        """All element types with all their reductions."""
        if not OPS[op].moves_data:
            return [("float32", None)]
        dtypes = list(filter(has, _TYPES))
        if not OPS[op].reduces:
            return [(d, None) for d in (*dtypes, *filter(has, _MOVED))]
        table = supported_reductions()
        return [
            (d, r)
            for d in dtypes
            for r in table[d]
            if self.reduces(d, r) and r not in OPS[op].refuses
        ]

    def draw(self, op: str, size: int, rng: random.Random) -> Case:
        dtype, reduce = rng.choice(self.pairs(op))
        itemsize = BY_NAME[dtype].itemsize
        family: Any = rng.choice(self.families)
        layout = rng.choice([*layouts(family), *(("scalar",) if op in _SCALARS else ())])
        count = rng.choice([0, 1, 2, 7, 33, 1000, rng.choice(self.boundaries(op, itemsize, size))])
        if layout in ("transposed", "rows"):
            count = (count + 1) // 2
        if layout == "scalar":
            count = 1
        return Case(
            op,
            dtype,
            reduce,
            count,
            layout,
            async_op=rng.random() < 0.5,
            group=rng.choice(["world", "world", "subset", "reversed"]),
            in_place=op in _IN_PLACE
            and layout not in ("backwards", "scalar")
            and rng.random() < 0.4,
            uneven=OPS[op].uneven and layout != "scalar" and rng.random() < 0.5,
            special=rng.random() < 0.2,
            family=family,
            seed=rng.randrange(1 << 30),
        )

    def check_cases(self, pool: Runner, cases: Sequence[Case], timeout: float = 120.0) -> None:
        """Run cases; every rank's result must be correct, and all ranks' results of an all_reduce
        bitwise equal."""
        cases = [
            replace(
                c,
                family=c.family if c.family in self.families else self.families[0],
                arithmetic=self.arithmetic,
            )
            for c in cases
        ]
        verdicts = pool.run(run_cases, list(cases), timeout=timeout)
        wrong = []
        for i, case in enumerate(cases):
            mine = [v[i] for v in verdicts if v[i] is not None]
            assert mine, f"nobody ran {case}"
            wrong += [
                f"rank {r}: {case}: {v[i][0]}" for r, v in enumerate(verdicts) if v[i] and v[i][0]
            ]
            if case.op == "all_reduce" and len({digest for _, digest in mine}) != 1:
                wrong.append(f"{case}: ranks have different bits")
        drawn = f" ({SEED_VARIABLE}={sample_seed()} draws them again)"
        assert not wrong, f"{len(wrong)} of {len(cases)} cases wrong{drawn}:\n" + "\n".join(
            wrong[:20]
        )

    # --- the tests --------------------------------------------------------------------------------

    @sampled("op", "size", 1)
    def test_every_type_and_reduction(self, op: str, size: int, pool: Pools, seed: int) -> None:
        rng = random.Random(f"{seed} {op} {size}")
        counts = cycle([5, 1, 0, 12])
        cases = [
            Case(
                op,
                d,
                r,
                next(counts),
                async_op=a,
                special=r in ("MIN", "MAX"),
                seed=rng.randrange(1 << 30),
            )
            for a in (False, True)
            for d, r in self.pairs(op)
        ]
        self.check_cases(pool(size), cases)

    @sampled("op", "size", 1)
    def test_layouts_groups_and_sizes(self, op: str, size: int, pool: Pools, seed: int) -> None:
        rng = random.Random(zlib.crc32(f"{seed} {op} {size}".encode()))
        self.check_cases(pool(size), [self.draw(op, size, rng) for _ in range(self.sample)])

    @sampled("layout", "async_op", 1)
    def test_every_layout(self, layout: str, async_op: bool, pool: Pools) -> None:
        cases = [
            Case(
                op,
                dtype,
                "SUM" if OPS[op].reduces else None,
                count,
                layout,
                async_op,
                group,
                in_place,
            )
            for op in self.among(DATA)
            for dtype in ("float32", "int16")
            if not OPS[op].reduces or self.reduces(dtype, "SUM")
            for count in ((1,) if layout == "scalar" else (0, 1, 6, 9000))
            for group in ("world", "reversed")
            for in_place in (
                (False, True)
                if op in _IN_PLACE and layout not in ("backwards", "scalar")
                else (False,)
            )
            if op in _SCALARS or layout != "scalar"
        ]
        self.check_cases(pool(3), cases)

    @sampled("op", "size", 1)
    def test_sizes_around_the_switches(self, op: str, size: int, pool: Pools) -> None:
        reduce = "SUM" if OPS[op].reduces else None
        cases = [
            Case(op, dtype, reduce, count, uneven=uneven, seed=7 * root)
            for dtype in ("float32", "bfloat16", "uint8")
            if has(dtype)
            for count in self.boundaries(op, BY_NAME[dtype].itemsize, size)
            for uneven in ((False, True) if OPS[op].uneven else (False,))
            for root in ((0, size - 1) if OPS[op].rooted else (0,))
        ]
        self.check_cases(pool(size), cases)

    @sampled("op", "size", 1)
    def test_large_arrays(self, op: str, size: int, pool: Pools, seed: int) -> None:
        rng = random.Random(f"{seed} {op} {size} large")
        cases = []
        for dtype in rng.sample(
            [d for d in ("float32", "bfloat16", "complex128", "int8") if has(d)], 2
        ):
            count = self.large(BY_NAME[dtype].itemsize)
            reduce = (
                rng.choice(["SUM", "MAX" if OPS[op].refuses else "AVG"])
                if OPS[op].reduces
                else None
            )
            if reduce == "MAX" and dtype == "complex128":
                reduce = "PRODUCT"
            if reduce is not None and not self.reduces(dtype, reduce):
                reduce = "SUM"
            several = Arity.PER_RANK in (OPS[op].inputs, OPS[op].outputs)
            cases.append(
                Case(
                    op,
                    dtype,
                    reduce,
                    count // size if several else count,
                    async_op=rng.random() < 0.5,
                    in_place=op in _IN_PLACE and rng.random() < 0.5,
                    uneven=OPS[op].uneven,
                    seed=rng.randrange(1 << 30),
                )
            )
        self.check_cases(pool(size), cases)

    @sampled("", "size", 1)
    def test_torch_tensors(self, size: int, pool: Pools, seed: int) -> None:
        if importlib.util.find_spec("torch") is None:
            pytest.skip("torch is not installed")
        rng = random.Random(f"{seed} torch {size}")
        cases = [
            Case(
                op, d, r, rng.choice([0, 1, 5]), async_op=rng.random() < 0.5, family="torch", seed=i
            )
            for op in self.among(DATA)
            for i, (d, r) in enumerate(self.pairs(op))
        ]
        cases += [
            Case(
                op,
                dtype,
                "SUM" if OPS[op].reduces else None,
                rng.choice([0, 1, 5, 20000]),
                layout,
                rng.random() < 0.5,
                family="torch",
                in_place=op in _IN_PLACE and rng.random() < 0.5,
                seed=rng.randrange(1 << 30),
            )
            for op in self.among(DATA)
            for layout in TorchFamily.layouts
            for dtype in ("float32", "bfloat16", "complex64", "bool")
            if has(dtype)
        ]
        self.check_cases(pool(size), cases)

    def test_every_type_can_be_tested_here(self) -> None:
        missing = [name for name in (*_TYPES, *_MOVED) if not has(name)]
        if missing:
            pytest.skip(
                f"ml_dtypes lacks {', '.join(missing)}, or is not installed: untested with NumPy"
            )
        assert {d for d, _ in self.pairs("broadcast")} == {*_TYPES, *_MOVED}

    def test_messages(self, size: int, pool: Pools) -> None:
        self.needs("send", "recv")
        wrong = [w for each in pool(size).run(jobs.messages, self.families[0]) for w in each]
        assert not wrong, wrong

    def test_bad_arguments_of_messages_are_refused(self, pool: Pools) -> None:
        self.needs("send", "recv")
        wrong = [w for each in pool(2).run(jobs.bad_arguments, self.families[0]) for w in each]
        assert not wrong, wrong
        assert pool(2).run(jobs.messages, self.families[0]) == [[], []]

    def test_integers_of_other_types(self, pool: Pools) -> None:
        self.needs("send", "recv", "broadcast", "all_to_all_single")
        assert pool(2).run(jobs.other_integers, self.families[0]) == [
            [[2.0], [2.0], [0.0, 1.0, 10.0, 11.0]],
            [[1.0], [2.0], [2.0, 12.0]],
        ]

    def test_coalesced_calls(self, size: int, pool: Pools) -> None:
        self.needs(
            "all_reduce",
            "broadcast",
            "all_gather",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
        )
        for async_op in (False, True):
            assert pool(size).run(jobs.coalesced, async_op, self.families[0]) == [None] * size

    @sampled("size", "async_op", 1)
    def test_inputs_that_overlap_outputs_are_read_first(
        self, size: int, async_op: bool, pool: Pools
    ) -> None:
        needed = [op for op in DATA if OPS[op].separate]
        found = self.among(needed) + (
            ["sendrecv"] if len(self.among(("send", "recv"))) == 2 else []
        )
        wrong = [
            w
            for each in pool(size).run(jobs.overlapping, self.families[0], found, async_op)
            for w in each
        ]
        assert not wrong, wrong

    def test_outputs_that_overlap_each_other_are_refused(self, pool: Pools) -> None:
        self.needs("all_gather", "all_to_all", "all_reduce", "all_gather_into_tensor")
        for errors in pool(2).run(jobs.overlapping_outputs, self.families[0]):
            assert all("outputs 0 and 1 overlap each other" in error for error in errors), errors

    def test_nobody_leaves_a_barrier_before_all_have_come(self, size: int, pool: Pools) -> None:
        self.needs("barrier")
        for call in ("barrier", "async barrier", "monitored_barrier"):
            times = pool(size).run(jobs.barrier_times, call)
            assert max(came for came, _ in times) <= min(left for _, left in times)

    def test_refuses_what_it_does_not_reduce(self, op: str, pool: Pools) -> None:
        table = supported_reductions()
        pairs = [
            (name, r)
            for name in filter(has, _TYPES)
            for r in table[name]
            if r in OPS[op].refuses or not self.reduces(name, r)
        ]
        pairs += [
            (name, r)
            for name in (*_TYPES, *_MOVED)
            if has(name)
            for r in table["uint8"]
            if r not in table.get(name, ())
        ]
        for messages in pool(2).run(jobs.refusals, op, pairs, self.families[0]):
            for (dtype, _), (kind, message) in zip(pairs, messages, strict=True):
                assert kind == "DistTypeError", message
                assert dtype in message

    def test_the_same_data_gives_the_same_bits_again(self, pool: Pools) -> None:
        self.needs("all_reduce")
        for digests in zip(*pool(4).run(jobs.repeated_reductions, self.families[0]), strict=True):
            assert len({d for each in digests for d in each}) == 1

    def test_buffers_of_other_kinds(self, pool: Pools) -> None:
        self.needs("all_reduce", "broadcast")
        assert pool(2).run(jobs.other_buffers) == [[3, 6, 9], [3, 6, 9]]
