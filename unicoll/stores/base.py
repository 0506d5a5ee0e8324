"""What every store can do, and the store that puts a prefix before the keys of another."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, SupportsIndex

from ..errors import DistArgumentError, DistStoreError, DistTypeError
from ..types import to_seconds

__all__ = ["DEFAULT_TIMEOUT", "PrefixStore", "Store", "Timeout", "Value", "seconds_of"]

Timeout = timedelta | float
Value = str | bytes

DEFAULT_TIMEOUT = timedelta(seconds=300)
_LONGEST = 2e6


def seconds_of(timeout: Timeout) -> float:
    """A timeout in seconds, held to three weeks, the most that poll(2) takes.

    Raises:
        DistArgumentError: it is negative or no number. DistTypeError: it is neither a timedelta nor a number.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (timedelta, int, float)):
        raise DistTypeError(f"a timeout is a timedelta or a number of seconds, not {type(timeout).__name__}")
    seconds = to_seconds(timeout)
    if seconds is None or math.isnan(seconds) or seconds < 0:
        raise DistArgumentError(f"a timeout cannot be {timeout!r}")
    return min(seconds, _LONGEST)


class Store(ABC):
    """A key-value store shared by the processes of a job, with torch.distributed.Store's methods and meanings.

    Keys are ``str`` of at most 64 KiB in UTF-8; values are ``bytes`` or ``str`` (kept as UTF-8) of at most 1 GiB
    (``UNICOLL_STORE_MAX_VALUE`` changes that) and come back as ``bytes``. Every method may be called from any
    thread, and one that waits holds up no other. Where a timeout is None the store's own counts, see
    :attr:`timeout`.

    Every method may raise DistTypeError and DistArgumentError (an argument of the wrong type or size),
    DistStoreError (the store cannot do it, or is closed) and DistNetworkError (its server cannot be reached);
    the methods that wait also StoreTimeoutError, which names the missing keys.

    A store of one's own defines the abstract methods; the others are made of them unless it has better.
    """

    _timeout: float = DEFAULT_TIMEOUT.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """How long methods wait for missing keys, unless the call says."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Changes :attr:`timeout` (a timedelta, or seconds)."""
        self._timeout = seconds_of(timeout)

    @abstractmethod
    def set(self, key: str, value: Value) -> None:
        """Gives the key the value, whether or not it had one."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The key's value; waits until it has one."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Adds to the key's number and returns the sum; an absent key counts as 0.

        Numbers are kept as decimal text. A key whose value is none raises DistStoreError.
        """

    @abstractmethod
    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Sets the key to ``desired_value`` if its value is ``expected_value``, in one step, and returns the value
        that it has afterwards.

        An absent key is set only if ``expected_value`` is empty; otherwise it stays absent and
        ``expected_value`` is returned, as torch.distributed does.
        """

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Waits until every key is there (has a value, or a queue that is not empty)."""

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Whether all the keys are there, without waiting."""

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Removes the key; returns whether it was there."""

    @abstractmethod
    def num_keys(self) -> int:
        """The number of keys, with those that the store itself uses to count its users."""

    def list_keys(self) -> list[str]:
        """All keys, in no particular order."""
        raise self._lacks("list_keys")

    def try_get(self, key: str) -> bytes | None:
        """The key's value, or None; never waits."""
        return self.get(key) if self.check([key]) else None

    def append(self, key: str, value: Value) -> None:
        """Appends to the key's value; an absent key counts as empty."""
        raise self._lacks("append")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys, in their order; waits until all have one."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Sets each key to its value; there must be as many of both."""
        pairs = key_value_pairs(keys, values)
        for key, value in pairs:
            self.set(key, value)

    def queue_push(self, key: str, value: Value) -> None:
        """Appends a value to the queue of that name, a thing apart from the key's value."""
        raise self._lacks("queue_push")

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Takes the oldest value out of the queue.

        An empty queue makes it wait, or raise QueueEmptyError if ``block`` is false.
        """
        raise self._lacks("queue_pop")

    def queue_len(self, key: str) -> int:
        """The number of values in the queue; 0 if there is none."""
        raise self._lacks("queue_len")

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Waits until ``world_size`` callers have called it with this key, which serves for one barrier."""
        arrived, opened = f"{key}/num_members", f"{key}/last_member"
        if self.add(arrived, 1) >= world_size:
            self.set(opened, b"1")
        self.wait([opened], timeout)

    def has_extended_api(self) -> bool:
        """Whether append, multi_get, multi_set and the queues are there."""
        return False

    def clone(self) -> Store:
        """A further handle on the same store, with its own timeout, to be closed by itself."""
        raise self._lacks("clone")

    def close(self) -> None:  # noqa: B027 - a store need not hold anything
        """Lets go of the store's sockets, files and threads. May be called again; other calls raise then."""

    def _lacks(self, method: str) -> DistStoreError:
        return DistStoreError(f"{type(self).__name__} has no {method}", op=method)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def key_value_pairs(keys: Sequence[str], values: Sequence[Value]) -> list[tuple[str, Value]]:
    for name, given in (("keys", keys), ("values", values)):
        if isinstance(given, (str, bytes)):
            raise DistTypeError(
                f"multi_set: {name} is a sequence, not one {type(given).__name__}", op="multi_set"
            )
    if len(keys) != len(values):
        raise DistArgumentError(f"multi_set: {len(keys)} keys, but {len(values)} values", op="multi_set")
    return list(zip(keys, values, strict=True))


