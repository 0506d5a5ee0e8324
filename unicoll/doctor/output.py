"""The report as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import unicoll
from unicoll.doctor.hints import Hint, Sections, status
from unicoll.net.wire import interfaces

LAYOUT = 1
"""Version of the JSON layout; it increases when a key is removed or changes its meaning."""
_WIDTH, _LABEL = 100, 13
_CHOICE = "choice"


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


def as_text(sections: Sections, hints: Sequence[Hint]) -> str:
    """The report of one process."""
    lines = [f"unicoll {unicoll.__version__} on {interfaces.hostname()}", ""]
    for name, facts in sections.items():
        if name != _CHOICE:
            lines += entry(name, facts["lines"] or ["unknown"])
    lines += ["", "init_process_group() would choose, as a rank of a job:"]
    lines += entry("", sections[_CHOICE]["lines"])
    lines += ["", *hint_lines((hint, "") for hint in hints)] if hints else ["", "no hints"]
    return "\n".join(lines)


def as_json(sections: Sections, hints: Sequence[Hint]) -> str:
    """The report of one process as a JSON object."""
    return dumped({"host": interfaces.hostname(), "sections": sections}, hints, status(hints))


def dumped(content: Mapping[str, Any], hints: Iterable[Any], exit_status: int) -> str:
    """One JSON object: layout, version, content, hints, exit status."""
    listed = [asdict(hint) if isinstance(hint, Hint) else hint for hint in hints]
    head = {"layout": LAYOUT, "unicoll": unicoll.__version__}
    return json.dumps(
        {**head, **content, "hints": listed, "exit_status": exit_status}, indent=1, default=str
    )
