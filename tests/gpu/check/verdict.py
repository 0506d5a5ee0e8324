"""The verdict on checks and figures: passed, failed or incomplete; and the bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["bars", "verdict"]

Stages = dict[str, Any]
_DEVICE_TIME = 1.01
_LARGE = 16 << 20
_STAGED = 64 << 20
_STAGED_TIME = 1 / 0.8


def verdict(stages: Stages, wanted: Sequence[str]) -> str:
    """ "failed" if a check failed or a stage crashed, "incomplete" if not all stages and checks were finished."""
    found = [stages.get(name, {"state": "not run", "checks": []}) for name in wanted]
    if any(check["outcome"] == "failed" for stage in found for check in stage["checks"]):
        return "failed"
    if any(stage["state"] == "crashed" for stage in found):
        return "failed"
    late = any(check["outcome"] == "not run" for stage in found for check in stage["checks"])
    return "passed" if not late and all(stage["state"] == "done" for stage in found) else "incomplete"


def bars(stages: Stages) -> list[dict[str, Any]]:
    """The bars with figures: what, the ratio, its maximum, and whether it is met."""
    return [*_enqueue(stages), *_device_time(stages), *_staged(stages)]


def _enqueue(stages: Stages) -> Iterator[dict[str, Any]]:
    """Host time to enqueue, relative to torch.distributed."""
    rows = stages.get("cost", {}).get("figures", {}).get("enqueue", {})
    for what, row in rows.items():
        theirs = (row.get("torch.distributed") or {}).get("p50_us")
        for name, stat in row.items():
            if theirs and name.startswith("unicoll") and stat.get("p50_us"):
                ratio = stat["p50_us"] / theirs
                yield _bar(f"host time to enqueue, {what}, {name} over torch.distributed", ratio, 1.0)


def _device_time(stages: Stages) -> Iterator[dict[str, Any]]:
    """Device time, relative to bare NCCL."""
    rows = stages.get("device-time", {}).get("figures", {}).get("device time", {})
    for what, row in rows.items():
        if row.get("bytes", 0) < _LARGE:
            continue
        theirs = (row["contenders"].get("bare NCCL") or {}).get("p50_us")
        for name, stat in row["contenders"].items():
            if theirs and name.startswith("unicoll"):
                yield _bar(
                    f"device time, {what}, {name} over bare NCCL", stat["p50_us"] / theirs, _DEVICE_TIME
                )


def _staged(stages: Stages) -> Iterator[dict[str, Any]]:
    """Time of device arrays through host memory, relative to the slower of the bus and the operation on host arrays."""
    for what, row in stages.get("copies", {}).get("figures", {}).items():
        share = row.get("share of the slower of bus and host")
        if share and row["bytes"] >= _STAGED:
            words = f"time of a broadcast of 64 MiB, {what}, over the slower of bus and host"
            yield _bar(words, 1 / share, _STAGED_TIME)


def _bar(what: str, ratio: float, most: float) -> dict[str, Any]:
    return {"what": what, "ratio": ratio, "most": most, "met": ratio <= most}
