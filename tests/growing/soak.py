"""The soak test of the growing cache: samplers, eviction and two ranks, while processes are killed at random.

    python -m tests.growing.soak --minutes 20 [--seed N]

Samplers, workers and trainers are ended by SIGKILL; a trainer is started again and continues from its last state. At the end the
deliveries, without those that a resume repeated, are compared with the promise of each epoch: each of its samples once over all
ranks. In the meantime a watcher checks the folder: its size never exceeds the budget, and files under their final name are
complete. The last line is the result as JSON. Every decision follows from the seed; the timing depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from shmload.growing.cache_file import read_own_name
from shmload.growing.intake import count_records
from tests.growing.soak_trainer import CAPACITY_BYTES, NUM_SAMPLERS

WORLD_SIZE = 2
KINDS = ("sampler", "worker", "sampler", "worker", "trainer")
PROGRESS = 4  # batches between two kills
STUCK_S = 60.0


@dataclass
class Tally:
    """The counts and findings of a run."""

    seed: int
    minutes: float = 0.0
    epochs: int = 0
    batches: int = 0
    samples: int = 0
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(sorted(set(KINDS)), 0))
    looks: int = 0
    most_nbytes: int = 0
    found: list[str] = field(default_factory=list)


def deliveries(logs: Iterable[list[dict[str, Any]]]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Returns the samples that each epoch delivered, and the number it promised, without the deliveries that a resume repeated."""
    delivered: dict[int, list[int]] = {}
    promised: dict[int, int] = {}
    for log in logs:
        kept: dict[tuple[int, int], list[int]] = {}
        for entry in log:
            if "resumed" in entry:
                kept = {place: ids for place, ids in kept.items() if place < tuple(entry["resumed"])}
                continue
            place = tuple(entry["at"])
            assert place not in kept, f"batch {place} was delivered twice without a resume in between"
            kept[place] = entry["ids"]
            promised.setdefault(place[0], entry["n"])
            assert promised[place[0]] == entry["n"], f"epoch {place[0]} promised {promised[place[0]]} samples, then {entry['n']}"
        for (epoch, _), ids in kept.items():
            delivered.setdefault(epoch, []).extend(ids)
    return delivered, promised


def entries(log: bytes) -> list[dict[str, Any]]:
    """Returns the entries of a log, without those that a kill has truncated. A rank that starts begins a new line."""
    lines = [line for line in log.split(b"\n") if line]
    followers = [*lines[1:], b""]
    return [
        json.loads(line)
        for line, follower in zip(lines, followers, strict=True)
        if line.endswith(b"}") or (follower and not follower.startswith(b'{"resumed"'))
    ]


def differences(logs: Iterable[list[dict[str, Any]]], num_epochs: int) -> list[str]:
    """Returns the errors in the epochs that all ranks have finished."""
    try:
        delivered, promised = deliveries(logs)
    except AssertionError as error:
        return [str(error)]
    found = []
    for epoch in range(num_epochs):
        ids = delivered.get(epoch, [])
        if len(ids) != len(set(ids)):
            found.append(f"epoch {epoch}: {len(ids) - len(set(ids))} samples were delivered twice")
        if len(set(ids)) != promised.get(epoch):
            found.append(f"epoch {epoch}: {len(set(ids))} samples of {promised.get(epoch)} were delivered")
    return found


