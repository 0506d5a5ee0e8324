"""Calls, bytes and estimated time of recorded calls or of a dry run, added up by operation and
group.

``python -m unicoll.trace.summary --dry-run --world-size 256 train.py ...`` runs a program as one
rank of a job of any size with the backend ``fake`` (:mod:`unicoll.backend.host.fake`) and prints
the table; with flight recorder dumps, or their directory, in place of a program it prints the sums
over those. :func:`add_up` and :func:`dry_run_summary` return it.

Rounds and bytes are those of docs/scaling.md for the rank that sends most, with one rank per host
and the algorithms of the CPU backend ("Over sockets"), with the call's compression. The time of a
call is ``latency * rounds + bytes sent / bandwidth``; a receive takes as long as its send. It is an
estimate for a network without congestion, of calls one after another: without computation, overlap,
or waiting for other ranks. Coalesced calls are counted one by one.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import runpy
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from unicoll.arrays.compression import BLOCK, codec_for
from unicoll.arrays.types import DType
from unicoll.backend.host import fake
from unicoll.bootstrap import fake_job
from unicoll.calls.flight_recorder import ArrayKind, CallKind
from unicoll.calls.ops import OPS, Op, Sizes
from unicoll.diagnosis.recorder_contents import RecordedCall
from unicoll.errors import DistArgumentError
from unicoll.net.objects.received_json import MALFORMED, read_json
from unicoll.process.formatting import print_text
from unicoll.trace.dumps import Call, call_of
from unicoll.trace.table import aligned

_SMALL = 64 << 10
"""Contributions of up to this many bytes, all ranks together, are part of the exchange."""
_SEGMENT = 256 << 10
_CIRCULANT, _CIRCULANT_BLOCK = 4 << 20, 64 << 10
_HEADER = 32
_CHUNKS, _CHUNK_LEAST, _CHUNK_MOST, _CHUNKS_MOST = 8, 1 << 15, 1 << 17, 1 << 19
"""Of a compressed block: usual number, limits of their elements, and of those of the chunks to all
ranks together."""

_LISTS = {Sizes.GATHERED_FLAT: Sizes.GATHERED, Sizes.SCATTERED_FLAT: Sizes.SCATTERED}
"""The relation of sizes of lists that hold the same data as one array."""

Recorded = RecordedCall | CallKind


@dataclass(frozen=True)
class Network:
    """A network as two numbers: seconds of one round, and bytes per second that a rank sends."""

    latency: float = 20e-6
    bandwidth: float = 10e9


class Cost(NamedTuple):
    """The cost of one call: messages in the longest chain, and bytes that the rank sends that sends
    most."""

    rounds: int
    sent: int


@dataclass
class Line:
    """The calls of one operation and compression in one group.

    Attributes:
        nbytes: bytes of the inputs, or of the outputs where a rank has no inputs.
        sent: bytes that the rank sends that sends most.
        seconds: estimated time.
    """

    op: str
    group: str
    ranks: int
    calls: int = 0
    nbytes: int = 0
    sent: int = 0
    seconds: float = 0.0
    compression: str = ""


@dataclass(frozen=True)
class Summary:
    """The table: a line for each operation, compression and group, the longest time first."""

    lines: tuple[Line, ...]
    network: Network

    @property
    def total(self) -> Line:
        """The sums over all lines; its group is "", its number of ranks the largest."""
        sums = (
            sum(getattr(line, name) for line in self.lines)
            for name in ("calls", "nbytes", "sent", "seconds")
        )
        return Line("total", "", max((line.ranks for line in self.lines), default=0), *sums)

    def __str__(self) -> str:
        rows = [("operation", "group", "ranks", "calls", "bytes", "sent", "time")]
        for line in (*self.lines, self.total):
            op = f"{line.op}, {line.compression}" if line.compression else line.op
            rows.append(
                (op, line.group, str(line.ranks), str(line.calls))
                + (_bytes(line.nbytes), _bytes(line.sent), _seconds(line.seconds))
            )
        heading = (
            f"latency {_seconds(self.network.latency)}, bandwidth"
            f" {_bytes(self.network.bandwidth)}/s"
        )
        return "\n".join([heading, *aligned(rows, right=range(2, 7))])


def add_up(
    calls: Iterable[Recorded | tuple[Recorded, int]], network: Network | None = None
) -> Summary:
    """The table of recorded calls (:func:`unicoll.diagnosis.recorder_contents.recorded_calls`).

    Args:
        calls: each one alone, or with the number of times that it was made; failed ones do not
            count.
        network: for the times; None is 20 us and 10 GB/s.
    """
    network = network or Network()
    lines: dict[tuple[str, str, str], Line] = {}
    for item in calls:
        call, number = item if isinstance(item, tuple) else (item, 1)
        if getattr(call, "state", "") == "failed":
            continue
        found = _cost_of(call)
        key = call.op, call.group, call.compression
        line = lines.setdefault(
            key, Line(call.op, call.group, len(call.ranks), compression=call.compression)
        )
        line.calls += number
        line.nbytes += number * call.nbytes
        line.sent += number * (found.sent if call.op != "recv" else 0)
        line.seconds += number * (network.latency * found.rounds + found.sent / network.bandwidth)
    return Summary(tuple(sorted(lines.values(), key=lambda line: -line.seconds)), network)


def dry_run_summary(network: Network | None = None) -> Summary:
    """The table of all calls since ``init_process_group("fake")``, however many; also after the
    job's end."""
    return add_up(fake.counts(), network)


