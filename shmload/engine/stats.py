"""What a control block's words mean: rates, waits, who waits for whom, what each worker is at, from one snapshot or between two.

A snapshot (`reader.RingReader.snapshot`) is the block's words at one moment; `describe` makes a report of it, whose keys
docs/top.md names.

Reading a running ring: `shmload top`, `shmload trace` and `loader.stats()` read control blocks through one class, `RingReader`.

From outside a block is found first: by name in /dev/shm, or in a memfd, seen under /proc/<pid>/fd. Whether the owner of a named
block lives is known by the flock on it. It is not asked for by taking it: /proc/locks lists who holds what. Only a block whose
lock no process in sight holds is asked about as `shmload clean` does (shm/janitor.py): it is a dead loader's, or that of another
container which shares /dev/shm. A block is mapped read-only, and nothing in it is believed before its sizes were checked.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from shmload._core.mapping import Mapping
from shmload._core.stats_reader import StatsReader
from shmload.engine.bottleneck import Bottleneck, judge_ring
from shmload.shm import janitor
from shmload.shm.janitor import Leftover
from shmload.shm.names import SHM_DIR, STEM_PATTERN

_CONTROL = "-control"
_FLOCK = re.compile(r"\d+: FLOCK +\w+ +WRITE (\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ")
_MEMFD = re.compile(r"/memfd:(.+) \(deleted\)")


About = Sequence[tuple[str, str]]  # stages of a pipeline, and where each runs

_ABOUT = struct.Struct("<I8s")  # bytes of the text before it, and a mark
_MARK = b"stages 1"
_ABOUT_NBYTES = 4000


def about_bytes(about: About) -> bytes:
    """What stands behind a control block of a pipeline, for who looks at it; nothing of another loader."""
    if not about:
        return b""
    num_shown = len(about)
    while len(text := json.dumps([*about[:num_shown]]).encode()) > _ABOUT_NBYTES:
        num_shown -= 1
    return text + _ABOUT.pack(len(text), _MARK)


def about_in(block: memoryview) -> About | None:
    """What `about_bytes` gave for the end of a block; None if nothing stands there."""
    first = len(block) - _ABOUT.size
    if first < 0:
        return None
    nbytes, mark = _ABOUT.unpack(block[first:])
    if mark != _MARK or nbytes > first:
        return None
    try:
        return [(str(name), str(where)) for name, where in json.loads(bytes(block[first - nbytes : first]))]
    except (ValueError, TypeError):
        return None


class ControlBlock(NamedTuple):
    """A living loader's control block.

    Attributes:
        stem: its group's, unique on the host.
        path: what to open.
        pid: the trainer's in this PID namespace; None: it lives in another one.
        kind: "shm" or "memfd".
    """

    stem: str
    path: str
    uid: int
    pid: int | None
    kind: str


class Found(NamedTuple):
    """What was found on the host."""

    blocks: list[ControlBlock]
    leftovers: list[Leftover]


class RingReader:
    """One ring's control block.

    Args:
        control: mapping of the whole block; read-only is enough.
    Raises:
        ValueError: it is no control block of this version, or a damaged one.
    """

    def __init__(self, control: Mapping) -> None:
        self.control = control
        self._stats_reader = StatsReader(control)

    @classmethod
    def open(cls, path: str) -> Self:
        """Maps the block at a path of `find`.

        Raises:
            ValueError: as the class.
            OSError: it may not be read, or has gone.
        """
        is_name = not path.startswith("/proc/")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if is_name else 0))
        try:
            nbytes = os.fstat(fd).st_size
            if nbytes == 0:
                raise ValueError(f"{path} is no control block: it is empty")
            return cls(Mapping(fd, nbytes, writable=False))
        finally:
            os.close(fd)

    @staticmethod
    def find(folder: str = SHM_DIR, proc: str = "/proc") -> Found:
        """The blocks of this host.

        Cost: a stat for each name of ours, and a readlink for each descriptor of each process that may be read.
        """
        leftovers = janitor.find_leftovers(folder)
        dead = {leftover.stem for leftover in leftovers}
        named = [block for block in _named(folder, _holders(proc)) if block.stem not in dead]
        return Found([*named, *_in_memfds(proc)], leftovers)

    def snapshot(self) -> Snapshot:
        """What the block says now."""
        return self._stats_reader.snapshot()

    @property
    def about(self) -> About | None:
        """The stages of the pipeline that has the ring, and where each runs; None: it is no pipeline's."""
        return about_in(memoryview(self.control))

    def report(self) -> Report:
        """What that means, over the ring's whole life."""
        return describe(self.snapshot())


