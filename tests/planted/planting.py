"""Plants a single defect: a change to one function in a copy of the tree, and the tests that must fail there.

The code to change must exist exactly once, so that a defect whose function has changed is an error and not planted elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.planted.operations import ROOT, PlantingError, Replace, changed, file_of

COPIED = ("shmload", "src", "tests", "setup.py", "pyproject.toml", "README.md")
TEST_TIMEOUT_S = 60  # of one test; a test that hangs because of the defect counts as failed
RUN_TIMEOUT_S = 600
# A defect may make a program remove files of others, which in the machine's own /dev/shm could be another program's ring.
OWN_SHM = "mount -t tmpfs -o size=4g shm /dev/shm"


@dataclass(frozen=True)
class Defect:
    """A mistake that breaks a requirement, and the tests that detect it.

    Attributes:
        requirement: its code in the list of requirements, such as R1 to R19 or E4.
        what: a description of the mistake.
        where, change: the function, as in operations.file_of(), and what is changed in it.
        tests: node ids; each of these tests must fail.
        modules: compiled modules to build again.
        reaches_out: run the tests only where they can have their own /dev/shm.
        is_crossing: the mistake concerns two promises at once, so random crossings must find it as well.
    """

    requirement: str
    what: str
    where: str
    change: Replace
    tests: tuple[str, ...]
    modules: tuple[str, ...] = ()
    reaches_out: bool = False
    is_crossing: bool = False

    @property
    def path(self) -> str:
        """The file to change, relative to the project."""
        return file_of(self.where)

    def planted(self, text: str) -> str:
        """Returns the text of the file with the mistake in it.

        Raises:
            PlantingError: the code to change is missing or not unique.
        """
        try:
            return changed(text, self.where, self.change)
        except PlantingError as error:
            raise PlantingError(f"{self.requirement}, {self.what!r}: {error}; update the list of defects") from error


def copy_tree(folder: Path) -> None:
    """Copies everything that tests need, including compiled modules."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        else:
            shutil.copy2(ROOT / name, folder / name)


@contextmanager
def planted(defect: Defect, folder: Path) -> Iterator[None]:
    """Plants a defect in the copied tree until the block ends."""
    path = folder / defect.path
    original = path.read_text()
    path.write_text(defect.planted(original))
    built = [(module, found) for module in defect.modules for found in (folder / "shmload/_core").glob(f"{module}.*.so")]
    kept = [(found, found.read_bytes()) for _, found in built]
    try:
        for module, found in built:
            found.unlink()
            build(module, folder)
        yield
    finally:
        path.write_text(original)
        for found, whole in kept:
            found.unlink(missing_ok=True)
            found.write_bytes(whole)


def missed_by(defect: Defect, folder: Path) -> list[str]:
    """Returns the tests that do not fail with the defect in the copied tree."""
    with planted(defect, folder):
        return [test for test in defect.tests if not fails(test, folder)]


def finding_of_crossings(defect: Defect, folder: Path, minutes: float, seed: int) -> str:
    """Returns the message of the first failure that random crossings find with the defect, or an empty string."""
    words = ["--minutes", str(minutes), "--seed", str(seed), "--first", "--no-shrink"]
    with planted(defect, folder):
        done = subprocess.run(
            [sys.executable, "-m", "tests.crossing", *words], cwd=folder, capture_output=True, text=True, check=False
        )
    return next((line for line in done.stdout.splitlines() if line.startswith("=== ")), "")


def build(module: str, folder: Path) -> None:
    """Compiles one module of the copied tree."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "SHMLOAD_ONLY": module}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{module} does not build with the defect in it:\n{done.stderr[-2000:]}")


def fails(test: str, folder: Path) -> bool:
    """Returns whether a test fails in the copied tree by an assertion, a crash or a hang; a missing test does not count."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", f"timeout={TEST_TIMEOUT_S}", test]
    if can_unshare():
        command = ["unshare", "--mount", "sh", "-c", f'{OWN_SHM} && exec "$0" "$@"', *command]
    environment = {**os.environ, "PYTHONPATH": str(folder)}  # programs that the test starts import the copied tree, too
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        process.communicate(timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return True
    return process.returncode == 1 or process.returncode < 0 or process.returncode > 128


@cache
def can_unshare() -> bool:
    """Returns whether tests can have their own /dev/shm here."""
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


def node_exists(test: str) -> bool:
    """Returns whether a node id names an existing test function, regardless of its parameters."""
    path, _, name = test.partition("::")
    name = name.partition("[")[0]
    return re.search(rf"^def {re.escape(name)}\(", (ROOT / path).read_text(), re.MULTILINE) is not None
