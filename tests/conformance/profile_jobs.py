"""Functions that ranks run in the tests of unicoll.profile."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import unicoll as dist
from tests.support.order import await_word, send_word_in_call


def late_rank(directory: str, delays: dict[int, float]) -> dict[str, Any]:
    """Thirty rounds, in three of which ranks are late; what the profile says. Others may be late in one of them."""
    me = dist.get_rank()
    x, y = np.zeros(1000), np.zeros(10, np.float32)
    dist.barrier()
    threads = []
    with dist.profile(directory, file=None) as profile:
        for step in range(30):
            dist.all_reduce(x)
            if step in (10, 15, 20) and me in delays:
                for _ in range(dist.get_world_size() - 1):
                    await_word()  # the other ranks wait
                time.sleep(delays[me])
            elif step in (10, 15, 20):
                threads += [send_word_in_call(late) for late in delays]
            dist.broadcast(y, src=0)  # the late call
    dist.barrier()
    for thread in threads:
        thread.join()
    return {
        "text": profile.text,
        "totals": {t.op: (t.calls, t.nbytes, t.waiting, t.waited_for) for t in profile.totals},
        "waits": [
            (w.call.rank, w.call.op, w.call.place, w.seconds, w.previous and w.previous.op)
            for w in profile.waits
        ],
    }


def late_sender(directory: str, delay: float) -> list[Any]:
    """Rank 1 waits for a message of rank 0."""
    x = np.zeros(100)
    dist.barrier()
    threads = []
    with dist.profile(directory, file=None) as profile:
        for step in range(5):
            if dist.get_rank() == 0:
                if step == 3:
                    await_word()
                    time.sleep(delay)
                dist.send(x, 1)
            else:
                if step == 3:
                    threads = [send_word_in_call(0)]
                dist.recv(x, 0)
    for thread in threads:
        thread.join()
    return [(w.call.rank, w.call.op, w.seconds) for w in profile.waits]


def failing(directory: str) -> str:
    """The block raises; calls are recorded as before afterwards."""
    try:
        with dist.profile(directory):
            dist.all_reduce(np.zeros(3))
            raise KeyError("of the program")
    except KeyError as e:
        dist.barrier()
        return str(e)
