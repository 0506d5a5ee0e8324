"""Reports of stages, line by line, and the JSON file that collects them."""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.ranks import ROOT, RanksFailed

_MOST_CHARACTERS = 12_000
"""Characters that are kept of an error."""
_LINE = 160


class Skip(Exception):
    """A check cannot be made on this machine; the message gives the reason."""


class NoTime(Exception):
    """There is no time for a check."""


class Reporter:
    """Reports a stage's checks with their outcomes, and figures, at once.

    Args:
        tell: called with each line of the report.
        seconds: time for the stage; some time after that it is killed.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], object], seconds: float) -> None:
        self._tell = tell
        self._end = time.monotonic() + seconds
        self.seconds = seconds

    def left(self) -> float:
        """Seconds until the stage should be over."""
        return self._end - time.monotonic()

    def figure(self, name: str, value: Any) -> None:
        """Report a measurement or a fact."""
        self._tell({"figure": name, "value": plain(value)})

    def say(self, text: str) -> None:
        """Report progress."""
        self._tell({"say": text})

    def check(self, name: str, function: Callable[..., Any], *args: Any, needs: float = 0.0) -> Any:
        """Call a function as a check: it passes, fails by an exception, is skipped, or is not run for lack of time.

        Args:
            name: name of the check.
            function, args: the call.
            needs: seconds that must be left to begin.

        Returns:
            The function's result; None unless it passed.
        """
        began = time.monotonic()
        outcome, detail, value = "passed", "", None
        self._tell({"doing": name})
        try:
            if self.left() < needs:
                raise NoTime(f"{max(0.0, self.left()):.0f} s are left of {self.seconds:.0f}")
            value = function(*args)
        except Skip as why:
            outcome, detail = "skipped", str(why)
        except NoTime as why:
            outcome, detail = "not run", str(why)
        except Exception as error:
            outcome, detail = "failed", description_of(error)
        seconds = round(time.monotonic() - began, 3)
        self._tell({"check": name, "outcome": outcome, "seconds": seconds, "detail": detail})
        return value


def description_of(error: BaseException) -> str:
    """A description of an exception; the error is its first line."""
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, RanksFailed):  # which has the ranks' tracebacks
        text += "\n" + "".join(traceback.format_exception(error))
    return text[:_MOST_CHARACTERS]


def headline(detail: str) -> str:
    """The first line of a reason, shortened."""
    first = next((line.strip() for line in detail.splitlines() if line.strip()), "")
    return first if len(first) <= _LINE else first[: _LINE - 3] + "..."


def plain(value: Any) -> Any:
    """A value as JSON: without NaN, NumPy types and tuples as keys."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        value = value.item()
    if isinstance(value, float):
        return None if not math.isfinite(value) else float(f"{value:.6g}")
    return value if value is None or isinstance(value, bool | int | str) else str(value)


class Document:
    """The JSON file, which is always complete on disk, also if the run is killed.

    Attributes:
        data: its content.
    """

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {"format": 1, **plain(head), "verdict": "incomplete", "stages": {}}
        self.write()

    def begin(self, stage: str, limit: float) -> dict[str, Any]:
        """Begin a stage; its record."""
        record = {"state": "running", "limit_s": round(limit, 1), "seconds": 0.0, "checks": [], "figures": {}}
        self.data["stages"][stage] = record
        self.write()
        return record

    def take(self, record: dict[str, Any], line: dict[str, Any]) -> None:
        """Add a line of a stage's report."""
        if "doing" in line:
            record["doing"] = line["doing"]  # stays there if the stage is cut off in it
        elif "check" in line:
            record.pop("doing", None)
            rest = {key: value for key, value in line.items() if key != "check"}
            record["checks"].append({"name": line["check"], **rest})
        elif "figure" in line:
            record["figures"][line["figure"]] = line["value"]
        else:
            return
        self.write()

    def write(self) -> None:
        """Write the whole file. Files of this checkout have relative paths in it."""
        beside = self.path.with_name(self.path.name + ".part")
        text = json.dumps(self.data, indent=1).replace(json.dumps(f"{ROOT}/")[1:-1], "")
        beside.write_text(f"{text}\n")
        os.replace(beside, self.path)

    def move(self, path: Path) -> None:
        """Rename the file."""
        if path != self.path:
            os.replace(self.path, path)
            self.path = path