def _named(folder: str, holders: dict[tuple[int, int, int], int]) -> Iterator[ControlBlock]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        match = STEM_PATTERN.fullmatch(name)
        if match is None or name != match[1] + _CONTROL:
            continue
        try:
            status = os.lstat(f"{folder}/{name}")
        except FileNotFoundError:
            continue
        if status.st_size:  # an empty one only marks that the ring is in a memfd (shm/segment.py)
            key = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
            yield ControlBlock(match[1], f"{folder}/{name}", status.st_uid, holders.get(key), "shm")


def _holders(proc: str) -> dict[tuple[int, int, int], int]:
    """Who holds an exclusive flock on which file (device's numbers, inode): proc_locks(5). Others' PID namespaces do not show."""
    try:
        lines = Path(proc, "locks").read_text().splitlines()
    except OSError:
        return {}
    held = filter(None, map(_FLOCK.match, lines))
    return {(int(one[2], 16), int(one[3], 16), int(one[4])): int(one[1]) for one in held}


def _in_memfds(proc: str) -> Iterator[ControlBlock]:
    """The lowest pid that has one open is its trainer's: workers map it and close it."""
    seen = set()
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdigit()):
        try:
            descriptors = os.listdir(f"{proc}/{pid}/fd")
        except OSError:  # it has gone, or is another user's
            continue
        for fd in descriptors:
            path = f"{proc}/{pid}/fd/{fd}"
            try:
                name = _MEMFD.fullmatch(os.readlink(path))
                match = name and STEM_PATTERN.fullmatch(name[1])
                if match and name and name[1] == match[1] + _CONTROL and match[1] not in seen:
                    seen.add(match[1])
                    yield ControlBlock(match[1], path, os.stat(path).st_uid, pid, "memfd")
            except OSError:
                continue


# ------------------------------------------------------------ the processes of a ring

PAGE = os.sysconf("SC_PAGE_SIZE")
_HELPERS = ("multiprocessing.spawn", "multiprocessing.forkserver", "shmload.worker.template")  # the command is their parent's


class Process(NamedTuple):
    """One process of this PID namespace.

    Attributes:
        rss_bytes: what it has in memory, the ring it maps included.
        private_bytes: of that, what it shares with no file and no segment.
        is_stopped: by a signal or a debugger.
    """

    parent: int
    is_stopped: bool
    rss_bytes: int
    private_bytes: int


