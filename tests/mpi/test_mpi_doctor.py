"""``unicoll doctor`` with MPI: alone, under mpirun, and where MPI moves the data."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi.mpi_ranks import Ended, library, mpirun, unavailable_reason
from tests.support.ranks import ROOT, environment

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)

FAMILIES = {"openmpi": "open mpi", "mpich": "mpich", "intelmpi": "intel"}


def doctor(script: Path, size: int, *arguments: str, before: str = "") -> Ended:
    script.write_text(f"import os, sys\n{before}\nfrom unicoll.doctor import main\nsys.exit(main())\n")
    return mpirun(size, "-W", "error", str(script), *arguments)


def test_alone_it_starts_mpi_in_another_process_and_reports_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "unicoll.doctor", "--json", "--deadline", "60"],
        cwd=ROOT,
        env=environment(library().variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stderr == ""
    mpi = json.loads(done.stdout)["sections"]["mpi"]
    assert mpi["library"].startswith(library().title)
    assert mpi["family"] == mpi["mpirun_family"] == FAMILIES[library().name]
    assert Path(mpi["mpirun"]).parent == Path(library().mpirun).parent
    assert mpi["cuda"].startswith("staged: ")
    assert "problem" not in mpi


def test_ranks_of_mpirun_on_one_host(tmp_path: Path) -> None:
    ended = doctor(tmp_path / "program.py", 3)
    assert ended.returncode in (0, 1), ended
    for name in ("pairs  ", "pairs, mpi"):  # on a busy machine some may be slow
        assert re.search(rf"^{name} +(all 3|. of 3) pairs are ok", ended.stdout, re.M), ended
    assert "\nbroken " not in ended.stdout
    assert f"\nmpi          {library().title}" in ended.stdout
    assert "store: over MPI" in ended.stdout
    assert ended.stdout.count("cpu arrays: backend unicoll (gloo)") == 1


def test_between_hosts_mpi_moves_the_data(tmp_path: Path) -> None:
    """With the launcher's variables of three hosts of one rank each; the job's key goes over MPI, without a secret."""
    rank, size = library().local_rank, library().local_size
    before = f"os.environ.update({rank}='0', {size}='1', UNICOLL_SOCKET_IFNAME='lo')"
    ended = doctor(tmp_path / "program.py", 3, "--json", before=before)
    report = json.loads(ended.stdout)
    assert any("backend mpi: started by an MPI launcher" in line for line in report["chosen"])
    # on a busy machine some may be slow
    assert (report["pairs"]["checked"], report["pairs"]["broken"]) == (3, [])
    assert not any("without a secret" in hint["text"] for hint in report["hints"])
    assert ended.returncode == report["exit_status"], ended
