"""Planting one defect: a change of source text in a copy of the tree, and the tests that must fail there.

Text is replaced by exact match, once, so that a defect whose place has changed is noticed and not silently planted elsewhere.
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

ROOT = Path(__file__).parents[2]
COPIED = ("shmload", "src", "tests", "setup.py", "pyproject.toml", "README.md")
TEST_TIMEOUT_S = 60  # of one test: what hangs for a defect is caught, too
RUN_TIMEOUT_S = 600
# A defect may make a program remove what is another's: in the machine's own /dev/shm that would be a neighbor's ring.
OWN_SHM = "mount -t tmpfs -o size=4g shm /dev/shm"


@dataclass(frozen=True)
class Defect:
    """A mistake that breaks a requirement, and the tests that say so.

    Attributes:
        requirement: its code in the product's list: R1 to R19, E4.
        what: the mistake in words.
        path, old, new: where it is made.
        tests: node ids; each must fail.
        modules: compiled modules to be built anew.
        reaches_out: tests are only run where they can have a /dev/shm of their own.
        is_crossing: it stands where two promises meet, so random crossings must find it, too.
    """

    requirement: str
    what: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    modules: tuple[str, ...] = ()
    reaches_out: bool = False
    is_crossing: bool = False

    def planted(self, text: str) -> str:
        """The file's text with the mistake in it.

        Raises:
            ValueError: the place is not there, or not once.
        """
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.requirement}, {self.what!r}: {self.path} has the text to be replaced {text.count(self.old)} times and not "
                "once: mend the list of defects"
            )
        return text.replace(self.old, self.new)


def copy_tree(folder: Path) -> None:
    """Copies what tests need, built modules included."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        else:
            shutil.copy2(ROOT / name, folder / name)


@contextmanager
def planted(defect: Defect, folder: Path) -> Iterator[None]:
    """The copied tree with a defect in it, until the block ends."""
    path = folder / defect.path
    sound = path.read_text()
    path.write_text(defect.planted(sound))
    built = [(module, found) for module in defect.modules for found in (folder / "shmload/_core").glob(f"{module}.*.so")]
    kept = [(found, found.read_bytes()) for _, found in built]
    try:
        for module, found in built:
            found.unlink()
            build(module, folder)
        yield
    finally:
        path.write_text(sound)
        for found, whole in kept:
            found.unlink(missing_ok=True)
            found.write_bytes(whole)


def missed_by(defect: Defect, folder: Path) -> list[str]:
    """The tests that do not fail with the defect in the copied tree."""
    with planted(defect, folder):
        return [test for test in defect.tests if not fails(test, folder)]


def crossed_by(defect: Defect, folder: Path, minutes: float, seed: int) -> str:
    """What random crossings of this seed find first with the defect in the copied tree, as they say it; empty: nothing."""
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
    """Whether a test, by its node id, fails in the copied tree: by an assertion, a crash or a hang, but not because it is not there."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", f"timeout={TEST_TIMEOUT_S}", test]
    if can_unshare():
        command = ["unshare", "--mount", "sh", "-c", f'{OWN_SHM} && exec "$0" "$@"', *command]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
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
    """Whether tests can have a /dev/shm of their own here."""
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


def node_exists(test: str) -> bool:
    """Whether a node id names a test function that is in the tree; its parameters are not looked at."""
    path, _, name = test.partition("::")
    name = name.partition("[")[0]
    return re.search(rf"^def {re.escape(name)}\(", (ROOT / path).read_text(), re.MULTILINE) is not None
