"""The command line: nccl-tests' flags, and ours.

nccl-tests' flags and what they mean are those of its README (https://github.com/NVIDIA/nccl-tests). ``-n`` is the
number of ranks here, because the benchmark starts them; nccl-tests' ``-n`` is ``--iters``. A flag of nccl-tests that
does not apply is accepted with one value; any other value is an error that gives the reason.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from unicoll.arrays.types import BY_NAME, COMPRESSED, COMPRESSIONS, DType
from unicoll.bench.contenders import TABLE
from unicoll.bench.measure import Pace
from unicoll.bench.operations import OPERATIONS, Operation, find_operation
from unicoll.bench.sizes import DEFAULT_SIZES, Sweep, listed, parse_size, short, stepped
from unicoll.bench.values import REDOPS
from unicoll.bootstrap import launchers
from unicoll.errors import DistArgumentError
from unicoll.group import registry
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
    ("-t", "--nthreads", 1, "a rank is a process here, not a thread: use -n"),
    ("-g", "--ngpus", 1, "a rank drives one GPU: use -n"),
    ("-p", "--parallel_init", 0, "ranks are processes and start at the same time anyway"),
    ("-G", "--cudagraph", 0, "calls are not captured in CUDA graphs"),
    ("-R", "--local_register", 0, "buffers are not registered"),
    ("-D", "--device_implementation", 0, "unicoll has no device kernels"),
    ("-V", "--device_cta_count", 16, "unicoll has no device kernels"),
    ("-y", "--stream_null", 0, "calls go to the current stream"),
    ("-M", "--memory_report", 0, "staging memory is always printed; GPU memory is not"),
    ("-I", None, 0, "it is not supported"),
    ("-K", None, 0, "it is not supported"),
)
"""nccl-tests' flags that do not apply: spellings, the one accepted value, and the reason."""


_COMMAND = "python -m unicoll.bench"


@dataclass(frozen=True)
class BenchOptions:
    """The parsed command line; ``--help`` explains each option."""

    op: Operation
    ranks: int | None
    backends: tuple[str, ...]
    peers: tuple[str, ...]
    sweep: Sweep
    types: tuple[str, ...]
    redops: tuple[str, ...]
    roots: tuple[int, ...] | None
    pace: Pace
    cycles: int
    checks: int
    average: int
    statistic: str
    timeout: float
    unalign: int
    array: str | None
    compression: str
    placements: str
    timestamps: bool
    osu: bool
    osu_full: bool
    overlap: bool
    json: str | None
    plot: str | None
    min_bandwidth: float | None
    argv: tuple[str, ...]

    @property
    def contenders(self) -> tuple[str, ...]:
        """Backends, then peers; ratios are relative to the first."""
        return (*self.backends, *self.peers)

    def dtype(self, name: str) -> DType:
        """unicoll's element type for nccl-tests' name."""
        return BY_NAME[TYPES[name]]


