"""Programs under mpirun: rendezvous, choice of backend, and initialisation of MPI."""

from __future__ import annotations

import socket
import sys
import textwrap
from pathlib import Path

import pytest

from tests.mpi.mpi_library import command
from tests.mpi.mpi_ranks import (
    Ended,
    library,
    mpirun,
    run_alone,
    run_script,
    sorted_lines,
    started,
    try_script,
    unavailable_reason,
)
from tests.support import one_program

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)


# --- joining --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_the_program_of_all_backends(size: int) -> None:
    ended = mpirun(size, "-W", "error", "-m", one_program.__name__, "mpi")
    assert (ended.returncode, ended.stderr) == (0, "")
    one_program.check(ended.stdout, size)


def test_importing_does_not_import_mpi(script: Path) -> None:
    source = """
        import sys
        import unicoll
        print(unicoll.explain().count("mpi") > 0, "mpi4py.MPI" in sys.modules)
    """
    assert sorted_lines(run_script(script, source)) == ["True False"] * 2


@pytest.mark.parametrize("size", [1, 3])
def test_no_arguments_are_needed(size: int, script: Path) -> None:
    source = """
        import numpy as np
        import unicoll as dist
        dist.init_process_group()
        x = np.full(3, dist.get_rank() + 1)
        dist.all_reduce(x)
        print(dist.get_rank(), dist.get_world_size(), dist.get_backend(), x)
        print("local rank", dist.get_node_local_rank())
        if dist.get_rank() == 0:
            print(dist.explain())
        dist.destroy_process_group()
    """
    output = sorted_lines(run_script(script, source, size))
    total = size * (size + 1) // 2
    for rank in range(size):
        assert f"{rank} {size} gloo [{total} {total} {total}]" in output
        assert f"local rank {rank}" in output  # of some rank: Open MPI numbers them by core, not by rank
    text = "\n".join(output)
    assert f"rank 0 of {size}: from" in text
    where = f"all {size} ranks are on this host" if size > 1 else "there is one rank"
    assert f"cpu arrays: backend unicoll (gloo): an MPI launcher started this process, but {where}" in text


@pytest.mark.parametrize("backend", ["", "gloo"])
def test_ranks_on_several_hosts_take_mpi(backend: str, script: Path) -> None:
    """With the launcher's variables of three hosts of one rank each; for the store, if not for the arrays."""
    rank, size = library().local_rank, library().local_size
    source = f"""
        import os
        import numpy as np
        os.environ.update({rank}="0", {size}="1", UNICOLL_SOCKET_IFNAME="lo")
        import unicoll as dist
        dist.init_process_group({backend!r} or None)
        x = np.ones(2)
        dist.all_reduce(x)
        said = dist.explain()
        assert "store: over MPI" in said, said
        print(dist.get_backend(), x, "cpu arrays: backend mpi: started by an MPI launcher" in said)
    """
    assert (
        sorted_lines(run_script(script, source, 3))
        == ["gloo [3. 3.] False" if backend else "mpi [3. 3.] True"] * 3
    )


def test_a_group_over_mpi_with_another_default_backend(script: Path) -> None:
    source = """
        import numpy as np
        import unicoll as dist
        dist.init_process_group()
        group = dist.new_group(backend="mpi")
        x = np.ones(2)
        dist.all_reduce(x)
        dist.all_reduce(x, group=group)
        print(dist.get_backend(), dist.get_backend(group), x)
    """
    assert sorted_lines(run_script(script, source)) == ["gloo mpi [4. 4.]"] * 2


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    "call",
    [
        "dist.init_process_group('mpi', rank=0, world_size=0)",  # as in torch's tutorial: both are ignored
        "dist.init_process_group('mpi')",
        "dist.init_process_group('MPI', timeout=60)",
        "dist.init_process_group('cpu:mpi')",
    ],
)
def test_backend_mpi(call: str, script: Path) -> None:
    source = f"""
        import numpy as np
        import unicoll as dist
        {call}
        x = np.ones(2)
        dist.all_reduce(x)
        print(dist.get_rank(), dist.get_world_size(), dist.get_backend_config(), x)
    """
    assert sorted_lines(run_script(script, source, 3)) == [f"{r} 3 cpu:mpi [3. 3.]" for r in range(3)]


