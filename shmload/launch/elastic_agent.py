"""Run `shmload launch` with restarts and machines that join or leave, by an extension of torch.distributed.elastic's agent.

torch does the rendezvous, membership, the environment of ranks, restarts, log files, the final barrier, and the parsing of its
options. Added here: each rank begins with boot.py, so it has processors of its own and dies with the agent; the end of a rank is
noticed at once through a pidfd (torch's agent polls ten times a second and blames the lowest local rank); output lines are printed
with their rank directly, not through files; and ranks are ended in order, with the same messages as in `spawn`.

torch's agent ends ranks in several cases (a failure, new members, a signal, its own end). In all of them it calls `_shutdown`,
which is overridden to end the ranks first, so that torch's own code finds none left.

Rejected: torch's agent for every launch, because it imports torch before the first rank starts, which takes 1 to 2 s. A launch on
one machine that only asks for restarts is restarted by the command itself (`cli/launch_command.py`).
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
from shmload.launch.output import Pipe
from shmload.launch.rank_specs import BOOT, RankSpec, divided, log_of
from shmload.launch.signals import Signals, Stopped
from shmload.launch.watching import DRAIN_S, RankWatch
from shmload.processes.child import Child
from shmload.processes.ranks import OWN_CPUS
from shmload.shm.host import Host
from shmload.torch_names import rank_processes

Tell = Callable[[str], None]  # shows a message to the user


class RaisingSignals(Signals):
    """A recorder of signals, of which the first one also interrupts the agent, even in a long rendezvous."""

    def _catch(self, number: int, frame: Any) -> None:
        super()._catch(number, frame)
        if len(self.caught) == 1:
            raise SignalException(f"got signal {number}", signal.Signals(number))


class RankStreams(LogsSpecs):
    """A log specification for torch's agent, which sends streams without a file through pipes to a `Printer`.

    Args:
        files: torch's own log specification, for the streams that go to files.
        grace_s: seconds between SIGTERM and SIGKILL.
        logs: a folder for one output file per rank, or "".

    Attributes:
        watch: watches the ranks of the current start; a new one for each start.
        stderrs: the pipes of their stderr, by local rank.
    """

    def __init__(self, files: LogsSpecs, grace_s: float, logs: str) -> None:
        super().__init__()
        self._files, self._grace_s, self._logs = files, grace_s, logs
        self.watch = RankWatch(grace_s)
        self.stderrs: dict[int, Pipe] = {}

    @property
    def root_log_dir(self) -> str:
        """Return torch's folder."""
        return self._files.root_log_dir

    def log_of(self, rank: int) -> str:
        """Return the file to which boot.py sends a rank's output, or ""."""
        return log_of(self._logs, rank) if self._logs else ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the watch and the pipes for a start of ranks. Return the pipes' paths in /proc, which torch opens like log files."""
        found = self._files.reify(envs)
        self.watch.close(DRAIN_S)
        lost = self.watch.printer.lost
        self.watch, self.stderrs = RankWatch(self._grace_s), {}
        self.watch.printer.lost = lost
        for local_rank, environ in envs.items():
            for paths, name in ((found.stdouts, "stdout"), (found.stderrs, "stderr")):
                if self._logs:
                    paths[local_rank] = os.devnull  # boot.py appends to the log
                elif not paths[local_rank]:
                    end, other = os.pipe()
                    os.close(other)  # torch opens it again
                    pipe = self.watch.printer.add(end, f"[rank {environ['RANK']}] ", name)
                    paths[local_rank] = f"/proc/self/fd/{end}"
                    if name == "stderr":
                        self.stderrs[local_rank] = pipe
        return found


