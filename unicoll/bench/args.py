"""The command line: nccl-tests' flags, and ours.

nccl-tests' flags and what they mean are those of its README (https://github.com/NVIDIA/nccl-tests).
``-n`` is the number of ranks here, because the benchmark starts them; nccl-tests' ``-n`` is
``--iters``. A flag of nccl-tests that does not apply is accepted with one value; any other value is
an error that gives the reason.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from unicoll.arrays.types import COMPRESSED, COMPRESSIONS
from unicoll.bench.contenders import TABLE
from unicoll.bench.operations import OPERATIONS, Operation, find_operation
from unicoll.bench.values import REDOPS
from unicoll.bootstrap import launchers
from unicoll.errors import DistArgumentError
from unicoll.group import registry
from unicoll.process.formatting import command
from unicoll.run.flags import OneLineParser

TYPES: dict[str, str] = {
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "uint32": "uint32",
    "int64": "int64",
    "uint64": "uint64",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "bfloat16": "bfloat16",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
"""nccl-tests' names of the element types, in its order, with unicoll's names."""

_FIXED = (
    ("-t --nthreads", "1", "a rank is a process here, not a thread: use -n"),
    ("-g --ngpus", "1", "a rank drives one GPU: use -n"),
    ("-p --parallel_init", "0", "ranks are processes and start at the same time anyway"),
    ("-G --cudagraph", "0", "calls are not captured in CUDA graphs"),
    ("-R --local_register", "0", "buffers are not registered"),
    ("-D --device_implementation", "0", "unicoll has no device kernels"),
    ("-V --device_cta_count", "16", "unicoll has no device kernels"),
    ("-y --stream_null", "0", "calls go to the current stream"),
    ("-M --memory_report", "0", "staging memory is always printed; GPU memory is not"),
    ("-S --report_timestamps", "0", "lines have no time of day"),
)
"""nccl-tests' flags that do not apply: spellings, the one accepted value, and the reason."""

_TIMEOUT_S = 300.0

DEFAULT_SIZES = tuple(1 << k for k in (3, 6, 9, 12, 14, 16, 18, 20, 22, 24, 26))
"""Default sizes in bytes: 8, 64, 512, 4K, 16K, 64K, 256K, 1M, 4M, 16M, 64M."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class BenchOptions:
    """The parsed command line; ``--help`` explains each option.

    Attributes:
        contenders: backends, then peers; ratios are relative to the first.
        sizes: in bytes, ascending; ``step`` is as the header prints it: ``"2(factor)"``.
    """

    op: Operation
    ranks: int | None
    contenders: tuple[str, ...]
    sizes: tuple[int, ...]
    step: str
    types: tuple[str, ...]
    redops: tuple[str, ...]
    roots: tuple[int, ...] | None
    turns: int
    iters: int | None
    budget: float
    warmup: int
    aggregate: int
    blocking: bool
    host_time: bool
    events: bool
    cycles: int
    checks: int
    average: int
    statistic: str
    timeout: float
    unalign: int
    array: str | None
    compression: str
    placements: str
    osu: bool
    osu_full: bool
    overlap: bool
    json: str | None
    plot: str | None
    min_bandwidth: float | None
    argv: tuple[str, ...]


def parse(argv: Sequence[str] | None = None) -> BenchOptions:
    """Parse the command line (``sys.argv[1:]`` if None); an error prints one line and exits with
    status 2."""
    arguments = tuple(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    flags = parser.parse_args(arguments)
    try:
        return _options(flags, arguments)
    except (ValueError, DistArgumentError) as error:
        parser.error(str(error))


def _parser() -> OneLineParser:
    name = command("bench")
    parser = OneLineParser(
        prog=name.removeprefix("python -m "),
        usage=f"{name} OP [flags]",
        description=f"""Measure a collective operation of unicoll, side by side with other libraries.