@pytest.mark.every(n=4)
@pytest.mark.parametrize("backend", ["mpi", "gloo", None])
@pytest.mark.parametrize("place", ["file", "tcp", "store", "env"])
def test_explicit_stores_replace_the_store_over_mpi(
    place: str, backend: str | None, script: Path, tmp_path: Path, port: int
) -> None:
    arguments = {
        "file": f"init_method='file://{tmp_path}/store'",
        "tcp": f"init_method='tcp://127.0.0.1:{port}'",
        "store": f"store=dist.TCPStore('127.0.0.1', {port}, size, rank == 0), rank=rank, world_size=size",
        "env": "init_method='env://'",
    }[place]
    source = f"""
        import os
        import numpy as np
        import unicoll as dist
        rank = int(os.environ[{library().rank!r}])
        size = 3
        dist.init_process_group({backend!r}, {arguments})
        assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
        x = np.ones(2)
        dist.all_reduce(x)
        print(dist.get_backend(), x)
        if rank == 0 and {place != "env"!r}:
            print(*[l for l in dist.explain().splitlines() if l.startswith("store: ")])
        dist.destroy_process_group()
    """
    output = sorted_lines(run_script(script, source, 3))
    assert output[:3] == [f"{backend or 'gloo'} [3. 3.]"] * 3
    if place == "file":
        assert str(tmp_path / "store") in output[3]
    elif place == "tcp":
        assert str(port) in output[3]


def test_two_simultaneous_jobs_do_not_interfere(script: Path) -> None:
    source = """
        import sys
        import numpy as np
        import unicoll as dist
        dist.init_process_group()
        for i in range(200):
            x = np.full(500, float(sys.argv[1]))
            dist.all_reduce(x)
            assert (x == 2 * float(sys.argv[1])).all()
        print("well")
    """
    script.write_text(textwrap.dedent(source))
    with started(2, str(script), "1") as one, started(2, str(script), "10") as two:
        assert (one.wait(), two.wait()) == (0, 0)
        assert one.output() == two.output() == "well\nwell\n"


def test_joining_again(script: Path) -> None:
    source = """
        import numpy as np
        import unicoll as dist
        for i in range(5):
            dist.init_process_group("mpi" if i % 2 else None)
            group = dist.new_group()
            x = np.ones(2)
            dist.all_reduce(x, group=group)
            dist.all_reduce(x)
            dist.destroy_process_group()
            assert not dist.is_initialized()
        print(x)
    """
    assert sorted_lines(run_script(script, source, 2)) == ["[4. 4.]"] * 2


# --- jobs that MPI cannot serve-----------------------------------------------------------------------------------

COMPLAIN = """
import sys
import unicoll as dist
try:
    dist.init_process_group("mpi", timeout=30)
except dist.DistError as e:
    print(f"{type(e).__name__}: {e}", flush=True)
else:
    print(dist.get_rank(), dist.get_world_size(), flush=True)
"""


def test_our_own_launcher_starts_mpirun(tmp_path: Path, port: int) -> None:
    """In a job of another launcher, too, which uses the port."""
    words = ("-m", "unicoll.run", "--mpi", "--nproc-per-node", "2")
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with socket.create_server(("127.0.0.1", port)):
        ended = run_alone(COMPLAIN, tmp_path, *words, **variables)
    assert sorted(ended.stdout.splitlines()) == ["0 2", "1 2"], ended


def test_started_by_our_own_launcher_mpi_is_refused(tmp_path: Path) -> None:
    ended = run_alone(COMPLAIN, tmp_path, "-m", "unicoll.run", "--nproc-per-node", "2", "--no-prefix")
    output = ended.stdout.splitlines()
    assert len(output) == 2, ended
    for line in output:
        assert "Error: " in line
        assert "mpirun" in line


