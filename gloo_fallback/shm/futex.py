"""Waiting on words of shared memory until another process wakes the waiter: Linux futexes and POSIX
semaphores.

``sleep`` returns at once if the word differs from the expected value; the kernel compares under the
lock that ``wake`` also takes. Semaphores are for processors with a weak memory order: writes before
a post are visible after the matching wait on every processor (POSIX.1-2017, XBD 4.12: ``sem_post``
and ``sem_trywait`` "synchronize memory with respect to other threads").
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
import time

SEMAPHORE_BYTES = 64
"""Bytes reserved for one semaphore: a cache line; the C library's takes 32 bytes."""

# Calls of such a library release the GIL, so the other threads of the process run while one
# sleeps.
_libc = ctypes.CDLL(None, use_errno=True)
_FUTEX = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_number = _FUTEX.get(platform.machine(), 0)
# The operations are those without FUTEX_PRIVATE_FLAG, with which the kernel would not find the
# waiters of other processes.
_WAIT, _WAKE, _ALL = 0, 1, 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    @classmethod
    def of(cls, seconds: float) -> _Timespec:
        whole = int(seconds)
        return cls(whole, int((seconds - whole) * 1e9))


_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
)


def has_futex() -> bool:
    """True if the number of the futex system call on this processor is known."""
    return _number != 0


def sleep(address: int, expected: int, seconds: float) -> None:
    """Sleep while the 32-bit word at ``address`` is ``expected``, until woken, for ``seconds`` at
    most."""
    # The result is not used: the word may have changed before, a signal may have ended the sleep,
    # or the time has passed. The caller reads the word again in each case.
    limit = _Timespec.of(seconds)
    _syscall(_number, address, _WAIT, expected, ctypes.addressof(limit), None, 0)


def wake(address: int) -> None:
    """Wake all threads that sleep on the word at ``address``, in every process."""
    _syscall(_number, address, _WAKE, _ALL, None, None, 0)


_sem_init = _libc.sem_init
_sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
_sem_timedwait = _libc.sem_timedwait
_sem_timedwait.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
post = _libc.sem_post
post.argtypes = (ctypes.c_void_p,)
try_wait = _libc.sem_trywait
try_wait.argtypes = (ctypes.c_void_p,)


def init_semaphore(address: int) -> None:
    """Initialize a process-shared semaphore with value 0."""
    if _sem_init(address, 1, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def timed_wait(address: int, seconds: float) -> bool:
    """Wait for a semaphore; False after ``seconds``, or if a signal interrupted the wait."""
    # The C function takes a time of the clock CLOCK_REALTIME, not a duration.
    limit = _Timespec.of(time.time() + seconds)
    return bool(_sem_timedwait(address, ctypes.addressof(limit)) == 0)
