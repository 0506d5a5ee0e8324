"""A view of a store with values signed with the job's key, for stores that other processes can
write to."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from unicoll.errors import AuthenticationError
from unicoll.net.stores.base import PrefixStore, Value, as_bytes, key_value_pairs

_DIGITS = 64


class SignedStore(PrefixStore):
    """Each value has an HMAC over itself and its full key, so it cannot be changed or moved to
    another key.

    A key that names its publisher and job is covered by the MAC. Numbers (:meth:`add`), queues and
    the existence of keys are not signed. Values are set once: an earlier value of the same key
    would be accepted.
    """

    def __init__(self, view: PrefixStore, key: bytes) -> None:
        # What is not signed goes to the underlying store directly, with the same prefix.
        super().__init__(view._prefix, view.underlying_store)
        self._view = view
        self._key = key

    def _sign(self, key: str, value: Value) -> bytes:
        data = as_bytes(value, "set")
        name = self._full_key(key, "set").encode("utf-8", "surrogateescape")
        # The length separates the name from the value: no part of one can count as part of the
        # other.
        signed = b"%d %s %s" % (len(name), name, data)
        return hmac.digest(self._key, signed, "sha256").hex().encode() + data

    def _verify(self, key: str, found: bytes) -> bytes:
        value = found[_DIGITS:]
        if not hmac.compare_digest(found, self._sign(key, value)):
            raise AuthenticationError(
                f"the value of {key!r} in the store was forged: it is not signed with this job's"
                " key, so its writer is not a member of the job"
            )
        return value

    def set(self, key: str, value: Value) -> None:
        self._view.set(key, self._sign(key, value))

    def get(self, key: str) -> bytes:
        return self._verify(key, self._view.get(key))

    def try_get(self, key: str) -> bytes | None:
        found = self._view.try_get(key)
        return None if found is None else self._verify(key, found)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [
            self._verify(key, found)
            for key, found in zip(keys, self._view.multi_get(keys), strict=True)
        ]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        pairs = key_value_pairs(keys, values)
        self._view.multi_set(
            [key for key, _ in pairs], [self._sign(key, value) for key, value in pairs]
        )

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        # An empty expected value stands for an absent key, which has no signature.
        expected = self._sign(key, expected_value) if expected_value else expected_value
        found = self._view.compare_set(key, expected, self._sign(key, desired_value))
        return self._verify(key, found) if found else found

    def append(self, key: str, value: Value) -> None:
        """Not supported: the whole value is signed."""
        raise self._unsupported("append")

    def clone(self) -> SignedStore:
        return SignedStore(self._view.clone(), self._key)
