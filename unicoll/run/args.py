"""The options of a launch, validated.

The meaning of torchrun's flags is in PyTorch's documentation of ``torchrun``. An unsupported flag
is refused with one sentence; a flag without effect for this launcher (``--start-method``,
``--rdzv-conf``...) is accepted.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import stat
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from unicoll.errors import DistArgumentError
from unicoll.net.wire.interfaces import split_hostport
from unicoll.process import environment
from unicoll.run.cpu_affinity import BINDINGS, cpu_affinity, gpu_addresses
from unicoll.run.flags import make_parser

OUT, ERR = 1, 2
_MOST_PROCESSES = 1 << 22
_REPLACEMENTS = 10
"""Default of --max-restarts with --replace."""


@dataclass(frozen=True)
class LaunchOptions:
    """The program to start, and how.

    ``mpi`` is True if mpirun starts it, as ``nproc`` processes; then options of nodes, output and
    ends have no effect. ``kind`` is "script", "module" or "command"; ``python`` runs the first two.
    ``redirects`` and ``tees`` map each local rank to a sum of 1 (stdout) and 2 (stderr). ``shown``
    is the set of local ranks whose output is shown, None for all. ``node_rank`` is None if the
    launchers of several nodes agree on it. ``master_port`` is None if the launcher picks a free
    port. Times are in seconds. ``replaces`` is True if a worker that fails is started again alone,
    ``max_restarts`` times; else all are. ``gives_local_rank`` is True if the program gets
    ``--local-rank`` as its first argument. ``matches`` maps OUT and ERR to the texts whose lines
    are also written to one file for all workers. ``affinity`` maps each local rank to the CPUs that
    it is bound to; it is empty without ``--numa-binding``. ``devices`` maps each local rank to the
    variables that select its device with ``--virtual-local-rank``; else it is empty. ``variables``
    are those that other flags set for all workers.
    """

    mpi: bool
    kind: str
    target: str
    arguments: tuple[str, ...]
    python: str
    nnodes: int
    nproc: int
    node_rank: int | None
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
    gives_local_rank: bool
    max_restarts: int
    replaces: bool
    join_timeout: float
    matches: Mapping[int, tuple[str, ...]]
    affinity: Mapping[int, frozenset[int]]
    devices: Mapping[int, Mapping[str, str]]
    variables: Mapping[str, str]


def parse(argv: Sequence[str] | None = None, as_torchs_launch: bool = False) -> LaunchOptions:
    """Read the command line (``sys.argv[1:]`` if None); an error ends the program with one line and
    status 2."""
    parser = make_parser(as_torchs_launch)
    parsed = parser.parse_args(argv)
    try:
        return _options(parsed)
    except ValueError as error:
        parser.error(str(error))


def _options(parsed: argparse.Namespace) -> LaunchOptions:
    _refuse_unsupported(parsed)
    nnodes = _nodes(parsed.nnodes, parsed.target)
    nproc = _workers(parsed.nproc_per_node)
    master_addr, master_port = _master(parsed, nnodes)
    if parsed.node_rank is not None and not 0 <= parsed.node_rank < nnodes:
        raise ValueError(
            f"--node-rank {parsed.node_rank} is not in 0..{nnodes - 1} (--nnodes {nnodes})"
        )
    kind = _kind(parsed)
    if kind == "command" and not getattr(parsed, "use_env", True):
        raise ValueError("--no-python needs --use-env: a command gets no --local-rank")
    python = os.environ.get("PYTHON_EXEC") or sys.executable
    _check_target(kind, parsed.target, python)
    if parsed.log_dir and os.path.exists(parsed.log_dir) and not os.path.isdir(parsed.log_dir):
        raise ValueError(f"--log-dir {parsed.log_dir} is not a directory")
    options = LaunchOptions(
        mpi=parsed.mpi,
        kind=kind,
        target=parsed.target,
        arguments=tuple(parsed.arguments),
        python=python,
        nnodes=nnodes,
        nproc=nproc,
        node_rank=parsed.node_rank,
        master_addr=master_addr,
        master_port=master_port,
        run_id=str(uuid.uuid4()) if parsed.standalone else parsed.rdzv_id,
        role=parsed.role,
        log_dir=parsed.log_dir,
        redirects=_per_rank("--redirects", parsed.redirects, nproc),
        tees=_per_rank("--tee", parsed.tee, nproc),
        shown=_rank_set(parsed.local_ranks_filter),
        prefix=not parsed.no_prefix and nproc > 1,
        monitor_interval=_seconds("--monitor-interval", parsed.monitor_interval, least=0.01),
        grace=_seconds("--grace", parsed.grace),
        shutdown_timeout=_shutdown_timeout(parsed.shutdown_timeout),
        signals=_signals(parsed.signals_to_handle),
        gives_local_rank=not getattr(parsed, "use_env", True),
        max_restarts=_max_restarts(parsed),
        replaces=parsed.replace,
        join_timeout=_join_timeout(parsed.rdzv_conf),
        matches={
            OUT: _texts(parsed.duplicate_stdout_filters),
            ERR: _texts(parsed.duplicate_stderr_filters),
        },
        affinity=(
            cpu_affinity(parsed.numa_binding, nproc, _gpus(parsed)) if parsed.numa_binding else {}
        ),
        devices=_devices(nproc) if parsed.virtual_local_rank else {},
        variables=_replaced_backends(parsed.replace_backend),
    )
    if options.mpi:
        _refuse_with_mpi(options)
    return options


def _refuse_with_mpi(options: LaunchOptions) -> None:
    """ValueError if an option asks for several nodes, restarts, log files or binding, which are
    mpirun's business."""
    if options.nnodes > 1:
        raise ValueError(
            "--mpi is for one node: on several ones start mpirun, with its option for hosts"
        )
    asked = {
        "--replace": options.replaces,
        "--max-restarts": options.max_restarts,
        "--redirects": any(options.redirects.values()),
        "--tee": any(options.tees.values()),
        "--log-dir": options.log_dir,
        "--local-ranks-filter": options.shown,
        "--duplicate-stdout-filters": options.matches[OUT],
        "--duplicate-stderr-filters": options.matches[ERR],
        "--numa-binding": options.affinity,
        "--virtual-local-rank": options.devices,
    }
    if refused := [flag for flag, value in asked.items() if value]:
        raise ValueError(f"{refused[0]} cannot be used with --mpi: mpirun starts the workers")
    if options.gives_local_rank:
        raise ValueError("--mpi needs --use-env: mpirun gives no --local-rank")


