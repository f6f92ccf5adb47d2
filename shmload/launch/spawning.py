"""`shmload.spawn`: run a function in one process per GPU.

Processes are multiprocessing's, so objects that it shares (queues, locks, tensors) can be passed as arguments. With the start
method "spawn", multiprocessing only pickles the process. It is started here, because it must begin with boot.py, and its output
must be captured from the first line. `forkserver` is refused: its processes are children of the server and not of the launcher, so
neither their signals nor their lifetimes are tied to the launcher.
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import popen_fork, popen_spawn_posix, reduction, resource_tracker
from multiprocessing import spawn as spawning_tools
from multiprocessing.context import ForkProcess, SpawnProcess, set_spawning_popen
from pathlib import Path
from typing import Any

from shmload.errors import RankFailed
from shmload.launch import boot, in_rank
from shmload.launch.environment import LOOPBACK, NodePlace, held_port
from shmload.launch.rank_specs import Ends, RankSpec, Start, booted, number_of_ranks, rank_specs
from shmload.launch.signals import SIGNALS, Signals, Stopped
from shmload.launch.watching import DRAIN_S, RankWatch, RunningRank
from shmload.processes.child import Child
from shmload.shm.host import Host

GRACE_S = 5.0  # time between SIGTERM and SIGKILL


class SpawnedRanks:
    """The ranks of this machine, as `spawn(..., join=False)` returns them.

    A thread of the program watches them while the program continues. They end with the program: in order if it exits, at once if it
    is killed.

    Args:
        start: function that starts the process of one rank.
        rank_specs: the ranks to start.
        grace_s: seconds between SIGTERM and SIGKILL.
        port: the socket that reserves the meeting port, closed when all ranks have ended; None if another machine reserves it.
    """

    def __init__(self, start: Start, rank_specs: Sequence[RankSpec], grace_s: float, port: socket.socket | None) -> None:
        self._watch = RankWatch(grace_s)
        self._start_one = start
        self._rank_specs = rank_specs
        self._port = port
        self._asked = False
        self._started = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def pids(self) -> list[int]:
        """Return the process ids of the ranks started so far, by local rank."""
        return [one.child.pid for one in self._watch.ranks]

    @property
    def lost(self) -> OSError | None:
        """Return the error because of which some output could not be written; None if there was none. Final after the run."""
        return self._watch.printer.lost

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for all ranks to end. Return whether they have.

        Args:
            timeout_s: seconds to wait, or None to wait without limit.

        Raises:
            RankFailed: a rank failed, and the others were ended.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """End all ranks (SIGTERM, the grace period, SIGKILL) and wait for it. `join` still raises an earlier failure."""
        self._asked = True
        self._watch.wake()
        if self._thread is not None:
            self._thread.join()

    def start(self) -> None:
        """Call `run` in a thread, and return when all ranks have been started. If one could not be started, raise its error."""
        atexit.register(self.stop)
        self._thread = threading.Thread(target=self._run_apart, name="shmload launcher", daemon=True)
        self._thread.start()
        self._started.wait()
        if len(self._watch.ranks) < len(self._rank_specs):  # a rank could not be started
            self.join()

    def _run_apart(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._error = error
        finally:
            atexit.unregister(self.stop)

    def run(self) -> None:
        """Start all ranks in this thread, watch them, and return when all have ended.

        Raises:
            RankFailed: a rank failed.
            Stopped: a signal arrived that the program does not handle itself.
        """
        failed: list[RunningRank] = []
        number = 0
        ended = False
        try:
            with Signals(self._watch.wake) as signals:
                try:
                    for rank_spec in self._rank_specs:
                        if not signals.caught and not self._asked:
                            self._begin(rank_spec)
                    self._watch.printer.thread.start()
                    self._started.set()
                    while self._watch.living and not failed and not number and not self._asked:
                        failed = self._watch.first_failed(signals, None)
                        number = signals.take()
                    ended = not self._watch.living
                    number = number or signals.take()  # a signal that came before the first rank
                finally:
                    self._watch.end(signals)
        finally:
            self._started.set()
            self._watch.close(None if ended and not failed else DRAIN_S)
            if self._port is not None:
                self._port.close()
        if number:
            raise Stopped(number, "; ".join([f"stopped by {signal.Signals(number).name}", *self._watch.fates]))
        if failed:
            raise RankFailed(self._watch.failure(failed))

    def _begin(self, rank_spec: RankSpec) -> None:
        ours: list[int] = []
        theirs: list[int] = []
        try:
            if rank_spec.log:
                theirs.append(os.open(rank_spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666))
            for _ in range(1 if rank_spec.log else 3):  # for stdout, stderr and the report, or only the report
                own, given = os.pipe()
                ours.append(own)
                theirs.append(given)
            child = self._start_one(rank_spec, Ends(theirs[0], theirs[-2], theirs[-1]))
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        stderr = None
        if not rank_spec.log:
            prefix = f"[rank {rank_spec.rank}] "
            self._watch.printer.add(ours[0], prefix, "stdout")
            stderr = self._watch.printer.add(ours[1], prefix, "stderr")
        os.set_blocking(ours[-1], False)
        self._watch.add(rank_spec, child, stderr, ours[-1])


def start_forked(fn: Callable[..., object], args: tuple[Any, ...], rank_spec: RankSpec, ends: Ends) -> Child:
    """Start a rank that calls `fn(local_rank, *args)`, by fork.

    Args:
        fn: the rank's function.
        args: its arguments after the local rank.
        rank_spec: the settings of the rank.
        ends: descriptors for its output.
    """
    target = (rank_spec, ends, os.getpid(), fn, args)
    # Popen and not a started Process, because multiprocessing would reap that whenever it starts another one
    process = popen_fork.Popen(ForkProcess(target=_forked, args=target, name=f"shmload rank {rank_spec.rank}", daemon=False))

    def reap() -> int:
        code = process.wait()
        process.close()
        return code or 0

    return Child(process.pid, reap)


def _forked(rank_spec: RankSpec, ends: Ends, launcher_pid: int, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Do in a forked rank what boot.py and exec do in a spawned one, and call the function."""
    os.setpgid(0, 0)
    boot.bind(launcher_pid, rank_spec.cpus)
    for caught in SIGNALS:
        if callable(signal.getsignal(caught)):  # a handler that the launcher has installed
            signal.signal(caught, signal.default_int_handler if caught == signal.SIGINT else signal.SIG_DFL)
    os.dup2(ends.stdout, 1)
    os.dup2(ends.stderr, 2)
    for number, name in ((1, "stdout"), (2, "stderr")):  # the launcher's program may have replaced sys.stdout or sys.stderr
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115  # for the lifetime of the process
    faulthandler.disable()  # otherwise handlers that the program has replaced would stay
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(rank_spec.environ)
    threads = rank_spec.environ.get("OMP_NUM_THREADS", str(len(rank_spec.cpus)))
    if "torch" in sys.modules and threads.isdecimal() and int(threads):  # torch has counted the launcher's processors
        sys.modules["torch"].set_num_threads(int(threads))
    in_rank.main(fn, args, rank_spec.local_rank, ends.report)


