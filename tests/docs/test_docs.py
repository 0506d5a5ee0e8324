"""Checks the documentation: every public name documents its arguments and errors, and every marked code block runs.

In README.md and docs/*.md a block whose first line is ```` ```python run ```` runs on two ranks of our launcher;
``run=4`` on four, ``run=1`` in one process without the launcher. ```` ```sh run ```` runs in bash. ``exit=137`` expects
that exit code, ``torch``, ``jax``, ``ray`` and ``distributed`` need these packages. A ```` ```text ```` block right
below is what is printed, in any order of lines, with ``...`` for anything. The code of a block whose first line has
``file=NAME`` is a file of that name for the blocks of its page that are run.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import unicoll as dist
from tests.support.pages import Block, blocks, is_run
from tests.support.ranks import ROOT, environment, reserved_port
from unicoll.__main__ import PROGRAM

HELLO = ROOT / "examples" / "hello.py"
COOKBOOK = ROOT / "docs" / "cookbook.md"
README = ROOT / "README.md"
PAGES = [page for page in (README, *sorted((ROOT / "docs").glob("*.md"))) if page.exists()]
SHOW = "import unicoll as dist\ndist.init_process_group()\nprint(dist.explain())\n"

# --- names ---------------------------------------------------------------------------------------------------------

CLASSES = (
    dist.Backend,
    dist.DeviceMesh,
    dist.FileStore,
    dist.HashStore,
    dist.P2POp,
    dist.PrefixStore,
    dist.ProcessGroup,
    dist.ReduceOp,
    dist.Store,
    dist.TCPStore,
    dist.Work,
)
ARRAYS = {
    "tensor",
    "tensors",
    "tensor_list",
    "output",
    "outputs",
    "input",
    "inputs",
    "output_tensor",
    "input_tensor",
    "output_tensor_list",
    "input_tensor_list",
    "output_tensor_lists",
    "gather_list",
    "scatter_list",
    "input_list",
    "output_list",
}
SIZES = re.compile(r"shape|size|element|length|\bas long\b|as large", re.I)
FAILURE = re.compile(r"\braises?\b|Error\b", re.I)
REFERENCE = re.compile(r":(?:func|meth|class):`~?([\w.]+)`")
CANNOT_FAIL = {
    "explain",
    "get_pg_count",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "supported_reductions",
}


def functions() -> list[str]:
    return [name for name in dist.__all__ if inspect.isfunction(getattr(dist, name))]


def methods() -> list[tuple[type, str]]:
    return [
        (cls, name)
        for cls in CLASSES
        for name, member in inspect.getmembers(cls)
        if not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, property))
        if cls is not dist.Backend or name not in vars(str)
    ]


def doc(thing: Any) -> str:
    return inspect.getdoc(thing) or ""


def with_references(text: str, owner: type | None = None) -> str:
    """A docstring together with those that it refers to: functions of the package, methods of its class."""
    found = [text]
    for reference in REFERENCE.findall(text):
        name = reference.rpartition(".")[2]
        for place in (dist, owner):
            if hasattr(place, name):
                found.append(doc(getattr(place, name)))
    return "\n".join(found)


@pytest.mark.parametrize("name", dist.__all__)
def test_every_name_is_documented(name: str) -> None:
    thing = getattr(dist, name)
    if inspect.isroutine(thing) or inspect.isclass(thing) or inspect.ismodule(thing):
        assert len(doc(thing)) >= 20
        assert thing.__doc__, f"{name} has its docstring from a base class"


def test_every_method_is_documented() -> None:
    listed = methods()
    assert len(listed) > 100
    assert [f"{cls.__name__}.{name}" for cls, name in listed if len(doc(getattr(cls, name))) < 15] == []


def test_array_arguments_document_their_sizes() -> None:
    silent = []
    for name in functions():
        thing = getattr(dist, name)
        if ARRAYS & set(inspect.signature(thing).parameters) and not SIZES.search(
            with_references(doc(thing))
        ):
            silent.append(name)
    for name, method in inspect.getmembers(dist.ProcessGroup, inspect.isfunction):
        if name.startswith("_") or not ARRAYS & set(inspect.signature(method).parameters):
            continue
        # the function of the same name does nothing but call the method
        if not SIZES.search(with_references(doc(method), dist.ProcessGroup) + doc(getattr(dist, name, None))):
            silent.append(f"ProcessGroup.{name}")
    assert silent == []


def test_errors_are_documented() -> None:
    silent = []
    for name in functions():
        if name not in CANNOT_FAIL and not FAILURE.search(with_references(doc(getattr(dist, name)))):
            silent.append(name)
    for cls in CLASSES:
        if cls in (
            dist.ReduceOp,
            dist.Backend,
        ):  # they compute nothing that can fail but register_backend
            continue
        texts = [doc(base) for base in cls.__mro__ if base.__module__.startswith("unicoll")]
        texts += [doc(vars(cls).get("__init__")), *(doc(getattr(cls, n)) for c, n in methods() if c is cls)]
        if not FAILURE.search("\n".join(texts)):
            silent.append(cls.__name__)
    assert silent == []


def test_names_that_cannot_fail_exist() -> None:
    assert set(dist.__all__) >= CANNOT_FAIL


# --- blocks --------------------------------------------------------------------------------------------------------


RUN = [
    pytest.param(block, marks=pytest.mark.every(n=0) if "slow" in block.options else ())
    for page in PAGES
    for block in blocks(page)
    if is_run(block)
]
"""The option ``slow`` is for blocks whose output depends on how long something takes: they are not in the short run."""
FILES = [block for page in PAGES for block in blocks(page) if block.value("file")]


def command(block: Block, folder: Path, port: int) -> list[str]:
    code = block.code.replace("29500", str(port))
    if block.language == "sh":
        (folder / "commands.sh").write_text(code)
        return ["bash", "-euo", "pipefail", "commands.sh"]
    (folder / "program.py").write_text(code)
    ranks = block.option("run", 2)
    launcher = ["-m", "unicoll.run", "--nproc-per-node", str(ranks), "--no-prefix"] if ranks > 1 else []
    return [sys.executable, *launcher, "program.py"]


def user_environment(folder: Path) -> dict[str, str]:
    """The environment of a user: its ``python``, ``unicoll``, ``unirun`` and ``torchrun`` are this interpreter's."""
    bin = folder / "bin"
    bin.mkdir()
    scripts = {"python": "", "unirun": "-m unicoll.run", "torchrun": "-m torch.distributed.run"}
    scripts["unicoll"] = f'"{PROGRAM}"'
    for name, arguments in scripts.items():
        (bin / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (bin / name).chmod(0o755)
    variables = {"PYTHONPATH": str(ROOT), "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"}
    found = environment(variables | {"TMPDIR": str(folder)})
    del found["UNICOLL_SOCKET_IFNAME"]
    found.pop("PYTHONUNBUFFERED", None)  # it splits the lines of processes that share a terminal
    return found


def differences(expected: str, printed: str) -> list[str]:
    """Expected lines that were not printed, and printed lines that were not expected."""
    # torchrun repeats its prefix within a line that it has read in two parts
    left = [re.sub(r"(?<!^)\[default\d+\]:", "", line) for line in printed.splitlines()]
    found = []
    for line in expected.splitlines():
        pattern = re.compile(".*".join(map(re.escape, line.split("..."))))
        hit = next((i for i, text in enumerate(left) if pattern.fullmatch(text)), None)
        if hit is None:
            found.append(f"not printed: {line}")
        else:
            del left[hit]
    return found + [f"not expected: {line}" for line in left]


@pytest.mark.every(n=16)
@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_block_prints_its_output(block: Block, tmp_path: Path) -> None:
    for package in {"torch", "jax", "ray", "distributed"} & set(block.options):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if block.language == "sh" and shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    shutil.copy(HELLO, tmp_path)
    (tmp_path / "show.py").write_text(SHOW)
    for other in FILES:
        if other.page == block.page:
            (tmp_path / other.value("file")).write_text(other.code)
    with (
        reserved_port() as port,
        # Ray's sockets need a short path; its last processes may write while the folder is removed
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as short,
    ):
        ended = subprocess.run(
            command(block, tmp_path, port),
            cwd=tmp_path,
            env=user_environment(tmp_path) | {"RAY_TMPDIR": short, "RAY_AUTH_MODE": "disabled"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert ended.returncode == block.option("exit", 0), ended.stderr
    if block.output is not None:
        found = differences(block.output, ended.stdout)
        assert not found, "\n".join([*found, ended.stdout, ended.stderr])


DUMPED = re.compile(r"rank \d: the flight recorder's dump")
DUMPS = re.compile(r"to read their dumps: unicoll trace (\S+)")


def test_every_block_of_the_cookbook_is_run() -> None:
    code = [block for block in blocks(COOKBOOK) if block.language in ("python", "sh", "console", "bash")]
    assert len(code) > 20
    shown = [block for block in code if not block.value("file")]
    assert [str(block) for block in shown if not is_run(block) or block.output is None] == []


def test_the_example_is_the_readmes() -> None:
    readme = [block for block in blocks(README) if block.language == "python"]
    assert ast.unparse(ast.parse(HELLO.read_text())) in [ast.unparse(ast.parse(b.code)) for b in readme]


def test_the_readme_finds_the_line_of_a_hang(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (program,) = (b for b in FILES if b.page == README and b.value("file") == "hang.py")
    (start,) = (
        b.code.split(" &")[0].split() for b in blocks(README) if b.code.startswith("unirun -n 2 hang.py")
    )
    (shown,) = (b for b in blocks(README) if b.code.startswith("unicoll trace"))
    (tmp_path / "hang.py").write_text(program.code)
    log, user = tmp_path / "log", {"cwd": tmp_path, "env": user_environment(tmp_path)}
    requests, found, printed = 0, ["not printed: anything"], ""
    with (
        log.open("wb") as output,
        subprocess.Popen(start, stdout=output, stderr=output, **user) as launcher,
    ):
        deadline = time.monotonic() + 300
        while found and launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            text = log.read_text()
            if text.count("step 1") < 2 or len(DUMPED.findall(text)) < 2 * requests:
                continue
            if (place := DUMPS.search(text)) is not None:
                command = [*shown.code.split()[:2], place[1]]
                printed = subprocess.run(command, **user, capture_output=True, text=True, check=False).stdout
                found = differences(shown.output or "", printed.partition("\n")[0])
            launcher.send_signal(signal.SIGUSR1)  # again if rank 0 did not wait yet
            requests += 1
        launcher.terminate()
    assert not found, "\n".join([*found, printed, log.read_text()])


def test_links_have_targets() -> None:
    lost = []
    for page in PAGES:
        text = page.read_text()
        anchors = {
            re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in re.findall(r"^#+ (.*)$", text, re.M)
        }
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            there = path.startswith(("http:", "https:")) or (page.parent / path).exists()
            if not there or (not path and anchor not in anchors):
                lost.append(f"{page.name}: {target}")
    assert lost == []
