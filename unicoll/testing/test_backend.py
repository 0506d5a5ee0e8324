"""The suite for the backend that ``UNICOLL_TEST_BACKEND`` names: ``pytest --pyargs unicoll.testing``."""

from __future__ import annotations

import os

from .conformance import Conformance

VARIABLE = "UNICOLL_TEST_BACKEND"


class TestBackend(Conformance):
    backend = os.environ.get(VARIABLE, "gloo")