def test_started_by_torchrun_mpi_is_refused(tmp_path: Path, port: int) -> None:
    torchrun = {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ended = run_alone(COMPLAIN, tmp_path, **torchrun)
    assert "Error: " in ended.stdout, ended
    assert "torchrun" in ended.stdout
    assert "mpirun" in ended.stdout


def test_variables_of_another_launcher_are_ignored(script: Path, port: int) -> None:
    """Of the shell in which mpirun is started."""
    stale = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert sorted_lines(run_script(script, COMPLAIN, env=stale)) == ["0 2", "1 2"]


def test_mpirun_in_a_worker_of_our_launcher(tmp_path: Path) -> None:
    inner = tmp_path / "inner.py"
    inner.write_text(
        "import pathlib, unicoll as dist\n"
        "dist.init_process_group('mpi', timeout=30)\n"
        f"pathlib.Path({str(tmp_path)!r}, f'rank {{dist.get_rank()}}').write_text(str(dist.get_world_size()))\n"
    )
    source = f"""
import subprocess
import unicoll as dist
dist.init_process_group("gloo", timeout=60)
if dist.get_rank() == 1:
    subprocess.run({command(3, [], [sys.executable, str(inner)])}, check=True, timeout=60)
dist.barrier()
print("done", flush=True)
"""
    ended = run_alone(source, tmp_path, "-m", "unicoll.run", "--nproc-per-node", "2", "--no-prefix")
    assert ended.stdout.split() == ["done"] * 2, ended
    assert [(tmp_path / f"rank {rank}").read_text() for rank in range(3)] == ["3"] * 3


def test_a_subprocess_cannot_join_in_place_of_its_rank(script: Path) -> None:
    source = f"""
import os, subprocess, sys
import unicoll as dist
if len(sys.argv) == 1:
    dist.init_process_group("mpi", timeout=60)
    if dist.get_rank() == 1:
        print(os.getpid(), flush=True)
        subprocess.run([sys.executable, __file__, "inner"], check=True, timeout=60)
    dist.barrier()
else:
    {COMPLAIN.strip().replace(chr(10), chr(10) + "    ")}
"""
    pid, refusal = run_script(script, source).stdout.splitlines()
    assert refusal.startswith("DistArgumentError: rank 1 of 2 (")
    assert f"has joined already: process {pid} (" in refusal


def test_the_mpirun_of_another_library_is_detected(tmp_path: Path) -> None:
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    prte = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    ended = run_alone(COMPLAIN, tmp_path, **(hydra if library().name == "openmpi" else prte))
    assert "Error: " in ended.stdout, ended
    for word in ("rank 1 of 2", "rank 0 of 1", library().title):
        assert word in ended.stdout


def test_a_process_alone_is_a_world_of_one(tmp_path: Path) -> None:
    ended = run_alone(COMPLAIN, tmp_path)
    assert (ended.stdout, ended.stderr) == ("0 1\n", ""), ended


def test_a_library_that_cannot_be_loaded_is_the_reason(tmp_path: Path) -> None:
    ended = run_alone(COMPLAIN, tmp_path, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert "BackendUnavailableError: backend 'mpi': " in ended.stdout, ended
    assert "/nowhere/libmpi.so" in ended.stdout


def test_without_a_library_gloo_is_chosen_with_the_reason(script: Path) -> None:
    source = """
        import unicoll as dist
        dist.init_process_group()
        print(dist.get_backend(), "/nowhere/libmpi.so" in dist.explain())
        dist.destroy_process_group()
        dist.init_process_group()
    """
    check_the_fallback(
        try_script(script, source, 3, env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}), "/nowhere/libmpi.so"
    )


def test_without_mpi4py_gloo_is_chosen_with_the_reason(script: Path) -> None:
    source = """
        import sys
        sys.modules["mpi4py"] = None  # as if it were not installed
        import unicoll as dist
        dist.init_process_group()
        print(dist.get_backend(), "mpi4py is not installed" in dist.explain())
        dist.destroy_process_group()
        dist.init_process_group()
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        dist.destroy_process_group()
        try:
            dist.init_process_group("mpi")
        except dist.BackendUnavailableError as e:
            print(e)
    """
    ended = try_script(script, source, 3)
    refused = [
        line for line in sorted_lines(ended) if line.startswith("backend 'mpi': mpi4py is not installed")
    ]
    assert len(refused) == 3
    check_the_fallback(ended, "mpi4py is not installed (pip install mpi4py")


def check_the_fallback(ended: Ended, why: str) -> None:
    """Three ranks chose gloo with the reason, and the job warned once."""
    assert ended.returncode == 0, ended
    assert [line for line in sorted_lines(ended) if line.startswith("gloo")] == ["gloo True"] * 3
    warned = ended.stderr.splitlines()
    assert len(warned) == 1, ended
    assert "started this job, but MPI cannot be used" in warned[0]
    assert why in warned[0]


# --- with mpi4py ------------------------------------------------------------------------------------------------


def test_mpi_that_the_program_has_initialised_is_used_and_not_finalised(script: Path) -> None:
    source = """
        from mpi4py import MPI
        import numpy as np
        import unicoll as dist
        world = MPI.COMM_WORLD
        dist.init_process_group("mpi")
        other = (world.rank + 1) % 2
        mine = world.irecv(source=other, tag=0)     # the library's own messages must not match these
        x = np.ones(3)
        dist.all_reduce(x)
        dist.isend(x, other).wait()
        dist.recv(x, other)
        world.send("from the program", other, tag=0)
        assert mine.wait() == "from the program"
        dist.destroy_process_group()
        assert not MPI.Is_finalized()
        print(world.allreduce(1), x)
    """
    assert sorted_lines(run_script(script, source)) == ["2 [2. 2. 2.]"] * 2


def test_mpi_that_the_library_has_initialised_can_be_used(script: Path) -> None:
    source = """
        import unicoll as dist
        dist.init_process_group()
        from mpi4py import MPI
        assert MPI.Is_initialized()
        dist.destroy_process_group()
        print(MPI.COMM_WORLD.allreduce(1))
    """
    assert sorted_lines(run_script(script, source)) == ["2"] * 2


def test_mpi_that_is_finalised_already_is_refused(script: Path) -> None:
    source = "from mpi4py import MPI\nMPI.Finalize()\n" + COMPLAIN
    for line in sorted_lines(run_script(script, source)):
        assert "Error: " in line
        assert "finali" in line


@pytest.mark.parametrize("level", ["single", "funneled", "serialized"])
def test_thread_levels_below_multiple(level: str, script: Path) -> None:
    source = f"""
        import mpi4py
        mpi4py.rc.thread_level = {level!r}
        from mpi4py import MPI
        import numpy as np
        import unicoll as dist
        assert MPI.Query_thread() < MPI.THREAD_MULTIPLE
        dist.init_process_group("mpi")
        x = np.ones(3)
        dist.all_reduce(x)
        works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        print(x[0])
        dist.destroy_process_group()
    """
    assert sorted_lines(run_script(script, source, 3)) == ["81.0"] * 3


@pytest.mark.parametrize("level", ["serialized", "funneled", "multiple"])
def test_the_thread_level_can_be_requested(level: str, script: Path) -> None:
    source = """
        import numpy as np
        import unicoll as dist
        dist.init_process_group("mpi")
        x = np.ones(3)
        works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
        dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(np.ones(3), 0)
        for work in works:
            work.wait()
        print(x[0], [line for line in dist.explain().splitlines() if "thread level" in line])
        dist.destroy_process_group()
    """
    output = sorted_lines(run_script(script, source, env={"UNICOLL_MPI_THREAD_LEVEL": level}))
    assert len(output) == 2
    for line in output:
        assert line.startswith("8.0 ")
        assert f"thread level {level}" in line


def test_an_unknown_thread_level_is_refused(tmp_path: Path) -> None:
    ended = run_alone(COMPLAIN, tmp_path, UNICOLL_MPI_THREAD_LEVEL="many")
    assert "UNICOLL_MPI_THREAD_LEVEL=many is none of single, funneled, serialized, multiple" in ended.stdout
