"""The flags of the launcher: torchrun's and some additional ones; each also has a variable
PET_<NAME>."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from unicoll.process import formatting
from unicoll.run.cpu_affinity import BINDINGS


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line and exit with status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the flags)\n")


def make_parser(as_torchs_launch: bool = False) -> OneLineParser:
    """The parser of the command line, with defaults from the PET_ variables of the environment.

    ``as_torchs_launch``: the command is ``python -m unicoll.launch``, which has ``--use-env``, too.
    """
    unirun = os.path.basename(sys.argv[0]) == "unirun"
    command = "unirun" if unirun else formatting.command("launch" if as_torchs_launch else "run")
    parser = OneLineParser(
        prog=command.removeprefix("python -m "),
        usage=f"{command} [flags] script [arguments of the script]",
        description=f"""Start a distributed program: its worker processes on this machine.

examples:
  {command} -n 4 train.py --epochs 3     four workers; arguments after the script are passed to it
  {command} -n 4 -m package.train        a module, as python -m runs it
  two machines; the same on both, with the same UNICOLL_SECRET_FILE:
  {command} -n 8 --nnodes 2 --rdzv-endpoint first.example.org:29500 train.py""",
        epilog="""The flags are torchrun's, except -n, --mpi, --replace-backend, --grace, --no-prefix and --replace.
Each may be set by PET_<NAME> in the environment, for example PET_NPROC_PER_NODE=4. Not supported: --logs-specs.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    program = parser.add_argument_group("program")
    program.add_argument("target", metavar="script", help="script, module or command to start")
    program.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    workers = _Flags(parser, "workers")
    _workers_flags(workers)
    if as_torchs_launch:
        workers.switch(
            "use-env", "the program reads LOCAL_RANK, and gets no argument --local-rank=N"
        )
    _nodes_flags(_Flags(parser, "several nodes"))
    _output_flags(_Flags(parser, "output"))
    _end_flags(_Flags(parser, "failures and signals"))
    _other_flags(_Flags(parser, "torchrun's flags that accept one value, or have no effect"))
    return parser


class _Flags:
    """A group of flags in ``--help``; each one also has a spelling with underscores, and a variable
    PET_<NAME>."""

    def __init__(self, parser: OneLineParser, title: str) -> None:
        self._parser = parser
        self._group = parser.add_argument_group(title)

    def value(
        self, name: str, default: Any, metavar: str, help: str, *short: str, **options: Any
    ) -> None:
        self._add(
            name, short, help, default=self._environ(name) or default, metavar=metavar, **options
        )

    def switch(self, name: str, help: str, *short: str) -> None:
        value = self._environ(name) or "0"
        if value not in ("0", "1"):
            self._parser.error(f"{_variable(name)}={value} must be 0 or 1")
        self._add(name, short, help, default=value == "1", action="store_true")

    def _environ(self, name: str) -> str | None:
        return os.environ.get(_variable(name))

    def _add(
        self, name: str, short: Sequence[str], help: str, default: Any, **options: Any
    ) -> None:
        underscored = name.replace("-", "_")
        self._group.add_argument(
            *short, f"--{name}", dest=underscored, default=default, help=help, **options
        )
        # Both spellings set one name. Only the first has the default: argparse would apply both.
        if underscored != name:
            self._group.add_argument(
                f"--{underscored}",
                dest=underscored,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
                **options,
            )


def _variable(name: str) -> str:
    return f"PET_{name.replace('-', '_').upper()}"


