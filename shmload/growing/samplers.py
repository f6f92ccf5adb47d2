"""The trainer's hold on its samplers: starts their supervisor, hears of them, ends them.

What supervises them is the supervisor (supervisor.py). Here it is only looked, when an epoch begins, whether there still is one.

The supervisor: a process of its own that starts the samplers, replaces those that die, and ends with the trainer.

    trainer ── one pipe ──▶ supervisor ── fork ──▶ sampler 0, sampler 1, ...

It does nothing else and waits in one poll, so it sees an end at once, while the trainer may compute for minutes. It has one thread,
so its forks are safe whatever threads the trainer has. It watches the trainer's pidfd, and each sampler the supervisor's
(`die_with`): whoever is killed, nobody is left behind.

What it knows it tells in .growing/samplers/<group>.json, written anew with each change.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import signal
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from pathlib import Path
from time import monotonic
from typing import Any

from shmload._core.watch import die_with
from shmload.errors import WorkerDied
from shmload.growing.files import CONTROL, write_whole
from shmload.growing.writer import CacheWriter
from shmload.shm import owners
from shmload.worker.failure import describe_exit
from shmload.worker.pool import context_of, interrupts_held, warn_of_fork

log = logging.getLogger("shmload")


class Samplers:
    """Processes that run a sampler and write what it yields into a cache; made by `SampleCache.start`. A context manager.

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
        self._told = folder / CONTROL / "samplers" / f"{os.getpid()}-{secrets.token_hex(4)}.json"
        self._told.parent.mkdir(parents=True, exist_ok=True)
        self._job = (sampler, num_processes, max_restarts, make_writer)
        self._num_supervisors = 0
        self._newest: list[dict[str, Any]] = []
        if self._context.get_start_method() == "fork":
            warn_of_fork()
        self._start()

    def _start(self) -> None:
        reader, writer = self._context.Pipe(duplex=False)
        process = self._context.Process(  # type: ignore[attr-defined]  # every concrete context has it
            target=keep, args=(os.getpid(), reader, self._told, *self._job), daemon=True, name="shmload supervisor"
        )
        with interrupts_held(), owners.ours(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            process.start()
            owners.watch(process.pid or 0)
        reader.close()
        self._num_supervisors += 1
        self._process = process
        self._end = weakref.finalize(self, _end, process, writer, self._told, os.getpid())

    @property
    def states(self) -> list[dict[str, Any]]:
        """Each sampler's worker_id, pid (0: it does not run), state, restarts, and its newest error."""
        try:
            self._newest = json.loads(self._told.read_bytes())
        except FileNotFoundError:  # the supervisor is not up yet, or has ended
            pass
        return self._newest

    def look(self) -> None:
        """Starts a new supervisor if somebody has killed this one.

        Raises:
            WorkerDied: every sampler has failed again and again, and is given up.
        """
        if not self._end.alive:
            return
        states = self.states
        if self._process.exitcode is not None:
            log.warning("the samplers' supervisor %s; a new one is started", describe_exit(self._process.exitcode))
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

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once the supervisor has ended."""
        return int(self._process.sentinel)

    def stop(self) -> None:
        """Ends the samplers, which publish what they have collected. Twice is no error."""
        self._newest = self.states
        self._end()

    def __enter__(self) -> Samplers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _end(process: Any, commands: Any, told: Path, pid: int) -> None:
    if os.getpid() != pid:
        return
    try:
        commands.send_bytes(b"end")
    except OSError:  # it has ended
        pass
    process.join(2 * GRACE_S)
    if process.exitcode is None:  # it is stopped, say; its samplers end with it
        process.kill()
        process.join()
    owners.forget(process.pid or 0)
    commands.close()
    process.close()
    told.unlink(missing_ok=True)


Sampler = Callable[[int, int], Iterable[Any]]
MakeWriter = Callable[[str], CacheWriter]

PAUSE_S, MAX_PAUSE_S = 0.1, 30.0  # before a sampler is started again: doubled with each failure in a row
GRACE_S = 5.0  # how long samplers may take to publish what they have when the cache closes
_TEXT = 65536  # the most of a traceback that is kept


class _Stopped(BaseException):
    """The supervisor, or the sampler, is told to end."""


@dataclass
class _One:
    """One sampler's place."""

    worker_id: int
    pid: int = 0
    pidfd: int = -1
    text: int = -1  # a memfd: where it writes its traceback
    due: float = 0.0  # when it is to be started
    in_a_row: int = 0  # failures since it last published a file
    num_files: int = 0
    told: dict[str, Any] = field(default_factory=lambda: {"restarts": 0, "state": "starting", "error": ""})


def keep(
    trainer_pid: int, commands: Any, told: Path, sampler: Sampler, num_processes: int, max_restarts: int, make_writer: MakeWriter
) -> None:
    """Runs the supervisor until the trainer says so, or ends.

    Args:
        commands: the reading end of a pipe; anything that comes there means the end.
        told: the file to tell in.
        max_restarts: failures in a row after which a sampler is given up.
        make_writer: opens the cache in a sampler, under a role.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    try:
        trainer = os.pidfd_open(trainer_pid)
    except ProcessLookupError:
        return
    SamplerSupervisor(trainer, commands.fileno(), told, sampler, num_processes, max_restarts, make_writer).run()


class SamplerSupervisor:
    """The loop; see the module. `fork` and `clock` are for tests."""

    def __init__(
        self,
        trainer: int,
        commands: int,
        told: Path,
        sampler: Sampler,
        num_processes: int,
        max_restarts: int,
        make_writer: MakeWriter,
    ) -> None:
        self._trainer, self._commands, self._told = trainer, commands, told
        self._sampler, self._make_writer = sampler, make_writer
        self._max_restarts = max_restarts
        self._all = [_One(worker_id) for worker_id in range(num_processes)]
        self._poll = select.poll()
        for fd in (trainer, commands):
            self._poll.register(fd, select.POLLIN)

    def run(self) -> None:
        """Until the end."""
        try:
            while self._step() and not _is_told_to_end:
                pass
        except _Stopped:
            pass
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._end()

    def _step(self) -> bool:
        now = monotonic()
        for one in self._all:
            if not one.pid and one.due <= now:
                self._start(one)
        self._tell()
        waits = [one.due - now for one in self._all if not one.pid and one.due < float("inf")]
        for fd, _ in self._poll.poll(max(min(waits), 0) * 1000 if waits else None):
            if fd in (self._trainer, self._commands):
                return False
            self._ended(next(one for one in self._all if one.pidfd == fd))
        return True

    def _start(self, one: _One) -> None:
        one.text = os.memfd_create("shmload-sampler", os.MFD_CLOEXEC)
        os.pwrite(one.text, _num_files(0), 0)
        sys.stdout.flush()
        sys.stderr.flush()
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            _run(supervisor, self._sampler, one.worker_id, len(self._all), one.text, self._make_writer)
        one.pid, one.pidfd = pid, os.pidfd_open(pid)
        one.told |= {"state": "running", "pid": pid}
        self._poll.register(one.pidfd, select.POLLIN)

    def _ended(self, one: _One) -> None:
        """Sees to a sampler that has ended: done, to be started again after a pause, or given up."""
        code, text, num_files = self._reap(one)
        one.told |= {"state": "finished", "pid": 0}
        one.due = float("inf")
        if code == 0:
            return
        one.in_a_row = 1 if num_files else one.in_a_row + 1
        one.told["error"] = text or f"sampler {one.worker_id} {describe_exit(code)}"
        if one.in_a_row > self._max_restarts:
            one.told["state"] = "given up"
            log.error("sampler %d is given up after %d failures in a row: %s", one.worker_id, one.in_a_row, one.told["error"])
            return
        pause = min(PAUSE_S * 2 ** (one.in_a_row - 1), MAX_PAUSE_S)
        log.warning("%s; it is started again in %.1f s", one.told["error"].rstrip(), pause)
        one.told |= {"state": "pausing", "restarts": one.told["restarts"] + 1}
        one.due = monotonic() + pause

    def _reap(self, one: _One) -> tuple[int, str, int]:
        """Exit code, traceback, files published."""
        _, status = os.waitpid(one.pid, 0)
        self._poll.unregister(one.pidfd)
        os.close(one.pidfd)
        data = os.pread(one.text, _TEXT, 0)
        os.close(one.text)
        one.pid, one.pidfd, one.text = 0, -1, -1
        files, _, text = data.partition(b"\n")
        return os.waitstatus_to_exitcode(status), text.decode(errors="replace"), int(files or b"0")

    def _end(self) -> None:
        """Lets samplers publish what they have, if the trainer lives; ends them."""
        for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
            for one in self._all:
                if one.pid:
                    signal.pidfd_send_signal(one.pidfd, number)
            deadline = None if grace_s is None else monotonic() + grace_s
            while any(one.pid for one in self._all):
                left = None if deadline is None else deadline - monotonic()
                if left is not None and left <= 0:
                    break
                ended = {fd for fd, _ in self._poll.poll(None if left is None else left * 1000)}
                if self._trainer in ended and number == signal.SIGTERM:
                    break  # nobody waits for them
                self._poll_only_samplers()
                for one in self._all:
                    if one.pidfd in ended:
                        self._reap(one)
        self._told.unlink(missing_ok=True)

    def _poll_only_samplers(self) -> None:
        try:
            self._poll.unregister(self._commands)  # it has said what it had to say, and would again
        except KeyError:
            pass

    def _tell(self) -> None:
        said = json.dumps([{"worker_id": one.worker_id, **one.told} for one in self._all])
        if said != getattr(self, "_said", None):
            self._said = said
            write_whole(self._told, said.encode())


_is_told_to_end = False  # an exception that is raised while a finalizer runs is lost; this is not


def _stop(number: int, frame: Any) -> None:
    global _is_told_to_end
    _is_told_to_end = True
    raise _Stopped


def _num_files(number: int) -> bytes:
    return b"%018d\n" % number


def _run(supervisor: int, sampler: Sampler, worker_id: int, num_workers: int, text: int, make_writer: MakeWriter) -> None:
    """One sampler, from its fork to its end."""
    code = 1
    try:
        die_with(supervisor)
        sys.unraisablehook = _tell_unless_stopped
        _draw_other_numbers()
        _sample(sampler, worker_id, num_workers, text, make_writer)
        code = 0
    except _Stopped:
        code = 0
    except BaseException:
        told = traceback.format_exc().encode()
        os.pwrite(text, b"sampler %d: " % worker_id + told[-_TEXT // 2 :], len(_num_files(0)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _sample(sampler: Sampler, worker_id: int, num_workers: int, text: int, make_writer: MakeWriter) -> None:
    writer = make_writer(f"sampler {worker_id} of {num_workers}")
    try:
        for record in sampler(worker_id, num_workers):
            writer.write(record)
            os.pwrite(text, _num_files(writer.num_files), 0)
            if _is_told_to_end:
                break
    except Exception:
        writer.close()  # what it has collected is good
        raise
    except BaseException:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        writer.close()
        raise
    writer.close()


def _tell_unless_stopped(lost: Any) -> None:
    if lost.exc_type is not _Stopped:
        sys.__unraisablehook__(lost)


def _draw_other_numbers() -> None:
    """Gives this process random numbers of its own: by a fork it has its siblings'."""
    import random

    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
