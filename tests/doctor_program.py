"""``python -m unicoll.doctor`` as the ranks of a job, with faults planted: ``doctor_program.py FAULTS [arguments]``.

FAULTS are words joined by commas: ``slow:1-2`` (every message between the two comes late), ``corrupt:0-3`` (one byte
of large messages from the first to the second is another), ``mute:1-2`` (what the first sends to the second is lost),
``dies:1`` (that rank ends when it sends a large message), ``absent:1`` (that rank does not come), ``alone:2`` (that
rank has another variable).
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from unicoll.doctor import job, main, pairs
from unicoll.group import ProcessGroup

SLOW_S = 0.03
POSITION = 12345
PLANTED = {kind: where for kind, _, where in (word.partition(":") for word in sys.argv[1].split(","))}


def between(kind: str, mine: int, other: int, *, both: bool = False) -> bool:
    """Whether a fault is planted for messages from ``mine`` to ``other``."""
    wanted = PLANTED.get(kind, "").split("-")
    return [str(mine), str(other)] == wanted or (both and [str(other), str(mine)] == wanted)


plain_send = ProcessGroup.send


def send(group: ProcessGroup, tensor: Any, dst: int, tag: int = 0, *, timeout: Any = None) -> None:
    mine, large = group.rank(), tensor.nbytes == pairs.LARGE
    if large and PLANTED.get("dies") == str(mine):
        os._exit(3)
    if between("mute", mine, dst):
        return
    if between("slow", mine, dst, both=True):
        time.sleep(SLOW_S)
    if large and between("corrupt", mine, dst):
        tensor = tensor.copy()
        tensor[POSITION] ^= 1
    plain_send(group, tensor, dst, tag, timeout=timeout)


if __name__ == "__main__":
    rank = os.environ["RANK"]
    ProcessGroup.send = send  # type: ignore[method-assign]
    job._LEAST_PATIENCE_S = 60.0 if "absent" not in PLANTED else 4.0
    if PLANTED.get("absent") == rank:
        time.sleep(600)
    if PLANTED.get("alone") == rank:
        os.environ["NCCL_DEBUG"] = "INFO"
    sys.exit(main(sys.argv[2:]))
