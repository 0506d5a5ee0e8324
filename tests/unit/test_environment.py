"""The table of unicoll's environment variables."""

from __future__ import annotations

import logging
import re

import pytest

import unicoll as dist
from tests.support.ranks import ROOT
from unicoll.net import environment
from unicoll.net.stores import HashStore

KNOWN = {*environment.FLAGS, *environment.CHOICES, *environment.NUMBERS, *environment.TEXTS}
NAME = re.compile(r"\bUNICOLL_[A-Z0-9_]*[A-Z0-9]\b")


def test_the_table_has_all_variables() -> None:
    patterns = (
        "unicoll/**/*.py",
        "gloo_fallback/**/*.py",
        "mpi_comm/**/*.py",
        "nccl_comm/**/*.py",
        "scripts/*",
        ".ci/*",
    )
    read = [path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()]
    read.remove(ROOT / "unicoll" / "net" / "environment.py")
    named = {name for path in read for name in NAME.findall(path.read_text())}
    assert named == KNOWN


def test_the_documentation_has_only_known_variables() -> None:
    for page in [*ROOT.glob("docs/*.md"), ROOT / "README.md"]:
        assert set(NAME.findall(page.read_text())) <= KNOWN, page


def test_an_unknown_variable_causes_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``UNICOLL_SECERT`` started a job without a secret and without a warning."""
    monkeypatch.setattr(environment, "_warned", set())
    monkeypatch.setenv("UNICOLL_SECERT", "hidden")
    monkeypatch.setenv("UNICOLL_XYZ", "hidden")
    monkeypatch.setenv("UNICOLL_TRANSPORT", "tcp")
    with caplog.at_level(logging.WARNING, "unicoll"):
        for _ in range(2):
            dist.init_process_group(rank=0, world_size=1, store=HashStore())
            dist.destroy_process_group()
    assert [record.getMessage() for record in caplog.records] == [
        "UNICOLL_SECERT is set, but unicoll has no variable of that name; did you mean UNICOLL_SECRET?",
        "UNICOLL_XYZ is set, but unicoll has no variable of that name",
    ]
