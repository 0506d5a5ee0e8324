"""What can be checked here: ``python -m gpu_check.probe`` says it as a line of JSON, in a process that then ends."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from .process import TESTS, environment

__all__ = ["Found", "probe"]

_TIMEOUT_S = 180.0


class Found(NamedTuple):
    """What is here.

    Attributes:
        reason: why nothing can be checked, or None.
        kits: array libraries that work, of cupy and torch.
        without: why others do not.
    """

    reason: str | None
    kits: tuple[str, ...]
    without: dict[str, str]


def probe() -> Found:
    """Ask in another process: what CUDA and array libraries leave behind is gone with it."""
    command = [sys.executable, "-m", "gpu_check.probe"]
    try:
        done = subprocess.run(
            command, cwd=TESTS.parent, env=environment(), capture_output=True, text=True, timeout=_TIMEOUT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Found(f"CUDA did not answer in {_TIMEOUT_S:g} s", (), {})
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return Found(f"asking CUDA ended with {done.returncode}: {done.stderr.strip()[-500:]}", (), {})
    said: dict[str, Any] = json.loads(lines[-1])
    return Found(said["reason"], tuple(said["kits"]), said["without"])


def _ask() -> dict[str, Any]:
    """In that process."""
    from unicoll import streams

    reason = streams.reason_against()
    if reason is not None:
        return {"reason": reason, "kits": [], "without": {}}
    kits, without = [], {}
    for name, works in _WORK.items():
        if importlib.util.find_spec(name) is None:
            without[name] = "is not installed"
            continue
        try:
            works()
            kits.append(name)
        except Exception as error:
            without[name] = f"{type(error).__name__}: {error}"[:500]
    from nccl_comm import library  # after torch, whose NCCL it then is

    found = library.find()
    if isinstance(found, str):
        reason = found
    elif not kits:
        reason = "no array library: " + "; ".join(f"{name} {why}" for name, why in without.items())
    return {"reason": reason, "kits": kits, "without": without}


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
    print(json.dumps(_ask()), flush=True)
