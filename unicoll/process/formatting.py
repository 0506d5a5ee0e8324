"""Ranks, signals and backends in words, and the output of the commands."""

from __future__ import annotations

import io
import os
import shlex
import signal
import sys
from collections.abc import Iterable
from shutil import which
from typing import Any


def rank_spans(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last rank of each run of consecutive ranks, in order."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = spans[-1][0], rank
        else:
            spans.append((rank, rank))
    return spans


def ranks_text(ranks: Iterable[int], last: str = ", ") -> str:
    """Ranks in words: ``rank 3``, ``ranks 0, 1, 5-7``; ``last`` is between the last two parts."""
    parts: list[str] = []
    for low, high in rank_spans(ranks):
        parts += [f"{low}-{high}"] if high > low + 1 else map(str, range(low, high + 1))
    listed = last.join([", ".join(parts[:-1]), parts[-1]]) if parts[1:] else "".join(parts)
    return f"rank {listed}" if listed.isdigit() else f"ranks {listed}"


def backend_text(name: str) -> str:
    """A backend's name in reports: ``unicoll (gloo)`` for unicoll's CPU backend, as torch's Gloo is
    another one."""
    return f"unicoll ({name})" if name in ("gloo", "gloo-symmetric") else name


def signal_name(number: int) -> str:
    """The name of a signal, ``SIGKILL``; a real-time signal has none: "unknown"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def command(verb: str) -> str:
    """The command that this process was started with, for its own messages: ``unicoll VERB``, or a
    module's."""
    return (
        f"unicoll {verb}"
        if os.path.basename(sys.argv[0]) == "unicoll"
        else f"python -m unicoll.{verb}"
    )


def command_to_type(verb: str, *arguments: str) -> str:
    """A command of unicoll as its user types it: ``unicoll VERB``, or a module's if that is not
    installed."""
    here = os.path.dirname(sys.executable)
    if which("unicoll") is not None:
        words = ["unicoll", verb]
    elif here and (found := which("unicoll", path=here)) is not None:
        # The command is beside the interpreter, but not on PATH: the environment is not active.
        words = [found, verb]
    else:
        words = ["python", "-m", f"unicoll.{verb}"]
    return shlex.join([*words, *arguments])


def printable(text: str, kept: str = "\n") -> str:
    """Text of other processes and files without characters that a terminal acts on: they are
    escaped.

    A text that is part of a line is to have ``kept=""``: else it may look like lines of this
    program.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text
    )


def printable_line(text: object, most: int = 1 << 20) -> str:
    """Text of others for a part of a line, see :func:`printable`; ``most`` is a limit to its
    characters."""
    return printable(str(text)[:most], kept="")


def printable_values(value: Any) -> Any:
    """A JSON value of another process with :func:`printable_line` of each text in it; names are
    left as they are."""
    if isinstance(value, str):
        return printable_line(value)
    if isinstance(value, dict):
        return {name: printable_values(inner) for name, inner in value.items()}
    return [*map(printable_values, value)] if isinstance(value, list) else value


def shortened(text: str, limit: int) -> str:
    """The text, or its first whole words and `` ...``, of at most ``limit`` characters.

    It ends before an open bracket if that leaves half of the limit, and within a word only if no
    other end leaves that.
    """
    if len(text) <= limit:
        return text
    last = text.rfind(" ", 0, limit - 3)
    opened: list[int] = []
    for place, character in enumerate(text[: max(last, 0)]):
        if character in "([{":
            opened.append(place)
        elif character in ")]}" and opened:
            opened.pop()
    for place in (*opened, last + 1):
        end = text.rfind(" ", 0, place)
        if end >= limit // 2:
            return f"{text[:end].rstrip()} ..."
    return f"{text[: limit - 3]}..."


def print_text(text: str) -> None:
    """Print text on the standard output.

    What its encoding lacks and what a terminal acts on is escaped; a reader that has ended is no
    error.

    Raises:
        SystemExit: it cannot be written, for example on a full disk; the message says why.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(printable(text), flush=True)
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        # The interpreter flushes the output again when it ends, which must not fail a second time.
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        # A reader that has ended, such as `head -1`, is no error.
        if not isinstance(error, BrokenPipeError):
            sys.exit(f"standard output: {error.strerror}")
