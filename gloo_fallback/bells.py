"""Sleeping until another process wakes one, on words of shared memory: futexes and POSIX semaphores.

A futex is Linux's: ``sleep`` returns at once if the word is no longer what was expected, which the kernel compares
under the lock that ``wake`` takes too. Semaphores are for processors that do not keep stores in order: what was
written before a post is seen by who has waited for it, on every processor (POSIX.1-2017, XBD 4.12: ``sem_post`` and
``sem_trywait`` "synchronize memory with respect to other threads").
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
import time

__all__ = ["SEMAPHORE", "has_futex", "make_semaphore", "post", "sleep", "take", "take_within", "wake"]

SEMAPHORE = 64
"""Bytes set apart for one semaphore: a cache line; the C library's is 32 bytes long."""

_libc = ctypes.CDLL(None, use_errno=True)
_FUTEX = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_number = _FUTEX.get(platform.machine(), 0)
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
    ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32,
)  # fmt: skip


def has_futex() -> bool:
    """Whether this processor's number of the system call is known."""
    return _number != 0


def sleep(address: int, expected: int, seconds: float) -> None:
    """Sleep while the 32-bit word at ``address`` is ``expected``, until woken, for ``seconds`` at most."""
    limit = _Timespec.of(seconds)
    _syscall(_number, address, _WAIT, expected, ctypes.addressof(limit), None, 0)


def wake(address: int) -> None:
    """Wake all that sleep on the word at ``address``, in every process."""
    _syscall(_number, address, _WAKE, _ALL, None, None, 0)


_sem_init = _libc.sem_init
_sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
_sem_timedwait = _libc.sem_timedwait
_sem_timedwait.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
post = _libc.sem_post
post.argtypes = (ctypes.c_void_p,)
take = _libc.sem_trywait
take.argtypes = (ctypes.c_void_p,)


def make_semaphore(address: int) -> None:
    """Set up a semaphore of value 0 that processes share."""
    if _sem_init(address, 1, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def take_within(address: int, seconds: float) -> bool:
    """Wait for a semaphore; False if it was not posted in time, or a signal came."""
    limit = _Timespec.of(time.time() + seconds)
    return bool(_sem_timedwait(address, ctypes.addressof(limit)) == 0)