class _Pickled(popen_spawn_posix.Popen):
    """A process that multiprocessing has pickled for a start by spawn; `start_spawned` starts it."""

    _fds: list[int]  # descriptors that pickled arguments refer to

    def _launch(self, process_obj: Any) -> None:
        self.job = io.BytesIO()
        # raises RuntimeError if the program starts ranks while it is being imported
        preparation = spawning_tools.get_preparation_data(process_obj.name)
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, self.job)
            reduction.dump(process_obj, self.job)
        except Exception as error:
            raise TypeError(
                f"ranks started by spawn need a function and arguments that can be pickled: {type(error).__name__}: {error}. "
                "Define the function at module level, create in it what cannot be pickled, or use start_method='fork'"
            ) from error
        finally:
            set_spawning_popen(None)


def start_spawned(fn: Callable[..., object], args: tuple[Any, ...], rank_spec: RankSpec, ends: Ends) -> Child:
    """Start a rank that calls `fn(local_rank, *args)`, in a new interpreter.

    Args:
        fn: the rank's function.
        args: its arguments after the local rank.
        rank_spec: the settings of the rank.
        ends: descriptors for its output.
    Raises:
        TypeError: `fn` or `args` cannot be pickled.
    """
    target = (fn, args, rank_spec.local_rank, ends.report)
    pickled = _Pickled(SpawnProcess(target=in_rank.main, args=target, name=f"shmload rank {rank_spec.rank}", daemon=False))
    tracker_fd: Any = resource_tracker.getfd()
    job_end, own_end = os.pipe()
    command = spawning_tools.get_command_line(tracker_fd=tracker_fd, pipe_handle=job_end)
    try:
        process = booted(command, rank_spec, ends, [*pickled._fds, tracker_fd, job_end, ends.report])
    except BaseException:
        os.close(own_end)
        raise
    finally:
        os.close(job_end)
    try:
        with open(own_end, "wb", closefd=False) as file:
            file.write(pickled.job.getbuffer())
    except BrokenPipeError:  # the rank has died already, which the watch reports
        pass

    def reap() -> int:
        code = process.wait()
        os.close(own_end)  # open until now, because multiprocessing in the rank takes its end for the parent's death
        return code

    return Child(process.pid, reap)


