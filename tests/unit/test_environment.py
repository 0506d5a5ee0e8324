"""The table of unicoll's environment variables."""

from __future__ import annotations

import logging
import re

import pytest

import unicoll as dist
from tests.support.ranks import ROOT
from unicoll.net.stores import HashStore
from unicoll.process import environment

KNOWN = {
    *environment.FLAGS,
    *environment.CHOICES,
    *environment.NUMBERS,
    *environment.LISTS,
    *environment.TEXTS,
}
TABLE = ROOT / "unicoll" / "process" / "environment.py"
NAME = re.compile(r"\bUNICOLL_[A-Z0-9_]*[A-Z0-9]\b")


def names(*patterns: str) -> set[str]:
    """The variables that files name, except this repository's own UNICOLL_TEST_..."""
    files = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    found = {name for path in files for name in NAME.findall(path.read_text()) if path != TABLE}
    return found - {f"UNICOLL_TEST_{name}" for name in ("CACHE", "FAILED", "FLAKY", "PYTHONS", "SHORT")}


def test_the_table_has_all_variables_and_the_documentation_no_others() -> None:
    packages = (
        f"{name}/**/*.py" for name in ("unicoll", "gloo_fallback", "mpi_comm", "nccl_comm", "xccl_comm")
    )
    assert names(*packages, "scripts/*", ".ci/*") == KNOWN
    assert names("docs/*.md", "README.md") <= KNOWN


def test_an_unknown_variable_causes_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``UNICOLL_SECERT`` started a job without a secret and without a warning."""
    monkeypatch.setattr(environment, "_warned", set())
    monkeypatch.setenv("UNICOLL_SECERT", "hidden")
    monkeypatch.setenv("UNICOLL_XYZ", "hidden")
    monkeypatch.setenv("UNICOLL_TRANSPORT", "tcp")
    monkeypatch.setenv("UNICOLL_TEST_XYZ", "a test's")
    with caplog.at_level(logging.WARNING, "unicoll"):
        for _ in range(2):
            dist.init_process_group(rank=0, world_size=1, store=HashStore())
            dist.destroy_process_group()
    assert [record.getMessage() for record in caplog.records] == [
        "UNICOLL_SECERT is set, but unicoll has no variable of that name; did you mean UNICOLL_SECRET?",
        "UNICOLL_XYZ is set, but unicoll has no variable of that name",
    ]
