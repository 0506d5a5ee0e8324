"""The environment variables of unicoll: all names, and what the values of those that take one of a few mean.

A value that is not known is refused, never taken for a default: ``UNICOLL_ALLOW_PICKLE=off`` must not allow pickles.
Case and surrounding white space do not matter; an empty variable counts as unset. The other variables hold free text
(secrets, paths, addresses, interfaces) and are checked where they are read.

A name that is not known is warned of and no error, since a newer launcher may set more.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping

from .errors import DistArgumentError

__all__ = ["CHOICES", "FLAGS", "NUMBERS", "TEXTS", "check", "choice", "flag", "number", "warn_of_unknown"]

Environ = Mapping[str, str]

log = logging.getLogger("unicoll")

_PREFIX = "UNICOLL_"
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

FLAGS: dict[str, bool | None] = {
    "UNICOLL_ALLOW_PICKLE": True,
    "UNICOLL_BENCH_PROGRESS": False,
    "UNICOLL_DETERMINISTIC": False,
    "UNICOLL_MPI_ABORT": True,
    "UNICOLL_MPI_CUDA": None,
    "UNICOLL_NCCL_SHARE_DEVICE": False,
    "UNICOLL_TIMING": False,
}
"""Variables that say yes or no, and what they mean where they are unset; None leaves it to a detection."""

CHOICES = {
    "UNICOLL_CHANNEL": ("plain", ("plain", "mac", "tls")),
    "UNICOLL_DEBUG": ("off", ("off", "info", "detail")),
    "UNICOLL_MEMORY_ORDER": ("auto", ("auto", "weak")),
    "UNICOLL_MPI_THREAD_LEVEL": ("multiple", ("single", "funneled", "serialized", "multiple")),
    "UNICOLL_TRANSPORT": ("auto", ("auto", "tcp", "shm", "hierarchical")),
}
"""Variables with words: the default, and all that are known."""

NUMBERS = {
    "UNICOLL_NCCL_RANKS_PER_ROOT": (1, 1 << 20, 128),
    "UNICOLL_STORE_MAX_VALUE": (1, (1 << 32) - 1, 1 << 30),
}
"""Variables with whole numbers: the least, the greatest, the default."""

TEXTS = (
    "UNICOLL_CUDA_LIBRARY", "UNICOLL_JOB", "UNICOLL_LAUNCHER", "UNICOLL_NCCL_LIBRARY", "UNICOLL_SECRET",
    "UNICOLL_SECRET_FILE", "UNICOLL_SOCKET_IFNAME", "UNICOLL_STORE", "UNICOLL_TEST_BACKEND", "UNICOLL_TEST_CACHE",
    "UNICOLL_TEST_FULL", "UNICOLL_TEST_PYTHONS", "UNICOLL_TEST_SEED", "UNICOLL_TEST_SHORT",
)  # fmt: skip
"""The other variables."""

_warned: set[str] = set()


def flag(name: str, environ: Environ | None = None) -> bool | None:
    """What a variable of :data:`FLAGS` says, or its default.

    Raises:
        DistArgumentError: its value is no word for yes or no.
    """
    text = _text(name, environ)
    if not text:
        return FLAGS[name]
    if text in _ON or text in _OFF:
        return text in _ON
    raise _unknown(name, environ, f"is none of {', '.join(_ON + _OFF)}")


def choice(name: str, environ: Environ | None = None) -> str:
    """The word that a variable of :data:`CHOICES` holds, in lower case, or its default.

    Raises:
        DistArgumentError: the word is not known.
    """
    default, known = CHOICES[name]
    text = _text(name, environ) or default
    if text not in known:
        raise _unknown(name, environ, f"is none of {', '.join(known)}")
    return text


def number(name: str, environ: Environ | None = None) -> int:
    """The number that a variable of :data:`NUMBERS` holds, or its default.

    Raises:
        DistArgumentError: it is no whole number, or out of range.
    """
    least, greatest, default = NUMBERS[name]
    text = _text(name, environ)
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= greatest):
        raise _unknown(name, environ, f"is no whole number from {least} to {greatest}")
    return int(text)


def check(environ: Environ | None = None) -> None:
    """Refuse unknown values of every variable, set for this process.

    Raises:
        DistArgumentError: names the variable and the values that are known.
    """
    for name in FLAGS:
        flag(name, environ)
    for name in CHOICES:
        choice(name, environ)
    for name in NUMBERS:
        number(name, environ)


def warn_of_unknown(environ: Environ | None = None) -> None:
    """Log a warning for each variable that begins with ``UNICOLL_`` and is not known, once in a process."""
    known = {*FLAGS, *CHOICES, *NUMBERS, *TEXTS}
    for name in sorted(os.environ if environ is None else environ):
        if not name.startswith(_PREFIX) or name in known or name in _warned:
            continue
        _warned.add(name)
        endings = [other.removeprefix(_PREFIX) for other in known]
        near = difflib.get_close_matches(name.removeprefix(_PREFIX), endings, 1)
        hint = f"; did you mean {_PREFIX}{near[0]}?" if near else ""
        log.warning("%s is set, but unicoll has no variable of that name%s", name, hint)


def _raw(name: str, environ: Environ | None) -> str:
    return (os.environ if environ is None else environ).get(name, "")


def _text(name: str, environ: Environ | None) -> str:
    return _raw(name, environ).strip().lower()


def _unknown(name: str, environ: Environ | None, why: str) -> DistArgumentError:
    return DistArgumentError(f"{name}={_raw(name, environ).strip()} {why}")
