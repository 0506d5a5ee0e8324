"""The workers' tracebacks, each distinct one once with its ranks."""

from __future__ import annotations

import re

from unicoll.net.texts import ranks_text

_VARIES = re.compile(r"\b(?i:pid) \d+|#\d+\b|\b0x[0-9a-fA-F]+\b")


def keys(text: str, rank: int) -> set[str]:
    """Keys of a rank's text; two ranks have the same error if they share a key.

    Pids, sequence numbers and addresses are masked in both keys, the rank's own number in one of them. (Not in both:
    in an error that lists all ranks and is the same on all of them, every rank would mask another number.)
    """
    same = _VARIES.sub("_", text)
    return {same, re.sub(rf"(?i)\brank {rank}\b", "rank _", same)}


class _Group:
    """Ranks with the same traceback."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.texts: dict[int, str] = {}  # by rank; not yet printed
        self.shown: int | None = None  # the rank whose text was printed for all


class Tracebacks:
    """The uncaught exceptions of the workers."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []

    def add(self, rank: int, text: str) -> None:
        """Add a rank's traceback."""
        new = keys(text, rank)
        group = next((one for one in self._groups if one.keys & new), None)
        if group is None:
            group = _Group()
            self._groups.append(group)
        group.keys |= new
        group.texts[rank] = text

    def take(self, last: int | None = None) -> str:
        """The tracebacks that were not yet returned, as lines, in order of arrival, with rank ``last``'s at the end."""
        groups = sorted(filter(lambda one: one.texts, self._groups), key=lambda one: last in one.texts)
        return "".join(map(_take, groups))


def _take(group: _Group) -> str:
    found, group.texts = group.texts, {}
    ranks = ranks_text(list(found))
    if group.shown is not None:
        return f"{ranks}: the same as rank {group.shown}\n"
    group.shown = rank = min(found)
    whose = "" if len(set(found.values())) == 1 else f" (this is rank {rank}'s)"
    return f"{ranks}{whose}:\n" + found[rank].rstrip("\n") + "\n"
