"""What the words of a control block mean: from one or two snapshots to figures under names. Pure functions, no clocks, no files.

`loader.stats()` and `shmload top` both come here, so they say the same under the same names; docs/top.md lists them. Whatever
integers a snapshot holds, these functions answer: a damaged block gives odd figures and no exception.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from shmload.observe.live.stalls import Snapshot, beginning, busy_ns, limit_of, shares

Report = dict[str, Any]

HUNG_S = 5.0  # a trainer that has waited for one batch this long is pointed out
FREE, HELD, ORDERED, LEASED, DRAINING, PARKED = range(6)  # slot.state
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
    return {
        "interval_s": interval_s,
        "age_s": max(seen["time_ns"] - seen["owner_start_ns"], 0) / 1e9,
        "dataset": seen["dataset_name"],
        "read_by": seen["read_path"],
        "mode": "torch" if seen["is_static"] else "seed",
        "is_packed": seen["is_packed"],
        **_counted(seen),
        "samples_per_s": _rate(seen["samples"] - before["samples"], interval_s),
        "batches_per_s": _rate(seen["batches"] - before["batches"], interval_s),
        "nbytes_per_s": _rate(seen["nbytes"] - before["nbytes"], interval_s),
        **_position(seen),
        "num_slots": seen["num_slots"],
        "slots": _slots(seen),
        "orders": _orders(seen),
        "time": time,
        "limit": limit_of(time),
        "waits_for": _waits_for(seen, workers),
        "is_hung": _is_hung(seen),
        "workers": workers,
        "cluster": _cluster(before, seen, interval_s),
        "memory": {"ring_nbytes": ring_nbytes(seen)},
    }


def _rate(count: int, interval_s: float) -> float:
    return max(count, 0) / interval_s if interval_s > 0 else 0.0


def _counted(seen: Snapshot) -> Report:
    names = (
        "batches",
        "samples",
        "nbytes",
        "num_waits",
        "num_copied_out",
        "num_grown",
        "num_restarts",
        "num_bad_samples",
    )
    return {
        **{name: seen[name] for name in names},
        "generation": seen["generation"],
        "wait_s": seen["wait_ns"] / 1e9,
        "num_foreign": sum(worker["num_foreign"] for worker in seen["workers"]),
    }


def _position(seen: Snapshot) -> Report:
    """Where the newest delivered batch stands; None before there is one, and for a length that is not known."""
    num_steps = seen["num_steps"] or None
    if seen["batches"] == 0:
        return {"epoch": None, "step": None, "num_steps": num_steps}
    return {"epoch": _epoch(seen, seen["epoch"]), "step": _step(seen, seen["step"]), "num_steps": num_steps}


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
    return {
        **{name: states[state] for name, state in STATES.items()},
        "filling": states[ORDERED] - num_ready,
        "ready": num_ready,
    }


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
            "age_s": max(seen["time_ns"] - slot["ordered_ns"], 0) / 1e9,
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
        state, since_ns = _doing(seen, number, claims.get(number))
        busy = max(busy_ns(worker, seen["time_ns"]) - busy_ns(last, before["time_ns"]), 0)
        slot = claims[number][0] if number in claims else None
        found.append(
            {
                "pid": worker["pid"] or None,
                "state": state,
                "index": worker["index"],
                "epoch": None if slot is None else _epoch(seen, slot["epoch"]),
                "step": None if slot is None else _step(seen, slot["step"]),
                "for_s": max(seen["time_ns"] - since_ns, 0) / 1e9 if since_ns else None,
                "busy_share": min(round(100 * busy / interval_ns, 1), 100.0) if interval_ns > 0 else 0.0,
                "samples_per_s": _rate(worker["num_samples"] - last["num_samples"], interval_ns / 1e9),
                "busy_s": busy_ns(worker, seen["time_ns"]) / 1e9,
                "num_chunks": worker["num_chunks"],
                "num_samples": worker["num_samples"],
                "num_foreign": worker["num_foreign"],
                "node": worker["node"] or None,
                "num_actors": worker["num_actors"],
                "nbytes_fetched": worker["nbytes_fetched"],
                "nbytes_remote": worker["nbytes_remote"],
                "num_restarts": worker["num_restarts"],
                "is_waiting": worker["is_waiting"],
                "started_ns": worker["started_ns"],
                "since_ns": worker["since_ns"],
            }
        )
    return found


def _doing(seen: Snapshot, number: int, claim: tuple[dict[str, Any], int, int] | None) -> tuple[str, int]:
    """A worker's state, and since when it is in it (0: not known)."""
    worker, is_wanted = seen["workers"][number], number < seen["num_wanted"]
    if not worker["started_ns"] and claim is None:  # a guest has a claim, if anything
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
    found: Report = {"for_s": max(seen["time_ns"] - seen["waiting_since_ns"], 0) / 1e9, "epoch": None, "step": None}
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
