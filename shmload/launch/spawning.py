"""`shmload.spawn`: run a function in one process per GPU.

The start method `forkserver` is refused: its processes are children of the server and not of the launcher, so neither their signals
nor their lifetimes are tied to the launcher.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shmload.launch.environment import LOOPBACK, NodePlace, held_port
from shmload.launch.fork_start import start_forked
from shmload.launch.rank_specs import number_of_ranks, rank_specs
from shmload.launch.signals import Stopped
from shmload.launch.spawn_start import start_spawned
from shmload.launch.spawned_ranks import GRACE_S, SpawnedRanks
from shmload.shm.host import Host

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
