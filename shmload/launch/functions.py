"""A rank as a function: `shmload.spawn`. Processes are multiprocessing's: what it shares (queues, locks, tensors) can be given.

Its `spawn` is taken in one step to a process that begins as a rank (boot.py) and whose output is caught from its first line, which
multiprocessing has no argument for: `_Popen` is its own `_launch` with that other start. `fork` has no first line to catch.
`forkserver` is refused: its processes are the server's children and not the launcher's, so neither their signals nor their lives
are tied to it.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import ForkProcess, SpawnProcess, set_spawning_popen
from multiprocessing.process import BaseProcess
from typing import Any

from shmload.launch import boot, in_rank
from shmload.launch.commands import booted
from shmload.launch.seat import Child, Ends, Seat
from shmload.launch.signals import SIGNALS

WAYS = ("spawn", "fork")


class Function:
    """Calls `fn(local_rank, *args)` in each rank."""

    def __init__(self, fn: Callable[..., object], args: tuple[Any, ...], start_method: str) -> None:
        if start_method not in WAYS:
            raise ValueError(f"start_method is 'spawn' or 'fork'; got {start_method!r}")
        self._fn = fn
        self._args = args
        self._forks = start_method == "fork"

    def start(self, seat: Seat, ends: Ends) -> Child:
        """Starts the process of a rank.

        Raises:
            TypeError: pickle does not take `fn` or `args`.
        """
        name = f"shmload rank {seat.rank}"
        process: BaseProcess
        if self._forks:
            process = ForkProcess(
                target=_forked, args=(seat, ends, os.getpid(), self._fn, self._args), name=name, daemon=False
            )
        else:
            process = _Process(
                target=in_rank.main, args=(self._fn, self._args, seat.local_rank, ends.report), name=name, daemon=False
            )
            process.place = (seat, ends)
        process.start()
        # else whoever starts another process, in any thread, might bury this one, and at exit all would be waited for
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # private
        return Child(process.pid or 0, lambda: _buried(process))


def _buried(process: BaseProcess) -> int:
    process.join()
    code = process.exitcode
    process.close()
    return code if code is not None else 0


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _forked(seat: Seat, ends: Ends, launcher_pid: int, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
    """What boot.py and exec do for others."""
    os.setpgid(0, 0)
    boot.bind(launcher_pid, seat.cpus)
    for caught in SIGNALS:
        if callable(signal.getsignal(caught)):  # the launcher's
            signal.signal(caught, signal.default_int_handler if caught == signal.SIGINT else signal.SIG_DFL)
    os.dup2(ends.stdout, 1)
    os.dup2(ends.stderr, 2)
    for number, name in ((1, "stdout"), (2, "stderr")):  # the launcher's may be something else by now
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115  # for the process's life
    faulthandler.disable()  # what the program has put in place of its handlers would stay, else
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(seat.environ)
    threads = seat.environ.get("OMP_NUM_THREADS", str(len(seat.cpus)))
    if "torch" in sys.modules and threads.isdecimal() and int(threads):  # it has counted the launcher's processors
        sys.modules["torch"].set_num_threads(int(threads))
    in_rank.main(fn, args, seat.local_rank, ends.report)


class _Process(SpawnProcess):
    place: tuple[Seat, Ends]

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  # multiprocessing's name
        return _Popen(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "place"}


class _Popen(popen_spawn_posix.Popen):
    """multiprocessing's handle of a process that `booted` starts."""

    _fds: list[int]  # what pickled arguments take along

    def _launch(self, process_obj: Any) -> None:
        seat, ends = process_obj.place
        tracker_fd = resource_tracker.getfd()
        told = self._pickled(process_obj)
        job_end, own_end = os.pipe()
        keep = [*self._fds, tracker_fd, job_end, ends.report]
        command = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=job_end)
        try:
            self._process = booted(command, seat, ends, keep)
        except BaseException:
            os.close(own_end)
            raise
        finally:
            os.close(job_end)
        self.pid = self._process.pid
        self.sentinel = os.pidfd_open(self.pid)
        # the child takes the launcher for dead once this pipe has closed
        self.finalizer = util.Finalize(self, _close, (own_end, self.sentinel))
        try:
            with open(own_end, "wb", closefd=False) as file:
                file.write(told)
        except BrokenPipeError:  # it has died already, which is noticed elsewhere
            pass

    def _pickled(self, process_obj: Any) -> memoryview:
        told = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), told)
            reduction.dump(process_obj, told)
        except RuntimeError:  # a program that starts ranks while it is imported
            raise
        except Exception as error:
            raise TypeError(
                f"ranks started by spawn need a function and arguments that pickle takes: {type(error).__name__}: {error}. "
                "Define the function at module level, make in it what cannot travel, or use start_method='fork'"
            ) from error
        finally:
            set_spawning_popen(None)
        return told.getbuffer()

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code; negative: a signal's number; None: it lives."""
        return self._process.poll() if flag == os.WNOHANG else self._process.wait()