examples:
  {name} all_reduce -n 4          four ranks on this machine, all sizes
  {name} all_reduce --backend gloo --peer torch-gloo      compared with torch.distributed
  {name} broadcast --sizes 1M,16M -d half -J broadcast.json
  mpirun -n 8 {name} all_gather --backend mpi --peer mpi4py""",
        epilog="docs/benchmarking.md explains the numbers.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    operation = parser.add_argument_group("operation")
    operation.add_argument(
        "op", metavar="OP", help=f"{', '.join(OPERATIONS)}; or nccl-tests' or OSU's name"
    )
    _add_rank_flags(parser)
    _add_sweep_flags(parser)
    _add_timing_flags(parser)
    _add_output_flags(parser)
    fixed = parser.add_argument_group("nccl-tests' flags that take one value here")
    for names, value, why in _FIXED:
        only = f"only {value}: {why}"
        fixed.add_argument(*names.split(), type=partial(_fixed, value, why), metavar="N", help=only)
    return parser


def _add_rank_flags(parser: OneLineParser) -> None:
    flag = parser.add_argument_group("ranks and libraries").add_argument
    flag(
        "-n",
        "--ranks",
        type=_at_least(1),
        metavar="N",
        help="start N ranks on this host (default 2)",
    )
    mine = ",".join(n for n, row in TABLE.items() if row.flag == "--backend")
    others = ",".join(n for n, row in TABLE.items() if row.flag == "--peer")
    backends = f"unicoll's backends, of {mine} (default gloo; none if only --peer is given)"
    flag("--backend", metavar="NAMES", help=backends)
    flag("--peer", default="", metavar="NAMES", help=f"other libraries, of {others}")
    arrays = "array library for unicoll's backends (default numpy; cupy on CUDA)"
    flag("--array", choices=("numpy", "torch", "cupy"), help=arrays)
    compressed = (
        "of what unicoll's backends send between hosts in an all_reduce of float or double by sum"
        " or avg"
    )
    flag("--compression", choices=tuple(COMPRESSIONS), default="", help=compressed)


def _add_sweep_flags(parser: OneLineParser) -> None:
    flag = parser.add_argument_group("sizes, types, roots").add_argument
    flag("-b", "--minbytes", metavar="SIZE", help="smallest size (K, M, G; default 8)")
    flag("-e", "--maxbytes", metavar="SIZE", help="largest size (default 64M)")
    flag("-i", "--stepbytes", metavar="SIZE", help="bytes added from one size to the next")
    flag("-f", "--stepfactor", metavar="F", help="factor from one size to the next (default 2)")
    usual = ",".join(short(n) for n in DEFAULT_SIZES)
    flag("--sizes", metavar="LIST", help=f"list of sizes (default without the four above: {usual})")
    reduction = f"reduction: {', '.join(REDOPS)}, all"
    flag("-o", "--op", dest="redops", type=_redops, default="sum", metavar="REDOP", help=reduction)
    element = f"element type: {', '.join(TYPES)}, all"
    flag(
        "-d", "--datatype", dest="types", type=_types, default="float", metavar="TYPE", help=element
    )
    root = "root of rooted operations: a rank, or all"
    flag("-r", "--root", dest="roots", type=_roots, default="0", metavar="ROOT", help=root)
    flag(
        "-u",
        "--unalign",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="shift arrays by N elements",
    )
    places = "in place, out of place, or both"
    flag("--place", dest="placements", choices=("both", "in", "out"), default="both", help=places)


def _add_timing_flags(parser: OneLineParser) -> None:
    flag = parser.add_argument_group("measuring").add_argument
    flag(
        "--iters",
        type=_at_least(1),
        metavar="N",
        help="timed calls (default: as many as fit the budget)",
    )
    flag(
        "--budget",
        type=_seconds,
        default=1.0,
        metavar="S",
        help="seconds of calls per size and contender",
    )
    turns = "batches per contender and size; contenders alternate"
    flag("--turns", type=_at_least(1), default=10, metavar="N", help=turns)
    warmup = "calls before the timed ones"
    flag(
        "-w",
        "--warmup_iters",
        dest="warmup",
        type=_at_least(0),
        default=1,
        metavar="N",
        help=warmup,
    )
    samples = "calls per timed sample"
    flag(
        "-m",
        "--agg_iters",
        dest="aggregate",
        type=_at_least(1),
        default=1,
        metavar="N",
        help=samples,
    )
    cycles = "repeat the sweep; 0: without end"
    flag(
        "-N", "--run_cycles", dest="cycles", type=_at_least(0), default=1, metavar="N", help=cycles
    )
    checks = "checked calls per line; 0: none"
    flag("-c", "--check", dest="checks", type=_at_least(0), default=1, metavar="N", help=checks)
    average = "value over the ranks: 0 rank 0, 1 average, 2 minimum, 3 maximum"
    flag("-a", "--average", type=int, choices=(0, 1, 2, 3), default=1, help=average)
    statistic = "statistic over the calls of a rank (default p50; with --osu avg)"
    flag("--statistic", choices=("p50", "avg", "min"), help=statistic)
    switch: dict[str, Any] = {"type": _switch, "default": False, "metavar": "{0,1}"}
    flag("-z", "--blocking", help="1: barrier before each call", **switch)
    cpu_time = "1: on CUDA, time until a call returns"
    flag("-C", "--report_cputime", dest="host_time", help=cpu_time, **switch)
    flag("--events", action="store_true", help="on CUDA, time between events on the device")
    timeout = "timeout of an operation, in seconds (default 300)"
    flag("-T", "--timeout", type=_timeout, default=_TIMEOUT_S, metavar="S", help=timeout)


def _add_output_flags(parser: OneLineParser) -> None:
    flag = parser.add_argument_group("output").add_argument
    flag("-J", "--json", "--output_file", dest="json", metavar="FILE", help="write results as JSON")
    flag("--plot", metavar="FILE", help="plot latency and bandwidth (needs matplotlib)")
    flag("--osu", action="store_true", help="OSU micro-benchmarks' columns")
    flag("--osu-full", action="store_true", help="as --osu, with minimum, maximum and iterations")
    flag(
        "--overlap",
        action="store_true",
        help="measure an asynchronous operation during NumPy computation",
    )


# --- values of single flags -----------------------------------------------------------------------


def _at_least(least: int) -> Callable[[str], int]:
    def parse_number(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text.strip()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
        return int(text)

    return parse_number


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a time in seconds")
    return value


def _timeout(text: str) -> float:
    return _TIMEOUT_S if text in ("0", "0.0") else _seconds(text)


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"{text} is neither 0 nor 1")
    return text == "1"


def _fixed(value: str, why: str, text: str) -> str:
    if text != value:
        raise argparse.ArgumentTypeError(f"{why}; only {value} is accepted")
    return text


def _types(text: str) -> tuple[str, ...]:
    return _selected(text, TYPES, {ours: theirs for theirs, ours in TYPES.items()})


def _redops(text: str) -> tuple[str, ...]:
    return _selected(text, REDOPS, {"product": "prod", "premul_sum": "mulsum"})


def _selected(text: str, names: Iterable[str], aliases: Mapping[str, str]) -> tuple[str, ...]:
    selected = [aliases.get(name, name) for name in text.lower().split(",")]
    if selected != ["all"] and not set(selected).issubset(names):
        raise argparse.ArgumentTypeError(f"{text}: expected some of {', '.join(names)}, or all")
    return tuple(names) if selected == ["all"] else tuple(selected)


def _roots(text: str) -> tuple[int, ...] | None:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: expected a rank or all")
    return None if text == "all" else (int(text),)


# --- flags that belong together -------------------------------------------------------------------


def _options(flags: argparse.Namespace, arguments: tuple[str, ...]) -> BenchOptions:
    op = find_operation(flags.op)
    flags.osu |= flags.osu_full
    if flags.host_time and flags.events:
        raise ValueError("-C 1 selects the host's time and --events the device's: choose one")
    if flags.osu and flags.overlap:
        raise ValueError("--osu and --overlap select different tables: choose one")
    if flags.plot and flags.overlap:
        raise ValueError("--plot shows latency and bandwidth, which --overlap does not measure")
    if flags.overlap and not op.has_async:
        raise ValueError(f"--overlap: {op.name} has no asynchronous form")
    if flags.compression:
        _check_compression(op, flags.types, flags.redops)
    sizes, step = _sweep(flags, op)
    values = vars(flags) | {
        "op": op,
        "ranks": _ranks(flags.ranks, op),
        "contenders": _contenders(flags.backend, flags.peer),
        "sizes": sizes,
        "step": step,
        "turns": min(
            flags.turns, math.ceil(flags.iters / flags.aggregate) if flags.iters else flags.turns
        ),
        "statistic": flags.statistic or ("avg" if flags.osu else "p50"),
        "min_bandwidth": _min_bandwidth(os.environ.get("NCCL_TESTS_MIN_BW", "")),
        "argv": arguments,
    }
    return BenchOptions(**{field.name: values[field.name] for field in fields(BenchOptions)})


def _check_compression(op: Operation, types: Sequence[str], redops: Sequence[str]) -> None:
    compressed = op.name == "all_reduce" and {"sum", "avg"}.issuperset(redops)
    if not compressed or any(TYPES[name] not in COMPRESSED for name in types):
        raise ValueError("--compression needs all_reduce, -d float or double, and -o sum or avg")


def _ranks(requested: int | None, op: Operation) -> int | None:
    if requested is not None and requested < op.min_ranks:
        raise ValueError(f"{op.name} needs {op.min_ranks} ranks or more, and -n is {requested}")
    launched = launchers.detect()
    if launched is None:
        return requested
    size = launched.world_size
    if requested is not None and requested != size:
        raise ValueError(f"-n {requested}: {launched.name} has started {size} ranks")
    if size < op.min_ranks:
        raise ValueError(f"{op.name} needs {op.min_ranks} ranks or more, and the job has {size}")
    return size


def _contenders(backend: str | None, peer: str) -> tuple[str, ...]:
    if backend is None:
        backend = "" if peer else "gloo"
    backends, peers = (
        tuple(dict.fromkeys(filter(None, (part.strip().lower() for part in text.split(",")))))
        for text in (backend, peer)
    )
    if not backends and not peers:
        raise ValueError("--backend: the list is empty")
    known = registry.backend_names()
    for name in backends:
        if name in TABLE and TABLE[name].flag != "--backend":
            raise ValueError(f"--backend: {name} is a peer: use --peer {name}")
        if name not in TABLE and name not in known:
            raise ValueError(
                f"--backend: there is no backend {name!r}; the backends are {', '.join(known)}"
            )
    known_peers = [name for name, row in TABLE.items() if row.flag == "--peer"]
    for name in peers:
        if name not in known_peers:
            raise ValueError(
                f"--peer: there is no peer {name!r}; the peers are {', '.join(known_peers)}"
            )
    return (*backends, *peers)


def _min_bandwidth(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise ValueError(f"NCCL_TESTS_MIN_BW={text} is not a number") from None


# --- sizes ----------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Parse a size in nccl-tests' notation: ``512``, ``4K``, ``1.5M``, ``2g``; K is 1024.
    ValueError if it is none."""
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


