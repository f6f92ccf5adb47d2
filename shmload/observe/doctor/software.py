"""Checks of software: versions, compiled modules, how workers are started."""

from __future__ import annotations

import ast
import importlib
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from shmload.observe.doctor.finding import Finding

OLDEST = {"torch": (2, 13), "numpy": (2, 0), "posix_ipc": (1, 1)}


def check_versions(
    find: Callable[[str], str] = version, python: tuple[int, ...] = sys.version_info[:3]
) -> Iterator[Finding]:
    """Python and what shmload stands on."""
    told = [f"Python {'.'.join(map(str, python))}"]
    if python < (3, 11):
        yield Finding("versions", "problem", f"{told[0]} is too old", "Python 3.11 or newer")
    for name, oldest in OLDEST.items():
        try:
            found = find(name)
        except PackageNotFoundError:
            yield Finding("versions", "problem", f"{name} is not installed", f"pip install {name}")
            continue
        told.append(f"{name} {found}")
        if _numbers(found) < oldest:
            needed = ".".join(map(str, oldest))
            yield Finding("versions", "problem", f"{name} {found} is too old", f"pip install '{name}>={needed}'")
    yield Finding("versions", "good", ", ".join(told))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in text.split(".")[:2])


def check_compiled(folder: Path, load: Callable[[str], ModuleType] = importlib.import_module) -> Iterator[Finding]:
    """Whether every compiled module is there and is of the same build as the Python around it: its stub says what it must have."""
    missing, stale = [], []
    stubs = sorted(folder.glob("*.pyi"))
    for stub in stubs:
        try:
            module = load(f"shmload._core.{stub.stem}")
        except ImportError:
            missing.append(stub.stem)
            continue
        if any(not _has(module, name) for name in _declared(stub)):
            stale.append(stub.stem)
    if missing:
        yield Finding(
            "compiled modules",
            "problem",
            f"{', '.join(missing)}: missing, or built for another Python or C library",
            "Install shmload anew (pip install --force-reinstall), or build the source tree: pip install -e .",
        )
    if stale:
        yield Finding(
            "compiled modules",
            "problem",
            f"{', '.join(stale)}: of another version than the Python around",
            "Install shmload anew (pip install --force-reinstall), or build the source tree: pip install -e .",
        )
    if not missing and not stale:
        yield Finding("compiled modules", "good", f"all {len(stubs)} are there and match")


def _declared(stub: Path) -> Iterator[str]:
    """The public names of a stub, members of classes as "class.member"."""
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}"


def _has(module: ModuleType, name: str) -> bool:
    value: object = module
    for part in name.split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def check_start_method(has_gpu: bool, method: str | None = None) -> Iterator[Finding]:
    """How workers start if nobody says otherwise."""
    method = method or multiprocessing.get_start_method()
    if method == "fork" and has_gpu:
        yield Finding(
            "start method",
            "advice",
            "fork, Python's own here: workers that are forked after CUDA was used, or while other threads run, may hang",
            'multiprocessing_context="forkserver", or take the first batch before CUDA is used',
        )
    elif method == "fork":
        yield Finding("start method", "good", "fork: the quickest, as long as no other threads run when workers start")
    else:
        yield Finding(
            "start method", "good", f"{method}: workers inherit nothing by chance; datasets must be picklable"
        )
