"""Store methods as requests: checks and packs the arguments, for all of unicoll's stores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from unicoll.errors import (
    DistArgumentError,
    DistStoreError,
    DistTypeError,
    QueueEmptyError,
    StoreTimeoutError,
)
from unicoll.net.stores.base import (
    DEFAULT_TIMEOUT,
    Store,
    Timeout,
    Value,
    as_bytes,
    integer,
    key_list,
    key_value_pairs,
    seconds_of,
)
from unicoll.net.stores.protocol import MAX_KEY, StoreOp, max_request, max_value, pack_request

_SHOWN_KEYS = 8


class RequestStore(Store):
    """A store whose methods are single requests, executed by :meth:`_execute`."""

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._timeout = seconds_of(timeout)
        self._max_value = max_value()

    @abstractmethod
    def _execute(
        self, op: StoreOp, fields: Sequence[bytes], seconds: float, name: str
    ) -> Sequence[bytes]:
        """Executes one operation for the method ``name``; it may wait ``seconds`` for keys. Returns
        the reply's fields.

        Raises:
            StoreTimeoutError: keys were missing for ``seconds``; see :meth:`_timeout_error`.
        """

    def set(self, key: str, value: Value) -> None:
        self._execute(StoreOp.SET, (self._key(key, "set"), self._value(value, "set")), 0.0, "set")

    def get(self, key: str) -> bytes:
        return self._execute(StoreOp.GET, (self._key(key, "get"),), self._timeout, "get")[0]

    def try_get(self, key: str) -> bytes | None:
        reply = self._execute(StoreOp.TRY_GET, (self._key(key, "try_get"),), 0.0, "try_get")
        return reply[0] if reply else None

    def add(self, key: str, amount: int) -> int:
        number = integer(amount, "amount", "add")
        if not -(1 << 63) <= number < 1 << 63:
            raise DistArgumentError(f"add: the amount {number} does not fit 64 bits", op="add")
        return int(
            self._execute(StoreOp.ADD, (self._key(key, "add"), b"%d" % number), 0.0, "add")[0]
        )

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        op = "compare_set"
        fields = (
            self._key(key, op),
            self._value(expected_value, op),
            self._value(desired_value, op),
        )
        return self._execute(StoreOp.COMPARE_SET, fields, 0.0, op)[0]

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        seconds = self._timeout if timeout is None else seconds_of(timeout)
        self._execute(StoreOp.WAIT, self._keys(keys, "wait"), seconds, "wait")

    def check(self, keys: Sequence[str]) -> bool:
        return self._execute(StoreOp.CHECK, self._keys(keys, "check"), 0.0, "check")[0] == b"1"

    def delete_key(self, key: str) -> bool:
        return (
            self._execute(StoreOp.DELETE, (self._key(key, "delete_key"),), 0.0, "delete_key")[0]
            == b"1"
        )

    def num_keys(self) -> int:
        return int(self._execute(StoreOp.NUM_KEYS, (), 0.0, "num_keys")[0])

    def list_keys(self) -> list[str]:
        return [_text(key) for key in self._execute(StoreOp.LIST_KEYS, (), 0.0, "list_keys")]

    def append(self, key: str, value: Value) -> None:
        self._execute(
            StoreOp.APPEND, (self._key(key, "append"), self._value(value, "append")), 0.0, "append"
        )

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(
            self._execute(
                StoreOp.MULTI_GET, self._keys(keys, "multi_get"), self._timeout, "multi_get"
            )
        )

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        fields: list[bytes] = []
        for key, value in key_value_pairs(keys, values):
            fields += (self._key(key, "multi_set"), self._value(value, "multi_set"))
        self._execute(StoreOp.MULTI_SET, fields, 0.0, "multi_set")

    def queue_push(self, key: str, value: Value) -> None:
        fields = (self._key(key, "queue_push"), self._value(value, "queue_push"))
        self._execute(StoreOp.QUEUE_PUSH, fields, 0.0, "queue_push")

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        name = self._key(key, "queue_pop")
        if block:
            return self._execute(StoreOp.QUEUE_POP, (name,), self._timeout, "queue_pop")[0]
        popped = self._execute(StoreOp.QUEUE_TRY_POP, (name,), 0.0, "queue_pop")
        if not popped:
            raise QueueEmptyError(f"queue {key!r} is empty ({self!r})", op="queue_pop")
        return popped[0]

    def queue_len(self, key: str) -> int:
        return int(
            self._execute(StoreOp.QUEUE_LEN, (self._key(key, "queue_len"),), 0.0, "queue_len")[0]
        )

    def has_extended_api(self) -> bool:
        return True

    def _key(self, key: str, op: str) -> bytes:
        if not isinstance(key, str):
            raise DistTypeError(f"{op}: a key is a str, not {type(key).__name__}", op=op)
        encoded = key.encode("utf-8", "surrogateescape")
        if len(encoded) > MAX_KEY:
            raise DistArgumentError(
                f"{op}: a key has at most {MAX_KEY} bytes, not {len(encoded)}", op=op
            )
        return encoded

    def _keys(self, keys: Sequence[str], op: str) -> list[bytes]:
        return [self._key(key, op) for key in key_list(keys, op)]

    def _value(self, value: Value, op: str) -> bytes:
        data = as_bytes(value, op)
        if len(data) > self._max_value:
            raise DistArgumentError(
                f"{op}: a value has at most {self._max_value} bytes, not {len(data)}"
                " (UNICOLL_STORE_MAX_VALUE)",
                op=op,
            )
        return data

    def _pack(self, op: StoreOp, fields: Sequence[bytes], seconds: float, name: str) -> bytes:
        request = pack_request(op, fields, seconds)
        if len(request) > max_request(self._max_value):
            raise DistArgumentError(
                f"{name}: {len(request)} bytes in one request; values may have {self._max_value}"
                " together (UNICOLL_STORE_MAX_VALUE)",
                op=name,
            )
        return request

    def _timeout_error(
        self, missing: Sequence[bytes], seconds: float, name: str, note: str = ""
    ) -> StoreTimeoutError:
        shown = ", ".join(repr(_text(key)) for key in missing[:_SHOWN_KEYS])
        if len(missing) > _SHOWN_KEYS:
            shown += f" and {len(missing) - _SHOWN_KEYS} more"
        plural = "" if len(missing) == 1 else "s"
        what, done = ("queue", "pushed to") if name == "queue_pop" else ("key", "set")
        return StoreTimeoutError(
            f"{name}: waited {seconds:g} s at {self!r} for the {what}{plural} {shown}{note}; no"
            f" process has {done} {'them' if plural else 'it'}: a process of the job has not"
            " started, is late, or has failed",
            op=name,
        )

    def _closed_error(self, name: str) -> DistStoreError:
        return DistStoreError(f"{name}: {self!r} has been closed", op=name)


def _text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")
