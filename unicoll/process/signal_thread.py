"""Signals that are handled on a thread, also while the main thread is in C++ code, where Python's
handlers do not run.

The interpreter writes the number of a signal that has a handler to a pipe
(``signal.set_wakeup_fd``), from which a thread reads. A program that uses the pipe itself, as
asyncio does, takes it: then the handlers run in the main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from unicoll.process import fork_safety
from unicoll.process.signal_handlers import is_caught

Action = Callable[[], object]

_actions: dict[int, Action] = {}
_pipe: tuple[int, int] | None = None
_thread: threading.Thread | None = None
_users = 0


def handle(number: int, action: Action) -> bool:
    """Call ``action`` at a signal, if this is the main thread and nothing else handles the signal.

    Returns True if the signal is handled, by this action or an earlier one.

    ``action`` may be called in the main thread, within any other call: it must not take locks or
    wait.
    """
    if not is_handled(number):
        if threading.current_thread() is not threading.main_thread():
            return False
        # The handlers of faulthandler are not those of the module signal, which does not know them.
        if signal.getsignal(number) is not signal.SIG_DFL or is_caught(number):
            return False
        # The action is stored first: the signal may come as soon as the handler is set.
        _actions[number] = action
        signal.signal(number, _on_signal)
    return True


def is_handled(number: int) -> bool:
    """True while :func:`handle` is in effect: the program has not set another handler."""
    return number in _actions and signal.getsignal(number) is _on_signal


def release(number: int) -> None:
    """Do not handle a signal any more, if this is the main thread. With :func:`use_thread` it stays
    handled."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if _pipe is None and in_main_thread and is_handled(number):
        del _actions[number]
        signal.signal(number, signal.SIG_DFL)


def use_thread() -> None:
    """Call the actions on a thread from now on, until :func:`leave_thread` was called as often.

    Has no effect if no signal is handled, in another thread than the main one, or if the program
    uses ``signal.set_wakeup_fd`` itself.
    """
    global _pipe, _thread, _users
    _users += 1
    in_main_thread = threading.current_thread() is threading.main_thread()
    if _pipe is not None or not in_main_thread or not any(map(is_handled, _actions)):
        return
    _pipe = os.pipe()
    for end in _pipe:
        # The thread waits in its read. The interpreter writes in any thread at a signal, and must
        # not wait when the pipe is full.
        os.set_blocking(end, end == _pipe[0])
    before = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    # The program uses a pipe of its own, which stays.
    if before != -1:
        signal.set_wakeup_fd(before)
        _close_pipe()
        return
    _thread = threading.Thread(
        target=_read_signals, args=(_pipe[0],), name="unicoll-signal", daemon=True
    )
    _thread.start()


def leave_thread() -> None:
    """End one use; after the last one the thread ends, if this is the main thread."""
    global _users
    _users = max(0, _users - 1)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if _users or _pipe is None or not in_main_thread:
        return
    before = signal.set_wakeup_fd(-1)
    if before not in (-1, _pipe[1]):
        # The program has set its own pipe since, which stays.
        signal.set_wakeup_fd(before)
    _end_thread()


def _end_thread() -> None:
    global _pipe, _thread
    pipe, thread, _pipe, _thread = _pipe, _thread, None, None
    if pipe is not None:
        # The thread reads the end of the pipe, and ends.
        os.close(pipe[1])
        if thread is not None:
            thread.join(1.0)
        # This end is closed once the thread does not read it any more: a new file may get the
        # number of the descriptor.
        os.close(pipe[0])


def end_by(number: int) -> None:
    """End this process by a signal, as without a handler; any thread."""
    # The function of the module signal works in the main thread only, which may be in C++ code.
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(number, None)
    os.kill(os.getpid(), number)


def _read_signals(pipe: int) -> None:
    while numbers := os.read(pipe, 64):
        for number in set(numbers) & _actions.keys():
            if is_handled(number):
                _actions[number]()


def _close_pipe() -> None:
    global _pipe
    if _pipe is not None:
        for end in _pipe:
            os.close(end)
        _pipe = None


def _on_signal(number: int, _frame: FrameType | None) -> None:
    # The program has set a handler of its own, which calls the one before it, this one.
    if not is_handled(number):
        return
    if _pipe is not None:
        # A signal may reach both this function and the thread. Setting the pipe returns the one
        # that was set, and that decides who calls the action.
        before = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
        if before == _pipe[1]:
            # The thread has got the number, and calls the action.
            return
        # The pipe is that of the program, of asyncio for example, so the thread has got nothing.
        if before != -1:
            signal.set_wakeup_fd(before)
    _actions[number]()


def _forget() -> None:
    """A forked child has the handlers of its parent, but not the thread."""
    global _thread, _users
    _thread, _users = None, 0
    if _pipe is not None:
        # The child shares the pipe: its signals would wake the thread of the parent.
        signal.set_wakeup_fd(-1)
        _close_pipe()
    for number in [*_actions]:
        if is_handled(number):
            signal.signal(number, signal.SIG_DFL)
    _actions.clear()


fork_safety.in_child(_forget)
