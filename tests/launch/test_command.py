"""`shmload launch` with real processes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from shmload import ShmLoader
from shmload.formats import ArrayDataset
from tests.launch.launch_kit import Run, all_end, assert_signal_ends_ranks, wait_for_ranks

pytestmark = pytest.mark.slow(reason="each runs the launcher and its scripts in processes of their own")

LAUNCH = ("-m", "shmload", "launch")
PRINT_ENVIRONMENT = """
import os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
print(*(os.environ[name] for name in names), sys.argv, __name__)
"""
STAY = """
import os
from tests.launch.rank_functions import stay
stay(int(os.environ["LOCAL_RANK"]), ".")
"""


@pytest.fixture
def printing_script(tmp_path: Path) -> str:
    """Returns a script that prints its environment and arguments."""
    (tmp_path / "tell.py").write_text(PRINT_ENVIRONMENT)
    return "tell.py"


def test_script_runs_in_each_rank_with_its_arguments(started: Run, printing_script: str) -> None:
    process = started(*LAUNCH, "--nprocs", "2", printing_script, "--nprocs", "7", "-m", "x y", "--", "-z")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    lines = sorted(out.splitlines())
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        argv = re.escape(repr([printing_script, "--nprocs", "7", "-m", "x y", "--", "-z"]))
        assert re.fullmatch(rf"\[rank {rank}\] {rank} {rank} 2 2 0 127\.0\.0\.1 \d+ {argv} __main__", line)


def test_without_a_number_there_is_one_rank_without_a_gpu(started: Run, printing_script: str) -> None:
    if os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd"):
        pytest.skip("there is a GPU driver")
    out, _ = started(*LAUNCH, printing_script).communicate(timeout=120)
    assert out.startswith("[rank 0] 0 0 1 1 ")
    assert out.count("\n") == 1


def test_module_runs_in_each_rank(started: Run, printing_script: str) -> None:
    process = started(*LAUNCH, "--nprocs", "1", "--module", "tell", "-a")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert out.endswith("tell.py', '-a'] __main__\n")


def test_several_machines_are_one_world(started: Run, printing_script: str) -> None:
    both = [
        started(*LAUNCH, "--nprocs", "2", "--nnodes", "2", "--node-rank", str(node), "--master-addr", "somewhere", printing_script)
        for node in range(2)
    ]
    lines = sorted(line for process in both for line in process.communicate(timeout=120)[0].splitlines())
    assert [line.partition(" [")[0] for line in lines] == [
        f"[rank {rank}] {rank} {rank % 2} 4 2 {rank // 2} somewhere 29500" for rank in range(4)
    ]


def test_output_goes_to_files_if_asked(started: Run, printing_script: str, tmp_path: Path) -> None:
    process = started(*LAUNCH, "--nprocs", "2", "--logs", "logs", printing_script)
    assert process.communicate(timeout=120) == ("", "")
    assert (tmp_path / "logs/rank_1.log").read_text().startswith("1 1 2 2 ")


def test_failure_ends_with_its_traceback_and_code_1(started: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, signal\nif os.environ['RANK'] == '1':\n    raise ValueError('broken')\nsignal.pause()\n"
    )
    process = started(*LAUNCH, "--nprocs", "3", "script.py")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    message = err[err.index("shmload launch: ") :]
    assert re.fullmatch(
        r"shmload launch: rank 1 \(pid \d+\) exited with code 1, the first of 3 to fail\.\n\n"
        r"The end of its stderr:\n"
        r'Traceback \(most recent call last\):\n  File ".*script\.py", line 3, in <module>\n'
        r"    raise ValueError\('broken'\)\nValueError: broken\n\n"
        r"ranks 0 and 2 ended when asked to \(SIGTERM\)\n",
        message,
    )
    assert "[rank 1] ValueError: broken\n" in err[: err.index("shmload launch: ")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_all_ranks_in_order_with_one_line(number: signal.Signals, started: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STAY)
    process = started(*LAUNCH, "--nprocs", "2", "script.py")
    assert_signal_ends_ranks(process, wait_for_ranks(tmp_path, 2, process), number)


def test_killed_launcher_ends_its_scripts(started: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STAY)
    process = started(*LAUNCH, "--nprocs", "2", "script.py")
    pids = wait_for_ranks(tmp_path, 2, process)
    process.kill()
    assert all_end(pids)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.py"], "there is no file 'nothing.py'"),
        (["--no-python", "tell.py"], "there is no program 'tell.py' in PATH; in this folder it is ./tell.py"),
        (["--nnodes", "2", "tell.py"], "with several machines they must know where machine 0 is"),
        (["--logs", "tell.py/logs", "tell.py"], "tell.py/logs: Not a directory"),
        (["--node-rank", "1", "tell.py"], "machines are numbered from 0 to 0; got 1"),
    ],
)
def test_wrong_command_line_is_refused(arguments: list[str], words: str, started: Run, printing_script: str) -> None:
    process = started(*LAUNCH, *arguments)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert words in " ".join(re.sub(r"[│╭╮╰╯─]", " ", err).split())


LOADING = """
import os
import numpy as np
from shmload import ShmLoader
from shmload.formats import ArrayDataset

with ShmLoader(ArrayDataset({"x": np.arange(12)}), batch_size=2, seed=3, shuffle=True) as loader:
    print(os.environ["RANK"], [batch["x"].tolist() for batch in loader], flush=True)
"""


def test_loader_in_a_script_finds_its_rank(started: Run, tmp_path: Path) -> None:
    """Scripts under torchrun are tested in tests/examples and tests/pipeline."""
    (tmp_path / "script.py").write_text(LOADING)
    process = started(*LAUNCH, "--nprocs", "2", "script.py")
    out, err = process.communicate(timeout=90)
    assert (process.returncode, err) == (0, "")
    expected = []
    for rank in range(2):
        dataset = ArrayDataset({"x": np.arange(12)})
        with ShmLoader(dataset, batch_size=2, seed=3, shuffle=True, rank=rank, world_size=2) as loader:
            expected.append(f"[rank {rank}] {rank} {[batch['x'].tolist() for batch in loader]}")
    assert expected == sorted(out.splitlines())


def test_output_of_killed_ranks_is_complete(started: Run, tmp_path: Path) -> None:
    """Their output is not buffered."""
    (tmp_path / "script.py").write_text("import os\nprint('said')\nos.kill(os.getpid(), 9)\n")
    process = started(*LAUNCH, "--nprocs", "1", "script.py")
    out, err = process.communicate(timeout=120)
    assert out == "[rank 0] said\n"
    assert "rank 0" in err
    assert "was killed by SIGKILL" in err


def test_full_disk_does_not_end_ranks_and_is_reported_at_the_end(started: Run, printing_script: str) -> None:
    with open("/dev/full", "w") as full:
        process = started(*LAUNCH, "--nprocs", "2", printing_script, stdout=full)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (os.EX_IOERR, "shmload: cannot write its output: No space left on device\n")


def test_closed_output_pipe_is_not_a_failure(started: Run, printing_script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # otherwise nothing is left to write when the interpreter ends
    reader, writer = os.pipe()
    os.close(reader)
    process = started(*LAUNCH, "--nprocs", "2", printing_script, stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
