"""The command line: torchrun's flags, each of which may also come from the environment variable PET_<NAME>.

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


def _parser() -> _Parser:
    parser = _Parser(
        prog="unicoll.run",
        description="Start a distributed program: its worker processes on this machine.",
        epilog="Every flag may be set by PET_<NAME> in the environment, for example PET_NPROC_PER_NODE=4.",
        allow_abbrev=False,
    )

    def flag(name: str, default: Any, help: str, *short: str, **how: Any) -> None:
        spellings, variable = _names(name, short)
        parser.add_argument(*spellings, default=os.environ.get(variable) or default, help=help, **how)

    def switch(name: str, help: str, *short: str) -> None:
        spellings, variable = _names(name, short)
        value = os.environ.get(variable) or "0"
        if value not in ("0", "1"):
            parser.error(f"{variable}={value} must be 0 or 1")
        parser.add_argument(*spellings, action="store_true", default=value == "1", help=help)

    flag("nnodes", "1", "number of nodes (N, or N:N)")
    flag("nproc-per-node", "1", "workers per node: a number, auto, cpu or gpu")
    flag("node-rank", 0, "this node's number, from 0, when there are several", type=int)
    flag("master-addr", "127.0.0.1", "address of node 0")
    flag("master-port", None, "port on node 0 (default: any free one on one node, else 29500)", type=int)
    switch("standalone", "one node, with a run id of its own")
    flag("rdzv-backend", "static", "static; c10d is accepted on one node")
    flag("rdzv-endpoint", "", "host:port of node 0, another way to give --master-addr and --master-port")
    flag("rdzv-id", "none", "name of the job")
    flag("rdzv-conf", "", "accepted: tunes a rendezvous that is not used here")
    flag("local-addr", None, "accepted: a static rendezvous does not use it")
    flag("role", "default", "name of the workers' role, for prefixes and environment")
    switch("module", "the target is a module, run as python -m does", "-m")
    switch("no-python", "the target is a command, not a Python script")
    switch("run-path", "the target is a script in spite of --no-python")
    flag("max-restarts", 0, "only 0 for now", type=int)
    flag("monitor-interval", 0.1, "longest time in seconds between two looks at the workers", type=float)
    flag("start-method", "spawn", "accepted: workers are always started afresh")
    flag("event-log-handler", "null", "only null for now")
    flag("log-dir", None, "directory for log files, one subdirectory per launch")
    flag("redirects", "0", "write to log files only: 0 none, 1 stdout, 2 stderr, 3 both; or 0:3,1:1", "-r")
    flag("tee", "0", "write to log files and to the console, same format", "-t")
    flag("local-ranks-filter", "", "show only these local ranks' output, for example 0,2")
    flag("duplicate-stdout-filters", "", "not here yet")
    flag("duplicate-stderr-filters", "", "not here yet")
    flag("logs-specs", None, "not here yet")
    flag("numa-binding", None, "not here yet")
    switch("virtual-local-rank", "not here yet")
    flag(
        "signals-to-handle",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "signals that end the job, passed on to the workers",
    )
    flag("shutdown-timeout", None, "seconds from SIGTERM to SIGKILL (default 30)", type=float)
    flag(
        "grace", 5.0, "seconds that the others have to fail by themselves after the first failure", type=float
    )
    switch("no-prefix", "do not put [role rank]: before the workers' lines")
    parser.add_argument("target", metavar="script", help="script, module or command to start")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _names(name: str, short: Sequence[str]) -> tuple[list[str], str]:
    underscored = name.replace("-", "_")
    return list(dict.fromkeys([*short, f"--{name}", f"--{underscored}"])), f"PET_{underscored.upper()}"


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
    for name in (
        "duplicate-stdout-filters",
        "duplicate-stderr-filters",
        "logs-specs",
        "numa-binding",
        "virtual-local-rank",
    ):
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
