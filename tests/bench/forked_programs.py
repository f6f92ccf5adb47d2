"""Programs of the bench command that run as forks of the test's process, which has imported torch and their modules already.

A new interpreter takes seconds to import torch, and a command starts one for each loader. `test_command.py` also runs commands
and their measuring processes in new interpreters.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

import shmload.tools.bench.measure
from shmload import cli
from shmload.tools.bench import bench_job

PROCESSES = SimpleNamespace(PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)  # what bench_job.py uses of subprocess


class MeasuringFork:
    """Stands for subprocess.Popen in bench_job.py: runs the measuring program in a fork, in a session of its own."""

    def __init__(self, command: Sequence[str], *, stdin: int, stdout: IO[Any], stderr: IO[Any], start_new_session: bool) -> None:
        assert list(command[:4]) == [sys.executable, "-P", "-c", bench_job.BOOT]
        assert (stdin, stdout, start_new_session) == (subprocess.PIPE, stderr, True)
        self.returncode: int | None = None
        reading, self._jobs = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            os.close(self._jobs)
            _run(shmload.tools.bench.measure.main, list(command[4:]), reading, stdout.fileno(), stdout.fileno())
        os.close(reading)

    def communicate(self, jobs: bytes) -> None:
        """Sends the jobs, and waits for the end of the process."""
        with open(self._jobs, "wb") as pipe:
            pipe.write(jobs)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


PROCESSES.Popen = MeasuringFork


def run_bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `shmload bench ...` in a fork whose measuring processes are forks, too."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, open(os.devnull) as nothing:
        pid = os.fork()
        if not pid:
            os.chdir(folder)
            bench_job.subprocess = PROCESSES  # type: ignore[assignment]  # has what bench_job.py uses of the module
            _run(cli.main, ["bench", *arguments], nothing.fileno(), out.fileno(), err.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read(), err.read())


def _run(program: Callable[[], None], arguments: list[str], stdin: int, stdout: int, stderr: int) -> NoReturn:
    """Runs a program in this forked process with new standard streams, and ends the process with its exit code."""
    code = 1
    try:
        for number, file in enumerate((stdin, stdout, stderr)):
            os.dup2(file, number)
        # a fork of a fork replaces these files, which must not close the descriptors then
        files = (open(number, mode, closefd=False) for number, mode in enumerate("rww"))  # noqa: SIM115  # open to the end
        sys.stdin, sys.stdout, sys.stderr = files
        sys.argv = ["shmload", *arguments]
        sys.modules.pop("planted", None)  # a new process imports it again
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):  # as by default
            warnings.simplefilter("ignore", category)
        if "PYTHONWARNINGS" in os.environ:
            warnings.simplefilter(os.environ["PYTHONWARNINGS"])  # type: ignore[arg-type]  # an action
        program()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