def _refuse_unsupported(parsed: argparse.Namespace) -> None:
    if parsed.start_method not in ("spawn", "fork", "forkserver"):
        raise ValueError(f"--start-method {parsed.start_method} is none of spawn, fork, forkserver")
    if parsed.event_log_handler != "null":
        raise ValueError("--event-log-handler: event logs are not supported; only null is accepted")
    if parsed.logs_specs:
        raise ValueError("--logs-specs is not supported")
    if parsed.numa_binding and parsed.numa_binding not in BINDINGS:
        raise ValueError(f"--numa-binding {parsed.numa_binding} is none of {', '.join(BINDINGS)}")


def _max_restarts(parsed: argparse.Namespace) -> int:
    if parsed.max_restarts is None:
        return _REPLACEMENTS if parsed.replace else 0
    if parsed.max_restarts < 0:
        raise ValueError("--max-restarts must not be negative")
    return int(parsed.max_restarts)


def _replaced_backends(text: str) -> dict[str, str]:
    if not text:
        return {}
    variables = {"UNICOLL_REPLACE": text}
    try:
        environment.check(variables)
    except DistArgumentError as error:
        raise ValueError(f"--replace-backend: {error}") from None
    return variables


def _nodes(text: str, target: str) -> int:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if not match:
        raise ValueError(f"--nnodes {text} is neither N nor MIN:MAX")
    least, most = int(match[1]), int(match[2] or match[1])
    if least != most:
        raise ValueError(
            f"--nnodes {text}: this launcher has a fixed number of nodes; torchrun changes it, and"
            f" the script needs no change: torchrun --nnodes {text} --rdzv-backend c10d"
            f" --rdzv-endpoint HOST:PORT ... {target}"
        )
    if least < 1:
        raise ValueError("--nnodes must be at least 1")
    return least


