"""The blocks of code in README.md and docs/*.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Block:
    """A block of code and its expected output (None: not compared)."""

    page: Path
    line: int
    language: str
    options: list[str]
    code: str
    output: str | None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def option(self, name: str, default: int) -> int:
        return int(self.value(name) or default)

    def value(self, name: str) -> str:
        """The value of an option; "" if it is absent."""
        return next((o.partition("=")[2] for o in self.options if o.startswith(f"{name}=")), "")


FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$(?:\n```text\n((?:.*\n)*?)```$)?", re.M)


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in FENCE.finditer(text):
        language, *options = match[1].split() or [""]
        yield Block(page, text.count("\n", 0, match.start()) + 1, language, options, match[2], match[3])


def is_run(block: Block) -> bool:
    return any(option.partition("=")[0] == "run" for option in block.options)
