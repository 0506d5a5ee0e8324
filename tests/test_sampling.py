"""What a run leaves out of the large tables, another class or another run does."""

from __future__ import annotations

import pytest

from unicoll.testing import sampling


@pytest.mark.parametrize(("rows", "columns", "count"), [(12, 5, 2), (11, 3, 1), (1, 2, 1), (7, 4, 4), (5, 3, 9)])
def test_every_row_has_its_columns_and_classes_together_have_all(rows: int, columns: int, count: int) -> None:
    turns = -(-columns // count)
    for seed in range(20):
        table = [
            [sampling.drawn("test", row, columns, count, turn, seed) for row in range(rows)] for turn in range(turns)
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