def from_dump(content: dict[str, Any]) -> list[Call]:
    """The calls of a flight recorder dump, parsed from JSON; DistArgumentError if it is none."""
    try:
        return [call_of(content.get("rank", -1), entry) for entry in content["calls"]]
    except MALFORMED as error:
        raise DistArgumentError(
            f"not a dump of the flight recorder: {type(error).__name__}: {error}"
        ) from error


# --- the cost of a call ---------------------------------------------------------------------------


def _cost_of(call: Recorded) -> Cost:
    n, sizes = len(call.ranks), OPS[call.op].sizes
    given, taken = _total(call.inputs), _total(call.outputs)
    size = given or taken
    if sizes in (Sizes.SCATTERED, Sizes.SCATTERED_FLAT):
        size = taken
    elif sizes is Sizes.EXCHANGED:
        size = -(-given // n)
    wide = 2 if any(dtype.half for dtype, _ in call.inputs) else 1
    if call.compression:
        dtype, _ = call.inputs[0]
        return compressed_cost(n, size, call.compression, dtype)
    return cost(call.op, n, size, wide)


def _total(arrays: Sequence[ArrayKind]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in arrays)


def cost(op: str, n: int, size: int, wide: int = 1) -> Cost:
    """The cost of one call, by the table "Over sockets" of docs/scaling.md; of the default
    reductions.

    An operation that the CPU backend does by a fallback is taken for one of its own with arrays of
    the same sizes.

    Args:
        op: name of the operation.
        n: number of ranks.
        size: bytes of the array of an operation in place, or of a message, otherwise of the block
            that a rank sends to, or receives from, each other rank.
        wide: bytes of a partial sum for each byte of an element: 2 for float16 and bfloat16.
    """
    row = OPS[op]
    if row.message:
        return Cost(1, size)
    if n == 1:
        return Cost(0, 0)
    op = next(name for name, other in OPS.items() if _moves(other) == _moves(row))
    k = (n - 1).bit_length()
    if op == "all_to_all":
        return Cost(k + n - 1, k * _HEADER + 16 * n * (n - 1) + (n - 1) * size)
    contributions = {"barrier": 0, "broadcast": size, "reduce_scatter": (n - 1) * n * size}
    contributions |= dict.fromkeys(("all_gather", "gather", "scatter"), n * size)
    if contributions.get(op, (n - 1) * size) <= _SMALL:
        own = {"barrier": 0, "reduce_scatter": n * size}.get(op, size)
        sent = {"broadcast": k * size, "scatter": k * n * size}.get(op, (n - 1) * own)
        return Cost(k, k * _HEADER + sent)
    more = _after_agreement(op, n, size, wide)
    return Cost(k + more.rounds, k * _HEADER + more.sent)


def _moves(row: Op) -> tuple[Sizes, bool, bool, bool]:
    """What rows have in common that move the same data: one array or a list, by a backend or by a
    fallback."""
    return _LISTS.get(row.sizes, row.sizes), row.rooted, row.reduces, row.prefix


def compressed_cost(n: int, size: int, compression: str, dtype: DType) -> Cost:
    """The cost of an all_reduce that is compressed if it is large; arguments as of :func:`cost`."""
    if n == 1 or size <= _SMALL:
        return cost("all_reduce", n, size)
    most = max(BLOCK, min(_CHUNK_MOST, _CHUNKS_MOST // (n - 1) // BLOCK * BLOCK))
    units = -(-size // dtype.itemsize // BLOCK)
    # Each rank's block has this many units, those of some ranks one more.
    least, more = divmod(units, n)
    longest = (least + bool(more)) * BLOCK
    chunk = min(longest, most, max(_CHUNK_LEAST, -(-longest // _CHUNKS // BLOCK) * BLOCK))
    nbytes = codec_for(compression, dtype.storage).nbytes

    def sent(elements: int) -> int:
        return elements // chunk * nbytes(chunk) + nbytes(elements % chunk)

    contributions = ((more or n) - 1) * sent(longest) + (n - more if more else 0) * sent(
        least * BLOCK
    )
    chunks = -(-longest // chunk)
    k = (n - 1).bit_length()
    rounds = (n - 1) * (chunks + 2 if chunks > 1 else 2)
    return Cost(k + rounds, k * _HEADER + contributions + (n - 1) * sent(longest))


def _after_agreement(op: str, n: int, size: int, wide: int) -> Cost:
    k = (n - 1).bit_length()
    if op == "broadcast" and n > 2 and size < (n - 1) * _SMALL:
        return Cost(k, k * size)
    if OPS[op].in_place and op != "all_reduce":
        sent = size if op == "broadcast" else size * wide
        return Cost(n - 2 + -(-sent // _SEGMENT), sent)
    if op in ("gather", "scatter"):
        return Cost(n - 1, size if op == "gather" else (n - 1) * size)
    if op == "all_gather":
        return _gathered(n, size)
    if op == "reduce_scatter":
        return _scattered(n, size, wide)
    first, second = _scattered(n, size // n, wide), _gathered(n, size // n)
    return Cost(first.rounds + second.rounds, first.sent + second.sent)


def _in_rounds(n: int, whole: int) -> bool:
    return n > 2 and whole <= min(_CIRCULANT, n * _CIRCULANT_BLOCK)


def _scattered(n: int, block: int, wide: int) -> Cost:
    if _in_rounds(n, n * block * wide):
        return Cost((n - 1).bit_length(), (n - 1) * block * wide)
    segments = -(-block * (wide if n > 2 else 1) // _SEGMENT)
    return Cost((n - 1) * segments, block * (1 + (n - 2) * wide))


def _gathered(n: int, block: int) -> Cost:
    rounds = (n - 1).bit_length() if _in_rounds(n, n * block) else n - 1
    return Cost(rounds, (n - 1) * block)


# --- numbers with units ---------------------------------------------------------------------------

_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SIZES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def _seconds(value: float) -> str:
    unit = next((u for u, scale in _TIMES.items() if value >= scale), "ns")
    return f"{value / _TIMES[unit]:.4g} {unit}" if value else "0 s"


def _bytes(value: float) -> str:
    unit = next((u for u, scale in reversed(_SIZES.items()) if value >= scale), "")
    return f"{value / _SIZES[unit]:.4g} {unit}B"


def _time(text: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(s|ms|us|ns)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 20us")
    return float(match[1]) * _TIMES[match[2]]


def _rate(text: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([KMGT]?)(B|bit)(/s)?", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a bandwidth such as 10GB/s or 100Gbit/s")
    return float(match[1]) * _SIZES[match[2]] / (8 if match[3] == "bit" else 1)


# --- command line ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code of the program, or 0."""
    parser = argparse.ArgumentParser(
        prog="python -m unicoll.trace.summary", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="run a program with the backend fake"
    )
    parser.add_argument("--world-size", type=int, default=1, help="number of ranks of the dry run")
    parser.add_argument("--rank", type=int, default=0, help="rank of the dry run (default 0)")
    parser.add_argument(
        "--nproc-per-node", type=int, default=1, help="ranks of each host (default 1)"
    )
    parser.add_argument("--latency", type=_time, default=Network.latency, help="of a round (20us)")
    parser.add_argument(
        "--bandwidth", type=_rate, default=Network.bandwidth, help="of a rank (10GB/s)"
    )
    parser.add_argument(
        "what", nargs=argparse.REMAINDER, help="dumps, or a program and its arguments"
    )
    options = parser.parse_args(argv)
    network = Network(options.latency, options.bandwidth)
    if not options.what:
        parser.error("give a program with --dry-run, or dumps of the flight recorder")
    if not options.dry_run:
        calls: list[Call] = []
        given = [Path(path) for path in options.what]
        paths = [p for g in given for p in (sorted(g.glob("rank_*.json")) if g.is_dir() else [g])]
        if not paths:
            parser.error(f"{', '.join(options.what)}: no dump of a flight recorder (rank_R.json)")
        for path in paths:
            try:
                calls += from_dump(read_json(str(path)))
            except (OSError, ValueError, DistArgumentError) as error:
                parser.error(f"{path}: {error}")
        print_text(str(add_up(calls, network)))
        return 0
    if options.nproc_per_node < 1:
        parser.error(f"--nproc-per-node {options.nproc_per_node} is not positive")
    if not 0 <= options.rank < options.world_size:
        parser.error(f"--rank {options.rank} is not below --world-size {options.world_size}")
    if not os.path.exists(options.what[0]):
        parser.error(f"{options.what[0]}: no such file")
    code = _dry_run(options.what, options.rank, options.world_size, options.nproc_per_node)
    print_text(str(dry_run_summary(network)))
    return code


def _dry_run(program: list[str], rank: int, size: int, per_node: int) -> int:
    """Run a program in this process, with torchrun's variables; returns its exit code."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank % per_node),
        LOCAL_WORLD_SIZE=str(min(per_node, size)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )
    fake_job.override = "fake"
    sys.argv = program
    sys.path[0] = str(Path(program[0]).resolve().parent)
    try:
        runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
