"""Programs like scripts/gpu_check's, some of which hang; and processes that hang.

``python -m tests.gpu.gpu_hanging_jobs NAME...`` prints what a probe prints, or runs checks as
tests/conformance/one_rank.py does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

_LONG_S = 1000.0


def goes_well(k: Any) -> int:
    return os.getpid()


def hangs(k: Any) -> None:
    time.sleep(_LONG_S)


def dies(k: Any) -> None:
    os._exit(7)


def is_wrong(k: Any) -> None:
    raise AssertionError("nonsense")


def line(what: str, seconds: float) -> dict[str, Any]:
    """A line of costs; one of them hangs."""
    if what == "bad":
        hangs(None)
    return {what: {"p50_us": seconds}}


def main(names: list[str]) -> None:
    """As a probe, "torch" hangs and "cupy" works; as checks, "two" hangs and "three" ends the process."""
    print(json.dumps({"nccl": "none"}), flush=True)
    for name in names:
        if name in ("torch", "two"):
            hangs(None)
        if name == "three":
            os._exit(3)
        print(json.dumps({"check": name, "error": None, "without": None}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
