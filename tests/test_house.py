"""The structure of the package: imports point down, public names are listed once, and importing shmload is cheap."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import shmload
from tests.house import FLOORS, PACKAGE, PICTURE, files, imports_of, picture, room_of

pytestmark = pytest.mark.skipif("SHMLOAD_INSTALLED" in os.environ, reason="an installed package is being tested")


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    mine = room_of(path)
    assert [room for room in imports_of(path) if room != mine and FLOORS[room] >= FLOORS[mine]] == []


def imports_between_files() -> dict[str, set[str]]:
    """Returns the modules of the package that each module imports, also inside functions and under TYPE_CHECKING."""
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in files()}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= {inner if (inner := f"{node.module}.{alias.name}") in modules else node.module for alias in node.names}
        found[module] = names & modules.keys() - {module}
    return found


def test_imports_between_files_have_no_cycles() -> None:
    TopologicalSorter(imports_between_files()).prepare()  # a CycleError names the files


def test_cycle_of_files_is_detected() -> None:
    planted = imports_between_files()
    planted["shmload.engine.ring"].add("shmload.engine.engine")
    with pytest.raises(CycleError, match="nodes are in a cycle"):
        TopologicalSorter(planted).prepare()


def test_picture_matches_the_imports() -> None:
    assert PICTURE.read_text() == picture(), "`python -m tests.house` redraws it"


FILE = re.compile(r"(?<![\w./-])((?:\w+/)*\w+\.pyx?)\b(?![\w(])")
FOREIGN = {"megatron/core/datasets/indexed_dataset.py", "tarfile.py", "litdata/streaming/serializers.py", "dev/data/data_common.py"}


def test_every_file_named_in_text_exists() -> None:
    root = PACKAGE.parent
    there = [
        "/setup.py",
        *(f"/{path}" for top in ("shmload", "src", "tests", "benchmarks") for path in (root / top).rglob("*.py*")),
    ]
    pages = [root / "ARCHITECTURE.md", root / "CONTRIBUTING.md", *root.glob("src/*.*"), *files()]
    named = {name: page for page in pages for name in FILE.findall(page.read_text())}
    assert {name: page for name, page in named.items() if not any(path.endswith(f"/{name}") for path in there)}.keys() == FOREIGN


def test_file_and_class_names_are_unique() -> None:
    stems = Counter(path.stem for path in files() if not path.stem.startswith("__"))
    classes = Counter(
        node.name for path in files() for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    )
    twice = {name for names in (stems, classes) for name, number in names.items() if number > 1}
    # public twice: an order and a stage of the Conveyer library, a store's cache and a stage, a crop and a stage
    assert twice == {"Permutation", "Cache", "Window"}


def private_names_of_torch(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return {name for name in found if re.match(r"torch(\.\w+)*\._(?!_)", name)}


def test_private_names_of_torch_are_looked_up_in_one_module() -> None:
    """Makes a release without one of them fail in that module, which has a table of releases."""
    assert {path.name for path in files() if private_names_of_torch(path)} == {"torch_names.py"}


def test_few_modules_are_directly_in_the_package() -> None:
    assert sum(path.parent == PACKAGE for path in files()) <= 9


def test_every_public_name_is_importable() -> None:
    assert sorted(shmload.__all__) == shmload.__all__
    for name in shmload.__all__:
        assert getattr(shmload, name).__name__ == name


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = shmload.nothing


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout.strip()


def test_importing_shmload_imports_neither_torch_nor_numpy() -> None:
    assert run("import sys, shmload; print('torch' in sys.modules, 'numpy' in sys.modules)") == "False False"


def test_worker_does_not_import_torch_by_itself() -> None:
    assert run("import sys, shmload.worker.pool; print('torch' in sys.modules)") == "False"
