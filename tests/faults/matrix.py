"""The fault matrix: every fault at every point of worker and trainer, with every start method, in both modes.

    python -m tests.faults.matrix [--only WORD ...] [--sample N] [--seed N] [--time-factor X] [--list]

prints the result as a table and exits with 1 if a cell breaks its promise (matrix_cells.py defines the promises, matrix_judge.py
checks them). Each cell runs in a trainer forked from here, which may be killed. A cell that only took too long is run up to three
times, because a single delay means nothing on a busy machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from time import monotonic, time
from typing import Any

from shmload import faults
from shmload.processes.proc_stat import stat_of
from tests.faults.matrix_cells import HARMS, METHODS, MODES, Cell, all_cells, chosen

HANG_S = 60
LOOK_MS = 5  # between two polls of a process that is to be continued, or to end
STOPPED_S = 0.15  # how long a stopped process stays stopped, which is longer than any wait of the loader
TRIES = 3
PR_SET_CHILD_SUBREAPER = 36
MARKS = {"identical": "=", "error": "!", "gone": "x"}


class Driver:
    """Runs cells one after the other.

    Args:
        folder: folder of armed faults; workers of every start method find it in SHMLOAD_FAULTS.
        time_factor: factor for all time limits.
    """

    def __init__(self, folder: Path, time_factor: float) -> None:
        self._folder, self._time_factor = folder, time_factor
        self._expected: dict[tuple[bool, str], list[list[str]]] = {}
        self._start_s: dict[tuple[str, str], float] = {}
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # so that orphans of a killed trainer become children of this process
        resource_tracker.ensure_running()

    def run(self, cell: Cell) -> tuple[list[str], Any]:
        """Returns the defects or delays of a cell, and its outcome."""
        from tests.faults.matrix_judge import defects, delays
        from tests.faults.matrix_trainer import GROWING, expected

        key = (cell.point in GROWING, cell.mode)
        if key not in self._expected:
            self._expected[key] = expected(cell.point, cell.mode)
        if (cell.method, cell.mode) not in self._start_s:
            quiet = self._watch(cell, is_quiet=True)
            self._start_s[cell.method, cell.mode] = (
                next(e["at"] for e in quiet.events if e["kind"] == "batch") - quiet.events[0]["at"]
            )
        for _ in range(TRIES):
            outcome = self._watch(cell)
            found = defects(cell, outcome, self._expected[key])
            if found:
                return found, outcome
            found = delays(cell, outcome, self._start_s[cell.method, cell.mode], self._time_factor)
            if not found:
                break
        return found, outcome

    def _watch(self, cell: Cell, *, is_quiet: bool = False) -> Any:
        from tests.faults.matrix_judge import Outcome

        for path in self._folder.iterdir():
            path.unlink()
        before = _descendants()
        pid, report = self._fork(cell, is_quiet=is_quiet)
        pidfd = os.pidfd_open(pid)
        lines, resumed_at, died_at = b"", None, None
        until = monotonic() + HANG_S
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(report, select.POLLIN)
        has_ended = False
        while not has_ended and monotonic() < until:
            ready = {fd for fd, _ in poll.poll(LOOK_MS)}
            if report in ready:
                lines += os.read(report, 1 << 16)
            has_ended = pidfd in ready
            if cell.harm == "STOP+CONT" and resumed_at is None and not is_quiet:
                resumed_at = self._resume(cell, pid)
            elif died_at is None and not cell.is_trainers:
                died_at = self._died_at(cell)
        if not has_ended:
            for one in (*_descendants() - before, pid):
                _kill(one)
        ended_at = monotonic()
        status = os.waitpid(pid, 0)[1]
        survivors, gone_s = _await_end(before, ended_at, self._time_factor)
        while chunk := os.read(report, 1 << 16):
            lines += chunk
        os.close(report)
        os.close(pidfd)
        return Outcome(
            events=_parsed(lines),
            exit_code=os.waitstatus_to_exitcode(status) if has_ended else None,
            harmed_at=resumed_at or self._harmed_at(cell),
            died_at=died_at,
            gone_s=gone_s,
            survivors=survivors,
            names_left=_names_of(_parsed(lines)),
            was_reached=is_quiet or cell.point == "releasing" or self._harmed_at(cell) is not None,
        )

    def _fork(self, cell: Cell, *, is_quiet: bool) -> tuple[int, int]:
        from tests.faults.matrix_trainer import Trainer

        end, report = os.pipe()
        pid = os.fork()
        if pid == 0:
            trainer = Trainer(cell, self._folder, report, is_quiet=is_quiet)
            status = 1
            try:
                os.close(end)
                with _silence():
                    trainer.run()
                status = 0
            except BaseException:
                trainer.say("failed", text=traceback.format_exc())
            finally:
                os._exit(status)
        os.close(report)
        return pid, end

    def _resume(self, cell: Cell, trainer: int) -> float | None:
        """Continues the process that a fault stopped, after it has been stopped long enough. Returns the time."""
        pid = trainer if cell.is_trainers else self._harmed(cell)
        if pid is None or _state(pid) != "T":
            return None
        select.poll().poll(STOPPED_S * 1000)
        os.kill(pid, signal.SIGCONT)
        return time()

    def _harmed(self, cell: Cell) -> int | None:
        """Returns the pid of the process in which the fault was triggered."""
        spent = next((path.name for path in self._folder.glob(f"spent-{cell.point}.*")), None)
        return None if spent is None else int(spent.rpartition("-")[2])

    def _died_at(self, cell: Cell) -> float | None:
        """Returns when a killed worker was found dead. A worker that exits in order takes a while."""
        pid = self._harmed(cell)
        return time() if pid is not None and _state(pid) in "ZX" else None

    def _harmed_at(self, cell: Cell) -> float | None:
        """Returns when the fault was triggered."""
        return next((path.stat().st_ctime for path in self._folder.glob(f"spent-{cell.point}.*")), None)


@contextmanager
def _silence() -> Iterator[None]:
    """Discards stderr, also that of child processes."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _parsed(lines: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines() if line.endswith(b"}")]  # the last line may be truncated