class RankAgent(LocalElasticAgent):
    """torch's agent of one machine, extended. It overrides only methods that torch documents for subclasses.

    Args:
        spec: what torch's agent runs.
        streams: sends the output of ranks to files or pipes.
        signals: records signals to the launcher.
        config: torch's launch configuration.
        tell: called with a message when ranks are restarted.

    Attributes:
        failure: text about the failure of the newest start, with a blank line at its end; "" if there was none.
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
        logs = {worker.local_rank: self._streams.log_of(worker.global_rank) for worker in worker_group.workers}
        log_begins = {local_rank: os.path.getsize(log) for local_rank, log in logs.items() if log and os.path.exists(log)}
        try:
            found: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            self._signals.install()  # torch has installed its own handlers
        watch = self._streams.watch
        processes = rank_processes(self)
        for worker in worker_group.workers:
            process = processes.subprocess_handlers[worker.local_rank].proc
            log = self._streams.log_of(worker.global_rank) or processes.stderrs[worker.local_rank]
            spec = RankSpec(worker.local_rank, worker.global_rank, {}, log=log)
            stderr, log_begin = self._streams.stderrs.get(worker.local_rank), log_begins.get(worker.local_rank, 0)
            watch.add(spec, Child(process.pid, process.wait), stderr, log_begin=log_begin)
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
        """End the ranks, and call torch's own method, whose arguments differ between releases."""
        watch = self._streams.watch
        watch.end(self._signals)
        watch.printer.finish(DRAIN_S if self.failure or self._signals.caught else None)
        super()._shutdown(*args, **kwargs)


def run_elastic(arguments: Sequence[str], *, grace_s: float, pin: bool, logs: str, tell: Tell) -> OSError | None:
    """Run torch's agent of this machine until it ends.

    Args:
        arguments: torchrun's arguments, with the script and its arguments.
        grace_s: seconds between SIGTERM and SIGKILL.
        pin: give each rank processors of its own.
        logs: a folder for one output file per rank, or "" to print the output here.
        tell: called with a message when ranks are restarted.

    Returns:
        the error because of which some output of ranks could not be written, or None.

    Raises:
        RankFailed: a rank failed, and no restarts are left.
        Stopped: a signal has ended the run.
        ConnectionError: the machines did not find each other.
        ValueError: an argument is invalid.
    """
    args = get_args_parser().parse_args(list(arguments))
    is_alone = args.nnodes in ("1", "1:1") and args.rdzv_backend == "static" and args.master_port is None
    if args.standalone or is_alone:
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
        args.local_addr = args.local_addr or LOOPBACK
    elif args.rdzv_backend == "static":
        args.master_port = args.master_port or STATIC_PORT
    with ExitStack() as stack:
        if args.log_dir is None and args.redirects == args.tee == "0":  # torch needs a folder for error files
            args.log_dir = stack.enter_context(TemporaryDirectory(prefix="shmload_"))
        given_threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = given_threads or "1"  # otherwise torch sets it and warns
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
            spec.rdzv_handler.shutdown()  # skipped after a signal, because other machines may continue without this one
        except RendezvousError as error:
            raise ConnectionError(f"the machines of this run have not found each other: {type(error).__name__}: {error}") from error
        except SignalException as stopped:
            raise Stopped(stopped.sigval, "; ".join([f"stopped by {stopped.sigval.name}", *streams.watch.fates])) from None
        if result is not None and result.is_failed():
            raise RankFailed(agent.failure.rstrip())
        return streams.watch.printer.lost


def _set_environment(given_threads: str | None, num_ranks: int, *, has_own_cpus: bool) -> None:
    """Set environment variables that ranks inherit, as `environment` in environment.py does for the other launcher."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    # Let rank 0 serve a new store at each start. Otherwise ranks would use a store of the first machine's agent, which keeps the
    # addresses of ended ranks, and for which a machine that joins later waits forever (torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.pop(OWN_CPUS, None)
    if given_threads is None:
        del os.environ["OMP_NUM_THREADS"]
        if num_ranks > 1 and not has_own_cpus:
            os.environ["OMP_NUM_THREADS"] = threads_of_each(num_ranks)


def _spec(config: LaunchConfig, rank_command: Sequence[str]) -> WorkerSpec:
    """Return the description for torch's agent of what to run and where the machines meet."""
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
        args=tuple(word.replace("$", "$$") for word in rank_command),  # torch expands templates
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=config.max_restarts,
        monitor_interval=1e-6,  # RankAgent does its own waiting
        master_addr=master_addr,
        master_port=master_port,
        local_addr=config.local_addr,
    )
