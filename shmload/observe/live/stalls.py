"""Who waited for whom: an interval of a loader's life divided among its causes.

An interval [t0, t1] between two snapshots has four parts. They sum to the whole:

    start_up       from t0 until the first worker was ready for orders, if none was at t0
    trainer_waits  the trainer slept in `next()` for a batch (header.wait_ns, and since waiting_since_ns if it sleeps now), less the
                   start-up: workers are the limit
    workers_wait   of the rest, in which the program was busy with other things, the share of the crew's time in which a worker
                   had no claim: no slot was free or nothing was ordered, so the program is the limit
    free           what is left: the program was busy, and the workers too; nobody waited

The crew's time is the sum over workers of the time since each was ready. Busy is what lies between claim and finish (busy_ns, and
since claimed_ns if it holds a claim now). A worker that is idle while the trainer waits (in torch mode a batch belongs to one
worker) belongs to `trainer_waits`: that is what costs the program time.
"""

from __future__ import annotations

from typing import Any, Literal

Limit = Literal["start-up", "workers", "program", "neither"]
Snapshot = dict[str, Any]  # what Onlooker.snapshot returns

NOTICED = 5.0  # per cent of the interval: waits that are shorter name no limit


def waited_ns(seen: Snapshot) -> int:
    """How long the trainer has slept in `next()` by then."""
    since: int = seen["waiting_since_ns"]
    return int(seen["wait_ns"]) + (max(seen["time_ns"] - since, 0) if since else 0)


def busy_ns(worker: dict[str, Any], time_ns: int) -> int:
    """How long a worker had held claims by then."""
    claimed: int = worker["claimed_ns"]
    return int(worker["busy_ns"]) + (max(time_ns - claimed, 0) if claimed else 0)


def beginning(seen: Snapshot) -> Snapshot:
    """The snapshot that the trainer could have taken when it made the ring: nothing had been counted."""
    counted = (
        "busy_ns",
        "claimed_ns",
        "started_ns",
        "num_samples",
        "num_chunks",
        "num_foreign",
        "nbytes_fetched",
        "nbytes_remote",
    )
    nothing = dict.fromkeys(counted, 0)
    counters = (
        "batches",
        "samples",
        "nbytes",
        "wait_ns",
        "waiting_since_ns",
        "num_waits",
        "num_copied_out",
        "num_restarts",
    )
    return {
        **seen,
        **dict.fromkeys(counters, 0),
        "time_ns": seen["owner_start_ns"],
        "workers": [{**worker, **nothing} for worker in seen["workers"]],
    }


def shares(before: Snapshot, seen: Snapshot) -> dict[str, float]:
    """The four parts in per cent, to a tenth; they sum to 100."""
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
    tenths, left = {}, 1000
    for name, part in (
        ("start_up", start_up),
        ("trainer_waits", waits),
        ("workers_wait", idle * (interval - start_up - waits)),
    ):
        tenths[name] = min(round(1000 * part / interval), left)
        left -= tenths[name]
    return {name: share / 10 for name, share in (*tenths.items(), ("free", left))}


def limit_of(time: dict[str, float]) -> Limit:
    """Which part keeps the whole from being faster; "neither" if nobody waits for long."""
    if time["start_up"] >= 50:
        return "start-up"
    if max(time["trainer_waits"], time["workers_wait"]) < NOTICED:
        return "neither"
    return "workers" if time["trainer_waits"] >= time["workers_wait"] else "program"


def _between(least: int, value: int, most: int) -> int:
    return max(least, min(value, most))
