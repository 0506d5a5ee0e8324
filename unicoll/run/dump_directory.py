"""The directory in which the workers' flight recorders write their dumps when a group fails."""

from __future__ import annotations

import math
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from unicoll.net.objects.received_json import MALFORMED, read_json
from unicoll.process.files import open_directory
from unicoll.process.formatting import command_to_type

TRACE_VARIABLE = "UNICOLL_TRACE_DIR"
_PREFIX = "unicoll_trace_"
_DIRECTORY = re.compile(rf"{_PREFIX}[0-9a-f]{{16}}")
_KEPT_S = 7 * 86400.0
_TORCH_FILE = re.compile(r"nccl_trace_rank_\d+$")
_FILE = re.compile(r"rank_\d+\.json$")


class TraceDirectory:
    """The directory of UNICOLL_TRACE_DIR if the user has set it, else a new one, which the first
    dump makes.

    An empty variable means that failures are not dumped. The new directory is below that of the
    launch's log files (``logs``) if those are kept. After a restart it is a directory
    ``attempt_<N>`` below.
    """

    def __init__(self, environ: Mapping[str, str], logs: str | None, attempt: int = 0) -> None:
        self._path = environ.get(TRACE_VARIABLE)
        self._is_new = self._path is None
        if self._path is None:
            # The name is random, so nobody can make a directory of this name first.
            name = f"{_PREFIX}{secrets.token_hex(8)}"
            self._path = (
                os.path.join(logs, "trace") if logs else os.path.join(tempfile.gettempdir(), name)
            )
            self._path = os.path.abspath(self._path)
        if self._path and attempt and (logs or not self._is_new):
            self._path = os.path.join(self._path, f"attempt_{attempt}")
        # A directory of the user may have dumps of earlier launches; only those that change are of
        # this one.
        self._before = {} if self._is_new else dict(self._dumps())

    @property
    def environment(self) -> dict[str, str]:
        """The workers' variable; absolute, because they may change their working directory."""
        return {TRACE_VARIABLE: os.path.abspath(self._path) if self._path else ""}

    def command(self, failed: bool) -> str:
        """The command that reads the dumps of this launch; "" if there are none.

        If the job has not failed, a new directory is removed, unless a dump in it was requested:
        the program has handled the failures.
        """
        dumps = [path for path, version in self._dumps() if self._before.get(path) != version]
        if self._is_new and not failed and not any(map(_is_requested, dumps)):
            _remove(str(self._path))
            return ""
        return "; ".join(
            _reader(folder) for folder in sorted({os.path.dirname(dump) for dump in dumps})
        )

    @property
    def reader(self) -> str:
        """The command that reads the dumps; "" if the launcher does not know where they are."""
        return _reader(self._path) if self._path else ""

    def _dumps(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """The files of dumps, each with what changes when it is written again.

        Those of a job with a name are in a folder of that name. In a directory of the user folders
        may have dumps of others.
        """
        path = self._path or os.devnull
        for folder in _folders(path) if self._is_new else [path]:
            # The folder may not exist.
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(OSError):
                        if _FILE.match(entry.name):
                            found = entry.stat()
                            yield entry.path, (found.st_ino, found.st_mtime_ns)


def _reader(directory: str) -> str:
    return command_to_type("trace", directory)


def _folders(directory: str) -> list[str]:
    """A directory and the folders in it."""
    with suppress(OSError), os.scandir(directory) as entries:
        return [directory, *(each.path for each in entries if each.is_dir(follow_symlinks=False))]
    return []


def remove_old_dumps() -> None:
    """Remove this user's dumps in the temporary directory in whose directory nothing has changed
    for a week."""
    before = time.time() - _KEPT_S
    with suppress(OSError):
        for name in filter(_DIRECTORY.fullmatch, os.listdir(tempfile.gettempdir())):
            _remove(os.path.join(tempfile.gettempdir(), name), before)


def _remove(directory: str, before: float = math.inf) -> None:
    """Remove the dumps in a directory of this user and its folders, and those that then are empty.

    Args:
        before: seconds since the epoch; nothing in the directory itself may have changed since.
    """
    with suppress(OSError):
        where, name = os.path.split(directory)
        parent = open_directory(where)
        try:
            _remove_folder(name, parent, before)
        finally:
            os.close(parent)


def _remove_folder(name: str, parent: int, before: float, inside: bool = False) -> None:
    # By descriptor: where other users may rename it, the name may be that of another directory at
    # any time.
    folder = os.open(
        name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent
    )
    try:
        found = os.fstat(folder)
        # A directory with such a name may be another user's.
        if found.st_uid != os.geteuid() or found.st_mtime >= before:
            return
        for each in os.listdir(folder):
            with suppress(OSError):
                if _FILE.match(each) or _TORCH_FILE.match(each):
                    os.unlink(each, dir_fd=folder)
                elif not inside:
                    _remove_folder(each, folder, math.inf, inside=True)
    finally:
        os.close(folder)
    # This fails, and the directory stays, if it has other files.
    os.rmdir(name, dir_fd=parent)


def _is_requested(path: str) -> bool:
    """True if a dump was written for another reason than the failure of a group."""
    try:
        return not read_json(path)["failure"]
    except (OSError, *MALFORMED):
        return True
