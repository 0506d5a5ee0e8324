"""What a store holds, and what each operation does to it; without threads, sockets or files.

HashStore keeps one behind a lock, a TCPStore's server keeps one in its thread, and a FileStore replays its log
into one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ..errors import DistStoreError
from .wire import MAX_NUMBER, Op, max_value

__all__ = ["HIDDEN", "NotYet", "Table"]

Fields = Sequence[bytes]

HIDDEN = b"\0unicoll/"
"""Keys that begin so are the stores' own: counted by num_keys, as torch.distributed does, but not listed."""


class NotYet(Exception):
    """The operation must wait; ``keys`` are those that it misses."""

    def __init__(self, keys: Fields) -> None:
        self.keys = keys


class Table:
    """Values and queues by key.

    Attributes:
        touched: the keys that operations have changed, in order; whoever drives the table empties it.
    """

    def __init__(self) -> None:
        self.touched: list[bytes] = []
        self._largest = max_value()
        self._values: dict[bytes, bytes | bytearray] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._actions: dict[Op, Callable[[Fields], Fields]] = {
            Op.SET: self._set,
            Op.GET: self._get,
            Op.TRY_GET: self._try_get,
            Op.ADD: self._add,
            Op.COMPARE_SET: self._compare_set,
            Op.WAIT: self._wait,
            Op.CHECK: self._check,
            Op.DELETE: self._delete,
            Op.NUM_KEYS: self._num_keys,
            Op.LIST_KEYS: self._list_keys,
            Op.APPEND: self._append,
            Op.MULTI_GET: self._multi_get,
            Op.MULTI_SET: self._multi_set,
            Op.QUEUE_PUSH: self._push,
            Op.QUEUE_POP: self._pop,
            Op.QUEUE_TRY_POP: self._try_pop,
            Op.QUEUE_LEN: self._queue_len,
            Op.AT_LEAST: self._at_least,
        }

    def apply(self, op: Op, fields: Fields) -> Fields:
        """Does one operation and returns the reply's fields.

        Raises:
            NotYet: it waits for keys; nothing has changed.
            DistStoreError: it cannot be done to the value that the key has; nothing has changed.
        """
        return self._actions[op](fields)

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        self.touched.append(key)

    def _missing(self, keys: Fields) -> list[bytes]:
        return [key for key in keys if key not in self._values and key not in self._queues]

    def _number(self, key: bytes) -> int:
        value = self._values.get(key, b"0")
        try:
            if len(value) > MAX_NUMBER:
                raise ValueError
            return int(value)
        except ValueError:
            shown = f"{bytes(value[:40])!r}{'...' if len(value) > 40 else ''}"
            raise DistStoreError(
                f"key {key.decode('utf-8', 'replace')!r} holds {shown}, which is no number"
            ) from None

    def _set(self, fields: Fields) -> Fields:
        self._put(fields[0], fields[1])
        return ()

    def _get(self, fields: Fields) -> Fields:
        value = self._values.get(fields[0])
        if value is None:
            raise NotYet(fields)
        return (bytes(value),)

    def _try_get(self, fields: Fields) -> Fields:
        value = self._values.get(fields[0])
        return () if value is None else (bytes(value),)

    def _add(self, fields: Fields) -> Fields:
        key, amount = fields
        total = b"%d" % (self._number(key) + int(amount))
        if self._values.get(key) != total:
            self._put(key, total)
        return (total,)

    def _compare_set(self, fields: Fields) -> Fields:
        key, expected, desired = fields
        current = self._values.get(key)
        if current is None:
            if expected:
                return (expected,)
        elif current != expected:
            return (bytes(current),)
        if current != desired:
            self._put(key, desired)
        return (desired,)

    def _wait(self, fields: Fields) -> Fields:
        missing = self._missing(fields)
        if missing:
            raise NotYet(missing)
        return ()

    def _check(self, fields: Fields) -> Fields:
        return (b"0",) if self._missing(fields) else (b"1",)

    def _delete(self, fields: Fields) -> Fields:
        key = fields[0]
        had_value = self._values.pop(key, None) is not None
        had_queue = self._queues.pop(key, None) is not None
        if not had_value and not had_queue:
            return (b"0",)
        self.touched.append(key)
        return (b"1",)

    def _num_keys(self, fields: Fields) -> Fields:
        return (b"%d" % len(self._values.keys() | self._queues.keys()),)

    def _list_keys(self, fields: Fields) -> Fields:
        return [key for key in self._values.keys() | self._queues.keys() if not key.startswith(HIDDEN)]

    def _append(self, fields: Fields) -> Fields:
        key, value = fields
        current = self._values.get(key, b"")
        if len(current) + len(value) > self._largest:
            raise DistStoreError(
                f"appending {len(value)} bytes to key {key.decode('utf-8', 'replace')!r}, which has {len(current)}, "
                f"would pass the limit of {self._largest} (UNICOLL_STORE_MAX_VALUE)"
            )
        if not isinstance(current, bytearray):
            current = self._values[key] = bytearray(current)
        current += value
        self.touched.append(key)
        return ()

    def _multi_get(self, fields: Fields) -> Fields:
        missing = [key for key in fields if key not in self._values]
        if missing:
            raise NotYet(missing)
        return [bytes(self._values[key]) for key in fields]

    def _multi_set(self, fields: Fields) -> Fields:
        for key, value in zip(fields[::2], fields[1::2], strict=True):
            self._put(key, value)
        return ()

    def _push(self, fields: Fields) -> Fields:
        key, value = fields
        self._queues.setdefault(key, deque()).append(value)
        self.touched.append(key)
        return ()

    def _pop(self, fields: Fields) -> Fields:
        popped = self._try_pop(fields)
        if not popped:
            raise NotYet(fields)
        return popped

    def _try_pop(self, fields: Fields) -> Fields:
        key = fields[0]
        queue = self._queues.get(key)
        if queue is None:
            return ()
        value = queue.popleft()
        if not queue:
            del self._queues[key]
        self.touched.append(key)
        return (value,)

    def _queue_len(self, fields: Fields) -> Fields:
        return (b"%d" % len(self._queues.get(fields[0], ())),)

    def _at_least(self, fields: Fields) -> Fields:
        key, bound = fields
        if self._number(key) < int(bound):
            raise NotYet((key,))
        return ()
