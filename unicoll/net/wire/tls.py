"""TLS 1.3 inside an authenticated connection, with the key that the handshake has derived.

From Python 3.13 the key is TLS's external pre-shared key. Older Pythons have no pre-shared keys for
TLS 1.3: there the server shows a certificate, which proves nothing (its private key is in this
package), and each side proves with a MAC under the key that it took part in the same TLS handshake.
The first data in each direction are

    HMAC-SHA256(key, "client" or "server" | the client's Finished message)

The Finished message is a MAC over the whole handshake, including the ephemeral keys, so a relay
with a separate TLS connection to each side cannot forward one side's proof to the other. No data
are sent before the peer's proof is verified.
"""

from __future__ import annotations

import hmac
import ssl
import threading
from pathlib import Path
from typing import Any

from unicoll.net.wire.records import TamperedError
from unicoll.net.wire.secret import Key

_CERTIFICATE = Path(__file__).with_name("tls_certificate.pem")
_IDENTITY = "unicoll"
_PROOF_SIZE = 32
_READ_SIZE = 1 << 16


class TlsRecords:
    """One side of a TLS connection (see :class:`unicoll.net.wire.records.Records`)."""

    def __init__(self, key: Key, server: bool) -> None:
        self._key = key
        self._server = server
        # One thread may seal while another one opens, and the objects of OpenSSL are not
        # thread-safe.
        self._lock = threading.Lock()
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._uses_psk = getattr(ssl, "HAS_PSK", False)
        self._tls = _context(key, server, self._uses_psk).wrap_bio(
            self._in, self._out, server_side=server
        )
        self._handshake_done = False
        self._proof = b""
        self.ready = False
        self._handshake()

    def seal(self, data: Any) -> bytes:
        with self._lock:
            if not self.ready:
                raise TamperedError(
                    "the peer has not proved that it takes part in this TLS handshake"
                )
            self._tls.write(data)
            return self._out.read()

    def open(self, received: Any) -> bytes:
        with self._lock:
            self._in.write(received)
            try:
                if not self._handshake_done and not self._handshake():
                    return b""
                data = self._read()
            except ssl.SSLError as error:
                raise TamperedError(f"TLS: {error.reason or error}") from error
        if self.ready:
            return data
        # Only the thread that receives uses this, so it needs no lock.
        self._proof += data
        if len(self._proof) < _PROOF_SIZE:
            return b""
        if not hmac.compare_digest(self._proof[:_PROOF_SIZE], self._make_proof(not self._server)):
            raise TamperedError(
                "the peer's proof is for another TLS handshake: the connection passes through a"
                " third process"
            )
        self.ready = True
        return self._proof[_PROOF_SIZE:]

    def outgoing(self) -> bytes:
        with self._lock:
            return self._out.read()

    def _read(self) -> bytes:
        found = []
        try:
            while chunk := self._tls.read(_READ_SIZE):
                found.append(chunk)
        except ssl.SSLWantReadError:
            pass
        return b"".join(found)

    def _handshake(self) -> bool:
        """Continue the TLS handshake; True once it is done."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        self._handshake_done = True
        if self._uses_psk:
            self.ready = True
        else:
            # The proof is the first data of this side: seal() refuses others until the proof of the
            # peer is verified.
            self._tls.write(self._make_proof(self._server))
        return True

    def _make_proof(self, server: bool) -> bytes:
        # This is the first Finished message, also in TLS 1.3.
        finished = self._tls.get_channel_binding("tls-unique")
        if not finished:
            raise TamperedError("TLS has no Finished message")
        return hmac.digest(self._key, (b"server" if server else b"client") + finished, "sha256")


def _context(key: Key, server: bool, uses_psk: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    if server:
        # Tickets serve the resumption of sessions, which does not exist here.
        context.num_tickets = 0
        if uses_psk:
            context.set_psk_server_callback(lambda _: bytes(key))  # type: ignore[attr-defined]
        else:
            context.load_cert_chain(_CERTIFICATE)
    elif uses_psk:
        # No authority is trusted, so a server that shows a certificate instead of using the key is
        # refused.
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_psk_client_callback(lambda _: (_IDENTITY, bytes(key)))  # type: ignore[attr-defined]
    else:
        # The certificate proves nothing; the proofs do.
        context.verify_mode = ssl.CERT_NONE
    return context
