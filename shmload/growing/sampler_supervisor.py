"""The trainer's hold on its samplers: starts their supervisor, hears of them, ends them.

The supervisor is a process of its own that starts the samplers, replaces those that die, and ends with the trainer.

    trainer ── one pipe ──▶ supervisor ── fork ──▶ sampler 0, sampler 1, ...

It does nothing else and waits in one poll, so it sees an end at once, while the trainer may compute for minutes. It has one thread,
so its forks are safe whatever threads the trainer has. It watches the trainer's pidfd, and each sampler the supervisor's
(`die_with`): whoever is killed, nobody is left behind. When an epoch begins the trainer looks whether there still is a supervisor.

What it knows of the samplers is in the trainer's report, written anew with each change.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import BaseContext
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import Any

from shmload._core.watch import die_with
from shmload.errors import WorkerDied
from shmload.formats.paths import write_if_possible
from shmload.growing.files import CONTROL, CacheWriter, WriterReport
from shmload.processes.exit_codes import describe_exit, settle
from shmload.processes.interrupts import interrupts_held
from shmload.shm import owners
from shmload.worker.fork_warnings import warn_of_fork
from shmload.worker.pool import context_of

log = logging.getLogger("shmload")


class Samplers:
    """Processes that run a sampler and write what it yields into a cache; made by `SampleCache.start`.

    Ends with `stop`, with the cache, or with the process that started it, however that ends.

    Args:
        folder: of the cache.
        sampler, num_processes, max_restarts, multiprocessing_context: as of SampleCache.start.
        make_writer: opens the cache in a sampler.
    """

    def __init__(
        self,
        folder: Path,
        sampler: Sampler,
        num_processes: int,
        *,
        max_restarts: int,
        multiprocessing_context: Any,
        make_writer: MakeWriter,
    ) -> None:
        self.num_processes = num_processes
        self._context: BaseContext = context_of(multiprocessing_context)
        self._control = folder / CONTROL
        self._job = (sampler, num_processes, max_restarts, make_writer)
        self._newest: list[dict[str, Any]] = []
        if self._context.get_start_method() == "fork":
            warn_of_fork()
        self._start()

    def _start(self) -> None:
        self._report = WriterReport(self._control, "samplers")  # of one supervisor: its end takes it away
        reader, writer = self._context.Pipe(duplex=False)
        process = self._context.Process(  # type: ignore[attr-defined]  # every concrete context has it
            target=SamplerSupervisor(os.getpid(), reader, self._report.path, *self._job).run, daemon=True, name="shmload supervisor"
        )
        with interrupts_held(), owners.ours(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            process.start()
            owners.watch(process.pid or 0)
        reader.close()
        self._process = process
        self._end = weakref.finalize(self, _end, process, writer, self._report, os.getpid())

    @property
    def states(self) -> list[dict[str, Any]]:
        """Each sampler's worker_id, pid (0: it does not run), state, restarts, and its newest error."""
        with suppress(FileNotFoundError):  # the supervisor is not up yet, or has ended
            self._newest = json.loads(self._report.path.read_bytes())
        return self._newest

    def look(self) -> None:
        """Starts a new supervisor if somebody has killed this one.

        Raises:
            WorkerDied: every sampler has failed again and again, and is given up.
        """
        if not self._end.alive:
            return
        states = self.states
        if self._process.exitcode is not None or connection.wait([self._process.sentinel], 0):
            log.warning("the samplers' supervisor %s; a new one is started", describe_exit(settle(self._process)))
            self._end()
            self._start()
            return
        if states and all(state["state"] == "given up" for state in states):
            worst = states[0]
            raise WorkerDied(
                f"all {self.num_processes} samplers have failed and are given up, so the cache does not grow. Repair the sampler, "
                f"or give start() a larger max_restarts. The newest error of sampler {worst['worker_id']}: {worst['error']}"
            )

    @property
    def are_done(self) -> bool:
        """Whether every sampler has come to its end, or was given up."""
        states = self.states
        return bool(states) and all(state["state"] in ("finished", "given up") for state in states)

    def stop(self) -> None:
        """Ends the samplers, which publish what they have collected. Twice is no error."""
        self._newest = self.states
        self._end()


