"""The suite for the backend that ``UNICOLL_TEST_BACKEND`` names: ``pytest --pyargs
unicoll.testing``."""

from __future__ import annotations

import os

from unicoll.testing.conformance import Conformance


class TestBackend(Conformance):
    backend = os.environ.get("UNICOLL_TEST_BACKEND", "gloo")
