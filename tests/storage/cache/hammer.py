"""The hammer: processes that fetch, read and evict in one small folder are killed with SIGKILL at named points and at random
moments.
    python -m tests.storage.cache.hammer --kills 5000 [--seed N] [--folder PLACE]
A store of known objects, 2.5 times as large as the budget, is read through a `Cache` by forked processes that each hold up to two
leases. After each kill, while the other processes continue, the folder is examined under its lock without the cache's own code:
the budget is kept, every file is complete and of its version, and another process finishes an operation within a second. At the
end, one more operation leaves no orphan. The last line of the output is the result as JSON.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from time import monotonic

POINTS = ("mid_fetch", "after_fetch", "after_reserve", "before_publish", "mid_evict", "after_publish", "holding_lock", "")
NUM_PROCESSES, NUM_KEYS, NUM_VERSIONS, CAPACITY = 4, 30, 2, 40_000
DEADLINE_S = 60
PAUSE = Event()  # never set


@dataclass
class Tally:
    """Counts of what has happened."""

    seed: int
    kills: int = 0
    kills_by_point: dict[str, int] | None = None
    operations: int = 0
    worst_pause_s: float = 0.0
    most_bytes: int = 0
    cpu_s: float = 0.0


def size_of(key: int) -> int:
    return 500 + key * 997 % 6000


def bytes_of(key: int, version: int) -> bytes:
    block = hashlib.blake2b(f"{key} {version}".encode()).digest()
    return (block * (size_of(key) // len(block) + 1))[: size_of(key)]


def run_process(folder: str, seed: int, counters: mmap.mmap, number: int) -> None:
    """Runs one process: opens objects, checks them and holds some."""
    from shmload import faults
    from shmload.storage.cache import Cache

    rng, held = random.Random(seed), []
    cache = Cache(folder, CAPACITY, durable=False)
    while True:
        keys = [rng.randrange(NUM_KEYS) for _ in range(20)]
        if rng.random() < 0.5:
            cache.expect([f"mem://{key}" for key in keys])
        for key in keys:
            version = rng.randrange(NUM_VERSIONS) if key % 5 == 0 else 0
            expected = bytes_of(key, version)

            def fetch(fd: int, expected: bytes = expected) -> None:
                half = len(expected) // 2
                os.pwrite(fd, expected[:half], 0)
                faults.hit("mid_fetch")
                os.pwrite(fd, expected[half:], half)

            lease = cache.open(f"mem://{key}", len(expected), fetch, etag=str(version), timeout_s=DEADLINE_S)
            if os.pread(lease.fd, 10_000, 0) != expected:
                os.write(2, b"a lease of other bytes\n")
                os._exit(3)
            held.append(lease)
            if len(held) > 2:
                held.pop(rng.randrange(3)).release()
            count = struct.unpack_from("<Q", counters, 8 * number)[0]
            struct.pack_into("<Q", counters, 8 * number, count + 1)


class Director:
    """Starts the processes, kills them and checks the folder."""

    def __init__(self, place: str, seed: int, longest_pause_s: float) -> None:
        self.longest_pause_s = longest_pause_s
        self.folder, self.charges = f"{place}/cache", os.environ["SHMLOAD_FAULTS"]
        self.rng = random.Random(seed)
        self.tally = Tally(seed, kills_by_point=dict.fromkeys(POINTS, 0))
        self.counters = mmap.mmap(-1, 4096)
        self.pids: dict[int, int] = {}  # process ids by slot
        self.whole = {hashlib.sha256(bytes_of(key, v)).digest() for key in range(NUM_KEYS) for v in range(NUM_VERSIONS)}

    def start(self, number: int) -> None:
        seed = self.rng.randrange(1 << 30)
        pid = os.fork()
        if pid == 0:
            try:
                run_process(self.folder, seed, self.counters, number)
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(2)
        self.pids[number] = pid

    def run(self, num_kills: int) -> Tally:
        for number in range(NUM_PROCESSES):
            self.start(number)
        try:
            self.progress(set())
            for kill in range(num_kills):
                self.kill_one(POINTS[kill % len(POINTS)], kill)
            self.tally.operations = sum(self.counts())
        finally:
            for pid in self.pids.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.check_orphans()
        return self.tally

    def kill_one(self, point: str, kill: int) -> None:
        """Waits for a death at the point, or kills any process; then checks the folder."""
        if point:
            Path(self.charges, f"new-{kill}").write_text(str(int(signal.SIGKILL)))
            os.rename(f"{self.charges}/new-{kill}", f"{self.charges}/{point}.{kill}")
        else:
            PAUSE.wait(self.rng.random() * 0.01)
            os.kill(self.rng.choice(list(self.pids.values())), signal.SIGKILL)
        pid, status = os.waitpid(-1, 0)
        died = monotonic()
        (number,) = (number for number, each in self.pids.items() if each == pid)
        assert os.WIFSIGNALED(status), f"process {pid} ended by itself with {os.waitstatus_to_exitcode(status)}"
        self.check_folder()
        looked = monotonic()
        self.progress({number})
        self.tally.worst_pause_s = max(self.tally.worst_pause_s, monotonic() - min(died, looked))
        assert self.tally.worst_pause_s < self.longest_pause_s, (
            f"nothing went on for {self.tally.worst_pause_s} s behind a kill at {point}"
        )
        self.start(number)
        self.tally.kills += 1
        assert self.tally.kills_by_point is not None
        self.tally.kills_by_point[point] += 1

    def counts(self) -> tuple[int, ...]:
        return struct.unpack_from(f"<{NUM_PROCESSES}Q", self.counters)

    def progress(self, without: set[int]) -> None:
        """Waits until a process that is not in `without` has finished an operation."""
        before, deadline = self.counts(), monotonic() + DEADLINE_S
        while not any(now > then for i, (now, then) in enumerate(zip(self.counts(), before, strict=True)) if i not in without):
            assert monotonic() < deadline, "no process makes progress"
            PAUSE.wait(0.0005)

    def check_folder(self) -> None:
        """Checks the budget and that files are complete, while the lock is held."""
        fd = os.open(f"{self.folder}/.shmload/ledger", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            files = [entry for entry in os.scandir(self.folder) if not entry.name.startswith(".")]
            nbytes = sum(entry.stat().st_size for entry in files)
            nbytes += sum(entry.stat().st_size for entry in os.scandir(f"{self.folder}/.shmload/new"))
            digests = {hashlib.sha256(Path(entry.path).read_bytes()).digest() for entry in files}
        finally:
            os.close(fd)
        assert nbytes <= CAPACITY, f"{nbytes} bytes in a budget of {CAPACITY}"
        assert digests <= self.whole, "an incomplete file is visible"
        self.tally.most_bytes = max(self.tally.most_bytes, nbytes)

    def check_orphans(self) -> None:
        """Checks that one operation removes everything of the dead processes."""
        from shmload.storage.budgeted_folder import BudgetedFolder

        self.check_folder()
        folder = BudgetedFolder(self.folder, CAPACITY)
        folder.reserve(CAPACITY).abandon()
        assert os.listdir(f"{self.folder}/.shmload/new") == [], "an orphan is left"
        assert len(os.listdir(f"{self.folder}/.shmload/users")) == 1, "a dead process is still listed as a user"


def run(num_kills: int, seed: int, folder: str | None, longest_pause_s: float) -> Tally:
    place = tempfile.mkdtemp(dir=folder)
    os.environ["SHMLOAD_FAULTS"] = f"{place}/charges"
    os.mkdir(f"{place}/charges")
    import shmload.storage.cache  # noqa: F401  once, before the processes are forked; it looks for charges when it is imported

    try:
        tally = Director(place, seed, longest_pause_s).run(num_kills)
    finally:
        shutil.rmtree(place)
    times = os.times()
    tally.cpu_s = round(times.user + times.system + times.children_user + times.children_system, 2)
    return tally


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=400)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--folder", default=None, help="where to make the cache's folder")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds within which another must go on behind a kill")
    given = parser.parse_args()
    chosen = random.randrange(1 << 30) if given.seed is None else given.seed
    print(f"seed {chosen}", file=sys.stderr)
    print(json.dumps(asdict(run(given.kills, chosen, given.folder, given.pause))))
