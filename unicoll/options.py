"""What ``pg_options`` may say to our own backends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import DistArgumentError, DistTypeError

__all__ = ["Options", "as_options"]


@dataclass(frozen=True)
class Options:
    """Options of a process group, for ``pg_options=`` (a dict with the same names will do).

    Attributes:
        deterministic: reductions give the same bits whatever the size, the transport and the timing: contributions
            are folded in rank order, in the element type (half types: in float32, rounded once). Between hosts this
            takes more messages. All ranks must give the same. None: as ``UNICOLL_DETERMINISTIC`` says (``1``), else
            no.
    """

    deterministic: bool | None = None

    @property
    def in_order(self) -> bool:
        """Whether reductions are to be deterministic, by option or environment."""
        if self.deterministic is not None:
            return self.deterministic
        return os.environ.get("UNICOLL_DETERMINISTIC", "").strip().lower() in ("1", "true", "yes", "on")


def as_options(given: Any) -> Options:
    """Our options from what a user passed; other libraries' option objects say nothing to us.

    Raises:
        DistArgumentError: a dict with a name that is none.
        DistTypeError: an option of the wrong type.
    """
    if isinstance(given, Options):
        found = given
    elif isinstance(given, Mapping):
        names = {f.name for f in fields(Options)}
        unknown = set(given) - names
        if unknown:
            raise DistArgumentError(
                f"pg_options: unknown {', '.join(map(repr, sorted(unknown)))}; known are {', '.join(sorted(names))}"
            )
        found = Options(**given)
    else:
        found = Options(getattr(given, "deterministic", None))
    if found.deterministic is not None and not isinstance(found.deterministic, bool):
        raise DistTypeError(f"pg_options: deterministic must be a bool, got {found.deterministic!r}")
    return found
