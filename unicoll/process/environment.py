"""The environment variables of unicoll: all names, and the values of flags, choices and numbers.

An unknown value is an error, never the default: ``UNICOLL_ALLOW_PICKLE=maybe`` must not allow
pickles. Case and surrounding white space do not matter; an empty variable counts as unset. The
other variables hold free text (secrets, paths, addresses, interfaces) and are checked where they
are read.

An unknown name causes a warning, not an error, since a newer launcher may set more variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from unicoll.errors import DistArgumentError

Environ = Mapping[str, str]

_PREFIX = "UNICOLL_"
_TEST_PREFIX = "UNICOLL_TEST_"
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

FLAGS: dict[str, bool | None] = {
    "UNICOLL_ALLOW_PICKLE": True,
    "UNICOLL_DETERMINISTIC": False,
    "UNICOLL_EXACT_SUM": False,
    "UNICOLL_MPI_ABORT": True,
    "UNICOLL_MPI_CUDA": None,
    "UNICOLL_NCCL_SHARE_DEVICE": False,
    "UNICOLL_TIMING": False,
    "UNICOLL_WATCH": False,
}
"""Variables that mean yes or no, and their defaults; with None the value is detected."""

CHOICES = {
    "UNICOLL_ON_HANG": ("log", ("log", "abort")),
    "UNICOLL_CHANNEL": ("plain", ("plain", "mac", "tls")),
    "UNICOLL_DEBUG": ("off", ("off", "info", "detail")),
    "UNICOLL_LOG_LEVEL": ("off", ("off", "debug", "info", "warning", "error")),
    "UNICOLL_MEMORY_ORDER": ("auto", ("auto", "weak")),
    "UNICOLL_MPI_THREAD_LEVEL": ("multiple", ("single", "funneled", "serialized", "multiple")),
    "UNICOLL_PEER_MEMORY": ("auto", ("auto", "always", "off")),
    "UNICOLL_TRANSPORT": ("auto", ("auto", "tcp", "shm", "hierarchical")),
}
"""Variables with a choice: the default, and all accepted values."""

NUMBERS = {
    "UNICOLL_FLIGHT_RECORDER": (0, 1 << 20, 2000),
    "UNICOLL_NCCL_RANKS_PER_ROOT": (1, 1 << 20, 128),
    "UNICOLL_REPLACEMENT": (0, 1 << 31, 0),
    "UNICOLL_SOCKET_CONNECTIONS": (1, 64, 1),
    "UNICOLL_STALL_WARNING": (0, 86400, 30),
    "UNICOLL_STORE_MAX_VALUE": (1, (1 << 32) - 1, 1 << 30),
}
"""Variables with whole numbers: minimum, maximum, default."""

LISTS = {
    "UNICOLL_REPLACE": ("gloo", "nccl"),
}
"""Variables with names, separated by commas, and all accepted names."""

TEXTS = (
    "UNICOLL_CUDA_LIBRARY",
    "UNICOLL_HIP_LIBRARY",
    "UNICOLL_JOB",
    "UNICOLL_JOINED",
    "UNICOLL_LAUNCHER",
    "UNICOLL_METRICS_FILE",
    "UNICOLL_NCCL_LIBRARY",
    "UNICOLL_PORT_RANGE",
    "UNICOLL_XCCL_LIBRARY",
    "UNICOLL_SECRET",
    "UNICOLL_SECRET_FILE",
    "UNICOLL_SOCKET_IFNAME",
    "UNICOLL_STORE",
    "UNICOLL_TEST_BACKEND",
    "UNICOLL_TEST_FULL",
    "UNICOLL_TEST_SEED",
    "UNICOLL_TRACE_DIR",
)
"""Variables with free text."""

OF_A_LAUNCHER = re.compile(
    "(LOCAL_|ROLE_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|UNICOLL_(JOINED|LAUNCHER|STORE)|TORCHELASTIC_.*"
)
"""Variables of a job of unicoll's launcher or torchrun, from which processes take their rank and
its store."""

_warned: set[str] = set()


def flag(name: str, environ: Environ | None = None) -> bool | None:
    """The value of a variable of :data:`FLAGS`, or its default.

    Raises:
        DistArgumentError: the value means neither yes nor no.
    """
    text = _text(name, environ)
    if not text:
        return FLAGS[name]
    if text in _ON or text in _OFF:
        return text in _ON
    raise _unknown(name, environ, f"is none of {', '.join(_ON + _OFF)}")


def choice(name: str, environ: Environ | None = None) -> str:
    """The value of a variable of :data:`CHOICES`, in lower case, or its default.

    Raises:
        DistArgumentError: the value is not accepted.
    """
    return _one_of(name, environ, *CHOICES[name])


def debug_level(environ: Environ | None = None) -> str:
    """``off``, ``info`` or ``detail``: the value of ``UNICOLL_DEBUG``, else of
    ``TORCH_DISTRIBUTED_DEBUG``.

    Raises:
        DistArgumentError: the value is not accepted.
    """
    ours = "UNICOLL_DEBUG"
    return _one_of(
        ours if _text(ours, environ) else "TORCH_DISTRIBUTED_DEBUG", environ, *CHOICES[ours]
    )


def torch_log_level(environ: Environ | None = None) -> str:
    """``info``, ``warning`` or ``error``: the value of ``TORCH_CPP_LOG_LEVEL``, or its number; ""
    if it is not set.

    Raises:
        DistArgumentError: the value is not accepted.
    """
    variable, names = "TORCH_CPP_LOG_LEVEL", ("info", "warning", "error", "fatal")
    if not _text(variable, environ):
        return ""
    text = _one_of(variable, environ, "", (*names, *"0123"))
    name = names[int(text)] if text.isdigit() else text
    return "error" if name == "fatal" else name


def number(name: str, environ: Environ | None = None) -> int:
    """The value of a variable of :data:`NUMBERS`, or its default.

    Raises:
        DistArgumentError: it is not a whole number, or out of range.
    """
    minimum, maximum, default = NUMBERS[name]
    text = _text(name, environ)
    if not text:
        return default
    # A text of thousands of digits would make int() raise an error of its own.
    if not (
        text.isascii() and text.isdigit() and len(text) < 20 and minimum <= int(text) <= maximum
    ):
        raise _unknown(name, environ, f"is not a whole number from {minimum} to {maximum}")
    return int(text)


def names(name: str, environ: Environ | None = None) -> frozenset[str]:
    """The names in a variable of :data:`LISTS`.

    Raises:
        DistArgumentError: one of them is not accepted.
    """
    found = frozenset(filter(None, map(str.strip, _text(name, environ).split(","))))
    if found - {*LISTS[name]}:
        raise _unknown(name, environ, f"has a name that is none of {', '.join(LISTS[name])}")
    return found


def port_range(environ: Environ | None = None) -> range | None:
    """The ports that ``UNICOLL_PORT_RANGE=first-last`` names; None if it is not set.

    Raises:
        DistArgumentError: the value is no such range.
    """
    name = "UNICOLL_PORT_RANGE"
    text = _text(name, environ)
    if not text:
        return None
    found = re.fullmatch(r"(\d{1,5}) *- *(\d{1,5})", text, re.ASCII)
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 0 < first <= last < 1 << 16:
        raise _unknown(name, environ, "is not first-last, two port numbers from 1 to 65535")
    return range(first, last + 1)


def check(environ: Environ | None = None) -> None:
    """Check the values of all flags, choices, numbers and lists that are set, and the port range.

    Raises:
        DistArgumentError: a value is unknown; the message has the variable and the accepted values.
    """
    given = os.environ if environ is None else environ
    for name in given:
        if name in FLAGS:
            flag(name, given)
        elif name in CHOICES:
            choice(name, given)
        elif name in NUMBERS:
            number(name, given)
        elif name in LISTS:
            names(name, given)
        elif name == "UNICOLL_PORT_RANGE":
            port_range(given)
    debug_level(given)


def unknown(environ: Environ | None = None) -> dict[str, str | None]:
    """The variables ``UNICOLL_...`` that unicoll does not have, each with the most similar known
    name.

    ``UNICOLL_TEST_...`` are left out: tests may have more of them.
    """
    known = {*FLAGS, *CHOICES, *NUMBERS, *LISTS, *TEXTS}
    ours = {
        name
        for name in (os.environ if environ is None else environ)
        if name.startswith(_PREFIX) and not name.startswith(_TEST_PREFIX)
    }
    others = sorted(ours - known)
    if not others:
        return {}
    # The import is here because ``import unicoll`` loads this module, and few programs come this
    # far.
    import difflib

    endings = [other.removeprefix(_PREFIX) for other in known]
    found: dict[str, str | None] = {}
    for name in others:
        near = difflib.get_close_matches(name.removeprefix(_PREFIX), endings, 1)
        found[name] = f"{_PREFIX}{near[0]}" if near else None
    return found


def warn_of_unknown(environ: Environ | None = None) -> None:
    """Log a warning for each unknown variable, once per process."""
    for name, near in unknown(environ).items():
        if name not in _warned:
            import logging

            _warned.add(name)
            hint = f"; did you mean {near}?" if near else ""
            logging.getLogger("unicoll").warning(
                "%s is set, but unicoll has no variable of that name%s", name, hint
            )


def _text(name: str, environ: Environ | None) -> str:
    return (os.environ if environ is None else environ).get(name, "").strip().lower()


def _one_of(name: str, environ: Environ | None, default: str, accepted: tuple[str, ...]) -> str:
    text = _text(name, environ) or default
    if text not in accepted:
        raise _unknown(name, environ, f"is none of {', '.join(accepted)}")
    return text


def _unknown(name: str, environ: Environ | None, why: str) -> DistArgumentError:
    text = (os.environ if environ is None else environ).get(name, "").strip()
    return DistArgumentError(f"{name}={text} {why}")
