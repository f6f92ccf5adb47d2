"""Compute how the time between two snapshots is divided, such as the share in which the trainer waited."""

from __future__ import annotations

from typing import Any, NamedTuple

from shmload.engine.bottleneck import Bottleneck, judge_ring

Snapshot = dict[str, Any]  # the result of StatsReader.snapshot


def waited_ns(seen: Snapshot) -> int:
    """Return the time that the trainer has slept in `next()` up to the snapshot."""
    since: int = seen["waiting_since_ns"]
    return int(seen["wait_ns"]) + (max(seen["time_ns"] - since, 0) if since else 0)


def busy_ns(worker: dict[str, Any], time_ns: int) -> int:
    """Return the time that a worker has held claims up to `time_ns`."""
    claimed: int = worker["claimed_ns"]
    return int(worker["busy_ns"]) + (max(time_ns - claimed, 0) if claimed else 0)


def beginning(seen: Snapshot) -> Snapshot:
    """Return a snapshot for the moment when the trainer made the ring, with all counters 0, to report on the ring's whole life."""
    compared = ("batches", "samples", "nbytes", "wait_ns", "waiting_since_ns")
    workers = [dict.fromkeys(worker, 0) for worker in seen["workers"]]
    return {"time_ns": seen["owner_start_ns"], "workers": workers, **dict.fromkeys(compared, 0)}


class TimeShares(NamedTuple):
    """Shares of an interval in percent, to a tenth; all but those of the workers' time sum to 100.

    Attributes:
        start_up: no worker was ready yet.
        trainer_waits: the trainer waited for a batch.
        workers_wait: the trainer was busy, and the workers had nothing to do.
        free: neither waited.
        workers_busy: share of the workers' time in which they held claims.
        workers_asleep: share of it in which they also neither computed nor waited for a processor.
    """

    start_up: float
    trainer_waits: float
    workers_wait: float
    free: float
    workers_busy: float
    workers_asleep: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Return the four shares that sum to 100."""
        return {name: getattr(self, name) for name in ("start_up", "trainer_waits", "workers_wait", "free")}

    @property
    def bottleneck(self) -> Bottleneck:
        """Return the bottleneck according to these shares."""
        return judge_ring(
            trainer_waits=self.trainer_waits / 100,
            workers_busy=self.workers_busy / 100,
            workers_asleep=self.workers_asleep / 100,
            start_up=self.start_up / 100,
        )


def shares(before: Snapshot, seen: Snapshot) -> TimeShares:
    """Return the shares of the interval between two snapshots."""
    begin, end = before["time_ns"], seen["time_ns"]
    interval = max(end - begin, 1)
    start_up = 0
    if not any(worker["started_ns"] for worker in before["workers"]):
        ready = min((worker["started_ns"] for worker in seen["workers"] if worker["started_ns"]), default=end)
        start_up = _clamped(0, ready - begin, interval)
    waited = _clamped(0, waited_ns(seen) - waited_ns(before), interval)
    waits = max(waited - start_up, 0)
    busy, present, asleep = 0, 0, 0
    for last, worker in zip(before["workers"], seen["workers"], strict=True):
        if worker["started_ns"]:
            there = _clamped(0, end - max(begin, worker["started_ns"]), interval)
            its_busy = _clamped(0, busy_ns(worker, end) - busy_ns(last, begin), there)
            busy += its_busy
            present += there
            asleep += max(its_busy - _runnable_ns(last, worker, its_busy), 0)
    idle = 1 - busy / present if present else 0.0
    parts = {"start_up": start_up, "trainer_waits": waits, "workers_wait": idle * (interval - start_up - waits)}
    found, left = {}, 1000  # tenths of a percent
    for name, part in parts.items():
        share = min(round(1000 * part / interval), left)
        found[name], left = share / 10, left - share
    share_asleep = round(100 * asleep / present, 1) if present else 0.0
    return TimeShares(**found, free=left / 10, workers_busy=round(100 * (1 - idle), 1), workers_asleep=share_asleep)


def _runnable_ns(last: dict[str, Any], worker: dict[str, Any], unknown: int) -> int:
    """Return how long a worker computed, or waited for a processor, between two snapshots; `unknown` if they do not tell."""
    now, before = worker.get("runnable_ns"), last.get("runnable_ns")
    if now is None or before is None:
        return unknown
    return int(now - before if last["pid"] in (0, worker["pid"]) else now)


def _clamped(least: int, value: int, most: int) -> int:
    return max(least, min(value, most))
