"""``UNICOLL_REPLACE``: torch's names of backends that mean unicoll's, in programs that do not know of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.programs import python
from tests.support.ranks import ROOT, reserved_port
from unicoll.errors import DistArgumentError

pytest.importorskip("torch")
from unicoll.torch_plugin import replaced_backends

pytestmark = pytest.mark.torch

PROGRAM = """
import sys, torch, torch.distributed as dist

dist.init_process_group(*sys.argv[1:])
rank = dist.get_rank()
world = dist.group.WORLD
say = lambda *words: sys.stdout.write(" ".join(map(str, (rank, *words))) + "\\n")
x = torch.full((3,), 1.0 + rank)
dist.all_reduce(x)
same, other, named = dist.new_group(), dist.new_group([1], backend="gloo"), dist.new_group(backend="gloo")
dist.barrier(same)
dist.monitored_barrier(named)
for group in (world, same, named, *([other] if rank == 1 else [])):
    say(type(group).__name__, dist.get_backend(group), group.name(), group.size())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
model(x[:1] * (1 + rank)).backward()
say("gradient", model.module.weight.grad.item())
say(x.tolist(), dist.get_backend_config(world), world._get_backend(torch.device("cpu")).options._timeout)
if "unicoll.torch_plugin" in sys.modules:
    say(sys.modules["unicoll.torch_plugin"].explain().splitlines()[0])
del model, world, same, other, named, group
dist.destroy_process_group()  # without it the threads of torch's Gloo may end the process with std::terminate
"""
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--nproc-per-node", "2", "--master-port"),
    "unirun": ("unicoll.run", "--no-prefix", "-n", "2", "--master-port"),
}
NOTE = "UNICOLL_REPLACE=gloo: in torch.distributed 'gloo' means 'unicoll-gloo'"


def run(folder: Path, installed: Path, launcher: str, *words: str, **variables: str) -> tuple[list[str], str]:
    """(sorted output lines, standard error) of two ranks."""
    (folder / "program.py").write_text(PROGRAM)
    module, *flags = LAUNCHERS[launcher]
    with reserved_port() as port:
        done = python(
            "-m",
            module,
            *flags,
            str(port),
            *words,
            PYTHONPATH=os.pathsep.join([str(ROOT), str(installed)]),
            OMP_NUM_THREADS="1",
            **variables,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines()), done.stderr


def expected(rank: int, asked: str, config: str) -> list[str]:
    groups = [(asked, 2), (asked, 2), ("gloo", 2), *([("gloo", 1)] if rank == 1 else [])]
    own = "unicoll-gloo" if asked == "gloo" else "cpu:unicoll-gloo"
    return [
        *(
            f"{rank} TorchProcessGroup {name} {own if name == asked else 'unicoll-gloo'} {size}"
            for name, size in groups
        ),
        # The mean of 3 and 6, the inputs of the two ranks.
        f"{rank} gradient 4.5",
        f"{rank} [3.0, 3.0, 3.0] {config} 0:30:00",
        f"{rank} {NOTE}",
    ]


@pytest.mark.every(n=6)
@pytest.mark.parametrize(
    ("words", "asked", "config"),
    [(["gloo"], "gloo", "gloo"), ([], "undefined", "cpu:gloo"), (["cpu:gloo"], "cpu:gloo", "cpu:gloo")],
)
@pytest.mark.parametrize("launcher", [*LAUNCHERS])
def test_groups_are_unicolls_and_keep_the_name(
    launcher: str, words: list[str], asked: str, config: str, tmp_path: Path, installed: Path
) -> None:
    import torch.distributed as dist

    if asked == "gloo":
        config = str(dist.distributed_c10d.BackendConfig(dist.Backend("gloo")))
    lines, errors = run(
        tmp_path, installed, launcher, str(tmp_path / "program.py"), *words,
        UNICOLL_REPLACE="gloo", UNICOLL_LOG_LEVEL="info",
    )  # fmt: skip
    assert lines == sorted(expected(0, asked, config) + expected(1, asked, config))
    # The order of two processes' lines is unknown; each logs the note, then that it joins.
    logged = [line.partition("INFO ")[2] for line in errors.splitlines() if "INFO unicoll" in line]
    assert logged.count(f"unicoll.torch: {NOTE}") == 2
    assert logged[0] == f"unicoll.torch: {NOTE}"


@pytest.mark.every(n=2)
@pytest.mark.parametrize("flag", [True, False])
def test_the_launchers_flag(flag: bool, tmp_path: Path, installed: Path) -> None:
    flags = ["--replace-backend", "gloo"] if flag else []
    lines, _ = run(tmp_path, installed, "unirun", *flags, str(tmp_path / "program.py"), "gloo")
    assert f"0 {'TorchProcessGroup gloo unicoll-gloo' if flag else 'ProcessGroup gloo gloo'} 2" in lines
    assert any(NOTE in line for line in lines) == flag


@pytest.fixture
def installed_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced_backends, "_installed", True)


@pytest.mark.usefixtures("installed_in_torch")
@pytest.mark.parametrize(
    ("value", "asked", "meant"),
    [
        ("", "gloo", "gloo"),
        ("gloo", "gloo", "unicoll-gloo"),
        (" GLOO ", "Gloo", "unicoll-gloo"),
        ("gloo", "nccl", "nccl"),
        ("nccl", "nccl", "unicoll-nccl"),
        ("gloo", "undefined", "cpu:unicoll-gloo"),
        ("nccl", "undefined", "undefined"),
        ("gloo,nccl", "cpu:gloo,cuda:nccl", "cpu:unicoll-gloo,cuda:unicoll-nccl"),
        ("nccl,gloo", "cuda:nccl", "cuda:unicoll-nccl"),
        ("gloo", "cpu:gloo,cuda:unicoll-nccl", "cpu:unicoll-gloo,cuda:unicoll-nccl"),
        ("gloo", "unicoll", "unicoll"),
    ],
)
def test_what_a_name_means(value: str, asked: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICOLL_REPLACE", value)
    assert replaced_backends.meaning(asked) == meant


@pytest.mark.usefixtures("installed_in_torch")
def test_a_group_with_another_backend_stays_torchs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UNICOLL_REPLACE", "gloo")
    assert replaced_backends.meaning("cpu:gloo,cuda:nccl") == "cpu:gloo,cuda:nccl"
    assert [record.getMessage() for record in caplog.records] == [
        "UNICOLL_REPLACE=gloo: a group with the backends 'cpu:gloo,cuda:nccl' is torch's own, because"
        " nccl is not replaced"
    ]


@pytest.mark.usefixtures("installed_in_torch")
def test_an_unknown_name_in_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICOLL_REPLACE", "ucc")
    with pytest.raises(
        DistArgumentError, match=r"^UNICOLL_REPLACE=ucc has a name that is none of gloo, nccl$"
    ):
        replaced_backends.meaning("gloo")
