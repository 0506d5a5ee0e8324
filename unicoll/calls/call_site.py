"""The line of the user's code that a call comes from.

There are two searches, since the code between it and unicoll differs:

* A call that starts (:func:`user_frame`) comes from the first frame outwards that is not of
  unicoll, torch or Ray, which may call it. That takes half a microsecond, a sixth of a call in a
  group of one rank. So public functions use a view of their group (``ProcessGroup.by_functions``)
  whose calls are known to come from the caller of the function, at a fixed depth:
  :meth:`unicoll.group.dispatcher.Dispatcher.start` takes that frame without a look at modules.
* A thread that waits (:func:`line_of_user`) may be within any module of the standard library.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from unicoll.calls.thread_activity import Activity, entries
from unicoll.process.excepthook import PACKAGES
from unicoll.process.thread_frames import ThreadFrames, outwards

if TYPE_CHECKING:
    from unicoll.calls.call import Call

LIBRARY_PACKAGES = {*PACKAGES, "torch", "ray", "typing_extensions", *sys.stdlib_module_names}
"""Packages whose frames in a thread that waits are not the user's."""
_CALLERS = (
    "unicoll",
    "torch",
    "ray",
    # The functions that torch has deprecated are wrapped by these two.
    "typing_extensions",
    "warnings",
)
_SUBMODULES = ("unicoll.", "torch.", "ray.")
_library_modules: dict[int, dict[str, Any]] = {}
"""Globals of the modules whose frames are not the user's, by id; they are kept alive, so the ids
stay theirs."""


def call_site() -> str:
    """``file:line`` of the first caller outside this library, torch and Ray, which may call it."""
    return site_of(user_frame(sys._getframe(2)))


def user_frame(frame: FrameType) -> FrameType:
    """The first frame from ``frame`` outwards that is not of this library, or of torch or Ray,
    which may call it."""
    while id(names := frame.f_globals) in _library_modules or _is_library(names):
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame


def _is_library(names: dict[str, Any]) -> bool:
    name = names.get("__name__")
    if isinstance(name, str) and (name.startswith(_SUBMODULES) or name in _CALLERS):
        _library_modules[id(names)] = names
        return True
    return False


def site_of(frame: FrameType) -> str:
    """``file:line`` of what a frame executes."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of(code: CodeType, offset: int) -> int:
    """The line of an instruction."""
    for first, last, line in code.co_lines():
        if first <= offset < last and line is not None:
            return line
    return code.co_firstlineno


# --- threads that wait ----------------------------------------------------------------------------


def site_of_call(call: Call) -> str:
    """``file:line`` of the user's code that made a call, in whichever thread; called from any
    thread."""
    if not call.site:
        made = getattr(call, "of", call)
        for entry in [*entries]:
            if entry[1] is made:
                activity = Activity(*entry)
                with ThreadFrames() as frames:
                    try:
                        return line_of_user(activity.frame or frames.get(activity.thread))
                    finally:
                        # Frames keep arrays alive.
                        frames.clear()
    return call.site or line_of_main_thread()


def line_of_main_thread() -> str:
    """``file:line`` of the user's code that the main thread runs; called from any thread."""
    with ThreadFrames() as frames:
        try:
            return line_of_user(frames.get(threading.main_thread().ident or 0))
        finally:
            # Frames keep arrays alive.
            frames.clear()


def line_of_user(innermost: FrameType | None) -> str:
    """``file:line`` of the innermost frame of the user's code, "" if there is none."""
    for frame in outwards(innermost):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARY_PACKAGES:
            return site_of(frame)
    return ""
