"""The conformance suite for authors of backends.

A test module names the backend, and pytest runs the suite::

    from unicoll.testing import Conformance

    class TestMine(Conformance):
        backend = "mine"

``python -m unicoll.testing mine`` does the same; pytest's options follow the name. Attributes and
methods of the class describe the backend: see :class:`~unicoll.testing.conformance.Conformance`. A
run executes a sample of the suite; ``UNICOLL_TEST_FULL=1`` runs all of it, and
``UNICOLL_TEST_SEED`` repeats a sample.

The extra ``testing`` installs pytest, and ml_dtypes for the element types that NumPy lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unicoll.testing.conformance import Conformance

__all__ = ["Conformance"]


def __getattr__(name: str) -> Any:
    # The suite is imported on demand: ranks do not need pytest.
    if name == "Conformance":
        from unicoll.testing.conformance import Conformance

        return Conformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
