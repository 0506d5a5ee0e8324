"""Generation of inputs, and detection of findings."""

from __future__ import annotations

import pickle
import random
import resource
import secrets
import signal
import socket
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest import mock

__all__ = [
    "HANG_SECONDS",
    "KEY",
    "Found",
    "Hung",
    "Target",
    "check",
    "chunks",
    "generate",
    "pair",
    "watched",
]

KEY = b"k" * 32
HANG_SECONDS = 5.0
MEMORY = 256 << 20
LONGEST = 64 * 1024
NUMBERS = (
    0,
    1,
    2,
    63,
    64,
    100,
    127,
    128,
    255,
    4096,
    2**15,
    2**16 - 1,
    2**16,
    2**20,
    2**20 + 1,
    2**30,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
TEXTS = (
    b"-1",
    b"9" * 39,
    b"9" * 4300,
    b"-" + b"9" * 4301,
    b"1e400",
    b"NaN",
    b"Infinity",
    b"null",
    b"[" * 3000,
    b'{"t":' * 2000,
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\0",
    b"",
    b'"t"',
    b"true",
    b"[]",
    b"{}",
    b"0x10",
    b"1_0",
)


class Found(Exception):
    """A finding that is not an exception of the parser."""


class Hung(BaseException):
    """An input took too long; not an Exception, so that the parser's handlers do not catch it."""


# --- inputs ---------------------------------------------------------------------------------------


def mutated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A valid input with some changes; ``other`` is another one, for splices."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(made) + 1)
        end = min(len(made), at + rng.choice((1, 2, 4, 8, 32)))
        kind = rng.randrange(9)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(made):
            made[at] = rng.randrange(256)
        elif kind == 2:
            del made[at:]
        elif kind == 3:
            made[at:] = other[rng.randrange(len(other) + 1) :]
        elif kind == 4:
            size = rng.choice((1, 2, 4, 8))
            made[at : at + size] = (rng.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")
        elif kind == 5:
            made[at:at] = random_bytes(rng, 16)
        elif kind == 6:
            made[at:at] = made[at:end] * rng.choice((1, 2, 50))
        elif kind == 7:
            del made[at:end]
        elif kind == 8:
            made[at:end] = rng.choice(TEXTS)
    return bytes(made[:LONGEST])


def random_bytes(rng: random.Random, most: int) -> bytes:
    return bytes(rng.randrange(256) for _ in range(rng.randrange(most + 1)))


def generate(rng: random.Random, target: Target) -> bytes:
    """An input: in most cases a valid one with changes."""
    kind = rng.randrange(50)
    if kind == 0:
        return rng.choice(target.valid)
    if kind < 4:
        return bytes([rng.randrange(256)]) + random_bytes(rng, 300)
    return mutated(rng, rng.choice(target.valid), rng.choice(target.valid))


# --- detection ------------------------------------------------------------------------------------

_EXECUTION = {
    "pickle.find_class",
    "exec",
    "compile",
    "import",
    "marshal.loads",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "ctypes.dlopen",
    "os.fork",
}
_executed: list[str] = []
_watching = False


def _audit(event: str, args: Any) -> None:
    if _watching and event in _EXECUTION:
        _executed.append(f"{event} {args!r:.80}")


def _unpickled(data: Any, **_: Any) -> NoReturn:
    _executed.append("pickle.loads")
    raise Found("unpickled")


def _no_nonce(size: int) -> bytes:
    return b"\5" * size


def _too_long(*_: Any) -> NoReturn:
    raise Hung(f"more than {HANG_SECONDS:g} s")


@contextmanager
def watched() -> Iterator[None]:
    """Fixes nonces, refuses pickles, sets an alarm for hangs, and records the execution of code."""
    before = signal.signal(signal.SIGALRM, _too_long)
    if not getattr(sys, "_unicoll_audited", False):
        sys.addaudithook(_audit)  # cannot be removed
        sys._unicoll_audited = True  # type: ignore[attr-defined]
    try:
        with (
            mock.patch.object(pickle, "loads", _unpickled),
            mock.patch.object(secrets, "token_bytes", _no_nonce),
        ):
            yield
    finally:
        signal.signal(signal.SIGALRM, before)


def check(target: Target, data: bytes) -> bool:
    """True if the parser accepted an input.

    Raises:
        Exception, Hung: a finding.
    """
    global _watching
    _executed.clear()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    _watching = True
    try:
        accepted = target.run(data)
    finally:
        _watching = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    if _executed:
        raise Found(f"executed: {', '.join(_executed)}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if grown > MEMORY:
        raise Found(f"{grown >> 20} MiB of memory for {len(data)} bytes")
    return accepted


class Target(ABC):
    """A kind of parser.

    Attributes:
        valid: inputs that are accepted.
    """

    valid: Sequence[bytes]

    @abstractmethod
    def run(self, data: bytes) -> bool:
        """True if the parser accepted an input; any exception is a finding. Depends on ``data``
        only."""

    def close(self) -> None:  # noqa: B027 - optional
        """Release its resources."""


def chunks(data: bytes) -> list[bytes]:
    """An input in up to three chunks, which depend on it only."""
    rng = random.Random(zlib.crc32(data))
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(3)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]


@contextmanager
def pair(data: bytes) -> Iterator[socket.socket]:
    """A connection whose other end has sent ``data`` and closed its direction."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        yield ours
