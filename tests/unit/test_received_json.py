"""JSON of other processes: what is read, and what is refused with a ValueError."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unicoll.errors import DistStoreError
from unicoll.net.objects.received_json import from_store, parse

RECORD = {"name": str, "ranks": [int], "age": float, "pair": (str, bool), "more": dict | None}
GOOD = {"name": "a", "ranks": [0, 1], "age": 1, "pair": ["b", True], "more": None}


def test_values_of_the_expected_kind_are_read() -> None:
    assert parse(json.dumps(GOOD), RECORD) == GOOD
    assert parse(json.dumps(GOOD | {"unknown": 1}).encode(), RECORD)["unknown"] == 1
    assert parse("[1.5, true, null]") == [1.5, True, None]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": 3}, "its 'name' is not str"),
        ({"ranks": [0, "1"]}, r"its 'ranks'\[1\] is not int"),
        ({"ranks": [True]}, r"its 'ranks'\[0\] is not int"),
        ({"age": "1"}, "its 'age' is not float"),
        ({"pair": ["b"]}, "its 'pair' is not a list of 2"),
        ({"pair": {}}, "its 'pair' is not a list"),
        ({"more": []}, r"its 'more' is not dict \| None"),
    ],
)
def test_fields_of_another_kind(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(json.dumps(GOOD | changed), RECORD)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 200_000, "Infinity", "[NaN]", "-1e999", b"\xff\xfe", "9" * 10_000, '"' + "a" * (1 << 20)],
)
def test_texts_that_are_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse(text)
    with pytest.raises(DistStoreError, match="the store's key is of another program or version of unicoll"):
        from_store("key", text if isinstance(text, bytes) else text.encode())


def test_a_missing_name_and_another_value() -> None:
    for text, message in (("{}", "it is not an object with 'name'"), ("[]", "it is not an object")):
        with pytest.raises(ValueError, match=message):
            parse(text, RECORD)
