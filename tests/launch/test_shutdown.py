"""Launchers that are stopped, interrupted and killed; and excessive output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from time import monotonic

import pytest

from tests.launch.launch_kit import Run, all_end, wait_for_ranks

pytestmark = pytest.mark.slow(reason="each starts a launcher and its ranks and waits for their end")

STAYING = """
import sys
import shmload
from tests.launch.rank_functions import stay

if __name__ == "__main__":
    shmload.spawn(stay, (".", sys.argv[1]), 2, start_method=sys.argv[2], grace_s=5)
"""


@pytest.fixture
def staying(started: Run, tmp_path: Path) -> Run:
    """Returns a function that starts a launcher whose ranks stay."""
    (tmp_path / "program.py").write_text(STAYING)

    def start(how: str = "idle", start_method: str = "fork") -> subprocess.Popen[str]:
        return started("program.py", how, start_method)

    return start


def test_interrupt_ends_all_ranks_with_one_message(staying: Run, tmp_path: Path) -> None:
    """^C goes to the launcher's process group; here ranks get it as well, before the launcher looks, as from a job scheduler."""
    launcher = staying()
    pids = wait_for_ranks(tmp_path, 2, launcher)
    assert pids == [os.getpgid(pid) for pid in pids], "the terminal's ^C must not reach them"
    os.kill(launcher.pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    os.killpg(launcher.pid, signal.SIGINT)
    os.kill(launcher.pid, signal.SIGCONT)
    out, err = launcher.communicate(timeout=120)
    assert all_end(pids, 0)
    assert launcher.returncode == -signal.SIGINT
    assert (out, err.count("Traceback"), err.splitlines()[-1]) == ("", 1, "KeyboardInterrupt")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_ends_all_and_then_the_launcher(number: int, staying: Run, tmp_path: Path) -> None:
    launcher = staying(start_method="spawn")
    pids = wait_for_ranks(tmp_path, 2, launcher)
    launcher.send_signal(number)
    assert launcher.communicate(timeout=120) == ("", "")
    assert launcher.returncode == -number
    assert all_end(pids, 0)


LATER = (
    """
import os, signal
from shmload.launch.watching import RankWatch

look, calls = RankWatch.look, []

def look_and_signal(self, timeout_s):
    if calls:
        os.kill(os.getpid(), signal.SIGTERM)  # after the look that saw a rank's death
    found = look(self, timeout_s)
    calls.extend(found)
    return found

RankWatch.look = look_and_signal
"""
    + STAYING
)


def test_signal_to_all_stops_the_run_even_if_a_rank_dies_first(started: Run, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LATER)
    launcher = started("program.py", "idle", "fork")
    pids = wait_for_ranks(tmp_path, 2, launcher)
    os.kill(pids[0], signal.SIGTERM)
    assert launcher.communicate(timeout=120) == ("", "")
    assert launcher.returncode == -signal.SIGTERM
    assert all_end(pids, 0)


@pytest.mark.parametrize(("how", "start_method"), [("idle", "fork"), ("idle", "spawn"), ("in C", "fork")])
def test_no_rank_outlives_a_launcher_that_is_killed(how: str, start_method: str, staying: Run, tmp_path: Path) -> None:
    launcher = staying(how, start_method)
    pids = wait_for_ranks(tmp_path, 2, launcher)
    launcher.kill()
    assert all_end(pids)


IMPORTING = """
import os, signal
import shmload
from tests.launch.rank_functions import _up, write_lines

if __name__ == "__main__":
    shmload.spawn(write_lines, nprocs=2)
else:
    _up(".", int(os.environ["RANK"]))
    signal.pause()
"""


def test_rank_that_still_imports_the_program_ends_with_its_launcher(started: Run, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(IMPORTING)
    launcher = started("program.py")
    pids = wait_for_ranks(tmp_path, 2, launcher)
    launcher.kill()
    assert all_end(pids)


IMPATIENT = """
import shmload
from tests.launch.rank_functions import ignore

if __name__ == "__main__":
    shmload.spawn(ignore, (".",), 2, start_method="fork", grace_s=600)
"""


def test_second_interrupt_ends_the_grace_period(started: Run, tmp_path: Path) -> None:
    """A second signal within half a second counts as the first, because terminals and `timeout` send some twice."""
    (tmp_path / "program.py").write_text(IMPATIENT)
    launcher = started("program.py")
    pids = wait_for_ranks(tmp_path, 2, launcher)
    launcher.send_signal(signal.SIGINT)
    deadline = monotonic() + 30
    while monotonic() < deadline:
        try:
            launcher.wait(0.2)
            break
        except subprocess.TimeoutExpired:
            launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=120)
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert all_end(pids, 0)


OWN_HANDLER = """
import signal
import shmload
from tests.launch.rank_functions import stay

class Enough(Exception):
    pass

def handle(number, frame):
    global times
    times += 1
    print("handled", times, flush=True)
    if times == 2:
        raise Enough

if __name__ == "__main__":
    times = 0
    signal.signal(signal.SIGTERM, handle)
    try:
        shmload.spawn(stay, (".",), 2, start_method="fork")
    except Enough:
        print("enough", signal.getsignal(signal.SIGTERM) is handle)
"""


def test_signal_handler_of_the_program_decides(started: Run, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(OWN_HANDLER)
    launcher = started("program.py")
    pids = wait_for_ranks(tmp_path, 2, launcher)
    assert launcher.stdout is not None
    launcher.send_signal(signal.SIGTERM)
    assert launcher.stdout.readline() == "handled 1\n"
    assert not all_end(pids, 0)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.communicate(timeout=120) == ("handled 2\nenough True\n", "")
    assert all_end(pids, 0)


MEANWHILE = """
import sys
import shmload
from tests.launch.rank_functions import stay_until_sigterm

if __name__ == "__main__":
    ranks = shmload.spawn(stay_until_sigterm, (".",), 2, join=False, start_method="fork")
    sys.stdin.readline()
"""


def test_ranks_end_with_a_program_that_does_not_wait_for_them(started: Run, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(MEANWHILE)
    launcher = started("program.py", stdin=subprocess.PIPE)
    pids = wait_for_ranks(tmp_path, 2, launcher)
    assert launcher.communicate("\n", timeout=120) == ("", "")
    assert launcher.returncode == 0
    assert all_end(pids, 0)
    assert len(list(tmp_path.glob("left *"))) == 2, "ranks must get SIGTERM and not be killed"


FLOOD = """
import shmload
from tests.launch.rank_functions import write_many_lines

if __name__ == "__main__":
    shmload.spawn(write_many_lines, (25_000,), 2, start_method="fork")
"""


def test_many_lines_are_forwarded_complete_and_in_order(started: Run, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FLOOD)
    out, err = started("program.py").communicate(timeout=120)
    for text, name, width in ((out, "out", 97), (err, "err", 89)):
        for rank in range(2):
            prefix = f"[rank {rank}] "
            found = [line[len(prefix) :] for line in text.splitlines() if line.startswith(prefix)]
            assert found == [f"{rank} {name} {number} " + "x" * (number % width) for number in range(25_000)]
        assert text.count("\n") == 50_000


STUCK = """
import shmload
from tests.launch.rank_functions import write_forever_or_fail

if __name__ == "__main__":
    shmload.spawn(write_forever_or_fail, nprocs=2, start_method="fork")
"""


def test_blocked_output_does_not_delay_a_failure(started: Run, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STUCK)
    process = started("program.py")
    assert process.stderr is not None
    assert re.search(r"rank 1 .* raised ValueError: broken", process.stderr.read())
    assert process.wait(30) == 1
