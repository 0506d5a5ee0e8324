"""The identity of this host: the boot of its kernel and the network namespace."""

from __future__ import annotations

import hmac
import os
from functools import cache

HOST_ID_SIZE = 16
UNKNOWN_HOST = bytes(HOST_ID_SIZE)


@cache
def boot_id() -> str:
    """The identifier of this boot of this machine.

    Raises:
        OSError: the system has none.
    """
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read().decode().strip()


def host_id(key: bytes) -> bytes:
    """16 bytes that are equal in processes with the same key, kernel and network namespace.

    Processes in different namespaces of one kernel reach each other over a network that others can
    share. To processes of other hosts the bytes do not tell which host it is; with an empty key
    they are the same in all jobs. :data:`UNKNOWN_HOST` if the system does not say.
    """
    try:
        namespace = os.stat("/proc/self/ns/net")
        text = f"host {boot_id()} {namespace.st_dev} {namespace.st_ino}"
    except OSError:
        return UNKNOWN_HOST
    return hmac.digest(key, text.encode(), "sha256")[:HOST_ID_SIZE]
