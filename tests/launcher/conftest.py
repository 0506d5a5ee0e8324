"""The folder from which a test starts launchers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.launching import LaunchFolder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[LaunchFolder]:
    made = LaunchFolder(tmp_path)
    yield made
    made.close()
