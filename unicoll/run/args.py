"""The command line: torchrun's flags and a few of ours; each may also come from the variable PET_<NAME>.

What torchrun's flags mean is PyTorch's documentation of ``torchrun``. A flag whose meaning is not here yet
is refused with one sentence; a flag that cannot change anything here (``--start-method``,
``--rdzv-conf``...) is accepted.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NoReturn

__all__ = ["Options", "parse"]

OUT, ERR = 1, 2


@dataclass(frozen=True)
class Options:
    """What to start, and how.

    ``kind`` is "script", "module" or "command"; ``python`` runs the first two. ``redirects`` and ``tees``
    map each local rank to a sum of 1 (stdout) and 2 (stderr). ``shown`` holds the local ranks whose output
    is shown, or is None for all. ``master_port`` is None where the launcher is to pick. Times are in
    seconds.
    """

    kind: str
    target: str
    arguments: tuple[str, ...]
    python: str
    nnodes: int
    nproc: int
    node_rank: int
    master_addr: str
    master_port: int | None
    run_id: str
    role: str
    log_dir: str | None
    redirects: Mapping[int, int]
    tees: Mapping[int, int]
    shown: frozenset[int] | None
    prefix: bool
    monitor_interval: float
    grace: float
    shutdown_timeout: float
    signals: tuple[signal.Signals, ...]

    @property
    def world_size(self) -> int:
        """Workers on all nodes."""
        return self.nnodes * self.nproc


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line (``sys.argv[1:]`` if None); a mistake ends the program: one line, status 2."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        return _options(given)
    except ValueError as error:
        parser.error(str(error))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the flags)\n")


_REFUSED = (
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
    "logs-specs",
    "numa-binding",
    "virtual-local-rank",
)
"""torchrun's flags that are not here yet."""


