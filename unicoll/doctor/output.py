"""The report as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from unicoll.doctor.hints import LEVELS, Hint
from unicoll.doctor.probes import Facts
from unicoll.net import interfaces

LAYOUT = 1
"""Version of the JSON layout; it increases when a key is removed or changes its meaning."""
_WIDTH, _LABEL = 100, 13
_CHOICE = "choice"


@dataclass(frozen=True)
class HostReport:
    """The report of one process: the facts of each section, and the hints."""

    sections: Mapping[str, Facts]
    hints: list[Hint]

    @property
    def status(self) -> int:
        """The exit status: the level of the most severe hint."""
        return max((LEVELS.index(h.level) for h in self.hints), default=0)


def unicoll_version() -> str:
    """Version of the installed package; a checkout has none."""
    try:
        return version("unicoll")
    except PackageNotFoundError:
        return "(a checkout)"


def entry(label: str, lines: Iterable[str]) -> Iterator[str]:
    """Wrapped lines of the report with a label before the first."""
    for line in lines:
        yield from textwrap.wrap(
            line,
            _WIDTH,
            initial_indent=f"{label:<{_LABEL}}",
            subsequent_indent=" " * (_LABEL + 2),
            break_on_hyphens=False,
        )
        label = ""


def hint_lines(hints: Iterable[tuple[Hint, str]]) -> Iterator[str]:
    """The text of each hint, with its remedy and its ranks."""
    for hint, ranks in hints:
        rank_text = f" ({ranks})" if ranks else ""
        yield from entry(hint.level, [f"{hint.about}: {hint.text}{rank_text}"])
        yield from entry("", [f"  -> {hint.do}"])


def as_text(report: HostReport) -> str:
    """The report of one process as text."""
    lines = [f"unicoll {unicoll_version()} on {interfaces.hostname()}", ""]
    for name, facts in report.sections.items():
        if name != _CHOICE:
            lines += entry(name, facts["lines"] or ["unknown"])
    lines += ["", "init_process_group() would choose, as a rank of a job:"]
    lines += entry("", report.sections[_CHOICE]["lines"])
    lines += ["", *hint_lines((hint, "") for hint in report.hints)] if report.hints else ["", "no hints"]
    return "\n".join(lines)


def as_json(report: HostReport) -> str:
    """The report of one process as a JSON object."""
    return dumped({"host": interfaces.hostname(), "sections": report.sections}, report.hints, report.status)


def dumped(content: Mapping[str, Any], hints: Iterable[Any], status: int) -> str:
    """One JSON object: layout, version, content, hints, exit status."""
    listed = [asdict(hint) if isinstance(hint, Hint) else hint for hint in hints]
    head = {"layout": LAYOUT, "unicoll": unicoll_version()}
    return json.dumps({**head, **content, "hints": listed, "exit_status": status}, indent=1, default=str)
