"""Records: protected chunks of the data of one connection, and their MAC.

    record = data's length (u32) | MAC (16) | data, up to 128 KiB
    MAC    = HMAC-SHA256(key of the direction, record's number (u64) | data's length (u32) | data), cut to 16 bytes

The number is not sent. It makes the MAC of a repeated, dropped or reordered record wrong.
"""

from __future__ import annotations

import errno
import hmac
import struct
from typing import Any, Protocol

from unicoll.net.wire.secret import Key

MAX_DATA = 1 << 17
"""Bytes of data in a record at most."""

_LENGTH = struct.Struct("<I")
_NUMBER_AND_LENGTH = struct.Struct("<QI")
_TAG_SIZE = 16
HEADER_SIZE = _LENGTH.size + _TAG_SIZE

Buffer = bytes | memoryview


class TamperedError(OSError):
    """Received bytes fail the integrity check: they were changed, repeated, reordered or inserted
    on the path."""

    def __init__(self, detail: str) -> None:
        super().__init__(errno.EBADMSG, f"the integrity check of its connection failed: {detail}")


class Records(Protocol):
    """The protection of one connection, without its socket. One thread may seal while another one
    opens."""

    def seal(self, data: Any) -> bytes:
        """The bytes to send for up to :data:`MAX_DATA` bytes of data."""

    def open(self, received: Any) -> Buffer:
        """Takes received bytes in any chunks; returns the data of the records that are complete.

        Raises:
            TamperedError: the bytes fail the integrity check.
        """

    def outgoing(self) -> bytes:
        """Bytes of the protection itself to send now; call it at the start and after each
        :meth:`open`."""

    @property
    def ready(self) -> bool:
        """True once data can be sealed."""


class MacRecords:
    """Data in the clear, each record with a MAC."""

    ready = True

    def __init__(self, key: Key, server: bool) -> None:
        # Each direction has its own key, so a record that is sent back to its sender has a wrong
        # MAC.
        keys = [hmac.digest(key, side + b" sends", "sha256") for side in (b"client", b"server")]
        self._seal_mac, self._open_mac = (
            hmac.new(k, b"", "sha256") for k in (reversed(keys) if server else keys)
        )
        self._sealed_count = self._opened_count = 0
        self._received = bytearray()

    def seal(self, data: Any) -> bytes:
        tag = _tag(self._seal_mac, self._sealed_count, data)
        self._sealed_count += 1
        return b"".join((_LENGTH.pack(len(data)), tag, data))

    def open(self, received: Any) -> Buffer:
        self._received += received
        view = memoryview(self._received)
        found = []
        at = 0
        while len(view) - at >= HEADER_SIZE:
            (length,) = _LENGTH.unpack_from(view, at)
            if length > MAX_DATA:
                raise TamperedError(f"a record of {length} bytes")
            start, stop = at + HEADER_SIZE, at + HEADER_SIZE + length
            if stop > len(view):
                break
            data = view[start:stop]
            tag = _tag(self._open_mac, self._opened_count, data)
            if not hmac.compare_digest(view[at + _LENGTH.size : start], tag):
                raise TamperedError("the MAC of a record is wrong")
            self._opened_count += 1
            found.append(data)
            at = stop
        if at:
            # The rest goes to a new buffer: the returned data are views of the old one, which
            # therefore cannot be resized.
            self._received = bytearray(view[at:])
        return found[0] if len(found) == 1 else b"".join(found)

    def outgoing(self) -> bytes:
        return b""


def _tag(keyed: hmac.HMAC, number: int, data: Any) -> bytes:
    mac = keyed.copy()
    mac.update(_NUMBER_AND_LENGTH.pack(number, len(data)))
    mac.update(data)
    return mac.digest()[:_TAG_SIZE]
