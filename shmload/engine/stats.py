"""Report on a ring from its control block: rates, waits, and the current work of each worker.

A snapshot (`RingReader.snapshot`) is the contents of the block at one moment. `describe` makes a report from one snapshot or from
the difference of two; docs/top.md lists its keys.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from shmload._core.trainer import DRAINING, FREE, HELD, LEASED, ORDERED, PARKED
from shmload.engine.bottleneck import ring_remedy
from shmload.engine.time_shares import Snapshot, beginning, busy_ns, shares

Report = dict[str, Any]

HUNG_S = 5.0  # seconds after which a trainer that waits for one batch is reported as hung

# entries of a snapshot that a report contains unchanged
COPIED = (
    *("is_packed", "batches", "samples", "nbytes", "num_waits", "num_copied_out", "num_grown", "num_restarts"),
    *("num_bad_samples", "generation", "num_slots"),
)

# entries of a worker in a snapshot that a report contains unchanged
COPIED_OF_WORKER = (
    *("index", "num_chunks", "num_samples", "num_foreign", "num_irregular", "num_actors", "nbytes_fetched", "nbytes_remote"),
    *("num_restarts", "is_waiting", "started_ns", "since_ns"),
)

STATES = {"free": FREE, "held": HELD, "ordered": ORDERED, "leased": LEASED, "draining": DRAINING, "parked": PARKED}


def describe(seen: Snapshot, before: Snapshot | None = None) -> Report:
    """Return a report of one loader.

    Args:
        seen: the current snapshot.
        before: snapshot at the beginning of the interval; None reports the ring's whole life.
    """
    before = beginning(seen) if before is None else before
    interval_s = max(seen["time_ns"] - before["time_ns"], 0) / 1e9
    time = shares(before, seen)
    workers, slots = _workers(before, seen), _slots(seen)
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
        "epoch": seen["epoch"] if has_begun else None,
        "step": _step(seen, seen["step"]) if has_begun else None,
        "num_steps": seen["num_steps"] or None,
        "slots": slots,
        "orders": _orders(seen),
        "time": time.parts,
        "bottleneck": time.bottleneck,
        "remedy": ring_remedy(
            time.bottleneck,
            num_slots=seen["num_slots"],
            num_leased=slots["leased"],
            busy_shares=[worker["busy_share"] for worker in workers],
            in_turn=bool(seen["is_static"]),
            has_collate_fn=seen["read_path"] == "collate_fn",
        ),
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


def _step(seen: Snapshot, step: int) -> int:
    """Return the number of an order's batch within its epoch; see `TrainerRing.batch_of`, which error messages use."""
    return -(-step // max(int(seen["step_stride"]), 1))


# ------------------------------------------------------------ slots


def _is_ready(slot: dict[str, Any]) -> bool:
    return bool(slot["state"] == ORDERED and slot["num_final"] == slot["num_chunks"])


def _slots(seen: Snapshot) -> dict[str, int]:
    states = Counter(slot["state"] for slot in seen["slots"])
    num_ready = sum(_is_ready(slot) for slot in seen["slots"])
    return {**{name: states[state] for name, state in STATES.items()}, "filling": states[ORDERED] - num_ready, "ready": num_ready}


def _orders(seen: Snapshot) -> list[Report]:
    """Return the batches in progress, in the order in which they were published."""
    ordered = sorted((slot for slot in seen["slots"] if slot["state"] == ORDERED), key=lambda slot: int(slot["order"]))
    return [
        {
            "epoch": slot["epoch"],
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
    """Return the bytes of the control block and of the segments in use, each up to the end of its last slot."""
    ends: dict[str, int] = {}
    for slot in seen["slots"]:
        end = slot["payload_offset"] + slot["payload_nbytes"]
        ends[slot["payload_path"]] = max(end, ends.get(slot["payload_path"], 0))
    return int(seen["control_nbytes"]) + sum(ends.values())


# ------------------------------------------------------------ workers


def _workers(before: Snapshot, seen: Snapshot) -> list[Report]:
    """Return a report for each worker. Rates are those between the two snapshots."""
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
                "epoch": None if claim is None else claim[0]["epoch"],
                "step": None if claim is None else _step(seen, claim[0]["step"]),
                "for_s": _seconds_since(since_ns, seen) if since_ns else None,
                "busy_share": min(round(new / interval_ns, 3), 1.0) if interval_ns > 0 else 0.0,
                "busy_s": busy / 1e9,
                "samples_per_s": _rate(worker["num_samples"] - last["num_samples"], interval_ns / 1e9),
                "node": worker["node"] or None,
                **{name: worker[name] for name in COPIED_OF_WORKER},
            }
        )
    return found


def _doing(seen: Snapshot, number: int, claim: tuple[dict[str, Any], int, int] | None) -> tuple[str, int]:
    """Return a worker's state, and the time in ns at which it began; 0 if unknown."""
    worker, is_wanted = seen["workers"][number], number < seen["num_wanted"]
    if not worker["started_ns"] and claim is None:  # a helper from another rank has no start time, but may have a claim
        return ("starting" if is_wanted else "not wanted"), 0
    if claim is None:
        return ("leaving" if seen["is_closing"] or not is_wanted else "waiting"), 0
    slot, first, end = claim
    order, row = worker["now"] >> 16, worker["now"] & 0xFFFF
    # unless the row belongs to a chunk that the worker finished earlier
    if order == slot["order"] and first + ((row - first) & 0xFFFF) < end:
        return "decoding", worker["since_ns"]
    return "filling", worker["claimed_ns"]


def _cluster(before: Snapshot, seen: Snapshot, interval_s: float) -> Report | None:
    """Return the nodes of the Ray actors and the bytes that they have sent; None without Ray, or before the first batch."""
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
    """Return the batch that the trainer sleeps for, and the worker that has worked on it longest; None if it does not sleep."""
    if not seen["waiting_since_ns"]:
        return None
    found: Report = {"for_s": _seconds_since(seen["waiting_since_ns"], seen), "epoch": None, "step": None}
    slot = _awaited(seen)
    if slot is None:
        return {**found, "worker": None}
    at_it = [worker for worker, _, _ in slot["claims"]]
    longest = max(at_it, key=lambda worker: workers[worker]["for_s"] or 0.0, default=None)
    return {**found, "epoch": slot["epoch"], "step": _step(seen, slot["step"]), "worker": longest}


def _awaited(seen: Snapshot) -> dict[str, Any] | None:
    awaited = seen["awaited"]
    if 0 < awaited <= seen["num_slots"]:
        slot: dict[str, Any] = seen["slots"][awaited - 1]
        return slot if slot["state"] == ORDERED else None
    # the trainer waits for any batch, or for one that has no slot yet
    filling = [slot for slot in seen["slots"] if slot["state"] == ORDERED and not _is_ready(slot)]
    return min(filling, key=lambda slot: int(slot["order"]), default=None)


def _is_hung(seen: Snapshot) -> bool:
    """Return whether the trainer has waited `HUNG_S` seconds for one batch since the first worker started."""
    since = seen["waiting_since_ns"]
    ready = min((worker["started_ns"] for worker in seen["workers"] if worker["started_ns"]), default=None)
    return bool(since) and ready is not None and seen["time_ns"] - max(since, ready) >= HUNG_S * 1e9
