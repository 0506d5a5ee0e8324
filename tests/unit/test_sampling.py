"""What a run leaves out of the large tables, another class or another run does."""

from __future__ import annotations

from dataclasses import dataclass
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


def test_runs_differ_by_their_seed_alone() -> None:
    draws = {tuple(sorted(sampling.drawn("test", 0, 5, 2, 0, seed))) for seed in range(100)}
    assert len(draws) > 5
    assert sampling.drawn("test", 3, 5, 2, 1, 7) == sampling.drawn("test", 3, 5, 2, 1, 7)


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
    """What a short run looks at in a test."""

    nodeid: str
    marks: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> object:
        return object() if name in self.marks else None


def test_a_short_run_does_a_quarter_of_each_table_and_nothing_slow() -> None:
    items = [Item(f"test_x.py::test_table[{i}]") for i in range(10)]
    items += [
        Item("test_x.py::test_alone"),
        Item("test_x.py::test_long", ("slow",)),
        Item("test_y.py::test_one[a]"),
    ]
    runs = [[item.nodeid for item in selection.part(items, seed, 4, slow=False)] for seed in range(100)]
    for names in runs:
        assert names == [item.nodeid for item in items if item.nodeid in names]
        assert sum("test_table" in name for name in names) == 3
        assert names[3:] == ["test_x.py::test_alone", "test_y.py::test_one[a]"]
    assert {name for names in runs for name in names} == {item.nodeid for item in items if not item.marks}


def test_a_run_of_all_does_half_of_each_table_and_what_is_slow() -> None:
    items = [Item(f"test_x.py::test_table[{i}]") for i in range(9)] + [
        Item("test_x.py::test_long", ("slow",))
    ]
    runs = [{item.nodeid for item in selection.part(items, seed, 2)} for seed in range(100)]
    assert all(len(names) == 6 and "test_x.py::test_long" in names for names in runs)
    assert set.union(*runs) == {item.nodeid for item in items}


def test_a_short_run_does_a_quarter_of_the_tests_that_take_turns() -> None:
    items = [Item(f"test_{module}.py::test_{i}", ("in_turn",)) for module in "xy" for i in range(4)]
    items += [Item("test_x.py::test_always"), Item("test_y.py::test_never", ("in_turn", "slow"))]
    runs = [{item.nodeid for item in selection.part(items, seed, 4, slow=False)} for seed in range(100)]
    assert all(len(names) == 3 and "test_x.py::test_always" in names for names in runs)
    assert set.union(*runs) == {item.nodeid for item in items if "slow" not in item.marks}


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
