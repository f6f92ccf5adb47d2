"""`shmload.spawn` with real processes."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest
import torch

import shmload
from shmload import RankFailed
from tests.launch import rank_functions
from tests.launch.launch_kit import Run, all_end

slow = pytest.mark.slow(reason="ranks start as new interpreters")
CPUS = sorted(os.sched_getaffinity(0))
BOTH = pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=slow)])


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Checks that no descriptor and no thread is left."""
    resource_tracker.ensure_running()  # it lives as long as the process, as does the memory of locks
    barrier("fork")
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    assert before == len(os.listdir("/proc/self/fd"))
    assert threads == threading.active_count()


def barrier(start_method: str, parties: int = 3) -> Any:
    return multiprocessing.get_context(start_method).Barrier(parties)


@BOTH
def test_each_rank_has_its_environment_and_cpus(start_method: str, tmp_path: Path) -> None:
    shmload.spawn(rank_functions.write_environment, (str(tmp_path),), 2, start_method=start_method)
    found = [ast.literal_eval((tmp_path / str(rank)).read_text()) for rank in range(2)]
    for rank, (environ, _) in enumerate(found):
        assert (environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert found[0][0]["MASTER_PORT"] == found[1][0]["MASTER_PORT"]
    assert found[0][0]["TORCHELASTIC_RUN_ID"] == found[1][0]["TORCHELASTIC_RUN_ID"]
    shares = [cpus for _, cpus in found]
    if len(CPUS) >= 2:
        assert sorted(shares[0] + shares[1]) == CPUS
        assert [environ["SHMLOAD_RANK_CPUS"] for environ, _ in found] == [str(len(cpus)) for cpus in shares]
    assert sorted(os.sched_getaffinity(0)) == CPUS
    assert "RANK" not in os.environ


def test_all_ranks_share_the_cpus_with_too_few_cores_or_without_pin(tmp_path: Path) -> None:
    count = len(CPUS) + 1
    shmload.spawn(rank_functions.write_environment, (str(tmp_path),), count, start_method="fork")
    found = [ast.literal_eval((tmp_path / str(rank)).read_text()) for rank in range(count)]
    assert [cpus for _, cpus in found] == [CPUS] * count
    assert not any("SHMLOAD_RANK_CPUS" in environ for environ, _ in found)
    shmload.spawn(rank_functions.write_environment, (str(tmp_path),), 1, start_method="fork", pin=False)
    assert "SHMLOAD_RANK_CPUS" not in ast.literal_eval((tmp_path / "0").read_text())[0]


@BOTH
def test_arguments_may_be_shared_objects_and_generators_of_torch(start_method: str) -> None:
    shared = multiprocessing.get_context(start_method).Value("q", 0)
    shmload.spawn(rank_functions.add_seed, (torch.Generator().manual_seed(21), shared), 2, start_method=start_method)
    assert shared.value == 42


@BOTH
def test_lines_have_their_ranks_prefix(start_method: str, capsys: pytest.CaptureFixture[str]) -> None:
    shmload.spawn(rank_functions.write_lines, nprocs=2, start_method=start_method)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert sorted(err.splitlines()) == ["[rank 0] err 0", "[rank 1] err 1"]


def test_lines_go_to_files_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        shmload.spawn(rank_functions.write_lines, nprocs=2, start_method="fork", logs=tmp_path / "logs")
    assert (tmp_path / "logs/rank_1.log").read_text() == "out 1\nerr 1" * 2
    assert capsys.readouterr() == ("", "")


ENDS = {
    "exception": "raised ValueError: the sample is 7 years old, the first of 3 to fail.\n\nTraceback (most recent call last):\n",
    "exit": "exited with code 7, the first of 3 to fail.",
    "SystemExit": "exited with code 9, the first of 3 to fail.",
    "SIGSEGV": "was killed by SIGSEGV, the first of 3 to fail.\n\nThe end of its stderr:\nFatal Python error: Segmentation fault\n",
    "SIGKILL": "was killed by SIGKILL, the first of 3 to fail. If no one killed it, the kernel did because memory ran out",
    "SIGINT": "was killed by SIGINT, the first of 3 to fail.",
}


@pytest.mark.parametrize(
    ("how", "start_method"),
    [*((how, "fork") for how in ENDS), *(pytest.param(how, "spawn", marks=slow) for how in ("exception", "SIGSEGV"))],
)
def test_first_rank_to_fail_ends_all(how: str, start_method: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as error:
        shmload.spawn(rank_functions.fail, (how, barrier(start_method), str(tmp_path)), 3, start_method=start_method)
    assert monotonic() - ast.literal_eval((tmp_path / "time").read_text()) < 60.0
    text = str(error.value)
    assert re.match(rf"rank 1 \(pid \d+\) {re.escape(ENDS[how])}", text)
    assert text.endswith("\n\nranks 0 and 2 ended when asked to (SIGTERM)")
    if how == "exception":
        assert "in fail\n" in text
        assert "in_rank.py" not in text
    if how == "SIGSEGV":
        assert 'rank_functions.py", line' in text


DISPLACED = """
import os, signal, shmload
def fail(rank):
    os.kill(os.getpid(), signal.SIGSEGV)
signal.signal(signal.SIGSEGV, lambda number, frame: None)
try:
    shmload.spawn(fail, (), 1, start_method="fork")
except RuntimeError as error:
    print(error)
"""


def test_signal_handlers_of_the_program_do_not_affect_ranks() -> None:
    """A library in the program may have replaced faulthandler's handlers."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run([sys.executable, "-c", DISPLACED], capture_output=True, text=True, timeout=120, env=env)
    assert "The end of its stderr:\nFatal Python error: Segmentation fault" in done.stdout


def test_last_output_is_read_from_the_log(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"The end of its stderr:\nFatal Python error: Segmentation fault"):
        shmload.spawn(rank_functions.fail, ("SIGSEGV", barrier("fork"), str(tmp_path)), 3, start_method="fork", logs=tmp_path)


def test_last_output_is_not_that_of_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "rank_1.log").write_text("Traceback (most recent call last):\nValueError: yesterday's error\n")
    with pytest.raises(RankFailed, match=r"rank 1 \(pid \d+\) exited with code 7") as error:
        shmload.spawn(rank_functions.fail, ("exit", barrier("fork"), str(tmp_path)), 3, start_method="fork", logs=tmp_path)
    assert "yesterday" not in str(error.value)


def test_rank_that_ignores_sigterm_is_killed_after_the_grace_period() -> None:
    begin = monotonic()
    with pytest.raises(RankFailed) as error:
        shmload.spawn(rank_functions.ignore_sigterm, (barrier("fork"),), 3, start_method="fork", grace_s=0.5)
    assert 0.5 < monotonic() - begin < 60
    assert str(error.value).endswith(
        "\n\nrank 2 ended when asked to (SIGTERM)\nrank 0 did not end within 0.5 s of SIGTERM and had to be killed (SIGKILL)"
    )


def test_other_ranks_get_sigterm_as_soon_as_an_exception_is_reported(tmp_path: Path) -> None:
    """This holds however long the failed rank takes to exit; ranks that get SIGTERM may still finish something."""
    with pytest.raises(RankFailed, match=r"^rank 1 .* raised ValueError: broken") as error:
        shmload.spawn(rank_functions.fail_slowly, (barrier("fork", 2), str(tmp_path)), 2, start_method="fork", grace_s=90)
    assert (tmp_path / "left").exists()
    assert (tmp_path / "outlived").exists()
    assert str(error.value).endswith("\n\nrank 0 ended when asked to (SIGTERM)"), (
        "rank 1 was already ending, so it must not get SIGTERM"
    )


def test_processes_started_by_a_rank_end_with_it(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="raised ValueError: broken"):
        shmload.spawn(rank_functions.leave_a_child, (barrier("fork", 2), str(tmp_path)), 2, start_method="fork")
    assert all_end([int((tmp_path / "child").read_text())])


@pytest.mark.slow(reason="runs two ranks twenty times, one after the other")
def test_twenty_runs_connect_without_a_port_collision() -> None:
    for _ in range(20):
        shmload.spawn(rank_functions.meet, nprocs=2, start_method="fork")


@pytest.mark.slow(reason="runs two ranks eight times at once")
def test_concurrent_runs_use_different_ports() -> None:
    running = [shmload.spawn(rank_functions.meet, nprocs=2, join=False, start_method="fork") for _ in range(8)]
    assert [ranks.join() for ranks in running] == [True] * 8


@pytest.mark.slow(reason="ranks start as new interpreters, which start some in turn")
def test_rank_may_launch_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    shmload.spawn(rank_functions.nest, nprocs=1)
    out = capsys.readouterr().out.splitlines()
    assert sorted(out) == ["[rank 0] [rank 0] 0 0 2 2 True", "[rank 0] [rank 1] 1 1 2 2 True"]


def test_ranks_run_while_the_program_continues(tmp_path: Path) -> None:
    ranks = shmload.spawn(rank_functions.stay, (str(tmp_path),), 2, join=False, start_method="fork")
    assert not ranks.join(0)
    assert multiprocessing.active_children() == [], "multiprocessing must not wait for the ranks"
    assert [psutil.Process(pid).is_running() for pid in ranks.pids()] == [True] * 2
    ranks.stop()
    assert ranks.join()
    ranks.stop()
    assert not any(psutil.pid_exists(pid) for pid in ranks.pids())


def test_join_raises_a_failure_that_happened_before(tmp_path: Path) -> None:
    ranks = shmload.spawn(rank_functions.fail, ("exception", barrier("fork"), str(tmp_path)), 3, join=False, start_method="fork")
    with pytest.raises(RankFailed, match="raised ValueError: the sample is 7 years old"):
        ranks.join()


def test_error_names_what_cannot_be_pickled_and_no_rank_is_left() -> None:
    with pytest.raises(
        TypeError,
        match=r"can be pickled: .*lambda.*Define the function at module level, create in it what cannot be pickled, or use start_method='fork'",
    ):
        shmload.spawn(lambda rank: None, nprocs=2)
    with pytest.raises(TypeError, match=r"arguments that can be pickled: TypeError: .*lock.*Define"):
        shmload.spawn(rank_functions.stay, (threading.Lock(),), nprocs=2, join=False)
    with pytest.raises(TypeError, match=r"arguments that can be pickled: RuntimeError: A SemLock created in a fork context"):
        shmload.spawn(rank_functions.stay, (multiprocessing.get_context("fork").Lock(),), nprocs=2, join=False)


def test_invalid_spawn_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="start_method is 'spawn' or 'fork'; got 'forkserver'"):
        shmload.spawn(rank_functions.write_lines, start_method="forkserver")
    with pytest.raises(ValueError, match="nprocs is a number of processes from 1 up"):
        shmload.spawn(rank_functions.write_lines, nprocs=0)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]  # set in workers of pools
    with pytest.raises(RuntimeError, match="this one is daemonic, as workers of pools and of data loaders are"):
        shmload.spawn(rank_functions.write_lines)


UNGUARDED = """
import shmload
from tests.launch.rank_functions import write_lines

shmload.spawn(write_lines, nprocs=2)
"""


@slow
def test_program_without_a_main_guard_gets_a_clear_error(started: Run, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(UNGUARDED)
    process = started("program.py")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "exited with code 1, the first of 2 to fail.\n\nThe end of its stderr:\nTraceback" in err
    assert "An attempt has been made to start a new process before" in err


PLAIN = """
import sys
import shmload
from tests.launch.rank_functions import write_lines

shmload.spawn(write_lines, nprocs=2, start_method="fork")
print("torch" in sys.modules, "numpy" in sys.modules)
"""


def test_launcher_imports_neither_torch_nor_numpy(started: Run, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PLAIN)
    out, err = started("program.py").communicate(timeout=120)
    assert out.splitlines()[-1] == "False False"
    assert sorted(err.splitlines()) == ["[rank 0] err 0", "[rank 1] err 1"]
