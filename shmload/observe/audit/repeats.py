"""Batches that should be alike, and batches that should not.

A batch delivered again (a resume, a second start) must hold the same samples, and in seed mode the same bytes. Two batches of
different samples must not hold the same bytes: the second may be memory that was not filled again (*stale*). Samples that are
truly alike look the same, so this is a suspicion: it is dropped where the same samples came with the same bytes another time,
where so many batches are alike that it must be the data, and where reading the dataset again settles it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shmload.observe.audit.file import Batch
from shmload.observe.audit.header import PIPELINE, SEED
from shmload.observe.audit.report import Report
from shmload.observe.audit.streams import item_numbers
from shmload.observe.audit.timeline import Delivery

__all__ = ["check_replays", "stale_suspects"]

ALIKE_MAX = 10  # more batches alike than this and ...
ALIKE_SHARE = 0.01  # ... than this share of all are how the data is


def same_keys(one: Batch, other: Batch) -> bool:
    """Whether they hold the same samples in the same rows."""
    if isinstance(one.keys, np.ndarray) and isinstance(other.keys, np.ndarray):
        return np.array_equal(one.keys, other.keys)
    return type(one.keys) is type(other.keys) and one.keys == other.keys


def check_replays(deliveries: Sequence[Delivery], report: Report) -> None:
    """Reports batches that differ from what the same place gave before."""
    first: dict[tuple[Any, ...], Delivery] = {}
    for one in deliveries:
        header = one.part.header
        other = first.setdefault((one.epoch, one.step, header.rank, header.world_size, header.batch_size), one)
        if other is one or one.batch is None or other.batch is None:
            continue
        if header.stream is not None and one.batch.num_rows != other.batch.num_rows:
            continue  # single items: how many are fetched together is a matter of time; `streams.py` judges them
        if not same_keys(one.batch, other.batch):
            report.found("replay", f"{one.where}: delivered again with other samples than {other.where}")
        elif (
            (header.mode == SEED or (header.mode == PIPELINE and header.batch_size is not None))
            and header.seed_samples
            and not one.batch.is_partial
            and not other.batch.is_partial
            and one.batch.digest != other.batch.digest
        ):
            report.found(
                "replay", f"{one.where}: delivered again with the same samples and other bytes than {other.where}"
            )


def stale_suspects(deliveries: Sequence[Delivery]) -> tuple[list[tuple[Delivery, Delivery]], bool]:
    """(batches with the bytes of another one before, that one), and whether there are so many that it must be the data."""
    first: dict[int, Delivery] = {}
    pairs: list[tuple[Delivery, Delivery]] = []
    num_batches = 0
    for one in deliveries:
        if one.batch is None or not one.batch.num_rows or one.batch.is_partial:
            continue
        if one.part.header.mode == PIPELINE and one.part.header.batch_size is None:
            continue  # a few small items are often alike
        num_batches += 1
        other = first.setdefault(one.batch.digest, one)
        if other is not one and other.batch is not None and not _same_samples(one, other):
            pairs.append((one, other))
    if len(pairs) > max(ALIKE_MAX, ALIKE_SHARE * num_batches):
        return pairs, True
    return [pair for pair in pairs if not _came_again_alike(pair[0], deliveries)], False


def _same_samples(one: Delivery, other: Delivery) -> bool:
    """Whether they hold the same samples, of whatever epochs: a pipeline's keys say the epoch, too."""
    assert one.batch is not None
    assert other.batch is not None
    stream = one.part.header.stream
    if stream is None or one.batch.num_rows != other.batch.num_rows:
        return same_keys(one.batch, other.batch)
    mine, its = (item_numbers(batch.keys, stream["members"]) for batch in (one.batch, other.batch))
    return np.array_equal(mine, its)


def _came_again_alike(suspect: Delivery, deliveries: Sequence[Delivery]) -> bool:
    batch = suspect.batch
    assert batch is not None
    return any(
        one is not suspect
        and one.batch is not None
        and one.batch.digest == batch.digest
        and same_keys(one.batch, batch)
        for one in deliveries
    )
