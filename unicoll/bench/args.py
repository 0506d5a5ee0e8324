"""The command line: nccl-tests' flags, and ours.

nccl-tests' flags and what they mean are those of its README (https://github.com/NVIDIA/nccl-tests). ``-n`` is the
number of ranks here, because the benchmark starts them; nccl-tests' ``-n`` is ``--iters``. A flag of nccl-tests that
does not apply is accepted with one value; any other value is an error that gives the reason.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from unicoll.arrays.types import BY_NAME, COMPRESSED, COMPRESSIONS, DType
from unicoll.bench.contenders import TABLE
from unicoll.bench.measure import Pace
from unicoll.bench.operations import OPERATIONS, Operation, find_operation
from unicoll.bench.sizes import DEFAULT_SIZES, Sweep, listed, parse_size, short, stepped
from unicoll.bench.values import REDOPS
from unicoll.bootstrap import launchers
from unicoll.errors import DistArgumentError
from unicoll.group import registry

__all__ = ["TYPES", "BenchOptions", "parse"]

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
    argv: tuple[str, ...]

    @property
    def contenders(self) -> tuple[str, ...]:
        """Backends, then peers; ratios are relative to the first."""
        return (*self.backends, *self.peers)

    def dtype(self, name: str) -> DType:
        """unicoll's element type for nccl-tests' name."""
        return BY_NAME[TYPES[name]]


class _BenchParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the flags)\n")


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


def _parser() -> _BenchParser:
    parser = _BenchParser(
        prog="unicoll.bench",
        usage=f"{_COMMAND} OP [flags]",
        description=f"""Measure a collective operation of unicoll, side by side with other libraries.

