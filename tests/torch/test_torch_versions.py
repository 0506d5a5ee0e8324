"""Versions of torch: scripts, metadata and docs name the tested versions; other versions cause a warning."""

from __future__ import annotations

import logging
import re

import pytest

from tests.support.ranks import ROOT

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from unicoll.torch_plugin.compat import TESTED, warn_of_untested  # noqa: E402 - needs torch

OLDEST, PINNED, NEWEST = TESTED


@pytest.mark.parametrize("version", [*TESTED, "2.10.1", "2.13.0+cpu", "2.15.7+cu132", "2.15.0a0+git1234"])
def test_tested_versions_cause_no_warning(version: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_untested(version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["1.13.1", "2.5.1+cu124", "2.16.0.dev20261122", "2.20.0", "3.0.0"])
def test_other_versions_cause_a_warning(version: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_untested(version)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("unicoll.torch", logging.WARNING)
    assert all(named in record.getMessage() for named in (OLDEST, NEWEST, version))


def test_scripts_and_docs_name_the_same_versions() -> None:
    def found(path: str, pattern: str) -> list[str]:
        return re.findall(pattern, (ROOT / path).read_text(), re.M)

    assert found("scripts/environment.sh", r'torch="torch==([\d.]+)"') == [PINNED]
    assert found("scripts/test_torch", r"^(?:OLDEST|NEWEST)=([\d.]+)$") == [OLDEST, NEWEST]
    assert found("docs/torch.md", r"^\| (2\.[\d.]+)\b") == list(TESTED)
    assert found("docs/torch.md", r"`TORCH=([\d.]+) ") == [NEWEST]
    minor = OLDEST.rpartition(".")[0]
    assert found("pyproject.toml", r'"torch>=([\d.]+)"') == [minor]
    assert found("unicoll/torch_plugin/__init__.py", r"needs torch ([\d.]+)\b") == [minor]