def parse(argv: Sequence[str] | None = None) -> BenchOptions:
    """Parse the command line (``sys.argv[1:]`` if None); an error prints one line and exits with status 2."""
    import sys

    arguments = tuple(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    flags = parser.parse_args(arguments)
    try:
        return _options(flags, arguments)
    except (ValueError, DistArgumentError) as error:
        parser.error(str(error))


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="unicoll.bench",
        usage=f"{_COMMAND} OP [flags]",
        description=f"""Measure a collective operation of unicoll, side by side with other libraries.

examples:
  {_COMMAND} all_reduce -n 4          four ranks on this machine, all sizes
  {_COMMAND} all_reduce --backend gloo --peer torch-gloo      compared with torch.distributed
  {_COMMAND} broadcast --sizes 1M,16M -d half -J broadcast.json
  mpirun -n 8 {_COMMAND} all_gather --backend mpi --peer mpi4py""",
        epilog="`suite` instead of OP compares a fixed set of ratios with committed ones.\n"
        "docs/benchmarking.md explains the numbers.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    operation = parser.add_argument_group("operation")
    operation.add_argument("op", metavar="OP", help=f"{', '.join(OPERATIONS)}; or nccl-tests' or OSU's name")
    _add_rank_flags(parser)
    _add_sweep_flags(parser)
    _add_timing_flags(parser)
    _add_output_flags(parser)
    fixed = parser.add_argument_group("nccl-tests' flags that take one value here")
    for flag, long, value, why in _FIXED:
        names = filter(None, (flag, long))
        help = f"only {value}: {why}"
        fixed.add_argument(*names, dest=_destination(flag), type=int, default=value, metavar="N", help=help)
    return parser


def _add_rank_flags(parser: OneLineParser) -> None:
    flag = parser.add_argument_group("ranks and libraries").add_argument
    flag("-n", "--ranks", type=_at_least(1), metavar="N", help="start N ranks on this host (default 2)")
    mine = ",".join(n for n, row in TABLE.items() if row.flag == "--backend")
    others = ",".join(n for n, row in TABLE.items() if row.flag == "--peer")
    backends = f"unicoll's backends, of {mine} (default gloo; none if only --peer is given)"
    flag("--backend", metavar="NAMES", help=backends)
    flag("--peer", default="", metavar="NAMES", help=f"other libraries, of {others}")
    arrays = "array library for unicoll's backends (default numpy; cupy on CUDA)"
    flag("--array", choices=("numpy", "torch", "cupy"), help=arrays)
    compressed = (
        "of what unicoll's backends send between hosts in an all_reduce of float or double by sum or avg"
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
    flag("-d", "--datatype", dest="types", type=_types, default="float", metavar="TYPE", help=element)
    root = "root of rooted operations: a rank, or all"
    flag("-r", "--root", dest="roots", type=_roots, default="0", metavar="ROOT", help=root)
    flag("-u", "--unalign", type=_at_least(0), default=0, metavar="N", help="shift arrays by N elements")
    places = "in place, out of place, or both"
    flag("--place", dest="placements", choices=("both", "in", "out"), default="both", help=places)


def _add_timing_flags(parser: OneLineParser) -> None:
    flag = parser.add_argument_group("measuring").add_argument
    flag("--iters", type=_at_least(1), metavar="N", help="timed calls (default: as many as fit the budget)")
    flag("--budget", type=_seconds, default=1.0, metavar="S", help="seconds of calls per size and contender")
    turns = "batches per contender and size; contenders alternate"
    flag("--turns", type=_at_least(1), default=10, metavar="N", help=turns)
    warmup = "calls before the timed ones"
    flag("-w", "--warmup_iters", type=_at_least(0), default=1, metavar="N", help=warmup)
    flag("-m", "--agg_iters", type=_at_least(1), default=1, metavar="N", help="calls per timed sample")
    cycles = "repeat the sweep; 0: without end"
    flag("-N", "--run_cycles", dest="cycles", type=_at_least(0), default=1, metavar="N", help=cycles)
    checks = "checked calls per line; 0: none"
    flag("-c", "--check", dest="checks", type=_at_least(0), default=1, metavar="N", help=checks)
    average = "value over the ranks: 0 rank 0, 1 average, 2 minimum, 3 maximum"
    flag("-a", "--average", type=int, choices=(0, 1, 2, 3), default=1, help=average)
    statistic = "statistic over the calls of a rank (default p50; with --osu avg)"
    flag("--statistic", choices=("p50", "avg", "min"), help=statistic)
    flag("-z", "--blocking", type=int, choices=(0, 1), default=0, help="1: barrier before each call")
    cpu_time = "1: on CUDA, time until a call returns"
    flag("-C", "--report_cputime", type=int, choices=(0, 1), default=0, help=cpu_time)
    flag("--events", action="store_true", help="on CUDA, time between events on the device")
    timeout = "timeout of an operation, in seconds (default 300)"
    flag("-T", "--timeout", type=_seconds_or_0, default=0.0, metavar="S", help=timeout)


def _add_output_flags(parser: OneLineParser) -> None:
    flag = parser.add_argument_group("output").add_argument
    flag("-J", "--json", "--output_file", dest="json", metavar="FILE", help="write results as JSON")
    flag("--plot", metavar="FILE", help="plot latency and bandwidth (needs matplotlib)")
    flag("--osu", action="store_true", help="OSU micro-benchmarks' columns")
    flag("--osu-full", action="store_true", help="as --osu, with minimum, maximum and iterations")
    flag("--overlap", action="store_true", help="measure an asynchronous operation during NumPy computation")
    stamps = "1: print the time of day in each line"
    flag("-S", "--report_timestamps", dest="timestamps", type=int, choices=(0, 1), default=0, help=stamps)


# --- values of single flags -----------------------------------------------------------------------------------------


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


def _seconds_or_0(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else _seconds(text)


def _types(text: str) -> tuple[str, ...]:
    return _selected(text, TYPES, {ours: theirs for theirs, ours in TYPES.items()})


def _redops(text: str) -> tuple[str, ...]:
    return _selected(text, REDOPS, {"product": "prod", "premul_sum": "mulsum"})


def _selected(text: str, names: Iterable[str], aliases: Mapping[str, str]) -> tuple[str, ...]:
    name = aliases.get(text.lower(), text.lower())
    if name != "all" and name not in names:
        raise argparse.ArgumentTypeError(f"{text}: expected one of {', '.join(names)}, all")
    return tuple(names) if name == "all" else (name,)


def _roots(text: str) -> tuple[int, ...] | None:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: expected a rank or all")
    return None if text == "all" else (int(text),)


# --- flags that belong together -------------------------------------------------------------------------------------


def _options(flags: argparse.Namespace, arguments: tuple[str, ...]) -> BenchOptions:
    for flag, _, value, why in _FIXED:
        if getattr(flags, _destination(flag)) != value:
            raise ValueError(f"{flag}: {why}; only {value} is accepted")
    op = find_operation(flags.op)
    flags.osu |= flags.osu_full
    if flags.report_cputime and flags.events:
        raise ValueError("-C 1 selects the host's time and --events the device's: choose one")
    if flags.osu and flags.overlap:
        raise ValueError("--osu and --overlap select different tables: choose one")
    if flags.plot and flags.overlap:
        raise ValueError("--plot shows latency and bandwidth, which --overlap does not measure")
    if flags.overlap and not op.has_async:
        raise ValueError(f"--overlap: {op.name} has no asynchronous form")
    if flags.compression:
        _check_compression(op, flags.types, flags.redops)
    values = vars(flags) | {
        "op": op,
        "ranks": _ranks(flags.ranks, op),
        "backends": _backends(flags),
        "peers": _peers(flags.peer),
        "sweep": _sweep(flags, op),
        "pace": _pace(flags),
        "statistic": flags.statistic or ("avg" if flags.osu else "p50"),
        "timeout": flags.timeout or 300.0,
        "min_bandwidth": _min_bandwidth(os.environ.get("NCCL_TESTS_MIN_BW", "")),
        "timestamps": bool(flags.timestamps),
        "argv": arguments,
    }
    return BenchOptions(**{field.name: values[field.name] for field in fields(BenchOptions)})


def _check_compression(op: Operation, types: Sequence[str], redops: Sequence[str]) -> None:
    compressed = op.name == "all_reduce" and {"sum", "avg"}.issuperset(redops)
    if not compressed or any(TYPES[name] not in COMPRESSED for name in types):
        raise ValueError("--compression needs all_reduce, -d float or double, and -o sum or avg")


def _destination(flag: str) -> str:
    return f"fixed_{flag[1:]}"


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


def _backends(flags: argparse.Namespace) -> tuple[str, ...]:
    names = _names(flags.backend if flags.backend is not None else "" if flags.peer else "gloo")
    if flags.backend is not None and not names and not flags.peer:
        raise ValueError("--backend: the list is empty")
    known = registry.backend_names()
    for name in names:
        if name in TABLE and TABLE[name].flag != "--backend":
            raise ValueError(f"--backend: {name} is a peer: use --peer {name}")
        if name not in TABLE and name not in known:
            raise ValueError(f"--backend: there is no backend {name!r}; the backends are {', '.join(known)}")
    return names


def _peers(text: str) -> tuple[str, ...]:
    peers = [name for name, row in TABLE.items() if row.flag == "--peer"]
    for name in _names(text):
        if name not in peers:
            raise ValueError(f"--peer: there is no peer {name!r}; the peers are {', '.join(peers)}")
    return _names(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, (part.strip().lower() for part in text.split(",")))))


def _min_bandwidth(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise ValueError(f"NCCL_TESTS_MIN_BW={text} is not a number") from None


def _pace(flags: argparse.Namespace) -> Pace:
    most = math.ceil(flags.iters / flags.agg_iters) if flags.iters else flags.turns
    return Pace(
        turns=min(flags.turns, most),
        iters=flags.iters,
        budget=flags.budget,
        warmup=flags.warmup_iters,
        aggregate=flags.agg_iters,
        sync=bool(flags.blocking),
        host_time=bool(flags.report_cputime),
        events=flags.events,
    )


def _sweep(flags: argparse.Namespace, op: Operation) -> Sweep:
    steps = (flags.minbytes, flags.maxbytes, flags.stepbytes, flags.stepfactor)
    if flags.sizes is not None and any(steps):
        raise ValueError("--sizes and -b, -e, -i, -f exclude each other")
    if op.name == "barrier":
        return listed((0,))
    if flags.sizes is not None:
        return listed(tuple(parse_size(part) for part in flags.sizes.split(",")))
    if any(steps):
        return stepped(*steps)
    return listed((64 << 20,) if flags.overlap else DEFAULT_SIZES)
