"""The contents of a store and the operations on them, without threads, sockets or files.

A HashStore has one under a lock, a TCPStore's server has one in its thread, and a FileStore replays
its log into one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from unicoll.errors import DistStoreError
from unicoll.net.stores.protocol import MAX_NUMBER, StoreOp, max_value

Fields = Sequence[bytes]

HIDDEN = b"\0unicoll/"
"""Prefix of the stores' own keys, which num_keys counts, as in torch.distributed, and list_keys
omits."""


class WaitRequired(Exception):
    """The operation has to wait for ``keys``."""

    def __init__(self, keys: Fields) -> None:
        self.keys = keys


class Table:
    """Values and queues by key.

    An exception of a signal's handler leaves an operation done or not, or of several keys done for
    some: what changes a key is no call of a function, or the last one.

    Attributes:
        changed_keys: the keys that operations have changed, in order; the caller of the table
            clears it.
    """

    def __init__(self) -> None:
        self.changed_keys: list[bytes] = []
        self._max_value = max_value()
        self._values: dict[bytes, bytes | bytearray] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        # For each queue: how many values have been pushed, since it was empty, that have not ended
        # a WAIT.
        self._wakes: dict[bytes, int] = {}
        self._operations: dict[StoreOp, Callable[[Fields], Fields]] = {
            op: getattr(self, f"_{op.name.lower()}") for op in StoreOp
        }

    def apply(self, op: StoreOp, fields: Fields, waited: bool = False) -> Fields:
        """Executes one operation and returns the reply's fields.

        ``waited``: it had to wait, and is tried again. A value in a queue ends the WAIT for it of
        one caller, as in torch.distributed.

        Raises:
            WaitRequired: it has to wait for keys; nothing was changed.
            DistStoreError: it is not possible with the present value of the key; nothing was
                changed.
        """
        if waited and op is StoreOp.WAIT and len(fields) == 1 and fields[0] not in self._values:
            if not self._wakes.get(fields[0]):
                raise WaitRequired(fields)
            self._wakes[fields[0]] -= 1
        return self._operations[op](fields)

    def _put(self, key: bytes, value: bytes) -> None:
        # An exception can come only after the call: then both are done.
        self._values[key] = value
        self.changed_keys.append(key)

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
                f"key {key.decode('utf-8', 'replace')!r} holds {shown}, which is not a number"
            ) from None

    def _set(self, fields: Fields) -> Fields:
        self._put(fields[0], fields[1])
        return ()

    def _get(self, fields: Fields) -> Fields:
        value = self._values.get(fields[0])
        if value is None:
            raise WaitRequired(fields)
        return (bytes(value),)

    def _try_get(self, fields: Fields) -> Fields:
        value = self._values.get(fields[0])
        return () if value is None else (bytes(value),)

    def _add(self, fields: Fields) -> Fields:
        key, amount = fields
        total = b"%d" % (self._number(key) + int(amount))
        # A number that is read by adding 0 writes no record to a file, and wakes nobody.
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
            raise WaitRequired(missing)
        return ()

    def _check(self, fields: Fields) -> Fields:
        return (b"0",) if self._missing(fields) else (b"1",)

    def _delete(self, fields: Fields) -> Fields:
        key = fields[0]
        had_value = self._values.pop(key, None) is not None
        had_queue = self._queues.pop(key, None) is not None
        self._wakes.pop(key, None)
        if not had_value and not had_queue:
            return (b"0",)
        self.changed_keys.append(key)
        return (b"1",)

    def _num_keys(self, fields: Fields) -> Fields:
        return (b"%d" % len(self._values.keys() | self._queues.keys()),)

    def _list_keys(self, fields: Fields) -> Fields:
        return [
            key for key in self._values.keys() | self._queues.keys() if not key.startswith(HIDDEN)
        ]

    def _append(self, fields: Fields) -> Fields:
        key, value = fields
        current = self._values.get(key, b"")
        if len(current) + len(value) > self._max_value:
            raise DistStoreError(
                f"appending {len(value)} bytes to key {key.decode('utf-8', 'replace')!r}, which has"
                f" {len(current)}, would exceed the limit of {self._max_value}"
                " (UNICOLL_STORE_MAX_VALUE)"
            )
        # A bytearray grows in place, so many appends do not copy the value each time.
        if not isinstance(current, bytearray):
            current = self._values[key] = bytearray(current)
        current += value
        self.changed_keys.append(key)
        return ()

    def _multi_get(self, fields: Fields) -> Fields:
        missing = [key for key in fields if key not in self._values]
        if missing:
            raise WaitRequired(missing)
        return [bytes(self._values[key]) for key in fields]

    def _multi_set(self, fields: Fields) -> Fields:
        for key, value in zip(fields[::2], fields[1::2], strict=True):
            self._put(key, value)
        return ()

    def _queue_push(self, fields: Fields) -> Fields:
        key, value = fields
        queue = self._queues.get(key)
        if queue is None:
            # The call comes before the changes, which no exception can separate.
            new = deque((value,))
            self._wakes[key] = 1
            self._queues[key] = new
        else:
            # An exception can come only after append(): then both are done.
            self._wakes[key] += 1
            queue.append(value)
        self.changed_keys.append(key)
        return ()

    def _queue_pop(self, fields: Fields) -> Fields:
        popped = self._queue_try_pop(fields)
        if not popped:
            raise WaitRequired(fields)
        return popped

    def _queue_try_pop(self, fields: Fields) -> Fields:
        key = fields[0]
        queue = self._queues.get(key)
        if queue is None:
            return ()
        value = queue[0]
        # An empty queue does not exist: WAIT and CHECK only look for the key.
        if len(queue) > 1:
            queue.popleft()
        else:
            del self._queues[key], self._wakes[key]
        self.changed_keys.append(key)
        return (value,)

    def _queue_len(self, fields: Fields) -> Fields:
        return (b"%d" % len(self._queues.get(fields[0], ())),)

    def _at_least(self, fields: Fields) -> Fields:
        key, bound = fields
        if self._number(key) < int(bound):
            raise WaitRequired((key,))
        return ()