def _parser() -> _Parser:
    unirun = os.path.basename(sys.argv[0]) == "unirun"
    command = "unirun" if unirun else "python -m unicoll.run"
    parser = _Parser(
        prog="unirun" if unirun else "unicoll.run",
        usage=f"{command} [flags] script [arguments of the script]",
        description=f"""Start a distributed program: its worker processes on this machine.

examples:
  {command} -n 4 train.py --epochs 3     four workers; what follows the script is for the script
  {command} -n 4 -m package.train        a module, as python -m runs it
  two machines; on the second with --node-rank 1 and the same UNICOLL_SECRET:
  {command} -n 8 --nnodes 2 --node-rank 0 --master-addr first.example.org train.py""",
        epilog=f"""The flags are torchrun's, but for -n, --grace and --no-prefix. Each may be set by PET_<NAME> in
the environment, for example PET_NPROC_PER_NODE=4. Not here yet: --{", --".join(_REFUSED[:2])},
--{", --".join(_REFUSED[2:])}.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    program = parser.add_argument_group("program")
    program.add_argument("target", metavar="script", help="script, module or command to start")
    program.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    _workers_flags(_Flags(parser, "workers"))
    _nodes_flags(_Flags(parser, "several nodes"))
    _output_flags(_Flags(parser, "output"))
    _end_flags(_Flags(parser, "failures and signals"))
    _other_flags(_Flags(parser, "flags of torchrun's that take one value, or change nothing here"))
    return parser


class _Flags:
    """A group of flags in ``--help``; each is also spelled with underscores, and set by PET_<NAME>."""

    def __init__(self, parser: _Parser, title: str) -> None:
        self._parser = parser
        self._group = parser.add_argument_group(title)

    def value(self, name: str, default: Any, metavar: str, help: str, *short: str, **how: Any) -> None:
        """A flag with a value."""
        self._add(name, short, help, default=self._environ(name) or default, metavar=metavar, **how)

    def switch(self, name: str, help: str, *short: str) -> None:
        """A flag without one."""
        value = self._environ(name) or "0"
        if value not in ("0", "1"):
            self._parser.error(f"{_variable(name)}={value} must be 0 or 1")
        self._add(name, short, help, default=value == "1", action="store_true")

    def _environ(self, name: str) -> str | None:
        return os.environ.get(_variable(name))

    def _add(self, name: str, short: Sequence[str], help: str, default: Any, **how: Any) -> None:
        underscored = name.replace("-", "_")
        self._group.add_argument(*short, f"--{name}", dest=underscored, default=default, help=help, **how)
        if underscored != name:
            self._group.add_argument(
                f"--{underscored}", dest=underscored, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how
            )


def _variable(name: str) -> str:
    return f"PET_{name.replace('-', '_').upper()}"


def _workers_flags(flags: _Flags) -> None:
    flags.value(
        "nproc-per-node", "1", "N", "workers on this machine: a number, auto, cpu or gpu (default 1)", "-n"
    )
    flags.switch("module", "the target is a module, run as python -m does", "-m")
    flags.switch("no-python", "the target is a command, not a Python script")
    flags.switch("run-path", "overrides --no-python")
    flags.value(
        "role", "default", "NAME", "name of the workers, for prefixes and environment (default: default)"
    )


def _nodes_flags(flags: _Flags) -> None:
    flags.value("nnodes", "1", "N", "number of nodes, each with a launcher of its own (default 1)")
    flags.value("node-rank", 0, "K", "this node's number, from 0", type=int)
    flags.value("master-addr", "127.0.0.1", "HOST", "address of node 0")
    port = "port on node 0 (default: any free one on one node, else 29500)"
    flags.value("master-port", None, "PORT", port, type=int)
    flags.value("rdzv-endpoint", "", "HOST:PORT", "another way to give the two above")
    flags.value("rdzv-id", "none", "NAME", "name of the job")
    flags.switch("standalone", "one node, with a name of its own for the job")


def _output_flags(flags: _Flags) -> None:
    flags.switch("no-prefix", "do not put [role rank]: before the workers' lines")
    flags.value("local-ranks-filter", "", "LIST", "show only these local ranks' output, for example 0,2")
    flags.value("log-dir", None, "DIR", "directory for log files, one subdirectory per launch")
    streams = "write to log files only: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank, 0:3,1:1"
    flags.value("redirects", "0", "STREAMS", streams, "-r")
    flags.value("tee", "0", "STREAMS", "write to log files and to the console, same format", "-t")


def _end_flags(flags: _Flags) -> None:
    grace = "seconds that the others have to fail by themselves after the first failure (default 5)"
    flags.value("grace", 5.0, "S", grace, type=float)
    flags.value("shutdown-timeout", None, "S", "seconds from SIGTERM to SIGKILL (default 30)", type=float)
    signals = "signals that end the job, passed on to the workers (default SIGTERM,SIGINT,SIGHUP,SIGQUIT)"
    flags.value("signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "LIST", signals)
    interval = "longest time in seconds between two looks at the workers (default 0.1)"
    flags.value("monitor-interval", 0.1, "S", interval, type=float)


def _other_flags(flags: _Flags) -> None:
    flags.value("max-restarts", 0, "N", "only 0: workers are not restarted", type=int)
    flags.value("rdzv-backend", "static", "NAME", "static; c10d on one node")
    flags.value("event-log-handler", "null", "NAME", "only null")
    flags.value("rdzv-conf", "", "CONF", "changes nothing")
    flags.value("local-addr", None, "HOST", "changes nothing")
    flags.value("start-method", "spawn", "NAME", "changes nothing: workers are always started afresh")
    for name in _REFUSED:
        if name == "virtual-local-rank":
            flags.switch(name, argparse.SUPPRESS)
        else:
            flags.value(name, None, "", argparse.SUPPRESS)


def _options(given: argparse.Namespace) -> Options:
    _refuse_what_is_not_here(given)
    nnodes = _nodes(given.nnodes)
    nproc = _workers(given.nproc_per_node)
    master_addr, master_port = _master(given, nnodes)
    if not 0 <= given.node_rank < nnodes:
        raise ValueError(f"--node-rank {given.node_rank} is not in 0..{nnodes - 1} (--nnodes {nnodes})")
    kind = _kind(given)
    python = os.environ.get("PYTHON_EXEC") or sys.executable
    _check_target(kind, given.target, python)
    if given.log_dir and os.path.exists(given.log_dir) and not os.path.isdir(given.log_dir):
        raise ValueError(f"--log-dir {given.log_dir} is not a directory")
    return Options(
        kind=kind,
        target=given.target,
        arguments=tuple(given.arguments),
        python=python,
        nnodes=nnodes,
        nproc=nproc,
        node_rank=given.node_rank,
        master_addr=master_addr,
        master_port=master_port,
        run_id=str(uuid.uuid4()) if given.standalone else given.rdzv_id,
        role=given.role,
        log_dir=given.log_dir,
        redirects=_per_rank("--redirects", given.redirects, nproc),
        tees=_per_rank("--tee", given.tee, nproc),
        shown=_rank_set(given.local_ranks_filter),
        prefix=not given.no_prefix and nproc > 1,
        monitor_interval=_seconds("--monitor-interval", given.monitor_interval, least=0.01),
        grace=_seconds("--grace", given.grace),
        shutdown_timeout=_shutdown_timeout(given.shutdown_timeout),
        signals=_signals(given.signals_to_handle),
    )


def _refuse_what_is_not_here(given: argparse.Namespace) -> None:
    if given.max_restarts < 0:
        raise ValueError("--max-restarts must not be negative")
    if given.max_restarts > 0:
        raise ValueError("--max-restarts: restarting workers is not here yet; only 0 is accepted")
    if given.start_method not in ("spawn", "fork", "forkserver"):
        raise ValueError(f"--start-method {given.start_method} is none of spawn, fork, forkserver")
    if given.event_log_handler != "null":
        raise ValueError("--event-log-handler: event logs are not here yet; only null is accepted")
    for name in _REFUSED:
        if getattr(given, name.replace("-", "_")):
            raise ValueError(f"--{name} is not here yet")
    for pair in filter(None, given.rdzv_conf.split(",")):
        if "=" not in pair:
            raise ValueError(f"--rdzv-conf: {pair!r} is not key=value")


def _nodes(text: str) -> int:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if not match:
        raise ValueError(f"--nnodes {text} is neither N nor MIN:MAX")
    least, most = int(match[1]), int(match[2] or match[1])
    if least != most:
        raise ValueError(
            f"--nnodes {text}: elastic jobs are not here yet; give one number, or MIN equal to MAX"
        )
    if least < 1:
        raise ValueError("--nnodes must be at least 1")
    return least


def _workers(text: str) -> int:
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text == "gpu":
        if not (gpus := _count_gpus()):
            raise ValueError("--nproc-per-node gpu: there is no usable CUDA device here")
        return gpus
    if text == "auto":
        return _count_gpus() or len(os.sched_getaffinity(0))
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"--nproc-per-node {text} is neither a number nor one of auto, cpu, gpu") from None
    if number < 1:
        raise ValueError(f"--nproc-per-node {number}: at least one worker is needed")
    return number


def _count_gpus() -> int:
    """CUDA devices that CUDA_VISIBLE_DEVICES leaves; a process of its own asks the driver. 0 without one."""
    program = (
        "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); number = ctypes.c_int(0)\n"
        "if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(number)) == 0: print(number.value)"
    )
    try:
        answer = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            "the CUDA driver did not answer within 60 s; give --nproc-per-node a number"
        ) from None
    return int(answer.stdout) if answer.returncode == 0 and answer.stdout.strip() else 0


def _master(given: argparse.Namespace, nnodes: int) -> tuple[str, int | None]:
    """Address and port of node 0; the port is None where the launcher picks a free one."""
    backend = given.rdzv_backend or "static"
    if given.standalone:
        if nnodes > 1:
            raise ValueError(f"--standalone is for one node, and --nnodes is {nnodes}")
        return "127.0.0.1", None
    if backend not in ("static", "c10d"):
        raise ValueError(f"--rdzv-backend {backend} is not here; use static")
    if nnodes > 1 and backend != "static":
        raise ValueError(
            f"--rdzv-backend {backend} for several nodes is not here yet; use static, with --node-rank"
        )
    address, port = given.master_addr, given.master_port
    if given.rdzv_endpoint:
        address, endpoint_port = _endpoint(given.rdzv_endpoint)
        port = endpoint_port if endpoint_port is not None else port
    if port is not None and not 0 <= port <= 65535:
        raise ValueError(f"port {port} is not in 0..65535")
    if nnodes > 1:
        if port == 0:
            raise ValueError("port 0 is for one node; several nodes must agree on a --master-port")
        port = 29500 if port is None else port
    return address.removeprefix("[").removesuffix("]"), port or None


def _endpoint(text: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d+))?", text)
    if not match:
        raise ValueError(f"--rdzv-endpoint {text} is not host:port (IPv6: [address]:port)")
    return match[1], int(match[2]) if match[2] else None


def _kind(given: argparse.Namespace) -> str:
    if given.module and given.no_python:
        raise ValueError("--module and --no-python exclude each other")
    if given.module:
        return "module"
    return "command" if given.no_python and not given.run_path else "script"


def _check_target(kind: str, target: str, python: str) -> None:
    if kind == "command":
        if shutil.which(target) is None:
            raise ValueError(f"{target}: {_why_not_runnable(target)}")
        return
    if shutil.which(python) is None:
        raise ValueError(f"PYTHON_EXEC={python}: {_why_not_runnable(python)}")
    if kind == "script":
        if not os.path.exists(target):
            raise ValueError(f"{target}: no such file")
        if os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
            raise ValueError(f"{target} is a directory without __main__.py")
        if not os.access(target, os.R_OK):
            raise ValueError(f"{target}: not readable")
    elif not os.environ.get("PYTHON_EXEC") and not _module_exists(target.partition(".")[0]):
        raise ValueError(f"no module named {target.partition('.')[0]!r}")


def _why_not_runnable(command: str) -> str:
    if os.path.isdir(command):
        return "is a directory"
    return "not executable" if os.path.exists(command) and "/" in command else "command not found"


def _module_exists(name: str) -> bool:
    sys.path.insert(0, os.getcwd())  # where the workers will look first
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return name in sys.modules
    finally:
        del sys.path[0]


def _per_rank(flag: str, text: str, nproc: int) -> dict[int, int]:
    if re.fullmatch(r"[0-3]", text):
        return dict.fromkeys(range(nproc), int(text))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise ValueError(f"{flag} {text} is neither 0, 1, 2, 3 nor a map like 0:3,1:1")
    chosen = {int(rank): int(streams) for rank, streams in (pair.split(":") for pair in text.split(","))}
    if max(chosen) >= nproc:
        raise ValueError(f"{flag} {text}: there is no local rank {max(chosen)} among {nproc} workers")
    return {rank: chosen.get(rank, 0) for rank in range(nproc)}


def _rank_set(text: str) -> frozenset[int] | None:
    if not text:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f"--local-ranks-filter {text} is not a list of local ranks like 0,2")
    return frozenset(map(int, text.split(",")))


def _seconds(flag: str, value: float, least: float = 0.0) -> float:
    if not least <= value <= 1e6:
        raise ValueError(f"{flag} {value} is not a time in seconds of at least {least:g}")
    return value


def _shutdown_timeout(value: float | None) -> float:
    if value is None:
        text = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or "30"
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text} is not a number of seconds") from None
    return _seconds("--shutdown-timeout", value)


def _signals(text: str) -> tuple[signal.Signals, ...]:
    chosen = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        number = signal.Signals.__members__.get(name)
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise ValueError(f"--signals-to-handle: {name} is not a signal that can be handled")
        chosen.append(number)
    return tuple(chosen)
