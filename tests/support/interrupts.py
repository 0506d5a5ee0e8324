"""Raises an exception at a point of a call at which CPython can run a signal's handler.

CPython runs handlers, and raises what ``PyThreadState_SetAsyncExc`` has set, when a Python function begins, after each
C function that Python code calls, and when a loop goes back (3.11 to 3.14). A profile function sees the first two, a
trace function the third::

    with Points() as points:
        call()
    for point in points.seen:
        with Points(point) as points:   # raises Interrupt there
            call()

A point is a place in the code and the number of times that the call has come there, at most :data:`_MOST`: so polling
loops, whose rounds depend on time, give few points.
"""

from __future__ import annotations

import dis
import os
import sys
from collections import Counter
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

from unicoll.process.excepthook import PACKAGES

_MOST = 2
_TESTS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_SIMULATED = os.path.join(_TESTS, "simulated_nccl") + os.sep
"""Functions that are C functions in a real program, with all that they call."""

Point = tuple[str, int, str, int, str, int]
"""File, first line and name of the function, offset of the instruction, event, occurrence."""


class Interrupt(BaseException):
    """What a signal's handler raises."""


class Points:
    """Sees the points of the calls in a ``with`` block, and raises :class:`Interrupt` at one of them.

    Frames of tests, and the beginning of the functions that they call, are left out: an exception there comes before or
    after the call. The functions of the simulated device and its library are as C functions.

    Args:
        at: where to raise; None nowhere.
        outside: more directories whose frames are left out, as those of tests.

    Attributes:
        seen: the points, in order.
        raised: True once the exception was raised.
    """

    def __init__(self, at: Point | None = None, outside: Sequence[str] = ()) -> None:
        self.at = at
        self._outside = (_TESTS, *outside)
        self.seen: list[Point] = []
        self.raised = False
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._backward: dict[CodeType, frozenset[int]] = {}

    def __enter__(self) -> Points:
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.settrace(None)
        sys.unraisablehook = self._hook

    def _unraisable(self, unraisable: Any) -> None:
        """The exception was raised in a finalizer, where CPython drops it."""
        if not isinstance(unraisable.exc_value, Interrupt):
            self._hook(unraisable)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            if not self._is_outside(frame) and not self._is_outside(frame.f_back):
                self._come(frame, event, frame.f_code.co_firstlineno)
        elif event == "c_return" and not self._is_outside(frame):
            self._come(frame, event, frame.f_lasti)
        elif event == "return" and _is_simulated(frame) and not self._is_outside(caller := frame.f_back):
            assert caller is not None
            self._come(caller, "c_return", caller.f_lasti)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif self._is_outside(frame):
            pass
        elif event == "opcode" and frame.f_lasti in self._jumps_of(frame.f_code):
            self._come(frame, event, frame.f_lasti)
        return self._trace

    def is_within(self, innermost: FrameType | None) -> bool:
        """True if an exception that is raised in a frame comes in the middle of a call of the library."""
        frame = innermost
        while frame is not None and not self._is_outside(frame):
            if str(frame.f_globals.get("__name__")).partition(".")[0] in PACKAGES:
                begins = frame is innermost and frame.f_lineno == frame.f_code.co_firstlineno
                return not (begins and self._is_outside(frame.f_back))
            frame = frame.f_back
        return False

    def _is_outside(self, frame: FrameType | None) -> bool:
        return frame is None or frame.f_code.co_filename.startswith(self._outside)

    def _jumps_of(self, code: CodeType) -> frozenset[int]:
        """The offsets of the instructions at which a loop goes back."""
        found = self._backward.get(code)
        if found is None:
            found = self._backward[code] = frozenset(
                i.offset
                for i in dis.get_instructions(code)
                if "JUMP_BACKWARD" in i.opname and "NO_INTERRUPT" not in i.opname
            )
        return found

    def _come(self, frame: FrameType, event: str, where: int) -> None:
        if _is_in_simulated(frame):
            return
        code = frame.f_code
        place = code.co_filename, code.co_firstlineno, code.co_name, where, event
        self._counts[place] += 1
        occurrence = self._counts[place]
        if occurrence > _MOST:
            return
        point = (*place, occurrence)
        self.seen.append(point)
        if point == self.at:
            self.raised = True
            self.at = None
            raise Interrupt(describe(point))


def _is_simulated(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_SIMULATED)


def _is_in_simulated(frame: FrameType | None) -> bool:
    while frame is not None and not _is_simulated(frame):
        frame = frame.f_back
    return frame is not None


def describe(point: Point) -> str:
    """A point, for messages."""
    file, line, name, where, event, occurrence = point
    return f"{'/'.join(file.split('/')[-3:])}:{line} {name}() {event} at {where}, time {occurrence}"