examples:
  {_COMMAND} all_reduce -n 4          four ranks on this machine, all sizes
  {_COMMAND} all_reduce --backend gloo --peer torch-gloo      compared with torch.distributed
  {_COMMAND} broadcast --sizes 1M,16M -d half -J broadcast.json
  mpirun -n 8 {_COMMAND} all_gather --backend mpi --peer mpi4py""",
        epilog="`suite` in the place of OP compares a fixed set of ratios with committed ones.\n"
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


def _add_rank_flags(parser: _BenchParser) -> None:
    group = parser.add_argument_group("ranks and libraries")
    group.add_argument("-n", "--ranks", type=int, metavar="N", help="start N ranks on this host (default 2)")
    mine = ",".join(n for n, row in TABLE.items() if row.flag == "--backend")
    others = ",".join(n for n, row in TABLE.items() if row.flag == "--peer")
    group.add_argument(
        "--backend",
        metavar="NAMES",
        help=f"unicoll's backends, of {mine} (default gloo; none if only --peer is given)",
    )
    group.add_argument("--peer", default="", metavar="NAMES", help=f"other libraries, of {others}")
    group.add_argument(
        "--array",
        choices=("numpy", "torch", "cupy"),
        help="array library for unicoll's backends (default numpy; cupy on CUDA)",
    )
    group.add_argument(
        "--compression",
        choices=tuple(COMPRESSIONS),
        default="",
        help="of what unicoll's backends send between hosts in an all_reduce of float or double by sum or avg",
    )


def _add_sweep_flags(parser: _BenchParser) -> None:
    group = parser.add_argument_group("sizes, types, roots")
    group.add_argument("-b", "--minbytes", metavar="SIZE", help="smallest size (K, M, G; default 8)")
    group.add_argument("-e", "--maxbytes", metavar="SIZE", help="largest size (default 64M)")
    group.add_argument("-i", "--stepbytes", metavar="SIZE", help="bytes added from one size to the next")
    group.add_argument("-f", "--stepfactor", metavar="F", help="factor from one size to the next (default 2)")
    usual = ",".join(short(n) for n in DEFAULT_SIZES)
    group.add_argument(
        "--sizes", metavar="LIST", help=f"list of sizes (default without the four above: {usual})"
    )
    group.add_argument("-o", "--op", dest="redop", default="sum", help=f"reduction: {', '.join(REDOPS)}, all")
    group.add_argument("-d", "--datatype", default="float", help=f"element type: {', '.join(TYPES)}, all")
    group.add_argument("-r", "--root", default="0", help="root of rooted operations: a rank, or all")
    group.add_argument("-u", "--unalign", type=int, default=0, metavar="N", help="shift arrays by N elements")
    group.add_argument(
        "--place", choices=("both", "in", "out"), default="both", help="in place, out of place, or both"
    )


def _add_timing_flags(parser: _BenchParser) -> None:
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--iters", type=int, metavar="N", help="timed calls (default: as many as fit the budget)"
    )
    group.add_argument(
        "--budget", type=float, default=1.0, metavar="S", help="seconds of calls per size and contender"
    )
    group.add_argument(
        "--turns",
        type=int,
        default=10,
        metavar="N",
        help="batches per contender and size; contenders alternate",
    )
    group.add_argument(
        "-w", "--warmup_iters", type=int, default=1, metavar="N", help="calls before the timed ones"
    )
    group.add_argument("-m", "--agg_iters", type=int, default=1, metavar="N", help="calls per timed sample")
    group.add_argument(
        "-N", "--run_cycles", type=int, default=1, metavar="N", help="repeat the sweep; 0: without end"
    )
    group.add_argument(
        "-c", "--check", type=int, default=1, metavar="N", help="checked calls per line; 0: none"
    )
    group.add_argument(
        "-a",
        "--average",
        type=int,
        choices=(0, 1, 2, 3),
        default=1,
        help="value over the ranks: 0 rank 0, 1 average, 2 minimum, 3 maximum",
    )
    group.add_argument(
        "--statistic",
        choices=("p50", "avg", "min"),
        help="statistic over the calls of a rank (default p50; with --osu avg)",
    )
    group.add_argument(
        "-z", "--blocking", type=int, choices=(0, 1), default=0, help="1: barrier before each call"
    )
    group.add_argument(
        "-C",
        "--report_cputime",
        type=int,
        choices=(0, 1),
        default=0,
        help="1: on CUDA, time until a call returns",
    )
    group.add_argument("--events", action="store_true", help="on CUDA, time between events on the device")
    group.add_argument(
        "-T",
        "--timeout",
        type=float,
        default=0,
        metavar="S",
        help="timeout of an operation, in seconds (default 300)",
    )


def _add_output_flags(parser: _BenchParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "-J", "--json", "--output_file", dest="json", metavar="FILE", help="write results as JSON"
    )
    group.add_argument("--plot", metavar="FILE", help="plot latency and bandwidth (needs matplotlib)")
    group.add_argument("--osu", action="store_true", help="OSU micro-benchmarks' columns")
    group.add_argument(
        "--osu-full", action="store_true", help="as --osu, with minimum, maximum and iterations"
    )
    group.add_argument(
        "--overlap", action="store_true", help="measure an asynchronous operation during NumPy computation"
    )
    group.add_argument(
        "-S",
        "--report_timestamps",
        type=int,
        choices=(0, 1),
        default=0,
        help="1: print the time of day in each line",
    )


# --- validation ------------------------------------------------------------------------------------------------------


def _options(flags: argparse.Namespace, arguments: tuple[str, ...]) -> BenchOptions:
    _check_fixed_flags(flags)
    op = find_operation(flags.op)
    osu = flags.osu or flags.osu_full
    for flag in ("turns", "run_cycles", "check", "warmup_iters", "unalign"):
        least = 1 if flag == "turns" else 0
        if getattr(flags, flag) < least:
            raise ValueError(f"--{flag} must be at least {least}")
    if flags.report_cputime and flags.events:
        raise ValueError("-C 1 selects the host's time and --events the device's: choose one")
    if osu and flags.overlap:
        raise ValueError("--osu and --overlap select different tables: choose one")
    if flags.plot and flags.overlap:
        raise ValueError("--plot shows latency and bandwidth, which --overlap does not measure")
    if flags.overlap and not op.has_async:
        raise ValueError(f"--overlap: {op.name} has no asynchronous form")
    types = _selected(flags.datatype, TYPES, "-d", {ours: theirs for theirs, ours in TYPES.items()})
    redops = _selected(flags.redop, REDOPS, "-o", {"product": "prod", "premul_sum": "mulsum"})
    if flags.compression:
        _check_compression(op, types, redops)
    return BenchOptions(
        op=op,
        ranks=_ranks(flags.ranks, op),
        backends=_backends(flags),
        peers=_peers(flags.peer),
        sweep=_sweep(flags, op),
        types=types,
        redops=redops,
        roots=None if flags.root == "all" else (_root(flags.root),),
        pace=_pace(flags),
        cycles=flags.run_cycles,
        checks=flags.check,
        average=flags.average,
        statistic=flags.statistic or ("avg" if osu else "p50"),
        timeout=_positive("--timeout", flags.timeout) if flags.timeout else 300.0,
        unalign=flags.unalign,
        array=flags.array,
        compression=flags.compression,
        placements=flags.place,
        timestamps=bool(flags.report_timestamps),
        osu=osu,
        osu_full=flags.osu_full,
        overlap=flags.overlap,
        json=flags.json,
        plot=flags.plot,
        argv=arguments,
    )


def _check_compression(op: Operation, types: Sequence[str], redops: Sequence[str]) -> None:
    compressed = op.name == "all_reduce" and {"sum", "avg"}.issuperset(redops)
    if not compressed or any(TYPES[name] not in COMPRESSED for name in types):
        raise ValueError("--compression needs all_reduce, -d float or double, and -o sum or avg")


def _check_fixed_flags(flags: argparse.Namespace) -> None:
    for flag, _, value, why in _FIXED:
        if getattr(flags, _destination(flag)) != value:
            raise ValueError(f"{flag}: {why}; only {value} is accepted")


def _destination(flag: str) -> str:
    return f"fixed_{flag[1:]}"


def _ranks(requested: int | None, op: Operation) -> int | None:
    if requested is not None and requested < 1:
        raise ValueError(f"-n {requested}: the number of ranks must be at least 1")
    if requested is not None and requested < op.min_ranks:
        raise ValueError(f"{op.name} needs {op.min_ranks} ranks or more, and -n is {requested}")
    launched = launchers.detect()
    if launched is None:
        return requested
    if requested is not None and requested != launched.world_size:
        raise ValueError(f"-n {requested}: {launched.name} has started {launched.world_size} ranks")
    if launched.world_size < op.min_ranks:
        raise ValueError(
            f"{op.name} needs {op.min_ranks} ranks or more, and the job has {launched.world_size}"
        )
    return launched.world_size


def _backends(flags: argparse.Namespace) -> tuple[str, ...]:
    names = _names(flags.backend if flags.backend is not None else "" if flags.peer else "gloo")
    if flags.backend is not None and not names and not flags.peer:
        raise ValueError("--backend: the list is empty")
    for name in names:
        if TABLE.get(name) and TABLE[name].flag != "--backend":
            raise ValueError(f"--backend: {name} is a peer: use --peer {name}")
        if name not in TABLE and name not in registry.backend_names():
            raise ValueError(
                f"--backend: there is no backend {name!r}; the backends are {', '.join(registry.backend_names())}"
            )
    return names


def _peers(text: str) -> tuple[str, ...]:
    peers = [name for name, row in TABLE.items() if row.flag == "--peer"]
    for name in _names(text):
        if name not in peers:
            raise ValueError(f"--peer: there is no peer {name!r}; the peers are {', '.join(peers)}")
    return _names(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, (part.strip().lower() for part in text.split(",")))))


def _selected(text: str, names: Any, flag: str, aliases: dict[str, str]) -> tuple[str, ...]:
    if text.lower() == "all":
        return tuple(names)
    name = aliases.get(text.lower(), text.lower())
    if name not in names:
        raise ValueError(f"{flag} {text}: expected one of {', '.join(names)}, all")
    return (name,)


def _root(text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"-r {text}: expected a rank or all")
    return int(text)


def _pace(flags: argparse.Namespace) -> Pace:
    if flags.iters is not None and flags.iters < 1:
        raise ValueError("--iters must be at least 1")
    if flags.agg_iters < 1:
        raise ValueError("-m must be at least 1")
    return Pace(
        turns=min(flags.turns, math.ceil(flags.iters / flags.agg_iters)) if flags.iters else flags.turns,
        iters=flags.iters,
        budget=_positive("--budget", flags.budget),
        warmup=flags.warmup_iters,
        aggregate=flags.agg_iters,
        sync=bool(flags.blocking),
        host_time=bool(flags.report_cputime),
        events=flags.events,
    )


def _positive(flag: str, value: float) -> float:
    if not 0 < value < 1e6:
        raise ValueError(f"{flag} {value:g} is not a time in seconds")
    return value


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
