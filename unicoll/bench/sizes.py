"""Sizes: parsing in nccl-tests' notation, and the sizes of a sweep."""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT_SIZES = tuple(1 << k for k in (3, 6, 9, 12, 14, 16, 18, 20, 22, 24, 26))
"""Default sizes in bytes: 8, 64, 512, 4K, 16K, 64K, 256K, 1M, 4M, 16M, 64M."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Parse a size in nccl-tests' notation: ``512``, ``4K``, ``1.5M``, ``2g``; K is 1024. ValueError if it is none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMG]?)B?\s*", text.upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512, 4K, 1.5M or 2G")
    if (size := float(match[1]) * _UNITS[match[2]]) >= 1 << 62:
        raise ValueError(f"{text!r} is more than memory can be")
    return int(size)


def short(size: int) -> str:
    """A size with a unit: ``4K``."""
    for unit in ("G", "M", "K"):
        if size >= _UNITS[unit] and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


@dataclass(frozen=True)
class Sweep:
    """The sizes to measure, in bytes, ascending; ``step`` is as the header prints it: ``"2(factor)"``."""

    sizes: tuple[int, ...]
    step: str


def listed(sizes: tuple[int, ...]) -> Sweep:
    """A sweep of explicit sizes, sorted and without duplicates."""
    return Sweep(tuple(sorted(set(sizes))), "0(list)")


def stepped(smallest: str | None, largest: str | None, step: str | None, factor: str | None) -> Sweep:
    """A sweep from the texts of nccl-tests' ``-b``, ``-e``, ``-i`` and ``-f``; ValueError if they are wrong."""
    first, last = parse_size(smallest or "8"), parse_size(largest or "64M")
    if largest is None:
        last = max(last, first)
    if first > last:
        raise ValueError(f"invalid sizes for 'minbytes' and 'maxbytes': {first} > {last}")
    if step and factor:
        raise ValueError("-i and -f exclude each other")
    if not step:
        return _multiplied(first, last, factor or "2")
    step_bytes = parse_size(step)
    if step_bytes < 1:
        raise ValueError("-i must be at least 1 byte")
    return Sweep(tuple(range(first, last + 1, step_bytes)), f"{step_bytes}(bytes)")


def _multiplied(smallest: int, largest: int, text: str) -> Sweep:
    if not text.isdigit() or int(text) < 2:
        raise ValueError(f"-f {text}: the factor must be a whole number, 2 or more")
    if smallest < 1:
        raise ValueError("-b must be at least 1 byte where sizes are multiplied")
    sizes = [smallest]
    while sizes[-1] * int(text) <= largest:
        sizes.append(sizes[-1] * int(text))
    return Sweep(tuple(sizes), f"{text}(factor)")