def _workers_flags(flags: _Flags) -> None:
    flags.value(
        "nproc-per-node",
        "1",
        "N",
        "workers on this machine: a number, auto, cpu, gpu or xpu (default 1)",
        "-n",
    )
    flags.switch("module", "the target is a module, run as python -m does", "-m")
    flags.switch("no-python", "the target is a command, not a Python script")
    flags.switch("run-path", "overrides --no-python")
    flags.value(
        "role",
        "default",
        "NAME",
        "name of the workers, for prefixes and environment (default: default)",
    )
    mpi = (
        "start the workers with mpirun, which replaces this launcher: output, failures and signals"
        " are mpirun's"
    )
    flags.switch("mpi", mpi)
    replaced = (
        "torch's backends that mean unicoll's in the workers, gloo, nccl or gloo,nccl: sets"
        " UNICOLL_REPLACE"
    )
    flags.value("replace-backend", "", "LIST", replaced)
    binding = f"bind each worker to the CPUs near its GPU: {', '.join(BINDINGS)}"
    flags.value("numa-binding", None, "MODE", binding)
    flags.switch("virtual-local-rank", "LOCAL_RANK is 0, and each worker sees its own GPU only")


def _nodes_flags(flags: _Flags) -> None:
    flags.value("nnodes", "1", "N", "number of nodes, each with its own launcher (default 1)")
    ranks = (
        "this node's number; default: 0 on the host of the endpoint, the others in the order of"
        " their start"
    )
    flags.value("node-rank", None, "K", ranks, type=int)
    flags.value("master-addr", "127.0.0.1", "HOST", "address of node 0")
    port = "port on node 0 (default: any free one on one node, else 29500)"
    flags.value("master-port", None, "PORT", port, type=int)
    flags.value("rdzv-endpoint", "", "HOST:PORT", "alternative to the two flags above")
    conf = (
        "join_timeout=S: seconds that this node waits for the others (default 600); the rest has no"
        " effect"
    )
    flags.value("rdzv-conf", "", "CONF", conf)
    flags.value("rdzv-id", "none", "NAME", "name of the job")
    flags.switch("standalone", "one node, with a unique name for the job")


def _output_flags(flags: _Flags) -> None:
    flags.switch("no-prefix", "do not put [role rank]: before the workers' lines")
    flags.value(
        "local-ranks-filter", "", "LIST", "show only these local ranks' output, for example 0,2"
    )
    flags.value("log-dir", None, "DIR", "directory for log files, one subdirectory per launch")
    streams = (
        "write to log files only: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank, 0:3,1:1"
    )
    flags.value("redirects", "0", "STREAMS", streams, "-r")
    flags.value("tee", "0", "STREAMS", "write to log files and to the console, same format", "-t")
    copies = (
        "copy lines with one of these texts, TEXT,TEXT, to filtered_{}.log beside the log files"
    )
    flags.value("duplicate-stdout-filters", "", "LIST", copies.format("stdout"))
    flags.value("duplicate-stderr-filters", "", "LIST", copies.format("stderr"))


def _end_flags(flags: _Flags) -> None:
    restarts = (
        "after a failure start all workers again, at most N times (default 0; with --replace 10 for"
        " each node)"
    )
    flags.value("max-restarts", None, "N", restarts, type=int)
    flags.switch(
        "replace",
        "start only the worker again that has failed; the program calls unicoll.recover()",
    )
    grace = "seconds that the others have to fail by themselves after the first failure (default 5)"
    flags.value("grace", 5.0, "S", grace, type=float)
    flags.value(
        "shutdown-timeout", None, "S", "seconds from SIGTERM to SIGKILL (default 30)", type=float
    )
    signals = (
        "signals that end the job, forwarded to the workers (default SIGTERM,SIGINT,SIGHUP,SIGQUIT)"
    )
    flags.value("signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "LIST", signals)
    interval = "longest time in seconds between two checks of the workers (default 0.1)"
    flags.value("monitor-interval", 0.1, "S", interval, type=float)


def _other_flags(flags: _Flags) -> None:
    flags.value("rdzv-backend", "static", "NAME", "static or c10d, which mean the same")
    flags.value("event-log-handler", "null", "NAME", "only null")
    flags.value("local-addr", None, "HOST", "no effect")
    flags.value("start-method", "spawn", "NAME", "no effect: workers are always new processes")
    flags.value("logs-specs", None, "", argparse.SUPPRESS)
