"""The state of a group, shared by all parts of its backend: usable, failed or closed."""

from __future__ import annotations

from dataclasses import dataclass

from unicoll.errors import DistError


@dataclass(slots=True)
class GroupState:
    """The state of one group.

    Attributes:
        error: the error that ended the group, or None while it can be used.
        closed: True once the group is being destroyed.
    """

    error: DistError | None = None
    closed: bool = False

    def check(self) -> None:
        """Raise the error that ended the group, if there is one."""
        if self.error is not None:
            raise self.error.with_traceback(None) from None