def _gpus(parsed: argparse.Namespace) -> list[str]:
    """PCI addresses of the GPUs of the local ranks."""
    return gpu_addresses("Level Zero" if parsed.nproc_per_node == "xpu" else "CUDA")


def _workers(text: str) -> int:
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text == "gpu":
        if not (gpus := gpu_addresses()):
            raise ValueError("--nproc-per-node gpu: this machine has no usable CUDA device")
        return len(gpus)
    if text == "xpu":
        if not (xpus := gpu_addresses("Level Zero")):
            raise ValueError("--nproc-per-node xpu: this machine has no usable Intel GPU")
        return len(xpus)
    if text == "auto":
        return len(gpu_addresses() or os.sched_getaffinity(0))
    try:
        number = int(text)
    except ValueError:
        raise ValueError(
            f"--nproc-per-node {text} is neither a number nor one of auto, cpu, gpu, xpu"
        ) from None
    if number < 1:
        raise ValueError(f"--nproc-per-node {number}: at least one worker is needed")
    if number > _MOST_PROCESSES:
        raise ValueError(
            f"--nproc-per-node {number}: Linux has at most {_MOST_PROCESSES} processes"
        )
    return number


def _master(parsed: argparse.Namespace, nnodes: int) -> tuple[str, int | None]:
    """Address and port of node 0; the port is None if the launcher picks a free one."""
    backend = parsed.rdzv_backend or "static"
    if parsed.standalone:
        if nnodes > 1:
            raise ValueError(f"--standalone is for one node, and --nnodes is {nnodes}")
        return "127.0.0.1", None
    if backend not in ("static", "c10d"):
        raise ValueError(
            f"--rdzv-backend {backend} is not supported; static and c10d are, and mean the same"
        )
    address, port = parsed.master_addr, parsed.master_port
    if parsed.rdzv_endpoint:
        address, endpoint_port = _endpoint(parsed.rdzv_endpoint)
        port = port if endpoint_port is None else endpoint_port
    if port is not None and not 0 <= port <= 65535:
        raise ValueError(f"port {port} is not in 0..65535")
    if nnodes > 1:
        if port == 0:
            raise ValueError("port 0 is for one node; several nodes must agree on a --master-port")
        port = 29500 if port is None else port
    return address.removeprefix("[").removesuffix("]"), port or None


def _endpoint(text: str) -> tuple[str, int | None]:
    """Host and port; the port is None if ``text`` has none."""
    try:
        host, port = split_hostport(text, default_port=-1)
    except ValueError as error:
        raise ValueError(f"--rdzv-endpoint {error}") from None
    return host, None if port == -1 else port


def _join_timeout(conf: str) -> float:
    """``join_timeout`` of --rdzv-conf: how long a launcher waits for those of the other nodes;
    torchrun's default."""
    pairs = [pair.partition("=") for pair in filter(None, conf.split(","))]
    for key, equals, _ in pairs:
        if not equals:
            raise ValueError(f"--rdzv-conf: {key!r} is not key=value")
    given = {key: value for key, _, value in pairs}
    text = given.get("join_timeout", "600")
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"--rdzv-conf join_timeout={text} is not a number of seconds") from None
    return _seconds("--rdzv-conf join_timeout", seconds, least=0.1)


