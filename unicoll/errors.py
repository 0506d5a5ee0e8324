"""The exception tree of unicoll.

The names and bases of the four outer classes are torch.distributed's; the other classes distinguish
the causes. Group, rank, operation and sequence number are attributes of every error (None if
unknown).

    DistError (RuntimeError)
    ├── DistArgumentError (ValueError)       an argument was refused before data moved; the group
    │   │                                    stays usable
    │   └── DistTypeError (TypeError)        ... because of its type or dtype
    ├── NotInitializedError (ValueError)     there is no (default) process group
    ├── PickleRefusedError                   an object needed pickle, and this job allows none
    ├── DistBackendError                     a backend could not execute the operation
    │   ├── BackendUnavailableError          the backend cannot be used here; has the reason
    │   ├── CollectiveMismatchError          ranks called different collectives, shapes, dtypes,
    │   │                                    ops or roots
    │   ├── MessageMismatchError             a message does not fit the buffer that received it
    │   ├── OperationTimeoutError (TimeoutError)  a deadline passed; has the ranks that arrived and
    │   │                                    those that did not
    │   ├── DeadlockError                    ranks wait for each other in a cycle; has their
    │   │                                    operations and lines
    │   └── GroupAbortedError                the group was aborted or destroyed while, or before,
    │                                        it was used
    ├── DistNetworkError                     connecting, sending or receiving failed
    │   ├── RankLostError                    a peer process died or left; has rank, host and pid
    │   └── AuthenticationError              the other side does not have the job's secret
    └── DistStoreError                       a store operation failed
        ├── StoreTimeoutError (TimeoutError) keys did not appear in time
        └── QueueEmptyError                  (torch.distributed's name; kept for compatibility)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "AuthenticationError",
    "BackendUnavailableError",
    "CollectiveMismatchError",
    "DeadlockError",
    "DistArgumentError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DistTypeError",
    "GroupAbortedError",
    "MessageMismatchError",
    "NotInitializedError",
    "OperationTimeoutError",
    "PickleRefusedError",
    "QueueEmptyError",
    "RankLostError",
    "StoreTimeoutError",
]


class DistError(RuntimeError):
    """Base of every error that unicoll raises.

    Attributes:
        group: name of the process group, or None.
        rank: global rank that caused the error, if known, else the rank that detected it.
        op: name of the operation, for example ``"all_reduce"``.
        seq: sequence number of the operation in its group (the first is 1).
    """

    def __init__(
        self,
        message: str,
        *,
        group: str | None = None,
        rank: int | None = None,
        op: str | None = None,
        seq: int | None = None,
    ) -> None:
        super().__init__(message)
        self.group = group
        self.rank = rank
        self.op = op
        self.seq = seq

    def __reduce__(self) -> tuple[Any, ...]:
        # Without it tblib, with which Dask sends exceptions, makes the object without __init__:
        # Python refuses that for classes that are a TimeoutError, too.
        return type(self), self.args, self.__dict__


class DistArgumentError(DistError, ValueError):
    """An argument was refused before data moved; the group stays usable.

    The argument is this rank's, or the list of the root of a gather or scatter; then ``rank`` is
    the root.
    """


class DistTypeError(DistArgumentError, TypeError):
    """An argument has a type or dtype that the operation does not accept."""


class NotInitializedError(DistError, ValueError):
    """There is no process group yet, or it has been destroyed."""


class PickleRefusedError(DistError):
    """An object can be sent only by pickle, and pickle is not allowed in this job."""


class DistBackendError(DistError):
    """A backend could not execute the operation."""


class BackendUnavailableError(DistBackendError):
    """No backend can be used on this machine; the message has the reason of each candidate."""


class CollectiveMismatchError(DistBackendError):
    """The ranks of a group called different collectives, or one with different shapes, dtypes, ops
    or roots.

    ``rank`` is the one whose call differs from that of all other ranks, two or more; None if that
    is not known.
    """


class MessageMismatchError(DistBackendError):
    """A point-to-point message does not fit the buffer of its receive."""


class OperationTimeoutError(DistBackendError, TimeoutError):
    """An operation's deadline passed; the message has the ranks that arrived and those that did
    not.

    Attributes:
        missing: global ranks that had not called a collective; empty if unknown.
    """

    missing: Sequence[int] = ()


class DeadlockError(DistBackendError):
    """Ranks wait for each other in a cycle through one or several groups; the message has each
    one's call and line.

    ``op`` and ``seq`` are of the call in which this rank waits; ``op`` is None if it does not wait
    in this group.

    Attributes:
        ranks: global ranks of the cycle; each waits for the next one, and the last for the first.
    """

    ranks: Sequence[int] = ()


class GroupAbortedError(DistBackendError):
    """The group was aborted or destroyed while, or before, it was used."""


class DistNetworkError(DistError):
    """Connecting, sending or receiving failed."""


class RankLostError(DistNetworkError):
    """A peer process died or left; ``rank``, ``host`` and ``pid`` identify it."""

    host: str | None = None
    pid: int | None = None


class AuthenticationError(DistNetworkError):
    """The other side lacks the job's secret or uses another protocol, or received bytes were not
    sent by it."""


class DistStoreError(DistError):
    """A store operation failed."""


class StoreTimeoutError(DistStoreError, TimeoutError):
    """The awaited keys did not appear in the store in time; the message has the keys."""


class QueueEmptyError(DistStoreError):
    """A store's queue is empty (torch.distributed's name)."""
