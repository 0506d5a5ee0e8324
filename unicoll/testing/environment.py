"""What ranks of tests start with: the directory of the packages, environment variables, a port."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unicoll.run.job import reserve_port

ROOT = Path(__file__).resolve().parents[2]
"""The directory that contains the packages."""

LAUNCHER_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_|MASTER_|UNICOLL_|GLOO_|GROUP_RANK|ROLE_|TORCHELASTIC_"
    r"|OMPI_|PMI|MPI_|MV2_|SLURM_|PALS_|HYDRA_|NCCL_)"
)
"""Beginnings of the variables that launchers and libraries set."""
_TEST_OPTIONS = ("UNICOLL_TEST_", "UNICOLL_TRANSPORT", "UNICOLL_CHANNEL")


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free TCP port that no other program is given meanwhile; a server with SO_REUSEADDR can listen on it."""
    with reserve_port() as reserved:
        yield reserved.getsockname()[1]


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment without variables of launchers."""
    kept = {
        k: v for k, v in os.environ.items() if k.startswith(_TEST_OPTIONS) or not LAUNCHER_VARIABLES.match(k)
    }
    # on a busy machine calls may wait for long, and what ranks print may be a failure
    kept |= {
        "UNICOLL_SOCKET_IFNAME": "lo",
        "UNICOLL_STALL_WARNING": "180",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return kept | {"PYTHONFAULTHANDLER": "1"} | (extra or {})
