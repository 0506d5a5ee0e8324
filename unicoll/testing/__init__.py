"""The conformance suite for backends, and what it is made of: for whoever writes a backend.

A file of tests names the backend, and pytest does the rest::

    from unicoll.testing import Conformance

    class TestMine(Conformance):
        backend = "mine"

So does ``python -m unicoll.testing mine``, with pytest's options behind the name. What differs from backend to backend
is said by attributes and methods of the class: see :class:`~unicoll.testing.conformance.Conformance`. A run does a
sample of the suite; ``UNICOLL_TEST_FULL=1`` does all of it, and ``UNICOLL_TEST_SEED`` repeats a sample.

The extra ``testing`` brings pytest, and ml_dtypes for the element types that NumPy lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conformance import Conformance

__all__ = ["Conformance"]


def __getattr__(name: str) -> Any:
    if name == "Conformance":  # not before it is asked for: ranks need no pytest
        from .conformance import Conformance

        return Conformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
