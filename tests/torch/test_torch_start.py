"""torch.distributed programs on unicoll's backends, started by unicoll's launcher and torchrun; all kinds of exit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.programs import python
from tests.support.ranks import ROOT, reserved_port

HERE = Path(__file__).parent

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
c10d = pytest.importorskip("torch.distributed.distributed_c10d")

PROGRAM = str(HERE / "torch_program.py")
OURS = ["-m", "unicoll.run", "--no-prefix", "--nproc-per-node"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node"]
LEFT = ["rank 0 of 2: left []", "rank 1 of 2: left []"]


def launched(
    launcher: list[str],
    *words: str,
    code: int | None = 0,
    env: dict[str, str] | None = None,
    program: str | Path = PROGRAM,
) -> tuple[list[str], str]:
    """(sorted output lines of two ranks, their standard error)."""
    with reserved_port() as port:
        torchrun = ["--master-port", str(port)] if launcher is TORCHRUN else []
        call = [*launcher, "2", *torchrun, program, *words]
        done = python(*call, **{"PYTHONPATH": str(ROOT)} | (env or {}))
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return sorted(done.stdout.splitlines()), done.stderr


@pytest.mark.every(n=2)
@pytest.mark.sampled("backend", "launcher", 1)
@pytest.mark.parametrize("launcher", [OURS, TORCHRUN], ids=["unicoll.run", "torchrun"])
@pytest.mark.parametrize("backend", ["unicoll", "cpu:unicoll-gloo"])
def test_launchers(launcher: list[str], backend: str) -> None:
    lines, _ = launched(launcher, backend, "explain", "torchs", "leave", "again", "leave")
    assert [line for line in lines if "left" in line] == sorted(LEFT * 2)
    assert any(line.startswith("cpu arrays: backend unicoll (gloo)") for line in lines)
    assert any("'world' of 2: unicoll (gloo) over shared memory" in line for line in lines)
    secret = next(line for line in lines if line.startswith("secret"))
    assert ("UNICOLL_SECRET" in secret) == (launcher is OURS)
    store = next(line for line in lines if line.startswith("store"))
    assert ("torch's tcp://" in store) == (launcher is TORCHRUN)


def test_detailed_debugging() -> None:
    lines, _ = launched(
        OURS, "unicoll", "detail", "mismatch", code=None, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    )
    assert [line.split(":")[1] for line in lines if "Mismatch" in line] == [" CollectiveMismatchError"] * 2
    places = [line for line in lines if "torch_program.py" in line]
    assert len(places) == 4  # each rank names the lines of both ranks in the user's program
    assert all("all_reduce(float32[" in line for line in places)


def test_a_program_without_destroy_process_group() -> None:
    lines, errors = launched(OURS, "unicoll-gloo")
    assert lines == []
    assert errors == ""


ALONE = """
import os, sys, torch, torch.distributed as dist, unicoll.torch_plugin

dist.init_process_group("unicoll")
if "pair" in sys.argv:
    pair = dist.new_group([0, 1])
    dist.broadcast(torch.ones(1), 0, group=pair)
    dist.destroy_process_group(pair)
if os.fork() == 0:
    sys.exit()
os.wait()
if "destroy" in sys.argv:
    dist.destroy_process_group()
if "raise" in sys.argv:
    raise ValueError("an error of the program")
"""


@pytest.mark.every(n=2)
@pytest.mark.parametrize(("words", "warns"), [("", 1), ("destroy", 1), ("pair destroy", 0), ("raise", 0)])
def test_ranks_that_have_not_communicated_are_told_so_once(words: str, warns: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    _, errors = launched(OURS, *words.split(), program=tmp_path / "train.py", code=None)
    assert errors.count("2 ranks joined, but rank 0 made no call in their groups") == warns, errors


def test_a_dead_rank_is_named() -> None:
    lines, _ = launched(OURS, "unicoll-gloo", "die", code=None)
    assert len(lines) == 1
    assert lines[0].startswith("rank 0: RankLostError: all_reduce(float32[1], SUM)")
    assert "rank 1 (host" in lines[0]
    assert "killed by SIGKILL" in lines[0]  # known from unicoll's launcher


def test_a_missing_rank_is_named() -> None:
    lines, _ = launched(OURS, "unicoll-gloo", "late")
    assert lines[0].startswith(
        "rank 0: OperationTimeoutError: Rank 1 failed to pass monitoredBarrier in 1000 ms: barrier() #2 on"
    )
    assert lines[1].startswith("rank 0: OperationTimeoutError: collective operation timeout : all_reduce(")
    assert "missing: rank 1 (host" in lines[1]


@pytest.mark.skipif(hasattr(c10d, "_abort_backend"), reason="this torch aborts groups of NCCL alone")
def test_abort() -> None:
    lines, _ = launched(OURS, "unicoll-gloo", "abort")
    assert lines == [*LEFT, "rank 1: GroupAbortedError"]


BACKWARD = """
import sys, torch, torch.distributed as dist, unicoll.torch_plugin
dist.init_process_group("unicoll")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
if dist.get_rank() == 1:
    sys.exit(3)
loss = model(torch.ones(3, 4)).sum()
if sys.argv[1:] == ["caught"]:
    import unicoll
    try:
        loss.backward()
    except unicoll.RankLostError as error:
        print(f"caught {type(error).__name__}: rank {error.rank}, context {error.__context__}")
        sys.exit()
loss.backward()
"""
SPAWNED = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp

def main(rank):
    import unicoll.torch_plugin
    os.environ.update(RANK=str(rank))
    dist.init_process_group("unicoll")
    dist.all_reduce(torch.ones(3 + rank))

if __name__ == "__main__":
    mp.spawn(main, nprocs=2)
"""


