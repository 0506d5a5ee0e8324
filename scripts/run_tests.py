"""Runs pytest; tests that fail run again, each alone, up to twice: python scripts/run_tests.py
[pytest's arguments]

A test that then passes is reported as FLAKY. What it printed when it failed is kept in a file of
the folder UNICOLL_TEST_FLAKY (default: .flaky in the checkout). The exit status is 0 if no other
test failed and there are at most three files in this folder.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_FLAKY = 3
MOST_FAILED = 20
"""With more failures nothing runs again: the code is wrong, or the machine."""
_RUNS = 2
_LINES = 60
"""How much of a flaky test's output is printed."""
_TIMEOUT_S = 600
_FAILED = 1
"""pytest's exit status if tests failed; others say that the run itself did not succeed."""


def pytest(*arguments: str, timeout: float | None = None, **variables: str) -> int:
    """Run pytest with some environment variables; returns its exit status."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.failed_tests", *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "UNICOLL_TEST_FAILED"} | variables
    try:
        return subprocess.call(command, cwd=ROOT, env=environment, timeout=timeout)
    except subprocess.TimeoutExpired:
        return _FAILED


def runs_alone(test: str) -> bool:
    """True if a test passes in one of a few runs of its own."""
    return any(pytest("-q", test, timeout=_TIMEOUT_S) == 0 for _ in range(_RUNS))


def main(arguments: list[str]) -> int:
    # NumPy's threads wait busily for some time when a process starts; no test needs them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # the same random cases when a test runs again
    os.environ.setdefault("UNICOLL_TEST_SEED", str(random.randrange(1 << 24)))
    kept = Path(os.environ.get("UNICOLL_TEST_FLAKY") or ROOT / ".flaky")
    with tempfile.TemporaryDirectory() as folder:
        status = pytest(*arguments, UNICOLL_TEST_FAILED=folder)
        outputs = {file.read_text().partition("\n")[0]: file for file in Path(folder).iterdir()}
        if status != _FAILED or not 0 < len(outputs) <= MOST_FAILED:
            return status
        print(f"\n== {len(outputs)} failed; each runs again alone", flush=True)
        flaky = [test for test in outputs if runs_alone(test)]
        kept.mkdir(parents=True, exist_ok=True)
        for test in flaky:
            text = outputs[test].read_text()
            file = kept / outputs[test].name
            file.write_text(text)
            print(f"\nFLAKY: {test} passes alone; its failure, also in {file}:")
            print("\n".join(text.splitlines()[-_LINES:]), flush=True)
    for test in outputs.keys() - set(flaky):
        print(f"FAILED: {test} fails alone, too")
    count = len(list(kept.iterdir()))
    if count > MOST_FLAKY:
        print(f"FAILED: {count} flaky tests; at most {MOST_FLAKY} are accepted")
    return _FAILED if len(flaky) < len(outputs) or count > MOST_FLAKY else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
