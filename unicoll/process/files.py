"""Files in directories to which other users may write.

There any name may be a link of another user, to a file or a directory of this one. Links are
followed only where this user or root owns them.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress

_LINKS = 40
"""The most links on one path, as for Linux."""


def write_whole(path: str, data: bytes, mode: int = 0o600, directory: int | None = None) -> None:
    """Write a file: readers see its old content or the new one.

    A device or a pipe that this user or root owns, and what a link of theirs leads to, is written
    in place; what belongs to another user is replaced.

    Args:
        directory: descriptor of the directory that a relative path starts from, in place of the
            working directory.

    Raises:
        OSError: it cannot be written, and the old content is left as it was; a directory of the
            path is a link of another user.
    """
    folder, name = _split(path, directory)
    try:
        name, found, followed = _follow(folder, name)
        is_file = found is not None and stat.S_ISREG(found.st_mode)
        if found is not None and is_trusted_owner(found) and (followed or not is_file):
            _write(_open_in_place(folder, name, found), data)
            return
        temporary = f".{secrets.token_hex(8)}.tmp"
        # The name must be new: another user could have made a link of that name, if they had
        # guessed it.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, mode, dir_fd=folder)
        try:
            _write(descriptor, data)
            # Both names are relative to the open directory: its path may lead elsewhere by now.
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


def _split(path: str, start: int | None) -> tuple[int, str]:
    """A descriptor of a file's directory, and its name there."""
    where, name = os.path.split(path)
    if not name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return open_directory(where, start), name


def _follow(folder: int, name: str) -> tuple[str, os.stat_result | None, bool]:
    """Follow the links of this user and root from a name in a directory; returns the last name,
    what it is, and if there was a link.

    The descriptor ``folder`` becomes that of the last name's directory. A link of another user, and
    one of /proc, is not followed.
    """
    for links in range(_LINKS):
        try:
            # This opens the link itself, so what is checked is what is read below.
            part = os.open(name, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
        except FileNotFoundError:
            return name, None, links > 0
        try:
            found = os.fstat(part)
            if not stat.S_ISLNK(found.st_mode) or not is_trusted_owner(found) or _is_of_proc(found):
                return name, found, links > 0
            # This is the text of the link that was checked: another one may have its name by now.
            target = os.readlink("", dir_fd=part)
        finally:
            os.close(part)
        following, name = _split(target, folder)
        # The caller closes `folder`, so the number stays and refers to another directory.
        os.dup2(following, folder, inheritable=False)
        os.close(following)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _open_in_place(folder: int, name: str, found: os.stat_result) -> int:
    """A descriptor to write to what was ``found``; OSError if it was replaced since."""
    # A link of /proc leads to a file that is open, as the standard output. It is not truncated,
    # since others have written to it.
    if stat.S_ISLNK(found.st_mode):
        return os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, dir_fd=folder)
    descriptor = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        # The file is emptied only after this check: O_TRUNC would empty one that has taken the name
        # since.
        opened = os.fstat(descriptor)
        if not os.path.samestat(found, opened):
            raise OSError(errno.EPERM, "it was replaced while it was opened")
        if stat.S_ISREG(opened.st_mode):
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_of_proc(found: os.stat_result) -> bool:
    """True for the links of /proc/self/fd, which lead to open files and have no path: /dev/stdout
    is a link to one."""
    with suppress(OSError):
        return found.st_dev == os.stat("/proc").st_dev
    return False


def _write(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb") as file:
        file.write(data)


def open_directory(path: str, start: int | None = None, make: int = 0) -> int:
    """A descriptor of a directory (``O_PATH``), to which no link of another user leads.

    Args:
        path: "" is the directory from which it starts.
        start: descriptor of a directory, in place of the working directory.
        make: make what is missing, with this mode; 0 is an error.

    Raises:
        OSError: it cannot be opened. A part of the path is a link of another user.
    """
    folder = _open_part("/" if path.startswith("/") else ".", start)
    parts, links = path.split("/")[::-1], 0
    try:
        # Each part is opened relative to the one before and then checked. A check of the whole path
        # would not hold until the path is used.
        while parts:
            if (name := parts.pop()) in ("", "."):
                continue
            try:
                part = _open_part(name, folder)
            except FileNotFoundError:
                if not make:
                    raise
                # Another process may have made it. Whatever has the name now is checked below.
                with suppress(FileExistsError):
                    os.mkdir(name, make, dir_fd=folder)
                part = _open_part(name, folder)
            try:
                found = os.fstat(part)
                if not stat.S_ISLNK(found.st_mode):
                    if not stat.S_ISDIR(found.st_mode):
                        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                    # The `finally` closes the directory before, which is `part` now.
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
    """A descriptor of a directory or of what else has the name; a directory that is mounted when it
    is used is."""
    flags = os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        # With O_PATH alone the kernel mounts no file system that is mounted on use.
        return os.open(name, flags | os.O_DIRECTORY, dir_fd=folder)
    except NotADirectoryError:
        return os.open(name, flags, dir_fd=folder)


def open_own_directory(path: str) -> int:
    """A descriptor of a directory of this user or root; it is made if it is missing.

    Raises:
        OSError: as :func:`open_directory`. It belongs to another user, or every user can replace
            files in it: all may write to it, and it has no sticky bit.
    """
    folder = open_directory(path, make=0o700)
    found = os.fstat(folder)
    others_can_replace = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    if is_trusted_owner(found) and not others_can_replace:
        return folder
    os.close(folder)
    if others_can_replace:
        raise OSError(errno.EPERM, "every user can replace files in it", path)
    raise OSError(errno.EPERM, f"it belongs to user {found.st_uid}", path)


def temporary_directory() -> str:
    """The directory for temporary files, of :mod:`tempfile`; OSError names TMPDIR if no file can be
    written to one."""
    import tempfile

    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        text = (
            f"{error.strerror}: set TMPDIR to a directory that can be written to and has space left"
        )
        raise OSError(errno.ENOENT, text) from None


def make_directory(prefix: str, folder: int) -> tuple[str, int]:
    """Make a directory that only this user can use, with a random name after ``prefix``: its name
    and a descriptor.

    Args:
        folder: descriptor of the directory to make it in.

    Raises:
        OSError: it cannot be made, or another user has replaced it.
    """
    name = f"{prefix}{secrets.token_hex(8)}"
    os.mkdir(name, 0o700, dir_fd=folder)
    made = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    found = os.fstat(made)
    if not is_trusted_owner(found):
        os.close(made)
        raise OSError(errno.EPERM, f"it belongs to user {found.st_uid}", name)
    return name, made


def is_trusted_owner(found: os.stat_result) -> bool:
    """True if the file belongs to this user or root."""
    return found.st_uid in (0, os.geteuid())
