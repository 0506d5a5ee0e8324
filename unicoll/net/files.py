"""Files in directories to which other users may write.

There any name may be a link of another user, to a file or a directory of this one. Links are followed only where this
user or root owns them.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from contextlib import suppress
from typing import Any

MAX_JSON = 1 << 29
"""A dump of the most calls that a flight recorder keeps, 2**20, has about 400 MB."""
_LINKS = 40
"""The most links on one path, as for Linux."""


def write_whole(path: str, data: bytes, mode: int = 0o600, directory: int | None = None) -> None:
    """Write a file: readers see its old content or the new one.

    A device, a pipe or a link that this user or root owns is written in place; one of another user is replaced.

    Args:
        directory: descriptor of the directory that a relative path starts from, in place of the working directory.

    Raises:
        OSError: it cannot be written, and the old content is left as it was; a directory of the path is a link of
            another user.
    """
    where, name = os.path.split(path)
    folder = open_directory(where, directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        with suppress(FileNotFoundError):
            found = os.lstat(name, dir_fd=folder)
            if not stat.S_ISREG(found.st_mode) and is_trusted_owner(found):
                _write(os.open(name, flags | os.O_TRUNC, mode, dir_fd=folder), data)
                return
        temporary = f".{secrets.token_hex(8)}.tmp"
        descriptor = os.open(temporary, flags | os.O_EXCL, mode, dir_fd=folder)
        try:
            _write(descriptor, data)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
    except OSError as error:
        error.filename, error.filename2 = path, None
        raise
    finally:
        os.close(folder)


def _write(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb") as file:
        file.write(data)


def read_json(path: str) -> Any:
    """The content of a regular file of at most 512 MiB with JSON.

    Raises:
        OSError: it cannot be read. It is something else, whose end might never come, or is larger.
        ValueError: it is not JSON, or nested too deeply.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        if found.st_size > MAX_JSON:
            raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, the maximum is {MAX_JSON}", path)
        text = file.read(MAX_JSON)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def open_directory(path: str, start: int | None = None, make: bool = False) -> int:
    """A descriptor of a directory (``O_PATH``), to which no link of another user leads.

    Args:
        path: "" is the directory from which it starts.
        start: descriptor of a directory, in place of the working directory.
        make: make what is missing, for this user only.

    Raises:
        OSError: it cannot be opened. A part of the path is a link of another user.
    """
    folder = _open_part("/" if path.startswith("/") else ".", start)
    parts, links = path.split("/")[::-1], 0
    try:
        while parts:
            if (name := parts.pop()) in ("", "."):
                continue
            try:
                part = _open_part(name, folder)
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=folder)
                part = _open_part(name, folder)
            try:
                found = os.fstat(part)
                if not stat.S_ISLNK(found.st_mode):
                    if not stat.S_ISDIR(found.st_mode):
                        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                    folder, part = part, folder
                    continue
                links += 1
                if links > _LINKS or not is_trusted_owner(found):
                    number = errno.ELOOP if links > _LINKS else errno.EPERM
                    raise OSError(number, f"{name} is a link of user {found.st_uid}")
                target = os.readlink("", dir_fd=part)
            finally:
                os.close(part)
            if target.startswith("/"):
                root = _open_part("/", None)
                os.close(folder)
                folder = root
            parts += target.split("/")[::-1]
    except BaseException as error:
        os.close(folder)
        if isinstance(error, OSError):
            error.filename = path
        raise
    return folder


def _open_part(name: str, folder: int | None) -> int:
    """A descriptor of a directory or of what else has the name; a directory that is mounted when it is used is."""
    flags = os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(name, flags | os.O_DIRECTORY, dir_fd=folder)
    except NotADirectoryError:
        return os.open(name, flags, dir_fd=folder)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def open_own_directory(path: str) -> int:
    """A descriptor of a directory of this user or root; it is made if it is missing.

    Raises:
        OSError: as :func:`open_directory`. It belongs to another user, or every user can replace files in it: all may
            write to it, and it has no sticky bit.
    """
    folder = open_directory(path, make=True)
    found = os.fstat(folder)
    others_can_replace = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    if is_trusted_owner(found) and not others_can_replace:
        return folder
    os.close(folder)
    if others_can_replace:
        raise OSError(errno.EPERM, "every user can replace files in it", path)
    raise OSError(errno.EPERM, f"it belongs to user {found.st_uid}", path)


def is_trusted_owner(found: os.stat_result) -> bool:
    """True if the file belongs to this user or root."""
    return found.st_uid in (0, os.geteuid())