def _end(process: Any, commands: Any, report: WriterReport, pid: int) -> None:
    if os.getpid() != pid:
        return
    with suppress(OSError):  # it has ended
        commands.send_bytes(b"end")
    if not connection.wait([process.sentinel], 2 * GRACE_S):  # it is stopped, say; its samplers end with it
        process.kill()
    settle(process)
    owners.forget(process.pid or 0)
    commands.close()
    process.close()
    report.close()


Sampler = Callable[[int, int], Iterable[Any]]
MakeWriter = Callable[[str], CacheWriter]

PAUSE_S, MAX_PAUSE_S = 0.1, 30.0  # before a sampler is started again: doubled with each failure in a row
GRACE_S = 5.0  # how long samplers may take to publish what they have when the cache closes
_LONGEST_S = 3600.0  # of one sleep; `publish_s` may be infinite
_TEXT = 65536  # the most of a traceback that is kept


class _Stopped(BaseException):
    """The supervisor, or the sampler, is asked to end."""


@dataclass
class _Place:
    """One sampler's place."""

    worker_id: int
    pidfd: int = -1  # -1: it does not run
    text: int = -1  # a memfd: whether it has published a file, then its traceback
    due: float = 0.0  # when it is to be started
    in_a_row: int = 0  # failures since it last published a file
    state: dict[str, Any] = field(default_factory=lambda: {"pid": 0, "restarts": 0, "state": "starting", "error": ""})