STARTS = {"spawn": start_spawned, "fork": start_forked}


def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    *,
    start_method: str = "spawn",
    grace_s: float = GRACE_S,
    pin: bool = True,
    logs: str | Path | None = None,
) -> SpawnedRanks:
    """Run `fn(local_rank, *args)` in one process per GPU, each with torch.distributed's environment.

    In `fn`, `torch.distributed.init_process_group()` needs no arguments, and a ShmLoader finds its rank and world size itself. Each
    rank has its own processors, near its GPU, which its loader's workers also use. Lines that a rank prints are printed here, with
    the rank's number before each. If one rank fails, all are ended. No rank outlives this process. `shmload launch` does the same
    for scripts. See docs/launch.md.

    Args:
        fn: a function at the top level of a module, unless `start_method="fork"`.
        args: its arguments after the local rank; pickled, unless `start_method="fork"`.
        nprocs: number of processes. If None, one for each visible CUDA device, and at least one.
        join: wait until all ranks have ended. If False, return while they run.
        start_method: "spawn", or "fork", which requires that this process has not used CUDA.
        grace_s: seconds between SIGTERM and SIGKILL when ranks are ended.
        pin: give each rank processors of its own: whole cores, by NUMA node, of those that this process may use. With fewer cores
            than ranks, ranks share all of them.
        logs: a folder for the output of ranks, which is appended to `rank_0.log`, `rank_1.log`, ... there instead of being printed.
    Returns:
        the ranks, with `pids()`, `join()` and `stop()`.
    Raises:
        RankFailed: a rank raised, exited with a code other than 0, or was killed; the message has its traceback. The others were
            ended.
        KeyboardInterrupt: ^C was pressed; the ranks were ended in order. A SIGTERM or SIGHUP that this program does not handle also
            ends the ranks, and then this program.
        TypeError: `fn` or `args` cannot be pickled; the message names the object.
        RuntimeError: this is a daemonic process, which may not have children.
        ValueError: `nprocs` is less than 1 or not an integer, or the start method is unknown.
    """
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "spawn needs a process that may have children; this one is daemonic, as workers of pools and of data loaders are"
        )
    if start_method not in STARTS:
        raise ValueError(f"start_method is 'spawn' or 'fork'; got {start_method!r}")
    host = Host()
    num_ranks = number_of_ranks(nprocs, host)
    port = held_port()
    try:
        place = NodePlace(LOOPBACK, port.getsockname()[1], run_id=secrets.token_hex(8))
        start = partial(STARTS[start_method], fn, args)
        ranks = SpawnedRanks(start, rank_specs(place, num_ranks, host, pin=pin, logs=logs), grace_s, port)
    except BaseException:
        port.close()
        raise
    if not join:
        ranks.start()
        return ranks
    try:
        ranks.run()
    except Stopped as stopped:
        if stopped.number == signal.SIGINT:
            raise KeyboardInterrupt from None
        os.kill(os.getpid(), stopped.number)
    return ranks
