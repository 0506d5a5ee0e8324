"""unicoll as if it were installed, for torch's entry points."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.ranks import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the entry points of this checkout's pyproject.toml; it has to be in ``sys.path``."""
    folder = tmp_path_factory.mktemp("installed")
    pyproject = (ROOT / "pyproject.toml").read_text()
    points = re.findall(r'^\[project\.entry-points\."(torch[^"]*)"\]\n((?:\S.*\n)*)', pyproject, re.MULTILINE)
    assert len(points) == 2
    metadata = folder / "unicoll-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: unicoll\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "".join(f"[{group}]\n{lines}".replace('"', "") for group, lines in points)
    )
    return folder
