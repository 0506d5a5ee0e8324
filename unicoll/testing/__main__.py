"""``python -m unicoll.testing BACKEND [pytest's options]``: the conformance suite for an installed backend."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m unicoll.testing BACKEND [pytest's options]")
    os.environ["UNICOLL_TEST_BACKEND"] = sys.argv[1]  # before the module is imported
    sys.exit(pytest.main([str(Path(__file__).with_name("test_backend.py")), *sys.argv[2:]]))
