"""Starting the processes of a tutorial script, one per rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch.multiprocessing as mp

Worker = Callable[[int, int], None]


def start(worker: Worker, size: int) -> None:
    """Run ``worker(rank, size)`` in ``size`` fresh processes and leave with 1 if one of them failed.

    The port on which rank 0 is met is the script's first argument, 29500 without it.
    """
    mp.set_start_method("spawn")
    port = sys.argv[1] if len(sys.argv) > 1 else "29500"
    ranks = [mp.Process(target=_in_process, args=(worker, rank, size, port)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


def _in_process(worker: Worker, rank: int, size: int, port: str) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = port
    worker(rank, size)


def say(*words: object) -> None:
    """Print one line in one piece, so that the lines of several processes do not mix."""
    print(" ".join(map(str, words)) + "\n", end="", flush=True)
