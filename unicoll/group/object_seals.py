"""The MACs of objects that are sent between hosts: no bytes are unpickled that an attacker on the
path has made.

    sealed object = data | number (u64) | sender (i32) | receiver (i32) | MAC (16)
    MAC = keyed BLAKE2b (RFC 7693) of number | sender | receiver | 0 | data,
          or of number | sender | receiver | 1 | SHA-256 of large data

The key is derived from the job's key for one group. A collective has its number, which all members
know; its receiver is -1 if all members are. A message has its number among those from this sender
to this receiver, and none is accepted twice.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from hmac import compare_digest, digest
from itertools import count
from typing import TYPE_CHECKING

from unicoll.errors import AuthenticationError

if TYPE_CHECKING:
    from unicoll.backend.contract import Backend, Context

Bytes = bytes | memoryview

_ALL = -1
"""In place of a receiver: all members."""
_FIELDS = struct.Struct("<Qii")
_MAC_SIZE = 16
_SIZE = _FIELDS.size + _MAC_SIZE
# Numbers of messages begin above those of collectives, so an object of one kind is never taken for
# one of the other.
_FIRST_MESSAGE = 1 << 63
_LARGE = 4096
"""Bytes from which SHA-256 is faster than BLAKE2b."""


class ObjectSeals:
    """The MACs of one group's objects.

    Args:
        rank: this process's rank in the group.
        name: the group's, unique in the job.
        key: the job's.
        wanted: False: objects have no MAC.
    """

    def __init__(self, rank: int, name: str, key: bytes, wanted: bool) -> None:
        self._rank = rank
        self._wanted = wanted
        # The hash has read the key once; each MAC begins with a copy of this state.
        self._keyed = hashlib.blake2b(
            key=digest(key, f"objects {name}".encode(), "sha256"), digest_size=_MAC_SIZE
        )
        self._calls = count()
        self._sent: dict[int, count[int]] = {}
        self._next: dict[int, int] = {}
        self._missing: dict[int, set[int]] = {}
        self._lock = threading.Lock()

    def next_collective(self) -> int:
        """The number of the next collective; all members make this call."""
        return next(self._calls)

    def seal(self, data: bytes, call: int | None, receiver: int = _ALL) -> bytes:
        """The bytes to send for an object of this rank, in a collective or, with None, in a
        message."""
        if not self._wanted:
            return data
        if call is None:
            # Two threads that send to a new receiver at once count with one object, because
            # setdefault() is atomic.
            call = next(
                self._sent.get(receiver) or self._sent.setdefault(receiver, count(_FIRST_MESSAGE))
            )
        fields = _FIELDS.pack(call, self._rank, receiver)
        return b"".join((data, fields, self._mac(data, fields)))

    def open(self, body: Bytes, sender: int, call: int | None, receiver: int = _ALL) -> Bytes:
        """The data of a received body.

        Raises:
            AuthenticationError: group rank ``sender`` has not sent it in this call to this
                receiver.
        """
        if not self._wanted:
            return body
        size = len(body) - _SIZE
        if size >= 0:
            data = body[:size]
            number = _FIELDS.unpack_from(body, size)[0] if call is None else call
            fields = _FIELDS.pack(number, sender, receiver)
            # The MAC is verified first. Only a number that its sender has written is noted as
            # received: a forged one could make a later message look repeated, or make the set of
            # missing numbers large.
            if compare_digest(fields + self._mac(data, fields), body[size:]) and (
                call is not None or self._is_new(sender, number - _FIRST_MESSAGE)
            ):
                return data
        raise AuthenticationError(
            "the MAC of an object is wrong: its bytes were changed, repeated or inserted on the"
            " path"
        )

    def _mac(self, data: Bytes, fields: bytes) -> bytes:
        mac = self._keyed.copy()
        # The byte between them differs: else the MAC of large data would be that of their digest,
        # and an attacker could replace the one by the other.
        if len(data) < _LARGE:
            mac.update(b"".join((fields, b"\0", data)))
        else:
            mac.update(b"".join((fields, b"\1", hashlib.sha256(data).digest())))
        return mac.digest()

    def _is_new(self, sender: int, number: int) -> bool:
        """False if the message from this rank was received already.

        Messages come in any order: those with other tags, or of other threads, may have been sent
        before.
        """
        with self._lock:
            following, missing = self._next.get(sender, 0), self._missing.setdefault(sender, set())
            if number >= following:
                missing.update(range(following, number))
                self._next[sender] = number + 1
                return True
            if number in missing:
                missing.remove(number)
                return True
            return False


def needs_seals(context: Context, host: Backend) -> bool:
    """True if objects may be pickled and go between hosts over connections without protection;
    equal on all members.

    Args:
        host: the backend that moves the objects.
    """
    job = context.job
    if not job.allows_pickle or job.control is None or host.is_protected:
        return False
    peers = [job.control.peers[rank] for rank in context.ranks]
    # Clones of a virtual machine have the same host_id.
    return len({(peer.host, peer.address, peer.host_id) for peer in peers}) > 1
