"""Judging passes whose order a sampler says: torch mode, and seed mode with a sampler.

There is no formula, so a pass is judged by its own records: each step once, in turn, without gaps; and where it is torch's own
sampler that delivers every sample once (sequential, random without replacement, DistributedSampler over all ranks) by the indices.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from shmload.audit.file import Batch
from shmload.audit.header import DISTRIBUTED, Header
from shmload.tools.audit.timeline import Delivery, EpochReport, Report, ranges


def ordered_keys(batch: Batch) -> list[Any] | np.ndarray[Any, Any] | None:
    """The keys as they were ordered: before samples were skipped or substituted."""
    if batch.keys is None or not batch.changes:
        return batch.keys
    keys = list(batch.keys)
    for row, key, substitute, _ in batch.changes:
        if substitute is None:
            keys.insert(row, key)
        elif row < len(keys):
            keys[row] = key
    return keys


def judge_pass(
    epoch: EpochReport, deliveries: list[Delivery], ended: set[int], ranks: set[int], *, is_last: bool, report: Report
) -> None:
    """Judges one pass.

    Args:
        deliveries: those that count, of all ranks.
        ended: ranks whose record says that the pass came to its end.
        ranks: ranks of which there is any file.
    """
    header = deliveries[0].part.header
    worlds = {one.part.header.world_size for one in deliveries}
    if len(worlds) > 1:
        epoch.state = "consistent"
        report.unjudged.append(
            f"pass {epoch.epoch} has ranks of worlds of {' and '.join(map(str, sorted(worlds)))}: no order says whose is what"
        )
        return
    by_rank = {rank: [one for one in deliveries if one.rank == rank] for rank in range(header.world_size)}
    num_found = report.num_found.total()
    unfinished = []
    for rank, mine in by_rank.items():
        if not mine and rank not in ranks:
            report.found("missing", f"rank {rank}, pass {epoch.epoch}: nothing is recorded; is its file missing?")
            continue
        _judge_steps(rank, epoch.epoch, mine, report)
        if rank not in ended:
            unfinished.append(rank)
    if unfinished and is_last and not ended:
        epoch.state = "unfinished"
        epoch.remaining = "what comes behind step " + ", ".join(
            f"{max((one.step for one in by_rank[rank]), default=-1)} of rank {rank}" for rank in unfinished
        )
    elif unfinished:
        for rank in unfinished:
            last = max((one.step for one in by_rank[rank]), default=-1)
            report.found(
                "missing",
                f"rank {rank}, pass {epoch.epoch}: nothing behind step {last}, where it was left or its record ends",
            )
    elif report.num_found.total() == num_found:
        _judge_coverage(epoch, header, by_rank, report)
    if report.num_found.total() > num_found:
        epoch.state = "defect"


def _judge_steps(rank: int, number: int, mine: list[Delivery], report: Report) -> None:
    count = Counter(one.step for one in mine)
    last = max(count, default=-1)
    gaps = [step for step in range(last) if step not in count]
    if gaps:
        report.found("missing", f"rank {rank}, pass {number}: steps {ranges(gaps)} are not recorded")
    for step, times in count.items():
        if times > 1:
            where = "; ".join(one.where for one in mine if one.step == step)
            report.found("doubled", f"rank {rank}, pass {number}: step {step} was delivered {times} times: {where}")


def _judge_coverage(epoch: EpochReport, header: Header, by_rank: dict[int, list[Delivery]], report: Report) -> None:
    n, drop = header.n, header.batch_size or 1 if header.uneven == "drop" else 0
    keys = {rank: [ordered_keys(one.batch) for one in mine if one.batch is not None] for rank, mine in by_rank.items()}
    is_numeric = all(is_numeric_keys(each) for mine in keys.values() for each in mine)
    if header.order not in (None, DISTRIBUTED) or n is None or not is_numeric:
        epoch.state = "consistent"
        return
    if header.order is None:
        for rank, mine in keys.items():
            _compare(f"rank {rank}, pass {epoch.epoch}", _joined(mine), n, 0, drop, report)
    else:
        world = header.world_size
        together = _joined([each for mine in keys.values() for each in mine])
        _compare(
            f"pass {epoch.epoch}, all ranks together",
            together,
            n,
            -n % world,
            drop and world * drop + n % world,
            report,
        )


def is_numeric_keys(keys: Any) -> bool:
    """Whether all keys of a batch are whole numbers."""
    return isinstance(keys, np.ndarray) or (keys is not None and all(type(key) in (int, np.int64) for key in keys))


def _joined(keys: list[Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.zeros(0, np.int64), *(np.asarray(each, np.int64) for each in keys)])


def _compare(where: str, keys: np.ndarray[Any, Any], n: int, extra_max: int, missing_max: int, report: Report) -> None:
    """Every index of [0, n) once, but for so many repeated, and missing, as the sampler's rule allows."""
    unknown = keys[(keys < 0) | (keys >= n)]
    if len(unknown):
        report.found("swapped", f"{where}: indices {ranges(sorted(set(unknown.tolist())))} are outside of [0, {n})")
    counts = np.bincount(keys[(keys >= 0) & (keys < n)], minlength=n)
    doubled, missing = np.flatnonzero(counts > 1), np.flatnonzero(counts == 0)
    if int((counts[doubled] - 1).sum()) > extra_max:
        report.found("doubled", f"{where}: samples {ranges(doubled.tolist())} came more than once")
    if len(missing) > missing_max:
        report.found("missing", f"{where}: samples {ranges(missing.tolist())} never came")
