"""NCCL's RAS: what NCCL says of the ranks of a job, for the error of a deadline.

From 2.24 on a thread of NCCL in each process answers at a port of the host, and asks the other
processes of the job before. It answers though kernels hang. The protocol is text
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from unicoll.process.formatting import printable_line

SINCE = 22400
"""The first version with it."""
_ADDRESS = "localhost:28028"
_ANSWER_S = 2.0
"""How long the answer may take; the group fails after that."""
_BYTES = 1 << 16
_LINES, _WIDTH = 40, 200


def status(environ: Mapping[str, str], seconds: float = _ANSWER_S) -> str:
    """What NCCL says of its jobs on this host; "" if it does not answer, or is turned off.

    Args:
        environ: NCCL's variables (:func:`nccl_comm.transport_report.settings`).
        seconds: how long this waits.
    """
    if environ.get("NCCL_RAS_ENABLE", "1").strip() == "0":
        return ""
    host, _, port = (environ.get("NCCL_RAS_ADDR") or _ADDRESS).rpartition(":")
    answer, deadline = b"", time.monotonic() + seconds
    try:
        with socket.create_connection((host.strip("[]"), int(port)), seconds) as connection:
            connection.sendall(b"verbose status\n")
            while len(answer) < _BYTES and (left := deadline - time.monotonic()) > 0:
                connection.settimeout(left)
                part = connection.recv(_BYTES - len(answer))
                if not part:
                    break
                answer += part
    except (OSError, ValueError):
        # What has come until then is used. Without a RAS there is nobody at the port.
        pass
    lines = [printable_line(line)[:_WIDTH] for line in answer.decode(errors="replace").splitlines()]
    lines = [line for line in lines if line.strip()]
    more = [f"... and {len(lines) - _LINES} more lines"] if len(lines) > _LINES else []
    return "\n".join(lines[:_LINES] + more)
