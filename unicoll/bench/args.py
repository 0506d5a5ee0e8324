"""The command line: nccl-tests' flags, and ours.

nccl-tests' flags and what they mean are those of its README (https://github.com/NVIDIA/nccl-tests). ``-n`` is the
number of ranks here, because we start them; nccl-tests' ``-n`` is ``--iters``. A flag that means nothing here is taken
with its trivial value and refused with a word on why with any other.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from .. import launchers, registry
from ..errors import DistArgumentError
from ..types import BY_NAME, DType
from .contenders import TABLE
from .measure import Pace
from .operations import OPERATIONS, Operation, named
from .sizes import DEFAULT_SIZES, Sweep, listed, parse_size, short, stepped
from .values import REDOPS

__all__ = ["TYPES", "Options", "parse"]

TYPES: dict[str, str] = {
    "int8": "int8", "uint8": "uint8", "int32": "int32", "uint32": "uint32", "int64": "int64", "uint64": "uint64",
    "half": "float16", "float": "float32", "double": "float64", "bfloat16": "bfloat16",
    "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip
"""nccl-tests' names of the element types, in its order, and ours."""

_TRIVIAL = (
    ("-t", "--nthreads", 1, "a rank is a process here, not a thread: use -n"),
    ("-g", "--ngpus", 1, "a rank drives one GPU: use -n"),
    ("-p", "--parallel_init", 0, "ranks are processes and start at the same time anyway"),
    ("-G", "--cudagraph", 0, "calls are not captured in CUDA graphs"),
    ("-R", "--local_register", 0, "buffers are not registered"),
    ("-D", "--device_implementation", 0, "there are no device kernels of ours"),
    ("-V", "--device_cta_count", 16, "there are no device kernels of ours"),
    ("-y", "--stream_null", 0, "calls go to the current stream"),
    ("-M", "--memory_report", 0, "staging memory is always printed; GPU memory is not"),
    ("-I", None, 0, "it is not here"),
    ("-K", None, 0, "it is not here"),
)
"""nccl-tests' flags that mean nothing here: spellings, the value that is taken, and why no other is."""


_COMMAND = "python -m unicoll.bench"


@dataclass(frozen=True)
class Options:
    """What to measure and what to show; see ``--help`` for each."""

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
    halves: str
    timestamps: bool
    osu: bool
    osu_full: bool
    overlap: bool
    json: str | None
    plot: str | None
    argv: tuple[str, ...]

    @property
    def contenders(self) -> tuple[str, ...]:
        """Backends, then peers; the first is the one that the others are compared with."""
        return (*self.backends, *self.peers)

    def dtype(self, name: str) -> DType:
        """Our element type of nccl-tests' name."""
        return BY_NAME[TYPES[name]]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the flags)\n")


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line (``sys.argv[1:]`` if None); a mistake ends the program: one line, status 2."""
    import sys

    words = tuple(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    given = parser.parse_args(words)
    try:
        return _options(given, words)
    except (ValueError, DistArgumentError) as error:
        parser.error(str(error))


def _parser() -> _Parser:
    parser = _Parser(
        prog="unicoll.bench",
        usage=f"{_COMMAND} OP [flags]",
        description=f"""Measure a collective operation of unicoll, side by side with other libraries.

