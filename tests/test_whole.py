"""The test suite as a whole: no helper hides another, and the plain command runs only quick tests."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.side_by_side import can_own_shared_memory

slow = pytest.mark.slow(reason="runs pytest's collection in separate processes")
HERE = Path(__file__).parent
FILES = sorted(HERE.rglob("*.py"))
OURS = {path.stem for path in FILES} | {path.name for path in HERE.iterdir() if path.is_dir()}


def bare_imports(path: Path) -> list[str]:
    """Returns what a file imports by the bare name of a test module."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module or ""] if node.level == 0 else []
    tops = {name: name.partition(".")[0] for name in found}
    return [name for name, top in tops.items() if top in OURS and find_spec(top) is None]  # otherwise it is a library


def test_helpers_are_imported_by_their_full_name() -> None:
    """Two helpers with the same bare name in two folders would hide each other: the first import would win."""
    assert {str(path.relative_to(HERE)): bare_imports(path) for path in FILES if bare_imports(path)} == {}


def test_bare_name_is_detected(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("def f():\n    import soak\n    from tests.faults import soak\n    import json\n")
    assert bare_imports(program) == ["soak"]


def collected(folder: Path, mark: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Returns pytest's list of tests to run, given a quick test and one marked with `mark`, under this suite's conftest."""
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["some"]\nmarkers = ["slow(reason): slow"]\n')
    (folder / "conftest.py").write_text((HERE / "conftest.py").read_text())
    (folder / "some").mkdir(exist_ok=True)
    tests = f"import pytest\n\n\ndef test_quick(): pass\n\n\n@pytest.mark.{mark}\ndef test_slow(): pass\n"
    (folder / "some" / "test_some.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=env)


@slow
def test_slow_tests_run_if_named_or_with_all(tmp_path: Path) -> None:
    def selected(*arguments: str) -> list[str]:
        done = collected(tmp_path, 'slow(reason="sorts for long")', *arguments)
        assert done.returncode == 0, done.stderr
        return [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line]

    assert selected() == ["test_quick"]
    assert selected("--all") == ["test_quick", "test_slow"]
    assert selected("some") == ["test_quick", "test_slow"]
    assert selected("-m", "slow") == ["test_slow"]


RECORDED = """
import os
import pytest

@pytest.mark.parametrize("number", range(4))
def test_records_its_process(number):
    open(f"{os.path.dirname(__file__)}/{__name__.rpartition('.')[2]} {os.getpid()}", "w").close()
"""


@slow
@pytest.mark.skipif(not can_own_shared_memory(), reason="processes of xdist need a /dev/shm each")
def test_quick_tests_of_a_file_run_in_one_process(tmp_path: Path) -> None:
    for name in ("test_one", "test_two"):
        (tmp_path / f"{name}.py").write_text(RECORDED)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow(reason): slow"]\n')
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=env)
    assert "8 passed" in done.stdout, done.stdout + done.stderr
    assert sorted(path.name.split()[0] for path in tmp_path.glob("test_* *")) == ["test_one", "test_two"]


@slow
def test_slow_test_without_a_reason_is_refused_by_name(tmp_path: Path) -> None:
    done = collected(tmp_path, "slow")
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "some/test_some.py::test_slow is slow without a reason" in done.stdout
