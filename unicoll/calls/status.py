"""What is known of a message: its sender, tag and size."""

from __future__ import annotations

from unicoll.arrays.types import ALL_DTYPES
from unicoll.calls.call import Call

NO_RANK = -(1 << 31)
"""A rank that is no process (MPI_PROC_NULL): a message to it, or from it, ends at once and moves no
data. Sums and differences of ranks do not give this number by accident."""

_ITEMSIZES = {dtype.code: dtype.itemsize for dtype in ALL_DTYPES}


class Status:
    """Sender, tag and size of a message (MPI_Status): of a receive that got this object, or of a
    probe.

    Attributes and the values that they have before the message has come:

    - ``source``: the sender's global rank; -1.
    - ``group_source``: its rank in the group; -1.
    - ``tag``: the tag of the send; -1.
    - ``count``: number of elements; 0.
    - ``nbytes``: bytes; 0.

    For a receive from :data:`NO_RANK`, ``source`` and ``group_source`` are that, ``tag`` is -1 and
    ``count`` 0.
    """

    __slots__ = ("_call", "_nobody", "_ranks")

    def __init__(self) -> None:
        self._nobody = -1
        self._call: Call | None = None
        self._ranks: tuple[int, ...] = ()

    def follow(self, call: Call | None, ranks: tuple[int, ...] = ()) -> None:
        """Describe the message of a receive or probe in a group of these ranks; None is a receive
        from NO_RANK."""
        self._nobody = -1 if call is not None else NO_RANK
        self._call, self._ranks = call, ranks

    @property
    def _envelope(self) -> tuple[int, int, int] | None:
        return self._call.envelope if self._call is not None else None

    @property
    def group_source(self) -> int:
        """The sender's rank in the group."""
        return self._call.source if self._call is not None else self._nobody

    @property
    def source(self) -> int:
        """The sender's global rank."""
        source = self.group_source
        return self._ranks[source] if source >= 0 else source

    @property
    def tag(self) -> int:
        """The tag of the send."""
        found = self._envelope
        return found[0] if found is not None else -1

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        found = self._envelope
        return found[2] if found is not None else 0

    @property
    def count(self) -> int:
        """Elements of the message, of the type that was sent."""
        found = self._envelope
        return found[2] // _ITEMSIZES.get(found[1], 1) if found is not None else 0

    def __repr__(self) -> str:
        return f"<Status source={self.source}, tag={self.tag}, count={self.count}>"
