"""Closes the library's sockets in forked children.

A child made by ``os.fork`` inherits every descriptor. With the connections open in a child, the
other ranks would not see the death of the parent, which they detect by the connection's end. Every
socket of the library is guarded: the child closes it immediately after the fork.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable

# The references are weak: a guard does not keep a socket open.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_callbacks: list[Callable[[], None]] = []


def guard(sock: socket.socket) -> socket.socket:
    """Close ``sock`` in every forked child; returns it."""
    _sockets.add(sock)
    return sock


def in_child(callback: Callable[[], None]) -> None:
    """Call ``callback`` in every forked child, after the guarded sockets are closed."""
    _callbacks.append(callback)


def _after_fork() -> None:
    for sock in list(_sockets):
        try:
            # A shutdown would end the connection of the parent, too.
            sock.close()
        except OSError:
            pass
    for callback in _callbacks:
        callback()


os.register_at_fork(after_in_child=_after_fork)
