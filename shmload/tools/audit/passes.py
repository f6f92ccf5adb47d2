"""Judge passes whose order comes from a sampler (torch mode, and seed mode with a sampler).

No formula gives the order, so a pass is judged by its own records: each step once, in order, without gaps. For torch's own samplers
that deliver every sample once (sequential, random without replacement, DistributedSampler over all ranks), the indices are judged,
too.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from shmload.audit.audit_file import DISTRIBUTED, Header
from shmload.tools.audit.batch_keys import is_numeric_keys, ordered_keys
from shmload.tools.audit.deliveries import Delivery
from shmload.tools.audit.findings import AuditReport, EpochReport, ranges


def judge_pass(
    epoch: EpochReport, deliveries: list[Delivery], ended: set[int], ranks: set[int], *, is_last: bool, report: AuditReport
) -> None:
    """Judge one pass.

    Args:
        epoch: the report to fill.
        deliveries: those of all ranks that no resume has rolled back.
        ended: ranks that have recorded the end of the pass.
        ranks: ranks with at least one file.
        is_last: whether no record belongs to a later pass.
        report: receives the findings.
    """
    header = deliveries[0].part.header
    worlds = {one.part.header.world_size for one in deliveries}
    if len(worlds) > 1:
        epoch.state = "consistent"
        which = f"pass {epoch.epoch} was read with world sizes {' and '.join(map(str, sorted(worlds)))}"
        report.unjudged.append(f"{which}: no schedule assigns its samples to ranks")
        return
    num_found = report.num_found.total()
    by_rank = {rank: [one for one in deliveries if one.rank == rank] for rank in range(header.world_size)}
    unfinished = {}  # rank -> its last step
    for rank, mine in by_rank.items():
        place = f"rank {rank}, pass {epoch.epoch}"
        if not mine and rank not in ranks:
            report.found("missing", f"{place}: nothing is recorded; is its file missing?")
            continue
        steps = {one.step for one in mine}
        last = max(steps, default=-1)
        if gaps := [step for step in range(last) if step not in steps]:
            report.found("missing", f"{place}: steps {ranges(gaps)} are not recorded")
        for step, num in Counter(one.step for one in mine).items():
            if num > 1:
                where = "; ".join(one.where for one in mine if one.step == step)
                report.found("doubled", f"{place}: step {step} was delivered {num} times: {where}")
        if rank not in ended:
            unfinished[rank] = last
    if header.order is None and epoch.num_samples == epoch.num_expected:
        unfinished = {}  # the trainer left the loop after the last batch, before the end was recorded
    if unfinished and is_last and not ended:
        epoch.state = "unfinished"
        lasts = ", ".join(f"{last} of rank {rank}" for rank, last in unfinished.items())
        epoch.remaining = f"the steps after {lasts}"
    elif unfinished:
        for rank, last in unfinished.items():
            what = f"nothing after step {last}, where it was left or its record ends"
            report.found("missing", f"rank {rank}, pass {epoch.epoch}: {what}")
    if report.num_found.total() == num_found:
        _judge_coverage(epoch, header, by_rank, report, is_whole=not unfinished)


def _judge_coverage(
    epoch: EpochReport, header: Header, by_rank: dict[int, list[Delivery]], report: AuditReport, *, is_whole: bool
) -> None:
    n, world = header.n, header.world_size
    drops, batch_size = header.uneven == "drop", header.batch_size or 1
    keys = {rank: [ordered_keys(one.batch) for one in mine] for rank, mine in by_rank.items()}
    is_numeric = all(is_numeric_keys(each) for mine in keys.values() for each in mine)
    if header.order not in (None, DISTRIBUTED) or n is None or not is_numeric:
        epoch.state = "consistent"
    elif header.order is None:
        for rank, mine in keys.items():
            _compare(f"rank {rank}, pass {epoch.epoch}", mine, n, 0, n % batch_size * drops if is_whole else n, report)
    else:
        together = [each for mine in keys.values() for each in mine]
        # the sampler pads the ranks' parts to one length, or cuts them; the loader drops the last batch of each
        padded, cut = world * (-(-n // world) % batch_size), world * (n // world % batch_size) + n % world
        left_out = max(padded, cut) * drops if is_whole else n
        _compare(f"pass {epoch.epoch}, all ranks together", together, n, -n % world, left_out, report)


def _compare(where: str, batches: list[Any], n: int, extra_max: int, missing_max: int, report: AuditReport) -> None:
    """Check that every index of [0, n) came once, apart from the repetitions and gaps that the sampler's rule allows."""
    keys = np.concatenate([np.zeros(0, np.int64), *(np.asarray(each, np.int64) for each in batches)])
    unknown = keys[(keys < 0) | (keys >= n)]
    if len(unknown):
        report.found("swapped", f"{where}: indices {ranges(sorted(set(unknown.tolist())))} are outside of [0, {n})")
    counts = np.bincount(keys[(keys >= 0) & (keys < n)], minlength=n)
    doubled, missing = np.flatnonzero(counts > 1), np.flatnonzero(counts == 0)
    if int((counts[doubled] - 1).sum()) > extra_max:
        report.found("doubled", f"{where}: samples {ranges(doubled.tolist())} came more than once")
    if len(missing) > missing_max:
        report.found("missing", f"{where}: samples {ranges(missing.tolist())} never came")
