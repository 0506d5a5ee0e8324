"""The job's secret and its sources."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from typing import NamedTuple

from unicoll.errors import DistArgumentError
from unicoll.process import logs
from unicoll.process.files import is_trusted_owner

SOURCES = (
    "a secret comes from UNICOLL_SECRET, from UNICOLL_SECRET_FILE, from join(secret=...), or from"
    " the launcher, which makes one per job; every process of the job needs the same one"
)
"""For error messages."""

_SHORT = 16

log = logs.logger("secret")


class Key(bytes):
    """Secret bytes whose ``repr`` hides them, also in logs and in tracebacks with local
    variables."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{len(self)} secret bytes>"

    __str__ = __repr__


class OwnUserKey(Key):
    """The key of a job of this user on this host: both ends of a connection refuse processes of
    other users.

    A process that forwards connections, such as an ssh tunnel, counts as its owner, so others may
    have read the key.
    """

    __slots__ = ()


class KeyText(str):
    """The text of a key, as in an environment variable, whose ``repr`` hides it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<secret text>"


class Secret(NamedTuple):
    """The job's secret.

    Attributes:
        key: the bytes that handshakes prove; ``b""`` if the job has no secret.
        source: ``"UNICOLL_SECRET"``, ``"UNICOLL_SECRET_FILE=<path>"``, ``"the argument secret"`` or
            ``"none"``.
    """

    key: bytes
    source: str

    def __repr__(self) -> str:
        return f"Secret(key={Key(self.key)!r}, source={self.source!r})"


def new_key() -> Key:
    """32 random bytes."""
    return Key(secrets.token_bytes(32))


def new_key_text() -> KeyText:
    """The hexadecimal digits of 32 random bytes."""
    return KeyText(secrets.token_hex(32))


def find_secret(environ: Mapping[str, str] = os.environ) -> Secret:
    """The secret of the environment, without surrounding white space.

    ``UNICOLL_SECRET`` holds the secret itself and has priority over ``UNICOLL_SECRET_FILE``, the
    path of a file that only its owner, this user or root, may access. With neither, the secret is
    empty and its source is ``"none"``.

    Raises:
        DistArgumentError: the variable or file is empty; the file cannot be read, belongs to
            another user, or others can access it.
    """
    if "UNICOLL_SECRET" in environ:
        source = "UNICOLL_SECRET"
        key = Key(environ["UNICOLL_SECRET"].strip().encode("utf-8", "surrogateescape"))
    elif "UNICOLL_SECRET_FILE" in environ:
        path = environ["UNICOLL_SECRET_FILE"]
        source = f"UNICOLL_SECRET_FILE={path}"
        key = Key(_read_private(path).strip())
    else:
        return Secret(b"", "none")
    if not key:
        raise DistArgumentError(
            f"{source} is empty: put a secret there, or unset the variable to run without one"
        )
    return _checked(Secret(key, source))


def given_secret(text: str) -> Secret:
    """The secret of an argument; DistArgumentError if it is empty."""
    key = Key(text.strip().encode("utf-8", "surrogateescape") if isinstance(text, str) else b"")
    # Otherwise a traceback with local variables would show the secret.
    text = ""
    if not key:
        raise DistArgumentError("secret: a text that is not empty is expected")
    return _checked(Secret(key, "the argument secret"))


def _checked(secret: Secret) -> Secret:
    """The secret, with a warning if it is short."""
    if len(secret.key) < _SHORT:
        log.warning(
            "the secret from %s has only %d bytes and can be guessed: use %d or more",
            secret.source,
            len(secret.key),
            32,
        )
    return secret


def _read_private(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            # The open file is checked: the path could be replaced between a stat and the read.
            found = os.fstat(file.fileno())
            if not is_trusted_owner(found):
                raise DistArgumentError(
                    f"UNICOLL_SECRET_FILE={path} belongs to user {found.st_uid}, who knows and can"
                    " change the secret"
                )
            mode = stat.S_IMODE(found.st_mode)
            if mode & 0o077:
                raise DistArgumentError(
                    f"UNICOLL_SECRET_FILE={path} can be accessed by others than its owner (mode"
                    f" {mode:04o}): run  chmod 600 {path}"
                )
            return file.read(1 << 16)
    except OSError as error:
        raise DistArgumentError(
            f"UNICOLL_SECRET_FILE={path} cannot be read: {error.strerror or error}"
        ) from error
