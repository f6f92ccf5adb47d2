"""Data about a loader's processes, read from /proc."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shmload.engine.process_usage import PAGE, Process, add_memory_usage, command_of, usage_of

Proc = Callable[..., str]


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    """Returns a function that writes a /proc of some processes: pid -> (parent, state, command line)."""

    def make(processes: dict[int, tuple[int, str, str]]) -> str:
        for pid, (parent, state, command) in processes.items():
            (tmp_path / str(pid)).mkdir()
            (tmp_path / str(pid) / "stat").write_text(f"{pid} (a ) b) {state} {parent} 1 1")
            (tmp_path / str(pid) / "statm").write_text("900 300 100 1 0 1 0\n")
            (tmp_path / str(pid) / "cmdline").write_text(command.replace(" ", "\0") + "\0")
        return str(tmp_path)

    return make


def test_parent_state_and_memory_of_a_process_are_read(proc: Proc) -> None:
    found = proc({5: (4, "S", "x"), 6: (4, "T", "x"), 7: (4, "t", "x")})
    assert usage_of(5, found) == Process(4, False, 300 * PAGE, 200 * PAGE)
    assert [process and process.is_stopped for process in (usage_of(6, found), usage_of(7, found))] == [True, True]


def test_ended_process_has_no_data(proc: Proc, tmp_path: Path) -> None:
    found = proc({5: (4, "S", "x")})
    assert usage_of(8, found) is None
    assert usage_of(None, found) is None
    assert (command_of(8, found), command_of(None, found)) == ("", "")
    (tmp_path / "5" / "stat").write_text("")
    assert usage_of(5, found) is None


def test_command_of_a_multiprocessing_child_is_its_parents(proc: Proc) -> None:
    helper = "python -c from multiprocessing.spawn import spawn_main"
    found = proc({3: (1, "S", "python train.py --fast"), 4: (3, "S", helper), 5: (4, "S", helper), 6: (99, "S", helper)})
    assert command_of(3, found) == command_of(5, found) == "python train.py --fast"
    assert command_of(6, found) == helper, "the parent has ended"


def test_memory_is_that_of_the_known_workers(proc: Proc) -> None:
    found = proc({5: (4, "S", "x"), 6: (4, "T", "x")})
    report = {"workers": [{"pid": 5}, {"pid": 6}, {"pid": None}], "memory": {"ring_nbytes": 1}}
    add_memory_usage(report, 1, found)
    assert report["memory"] == {"ring_nbytes": 1, "workers_rss_bytes": 600 * PAGE, "workers_private_bytes": 400 * PAGE}
    assert [worker["is_stopped"] for worker in report["workers"]] == [False, True, None]
    assert [worker["rss_bytes"] for worker in report["workers"]] == [300 * PAGE, 300 * PAGE, None]
    add_memory_usage(report, 6, found)
    assert [worker["rss_bytes"] for worker in report["workers"]] == [300 * PAGE, None, None], "6 is a thread of the trainer"
    add_memory_usage(report, 1, found, is_known=False)
    assert report["memory"] == {"ring_nbytes": 1, "workers_rss_bytes": None, "workers_private_bytes": None}
    assert [worker["is_stopped"] for worker in report["workers"]] == [None, None, None]
