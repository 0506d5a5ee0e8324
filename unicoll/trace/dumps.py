"""Reading the dumps of a job's ranks, with all times on rank 0's clock."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from unicoll.arrays.types import BY_NAME
from unicoll.calls.call_site import users_part
from unicoll.diagnosis.dump_format import FORMAT
from unicoll.diagnosis.recorder_contents import RecordedCall
from unicoll.net.objects.received_json import MALFORMED, read_json
from unicoll.process.formatting import printable_line, ranks_text

name_ranks = partial(ranks_text, last=" and ")
"""Ranks in words: ``rank 2``, ``ranks 0-3 and 5``."""

_FILE = re.compile(r"rank_\d+\.json$")
_VERSION = 1
_MAX_RANKS = 1 << 24
_PLAIN: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        ("group", "op", "reduce", "backend", "site", "state", "error", "text"), printable_line
    ),
    **dict.fromkeys(("seq", "root", "peer"), int),
    "blocking": bool,
}
_REFUSALS = ("DistArgumentError", "DistTypeError", "BackendUnavailableError")


@dataclass(frozen=True)
class Call(RecordedCall):
    """One call: the caller's global rank, and the call as ``text``; times are seconds on rank 0's
    clock, or 0."""

    rank: int = -1
    text: str = ""

    @property
    def is_open(self) -> bool:
        """True if it has not completed; a call that was refused before it began does not count."""
        return self.state != "completed" and not self.error.startswith(_REFUSALS)

    @property
    def arguments(self) -> str:
        """What is in the parentheses of the text."""
        return self.text[len(self.op) + 1 : -1]

    @property
    def place(self) -> str:
        """The user's line, without the directory; behind it that of a framework."""
        users = users_part(self.site)
        return os.path.basename(users) + self.site[len(users) :]


@dataclass(frozen=True)
class Group:
    """A process group: name, global ranks in group order, backends."""

    name: str
    ranks: tuple[int, ...]
    backends: str


@dataclass(frozen=True)
class Dump:
    """The dump of one rank.

    Attributes:
        written: when, in seconds on rank 0's clock; the wall clock's time is ``wall``.
        clock_error: seconds by which times of this rank may be wrong relative to rank 0's; None if
            unknown.
        departed: for each rank that has ended, how it ended.
        place: ``file:line`` and function where the main thread is in the user's code, or "".
    """

    path: str
    rank: int
    world_size: int
    host: str
    pid: int
    job: str
    reason: str
    written: float
    wall: float
    clock_error: float | None
    departed: dict[int, str]
    groups: tuple[Group, ...]
    calls: tuple[Call, ...]
    place: str


@dataclass(frozen=True)
class Trace:
    """The dumps of a job by rank, the ranks without one, and a sentence for each file that is not
    used."""

    dumps: dict[int, Dump]
    missing: tuple[int, ...]
    skipped: tuple[str, ...]

    @property
    def end(self) -> float:
        return max(dump.written for dump in self.dumps.values())

    @property
    def groups(self) -> dict[str, Group]:
        """All groups by name, that of all ranks first."""
        found: dict[str, Group] = {}
        for dump in self.dumps.values():
            for group in dump.groups:
                found.setdefault(group.name, group)
            for call in dump.calls:
                found.setdefault(call.group, Group(call.group, call.ranks, call.backend))
        return dict(sorted(found.items(), key=lambda item: -len(item[1].ranks)))

    def collectives(self, group: Group) -> dict[int, dict[int, Call]]:
        """The collectives of a group by rank and number; waiting calls without a number come after
        the others."""
        found: dict[int, dict[int, Call]] = {}
        for rank, dump in self.dumps.items():
            if rank not in group.ranks:
                continue
            calls = found[rank] = {}
            for call in dump.calls:
                if call.group != group.name or call.is_message:
                    continue
                seq = call.seq or (max(calls, default=0) + 1 if call.is_open else 0)
                if seq and (seq not in calls or not calls[seq].is_open):
                    calls[seq] = call
        return found

    def complete_collectives(self) -> Iterator[list[Call]]:
        """The calls of each collective that all ranks of its group have made, in the group's order
        of ranks."""
        for group in self.groups.values():
            by_rank = self.collectives(group)
            if by_rank.keys() == set(group.ranks):
                for seq in set.intersection(*map(set, by_rank.values())):
                    yield [by_rank[rank][seq] for rank in group.ranks]

    @property
    def departed(self) -> dict[int, str]:
        return {rank: how for dump in self.dumps.values() for rank, how in dump.departed.items()}

    @property
    def clock_error(self) -> float | None:
        """Seconds by which times of two ranks may be wrong relative to each other; None if
        unknown."""
        errors = sorted(
            -1.0 if d.clock_error is None else d.clock_error for d in self.dumps.values()
        )
        return None if errors[0] < 0 else sum(errors[-2:])


