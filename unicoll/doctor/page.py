"""The page as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .. import net
from .hints import LEVELS, Hint
from .probes import Facts

__all__ = ["LAYOUT", "Report", "as_json", "as_text", "dumped", "entry", "hint_lines"]

LAYOUT = 1
"""Of the JSON object; it grows when a name goes or changes its meaning."""
_WIDTH, _LABEL = 100, 13
_CHOICE = "choice"


@dataclass(frozen=True)
class Report:
    """What was found on this machine: the facts of each section, and the hints."""

    sections: Mapping[str, Facts]
    hints: list[Hint]

    @property
    def status(self) -> int:
        """The exit status: the worst hint's."""
        return max((LEVELS.index(h.level) for h in self.hints), default=0)


def unicoll_version() -> str:
    """Of the installed package; a checkout has none."""
    try:
        return version("unicoll")
    except PackageNotFoundError:
        return "(a checkout)"


def entry(label: str, lines: Iterable[str]) -> Iterator[str]:
    """Lines of the page beside a label."""
    for line in lines:
        yield from textwrap.wrap(
            line, _WIDTH, initial_indent=f"{label:<{_LABEL}}", subsequent_indent=" " * (_LABEL + 2),
            break_on_hyphens=False,
        )  # fmt: skip
        label = ""


def hint_lines(hints: Iterable[tuple[Hint, str]]) -> Iterator[str]:
    """The hints, each with what to do about it, and with the ranks that have it."""
    for hint, ranks in hints:
        where = f" ({ranks})" if ranks else ""
        yield from entry(hint.level, [f"{hint.about}: {hint.text}{where}"])
        yield from entry("", [f"  -> {hint.do}"])


def as_text(report: Report) -> str:
    """The page of a process alone."""
    lines = [f"unicoll {unicoll_version()} on {net.hostname()}", ""]
    for name, facts in report.sections.items():
        if name != _CHOICE:
            lines += entry(name, facts["lines"] or ["nothing is known"])
    lines += ["", "init_process_group() would choose, as a rank of a job:"]
    lines += entry("", report.sections[_CHOICE]["lines"])
    lines += ["", *hint_lines((hint, "") for hint in report.hints)] if report.hints else ["", "no hints"]
    return "\n".join(lines)


def as_json(report: Report) -> str:
    """The same, as one JSON object."""
    return dumped({"host": net.hostname(), "sections": report.sections}, report.hints, report.status)


def dumped(content: Mapping[str, Any], hints: Iterable[Any], status: int) -> str:
    """One JSON object: layout, version, what was found, hints, exit status."""
    listed = [asdict(hint) if isinstance(hint, Hint) else hint for hint in hints]
    head = {"layout": LAYOUT, "unicoll": unicoll_version()}
    return json.dumps({**head, **content, "hints": listed, "exit_status": status}, indent=1, default=str)