def _kind(parsed: argparse.Namespace) -> str:
    if parsed.module and parsed.no_python:
        raise ValueError("--module and --no-python exclude each other")
    if parsed.module:
        return "module"
    return "command" if parsed.no_python and not parsed.run_path else "script"


def _check_target(kind: str, target: str, python: str) -> None:
    if kind == "command":
        if shutil.which(target) is None:
            raise ValueError(f"{target}: {_why_not_runnable(target)}")
        return
    if shutil.which(python) is None:
        raise ValueError(f"PYTHON_EXEC={python}: {_why_not_runnable(python)}")
    if kind == "script":
        if target == "-" or stat.S_ISFIFO(_mode(target)):
            raise ValueError(
                f"{target}: every worker reads the program, and a pipe can be read once: give a"
                " file"
            )
        if not os.path.exists(target):
            raise ValueError(f"{target}: no such file")
        if os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
            raise ValueError(f"{target} is a directory without __main__.py")
        if not os.access(target, os.R_OK):
            raise ValueError(f"{target}: not readable")
    elif not os.environ.get("PYTHON_EXEC") and not _module_exists(target.partition(".")[0]):
        raise ValueError(f"no module named {target.partition('.')[0]!r}")


def _mode(path: str) -> int:
    try:
        return os.stat(path).st_mode
    except OSError:
        return 0


def _why_not_runnable(command: str) -> str:
    if os.path.isdir(command):
        return "is a directory"
    return "not executable" if os.path.exists(command) and "/" in command else "command not found"


def _module_exists(name: str) -> bool:
    # The working directory is first in the search path of the workers.
    sys.path.insert(0, "")
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
    chosen = {
        int(rank): int(streams) for rank, streams in (pair.split(":") for pair in text.split(","))
    }
    if max(chosen) >= nproc:
        raise ValueError(
            f"{flag} {text}: there is no local rank {max(chosen)} among {nproc} workers"
        )
    return {rank: chosen.get(rank, 0) for rank in range(nproc)}


def _rank_set(text: str) -> frozenset[int] | None:
    if not text:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f"--local-ranks-filter {text} is not a list of local ranks like 0,2")
    return frozenset(map(int, text.split(",")))


def _devices(nproc: int) -> dict[int, dict[str, str]]:
    """The variables of each local rank that select its device; HIP prefers its own if that is
    set."""
    names = [
        "CUDA_VISIBLE_DEVICES",
        *(["HIP_VISIBLE_DEVICES"] if os.environ.get("HIP_VISIBLE_DEVICES") else []),
    ]
    found = {name: _visible(name, nproc) for name in names}
    return {i: {name: found[name][i] for name in names} for i in range(nproc)}


def _visible(name: str, nproc: int) -> dict[int, str]:
    """A variable's value for each local rank: one device of those that this process sees, if it
    sees one."""
    given = os.environ.get(name)
    if given is None:
        return {i: str(i) for i in range(nproc)}
    devices = [device.strip() for device in given.split(",")]
    # CUDA does not see the devices behind an entry that names none.
    visible = list(itertools.takewhile(lambda device: device not in ("", "-1"), devices))
    if not visible:
        return dict.fromkeys(range(nproc), given)
    if len(visible) < nproc:
        raise ValueError(
            f"--virtual-local-rank: {nproc} workers need a GPU each; {name}={given} has"
            f" {len(visible)}"
        )
    return dict(enumerate(visible[:nproc]))


def _texts(text: str) -> tuple[str, ...]:
    """Texts separated by commas; two commas are one in a text."""
    return tuple(part.replace(",,", ",") for part in re.findall(r"(?:[^,]|,,)+", text))


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
            raise ValueError(
                f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text} is not a number of seconds"
            ) from None
    return _seconds("--shutdown-timeout", value)


def _signals(text: str) -> tuple[signal.Signals, ...]:
    chosen = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        number = signal.Signals.__members__.get(name)
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise ValueError(f"--signals-to-handle: {name} is not a signal that can be handled")
        chosen.append(number)
    return tuple(chosen)
