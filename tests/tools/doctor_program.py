"""``unicoll doctor`` in the ranks of a job, with injected faults: ``doctor_program.py FAULTS [arguments]``.

FAULTS is a comma-separated list: ``slow:1-2`` (messages between the two ranks are delayed), ``corrupt:0-3`` (one byte
of large messages from the first to the second is changed), ``lost:1-2`` (messages from the first to the second are
dropped), ``dies:1`` (the rank exits when it sends a large message), ``absent:1`` (the rank does not join),
``variable:2`` (the rank has an additional environment variable).
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from unicoll.doctor import job, main, pairs
from unicoll.group.process_group import ProcessGroup

SLOW_S = 0.03
POSITION = 12345
FAULTS = {kind: ranks for kind, _, ranks in (fault.partition(":") for fault in sys.argv[1].split(","))}


def between(kind: str, rank: int, other: int, *, both: bool = False) -> bool:
    """True if a fault is injected into messages from ``rank`` to ``other``."""
    ranks = FAULTS.get(kind, "").split("-")
    return [str(rank), str(other)] == ranks or (both and [str(other), str(rank)] == ranks)


plain_send = ProcessGroup.send


def send(group: ProcessGroup, tensor: Any, dst: int, tag: int = 0, *, timeout: Any = None) -> None:
    rank, large = group.rank(), tensor.nbytes == pairs.LARGE
    if large and FAULTS.get("dies") == str(rank):
        os._exit(3)
    if between("lost", rank, dst):
        return
    if between("slow", rank, dst, both=True):
        time.sleep(SLOW_S)
    if large and between("corrupt", rank, dst):
        tensor = tensor.copy()
        tensor[POSITION] ^= 1
    plain_send(group, tensor, dst, tag, timeout=timeout)


if __name__ == "__main__":
    rank = os.environ["RANK"]
    ProcessGroup.send = send  # type: ignore[method-assign]
    job._MIN_TIMEOUT_S = 60.0 if "absent" not in FAULTS else 4.0
    if FAULTS.get("absent") == rank:
        time.sleep(600)
    if FAULTS.get("variable") == rank:
        os.environ["NCCL_DEBUG"] = "INFO"
    sys.exit(main(sys.argv[2:]))
