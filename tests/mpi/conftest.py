"""Fixtures of the tests of programs under mpirun."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import reserved_port


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as number:
        yield number