def look(pid: int | None, proc: str = "/proc") -> Process | None:
    """What is known of a process; None if it has gone, or nothing of it may be read."""
    if not pid:
        return None
    try:
        words = Path(f"{proc}/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        pages = [int(word) for word in Path(f"{proc}/{pid}/statm").read_bytes().split()]
        return Process(int(words[1]), words[0] in (b"T", b"t"), pages[1] * PAGE, (pages[1] - pages[2]) * PAGE)
    except (OSError, IndexError, ValueError):
        return None


def command_of(pid: int | None, proc: str = "/proc") -> str:
    """Its command line; its parent's if multiprocessing has started it; empty if that cannot be read."""
    if not pid:
        return ""
    try:
        words = Path(f"{proc}/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return ""
    if any(helper in word for word in words for helper in _HELPERS):
        found = look(pid, proc)
        return command_of(None if found is None else found.parent, proc) or " ".join(words)
    return " ".join(words)


def add_memory(report: dict[str, Any], proc: str = "/proc", *, is_known: bool = True) -> None:
    """Adds to a report what its workers' processes take and whether one is stopped; None where unknown.

    Args:
        is_known: their pids are those of this PID namespace.
    """
    names = ("is_stopped", "rss_bytes", "private_bytes")
    for worker in report["workers"]:
        found = look(worker["pid"], proc) if is_known else None
        worker.update({name: None if found is None else getattr(found, name) for name in names})
    for name in names[1:]:
        report["memory"][f"workers_{name}"] = sum(worker[name] or 0 for worker in report["workers"]) or None


Snapshot = dict[str, Any]  # what Stats reader.snapshot returns


def waited_ns(seen: Snapshot) -> int:
    """How long the trainer has slept in `next()` by then."""
    since: int = seen["waiting_since_ns"]
    return int(seen["wait_ns"]) + (max(seen["time_ns"] - since, 0) if since else 0)


def busy_ns(worker: dict[str, Any], time_ns: int) -> int:
    """How long a worker had held claims by then."""
    claimed: int = worker["claimed_ns"]
    return int(worker["busy_ns"]) + (max(time_ns - claimed, 0) if claimed else 0)


def beginning(seen: Snapshot) -> Snapshot:
    """What of a snapshot is compared, as the trainer could have taken it when it made the ring: nothing had been counted."""
    compared = ("batches", "samples", "nbytes", "wait_ns", "waiting_since_ns")
    workers = [dict.fromkeys(worker, 0) for worker in seen["workers"]]
    return {"time_ns": seen["owner_start_ns"], "workers": workers, **dict.fromkeys(compared, 0)}


class TimeShares(NamedTuple):
    """Shares of an interval in per cent, to a tenth; all but `workers_busy` sum to 100.

    Attributes:
        start_up: no worker was ready yet.
        trainer_waits: the trainer waited for a batch.
        workers_wait: the trainer was busy, and workers had nothing to do.
        free: nobody waited.
        workers_busy: share of the workers' time in which they held claims.
    """

    start_up: float
    trainer_waits: float
    workers_wait: float
    free: float
    workers_busy: float

    @property
    def parts(self) -> dict[str, float]:
        """The four shares that sum to 100."""
        return {name: share for name, share in self._asdict().items() if name != "workers_busy"}

    @property
    def bottleneck(self) -> Bottleneck:
        """The verdict on these shares."""
        start_up, trainer_waits, workers_busy = self.start_up / 100, self.trainer_waits / 100, self.workers_busy / 100
        return judge_ring(trainer_waits=trainer_waits, workers_busy=workers_busy, start_up=start_up)


def shares(before: Snapshot, seen: Snapshot) -> TimeShares:
    """Return the shares of the interval between two snapshots."""
    begin, end = before["time_ns"], seen["time_ns"]
    interval = max(end - begin, 1)
    start_up = 0
    if not any(worker["started_ns"] for worker in before["workers"]):
        ready = min((worker["started_ns"] for worker in seen["workers"] if worker["started_ns"]), default=end)
        start_up = _between(0, ready - begin, interval)
    waited = _between(0, waited_ns(seen) - waited_ns(before), interval)
    waits = max(waited - start_up, 0)
    busy, present = 0, 0
    for last, worker in zip(before["workers"], seen["workers"], strict=True):
        if worker["started_ns"]:
            there = _between(0, end - max(begin, worker["started_ns"]), interval)
            busy += _between(0, busy_ns(worker, end) - busy_ns(last, begin), there)
            present += there
    idle = 1 - busy / present if present else 0.0
    parts = {"start_up": start_up, "trainer_waits": waits, "workers_wait": idle * (interval - start_up - waits)}
    found, left = {}, 1000  # tenths of a per cent
    for name, part in parts.items():
        share = min(round(1000 * part / interval), left)
        found[name], left = share / 10, left - share
    return TimeShares(**found, free=left / 10, workers_busy=round(100 * (1 - idle), 1))


def _between(least: int, value: int, most: int) -> int:
    return max(least, min(value, most))


Report = dict[str, Any]

HUNG_S = 5.0  # a trainer that has waited for one batch this long is pointed out
FREE, HELD, ORDERED, LEASED, DRAINING, PARKED = range(6)  # slot.state
COPIED = (
    *("is_packed", "batches", "samples", "nbytes", "num_waits", "num_copied_out", "num_grown", "num_restarts"),
    *("num_bad_samples", "generation", "num_slots"),
)  # words that a report holds as they are
COPIED_OF_WORKER = (
    *("index", "num_chunks", "num_samples", "num_foreign", "num_irregular", "num_actors", "nbytes_fetched", "nbytes_remote"),
    *("num_restarts", "is_waiting", "started_ns", "since_ns"),
)
STATES = {"free": FREE, "held": HELD, "ordered": ORDERED, "leased": LEASED, "draining": DRAINING, "parked": PARKED}


def describe(seen: Snapshot, before: Snapshot | None = None) -> Report:
    """Everything there is to say about one loader.

    Args:
        seen: what the block says now.
        before: what it said when the interval began; None: the interval is the ring's whole life.
    """
    before = beginning(seen) if before is None else before
    interval_s = max(seen["time_ns"] - before["time_ns"], 0) / 1e9
    time = shares(before, seen)
    workers = _workers(before, seen)
    has_begun = seen["batches"] > 0
    return {
        "interval_s": interval_s,
        "age_s": _seconds_since(seen["owner_start_ns"], seen),
        "dataset": seen["dataset_name"],
        "read_by": seen["read_path"],
        "mode": "torch" if seen["is_static"] else "seed",
        **{name: seen[name] for name in COPIED},
        "wait_s": seen["wait_ns"] / 1e9,
        **{name: sum(worker[name] for worker in seen["workers"]) for name in ("num_foreign", "num_irregular")},
        **{f"{name}_per_s": _rate(seen[name] - before[name], interval_s) for name in ("samples", "batches", "nbytes")},
        "epoch": _epoch(seen, seen["epoch"]) if has_begun else None,
        "step": _step(seen, seen["step"]) if has_begun else None,
        "num_steps": seen["num_steps"] or None,
        "slots": _slots(seen),
        "orders": _orders(seen),
        "time": time.parts,
        "bottleneck": time.bottleneck,
        "waits_for": _waits_for(seen, workers),
        "is_hung": _is_hung(seen),
        "workers": workers,
        "cluster": _cluster(before, seen, interval_s),
        "memory": {"ring_nbytes": ring_nbytes(seen)},
    }


def _rate(count: int, interval_s: float) -> float:
    return max(count, 0) / interval_s if interval_s > 0 else 0.0


def _seconds_since(since_ns: int, seen: Snapshot) -> float:
    now_ns: int = seen["time_ns"]
    return max(now_ns - since_ns, 0) / 1e9


def _epoch(seen: Snapshot, epoch: int) -> int:
    return epoch + int(seen["epoch_base"])


def _step(seen: Snapshot, step: int) -> int:
    """Steps that came before an order's: where an order makes the batches, orders count those of all ranks."""
    return step // max(int(seen["step_stride"]), 1)


# ------------------------------------------------------------ slots


def _is_ready(slot: dict[str, Any]) -> bool:
    return bool(slot["state"] == ORDERED and slot["num_final"] == slot["num_chunks"])


def _slots(seen: Snapshot) -> dict[str, int]:
    states = Counter(slot["state"] for slot in seen["slots"])
    num_ready = sum(_is_ready(slot) for slot in seen["slots"])
    return {**{name: states[state] for name, state in STATES.items()}, "filling": states[ORDERED] - num_ready, "ready": num_ready}


def _orders(seen: Snapshot) -> list[Report]:
    """The batches under way, in the order in which they were asked for."""
    ordered = sorted((slot for slot in seen["slots"] if slot["state"] == ORDERED), key=lambda slot: int(slot["order"]))
    return [
        {
            "epoch": _epoch(seen, slot["epoch"]),
            "step": _step(seen, slot["step"]),
            "num_rows": slot["nrows"],
            "num_chunks": slot["num_chunks"],
            "num_chunks_done": slot["num_final"],
            "age_s": _seconds_since(slot["ordered_ns"], seen),
            "workers": sorted({worker for worker, _, _ in slot["claims"]}),
        }
        for slot in ordered
    ]


def ring_nbytes(seen: Snapshot) -> int:
    """Bytes of the control block and of the segments that slots lie in now, each to the end of its last slot."""
    ends: dict[str, int] = {}
    for slot in seen["slots"]:
        end = slot["payload_offset"] + slot["payload_nbytes"]
        ends[slot["payload_path"]] = max(end, ends.get(slot["payload_path"], 0))
    return int(seen["control_nbytes"]) + sum(ends.values())


# ------------------------------------------------------------ workers


def _workers(before: Snapshot, seen: Snapshot) -> list[Report]:
    interval_ns = seen["time_ns"] - before["time_ns"]
    claims = {
        worker: (slot, first, end)
        for slot in seen["slots"]
        if slot["state"] in (ORDERED, DRAINING)
        for worker, first, end in slot["claims"]
    }
    found = []
    for number, (last, worker) in enumerate(zip(before["workers"], seen["workers"], strict=True)):
        claim = claims.get(number)
        state, since_ns = _doing(seen, number, claim)
        busy = busy_ns(worker, seen["time_ns"])
        new = max(busy - busy_ns(last, before["time_ns"]), 0)
        found.append(
            {
                "pid": worker["pid"] or None,
                "state": state,
                "epoch": None if claim is None else _epoch(seen, claim[0]["epoch"]),
                "step": None if claim is None else _step(seen, claim[0]["step"]),
                "for_s": _seconds_since(since_ns, seen) if since_ns else None,
                "busy_share": min(round(100 * new / interval_ns, 1), 100.0) if interval_ns > 0 else 0.0,
                "busy_s": busy / 1e9,
                "samples_per_s": _rate(worker["num_samples"] - last["num_samples"], interval_ns / 1e9),
                "node": worker["node"] or None,
                **{name: worker[name] for name in COPIED_OF_WORKER},
            }
        )
    return found


def _doing(seen: Snapshot, number: int, claim: tuple[dict[str, Any], int, int] | None) -> tuple[str, int]:
    """A worker's state, and since when it is in it (0: not known)."""
    worker, is_wanted = seen["workers"][number], number < seen["num_wanted"]
    if not worker["started_ns"] and claim is None:  # a helper has a claim, if anything
        return ("starting" if is_wanted else "not wanted"), 0
    if claim is None:
        return ("leaving" if seen["is_closing"] or not is_wanted else "waiting"), 0
    slot, first, end = claim
    order, row = worker["now"] >> 16, worker["now"] & 0xFFFF
    if order == slot["order"] and first + ((row - first) & 0xFFFF) < end:  # else of a chunk that it had done before
        return "decoding", worker["since_ns"]
    return "filling", worker["claimed_ns"]


def _cluster(before: Snapshot, seen: Snapshot, interval_s: float) -> Report | None:
    """What Ray actors have sent, and from which nodes; None before they have sent anything, and without Ray."""
    far = [worker for worker in seen["workers"] if worker["node"]]
    if not far:
        return None
    counters = ("nbytes_fetched", "nbytes_remote")
    total = {name: sum(worker[name] for worker in seen["workers"]) for name in counters}
    last = {name: sum(worker[name] for worker in before["workers"]) for name in counters}
    return {
        "nodes": dict(sorted(Counter(worker["node"] for worker in far).items())),
        "num_actors": len(far),
        "num_replaced": sum(worker["num_actors"] - 1 for worker in far),
        **total,
        **{f"{name}_per_s": _rate(total[name] - last[name], interval_s) for name in counters},
    }


# ------------------------------------------------------------ waiting


def _waits_for(seen: Snapshot, workers: list[Report]) -> Report | None:
    """What the trainer sleeps for: the batch, and the worker that has been at it for longest; None if it does not sleep."""
    if not seen["waiting_since_ns"]:
        return None
    found: Report = {"for_s": _seconds_since(seen["waiting_since_ns"], seen), "epoch": None, "step": None}
    slot = _awaited(seen)
    if slot is None:
        return {**found, "worker": None}
    at_it = [worker for worker, _, _ in slot["claims"]]
    longest = max(at_it, key=lambda worker: workers[worker]["for_s"] or 0.0, default=None)
    return {**found, "epoch": _epoch(seen, slot["epoch"]), "step": _step(seen, slot["step"]), "worker": longest}


def _awaited(seen: Snapshot) -> dict[str, Any] | None:
    awaited = seen["awaited"]
    if 0 < awaited <= seen["num_slots"]:
        slot: dict[str, Any] = seen["slots"][awaited - 1]
        return slot if slot["state"] == ORDERED else None
    # for whichever is done first, or for one that has no slot yet
    filling = [slot for slot in seen["slots"] if slot["state"] == ORDERED and not _is_ready(slot)]
    return min(filling, key=lambda slot: int(slot["order"]), default=None)


def _is_hung(seen: Snapshot) -> bool:
    """Whether the trainer has waited for one batch for long, and not because workers are only starting."""
    since = seen["waiting_since_ns"]
    ready = min((worker["started_ns"] for worker in seen["workers"] if worker["started_ns"]), default=None)
    return bool(since) and ready is not None and seen["time_ns"] - max(since, ready) >= HUNG_S * 1e9