def _sweep(flags: argparse.Namespace, op: Operation) -> tuple[tuple[int, ...], str]:
    """The sizes in bytes, and the step as the header prints it."""
    stepped = flags.minbytes or flags.maxbytes or flags.stepbytes or flags.stepfactor
    if flags.sizes is not None and stepped:
        raise ValueError("--sizes and -b, -e, -i, -f exclude each other")
    if stepped and op.name != "barrier":
        return _stepped(flags.minbytes, flags.maxbytes, flags.stepbytes, flags.stepfactor)
    if op.name == "barrier":
        sizes = [0]
    elif flags.sizes is not None:
        sizes = [parse_size(part) for part in flags.sizes.split(",")]
    else:
        sizes = [64 << 20] if flags.overlap else [*DEFAULT_SIZES]
    return tuple(sorted(set(sizes))), "0(list)"


def _stepped(
    smallest: str | None, largest: str | None, step: str | None, factor: str | None
) -> tuple[tuple[int, ...], str]:
    first, last = parse_size(smallest or "8"), parse_size(largest or "64M")
    if largest is None:
        last = max(last, first)
    if first > last:
        raise ValueError(f"invalid sizes for 'minbytes' and 'maxbytes': {first} > {last}")
    if step and factor:
        raise ValueError("-i and -f exclude each other")
    if step:
        step_bytes = parse_size(step)
        if step_bytes < 1:
            raise ValueError("-i must be at least 1 byte")
        return tuple(range(first, last + 1, step_bytes)), f"{step_bytes}(bytes)"
    times = factor or "2"
    if not times.isdigit() or int(times) < 2:
        raise ValueError(f"-f {times}: the factor must be a whole number, 2 or more")
    if first < 1:
        raise ValueError("-b must be at least 1 byte where sizes are multiplied")
    sizes = [first]
    while sizes[-1] * int(times) <= last:
        sizes.append(sizes[-1] * int(times))
    return tuple(sizes), f"{times}(factor)"