def read(directory: str) -> Trace:
    """Read a directory. If it has dumps of several jobs, the last job's are used.

    ValueError if it has no readable dump, with the reasons.
    """
    skipped: list[str] = []
    contents: dict[str, dict[str, Any]] = {}
    # For each job, rank 0's wall clock minus its monotonic clock.
    epochs: dict[str, float] = {}
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if _FILE.match(name):
            try:
                content = _load(path)
                if not content["rank"]:
                    epochs[content["job"]] = (
                        content["written"]["wall"] - content["written"]["monotonic"]
                    )
                contents[path] = content
            except (OSError, *MALFORMED) as error:
                skipped.append(f"{path} is skipped: {_describe(error)}")
    dumps = []
    for path in list(contents):
        try:
            content = contents.pop(path)
            dumps.append(_dump(path, content, epochs.get(content["job"])))
        except MALFORMED as error:
            skipped.append(f"{path} is skipped: {_describe(error)}")
    if not dumps:
        raise ValueError(
            "\n".join([f"{directory}: no dump of a flight recorder (rank_R.json)", *skipped])
        )
    job = max(dumps, key=lambda dump: dump.wall).job
    skipped += [
        f"{dump.path} is skipped: it is of another job" for dump in dumps if dump.job != job
    ]
    used = {
        dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.rank) if dump.job == job
    }
    size = max(dump.world_size for dump in used.values())
    return Trace(used, tuple(sorted(set(range(size)) - used.keys())), tuple(skipped))


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        return str(error.strerror)
    if isinstance(error, json.JSONDecodeError):
        return f"it is cut off or damaged ({error})"
    return printable_line(
        error if isinstance(error, ValueError) else f"a field is missing or wrong ({error!r})"
    )


def _load(path: str) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError("it is no dump of unicoll's flight recorder")
    if content["version"] != _VERSION:
        raise ValueError(f"its version is {content['version']}, this is for version {_VERSION}")
    if int(content["world_size"]) > _MAX_RANKS:
        raise ValueError(f"its world size is {content['world_size']}")
    int(content["rank"]), str(content["job"])
    float(content["written"]["wall"]), float(content["written"]["monotonic"])
    return content


def _dump(path: str, content: dict[str, Any], epoch: float | None) -> Dump:
    """A dump; ``epoch`` is rank 0's wall clock minus its monotonic clock, or None."""
    rank, written, clock = int(content["rank"]), content["written"], content["clock"]
    error: float | None = None
    if clock is not None:
        offset, error = float(clock["offset"]), float(clock["error"])
    else:
        # The wall clocks of hosts mostly agree.
        offset = written["wall"] - written["monotonic"] - epoch if epoch is not None else 0.0
    main = next(
        (thread["at"] for thread in content["threads"] if thread["main"] and thread["at"]), None
    )
    return Dump(
        path=path,
        rank=rank,
        world_size=int(content["world_size"]),
        host=printable_line(content["host"]),
        pid=int(content["pid"]),
        job=printable_line(content["job"]),
        reason=printable_line(content["reason"]),
        written=written["monotonic"] + offset,
        wall=written["wall"],
        clock_error=error,
        departed={int(gone): printable_line(how) for gone, how in content["departed"].items()},
        groups=tuple(
            Group(
                printable_line(g["name"]),
                tuple(map(int, g["ranks"])),
                printable_line(g["backends"]),
            )
            for g in content["groups"]
        ),
        calls=tuple(call_of(rank, call, offset) for call in content["calls"]),
        place=(
            printable_line(f"{os.path.basename(main['file'])}:{main['line']} in {main['function']}")
            if main
            else ""
        ),
    )


def call_of(rank: int, entry: dict[str, Any], offset: float = 0.0) -> Call:
    """A call of a dump, with ``offset`` added to its times; one of MALFORMED if a field is missing
    or wrong."""
    values: dict[str, Any] = {name: kind(entry[name]) for name, kind in _PLAIN.items()}
    values["created"] = float(entry["created"]) + offset
    for name in ("started", "ended"):
        values[name] = float(entry[name]) + offset if entry[name] else 0.0
    for side in ("inputs", "outputs"):
        values[side] = tuple((BY_NAME[dtype], tuple(shape)) for dtype, shape in entry[side])
    # None stands for any tag.
    tag = None if entry["tag"] is None else int(entry["tag"])
    # Older dumps lack the field.
    compression = str(entry.get("compression", ""))
    ranks, nbytes = tuple(map(int, entry["ranks"])), int(entry["bytes"])
    return Call(rank=rank, ranks=ranks, nbytes=nbytes, tag=tag, compression=compression, **values)