def _state(pid: int) -> str:
    try:
        return stat_of(pid)[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before, or between opening and reading
        return ""


def _descendants() -> set[int]:
    """Returns the running descendants of this process, and reaps its zombies."""
    import psutil

    found = set()
    for child in psutil.Process().children(recursive=True):
        if _state(child.pid) != "Z":
            found.add(child.pid)
        elif child.pid not in _waited_for():
            try:
                os.waitpid(child.pid, os.WNOHANG)
            except ChildProcessError:  # a child of another process, which has to reap it
                pass
    return found


def _waited_for() -> set[int]:
    """Returns the children that other code in this process reaps."""
    return {resource_tracker._resource_tracker._pid or 0}


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _command_of(pid: int) -> str:
    import psutil

    try:
        return f"{pid} {_state(pid)} {' '.join(psutil.Process(pid).cmdline())[:200]}"
    except psutil.Error:
        return f"{pid}, which has ended since"


def _await_end(before: set[int], since: float, time_factor: float) -> tuple[list[str], float]:
    """Waits for all new descendants to end. Returns the command lines of those that do not, and how long it took."""
    from tests.faults.matrix_judge import REACTION_S

    while left := _descendants() - before:
        if monotonic() - since > 3 * REACTION_S * time_factor:
            words = [_command_of(pid) for pid in left]
            for pid in left:
                _kill(pid)
            return words, monotonic() - since
        select.poll().poll(LOOK_MS)
    return [], monotonic() - since


def _names_of(events: list[dict[str, Any]]) -> list[str]:
    stem = next((event["stem"] for event in events if event["kind"] == "stem"), None)
    return [] if stem is None else [name for name in os.listdir("/dev/shm") if stem in name]


def table(marks: dict[Cell, str]) -> str:
    """Formats the matrix with a line per point, start method and mode, and a column per harm."""
    rows = [f"{'point':20} {'start':10} {'mode':6}" + "".join(f"{harm:>12}" for harm in HARMS)]
    order = {(c.point, c.method, c.mode) for c in marks}
    points = list(dict.fromkeys(cell.point for cell in all_cells()))
    for point, method, mode in sorted(order, key=lambda k: (points.index(k[0]), METHODS.index(k[1]), MODES.index(k[2]))):
        cells = (marks.get(Cell(point, harm, method, mode), "") for harm in HARMS)
        rows.append(f"{point:20} {method:10} {mode:6}" + "".join(f"{mark:>12}" for mark in cells))
    return "\n".join(rows)


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.matrix", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cells of this point, harm, start method and mode")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="run only N cells, chosen by the seed")
    parser.add_argument(
        "--seed", type=int, default=None, metavar="N", help="seed of the sample; by default a random one, which is printed"
    )
    parser.add_argument("--time-factor", type=float, default=1, metavar="X", help="multiply time limits by X, for a busy machine")
    parser.add_argument("--list", action="store_true", help="list the cells without running them")
    parser.add_argument("--verbose", action="store_true", help="print each cell when it is done")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    cells = chosen(given.only, given.sample, seed)
    print(f"{len(cells)} of {len(all_cells())} cells, seed {seed}", flush=True)
    if given.list:
        print("\n".join(map(str, cells)))
        return 0
    began, marks, bad = monotonic(), {}, {}
    worst = {"reaction_s": 0.0, "notice_s": 0.0, "gone_s": 0.0}
    with tempfile.TemporaryDirectory(prefix="shmload-matrix-") as folder:
        os.environ["SHMLOAD_FAULTS"] = faults._folder = folder
        faults.armed = True  # before other modules of shmload are imported, because decorators place points at import
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        driver = Driver(Path(folder), given.time_factor)
        for cell in cells:
            found, outcome = driver.run(cell)
            marks[cell] = "FAULT" if found else MARKS[cell.promise]
            if found:
                bad[cell] = found
            for name in worst:
                worst[name] = max(worst[name], getattr(outcome, name) or 0.0)
            if given.verbose:
                print(f"{monotonic() - began:7.1f} s  {marks[cell]:6} {cell} {found or ''}", flush=True)
    print(table(marks))
    print("= stream unchanged, ! one clear error and the rest unchanged, x the trainer died and left nothing")
    for cell, found in bad.items():
        print(f"\n{cell}: promised {cell.promise}")
        print("\n".join(f"    {one}" for one in found))
    print(
        f"\n{len(cells)} cells in {monotonic() - began:.0f} s, {len(bad)} failed; at most {worst['reaction_s']:.2f} s to "
        f"the next batch or error, {worst['notice_s']:.2f} s to notice, {worst['gone_s']:.2f} s until nothing was left"
    )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
