"""The frames of other threads.

Following ``f_back`` of another thread's frame is not safe in Python 3.11: it allocates a frame
object, the allocation may start the garbage collector, and a finalizer that releases the
interpreter's lock lets the thread return from that frame, whose memory is then used by another one.
The interpreter crashes. Earlier versions have an object for each frame; later ones collect garbage
between instructions only. In 3.11 the collector is therefore paused.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_PAUSES = (3, 11) <= sys.version_info < (3, 12)

_lock = threading.RLock()
# The number of threads that are in ThreadFrames().
_walks = 0
# True if the collector was enabled before the first of them.
_enabled = False


class ThreadFrames:
    """A context in which other threads' frames may be walked along; gives each thread's innermost
    one, by its id.

    For the calling thread that is the frame of the ``with`` statement. A reference to a frame keeps
    its arrays alive, and one to the own frame keeps everything: delete them.
    """

    def __enter__(self) -> dict[int, FrameType]:
        global _walks, _enabled
        if _PAUSES:
            with _lock:
                if not _walks:
                    _enabled = gc.isenabled()
                    gc.disable()
                _walks += 1
        frames = sys._current_frames()
        frames[threading.get_ident()] = sys._getframe(1)
        return frames

    def __exit__(self, *raised: object) -> None:
        global _walks
        if _PAUSES:
            with _lock:
                _walks -= 1
                if not _walks and _enabled:
                    gc.enable()


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those of its callers, from the innermost to the outermost."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _after_fork() -> None:
    """In the child of a fork no thread walks along frames."""
    global _lock, _walks
    # A thread that does not exist in the child may have held the lock at the fork.
    _lock = threading.RLock()
    if _walks and _enabled:
        gc.enable()
    _walks = 0


if _PAUSES:
    os.register_at_fork(after_in_child=_after_fork)
