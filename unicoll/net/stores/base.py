"""The interface of all stores, and a view of a store under a key prefix."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, SupportsIndex

from unicoll.errors import DistArgumentError, DistStoreError, DistTypeError, StoreTimeoutError
from unicoll.process.timeouts import to_seconds

Timeout = timedelta | float
Value = str | bytes

DEFAULT_TIMEOUT = timedelta(seconds=300)
_MAX_SECONDS = 2e6


def seconds_of(timeout: Timeout) -> float:
    """A timeout in seconds, at most three weeks, the limit of poll(2).

    Raises:
        DistArgumentError: it is negative or NaN. DistTypeError: it is neither a timedelta nor a
            number.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (timedelta, int, float)):
        raise DistTypeError(
            f"a timeout is a timedelta or a number of seconds, not {type(timeout).__name__}"
        )
    seconds = to_seconds(timeout)
    if seconds is None or math.isnan(seconds) or seconds < 0:
        raise DistArgumentError(f"a timeout cannot be {timeout!r}")
    return min(seconds, _MAX_SECONDS)


class Store(ABC):
    """A key-value store shared by the processes of a job, with the methods and semantics of
    torch.distributed.Store.

    Keys are ``str`` of at most 64 KiB in UTF-8. Values are ``bytes`` or ``str`` (stored as UTF-8)
    of at most 1 GiB (limit: ``UNICOLL_STORE_MAX_VALUE``) and are returned as ``bytes``. All methods
    are thread-safe, and a waiting call does not block other calls. A timeout of None means the
    store's :attr:`timeout`.

    Every method may raise DistTypeError and DistArgumentError (an argument of the wrong type or
    size), DistStoreError (the store does not support the operation, or is closed) and
    DistNetworkError (its server cannot be reached); waiting methods also raise StoreTimeoutError,
    which has the missing keys.

    A method that an exception of a signal's handler has ended may have done its work (:meth:`add`
    may have added), or, of several keys, a part of it. The store remains usable.

    A subclass defines the abstract methods; it may override the others, which are implemented with
    them.
    """

    _timeout: float = DEFAULT_TIMEOUT.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """How long methods wait for missing keys, unless the call has a timeout."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Changes :attr:`timeout` (a timedelta, or seconds)."""
        self._timeout = seconds_of(timeout)

    @abstractmethod
    def set(self, key: str, value: Value) -> None:
        """Sets the key to the value, replacing an earlier one."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The key's value; waits until it has one."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Adds to the key's number and returns the sum; an absent key counts as 0.

        Numbers are stored as decimal text. DistStoreError if the key's value is not a number.
        """

    @abstractmethod
    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Atomically sets the key to ``desired_value`` if its value is ``expected_value``; returns
        the value after that.

        An absent key is set only if ``expected_value`` is empty; otherwise it stays absent and
        ``expected_value`` is returned, as torch.distributed does.
        """

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Waits until every key exists (has a value, or a queue that is not empty).

        A value that is pushed to an empty queue ends the wait for this one key of one caller; with
        a FileStore of all.
        """

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys exist; never waits."""

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Removes the key; returns True if it existed."""

    @abstractmethod
    def num_keys(self) -> int:
        """The number of keys, including those that the store itself uses to count its users."""

    def list_keys(self) -> list[str]:
        """All keys, in no particular order."""
        raise self._unsupported("list_keys")

    def try_get(self, key: str) -> bytes | None:
        """The key's value, or None; never waits."""
        return self.get(key) if self.check([key]) else None

    def append(self, key: str, value: Value) -> None:
        """Appends to the key's value; an absent key counts as empty."""
        raise self._unsupported("append")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys, in their order; waits until all have one."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Sets each key to its value; the sequences have equal lengths."""
        pairs = key_value_pairs(keys, values)
        for key, value in pairs:
            self.set(key, value)

    def queue_push(self, key: str, value: Value) -> None:
        """Appends a value to the queue of that name; a queue is independent of the key's value."""
        raise self._unsupported("queue_push")

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Removes and returns the oldest value of the queue.

        With an empty queue it waits, or raises QueueEmptyError if ``block`` is false.
        """
        raise self._unsupported("queue_pop")

    def queue_len(self, key: str) -> int:
        """The number of values in the queue; 0 if there is no queue."""
        raise self._unsupported("queue_len")

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Waits until ``world_size`` callers have called it with this key; a key is for one
        barrier."""
        arrived, opened = f"{key}/num_members", f"{key}/last_member"
        if self.add(arrived, 1) >= world_size:
            self.set(opened, b"1")
        try:
            self.wait([opened], timeout)
        except StoreTimeoutError as error:
            count = self.add(arrived, 0)
            # If nobody is missing now, the last caller came just as the time was up.
            if count < world_size:
                raise StoreTimeoutError(
                    f"barrier {key!r} of {self!r}: {count} of {world_size} callers had come when"
                    " the time was up",
                    op="barrier",
                ) from error

    def has_extended_api(self) -> bool:
        """True if append, multi_get, multi_set and the queues are supported."""
        return False

    def clone(self) -> Store:
        """Another handle on the same store, with its own timeout, closed separately."""
        raise self._unsupported("clone")

    def close(self) -> None:  # noqa: B027 - a store may have nothing to close
        """Closes the store's sockets, files and threads. Idempotent; other methods raise
        afterwards."""

    def _unsupported(self, method: str) -> DistStoreError:
        return DistStoreError(f"{type(self).__name__} has no {method}", op=method)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def key_value_pairs(keys: Sequence[str], values: Sequence[Value]) -> list[tuple[str, Value]]:
    for name, values_given in (("keys", keys), ("values", values)):
        if isinstance(values_given, (str, bytes)):
            raise DistTypeError(
                f"multi_set: {name} is a sequence, not one {type(values_given).__name__}",
                op="multi_set",
            )
    if len(keys) != len(values):
        raise DistArgumentError(
            f"multi_set: {len(keys)} keys, but {len(values)} values", op="multi_set"
        )
    return list(zip(keys, values, strict=True))


