"""What starting costs: torch takes seconds to import, so what does not need it must not bring it. By name, not by the clock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow(reason="each looks at what a process of its own imports")
HEAVY = ("torch", "numpy", "rich", "typer", "PIL", "matplotlib", "pyarrow", "h5py", "zarr", "safetensors", "datasets")


def brought(code: str, *arguments: str) -> set[str]:
    """Which heavy packages are imported when a program ends, however it ends."""
    program = (
        "import atexit, os, sys\n"
        f"atexit.register(lambda: print('\\n' + ' '.join(n for n in {HEAVY!r} if n in sys.modules)))\n{code}"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import shmload", set()),
        ("import shmload; shmload.__version__; dir(shmload)", set()),
        ("from shmload import WorkerDied, ShardCorrupt", set()),
        ("from shmload import Permutation, Schedule", {"numpy"}),
        ("from shmload import BlockShuffle, LengthBuckets, SharedIndex, TokenBudget, Weighted", {"numpy"}),
        ("import shmload.formats", set()),
        ("from shmload.formats import TokenDataset, TFRecordWriter, TarWriter", {"numpy"}),
        ("from shmload.shm import names", set()),
        ("import shmload.cli", {"typer", "rich"}),
    ],
)
def test_a_name_brings_only_what_it_needs(code: str, expected: set[str]) -> None:
    assert brought(code) <= expected


def test_a_loader_brings_torch_and_nothing_that_is_an_extra() -> None:
    assert brought("from shmload import ShmLoader") == {"torch", "numpy"}


@pytest.mark.parametrize("command", [["--help"], ["clean"], ["clean", "--json"], ["verify", "--help"], ["inspect"]])
def test_a_command_that_needs_no_tensor_brings_no_torch(command: list[str], tmp_path: Path) -> None:
    if command == ["inspect"]:
        np.save(tmp_path / "rows.npy", np.arange(10))
        command = ["inspect", str(tmp_path / "rows.npy")]
    found = brought("import shmload.cli; shmload.cli.main()", *command)
    assert found <= {"typer", "rich", "numpy"}
    assert "typer" in found  # the program has run to its end
