"""The example of docs/cluster.md prints what the page says, on a cluster that it finds by itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray.cluster_kit import Cluster

PAGE = next(p for p in Path(__file__).parents if (p / "docs").exists()) / "docs" / "cluster.md"


@pytest.mark.slow(reason="the page's program imports torch and starts actors on a Ray cluster")
def test_the_example_of_the_page_prints_what_it_says(cluster: Cluster, tmp_path: Path) -> None:
    text = PAGE.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (expected,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", str(tmp_path / "train.py")]
    assert expected == subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
