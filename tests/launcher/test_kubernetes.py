"""The manifests of examples/kubernetes run: each pod is a host, with the variables that its controller sets."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.launching import environment, wait_until
from tests.support import selection
from tests.support.hosts import Hosts
from tests.support.ranks import ROOT

yaml = pytest.importorskip("yaml")

MANIFESTS = ROOT / "examples" / "kubernetes"
SECRET = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class Pod:
    """What runs in a pod; ``name`` is its name in the cluster's DNS, and ``secrets`` those of its variables."""

    name: str
    command: list[str]
    variables: dict[str, str]
    secrets: dict[str, str]

    def words(self) -> list[str]:
        """The command with this Python, and with its variables expanded as Kubernetes does."""
        known = {**self.variables, **self.secrets}
        words = [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word) for word in self.command]
        programs = {"python": [sys.executable], "unirun": [sys.executable, "-m", "unicoll.run"]}
        return [*programs[words[0]], *words[1:]]


def container_of(container: dict[str, Any]) -> Pod:
    """The pod of a container, without what a controller adds."""
    plain = {one["name"]: one["value"] for one in container.get("env", ()) if "value" in one}
    keys = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one}
    assert set(map(str, keys.values())) == {str({"name": "unicoll", "key": "secret"})}
    return Pod("", container["command"], plain, dict.fromkeys(keys, SECRET))


def pods_of(manifest: str) -> list[Pod]:
    """The pods of a manifest. Names and variables are those that the controllers of each kind document:

    Job: JOB_COMPLETION_INDEX and the host name JOB-INDEX. JobSet: a Job named JOBSET-REPLICATEDJOB-N, in the subdomain
    JOBSET. LeaderWorkerSet: LWS_*, the leader is NAME-GROUP.NAME.NAMESPACE. TrainJob with the runtime
    torch-distributed: a JobSet whose replicated job is "node", and PET_*.
    """
    *others, found = yaml.safe_load_all((MANIFESTS / f"{manifest}.yaml").read_text())
    name, spec = found["metadata"]["name"], found["spec"]
    made: list[Pod] = []
    if found["kind"] == "Job":
        (service,) = others
        template = spec["template"]["spec"]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
        assert template["subdomain"] == service["metadata"]["name"]
        assert spec["completions"] == spec["parallelism"]
        for i in range(spec["completions"]):
            pod = container_of(template["containers"][0])
            pod.variables["JOB_COMPLETION_INDEX"] = str(i)
            made.append(replace(pod, name=f"{name}-{i}.{template['subdomain']}"))
    elif found["kind"] == "JobSet":
        (job,) = spec["replicatedJobs"]
        template = job["template"]["spec"]
        assert (job["replicas"], template["completions"]) == (1, template["parallelism"])
        for i in range(template["completions"]):
            pod = container_of(template["template"]["spec"]["containers"][0])
            pod.variables["JOB_COMPLETION_INDEX"] = str(i)
            made.append(replace(pod, name=f"{name}-{job['name']}-0-{i}.{name}"))
    elif found["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        leader = f"{name}-0.{name}.default"
        for i in range(group["size"]):
            pod = container_of(group["workerTemplate"]["spec"]["containers"][0])
            pod.variables.update(
                LWS_LEADER_ADDRESS=leader, LWS_GROUP_SIZE=str(group["size"]), LWS_WORKER_INDEX=str(i)
            )
            made.append(replace(pod, name=f"{name}-0-{i}.{name}.default" if i else leader))
    else:
        assert (found["kind"], spec["runtimeRef"]) == ("TrainJob", {"name": "torch-distributed"})
        trainer = spec["trainer"]
        for i in range(trainer["numNodes"]):
            pod = container_of(trainer)
            pod.variables.update(
                PET_NNODES=str(trainer["numNodes"]),
                PET_NPROC_PER_NODE=str(trainer["numProcPerNode"]),
                PET_NODE_RANK=str(i),
                PET_MASTER_ADDR=f"{name}-node-0-0.{name}",
                PET_MASTER_PORT="29500",
            )
            made.append(replace(pod, name=f"{name}-node-0-{i}.{name}"))
    return made


class Cluster:
    """Two hosts that resolve the names of the pods that have started."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts = hosts
        self._folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, number: int, pod: Pod) -> None:
        """Start a pod on a host (0 or 1), and let the names of both be resolved."""
        env = environment(**pod.variables, **pod.secrets)
        with (self._folder / f"stderr{number}").open("w") as stderr:
            words = self._hosts.on(number + 1, *pod.words())
            self.started.append(
                subprocess.Popen(
                    words,
                    cwd=ROOT / "examples",
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                )
            )
        self._hosts.add_name(pod.name, number + 1)

    def stderr(self, number: int) -> str:
        return (self._folder / f"stderr{number}").read_text()

    def outputs(self) -> list[str]:
        """The lines that all pods have printed; they end without an error."""
        outs = [process.communicate(timeout=180)[0] for process in self.started]
        assert [process.returncode for process in self.started] == [0] * len(outs), [
            path.read_text() for path in self._folder.glob("stderr*")
        ]
        return sorted("".join(outs).splitlines())

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(hosts, tmp_path)
    try:
        hosts.own_names()
        yield made
    finally:
        made.close()


def printed(ranks: int) -> list[str]:
    """What hello.py prints on these ranks, without the launcher's prefixes."""
    total = float(ranks * (ranks + 1) // 2)
    return [f"{rank} {[total] * 4}".replace(".0", ".").replace(",", "") for rank in range(ranks)]


@pytest.mark.every(n=4)
@pytest.mark.parametrize(
    ("manifest", "ranks"), [("job", 2), ("jobset", 4), ("leaderworkerset", 2), ("trainjob", 4)]
)
def test_a_manifest_runs(cluster: Cluster, manifest: str, ranks: int) -> None:
    for number, pod in enumerate(pods_of(manifest)):
        cluster.start(number, pod)
    assert sorted(re.sub(r"^\[.*?\]:", "", line) for line in cluster.outputs()) == printed(ranks)


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("manifest", "waits_for"),
    [
        ("job", r"init_process_group has waited 10 s for rank 0; the store: tcp://train-0\.train:\d+"),
        ("jobset", r"has waited 10 s for node 0: train-node-0-0\.train has no address yet"),
    ],
)
def test_a_pod_waits_for_one_that_starts_later(cluster: Cluster, manifest: str, waits_for: str) -> None:
    first, second = pods_of(manifest)
    cluster.start(1, replace(second, name="other"))
    wait_until(lambda: f"cannot resolve host '{first.name}'" in cluster.stderr(1))
    if not selection.is_short():
        wait_until(lambda: re.search(waits_for, cluster.stderr(1)) is not None)
    assert not any(process.poll() is not None for process in cluster.started)
    cluster.start(0, first)
    cluster.outputs()
