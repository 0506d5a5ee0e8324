"""Tracebacks as users see them: consecutive frames inside unicoll are one line.

    Traceback (most recent call last):
      File "train.py", line 6, in <module>
        dist.all_reduce(x)
      ... inside unicoll (UNICOLL_DEBUG=DETAIL shows these frames)
    unicoll.errors.CollectiveMismatchError: the ranks of group 'world' are in different collectives: ...

An Exception that is no DistError may be a bug of unicoll, so the frame that raised it stays. The launcher's bootstrap
loads this file by its path, in programs that may not use unicoll: it imports the standard library alone.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from itertools import groupby
from types import TracebackType
from typing import Any

__all__ = ["as_text", "show"]

_PACKAGES = ("unicoll", "gloo_fallback", "mpi_comm", "nccl_comm")


def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """What ``sys.__excepthook__`` does, with our frames folded."""
    text = _folded(kind, value, trace)
    if text is None:
        sys.__excepthook__(kind, value, trace)
        return
    if sys.stdout is not None:
        sys.stdout.flush()
    if sys.stderr is not None:
        sys.stderr.write(text)
        sys.stderr.flush()


def as_text(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> str:
    """What ``show`` prints."""
    text = _folded(kind, value, trace)
    if text is not None:
        return text
    if sys.version_info >= (3, 12):
        return "".join(traceback.format_exception(kind, value, trace))
    # Before Python 3.12 only sys.__excepthook__ adds "Did you mean ...?".
    stream, sys.stderr = sys.stderr, io.StringIO()
    try:
        sys.__excepthook__(kind, value, trace)
        return sys.stderr.getvalue()
    finally:
        sys.stderr = stream


def _folded(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> str | None:
    """The traceback with our frames folded; None where there is none of them, or all are to be shown."""
    errors = sys.modules.get("unicoll.errors")
    if errors is None or os.environ.get("UNICOLL_DEBUG", "").upper() == "DETAIL":
        return None
    root = os.path.dirname(os.path.dirname(str(errors.__file__)))
    inside = tuple(os.path.join(root, name, "") for name in _PACKAGES)
    exception = traceback.TracebackException(kind, value, trace, compact=True)
    return "".join(exception.format()) if _fold(exception, value, inside) else None


def _fold(
    exception: traceback.TracebackException, value: BaseException | None, inside: tuple[str, ...]
) -> bool:
    """Fold the frames of an exception, of those it was raised from and of a group's; False if there was none."""
    errors = sys.modules["unicoll.errors"]
    stack = _Stack(exception.stack)
    stack.inside = inside
    stack.keeps_last = isinstance(value, Exception) and not isinstance(value, errors.DistError)
    exception.stack = stack
    found = any(ours for ours, _ in stack.runs())
    for name in ("__cause__", "__context__"):
        other = getattr(exception, name)
        if other is not None:
            found |= _fold(other, getattr(value, name, None), inside)
    others = zip(getattr(exception, "exceptions", None) or (), getattr(value, "exceptions", ()), strict=False)
    return any([found, *(_fold(other, member, inside) for other, member in others)])


class _Stack(traceback.StackSummary):
    """Frames, of which those in files ``inside`` are formatted as one line for each run of them."""

    inside: tuple[str, ...]
    keeps_last: bool

    def runs(self) -> list[tuple[bool, list[traceback.FrameSummary]]]:
        last = self[-1] if self and self.keeps_last else None
        runs = groupby(self, lambda frame: frame is not last and frame.filename.startswith(self.inside))
        return [(ours, list(frames)) for ours, frames in runs]

    def format(self, **options: Any) -> list[str]:
        lines = []
        for ours, frames in self.runs():
            if ours:
                lines.append("  ... inside unicoll (UNICOLL_DEBUG=DETAIL shows these frames)\n")
            else:
                lines += traceback.StackSummary.from_list(frames).format(**options)
        return lines
