"""Hook of pytest: writes what each failed test printed to a file, for ``scripts/run_tests.py``."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

import pytest

FOLDER_VARIABLE = "UNICOLL_TEST_FAILED"
"""The folder of the files; without it none is written."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a failed phase of a test to the test's file; the first line has the name of the test."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not report.failed:
        return
    path = Path(folder, blake2b(report.nodeid.encode(), digest_size=8).hexdigest() + ".txt")
    with path.open("a") as file:
        if not file.tell():
            file.write(f"{report.nodeid}\n")
        file.write(f"\n=== {report.when}\n{report.longreprtext}\n")
        for title, text in report.sections:
            file.write(f"\n--- {title}\n{text}\n")