def test_an_error_in_the_backward_pass_has_no_frames_of_unicoll(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BACKWARD)
    _, errors = launched(
        OURS, program=tmp_path / "train.py", code=None
    )  # 3, or 1 if rank 1 takes long to exit
    assert errors.count("  rank      : 1 (local_rank: 1)") == 1
    assert "RankLostError: all_reduce(float32[10], SUM)" in errors
    assert "At:" not in errors
    assert ".py(" not in errors


def test_an_error_in_the_backward_pass_has_its_type(tmp_path: Path) -> None:
    """torch's C++ code raises a RuntimeError with its text."""
    (tmp_path / "train.py").write_text(BACKWARD)
    lines, errors = launched(OURS, "caught", program=tmp_path / "train.py", code=None)
    assert lines == ["caught RankLostError: rank 1, context None"], errors


def test_an_error_under_torchs_spawn_has_no_frames_of_unicoll(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNED)
    with reserved_port() as port:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        done = python(tmp_path / "train.py", PYTHONPATH=str(ROOT), **where)
    assert "CollectiveMismatchError: the ranks of group 'world' are in different collectives" in done.stderr
    frames = [line for line in done.stderr.splitlines() if line.startswith(f'  File "{ROOT}/unicoll/')]
    assert frames
    assert all(line.startswith(f'  File "{ROOT}/unicoll/torch_plugin/group.py"') for line in frames), (
        done.stderr
    )


def test_an_exception_is_reported_to_the_other_ranks() -> None:
    _, errors = launched(TORCHRUN, "unicoll-gloo", "raise", "mismatch", code=1)
    assert "ValueError: an error of the program" in errors
    assert "terminate called" not in errors


@pytest.mark.every(n=0)
def test_an_unavailable_backend_gives_the_reason() -> None:
    _, errors = launched(OURS, "unicoll-nccl", code=1)
    assert "BackendUnavailableError: backend 'nccl'" in errors


def test_importing_unicoll_imports_no_torch() -> None:
    source = "import sys, unicoll; print('torch' in sys.modules)"
    done = python("-c", source)
    assert (done.returncode, done.stdout) == (0, "False\n")


@pytest.mark.parametrize("backend", ["'gloo'", ""])
def test_env_init_of_other_backends_is_unchanged(backend: str) -> None:
    source = (
        "import torch.distributed as dist, unicoll.torch_plugin\n"
        f"try: dist.init_process_group({backend})\nexcept ValueError as e: print(e)"
    )
    done = python("-c", source)
    assert done.returncode == 0
    assert "environment variable RANK expected, but not set" in done.stdout
    assert ("backend='unicoll' selects unicoll's" in done.stderr) == (not backend)


# --- the examples ---------------------------------------------------------------------------------------------------

LAST_LINES = {"torch_ddp.py": "epoch 3: ", "torch_fsdp2.py": "saved in 2 parts"}
needs_27 = pytest.mark.skipif(torch.__version__ < "2.7", reason="this torch has FSDP2 on GPUs alone")


@pytest.mark.every(n=2)
@pytest.mark.sampled("example", "launcher", 1)
@pytest.mark.parametrize("example", ["torch_ddp.py", pytest.param("torch_fsdp2.py", marks=needs_27)])
@pytest.mark.parametrize("launcher", [OURS, TORCHRUN], ids=["unicoll.run", "torchrun"])
def test_examples(launcher: list[str], example: str) -> None:
    lines, errors = launched(launcher, program=ROOT / "examples" / example)
    assert any(line.startswith(LAST_LINES[example]) for line in lines), errors


def test_the_error_without_a_launcher_names_the_remedy() -> None:
    done = python(PROGRAM, "unicoll", PYTHONPATH=str(ROOT))
    assert done.returncode == 1
    assert "no launcher was recognised" in done.stderr
    assert os.linesep in done.stderr


STOCK = """
import os, sys
import torch
import torch.distributed as dist

assert "unicoll.api.world" not in sys.modules
members = {"rank": int(os.environ["RANK"]), "world_size": 2} if sys.argv[1] == "gloo" else {}
dist.init_process_group(sys.argv[1], **members)
x = torch.ones(3)
dist.all_reduce(x)
assert ("unicoll.torch_plugin" in sys.modules) == (sys.argv[1] != "gloo"), sys.argv
print(f"{dist.get_rank()} {x.tolist()} {type(dist.group.WORLD).__name__}\\n", end="")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("launcher", "backend", "env"),
    [
        (OURS, "unicoll", {}),
        (TORCHRUN, "unicoll-gloo", {}),
        (TORCHRUN, "gloo", {}),
        (OURS, "gloo", {}),
        pytest.param(
            TORCHRUN,
            "unicoll",
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            marks=pytest.mark.skipif(
                not hasattr(c10d.Backend, "_ensure_backend_registered"), reason="since torch 2.14"
            ),
        ),
    ],
)
def test_a_program_that_does_not_import_unicoll(
    launcher: list[str], backend: str, env: dict[str, str], installed: Path, tmp_path: Path
) -> None:
    program = tmp_path / "stock.py"
    program.write_text(STOCK)
    lines, _ = launched(
        launcher,
        backend,
        program=program,
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), str(installed)])} | env,
    )
    kind = "ProcessGroup" if backend == "gloo" else "TorchProcessGroup"
    assert lines == [f"{rank} [2.0, 2.0, 2.0] {kind}" for rank in range(2)]
