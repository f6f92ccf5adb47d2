"""Fixtures and hooks for all tests. After each test, /dev/shm and child processes must be as before."""

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
from tests import warm_interpreter
from tests.side_by_side import KeptTogether, can_own_shared_memory, own_shared_memory

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # background jobs of a shell ignore it, but some tests send ^C
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup ignores it, but some tests send SIGHUP to launchers
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

if sys.version_info >= (3, 14):  # forkserver is the default there, and cannot receive the tests' local classes
    multiprocessing.set_start_method("fork")

# The duration of an example depends on the load of the machine, so deadlines are disabled, as in CI.
settings.register_profile("shmload", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shmload")

DEADLINE_S = 60.0
MOST_PROCESSES = 8
_HELPERS = (  # they live as long as the process, like `helper_pids`
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
)


def stems_left() -> set[str]:
    """Returns groups in /dev/shm that belong to this process or to no live process. Those of other test suites are ignored."""
    return {found.stem for found in janitor.find_leftovers(guard_s=-1)} | {
        match[1] for name in os.listdir("/dev/shm") if (match := STEM_PATTERN.fullmatch(name)) and process_stem() in name
    }


def children() -> set[int]:
    """Returns this process's children, except multiprocessing's own helpers."""
    return {child.pid for child in psutil.Process().children(recursive=True) if not is_helper(child)}


def helper_pids() -> set[int | None]:
    """Returns the process ids of the template from which spawn and forkserver workers are forked, and of the warm interpreter."""
    return {template._current.process.pid if template._current else None, warm_interpreter.server_pid()}


def is_helper(child: psutil.Process) -> bool:
    """Returns whether a child is a helper of multiprocessing or of tests, or has ended."""
    try:
        return child.pid in helper_pids() or any(name in " ".join(child.cmdline()) for name in _HELPERS)
    except psutil.Error:
        return True


@pytest.fixture(autouse=True)
def shm_clean() -> Iterator[None]:
    """Checks that /dev/shm, child processes and the current sample are the same after a test as before it."""
    before, alive_before = stems_left(), children()
    yield
    gc.collect()
    new = [psutil.Process(pid) for pid in children() - alive_before if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(new, timeout=DEADLINE_S)
    # A helper that had just started was not recognized by its command.
    alive = [process for process in alive if not is_helper(process)]
    assert not alive, f"processes left: {[' '.join(p.cmdline())[:200] for p in alive]}"
    deadline, pause = monotonic() + DEADLINE_S, threading.Event()
    while (left := stems_left() - before) and monotonic() < deadline:  # a reaper may still be working
        pause.wait(0.02)
    assert left == set()
    sample_rng = sys.modules.get("shmload.worker.sample_rng")
    assert sample_rng is None or sample_rng._threads.now.reading is None, "the reading of a sample was not ended"


@pytest.fixture
def output_of(tmp_path: Path) -> Callable[..., str]:
    """Returns a function that runs a program as its own process and returns its output; it may print nothing else.

    Warnings are errors. Without `strict`, they are handled as by default, which hides those of other libraries. A `warm` program
    starts without delay (warm_interpreter.py).
    """

    def run(code: str, *, strict: bool = True, deadline_s: float = 60, warm: bool = False) -> str:
        script = tmp_path / "example.py"
        script.write_text(code)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
        if warm:
            done = warm_interpreter.run_program(script, strict=strict, env=env, deadline_s=deadline_s)
        else:
            command = [sys.executable, *(["-W", "error"] if strict else []), str(script)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, env=env)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    return run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests, too; by default only where they are named")


def pytest_configure(config: pytest.Config) -> None:
    # other programs of this user remove what the loaders that a test kills have left in the common /dev/shm
    if hasattr(config, "workerinput") or can_own_shared_memory():
        own_shared_memory()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns the number of test processes: one per core if only quick tests run and each process can have its own /dev/shm; else
    one.
    """
    return min(os.cpu_count() or 1, MOST_PROCESSES) if not wants_slow(config) and can_own_shared_memory() else 0


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> KeptTogether:
    """Returns what divides the tests among processes."""
    return KeptTogether(config, log, divides_files=wants_slow(config))


def wants_slow(config: pytest.Config) -> bool:
    """Returns whether slow tests run: those of a path that is given, those that -m selects, or all."""
    is_whole_tree = config.args_source is not pytest.Config.ArgsSource.ARGS
    return bool(config.option.all or config.option.markexpr) or not is_whole_tree


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Makes a slow test without a reason an error of its file's collection, which parallel processes report, too."""
    made = yield
    for item in made if isinstance(made, list) else [made]:
        mark = item.get_closest_marker("slow") if isinstance(item, pytest.Item) else None
        if mark is not None and not mark.kwargs.get("reason"):
            raise pytest.Collector.CollectError(f"{item.nodeid} is slow without a reason: pytest.mark.slow(reason=...)")
    return made


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Moves fast tests first, and freezes the objects of imports, so that each test's garbage collection does not visit them
    again.
    """
    if not wants_slow(config):
        left_out = [item for item in items if item.get_closest_marker("slow") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("slow") is None]
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Freezes what a test file has imported and kept: otherwise each garbage collection takes half a second."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
