"""The state of a group, which all parts of its backend share: usable, failed or closed."""

from __future__ import annotations

from unicoll.errors import DistError


class GroupState:
    """The state of one group.

    Attributes:
        error: the error that ended the group, or None while it can be used.
        closed: True once the group is being destroyed.
    """

    __slots__ = ("closed", "error")

    def __init__(self) -> None:
        self.error: DistError | None = None
        self.closed = False

    def check(self) -> None:
        """Raise the error that ended the group, if there is one."""
        if self.error is not None:
            raise self.error.with_traceback(None) from None
