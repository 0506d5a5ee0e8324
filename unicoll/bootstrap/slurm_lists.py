"""Slurm's notations: node lists such as ``n[1-3,08-10]`` and counts such as ``2(x3),1``."""

from __future__ import annotations

import re

from unicoll.errors import DistArgumentError


def expand_counts(name: str, text: str) -> list[int]:
    """``"2(x3),1"`` as ``[2, 2, 2, 1]``: tasks by node; ``name`` is the variable, for errors."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise DistArgumentError(
                f"{name}={text} is neither a number nor a list of tasks by node, such as 2(x3),1"
            )
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def expand_nodelist(text: str, limit: int | None = None) -> list[str]:
    """The host names of a Slurm node list, in order; at most ``limit`` of them.

    ``"n[1-3,08-10],gpu-a[0-1]b[2,4]"``: commas outside brackets separate patterns, a bracket holds numbers
    and ranges (zero-padded to the width of their start), and a pattern may hold several brackets. DistArgumentError for
    other texts.
    """
    hosts: list[str] = []
    for pattern in _split_outside_brackets(text):
        _expand_pattern(pattern, text, hosts, limit)
        if limit is not None and len(hosts) >= limit:
            return hosts[:limit]
    if not hosts:
        raise DistArgumentError(f"the node list {text!r} names no host")
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    if re.search(r"\[[^\]]*\[|\][^\[]*\]|^[^\[]*\]|\[[^\]]*$", text):
        raise DistArgumentError(f"the node list {text!r} has brackets that do not match")
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


def _expand_pattern(pattern: str, text: str, hosts: list[str], limit: int | None) -> None:
    """Append the names of one pattern; the rightmost bracket varies fastest."""
    head, bracket, rest = pattern.partition("[")
    if not bracket:
        hosts.append(pattern)
        return
    inside, _, tail = rest.partition("]")
    suffixes: list[str] = []
    _expand_pattern(tail, text, suffixes, limit)
    for item in inside.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", item)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise DistArgumentError(
                f"the node list {text!r} has {item!r} where a number or a range should be"
            )
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            hosts.extend(f"{head}{number:0{len(match[1])}d}{suffix}" for suffix in suffixes)
            if limit is not None and len(hosts) >= limit:
                return