class Watcher(threading.Thread):
    """Checks the folder continuously."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        super().__init__(daemon=True)
        self._folder, self._tally = folder, tally
        self._is_over = threading.Event()
        self._seen: set[str] = set()

    def run(self) -> None:
        while not self._is_over.wait(0.001):
            self.look()

    def look(self) -> None:
        """Checks new files, and counts the bytes that were in the folder at one moment.

        Sizes are read one after the other, and a file may be evicted and its room used by another one in the meantime. So only
        files that exist before and after count, with the smaller of both sizes.
        """
        before = self._sizes()
        after = self._sizes()
        nbytes = sum(min(size, after[path]) for path, size in before.items() if path in after)
        for path, size in before.items():
            own = read_own_name(path.name)
            if own is not None and path.name not in self._seen:
                self._seen.add(path.name)
                self._check(path, own, size)
        self._tally.looks += 1
        self._tally.most_nbytes = max(self._tally.most_nbytes, nbytes)

    def _sizes(self) -> dict[Path, int]:
        sizes = {}
        for path in [*self._folder.glob("[!.]*"), *(self._folder / ".shmload" / "new").glob("*")]:
            with suppress(FileNotFoundError):  # published or evicted between the two calls
                sizes[path] = path.stat().st_size
        return sizes

    def _check(self, path: Path, own: tuple[int, int], size: int) -> None:
        if size != own[1]:
            self._tally.found.append(f"{path.name} has {size} bytes")
        try:
            if (num_records := count_records(str(path))) != own[0]:
                self._tally.found.append(f"{path.name} has {num_records} records")
        except FileNotFoundError:  # evicted in the meantime
            pass
        except ValueError as error:
            self._tally.found.append(str(error))

    def stop(self) -> None:
        self._is_over.set()
        self.join()


class Soak:
    """One run of the soak test."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self.tally = Tally(seed)
        self._trainers: list[subprocess.Popen[bytes]] = []

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        program = Path(__file__).with_name("soak_trainer.py")
        arguments = [sys.executable, str(program), str(self._folder), str(rank), str(WORLD_SIZE)]
        with (self._folder / f"rank-{rank}.err").open("ab") as errors:
            return subprocess.Popen(arguments, stderr=errors, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})

    def log(self, rank: int) -> list[dict[str, Any]]:
        """Returns the log of a rank."""
        try:
            return entries((self._folder / f"rank-{rank}.log").read_bytes())
        except FileNotFoundError:
            return []

    def _num_batches(self) -> list[int]:
        paths = [self._folder / f"rank-{rank}.log" for rank in range(WORLD_SIZE)]
        return [path.read_bytes().count(b'"at"') if path.exists() else 0 for path in paths]

    def _await(self, condition: Callable[[], Any], what: str) -> None:
        deadline = monotonic() + STUCK_S
        while not condition():
            for rank, trainer in enumerate(self._trainers):
                if trainer.poll() not in (None, 0):
                    errors = (self._folder / f"rank-{rank}.err").read_text()
                    raise RuntimeError(f"rank {rank} ended with {trainer.returncode}: {errors[-3000:]}")
            if monotonic() > deadline:
                raise RuntimeError(f"nothing happened for {STUCK_S} s while waiting for {what}: {self._stacks()}")
            threading.Event().wait(0.005)

    def _stacks(self) -> str:
        """Returns the stacks of the trainers."""
        for trainer in self._trainers:
            trainer.send_signal(signal.SIGUSR1)
        threading.Event().wait(1.0)
        return " ".join((self._folder / f"rank-{rank}.err").read_text()[-2000:] for rank in range(WORLD_SIZE))

    def run(self, minutes: float, min_kills: int = 0) -> None:
        """Kills processes for `minutes`, and at least `min_kills` times; then checks the deliveries."""
        began = monotonic()
        self._trainers = [self._start(rank) for rank in range(WORLD_SIZE)]
        watcher = Watcher(self._folder / "cache", self.tally)
        watcher.start()
        try:
            kinds = list(KINDS)
            while monotonic() < began + 60 * minutes or sum(self.tally.kills.values()) < min_kills:
                self._await_batches(PROGRESS, sum)
                if not kinds:
                    kinds = list(KINDS)
                self._kill(kinds.pop(self._random.randrange(len(kinds))))
            (self._folder / "stop").touch()
            self._await(lambda: all(trainer.poll() == 0 for trainer in self._trainers), "the end of both ranks")
        except RuntimeError as error:
            self.tally.found.append(str(error))
        finally:
            for trainer in self._trainers:
                trainer.kill()
                trainer.wait()
            watcher.stop()
        self._check_deliveries(began)

    def _await_batches(self, more: int, of: Callable[[list[int]], int]) -> None:
        before = self._num_batches()

        def have_come() -> bool:
            return of([now - was for now, was in zip(self._num_batches(), before, strict=True)]) >= more

        self._await(have_come, "batches")

    def _kill(self, kind: str) -> None:
        rank = self._random.randrange(WORLD_SIZE)
        if kind == "trainer":
            self._await_batches(1, min)  # one at a time, because the other rank holds the files that this one's state names
            self._trainers[rank].kill()
            self._trainers[rank].wait()
            self._trainers[rank] = self._start(rank)
        else:
            try:
                pids = json.loads((self._folder / f"pids-{0 if kind == 'sampler' else rank}").read_text())[f"{kind}s"]
                os.kill(self._random.choice(pids), signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError, IndexError):  # no such process at the moment
                return
        self.tally.kills[kind] += 1

    def _check_deliveries(self, began: float) -> None:
        tally, logs = self.tally, [self.log(rank) for rank in range(WORLD_SIZE)]
        ended = [self._folder / f"ended-{rank}" for rank in range(WORLD_SIZE)]
        tally.epochs = min(int(path.read_text()) + 1 if path.exists() else 0 for path in ended)
        tally.batches = sum("ids" in entry for log in logs for entry in log)
        tally.samples = sum(len(entry.get("ids", ())) for log in logs for entry in log)
        tally.found += differences(logs, tally.epochs)
        if tally.most_nbytes > CAPACITY_BYTES:
            tally.found.append(f"{tally.most_nbytes} bytes were in a folder of {CAPACITY_BYTES}")
        if not tally.epochs:
            tally.found.append("no epoch was finished")
        tally.minutes = round((monotonic() - began) / 60, 2)


def main(arguments: list[str] | None = None) -> int:
    """Runs the soak test and returns 0 if nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--min-kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), options.seed)
        soak.run(options.minutes, options.min_kills)
    print(json.dumps({**asdict(soak.tally), "samplers": NUM_SAMPLERS, "ranks": WORLD_SIZE}))
    return 1 if soak.tally.found else 0


if __name__ == "__main__":
    sys.exit(main())
