"""The example of docs/cluster.md prints what the page shows, on a cluster that it finds by itself; the one of
examples/kuberay.yaml trains.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.ray.cluster_kit import Cluster

ROOT = next(p for p in Path(__file__).parents if (p / "docs").exists())
SIZES = "NUM_SAMPLES, BATCH_SIZE, NUM_WORKERS = 25_600, 256, 32\n"
SMALLER = "NUM_SAMPLES, BATCH_SIZE, NUM_WORKERS = 64, 8, 2\n"


def printed(code: str, cluster: Cluster, folder: Path) -> str:
    (folder / "train.py").write_text(code)
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", str(folder / "train.py")]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.mark.slow(reason="the page's program imports torch and starts actors on a Ray cluster")
def test_example_of_the_page_prints_what_the_page_shows(cluster: Cluster, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "cluster.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (expected,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert expected == printed(code, cluster, tmp_path)


@pytest.mark.slow(reason="a program that imports torch trains over a Ray cluster")
def test_program_for_kubernetes_trains(cluster: Cluster, tmp_path: Path) -> None:
    config, *_ = yaml.safe_load_all((ROOT / "examples" / "kuberay.yaml").read_text())
    code = config["data"]["train.py"]
    assert SIZES in code
    assert re.fullmatch(r"epoch 0: loss \d\.\d+\nepoch 1: loss \d\.\d+\n", printed(code.replace(SIZES, SMALLER), cluster, tmp_path))
