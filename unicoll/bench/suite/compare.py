"""Ratios with their spread, and what has moved between two runs of the suite."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unicoll.bench.suite.rows import RatioRow

LEAST = 1.1
"""The smallest factor that counts as a change, however small the spreads are."""


@dataclass(frozen=True)
class Measured:
    """One ratio, measured at least once."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Three times the median distance of a value from the median, as a factor; few outliers do not change it."""
        median = self.median
        return statistics.median(max(value / median, median / value) for value in self.values) ** 3


@dataclass(frozen=True)
class Change:
    """One row of the comparison: a ratio of this run and of an earlier one, None if that has none."""

    row: RatioRow
    now: Measured
    then: Measured | None

    @property
    def factor(self) -> float:
        """The ratio now, divided by the earlier one; 1.0 without one."""
        return 1.0 if self.then is None else self.now.median / self.then.median

    @property
    def noise(self) -> float:
        """The factor that the ratio may differ by without a change: the product of both spreads, at least LEAST."""
        return max(LEAST, self.now.spread * (1.0 if self.then is None else self.then.spread))

    @property
    def verdict(self) -> str:
        """``"better"``, ``"worse"``, or ``""`` within the noise."""
        if 1 / self.noise <= self.factor <= self.noise:
            return ""
        return "better" if (self.factor > 1) == self.row.larger_is_better else "worse"


def compared(
    rows: Sequence[RatioRow], now: Mapping[str, Measured], then: Mapping[str, Measured]
) -> list[Change]:
    """The rows that were measured now, beside those of an earlier run."""
    return [Change(row, now[row.name], then.get(row.name)) for row in rows if row.name in now]


def report_lines(changes: Sequence[Change]) -> list[str]:
    """The table, and the lines that name what has moved."""
    width = max([len(change.row.name) for change in changes], default=0)
    lines = [f"# {'ratio':<{width - 2}}  {'better':>8}  {'now':>8}  {'then':>8}  {'change':>8}  {'noise':>8}"]
    for change in changes:
        better = "larger" if change.row.larger_is_better else "smaller"
        then, moved = "-", "-"
        if change.then is not None:
            then, moved = f"{change.then.median:.4g}", f"{change.factor - 1:+.0%}"
        noise = f"{change.noise - 1:.0%}"
        text = f"{change.row.name:<{width}}  {better:>8}  {change.now.median:>8.4g}  {then:>8}  {moved:>8}"
        lines.append(f"{text}  {noise:>8}  {change.verdict}".rstrip())
    for verdict in ("worse", "better"):
        names = [change.row.name for change in changes if change.verdict == verdict]
        if names:
            lines.append(f"# {verdict} by more than the noise: {'; '.join(names)}")
    if all(change.then is None for change in changes):
        lines.append("# there is no earlier run of these ratios")
    elif not any(change.verdict for change in changes):
        lines.append("# nothing has moved by more than the noise")
    return lines
