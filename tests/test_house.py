"""The house: imports point down, public names are listed once, importing shmload costs next to nothing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shmload

PACKAGE = Path(shmload.__file__).parent
FLOORS = {
    "errors": 0,
    "lazy_names": 0,
    "_core": 0,
    "world": 0,
    "faults": 0,
    "abilities": 0,
    "turns": 0,
    "schedule": 1,
    "shm": 1,
    "storage": 1,
    "batch": 2,
    "index": 2,
    "formats": 3,
    "worker": 3,
    "engine": 4,
    "machinery": 4,
    "engine_making": 4,
    "ring_memory": 4,
    "supervision": 4,
    "inline": 4,
    "seed_mode": 4,
    "seed_epochs": 4,
    "torch_mode": 4,
    "torch_order": 4,
    "torch_state": 4,
    "generators": 4,
    "opaque": 4,
    "callers": 4,
    "hoarding": 4,
    "orders": 4,
    "order_writer": 4,
    "arguments": 4,
    "autotune": 4,
    "seed_sampler": 4,
    "bad_samples": 4,
    "cluster": 5,
    "integrations": 5,
    "loader": 4,
    "metrics": 4,
    "mix": 4,
    "observe": 4,
    "sharing": 4,
    "observed": 4,
    "debug": 4,
    "device": 4,
    "cli": 6,
    "testing": 6,
    "pipeline": 5,
    "remote": 5,
    "growing": 5,
    "launch": 5,
}


def place_of(module: str) -> str:
    return module.split(".")[1]


def imports_of(path: Path) -> list[str]:
    """The shmload modules a file imports when it runs; what only type checkers see does not count."""
    found = []
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "shmload" else [node.module]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        found += [name for name in names if name.startswith("shmload.")]
    return found


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.parent != PACKAGE or p.stem != "__init__"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    mine = place_of(f"shmload.{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}")
    for module in imports_of(path):
        other = place_of(module)
        assert other == mine or FLOORS[other] < FLOORS[mine] or FLOORS[other] == FLOORS[mine] == 4, (mine, module)


def test_every_public_name_can_be_had() -> None:
    assert sorted(shmload.__all__) == shmload.__all__
    for name in shmload.__all__:
        assert getattr(shmload, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = shmload.nothing


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout.strip()


def test_importing_shmload_brings_neither_torch_nor_numpy() -> None:
    assert run("import sys, shmload; print('torch' in sys.modules, 'numpy' in sys.modules)") == "False False"


def test_a_worker_brings_no_torch_by_itself() -> None:
    assert run("import sys, shmload.worker.process; print('torch' in sys.modules)") == "False"
