"""TLS 1.3 within a connection whose handshake is done, with the key that the handshake has derived.

From Python 3.13 the key is TLS's external pre-shared key. Before, Python has no such keys for TLS 1.3, so the server
shows a certificate, which proves nothing (its private key is in this package), and each side then proves with a MAC
under the key that it has seen the same TLS handshake: the first data in each direction are

    HMAC-SHA256(key, "client" or "server" | the client's Finished message)

The Finished message is a MAC over the whole handshake, the ephemeral keys included, so a relay with a TLS connection
to either side cannot pass one side's proof on to the other. No data are sent before the peer's proof has come.
"""

from __future__ import annotations

import hmac
import ssl
import threading
from pathlib import Path
from typing import Any

from .auth import Key
from .channel import TamperedError

__all__ = ["TlsRecords"]

_CERTIFICATE = Path(__file__).with_name("tls_certificate.pem")
_IDENTITY = "unicoll"
_PROOF = 32
_READ = 1 << 16


class TlsRecords:
    """A side of a TLS connection (see :class:`unicoll.channel.Records`).

    Args:
        key: from the handshake; this connection's alone.
        server: which side this is.
    """

    def __init__(self, key: Key, server: bool) -> None:
        self._key = key
        self._server = server
        self._lock = threading.Lock()  # OpenSSL's objects are for one thread at a time
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._by_key = getattr(ssl, "HAS_PSK", False)
        self._tls = _context(key, server, self._by_key).wrap_bio(self._in, self._out, server_side=server)
        self._shaken = False
        self._proof = b""
        self.ready = False
        self._shake()

    def seal(self, data: Any) -> bytes:
        with self._lock:
            assert self.ready
            self._tls.write(data)
            return self._out.read()

    def open(self, received: Any) -> bytes:
        with self._lock:
            self._in.write(received)
            try:
                if not self._shaken and not self._shake():
                    return b""
                data = self._read()
            except ssl.SSLError as error:
                raise TamperedError(f"TLS says {error.reason or error}") from error
        if self.ready:
            return data
        self._proof += data
        if len(self._proof) < _PROOF:
            return b""
        if not hmac.compare_digest(self._proof[:_PROOF], self._prove(not self._server)):
            raise TamperedError("a relay stands between the two ends")
        self.ready = True
        return self._proof[_PROOF:]

    def outgoing(self) -> bytes:
        with self._lock:
            return self._out.read()

    def _read(self) -> bytes:
        found = []
        try:
            while piece := self._tls.read(_READ):
                found.append(piece)
        except ssl.SSLWantReadError:
            pass
        return b"".join(found)

    def _shake(self) -> bool:
        """Go on with TLS's handshake; True once it is done."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        self._shaken = True
        if self._by_key:
            self.ready = True
        else:
            self._tls.write(self._prove(self._server))
        return True

    def _prove(self, server: bool) -> bytes:
        finished = self._tls.get_channel_binding("tls-unique")  # in TLS 1.3, too, this is the first Finished message
        assert finished
        return hmac.digest(self._key, (b"server" if server else b"client") + finished, "sha256")


def _context(key: Key, server: bool, by_key: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    if server:
        context.num_tickets = 0  # no session is resumed
        if by_key:
            context.set_psk_server_callback(lambda _: bytes(key))  # type: ignore[attr-defined]
        else:
            context.load_cert_chain(_CERTIFICATE)
    elif by_key:
        # With no authority to trust, a server that has a certificate in place of the key is refused.
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_psk_client_callback(lambda _: (_IDENTITY, bytes(key)))  # type: ignore[attr-defined]
    else:
        context.verify_mode = ssl.CERT_NONE  # the proofs verify
    return context
