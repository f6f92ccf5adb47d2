"""The benchmarks run: that they do, not what they measure."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("autotune", "mix", "tar")  # seconds each


def test_every_benchmark_is_in_the_table() -> None:
    tree = ast.parse((ROOT / "benchmarks" / "__main__.py").read_text())
    listed = {name.name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names}
    measuring = {p.stem for p in (ROOT / "benchmarks").glob("*.py") if "\ndef measure(settings: Settings" in p.read_text()}
    assert measuring <= listed


@pytest.mark.slow(reason="each runs a benchmark in a process of its own, which imports torch")
@pytest.mark.parametrize("name", QUICK)
def test_a_benchmark_prints_its_table(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}", "--rounds", "1", "--seconds", "0.05"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "measured" in done.stdout
