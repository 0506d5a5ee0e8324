"""The content of a flight recorder dump, which :mod:`unicoll.trace` reads: a JSON object,
``rank_R.json``.

``version`` is 1. Ranks are global ranks, except ``root`` and ``peer`` of a call, which are ranks in
its group. Times are seconds on this process's monotonic clock; ``clock.offset`` added to them gives
rank 0's.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from itertools import islice
from types import FrameType
from typing import Any

from unicoll.backend.contract import Job
from unicoll.calls.call_site import is_users
from unicoll.diagnosis.recorder_contents import RecordedCall
from unicoll.net.control.clock import Offset, now
from unicoll.process.thread_frames import ThreadFrames, outwards

FORMAT = "unicoll flight recorder"
_VERSION = 1
_MAX_FRAMES = 100

Content = dict[str, Any]


def content(
    job: Job,
    job_id: str,
    reason: str,
    failure: bool,
    groups: Sequence[Any],
    calls: Sequence[RecordedCall],
    stacks: Sequence[Content],
    offset: Offset | None,
) -> Content:
    """The dump of this rank.

    Args:
        job_id: random text, equal on all ranks.
        failure: True if the reason is that a group has failed.
        stacks: those of :func:`threads`.
        offset: rank 0's clock minus this process's, or None if it is not known.
    """
    departed = job.control.departed if job.control is not None else {}
    return {
        "format": FORMAT,
        "version": _VERSION,
        "reason": reason,
        "failure": failure,
        "rank": job.rank,
        "world_size": job.size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": job_id,
        "written": {"wall": time.time(), "monotonic": now()},
        "clock": {"offset": offset.seconds, "error": offset.error} if offset is not None else None,
        "departed": {str(rank): how for rank, how in sorted(departed.items())},
        "groups": [
            {
                "name": g.name,
                "description": g.group_desc,
                "ranks": list(g.ranks),
                "backends": g.backend_config,
            }
            for g in groups
        ],
        "threads": list(stacks),
        "calls": [_call(call) for call in calls],
    }


def _call(call: RecordedCall) -> Content:
    entry = {**vars(call), "ranks": list(call.ranks), "text": call.describe()}
    entry["bytes"] = entry.pop("nbytes")
    for side in ("inputs", "outputs"):
        entry[side] = [[dtype.name, list(shape)] for dtype, shape in entry[side]]
    return entry


def threads(omitted: str) -> list[Content]:
    """The stacks of this process's threads, but for those named ``omitted``; the main thread's
    first.

    Of each thread: name, whether it is the main thread, ``at`` (where it is in the user's code, or
    None), and the frames from the outermost to the innermost, each with file, line and function.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = []
    with ThreadFrames() as frames:
        for ident in sorted(frames, key=lambda each: each != main):
            if names.get(ident) == omitted:
                continue
            stack = list(islice(outwards(frames[ident]), _MAX_FRAMES))
            users = [frame for frame in stack if is_users(frame)]
            found.append(
                {
                    "name": names.get(ident, str(ident)),
                    "main": ident == main,
                    "at": _position(users[0]) if users else None,
                    "stack": [_position(frame) for frame in reversed(stack)],
                }
            )
            # Frames keep their arrays alive, so these names must not keep any while the next thread
            # is read.
            del stack, users
        # The frames of all threads keep arrays alive, too.
        del frames
    return found


def _position(frame: FrameType) -> Content:
    code = frame.f_code
    return {"file": code.co_filename, "line": frame.f_lineno, "function": code.co_name}
