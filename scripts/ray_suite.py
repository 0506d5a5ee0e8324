#!/usr/bin/env python3
"""Runs Ray's own CPU tests of ray.util.collective on the backend of unicoll.integrations.ray, or on
Ray's GLOO.

    git clone --depth 1 --branch ray-2.60.0 https://github.com/ray-project/ray python
    scripts/ray_suite.py ray                         # single_node_cpu_tests, one node python
    scripts/ray_suite.py ray --nodes 2 -k sum        # distributed_cpu_tests; other options are
    pytest's

in an environment with Ray, torch and pytest. The tests are copied, with the tested backend in place
of GLOO, and use one Ray cluster instead of one for each test. Those of the class of Ray's Gloo
group itself are left out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {1: "single_node_cpu_tests", 2: "distributed_cpu_tests"}
CONFTEST = """
import pytest
import ray
from ray.cluster_utils import Cluster

@pytest.fixture(scope="session")
def cluster():
    cluster = Cluster()
    for _ in range({nodes}):
        cluster.add_node(num_cpus=8 // {nodes}, object_store_memory=200 << 20)
    cluster.wait_for_nodes()
    ray.init(cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()

@pytest.fixture
def ray_start_single_node(cluster): pass

@pytest.fixture
def ray_start_distributed_2_nodes(cluster): pass
"""


def copy_tests(checkout: Path, folder: Path, nodes: int, backend: str) -> None:
    tests = checkout / "python" / "ray" / "util" / "collective" / "tests"
    worker = (tests / "cpu_util.py").read_text()
    # the actors import this module, so they have the backend, too
    (folder / "cpu_util.py").write_text(f"{worker}\n\nimport unicoll.integrations.ray\n")
    for path in sorted((tests / FOLDERS[nodes]).glob("test_*.py")):
        if path.name != "test_gloo_group_isolation.py":
            text = path.read_text().replace("ray.util.collective.tests.cpu_util", "cpu_util")
            (folder / path.name).write_text(text.replace("Backend.GLOO", f"Backend.{backend}"))
    (folder / "conftest.py").write_text(CONFTEST.format(nodes=nodes))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="of Ray, of the installed version")
    parser.add_argument("--nodes", type=int, choices=FOLDERS, default=1)
    parser.add_argument("--backend", choices=("UNICOLL", "GLOO"), default="UNICOLL")
    options, others = parser.parse_known_args()  # the others are pytest's
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tests(options.checkout, folder, options.nodes, options.backend)
        paths = os.pathsep.join([str(ROOT), name, os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *others]
        return subprocess.run(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": paths}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
