"""Detection of array libraries: ``python -m tests.gpu.check.probe LIBRARY`` prints whether one works."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from tests.gpu.check.process import ROOT, environment

__all__ = ["LIBRARIES", "Found", "probe"]

LIBRARIES = ("torch", "cupy")
_END_S = 3.0


class Found(NamedTuple):
    """The result of the detection.

    Attributes:
        reason: the reason why nothing can be checked, or None.
        kits: array libraries that work, of cupy and torch.
        without: reasons for the others.
    """

    reason: str | None
    kits: tuple[str, ...]
    without: dict[str, str]


def probe(seconds: float, program: str = "tests.gpu.check.probe") -> Found:
    """Check each library in a process of its own, in parallel; CUDA's state ends with the process.

    Args:
        seconds: the time after which a library counts as one that does not work.
        program: the module that checks it.
    """
    deadline = time.monotonic() + seconds
    asked = {
        name: subprocess.Popen(
            [sys.executable, "-m", program, name],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in LIBRARIES
    }
    said = {name: _said(process, deadline, seconds) for name, process in asked.items()}
    kits = tuple(name for name, why in said.items() if why is None)
    without = {name: why for name, why in said.items() if why is not None}
    reason = None if kits else "; ".join(f"{name}: {why}" for name, why in without.items())
    return Found(reason, kits, without)


def _said(process: subprocess.Popen[str], deadline: float, seconds: float) -> str | None:
    """The reason why a library does not work, or None."""
    try:
        out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # the driver may block its end
            process.communicate(timeout=_END_S)
        return f"did not answer in {seconds:.0f} s"
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        return f"ended with {process.returncode}: {err.strip()[-500:]}"
    said: str | None = json.loads(lines[-1])["without"]
    return said


def _ask(name: str) -> str | None:
    """Check a library, in its own process."""
    from unicoll.arrays import cuda

    reason = cuda.reason_against()
    if reason is not None:
        return reason
    if importlib.util.find_spec(name) is None:
        return "is not installed"
    try:
        _WORK[name]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]
    from nccl_comm.library import locate  # after torch, whose NCCL is then used

    found = locate.find()
    return found if isinstance(found, str) else None


def _torch() -> None:
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} has no CUDA here")
    assert int((torch.arange(4, device="cuda") + 1).sum()) == 10


def _cupy() -> None:
    cupy: Any = importlib.import_module("cupy")
    assert int((cupy.arange(4) + 1).sum()) == 10  # compiles a kernel


_WORK: dict[str, Callable[[], None]] = {"torch": _torch, "cupy": _cupy}

if __name__ == "__main__":
    print(json.dumps({"without": _ask(sys.argv[1])}), flush=True)
