"""`shmload.spawn`: a function in one process per GPU.

A rank as a function: `shmload.spawn`. Processes are multiprocessing's: what it shares (queues, locks, tensors) can be given.

Its `spawn` is taken in one step to a process that begins as a rank (boot.py) and whose output is caught from its first line, which
multiprocessing has no argument for: `_Popen` is its own `_launch` with that other start. `fork` has no first line to catch.
`forkserver` is refused: its processes are the server's children and not the launcher's, so neither their signals nor their lives
are tied to it.
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, util
from multiprocessing import spawn as spawning_tools
from multiprocessing.context import ForkProcess, SpawnProcess, set_spawning_popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, overload

from shmload.launch import boot, in_rank
from shmload.launch.ranks import LOOPBACK, Child, Ends, HeldPort, Place, RankSpec, booted, number_of_ranks, rank_specs
from shmload.launch.supervisor import GRACE_S, SIGNALS, Ranks, Stopped
from shmload.shm.host import Host

WAYS = ("spawn", "fork")


class Function:
    """Calls `fn(local_rank, *args)` in each rank."""

    def __init__(self, fn: Callable[..., object], args: tuple[Any, ...], start_method: str) -> None:
        if start_method not in WAYS:
            raise ValueError(f"start_method is 'spawn' or 'fork'; got {start_method!r}")
        self._fn = fn
        self._args = args
        self._forks = start_method == "fork"

    def start(self, rank_spec: RankSpec, ends: Ends) -> Child:
        """Starts the process of a rank.

        Raises:
            TypeError: pickle does not take `fn` or `args`.
        """
        name = f"shmload rank {rank_spec.rank}"
        process: BaseProcess
        if self._forks:
            process = ForkProcess(
                target=_forked, args=(rank_spec, ends, os.getpid(), self._fn, self._args), name=name, daemon=False
            )
        else:
            process = _Process(
                target=in_rank.main,
                args=(self._fn, self._args, rank_spec.local_rank, ends.report),
                name=name,
                daemon=False,
            )
            process.place = (rank_spec, ends)
        process.start()
        # else whoever starts another process, in any thread, might reap this one, and at exit all would be waited for
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # private
        return Child(process.pid or 0, lambda: _reaped(process))


def _reaped(process: BaseProcess) -> int:
    process.join()
    code = process.exitcode
    process.close()
    return code if code is not None else 0


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _forked(
    rank_spec: RankSpec, ends: Ends, launcher_pid: int, fn: Callable[..., object], args: tuple[Any, ...]
) -> None:
    """What boot.py and exec do for others."""
    os.setpgid(0, 0)
    boot.bind(launcher_pid, rank_spec.cpus)
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
    os.environ.update(rank_spec.environ)
    threads = rank_spec.environ.get("OMP_NUM_THREADS", str(len(rank_spec.cpus)))
    if "torch" in sys.modules and threads.isdecimal() and int(threads):  # it has counted the launcher's processors
        sys.modules["torch"].set_num_threads(int(threads))
    in_rank.main(fn, args, rank_spec.local_rank, ends.report)


class _Process(SpawnProcess):
    place: tuple[RankSpec, Ends]

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  # multiprocessing's name
        return _Popen(process_obj)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "place"}


class _Popen(popen_spawn_posix.Popen):
    """multiprocessing's handle of a process that `booted` starts."""

    _fds: list[int]  # what pickled arguments take along

    def _launch(self, process_obj: Any) -> None:
        rank_spec, ends = process_obj.place
        tracker_fd = resource_tracker.getfd()
        told = self._pickled(process_obj)
        job_end, own_end = os.pipe()
        keep = [*self._fds, tracker_fd, job_end, ends.report]
        command = spawning_tools.get_command_line(tracker_fd=tracker_fd, pipe_handle=job_end)
        try:
            self._process = booted(command, rank_spec, ends, keep)
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
            reduction.dump(spawning_tools.get_preparation_data(process_obj.name), told)
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


