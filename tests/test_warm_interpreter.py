"""A warm program runs and ends as in a new interpreter, so that the tests which use one can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm_interpreter import run_program, server_pid

pytestmark = pytest.mark.slow(reason="starts an interpreter that imports torch")

ENDS = {
    "at its last line": "",
    "with a code": "sys.exit(3)",
    "with a text": "sys.exit('no')",
    "by an exception": "raise KeyError('x')",
    "by a signal": "os.kill(os.getpid(), signal.SIGKILL)",
    "by a warning": "warnings.warn('old')",
}
PROGRAM = """
import atexit, os, signal, sys, warnings

class Late:
    def __del__(self): print("destroyed", flush=True)

def spoken(): return __name__

sys.kept = Late()
atexit.register(print, "exits")
print(spoken(), __file__, sys.argv, sys.path[0], os.environ["SOME"], os.getcwd(), sys.warnoptions, flush=True)
"""
SPAWNING = """
from shmload import ShmLoader

class Numbers:
    def __len__(self): return 4
    def __getitem__(self, index): return index

if __name__ == "__main__":
    with ShmLoader(Numbers(), 2, num_workers=1, multiprocessing_context="spawn") as loader:
        print([batch.tolist() for batch in loader])
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "SOME": "word"}


@pytest.mark.parametrize("end", ENDS)
def test_warm_program_prints_and_ends_as_in_a_new_interpreter(end: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM + ENDS[end])
    new = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=60, env=environment())
    warm = run_program(script, strict=True, env=environment(), deadline_s=60)
    assert (warm.returncode, warm.stdout) == (new.returncode, new.stdout)
    assert warm.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]
    assert run_program(script, strict=False, env=environment(), deadline_s=60).returncode == new.returncode * (
        end != "by a warning"
    )


def test_workers_of_a_warm_program_find_its_classes_by_spawn(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SPAWNING)
    done = run_program(tmp_path / "program.py", strict=True, env=environment(), deadline_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[[0, 1], [2, 3]]\n", "")


def test_warm_program_that_does_not_end_is_killed_and_the_next_one_runs(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import signal\nsignal.pause()")
    with pytest.raises(subprocess.TimeoutExpired):
        run_program(script, strict=True, env=environment(), deadline_s=0.1)
    before = server_pid()
    script.write_text("print('here')")
    assert run_program(script, strict=True, env=environment(), deadline_s=60).stdout == "here\n"
    assert server_pid() == before
