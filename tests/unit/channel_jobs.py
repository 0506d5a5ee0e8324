"""Jobs of the tests of protected connections."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

import unicoll as dist
from tests.unit.on_path import OnPath
from unicoll.backend.connections import endpoint
from unicoll.net.objects import object_codec


@contextmanager
def group_on_the_path() -> Iterator[tuple[Any, Callable[[Callable[[bytes], bytes] | None], None]]]:
    """A group whose connections lead through an attacker, and a function that sets what he changes."""
    dist.barrier()  # over the connections of the world group, which are not changed
    paths: list[OnPath] = []
    real = socket.create_connection

    def through_a_relay(address: tuple[str, int], timeout: float) -> socket.socket:
        paths.append(OnPath(address[1]))
        return real(("127.0.0.1", paths[-1].port), timeout)

    def change(how: Callable[[bytes], bytes] | None) -> None:
        dist.barrier()
        for path in paths:
            path.change = {} if how is None else dict.fromkeys(("up", "down"), how)
        dist.barrier()

    endpoint.socket.create_connection = through_a_relay  # type: ignore[assignment]
    try:
        yield dist.new_group(timeout=20), change
    finally:
        endpoint.socket.create_connection = real
        for path in paths:
            path.close()


def changed_on_the_path(what: str) -> str:
    """An operation over a connection whose bytes are changed: "right", "wrong", or the error."""
    with group_on_the_path() as (group, change):
        assert _transfer(what, group) == "right"
        change(_middle_changed)
        try:
            return _transfer(what, group)
        except dist.DistError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()


class Runs:
    """Its pickle makes a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def pickles_on_the_path(attack: str, folder: str) -> list[str]:
    """The attacker replaces pickles by one that runs code, or by the one before: the errors of this rank."""
    rank = dist.get_rank()
    errors = []
    with group_on_the_path() as (group, change):
        for exchange in _EXCHANGES:  # connect
            exchange("", group)
        for size in (100, 1000):  # in the header, behind it
            for exchange in _EXCHANGES:
                seen: dict[tuple[int, int], bytes] = {}
                change(partial(_replaced, attack, folder, size, seen))
                for text in ("first".ljust(size), "second".ljust(size)):
                    try:
                        found = exchange(text + str(rank), group)
                        right = {text + str(r) for r in range(2)}
                        assert attack == "none" or set(found) <= right
                    except dist.DistError as error:
                        errors.append(
                            f"{exchange.__name__} {size} {text.strip()}: {type(error).__name__}: {error}"
                        )
                    dist.barrier()
                change(None)
    return errors


def _replaced(attack: str, folder: str, size: int, seen: dict[tuple[int, int], bytes], data: bytes) -> bytes:
    """Bytes with every pickle replaced; ``seen`` has the first ones, by sender and kind, and place in the bytes."""
    pickles = [
        object_codec.dumps(obj, True)
        for text in ("first".ljust(size), "second".ljust(size))
        for rank in range(2)
        for obj in (text + str(rank), [text + str(rank)])
    ]
    places: Counter[int] = Counter()

    def new(found: re.Match[bytes]) -> bytes:
        what = pickles.index(found[1]) % 4
        places[what] += 1
        first = seen.setdefault((what, places[what]), found[0])
        if attack == "changed":
            return object_codec.dumps(Runs(folder), True).ljust(len(found[1])) + found[2]
        return first if attack == "repeated" else found[0]

    with_mac = b"(%s)(.{32})" % b"|".join(map(re.escape, pickles))
    return re.sub(with_mac, new, data, flags=re.DOTALL)


def _all_gather(obj: Any, group: Any) -> list[Any]:
    found = [None, None]
    dist.all_gather_object(found, obj, group)
    return found


def _gather(obj: Any, group: Any) -> list[Any]:
    found = [None, None] if dist.get_rank() == 0 else None
    dist.gather_object(obj, found, 0, group)
    return found or []


def _broadcast(obj: Any, group: Any) -> list[Any]:
    found = [obj]
    dist.broadcast_object_list(found, 0, group)
    return found


def _scatter(obj: Any, group: Any) -> list[Any]:
    found = [None]
    dist.scatter_object_list(found, [obj, obj] if dist.get_rank() == 0 else None, 0, group)
    return found


def _message(obj: Any, group: Any) -> list[Any]:
    found = [obj]
    if dist.get_rank() == 0:
        dist.send_object_list(found, 1, group)
    else:
        dist.recv_object_list(found, 0, group)
    return found


_EXCHANGES = _all_gather, _gather, _broadcast, _scatter, _message


def _middle_changed(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if len(data) > 1000 else data


def _transfer(what: str, group: Any) -> str:
    x = np.ones(100_000)
    if what == "all_reduce":
        dist.all_reduce(x, group=group)
        return "right" if (x == 2).all() else "wrong"
    if dist.get_rank() == 0:
        dist.send(x + 1, 1, group=group)
        return "right"
    dist.recv(x, 0, group=group)
    return "right" if (x == 2).all() else "wrong"
