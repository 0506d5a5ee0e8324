"""``python -m unicoll.testing BACKEND [pytest's options]``: the conformance suite for an installed backend."""

from __future__ import annotations

import os
import sys

import pytest

from . import test_backend

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m unicoll.testing BACKEND [pytest's options]")
    os.environ[test_backend.VARIABLE] = sys.argv[1]
    sys.exit(pytest.main([test_backend.__file__, *sys.argv[2:]]))
