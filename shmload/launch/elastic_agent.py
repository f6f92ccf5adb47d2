"""`shmload launch` with restarts and members that come and go: torch.distributed.elastic's agent, with what it does not do.

torch's: rendezvous, membership, ranks and their environment, restarts, log files, the barrier at the end; also how its options are
read. Here: each rank begins by boot.py, so it has processors of its own and dies with the agent; ends are seen by pidfds as they
happen, where the agent looks ten times a second and takes the lowest local rank for the first to fail; lines come out with their
rank before them without a detour through files; and ranks are ended in order, with the same words, as by the launcher of `spawn`.

The agent ends ranks wherever it finds that it must (a failure, new members, a signal, its own end): all of that comes by
`_shutdown`, where ours are ended first, so torch's own way finds nobody left.

Rejected: torch's agent for every launch. It imports torch before the first rank starts, which is 1 to 2 s. So one machine that asks
for restarts and nothing else has them by the command itself (`cli/launch_command.py`).
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser

from shmload.errors import RankFailed
from shmload.launch.environment import LOOPBACK, STATIC_PORT, next_start, threads_of_each
from shmload.launch.rank_specs import BOOT, Child, RankSpec, divided, log_of
from shmload.launch.watching import DRAIN_S, Pipe, RankWatch, Signals, Stopped
from shmload.shm.names import Host
from shmload.torch_names import rank_processes
from shmload.world import OWN_CPUS

Tell = Callable[[str], None]


class RaisingSignals(Signals):
    """The first signal ends whatever the agent is at, also a rendezvous that may last; later ones are kept."""

    def _catch(self, number: int, frame: Any) -> None:
        super()._catch(number, frame)
        if len(self.caught) == 1:
            raise SignalException(f"got signal {number}", signal.Signals(number))


class RankStreams(LogsSpecs):
    """Where torch's log specification sends a stream to no file, a pipe to the printer takes it.

    Attributes:
        watch: of the ranks that are about to start.
        stderrs: their pipes by local rank.
    """

    def __init__(self, files: LogsSpecs, grace_s: float, logs: str) -> None:
        super().__init__()
        self._files, self._grace_s, self._logs = files, grace_s, logs
        self.watch = RankWatch(grace_s)
        self.stderrs: dict[int, Pipe] = {}

    @property
    def root_log_dir(self) -> str:
        """torch's folder."""
        return self._files.root_log_dir

    def log_of(self, rank: int) -> str:
        """The file that boot.py sends a rank's output to; "": none."""
        return log_of(self._logs, rank) if self._logs else ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Makes the pipes; a path under /proc is opened by torch as it would open a log's."""
        found = self._files.reify(envs)
        self.watch.close(DRAIN_S)
        lost = self.watch.printer.lost
        self.watch, self.stderrs = RankWatch(self._grace_s), {}
        self.watch.printer.lost = lost
        for local_rank, environ in envs.items():
            for paths, name in ((found.stdouts, "stdout"), (found.stderrs, "stderr")):
                if self._logs:
                    paths[local_rank] = os.devnull  # boot.py opens the log, to append to it
                elif not paths[local_rank]:
                    end, other = os.pipe()
                    os.close(other)  # torch opens it anew
                    pipe = self.watch.printer.add(end, f"[rank {environ['RANK']}] ", name)
                    paths[local_rank] = f"/proc/self/fd/{end}"
                    if name == "stderr":
                        self.stderrs[local_rank] = pipe
        return found


