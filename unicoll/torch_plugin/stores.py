"""Store adapters: a unicoll store over torch's, and a torch store over unicoll's."""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, wraps
from typing import Any

import torch.distributed as dist

from unicoll.bootstrap.rendezvous import Rendezvous
from unicoll.bootstrap.rendezvous_protocol import StoreLocation
from unicoll.errors import DistNetworkError, DistStoreError, StoreTimeoutError
from unicoll.net.stores import Store
from unicoll.net.stores.base import Timeout, Value, seconds_of
from unicoll.net.wire import interfaces
from unicoll.process.timeouts import backoff

_MIN_POLL_S, _MAX_POLL_S = 0.002, 0.05
_QUEUE_POLL_S = 0.2
_CLOSE_S = 0.5
"""Seconds for which closing waits for a request in progress."""


class TorchBackedStore(Store):
    """A unicoll store over torch's store. It raises unicoll's errors, and its ``wait`` does not
    block other threads.

    A client of torch's TCPStore handles one request at a time, so ``wait`` polls.

    Args:
        keep: False if torch alone keeps the store alive. The server of a TCPStore serves later
            default groups of torch, too, as long as it is alive, and torch would then find the
            addresses of the group before.
    """

    def __init__(self, store: Any, keep: bool = True) -> None:
        self._store: Callable[[], Any] = (lambda: store) if keep else weakref.ref(store)
        self._timeout = store.timeout.total_seconds()
        # It is held during a request: once close() has it, no request is in progress.
        self._lock = threading.Lock()

    def _call(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            return self._locked_call(method, arguments)

    def _locked_call(self, method: str, arguments: Sequence[Any]) -> Any:
        store = self._store()
        if store is None:
            raise DistStoreError("torch's store is closed: the job has ended", op=method)
        try:
            return getattr(store, method)(*arguments)
        except dist.DistNetworkError as e:
            raise DistNetworkError(f"torch's store: {e}", op=method) from e
        except RuntimeError as e:
            # This is torch's DistStoreError, or in older versions a lost connection.
            raise DistStoreError(f"torch's store: {e}", op=method) from e

    def set(self, key: str, value: Value) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        # A get of torch's store that waits would keep the requests of all other threads waiting.
        self.wait([key])
        return bytes(self._call("get", key))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        found = self._call("compare_set", key, _text(expected_value), _text(desired_value))
        return bytes(found)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        limit = self._timeout if timeout is None else seconds_of(timeout)
        deadline = time.monotonic() + limit
        pauses = backoff(_MIN_POLL_S, _MAX_POLL_S)
        while not self.check(keys):
            if time.monotonic() >= deadline:
                missing = [key for key in keys if not self.check([key])]
                raise StoreTimeoutError(
                    f"wait: after {limit:g} s these keys were missing: {missing}", op="wait"
                )
            time.sleep(next(pauses))

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete_key", key))

    def num_keys(self) -> int:
        return int(self._call("num_keys"))

    def close(self) -> None:
        """Refuse later requests; one that the store does not answer is not waited for."""
        acquired = self._lock.acquire(timeout=_CLOSE_S)
        self._store = _closed
        if acquired:
            self._lock.release()


def _closed() -> None:
    """There is no store."""


def _text(value: Value) -> str:
    return value if isinstance(value, str) else value.decode()


def _forwarded(method: str) -> Callable[..., Any]:
    """A method that calls the one of this name of unicoll's store."""

    def call(self: UnicollBackedStore, *arguments: Any, **options: Any) -> Any:
        return getattr(self._store, method)(*arguments, **options)

    return call


class UnicollBackedStore(dist.Store):  # type: ignore[misc]
    """A torch store over the store of a completed rendezvous; the job that uses the rendezvous
    closes it.

    torch calls its methods from C++ if a PrefixStore is around it. For ``list_keys`` and queues it
    has no such calls: there the methods of PrefixStore are replaced (:func:`_extend_prefix_store`).
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__()
        _extend_prefix_store()
        self.rendezvous = rendezvous
        self._claimed = False
        self._clones: list[UnicollBackedStore] = []
        self._store = rendezvous.store
        super().set_timeout(rendezvous.store.timeout)

    def claim(self) -> bool:
        """True for the first caller, which then joins the job at the rendezvous."""
        first, self._claimed = not self._claimed, True
        return first

    def _within_timeout(self) -> Store:
        """The store, with the timeout of torch's part of this object, which a PrefixStore sets."""
        if self._store.timeout != self.timeout:
            self._store.set_timeout(self.timeout)
        return self._store

    def get(self, key: str) -> bytes:
        return self._within_timeout().get(key)

    def wait(self, keys: Sequence[str], *timeout: timedelta) -> None:
        self._within_timeout().wait(keys, *timeout)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value if isinstance(value, str) else bytes(value))

    add, delete_key, num_keys, list_keys = map(
        _forwarded, ("add", "delete_key", "num_keys", "list_keys")
    )
    # C++ calls these names.
    deleteKey, getNumKeys = delete_key, num_keys

    def check(self, keys: Sequence[str]) -> bool:
        # This is the request of _prefix_of.
        if len(keys) == 1 and keys[0].endswith(_PROBE):
            _probed.prefix = keys[0].removesuffix(_PROBE)
            return False
        return self._store.check(keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        expected, desired = (x if isinstance(x, str) else bytes(x) for x in (expected, desired))
        return self._store.compare_set(key, expected, desired)

    # A queue is a key for each value, "KEY/queue/NUMBER", the number of values pushed, and that of
    # values popped with a token of the one that popped last: of two that pop at the same time one
    # sees the other's token, and tries again.

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append a value to a queue."""
        # The number is taken first, so that each value has a key of its own. A blocking pop that
        # comes in between waits for this key.
        number = self._store.add(f"{key}/queue/pushed", 1) - 1
        self._store.set(f"{key}/queue/{number}", value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue; waits for one, or raises torch's QueueEmptyError."""
        limit = self.timeout.total_seconds()
        deadline = time.monotonic() + limit
        while True:
            popped = self._store.try_get(f"{key}/queue/popped") or b""
            number = _popped(popped)
            item = f"{key}/queue/{number}"
            value = self._store.try_get(item)
            if value is not None:
                own = f"{number + 1} {uuid.uuid4().hex}".encode()
                if self._store.compare_set(f"{key}/queue/popped", popped, own) == own:
                    self._store.delete_key(item)
                    return value
            elif not block:
                raise dist.QueueEmptyError("queue is empty")
            elif time.monotonic() >= deadline:
                raise dist.DistStoreError(f"wait timeout after {1000 * limit:.0f}ms, keys: {key}")
            else:
                # This does not wait for the whole time: another one may take the value, and delete
                # its key, before this wait sees it.
                left = max(0.001, deadline - time.monotonic())
                with suppress(StoreTimeoutError):
                    self._store.wait([item], timedelta(seconds=min(_QUEUE_POLL_S, left)))

    def queue_len(self, key: str) -> int:
        """The number of values in a queue."""
        popped = _popped(self._store.try_get(f"{key}/queue/popped") or b"")
        return int(self._store.try_get(f"{key}/queue/pushed") or b"0") - popped

    def clone(self) -> UnicollBackedStore:
        """Another store over the same rendezvous, which torch's Gloo needs."""
        other = UnicollBackedStore(self.rendezvous)
        other._claimed = True
        # C++ does not keep the Python object alive.
        self._clones.append(other)
        return other

    def has_extended_api(self) -> bool:
        """False: append, multi_get and multi_set are not supported."""
        return False


def _popped(value: bytes) -> int:
    return int(value.partition(b" ")[0] or b"0")


# --- what torch's PrefixStore does not pass on ----------------------------------------------------

_PROBE = "\0prefix"
"""The end of a key with which a PrefixStore shows its prefix."""


class _Probed(threading.local):
    prefix = ""


_probed = _Probed()


def _prefix_of(store: Any) -> str:
    """The prefix of the keys of a PrefixStore in the store below all of them."""
    store.check([_PROBE])
    return _probed.prefix


@cache
def _extend_prefix_store() -> None:
    """Once: have the methods of a PrefixStore around a :class:`UnicollBackedStore` that torch lacks
    call that."""
    for name, has_key in (
        ("list_keys", False),
        ("queue_push", True),
        ("queue_pop", True),
        ("queue_len", True),
    ):
        # Old versions of torch lack some of them.
        if hasattr(dist.Store, name):
            setattr(
                dist.PrefixStore,
                name,
                _through_prefix(name, has_key, getattr(dist.PrefixStore, name)),
            )


def _through_prefix(name: str, has_key: bool, torchs: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(torchs)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        inner = innermost(self)
        if not isinstance(inner, UnicollBackedStore):
            return torchs(self, *arguments, **options)
        prefix = _prefix_of(self)
        # Only keys with this prefix are listed, as by torch's stores.
        if not has_key:
            return [key.removeprefix(prefix) for key in inner.list_keys() if key.startswith(prefix)]
        if "key" in options:
            arguments = (options.pop("key"), *arguments)
        return getattr(inner, name)(prefix + arguments[0], *arguments[1:], **options)

    return call


class TorchStoreLocation(StoreLocation):
    """Rendezvous in a store of torch; ``keep`` as for :class:`TorchBackedStore`."""

    # A torch store accepts every connection, and users of torch expect no warning.
    warns = True

    def __init__(self, store: Any, keep: bool = True) -> None:
        self._store: TorchBackedStore = TorchBackedStore(store, keep)
        inner = innermost(store)
        of_job = isinstance(inner, UnicollBackedStore) and inner.rendezvous.trusted
        self._is_private = of_job or isinstance(inner, dist.HashStore)
        self.address = type(inner).__name__
        if isinstance(inner, dist.TCPStore):
            self.master_host = inner.host
            self.address = f"torch's tcp://{interfaces.join_hostport(inner.host, inner.port)}"
        elif isinstance(inner, UnicollBackedStore):
            self.address = "unicoll's store, through torch"
            self.master_host = inner.rendezvous.listen_addresses[0]
        elif isinstance(inner, dist.HashStore):
            self.master_host = "127.0.0.1"

    def open(self, rank: int, world_size: int, deadline: float) -> Store:
        return self._store

    def private(self) -> bool:
        return self._is_private

    def close(self, linger: bool = False) -> None:
        self._store.close()


def innermost(store: Any) -> Any:
    """The store below all prefix stores."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
