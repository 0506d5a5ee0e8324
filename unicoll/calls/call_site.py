"""The line of the user's code that a call comes from.

There are two searches for the frame that calls unicoll or torch, since the code between differs:

* A call that starts (:func:`caller_frame`) comes from the first frame outwards that is not of
  unicoll, torch or Ray, which may call it. That takes half a microsecond, a sixth of a call in a
  group of one rank. So public functions use a view of their group (``ProcessGroup.by_functions``)
  whose calls are known to come from the caller of the function, at a fixed depth:
  :meth:`unicoll.group.dispatcher.Dispatcher.start` takes that frame without a look at modules.
* A thread that waits (:func:`line_of_user`) may be within any module of the standard library.

The frame may be a framework's (accelerate, DeepSpeed), whose lines say nothing to its user. The
place of a call is therefore that of the first frame outwards that is not of an installed package:
``train.py:47 via accelerate/accelerator.py:2861``.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from functools import cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

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

_VIA = " via "
_PACKAGES_FOLDER = re.compile(r".*[/\\](?:site|dist)-packages[/\\]", re.DOTALL)
users_files: set[str] = set()
"""Files that are known to be the user's: not of an installed package, the standard library or
unicoll. The names are kept, since comparing a path with those of the installation takes
microseconds."""
_installed_files: set[str] = set()
"""Files that are known to be none of the user's."""


def call_site() -> str:
    """The place of the first caller outside this library, torch and Ray, which may call it."""
    return site_of(caller_frame(sys._getframe(2)))


def caller_frame(frame: FrameType) -> FrameType:
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


class Via(NamedTuple):
    """The places of a call that a framework makes: the user's, and its own."""

    code: CodeType
    offset: int
    frameworks_code: CodeType
    frameworks_offset: int


def place_of(frame: FrameType) -> tuple[CodeType | Via, int]:
    """What is kept of a call that is made in ``frame``: code object and offset, or the places of
    user and framework, and 0. A frame would keep its arrays alive."""
    user = _users_frame(frame)
    if user is frame:
        return frame.f_code, frame.f_lasti
    return Via(user.f_code, user.f_lasti, frame.f_code, frame.f_lasti), 0


def place_text(code: CodeType | Via, offset: int) -> str:
    """A place of :func:`place_of` as text, as of :func:`site_of`."""
    if isinstance(code, CodeType):
        return f"{code.co_filename}:{line_of(code, offset)}"
    line = line_of(code.frameworks_code, code.frameworks_offset)
    return f"{place_text(code.code, code.offset)}{_VIA}{_short(code.frameworks_code)}:{line}"


def site_of(frame: FrameType) -> str:
    """The place of what a frame executes now: ``file:line``, of a framework's frame with `` via
    file:line``."""
    user = _users_frame(frame)
    place = f"{user.f_code.co_filename}:{user.f_lineno}"
    return place if user is frame else f"{place}{_VIA}{_short(frame.f_code)}:{frame.f_lineno}"


def users_part(site: str) -> str:
    """``file:line`` of the user's code in the text of a place."""
    return site.partition(_VIA)[0]


def _users_frame(frame: FrameType) -> FrameType:
    """The first frame from ``frame`` outwards that is the user's; ``frame`` if there is none."""
    found: FrameType | None = frame
    # Every call of a framework comes here, so the names of files are compared without a call.
    while found is not None:
        file = found.f_code.co_filename
        if file in users_files or (file not in _installed_files and is_users(found)):
            return found
        found = found.f_back
    return frame


def is_users(frame: FrameType) -> bool:
    """True if a frame's code is neither unicoll's, the standard library's nor an installed
    package's, or of the installed package that is the program."""
    file = frame.f_code.co_filename
    if file in users_files or file in _installed_files:
        return file in users_files
    names = frame.f_globals
    if file.startswith("<"):
        # Of code without a file only that of the program is known to be the user's.
        return names.get("__name__") == "__main__"
    package = str(names.get("__package__") or names.get("__name__")).partition(".")[0]
    is_installed = (
        _PACKAGES_FOLDER.match(file) is not None
        or file.startswith(_pythons_folders())
        or package in PACKAGES
    )
    found = not is_installed or package == _program_package()
    (users_files if found else _installed_files).add(file)
    return found


@cache
def _pythons_folders() -> tuple[str, ...]:
    """The standard library's folder, and that of installed commands."""
    # Most programs that import unicoll in order to look at something do not come here.
    import sysconfig

    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "scripts")}
    return tuple(os.path.join(path, "") for path in paths)


@cache
def _program_package() -> str:
    """The installed package that is the user's program, started with ``python -m`` or by a command
    of it; "" for a script."""
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None) or ""
    modules = [spec.name] if spec is not None else []
    if file.startswith(_pythons_folders()):
        # A command's file has imported the function that it calls.
        modules += [str(getattr(value, "__module__", "")) for value in [*vars(main).values()]]
    packages = [module.partition(".")[0] for module in modules]
    return next((each for each in packages if each and each not in LIBRARY_PACKAGES), "")


def _short(code: CodeType) -> str:
    """The file of installed code, without the folder of the packages."""
    return _PACKAGES_FOLDER.sub("", code.co_filename)


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
