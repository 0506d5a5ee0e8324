"""Hook of pytest: writes what each failed test printed to a file, for ``scripts/run_tests.py``."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

import pytest

FOLDER_VARIABLE = "UNICOLL_TEST_FAILED"
"""The folder of the files; without it none is written."""


def pytest_configure(config: pytest.Config) -> None:
    """Write files if a folder is given; with pytest-xdist, the process to which the others report."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(Path(folder)))


class _Recorder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Append a failed phase of a test to the test's file; the first line has the name of the test."""
        if not report.failed:
            return
        path = self._folder / (blake2b(report.nodeid.encode(), digest_size=8).hexdigest() + ".txt")
        with path.open("a") as file:
            if not file.tell():
                file.write(f"{report.nodeid}\n")
            file.write(f"\n=== {report.when}\n{report.longreprtext}\n")
            for title, text in report.sections:
                file.write(f"\n--- {title}\n{text}\n")
