"""`shmload doctor --cluster` on two nodes, and the actor that it sends to a node without shmload."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.ray.cluster_kit import Cluster

# Pickles the actor as examine_cluster does, and unpickles it in a process that cannot import shmload.
WITHOUT_SHMLOAD = """
import subprocess, sys
from ray import cloudpickle
from shmload.tools.cluster_doctor import Scout, by_value
with by_value(cloudpickle):
    dumped = cloudpickle.dumps(Scout)
code = "import pickle, sys; sys.modules['shmload'] = None; print(pickle.load(sys.stdin.buffer)().look())"
subprocess.run([sys.executable, "-c", code], input=dumped, check=True)
"""


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **environment}
    return subprocess.run([sys.executable, "-W", "error", *words], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow(reason="sends actors to the nodes of a Ray cluster")
def test_doctor_examines_both_nodes_and_recognizes_this_machine(cluster: Cluster) -> None:
    done = run("-m", "shmload", "doctor", "--cluster", "--json", RAY_ADDRESS=cluster.address)
    found = [(one["check"], one["text"]) for one in json.loads(done.stdout)]
    assert done.returncode == 0, done.stderr
    assert found[0] == ("cluster", "2 nodes, 8 of 8 CPUs are free")
    nodes = {check.partition(",")[0] for check, _ in found[1:]}
    assert len(nodes) == 2
    for check in ("actor", "versions", "/dev/shm", "object store", "transfer"):
        assert {f"{node}, {check}" for node in nodes} <= dict(found).keys()
    transfers = sorted(text for check, text in found if check.endswith("transfer"))
    assert transfers[1] == "not needed on this machine"
    assert re.match(r"[\d,]+ MB/s", transfers[0])
    assert [text for check, text in found if check.endswith("object store")] == ["80.0 MiB of 80.0 MiB are free"] * 2


@pytest.mark.slow(reason="imports Ray in a process of its own")
def test_node_without_shmload_reports_that() -> None:
    pytest.importorskip("ray", reason='Ray is not installed: pip install "shmload[ray]"')
    done = run("-c", WITHOUT_SHMLOAD)
    assert done.returncode == 0, done.stderr
    assert "ModuleNotFoundError: No module named 'shmload.ray'" in done.stdout
