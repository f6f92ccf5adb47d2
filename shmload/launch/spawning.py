"""`shmload.spawn`: a function in one process per GPU."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import secrets
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, overload

from shmload.launch.environment import LOOPBACK, HeldPort, Place
from shmload.launch.functions import Function
from shmload.launch.seats import number_of_ranks, seats
from shmload.launch.signals import Stopped
from shmload.launch.supervisor import GRACE_S, Ranks
from shmload.observe.doctor.host import Host


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
        ranks = Ranks(way, seats(place, num_ranks, host, pin=pin, logs=logs), grace_s)
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