class RankAgent(LocalElasticAgent):
    """torch's agent of one machine. The methods that it overrides are those that torch documents for subclasses.

    Args:
        tell: is given what there is to say when ranks are started again.

    Attributes:
        failure: why the ranks were ended the last time; empty if they were not, or for no failure.
    """

    def __init__(self, spec: WorkerSpec, streams: RankStreams, signals: Signals, config: LaunchConfig, tell: Tell) -> None:
        super().__init__(spec, streams, log_line_prefix_template=config.log_line_prefix_template or "[rank ${rank}] ")
        self._streams, self._signals, self._tell = streams, signals, tell
        self._interval_s = config.monitor_interval
        self._num_starts = 0
        self.failure = ""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._num_starts:
            ranks, num_max = [worker.global_rank for worker in worker_group.workers], worker_group.spec.max_restarts
            world_size, num_used = worker_group.workers[0].world_size, num_max - self._remaining_restarts
            self._tell(f"{self.failure}{next_start(self._num_starts + 1, ranks, world_size, num_used, num_max)}")
        self._num_starts += 1
        self.failure = ""
        try:
            found: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            self._signals.install()  # torch has put its own handlers there
        watch = self._streams.watch
        processes = rank_processes(self)
        for worker in worker_group.workers:
            process = processes.subprocess_handlers[worker.local_rank].proc
            log = self._streams.log_of(worker.global_rank) or processes.stderrs[worker.local_rank]
            spec = RankSpec(worker.local_rank, worker.global_rank, {}, log=log)
            watch.add(spec, Child(process.pid, process.wait), self._streams.stderrs.get(worker.local_rank))
        watch.printer.thread.start()
        return found

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        watch = self._streams.watch
        if failed := watch.first_failed(self._signals, self._interval_s):
            watch.end(self._signals)
            watch.printer.finish(DRAIN_S)
            self.failure = f"{watch.failure(failed)}\n\n"
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Its arguments differ from release to release of torch."""
        watch = self._streams.watch
        watch.end(self._signals)
        watch.printer.finish(DRAIN_S if self.failure or self._signals.caught else None)
        super()._shutdown(*args, **kwargs)


def run_elastic(arguments: Sequence[str], *, grace_s: float, pin: bool, logs: str, tell: Tell) -> OSError | None:
    """Runs torch's agent of this machine until it ends.

    Args:
        arguments: torchrun's, with the script and its arguments.
        grace_s: seconds from SIGTERM to SIGKILL.
        pin: whether each rank gets processors of its own.
        logs: a folder for one file a rank that its output is appended to; "": it is brought out here.
        tell: is given what there is to say while ranks are started again.

    Returns:
        why not all that ranks printed could be written, if it could not.

    Raises:
        RankFailed: one has failed, and there are no restarts left.
        Stopped: a signal has come.
        ConnectionError: the machines have not found each other.
        ValueError: an argument is wrong.
    """
    args = get_args_parser().parse_args(list(arguments))
    is_alone = args.nnodes in ("1", "1:1") and args.rdzv_backend == "static" and args.master_port is None
    if args.standalone or is_alone:
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
        args.local_addr = args.local_addr or LOOPBACK
    elif args.rdzv_backend == "static":
        args.master_port = args.master_port or STATIC_PORT
    with ExitStack() as stack:
        if args.log_dir is None and args.redirects == args.tee == "0":  # torch wants a folder for files of errors
            args.log_dir = stack.enter_context(TemporaryDirectory(prefix="shmload_"))
        given_threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = given_threads or "1"  # else torch sets it, and warns
        try:
            config, command, command_args = config_from_args(args)
        except AssertionError as error:
            raise ValueError(str(error)) from None
        num_ranks = config.nproc_per_node
        cpus = divided(num_ranks, Host()) if pin else [()] * num_ranks
        _set_environment(given_threads, num_ranks, has_own_cpus=all(cpus))
        table = ";".join(",".join(map(str, own)) for own in cpus)
        rank_command = [*BOOT, str(os.getpid()), table, logs, str(command), *command_args]
        streams = RankStreams(config.logs_specs or DefaultLogsSpecs(), grace_s, logs)
        stack.callback(lambda: streams.watch.close(DRAIN_S))
        signals = stack.enter_context(RaisingSignals(lambda: streams.watch.wake()))
        try:
            spec = _spec(config, rank_command)
            agent = RankAgent(spec, streams, signals, config, tell)
            result = agent.run()
            spec.rdzv_handler.shutdown()  # not after a signal: others may go on without this machine
        except RendezvousError as error:
            raise ConnectionError(f"the machines of this run have not found each other: {type(error).__name__}: {error}") from error
        except SignalException as stopped:
            raise Stopped(stopped.sigval, "; ".join([f"stopped by {stopped.sigval.name}", *streams.watch.fates])) from None
        if result is not None and result.is_failed():
            raise RankFailed(agent.failure.rstrip())
        return streams.watch.printer.lost


def _set_environment(given_threads: str | None, num_ranks: int, *, has_own_cpus: bool) -> None:
    """What ranks inherit, as `environment` in environment.py gives it to those of the other launcher."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    # Rank 0 serves where ranks meet, at each start anew. Else they would meet in a store of the first machine's agent, which keeps
    # the addresses of ranks that have ended, and which a machine that joins later waits for in vain (torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.pop(OWN_CPUS, None)
    if given_threads is None:
        del os.environ["OMP_NUM_THREADS"]
        if num_ranks > 1 and not has_own_cpus:
            os.environ["OMP_NUM_THREADS"] = threads_of_each(num_ranks)


def _spec(config: LaunchConfig, rank_command: Sequence[str]) -> WorkerSpec:
    """What torch's agent is to run, and where it meets others."""
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    is_static = config.rdzv_backend == "static"
    master_addr, master_port = parse_rendezvous_endpoint(config.rdzv_endpoint, -1) if is_static else (None, None)
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=sys.executable,
        args=tuple(word.replace("$", "$$") for word in rank_command),  # torch fills in templates
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=config.max_restarts,
        monitor_interval=1e-6,  # RankAgent waits by itself
        master_addr=master_addr,
        master_port=master_port,
        local_addr=config.local_addr,
    )