def key_list(keys: Sequence[str], op: str) -> list[str]:
    """``keys`` as a list.

    Raises:
        DistTypeError: it is a single string, or no sequence.
    """
    if isinstance(keys, (str, bytes)):
        raise DistTypeError(f"{op}: keys is a sequence of str, not one {type(keys).__name__}", op=op)
    try:
        return list(keys)
    except TypeError:
        raise DistTypeError(f"{op}: keys is a sequence of str, not {type(keys).__name__}", op=op) from None


def integer(value: SupportsIndex, name: str, op: str) -> int:
    """``value`` as an int.

    Raises:
        DistTypeError: it is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise DistTypeError(f"{op}: {name} is an int, not {type(value).__name__}", op=op) from None


class PrefixStore(Store):
    """A view of another store in which every key begins with ``prefix/``.

    The store behind is anything with torch.distributed's store methods, another PrefixStore included. It stays its
    owner's: :meth:`close` leaves it open, while :meth:`set_timeout` changes its timeout, as torch.distributed does.

    Args:
        prefix: goes before each key, followed by ``/``.
        store: the store behind.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(prefix, str):
            raise DistTypeError(f"PrefixStore: prefix is a str, not {type(prefix).__name__}")
        if not hasattr(store, "compare_set"):
            raise DistTypeError(f"PrefixStore: {type(store).__name__} is no store")
        self._prefix = prefix
        self._store = store

    @property
    def underlying_store(self) -> Store:
        """The store behind."""
        return self._store

    @property
    def timeout(self) -> timedelta:
        """The timeout of the store behind."""
        return self._store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        """Changes the timeout of the store behind."""
        self._store.set_timeout(timedelta(seconds=seconds_of(timeout)))

    def _full(self, key: str, op: str) -> str:
        if not isinstance(key, str):
            raise DistTypeError(f"{op}: a key is a str, not {type(key).__name__}", op=op)
        return f"{self._prefix}/{key}"

    def _all_full(self, keys: Sequence[str], op: str) -> list[str]:
        return [self._full(key, op) for key in key_list(keys, op)]

    def set(self, key: str, value: Value) -> None:
        self._store.set(self._full(key, "set"), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._full(key, "get"))

    def try_get(self, key: str) -> bytes | None:
        if hasattr(self._store, "try_get"):
            return self._store.try_get(self._full(key, "try_get"))
        return super().try_get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._full(key, "add"), amount)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        return self._store.compare_set(self._full(key, "compare_set"), expected_value, desired_value)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        full = self._all_full(keys, "wait")
        if timeout is None:
            self._store.wait(full)
        else:
            self._store.wait(full, timedelta(seconds=seconds_of(timeout)))

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(self._all_full(keys, "check"))

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._full(key, "delete_key"))

    def num_keys(self) -> int:
        """The number of keys of the whole store behind, as torch.distributed counts."""
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        """The keys that begin with the prefix, without it."""
        start = f"{self._prefix}/"
        return [key[len(start) :] for key in self._store.list_keys() if key.startswith(start)]

    def append(self, key: str, value: Value) -> None:
        self._store.append(self._full(key, "append"), value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(self._all_full(keys, "multi_get"))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        pairs = key_value_pairs(keys, values)
        self._store.multi_set(
            [self._full(key, "multi_set") for key, _ in pairs], [value for _, value in pairs]
        )

    def queue_push(self, key: str, value: Value) -> None:
        self._store.queue_push(self._full(key, "queue_push"), value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._store.queue_pop(self._full(key, "queue_pop"), block)

    def queue_len(self, key: str) -> int:
        return self._store.queue_len(self._full(key, "queue_len"))

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    def clone(self) -> PrefixStore:
        """The same prefix over a clone of the store behind; close that clone through ``underlying_store``."""
        return PrefixStore(self._prefix, self._store.clone())

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix!r}, {self._store!r})"
