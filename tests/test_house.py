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
# A room is a folder or a module directly in the package. It imports only from floors below its own: every import counts, also one
# inside a function or under TYPE_CHECKING.
FLOORS = {
    room: floor
    for floor, rooms in enumerate(
        (
            "errors faults world metrics _core",
            "shm schedule batch storage",
            "formats device",
            "worker",
            "engine",
            "modes sharing ray audit",
            "loader",
            "pipeline remote growing launch integrations cluster debug",
            "tools",
            "cli",
        )
    )
    for room in rooms.split()
}


def room_of(module: str) -> str:
    return module.split(".")[1]


def imports_of(path: Path) -> list[str]:
    """The shmload modules that a file names in imports, wherever they stand."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
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
    mine = room_of(f"shmload.{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}")
    assert not [
        module
        for module in imports_of(path)
        if room_of(module) != mine
        and room_of(module) not in shmload.__all__
        and not FLOORS[room_of(module)] < FLOORS[mine]
        and module != "shmload.__version__"
    ]


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