class SpawnedRanks:
    """Ranks that run while the program goes on: what `spawn(..., join=False)` gives.

    A thread of the program watches them. They end with the program: in order if it ends by itself, at once if it is killed.
    """

    def __init__(self, ranks: Ranks, port: HeldPort) -> None:
        self._ranks = ranks
        self._port = port
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="shmload launcher", daemon=True)
        self._thread.start()
        self._ranks.started.wait()
        _running.add(self)

    def _run(self) -> None:
        try:
            self._ranks.run()
        except BaseException as error:
            self._error = error
        finally:
            self._port.close()

    def pids(self) -> list[int]:
        """The processes' ids by local rank."""
        return self._ranks.pids

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for all ranks to end. Returns whether they have.

        Args:
            timeout_s: how long to wait; None: as long as it takes.

        Raises:
            RankFailed: one has failed, and the others have been ended.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """Ends all ranks in order: SIGTERM, the grace, SIGKILL. What they had failed of before is for `join` to tell."""
        self._ranks.ask_to_stop()
        self._thread.join()


_running: weakref.WeakSet[SpawnedRanks] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """multiprocessing would wait for them."""
    for ranks in list(_running):
        ranks.stop()


def _forget() -> None:
    _running.clear()


os.register_at_fork(after_in_child=_forget)


@overload
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = ...,
    nprocs: int | None = ...,
    join: Literal[True] = ...,
    *,
    start_method: str = ...,
    grace_s: float = ...,
    pin: bool = ...,
    logs: str | Path | None = ...,
) -> None: ...
@overload
def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = ...,
    nprocs: int | None = ...,
    *,
    join: Literal[False],
    start_method: str = ...,
    grace_s: float = ...,
    pin: bool = ...,
    logs: str | Path | None = ...,
) -> SpawnedRanks: ...
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
) -> SpawnedRanks | None:
    """Runs `fn(local_rank, *args)` in one process per GPU, with torch.distributed's environment set in each.

    `torch.distributed.init_process_group()` needs no further word there, and a ShmLoader takes rank and world size by itself. Each
    rank has processors of its own, near its GPU; its loader's workers keep to them. What a rank prints comes out here with its rank
    before each line. The first rank to fail ends all. No rank outlives this process, however that ends. `shmload launch` does the
    same for scripts. See docs/launch.md.

    Args:
        fn: a function at the top of a module, unless processes are forked.
        args: what it is called with after the rank; pickled, unless processes are forked.
        nprocs: how many processes; None: one for each CUDA device that is visible, and one where there is none.
        join: wait for the end of all. Else `SpawnedRanks` is returned, with `pids()`, `join()` and `stop()`.
        start_method: "spawn", or "fork", which needs a process that has not used CUDA.
        grace_s: seconds that ranks have between SIGTERM and SIGKILL when the run is ended.
        pin: whether ranks get processors of their own: whole cores, all that this process may run on, by NUMA node. With fewer
            cores than ranks they share all.
        logs: a folder for one file a rank, `rank_0.log` and on, which its output is appended to instead.
    Returns:
        nothing, or with `join=False` what to wait for.
    Raises:
        RankFailed: a rank raised, exited with another code than 0 or was killed; the text has its traceback. The others have been
            ended.
        KeyboardInterrupt: ^C; the ranks have been ended in order. A SIGTERM or SIGHUP that this program has no handler for ends
            them likewise, and then this program.
        TypeError: pickle does not take `fn` or `args`; the text says what it refuses.
        RuntimeError: this is a daemonic process, which may have no children.
        ValueError: `nprocs` is less than 1, or there is no such start method.
    """
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "spawn needs a process that may have children; this one is daemonic, as workers of pools and of data loaders are"
        )
    way = Function(fn, args, start_method)
    host = Host()
    num_ranks = number_of_ranks(nprocs, host)
    port = HeldPort()
    try:
        place = Place(LOOPBACK, port.number, run_id=secrets.token_hex(8))
        ranks = Ranks(way, rank_specs(place, num_ranks, host, pin=pin, logs=logs), grace_s)
    except BaseException:
        port.close()
        raise
    if not join:
        spawned = SpawnedRanks(ranks, port)
        if len(spawned.pids()) < num_ranks:  # one could not be started
            spawned.join()
        return spawned
    try:
        ranks.run()
    except Stopped as stopped:
        if stopped.number == signal.SIGINT:
            raise KeyboardInterrupt from None
        os.kill(os.getpid(), stopped.number)
    finally:
        port.close()
    return None
