"""The hook for uncaught exceptions, and tracebacks in which consecutive frames inside unicoll are
one line.

    Traceback (most recent call last):
      File "train.py", line 6, in <module>
        dist.all_reduce(x)
      ... inside unicoll (UNICOLL_DEBUG=DETAIL shows these frames)
    unicoll.errors.CollectiveMismatchError: the ranks of group 'world' are in different collectives:
        ...

An Exception other than a DistError may be a bug of unicoll, so the frame that raised it is kept.
The launcher's bootstrap loads this file by its path, in programs that may not use unicoll: it
imports only the standard library.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from itertools import groupby
from types import TracebackType
from typing import Any

PACKAGES = ("unicoll", "gloo_fallback", "mpi_comm", "nccl_comm", "xccl_comm")
"""unicoll's packages, whose frames are not the user's."""


def install(
    before: Callable[[BaseException], None] | None = None,
    after: Callable[[BaseException], None] | None = None,
) -> None:
    """Add callbacks to ``sys.excepthook``, called with each uncaught exception ``before`` and
    ``after`` it is printed.

    The previous hook prints it; Python's own is replaced by :func:`show`, and that of threads by
    :func:`show_in_thread`, with no callback.
    """
    previous = sys.excepthook if sys.excepthook is not sys.__excepthook__ else show

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if before is not None:
            before(value)
        previous(kind, value, trace)
        if after is not None:
            after(value)

    sys.excepthook = hook
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = show_in_thread


def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """Print an exception like ``sys.__excepthook__``, with consecutive frames inside unicoll as one
    line."""
    text = _folded(kind, value, trace)
    if text is None:
        sys.__excepthook__(kind, value, trace)
        return
    if sys.stdout is not None:
        sys.stdout.flush()
    if sys.stderr is not None:
        sys.stderr.write(text)
        sys.stderr.flush()


def show_in_thread(arguments: threading.ExceptHookArgs) -> None:
    """Print an exception like ``threading.__excepthook__``, with frames inside unicoll as one
    line."""
    kind, value, trace, thread = arguments
    text = None
    if value is not None and kind is not SystemExit and sys.stderr is not None:
        text = _folded(kind, value, trace)
    if text is None:
        threading.__excepthook__(arguments)
        return
    name = thread.name if thread is not None else threading.get_ident()
    sys.stderr.write(f"Exception in thread {name}:\n{text}")
    sys.stderr.flush()


def as_text(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> str:
    """The output of :func:`show`."""
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


_IN_FUTURE = "Got the following error when running the callback: "
_FRAMES = "\n\nAt:\n"
# The references are weak: an error keeps its frames alive, and these their arrays.
_of_futures: deque[weakref.ref[BaseException]] = deque(maxlen=64)


def forget_frames(error: BaseException) -> None:
    """Forget the frames of an error of unicoll that another library raises or shows; not at debug
    level DETAIL."""
    if not shows_all_frames():
        error.__traceback__ = None


def for_future(error: BaseException) -> None:
    """:func:`forget_frames` of a future's error, which torch's futures raise as a RuntimeError with
    its text."""
    _of_futures.append(weakref.ref(error))
    forget_frames(error)


def origin(error: BaseException) -> BaseException:
    """The error of an operation that a future of torch has raised as a RuntimeError; any other
    error itself."""
    if type(error) is not RuntimeError or not str(error).startswith(_IN_FUTURE):
        return error
    wrapped = [reference() for reference in list(_of_futures)]
    return next((each for each in wrapped if each is not None and str(each) in str(error)), error)


_NO_TORCH_GROUP = "Default process group has not been initialized"
_HINT = (
    " (unicoll has one: use unicoll.parallel.DistributedDataParallel and"
    " unicoll.parallel.DistributedSampler in place of torch's; or import unicoll.torch_plugin, and"
    " call torch.distributed.init_process_group('unicoll') in place of unicoll.init_process_group)"
)


def _explain(value: BaseException) -> None:
    """Say in torch's error about a missing default group what to do; shorten that of a future."""
    if origin(value) is not value and not shows_all_frames():
        # What follows the text are frames of the thread that has ended the future.
        value.args = (str(value).partition(_FRAMES)[0],)
    world = sys.modules.get("unicoll.api.world")
    if not isinstance(value, ValueError) or world is None or not world.is_initialized():
        return
    text = value.args[0] if value.args else None
    if isinstance(text, str) and text.startswith(_NO_TORCH_GROUP) and not text.endswith(_HINT):
        value.args = (text + _HINT,)


def _folded(
    kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> str | None:
    """The traceback with consecutive frames inside unicoll as one line; None if it has none, or all
    are shown."""
    _explain(value)
    errors = sys.modules.get("unicoll.errors")
    if errors is None or shows_all_frames():
        return None
    root = os.path.dirname(os.path.dirname(str(errors.__file__)))
    inside = tuple(os.path.join(root, name, "") for name in PACKAGES)
    exception = traceback.TracebackException(kind, value, trace, compact=True)
    return "".join(exception.format()) if _fold(exception, value, inside) else None


def shows_all_frames() -> bool:
    """True at debug level DETAIL: the program's, or the environment's where none has been set;
    imports nothing.

    ``TORCH_SHOW_CPP_STACKTRACES=1`` shows all frames, too.
    """
    if os.environ.get("TORCH_SHOW_CPP_STACKTRACES", "").strip() == "1":
        return True
    levels, environment = (
        sys.modules.get(f"unicoll.process.{name}") for name in ("debug_level", "environment")
    )
    try:
        if levels is not None:
            return bool(levels.get_debug_level() == levels.DebugLevel.DETAIL)
        return environment is not None and bool(environment.debug_level() == "detail")
    except ValueError:
        # DistArgumentError: the environment variable has an unknown value.
        return False


def _fold(
    exception: traceback.TracebackException, value: BaseException | None, inside: tuple[str, ...]
) -> bool:
    """Shorten the traceback of an exception, its causes and the members of a group; False if none
    was shortened."""
    errors = sys.modules["unicoll.errors"]
    stack = _Stack(exception.stack)
    stack.inside = inside
    stack.keeps_last = isinstance(value, Exception) and not isinstance(value, errors.DistError)
    exception.stack = stack
    found = any(folded for folded, _ in stack.runs())
    for name in ("__cause__", "__context__"):
        other = getattr(exception, name)
        if other is not None:
            found |= _fold(other, getattr(value, name, None), inside)
    others = zip(
        getattr(exception, "exceptions", None) or (), getattr(value, "exceptions", ()), strict=False
    )
    return any([found, *(_fold(other, member, inside) for other, member in others)])


class _Stack(traceback.StackSummary):
    """Frames; consecutive ones in files ``inside`` are formatted as one line."""

    inside: tuple[str, ...]
    keeps_last: bool

    def runs(self) -> list[tuple[bool, list[traceback.FrameSummary]]]:
        last = self[-1] if self and self.keeps_last else None
        runs = groupby(
            self, lambda frame: frame is not last and frame.filename.startswith(self.inside)
        )
        return [(folded, list(frames)) for folded, frames in runs]

    def format(self, **options: Any) -> list[str]:
        lines = []
        for folded, frames in self.runs():
            if folded:
                lines.append("  ... inside unicoll (UNICOLL_DEBUG=DETAIL shows these frames)\n")
            else:
                lines += traceback.StackSummary.from_list(frames).format(**options)
        return lines
