"""The supervisor process: it starts samplers, replaces those that die, and ends with the trainer.

    trainer ── one pipe ──▶ supervisor ── fork ──▶ sampler 0, sampler 1, ...

It only waits in one poll, so it detects a death at once, while the trainer may compute for minutes. It has one thread, so its forks
are safe for any threads of the trainer. It watches the trainer's pidfd, and each sampler watches the supervisor (`die_with`), so
all of them end after any kill.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from shmload.formats.atomic_write import write_if_possible
from shmload.growing import sampler_process
from shmload.growing.sampler_process import TEXT_NBYTES, AskedToEnd, MakeWriter, Sampler
from shmload.processes.child import Child, Children, has_ended
from shmload.processes.exit_codes import describe_exit
from shmload.processes.restarts import RestartPolicy

log = logging.getLogger("shmload")

PAUSE_S, MAX_PAUSE_S = 0.1, 30.0  # pause before a restart, doubled with each successive failure
GRACE_S = 5.0  # time for samplers to publish their samples when the cache closes


def starting_state(worker_id: int) -> dict[str, Any]:
    """Return the state of a sampler that has not been started yet; see Samplers.states."""
    return {"worker_id": worker_id, "pid": 0, "restarts": 0, "state": "starting", "error": ""}


@dataclass
class _Place:
    """The supervisor's record of one sampler.

    Attributes:
        worker_id: its number.
        restarts: counts its failures since it last published a file.
        child: its process, or None if it does not run.
        text: a memfd for the report of the process: whether it has published a file, then its traceback.
        due: time of the monotonic clock at which it is started.
        state: the sampler's state, which the trainer reads.
    """

    worker_id: int
    restarts: RestartPolicy
    child: Child | None = None
    text: int = -1
    due: float = 0.0
    state: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.state = starting_state(self.worker_id)


@dataclass
class SamplerSupervisor:
    """The supervisor of samplers, whose `run` is the loop of the supervisor process.

    Args:
        trainer_pid: the process id of the trainer; the supervisor ends with it.
        commands: the reading end of a pipe; any input asks the supervisor to end.
        report: the file for the samplers' states.
        sampler: the sampler that each process runs.
        num_processes: number of processes.
        max_restarts: successive failures after which a sampler is not restarted.
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
        self._places = [
            _Place(worker_id, RestartPolicy(self.max_restarts, PAUSE_S, MAX_PAUSE_S)) for worker_id in range(self.num_processes)
        ]
        self._written = ""

    def run(self) -> None:
        """Supervise the samplers until the trainer ends or asks for the end."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, sampler_process.stop)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the trainer ignores SIGCHLD, the samplers' exit codes would be lost
        try:
            self._trainer = os.pidfd_open(self.trainer_pid)
        except ProcessLookupError:
            return
        self._children: Children[Child] = Children()
        self._children.watch(self._trainer)
        self._children.watch(self.commands.fileno())
        try:
            while not sampler_process.is_asked_to_end:
                now = monotonic()
                for one in self._places:
                    if one.child is None and one.due <= now:
                        self._start(one)
                self._write()
                due = min((one.due for one in self._places if one.child is None), default=float("inf"))
                ended, others = self._children.wait(None if due == float("inf") else due - now)
                if others:
                    break
                for one in self._places:
                    if one.child in ended:
                        self._ended(one)
        except AskedToEnd:
            pass
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._end()

    def _start(self, one: _Place) -> None:
        one.text = os.memfd_create("shmload-sampler", os.MFD_CLOEXEC)
        os.pwrite(one.text, b"0", 0)
        sys.stdout.flush()
        sys.stderr.flush()
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            sampler_process.run_sampler(supervisor, self.sampler, one.worker_id, len(self._places), one.text, self.make_writer)
        one.child = Child(pid)
        self._children.add(one.child)
        one.state |= {"state": "running", "pid": pid}

    def _ended(self, one: _Place) -> None:
        """Handle the end of a sampler: mark it as finished, restart it after a pause, or give it up."""
        code, text, has_published = self._reap(one)
        one.state |= {"state": "finished", "pid": 0}
        one.due = float("inf")
        if code == 0:
            return
        error = one.state["error"] = text or f"sampler {one.worker_id} {describe_exit(code)}"
        pause = one.restarts.failed(after_success=has_published)
        if pause is None:
            one.state["state"] = "given up"
            log.error("sampler %d is given up after %d failures in a row: %s", one.worker_id, one.restarts.in_a_row, error)
            return
        log.warning("%s; it is started again in %.1f s", error.rstrip(), pause)
        one.state |= {"state": "pausing", "restarts": one.state["restarts"] + 1}
        one.due = monotonic() + pause

    def _reap(self, one: _Place) -> tuple[int, str, bool]:
        """Return a sampler's exit code and traceback, and whether it has published a file."""
        assert one.child is not None
        code = self._children.reap(one.child)
        one.child = None
        data = os.pread(one.text, TEXT_NBYTES, 0)
        os.close(one.text)
        return code, data[1:].decode(errors="replace"), data[:1] == b"1"

    def _end(self) -> None:
        """End the samplers. If the trainer is alive, let them publish their samples."""
        for one in self._places:
            if one.child is not None:
                one.child.ask_to_end()
        self._children.unwatch(self.commands.fileno())
        self._children.end(GRACE_S, self._reap_ended, is_enough=lambda: has_ended(self._trainer))
        self.report.unlink(missing_ok=True)

    def _reap_ended(self, timeout_s: float | None) -> None:
        ended, _ = self._children.wait(timeout_s)
        for one in self._places:
            if one.child in ended:
                self._reap(one)

    def _write(self) -> None:
        text = json.dumps([one.state for one in self._places])
        if text != self._written:
            self._written = text
            write_if_possible(self.report, text.encode())
