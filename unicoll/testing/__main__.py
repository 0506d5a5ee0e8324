"""``python -m unicoll.testing BACKEND [pytest's options]``: the conformance suite for an installed
backend."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from unicoll.errors import BackendUnavailableError
from unicoll.group import registry

_USAGE = """usage: python -m unicoll.testing BACKEND [pytest's options]

Runs the conformance suite for an installed backend: one of unicoll's, or one with an entry point in the group
unicoll.backends. A run executes a random sample of the suite and prints its seed: UNICOLL_TEST_SEED=N repeats a
sample, UNICOLL_TEST_FULL=1 runs everything."""


def main(arguments: list[str]) -> int | str:
    """Run the suite; returns pytest's exit code, or an error message about the arguments."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return 0
    if not arguments or arguments[0].startswith("-"):
        return _USAGE
    try:
        registry.load(arguments[0])
    except BackendUnavailableError as error:
        return f"{error} (a backend that is not installed needs a test file: help(unicoll.testing))"
    # The variable is read when the module of the tests is imported.
    os.environ["UNICOLL_TEST_BACKEND"] = arguments[0]
    return int(pytest.main([str(Path(__file__).with_name("test_backend.py")), *arguments[1:]]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