examples:
  {_COMMAND} all_reduce -n 4          four ranks on this machine, all sizes
  {_COMMAND} all_reduce --backend gloo --peer torch-gloo      beside torch.distributed, in one run
  {_COMMAND} broadcast --sizes 1M,16M -d half -J broadcast.json
  mpirun -n 8 {_COMMAND} all_gather --backend mpi --peer mpi4py""",
        epilog="docs/benchmarking.md says what the numbers mean.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    operation = parser.add_argument_group("operation")
    operation.add_argument("op", metavar="OP", help=f"{', '.join(OPERATIONS)}; or nccl-tests' or OSU's name")
    _who(parser)
    _what(parser)
    _how(parser)
    _output(parser)
    trivial = parser.add_argument_group("nccl-tests' flags that take one value here")
    for flag, long, value, why in _TRIVIAL:
        names = filter(None, (flag, long))
        help = f"only {value}: {why}"
        trivial.add_argument(*names, dest=_destination(flag), type=int, default=value, metavar="N", help=help)
    return parser


def _who(parser: _Parser) -> None:
    group = parser.add_argument_group("ranks and libraries")
    group.add_argument("-n", "--ranks", type=int, metavar="N", help="start N ranks here (default 2)")
    mine = ",".join(n for n, row in TABLE.items() if row.flag == "--backend")
    others = ",".join(n for n, row in TABLE.items() if row.flag == "--peer")
    group.add_argument(
        "--backend",
        metavar="NAMES",
        help=f"unicoll's backends, of {mine} (default gloo, unless --peer is alone)",
    )
    group.add_argument("--peer", default="", metavar="NAMES", help=f"other libraries, of {others}")
    group.add_argument(
        "--array",
        choices=("numpy", "torch", "cupy"),
        help="arrays of our backends (default numpy; cupy on CUDA)",
    )


def _what(parser: _Parser) -> None:
    group = parser.add_argument_group("sizes, types, roots")
    group.add_argument("-b", "--minbytes", metavar="SIZE", help="smallest size (K, M, G; default 8)")
    group.add_argument("-e", "--maxbytes", metavar="SIZE", help="largest size (default 64M)")
    group.add_argument("-i", "--stepbytes", metavar="SIZE", help="bytes from one size to the next")
    group.add_argument("-f", "--stepfactor", metavar="F", help="factor from one size to the next (default 2)")
    usual = ",".join(short(n) for n in DEFAULT_SIZES)
    group.add_argument(
        "--sizes", metavar="LIST", help=f"these sizes (default, without the four above: {usual})"
    )
    group.add_argument("-o", "--op", dest="redop", default="sum", help=f"reduction: {', '.join(REDOPS)}, all")
    group.add_argument("-d", "--datatype", default="float", help=f"element type: {', '.join(TYPES)}, all")
    group.add_argument("-r", "--root", default="0", help="root of rooted operations: a rank, or all")
    group.add_argument(
        "-u", "--unalign", type=int, default=0, metavar="N", help="elements by which arrays are shifted"
    )
    group.add_argument(
        "--place", choices=("both", "in", "out"), default="both", help="in place, out of place, or both"
    )


def _how(parser: _Parser) -> None:
    group = parser.add_argument_group("measuring")
    group.add_argument("--iters", type=int, metavar="N", help="timed calls (default: what fits the budget)")
    group.add_argument(
        "--budget", type=float, default=1.0, metavar="S", help="seconds of calls per size and contender"
    )
    group.add_argument(
        "--turns", type=int, default=10, metavar="N", help="turns that contenders take per size"
    )
    group.add_argument(
        "-w", "--warmup_iters", type=int, default=1, metavar="N", help="calls before the timed ones"
    )
    group.add_argument(
        "-m", "--agg_iters", type=int, default=1, metavar="N", help="calls that are timed as one"
    )
    group.add_argument(
        "-N", "--run_cycles", type=int, default=1, metavar="N", help="repeat the sweep; 0: for ever"
    )
    group.add_argument(
        "-c", "--check", type=int, default=1, metavar="N", help="checked calls a line; 0: none"
    )
    group.add_argument(
        "-a", "--average", type=int, choices=(0, 1, 2, 3), default=1,
        help="over the ranks: 0 rank 0's, 1 average, 2 least, 3 most",
    )  # fmt: skip
    group.add_argument(
        "--statistic",
        choices=("p50", "avg", "min"),
        help="over the calls of a rank (default p50; with --osu avg)",
    )
    group.add_argument(
        "-z", "--blocking", type=int, choices=(0, 1), default=0, help="1: all ranks meet before each call"
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
        "-T", "--timeout", type=float, default=0, metavar="S", help="an operation may take S seconds"
    )


def _output(parser: _Parser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "-J", "--json", "--output_file", dest="json", metavar="FILE", help="write results as JSON"
    )
    group.add_argument("--plot", metavar="FILE", help="draw latency and bandwidth (needs matplotlib)")
    group.add_argument("--osu", action="store_true", help="OSU micro-benchmarks' columns")
    group.add_argument(
        "--osu-full", action="store_true", help="the same with minimum, maximum and iterations"
    )
    group.add_argument(
        "--overlap", action="store_true", help="measure an operation in the background beside NumPy"
    )
    group.add_argument(
        "-S", "--report_timestamps", type=int, choices=(0, 1), default=0, help="1: time of day per line"
    )


# --- from words to options ------------------------------------------------------------------------------------------


def _options(given: argparse.Namespace, words: tuple[str, ...]) -> Options:
    _refuse_what_is_not_here(given)
    op = named(given.op)
    osu = given.osu or given.osu_full
    for flag in ("turns", "run_cycles", "check", "warmup_iters", "unalign"):
        least = 1 if flag == "turns" else 0
        if getattr(given, flag) < least:
            raise ValueError(f"--{flag} must be at least {least}")
    if given.report_cputime and given.events:
        raise ValueError("-C 1 is the host's time and --events the device's: choose one")
    if osu and given.overlap:
        raise ValueError("--osu and --overlap are two tables: choose one")
    if given.plot and given.overlap:
        raise ValueError("--plot draws latency and bandwidth, which --overlap does not measure")
    if given.overlap and not op.can_start:
        raise ValueError(f"--overlap: {op.name} has no form that runs in the background")
    return Options(
        op=op,
        ranks=_ranks(given.ranks, op),
        backends=_backends(given),
        peers=_peers(given.peer),
        sweep=_sweep(given, op),
        types=_each(given.datatype, TYPES, "-d", {ours: theirs for theirs, ours in TYPES.items()}),
        redops=_each(given.redop, REDOPS, "-o", {"product": "prod", "premul_sum": "mulsum"}),
        roots=None if given.root == "all" else (_root(given.root),),
        pace=_pace(given),
        cycles=given.run_cycles,
        checks=given.check,
        average=given.average,
        statistic=given.statistic or ("avg" if osu else "p50"),
        timeout=_positive("--timeout", given.timeout) if given.timeout else 300.0,
        unalign=given.unalign,
        array=given.array,
        halves=given.place,
        timestamps=bool(given.report_timestamps),
        osu=osu,
        osu_full=given.osu_full,
        overlap=given.overlap,
        json=given.json,
        plot=given.plot,
        argv=words,
    )


def _refuse_what_is_not_here(given: argparse.Namespace) -> None:
    for flag, _, value, why in _TRIVIAL:
        if getattr(given, _destination(flag)) != value:
            raise ValueError(f"{flag}: {why}; only {value} is taken")


def _destination(flag: str) -> str:
    return f"trivial_{flag[1:]}"


def _ranks(given: int | None, op: Operation) -> int | None:
    if given is not None and given < 1:
        raise ValueError(f"-n {given}: at least one rank is needed")
    if given is not None and given < op.least:
        raise ValueError(f"{op.name} needs {op.least} ranks at least, and -n is {given}")
    launched = launchers.detect()
    if launched is None:
        return given
    if given is not None and given != launched.world_size:
        raise ValueError(f"-n {given}: {launched.name} has started {launched.world_size} ranks")
    if launched.world_size < op.least:
        raise ValueError(f"{op.name} needs {op.least} ranks at least, and there is {launched.world_size}")
    return launched.world_size


def _backends(given: argparse.Namespace) -> tuple[str, ...]:
    names = _names(given.backend if given.backend is not None else "" if given.peer else "gloo")
    if given.backend is not None and not names and not given.peer:
        raise ValueError("--backend names none")
    for name in names:
        if TABLE.get(name) and TABLE[name].flag != "--backend":
            raise ValueError(f"--backend: {name} is a peer: use --peer {name}")
        if name not in TABLE and name not in registry.known():
            raise ValueError(
                f"--backend: there is no backend {name!r}; known are {', '.join(registry.known())}"
            )
    return names


def _peers(text: str) -> tuple[str, ...]:
    known = [name for name, row in TABLE.items() if row.flag == "--peer"]
    for name in _names(text):
        if name not in known:
            raise ValueError(f"--peer: there is no peer {name!r}; known are {', '.join(known)}")
    return _names(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, (part.strip().lower() for part in text.split(",")))))


def _each(text: str, known: Any, flag: str, more: dict[str, str]) -> tuple[str, ...]:
    if text.lower() == "all":
        return tuple(known)
    name = more.get(text.lower(), text.lower())
    if name not in known:
        raise ValueError(f"{flag} {text}: known are {', '.join(known)}, all")
    return (name,)


def _root(text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"-r {text}: neither a rank nor all")
    return int(text)


def _pace(given: argparse.Namespace) -> Pace:
    if given.iters is not None and given.iters < 1:
        raise ValueError("--iters must be at least 1")
    if given.agg_iters < 1:
        raise ValueError("-m must be at least 1")
    return Pace(
        turns=min(given.turns, math.ceil(given.iters / given.agg_iters)) if given.iters else given.turns,
        iters=given.iters,
        budget=_positive("--budget", given.budget),
        warmup=given.warmup_iters,
        aggregate=given.agg_iters,
        sync=bool(given.blocking),
        host_time=bool(given.report_cputime),
        events=given.events,
    )


def _positive(flag: str, value: float) -> float:
    if not 0 < value < 1e6:
        raise ValueError(f"{flag} {value:g} is not a time in seconds")
    return value


def _sweep(given: argparse.Namespace, op: Operation) -> Sweep:
    steps = (given.minbytes, given.maxbytes, given.stepbytes, given.stepfactor)
    if given.sizes is not None and any(steps):
        raise ValueError("--sizes and -b, -e, -i, -f exclude each other")
    if op.name == "barrier":
        return listed((0,))
    if given.sizes is not None:
        return listed(tuple(parse_size(part) for part in given.sizes.split(",")))
    if any(steps):
        return stepped(*steps)
    return listed((64 << 20,) if given.overlap else DEFAULT_SIZES)
