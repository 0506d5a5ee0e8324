"""What a run leaves out of the large tables, another class or another run does."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from tests.support import selection
from unicoll.testing import sampling


@pytest.mark.parametrize(
    ("rows", "columns", "count"), [(12, 5, 2), (11, 3, 1), (1, 2, 1), (7, 4, 4), (5, 3, 9)]
)
def test_every_row_has_its_columns_and_classes_together_have_all(rows: int, columns: int, count: int) -> None:
    turns = -(-columns // count)
    for seed in range(20):
        table = [
            [sampling.drawn("test", row, columns, count, turn, seed) for row in range(rows)]
            for turn in range(turns)
        ]
        for each in table:
            assert all(len(drawn) == min(count, columns) for drawn in each)
            if rows >= columns:
                assert set().union(*each) == set(range(columns))
        for row in range(rows):
            assert set().union(*(each[row] for each in table)) == set(range(columns))


def test_runs_differ_by_their_seed_unless_they_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = {tuple(sorted(sampling.drawn("test", 0, 5, 2, 0, seed))) for seed in range(100)}
    assert len(draws) > 5
    monkeypatch.delenv(sampling.FULL_VARIABLE, raising=False)
    monkeypatch.setenv(sampling.SEED_VARIABLE, "7")
    for word, seed in (("", 7), ("1", 0)):
        monkeypatch.setenv(selection.SHORT_VARIABLE, word)
        assert selection.table_seed() == seed


def test_everything_is_done_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sampling.FULL_VARIABLE, raising=False)
    assert not sampling.wants_all(["tests", "tests/test_x.py::TestX", "-k", "a[b]"])
    assert sampling.wants_all(["tests/test_x.py::TestX::test_y[broadcast-2]"])
    monkeypatch.setenv(sampling.FULL_VARIABLE, "0")
    assert not sampling.wants_all([])
    monkeypatch.setenv(sampling.FULL_VARIABLE, "1")
    assert sampling.wants_all([])


@dataclass
class Item:
    """What a short run looks at in a test: its name, its parameters by number, and its marks."""

    nodeid: str
    indices: dict[str, int] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    own_marks: dict[str, int] = field(default_factory=dict)

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(indices=self.indices)

    def iter_markers(self, name: str) -> list[SimpleNamespace]:
        """The mark of the test, and that of the case."""
        numbers = [marks[name] for marks in (self.marks, self.own_marks) if name in marks]
        return [SimpleNamespace(kwargs={"n": n}) for n in numbers]


def table(name: str, *counts: int, **marks: int) -> list[Item]:
    """All cases of a test with so many values of each parameter."""
    return [
        Item(f"{name}[{cell}]", dict(zip("abcd", cell, strict=False)), marks)
        for cell in itertools.product(*map(range, counts))
    ]


def test_a_short_run_has_all_cases_without_a_mark_and_none_with_n_0() -> None:
    alone, two = Item("test_x.py::test_alone"), table("test_x.py::test_two", 3, 4)
    long = [
        Item("test_x.py::test_long", marks={"every": 0}),
        *table("test_x.py::test_table", 2, every=0),
    ]
    assert selection.short_run([*two, alone, *long]) == [*two, alone]


def test_a_short_run_has_no_case_with_a_mark_of_its_own_with_n_0() -> None:
    cases = table("test_x.py::test_table", 4, every=2)
    for case in cases[1:]:
        case.own_marks["every"] = 0
    assert selection.short_run(cases) == cases[:1]


def test_a_short_run_has_every_nth_case_with_the_mark() -> None:
    runs = [selection.short_run(table(f"test_{i}", 10, every=4)) for i in range(20)]
    assert {tuple(item.indices["a"] for item in run) for run in runs} == {
        (0, 4, 8),
        (1, 5, 9),
        (2, 6),
        (3, 7),
    }
    assert all(len(selection.short_run(table(f"test_{i}", 2, every=4))) == 1 for i in range(20))


def test_a_run_has_a_column_of_each_row_whose_columns_are_its_own() -> None:
    cells = [("a", "x"), ("a", "y"), ("a", "z"), ("b", "y"), ("c", "x"), ("c", "z")]
    marks = {"sampled": ("row", "column", 1), "parametrize": (("row", "column"), cells)}

    def item(row: str, column: str) -> SimpleNamespace:
        return SimpleNamespace(
            get_closest_marker=lambda name: SimpleNamespace(args=marks[name]),
            iter_markers=lambda name: [SimpleNamespace(args=marks[name])],
            callspec=SimpleNamespace(params={"row": row, "column": column}),
            cls=None,
            module=SimpleNamespace(),
            originalname="test",
        )

    runs = [[cell for cell in cells if selection.is_drawn(item(*cell), seed)] for seed in range(100)]
    assert all([row for row, _ in cells] == ["a", "b", "c"] for cells in runs)
    assert {cell for run in runs for cell in run} == set(cells)