def key_list(keys: Sequence[str], op: str) -> list[str]:
    """``keys`` as a list.

    Raises:
        DistTypeError: it is a single string, or not a sequence.
    """
    if isinstance(keys, (str, bytes)):
        raise DistTypeError(
            f"{op}: keys is a sequence of str, not one {type(keys).__name__}", op=op
        )
    try:
        return list(keys)
    except TypeError:
        raise DistTypeError(
            f"{op}: keys is a sequence of str, not {type(keys).__name__}", op=op
        ) from None


def as_bytes(value: Value, op: str) -> bytes:
    """A value as it is stored.

    Raises:
        DistTypeError: it is neither text nor bytes.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise DistTypeError(f"{op}: a value is bytes or str, not {type(value).__name__}", op=op)
    return bytes(value)


def integer(value: SupportsIndex, name: str, op: str) -> int:
    """``value`` as an int.

    Raises:
        DistTypeError: it is not an integer.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise DistTypeError(f"{op}: {name} is an int, not {type(value).__name__}", op=op) from None


class PrefixStore(Store):
    """A view of another store in which every key begins with ``prefix/``.

    The underlying store is any object with torch.distributed's store methods, including another
    PrefixStore. :meth:`close` leaves it open; :meth:`set_timeout` changes its timeout, as
    torch.distributed does.

    Args:
        prefix: prepended to each key, followed by ``/``.
        store: the underlying store.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(prefix, str):
            raise DistTypeError(f"PrefixStore: prefix is a str, not {type(prefix).__name__}")
        if not hasattr(store, "compare_set"):
            raise DistTypeError(f"PrefixStore: {type(store).__name__} is not a store")
        self._prefix = prefix
        self._store = store

    @property
    def underlying_store(self) -> Store:
        """The underlying store."""
        return self._store

    @property
    def timeout(self) -> timedelta:
        """The timeout of the underlying store."""
        return self._store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        """Changes the timeout of the underlying store."""
        self._store.set_timeout(timedelta(seconds=seconds_of(timeout)))

    def _full_key(self, key: str, op: str) -> str:
        if not isinstance(key, str):
            raise DistTypeError(f"{op}: a key is a str, not {type(key).__name__}", op=op)
        return f"{self._prefix}/{key}"

    def _full_keys(self, keys: Sequence[str], op: str) -> list[str]:
        return [self._full_key(key, op) for key in key_list(keys, op)]

    def set(self, key: str, value: Value) -> None:
        self._store.set(self._full_key(key, "set"), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._full_key(key, "get"))

    def try_get(self, key: str) -> bytes | None:
        # The underlying store may be another library's, which need not have this method.
        if hasattr(self._store, "try_get"):
            return self._store.try_get(self._full_key(key, "try_get"))
        return super().try_get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._full_key(key, "add"), amount)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        return self._store.compare_set(
            self._full_key(key, "compare_set"), expected_value, desired_value
        )

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        full = self._full_keys(keys, "wait")
        # The methods of torch's stores take a timedelta or no argument, but not None.
        if timeout is None:
            self._store.wait(full)
        else:
            self._store.wait(full, timedelta(seconds=seconds_of(timeout)))

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(self._full_keys(keys, "check"))

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._full_key(key, "delete_key"))

    def num_keys(self) -> int:
        """The number of keys of the whole underlying store, as in torch.distributed."""
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        """The keys that begin with the prefix, without it."""
        start = f"{self._prefix}/"
        return [key[len(start) :] for key in self._store.list_keys() if key.startswith(start)]

    def append(self, key: str, value: Value) -> None:
        self._store.append(self._full_key(key, "append"), value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(self._full_keys(keys, "multi_get"))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        pairs = key_value_pairs(keys, values)
        self._store.multi_set(
            [self._full_key(key, "multi_set") for key, _ in pairs], [value for _, value in pairs]
        )

    def queue_push(self, key: str, value: Value) -> None:
        self._store.queue_push(self._full_key(key, "queue_push"), value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._store.queue_pop(self._full_key(key, "queue_pop"), block)

    def queue_len(self, key: str) -> int:
        return self._store.queue_len(self._full_key(key, "queue_len"))

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    def clone(self) -> PrefixStore:
        """The same prefix over a clone of the underlying store; close that clone through
        ``underlying_store``."""
        return PrefixStore(self._prefix, self._store.clone())

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix!r}, {self._store!r})"
