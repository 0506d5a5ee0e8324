"""Starts a Ray cluster with two raylets on this machine, prints its address, and ends it when stdin is closed.

Arguments: the folder for Ray's files.
"""

from __future__ import annotations

import json
import os
import sys

import ray
from ray.cluster_utils import Cluster

if __name__ == "__main__":
    folder = sys.argv[1]
    os.environ["RAY_TMPDIR"] = folder  # Ray writes the address into ray/ below it, and does not make that
    os.mkdir(os.path.join(folder, "ray"))
    cluster = Cluster()
    for number in range(2):
        head = {"temp_dir": folder, "include_dashboard": False} if number == 0 else {}
        cluster.add_node(num_cpus=4, object_store_memory=100 << 20, resources={f"node{number}": 8}, **head)
    cluster.wait_for_nodes()
    print(json.dumps(cluster.address), flush=True)
    sys.stdin.read()
    ray.shutdown()
    cluster.shutdown()
