"""Writing a file so that no reader sees a part of it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress


def write_whole(path: str, data: bytes, mode: int = 0o600) -> None:
    """Write a file: readers see its old content or the new one. A device, a pipe or a link is written in place.

    Raises:
        OSError: it cannot be written; the old content is left as it was.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            with open(path, "wb") as file:
                file.write(data)
            return
    import tempfile

    descriptor, temporary = tempfile.mkstemp(".tmp", ".", os.path.dirname(path) or ".")
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
