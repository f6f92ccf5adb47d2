"""The cost of imports: torch takes seconds, so code that does not need it must not import it. Checked by name, not by time."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.reference.public import MODULES

pytestmark = pytest.mark.slow(reason="each runs a program in a process of its own")
HEAVY = ("torch", "numpy", "rich", "typer", "PIL", "matplotlib", "pyarrow", "h5py", "zarr", "safetensors", "datasets")


def heavy_imports(code: str, *arguments: str) -> set[str]:
    """Returns the heavy packages that are imported when a program ends, however it ends."""
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
def test_name_imports_only_what_it_needs(code: str, expected: set[str]) -> None:
    assert heavy_imports(code) <= expected


def test_loader_imports_torch_and_no_extra() -> None:
    assert heavy_imports("from shmload import ShmLoader") == {"torch", "numpy"}


@pytest.mark.parametrize("command", [["--help"], ["clean"], ["clean", "--json"], ["verify", "--help"], ["inspect"]])
def test_command_without_tensors_does_not_import_torch(command: list[str], tmp_path: Path) -> None:
    if command == ["inspect"]:
        np.save(tmp_path / "rows.npy", np.arange(10))
        command = ["inspect", str(tmp_path / "rows.npy")]
    found = heavy_imports("import shmload.cli; shmload.cli.main()", *command)
    assert found <= {"typer", "rich", "numpy"}
    assert "typer" in found  # the program ran to its end


def test_public_modules_are_attributes_of_the_package() -> None:
    """The notes of errors name `shmload.debug.read`, which a program that has only imported shmload must be able to call."""
    public = {name.split(".")[1] for name in MODULES if "." in name}
    program = f"import shmload; print(*(getattr(shmload, name).__name__ for name in {sorted(public)}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stderr == ""
    assert done.stdout.split() == [f"shmload.{name}" for name in sorted(public)]


@pytest.mark.parametrize("package", ["shmload", "shmload.formats"])
def test_dir_of_a_package_shows_only_public_names(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in dir(module) if not name.startswith("__")] == sorted(module.__all__)
