"""What every test here is held to: nothing of ours stays in /dev/shm, no child process stays."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

from shmload.shm import janitor
from shmload.shm.names import STEM_PATTERN, process_stem
from shmload.worker import template
from tests.side_by_side import can_own_shared_memory, keep_together, own_shared_memory

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background job has it: ^C is tested here
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup has it: launchers are hung up on here
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

if sys.version_info >= (3, 14):  # there forkserver is the default, to which the tests' local classes cannot be sent
    multiprocessing.set_start_method("fork")

# How long an example takes says what else the machine does: CI has no such limits either
settings.register_profile("shmload", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shmload")

DEADLINE_S = 30.0
MOST_PROCESSES = 8
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # they and the template stay for the process's life


def stems_left() -> set[str]:
    """Groups in /dev/shm that are this process's, or that no living process owns. Other suites on this host do not count."""
    return {found.stem for found in janitor.find_leftovers(guard_s=-1)} | {
        match[1] for name in os.listdir("/dev/shm") if (match := STEM_PATTERN.fullmatch(name)) and process_stem() in name
    }


def children() -> set[int]:
    """This process's children, multiprocessing's own helpers excepted."""
    return {child.pid for child in psutil.Process().children(recursive=True) if not is_helper(child)}


def template_pid() -> int | None:
    """Of the process that this one's workers by spawn and forkserver are forks of, if there is one."""
    return None if template._current is None else template._current.process.pid


def is_helper(child: psutil.Process) -> bool:
    """Whether it is multiprocessing's own, or has gone."""
    try:
        return child.pid == template_pid() or any(name in " ".join(child.cmdline()) for name in _HELPERS)
    except psutil.Error:
        return True


@pytest.fixture(autouse=True)
def shm_clean() -> Iterator[None]:
    """Groups in /dev/shm and child processes are the same after a test as before it."""
    before, alive_before = stems_left(), children()
    yield
    gc.collect()
    new = [psutil.Process(pid) for pid in children() - alive_before if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(new, timeout=DEADLINE_S)
    alive = [process for process in alive if not is_helper(process)]  # just begun, it was not known by its command yet
    assert not alive, f"processes left: {[' '.join(p.cmdline())[:200] for p in alive]}"
    deadline, pause = monotonic() + DEADLINE_S, threading.Event()
    while (left := stems_left() - before) and monotonic() < deadline:  # a reaper may still be at it
        pause.wait(0.02)
    assert left == set()


@pytest.fixture
def output_of(tmp_path: Path) -> Callable[..., str]:
    """Runs a program in a process of its own: code -> what it prints. It may leave no other word.

    Warnings are errors; without `strict` they are as Python shows them, which says nothing of what libraries do among themselves.
    """

    def run(code: str, *, strict: bool = True, deadline_s: float = 60) -> str:
        script = tmp_path / "example.py"
        script.write_text(code)
        done = subprocess.run(
            [sys.executable, *(["-W", "error"] if strict else []), str(script)],
            capture_output=True,
            text=True,
            timeout=deadline_s,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    return run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests, too; by default only where they are named")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # one of several processes
        own_shared_memory()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes for the tests: one a core where all quick ones run and each can have a /dev/shm of its own; else this one alone."""
    return min(os.cpu_count() or 1, MOST_PROCESSES) if not wants_slow(config) and can_own_shared_memory() else 0


def wants_slow(config: pytest.Config) -> bool:
    """Whether slow tests run: those of a place that is named, those that -m selects, or all."""
    is_whole_tree = config.args_source is not pytest.Config.ArgsSource.ARGS
    return bool(config.option.all or config.option.markexpr) or not is_whole_tree


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """A slow test without a reason is an error of its file's collection, which processes side by side report, too."""
    made = yield
    for item in made if isinstance(made, list) else [made]:
        mark = item.get_closest_marker("slow") if isinstance(item, pytest.Item) else None
        if mark is not None and not mark.kwargs.get("reason"):
            raise pytest.Collector.CollectError(f"{item.nodeid} is slow without a reason: pytest.mark.slow(reason=...)")
    return made


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fast tests first. What the imports made is for good: else every test's collection of garbage would go over it again."""
    if not wants_slow(config):
        left_out = [item for item in items if item.get_closest_marker("slow") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("slow") is None]
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    keep_together(items)
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file of tests has imported and kept is for good, too: with all of it, a collection of garbage takes half a second."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
