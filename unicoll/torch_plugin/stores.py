"""Stores across the border: torch's as ours, where the ranks meet in it; ours as torch's, where torch has none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unicoll import net
from unicoll.errors import DistNetworkError, DistStoreError, StoreTimeoutError
from unicoll.meeting import Place
from unicoll.rendezvous import Rendezvous
from unicoll.stores import Store
from unicoll.stores.base import Timeout, Value, seconds_of

__all__ = ["FromTorch", "ToTorch", "TorchPlace", "innermost"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05


class FromTorch(Store):
    """torch's store with unicoll's contract: errors of ours, and a wait that holds up no other thread.

    A client of torch's TCPStore does one thing at a time, so waiting is looking again and again.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._timeout = store.timeout.total_seconds()

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self._store is None:
            raise DistStoreError("torch's store is closed for this job, which is over", op=method)
        try:
            return getattr(self._store, method)(*arguments)
        except dist.DistNetworkError as e:
            raise DistNetworkError(f"torch's store: {e}", op=method) from e
        except RuntimeError as e:  # its DistStoreError is one, and so is a lost connection in older versions
            raise DistStoreError(f"torch's store: {e}", op=method) from e

    def set(self, key: str, value: Value) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._ask("get", key))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        found = self._ask("compare_set", key, _text(expected_value), _text(desired_value))
        return bytes(found)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        limit = self._timeout if timeout is None else seconds_of(timeout)
        deadline = time.monotonic() + limit
        pause = _FIRST_PAUSE_S
        while not self.check(keys):
            if time.monotonic() >= deadline:
                missing = [key for key in keys if not self.check([key])]
                raise StoreTimeoutError(
                    f"wait: after {limit:g} s these keys were missing: {missing}", op="wait"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    def num_keys(self) -> int:
        return int(self._ask("num_keys"))

    def close(self) -> None:
        self._store = None


def _text(value: Value) -> str:
    return value if isinstance(value, str) else value.decode()


class ToTorch(dist.Store):  # type: ignore[misc]
    """A store of ours for torch, over a meeting that took place; it is closed with the job that enters there.

    Args:
        meeting: where the ranks have met.
    """

    def __init__(self, meeting: Rendezvous) -> None:
        super().__init__()
        self.meeting = meeting
        self._entered = False
        self._clones: list[ToTorch] = []
        self._ours = meeting.store
        self._limit = meeting.store.timeout

    def take(self) -> bool:
        """Whether the meeting is still to be entered; the first who asks does that."""
        first, self._entered = not self._entered, True
        return first

    @property
    def timeout(self) -> timedelta:
        """How long ``get`` and ``wait`` wait."""
        return self._limit

    def set_timeout(self, timeout: timedelta) -> None:
        """Change :attr:`timeout`."""
        self._limit = timeout
        self._ours.set_timeout(timeout)

    def set(self, key: str, value: Any) -> None:
        """Give the key a value."""
        self._ours.set(key, value if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """The key's value; waits until it has one."""
        return self._ours.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to the key's number; the sum."""
        return self._ours.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set the key if its value is as expected; the value that it then has."""
        expected, desired = (x if isinstance(x, str) else bytes(x) for x in (expected, desired))
        return self._ours.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._ours.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._ours.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Remove the key; whether it was there."""
        return self._ours.delete_key(key)

    def num_keys(self) -> int:
        """The number of keys."""
        return self._ours.num_keys()

    def clone(self) -> ToTorch:
        """Another handle; torch's Gloo wants one."""
        other = ToTorch(self.meeting)
        other._entered = True
        self._clones.append(other)  # C++ keeps no Python object
        return other

    def has_extended_api(self) -> bool:
        """Whether it has append, multi_get and multi_set."""
        return False


class TorchPlace(Place):
    """Meets in a store that torch has made, or was given."""

    warns = True  # torch's stores are open to whoever reaches them, and torch's users know or do not mind

    def __init__(self, store: Any) -> None:
        self._store = FromTorch(store)
        inner = self._inner = innermost(store)
        self.where = type(inner).__name__
        if isinstance(inner, dist.TCPStore):
            self.master_host = inner.host
            self.where = f"torch's tcp://{net.join_hostport(inner.host, inner.port)}"
        elif isinstance(inner, ToTorch):
            self.where = "unicoll's, as torch uses it"
            self.master_host = inner.meeting.listen_host
        elif isinstance(inner, dist.HashStore):
            self.master_host = "127.0.0.1"

    def open(self, rank: int, world_size: int, deadline: float) -> Store:
        return self._store

    def private(self) -> bool:
        inner = self._inner
        return isinstance(inner, dist.HashStore) or (isinstance(inner, ToTorch) and inner.meeting.trusted)

    def close(self, linger: bool = False) -> None:
        self._inner = None
        self._store.close()


def innermost(store: Any) -> Any:
    """The store behind all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