@dataclass
class SamplerSupervisor:
    """The loop; see the module.

    Args:
        trainer_pid: with whose end it ends.
        commands: the reading end of a pipe; anything that comes there means the end.
        report: the file for the samplers' states.
        max_restarts: failures in a row after which a sampler is given up.
        make_writer: opens the cache in a sampler, under a role.
    """

    trainer_pid: int
    commands: Any
    report: Path
    sampler: Sampler
    num_processes: int
    max_restarts: int
    make_writer: MakeWriter

    def __post_init__(self) -> None:
        self._places = [_Place(worker_id) for worker_id in range(self.num_processes)]
        self._written = ""

    def run(self) -> None:
        """Until the end."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # what the trainer does with it must not lose the samplers' exit codes
        try:
            self.trainer = os.pidfd_open(self.trainer_pid)
        except ProcessLookupError:
            return
        try:
            while not _is_asked_to_end:
                now = monotonic()
                for one in self._places:
                    if one.pidfd < 0 and one.due <= now:
                        self._start(one)
                self._write()
                due = min((one.due for one in self._places if one.pidfd < 0), default=float("inf"))
                happened = self._wait((self.trainer, self.commands.fileno()), due - now)
                if not happened.isdisjoint((self.trainer, self.commands.fileno())):
                    break
                for one in self._places:
                    if one.pidfd in happened:
                        self._ended(one)
        except _Stopped:
            pass
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._end()

    def _wait(self, others: Iterable[int], timeout_s: float) -> set[int]:
        """Waits for the end of a sampler, or for other descriptors."""
        poll = select.poll()
        for fd in (*others, *(one.pidfd for one in self._places if one.pidfd >= 0)):
            poll.register(fd, select.POLLIN)
        return {fd for fd, _ in poll.poll(None if timeout_s == float("inf") else max(timeout_s, 0) * 1000)}

    def _start(self, one: _Place) -> None:
        one.text = os.memfd_create("shmload-sampler", os.MFD_CLOEXEC)
        os.pwrite(one.text, b"0", 0)
        sys.stdout.flush()
        sys.stderr.flush()
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            _run(supervisor, self.sampler, one.worker_id, len(self._places), one.text, self.make_writer)
        one.pidfd = os.pidfd_open(pid)
        one.state |= {"state": "running", "pid": pid}

    def _ended(self, one: _Place) -> None:
        """Sees to a sampler that has ended: done, to be started again after a pause, or given up."""
        code, text, has_published = self._reap(one)
        one.state |= {"state": "finished", "pid": 0}
        one.due = float("inf")
        if code == 0:
            return
        one.in_a_row = 1 if has_published else one.in_a_row + 1
        error = one.state["error"] = text or f"sampler {one.worker_id} {describe_exit(code)}"
        if one.in_a_row > self.max_restarts:
            one.state["state"] = "given up"
            log.error("sampler %d is given up after %d failures in a row: %s", one.worker_id, one.in_a_row, error)
            return
        pause = min(PAUSE_S * 2.0 ** min(one.in_a_row - 1, 99), MAX_PAUSE_S)  # a float ends at 2**1024
        log.warning("%s; it is started again in %.1f s", error.rstrip(), pause)
        one.state |= {"state": "pausing", "restarts": one.state["restarts"] + 1}
        one.due = monotonic() + pause

    def _reap(self, one: _Place) -> tuple[int, str, bool]:
        """Exit code, traceback, whether it has published a file."""
        _, status = os.waitpid(one.state["pid"], 0)
        data = os.pread(one.text, _TEXT, 0)
        os.close(one.pidfd)
        os.close(one.text)
        one.pidfd = -1
        return os.waitstatus_to_exitcode(status), data[1:].decode(errors="replace"), data[:1] == b"1"

    def _end(self) -> None:
        """Lets samplers publish what they have, if the trainer lives; ends them."""
        for number, others, grace_s in ((signal.SIGTERM, (self.trainer,), GRACE_S), (signal.SIGKILL, (), float("inf"))):
            running = [one for one in self._places if one.pidfd >= 0]
            for one in running:
                signal.pidfd_send_signal(one.pidfd, number)
            deadline = monotonic() + grace_s
            while running and monotonic() < deadline:
                happened = self._wait(others, deadline - monotonic())
                if self.trainer in happened:
                    break  # nobody waits for them
                for one in running:
                    if one.pidfd in happened:
                        self._reap(one)
                running = [one for one in running if one.pidfd >= 0]
        self.report.unlink(missing_ok=True)

    def _write(self) -> None:
        text = json.dumps([{"worker_id": one.worker_id, **one.state} for one in self._places])
        if text != self._written:
            self._written = text
            write_if_possible(self.report, text.encode())


_is_asked_to_end = False  # an exception that is raised while a finalizer runs is lost; this is not
_writing: CacheWriter | None = None  # in a sampler, amid a record


def _stop(number: int, frame: Any) -> None:
    global _is_asked_to_end
    _is_asked_to_end = True
    if _writing is None or _writing.is_waiting:  # amid a record it would leave one that is written and not counted
        raise _Stopped


def _run(supervisor: int, sampler: Sampler, worker_id: int, num_workers: int, text: int, make_writer: MakeWriter) -> None:
    """One sampler, from its fork to its end."""
    global _writing
    code = 1
    try:
        die_with(supervisor)
        _draw_other_numbers()
        writer = make_writer(f"sampler {worker_id} of {num_workers}")
        in_time = _PublishedInTime(writer)
        try:
            for record in sampler(worker_id, num_workers):
                with in_time.turn:
                    _writing = writer
                    writer.write(record)
                    _writing = None
                in_time.written()
                if writer.num_files:
                    os.pwrite(text, b"1", 0)
                if _is_asked_to_end:
                    break
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with in_time.turn:
                writer.close()  # what it has collected is good
        code = 0
    except _Stopped:
        code = 0
    except BaseException:
        os.pwrite(text, b"sampler %d: " % worker_id + traceback.format_exc().encode()[-_TEXT // 2 :], 1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _PublishedInTime:
    """Publishes what a sampler has written when it is time, however long its next sample takes: by a thread.

    Args:
        writer: the sampler's, which has one user at a time: who has the `turn`.
    """

    def __init__(self, writer: CacheWriter) -> None:
        self.turn = Lock()
        self._writer, self._has_written = writer, Event()
        self._failure: Exception | None = None
        Thread(target=self._run, daemon=True).start()

    def written(self) -> None:
        """A sample has been written.

        Raises:
            Exception: what was written before could not be published.
        """
        if self._failure is not None:
            raise self._failure
        if not self._has_written.is_set():
            self._has_written.set()

    def _run(self) -> None:
        while self._has_written.wait():
            try:
                with self.turn:
                    left_s = self._writer.published_in_time()
                    if left_s is None:
                        self._has_written.clear()
            except Exception as error:
                self._failure = error
                return
            sleep(min(left_s or 0, _LONGEST_S))


def _draw_other_numbers() -> None:
    """Gives this process random numbers of its own: by a fork it has its siblings'."""
    import random

    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
