"""The end of the process by an exception that C++ code does not catch, as Gloo's after a message of
another size.

C++ calls its terminate handler then, on the thread of the exception, and the process aborts when
that returns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_Handler = ctypes.CFUNCTYPE(None)


def before_terminate(action: Callable[[], object]) -> Callable[[], None]:
    """Call ``action`` before the process aborts; returns a function that undoes it.

    ``action`` is called on any thread, which may be none of Python's, and must return within a
    moment. Has no effect where the C++ library is not GNU's.
    """
    try:
        set_handler = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):
        return lambda: None
    set_handler.argtypes, set_handler.restype = (ctypes.c_void_p,), ctypes.c_void_p

    def run() -> None:
        # First: a C++ exception in the action, or on another thread meanwhile, ends the process by
        # the previous handler.
        undo()
        try:
            action()
        finally:
            if previous:
                _Handler(previous)()

    handler = _Handler(run)
    previous: int | None = set_handler(ctypes.cast(handler, ctypes.c_void_p))

    def undo(keep: object = handler) -> None:
        """Set the previous handler; ``keep`` refers to this one, which another thread may be in."""
        set_handler(previous)

    return undo
