"""Reading recorded samples again: proves that a batch held the content of its samples, each in its row.

The samples are read by the loader's own inline reader, with the seed, epoch and indices of the record, so that random augmentations
repeat. What differs was other memory, other rows, or is other data by now. Torch mode's augmentations cannot be repeated batch by
batch: a difference there says nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from shmload._core.trainer import Order
from shmload.audit.digest import digest_of
from shmload.audit.header import TORCH, Header
from shmload.loader import ShmLoader
from shmload.modes.inline import InlineReader
from shmload.tools.audit.timeline import Delivery, Report
from shmload.tools.audit.verify import Loader


def reread(
    loaders: Sequence[Loader],
    made: Any,
    num_samples: int,
    report: Report,
    *,
    over: Callable[[Sequence[Delivery]], Iterable[Delivery]] = iter,
) -> None:
    """Reads batches again, those that are suspected first, and reports whose content differs.

    Args:
        made: the dataset, or a ShmLoader that reads it, where a collate_fn or other arguments matter.
        num_samples: batches to read of each loader besides those suspected.
        over: goes over the batches of one loader: shows how far it is, say.
    """
    for loader in loaders:
        length = _length(made)
        if length != loader.header.n and loader.header.order is None:
            report.notes.append(f"--dataset has {length} samples, the record is of {loader.header.n}: not read again")
            continue
        reader = _reader(made, loader.header)
        suspected = [one for one, _ in loader.suspects] if not loader.is_alike else []
        others = [one for one in loader.timeline.batches if _can_be_read(one) and one not in suspected]
        chosen = random.Random(0).sample(others, min(num_samples, len(others)))
        differing = {id(one) for one in over((*suspected, *chosen)) if not _is_same(one, reader, report)}
        if loader.header.mode == TORCH and differing:
            report.unjudged.append(
                f"{len(differing)} of {len(suspected) + len(chosen)} batches read again differ: torch mode's augmentations cannot "
                "be repeated, so this says nothing if there are any"
            )
            continue
        for one in (*suspected, *chosen):
            if id(one) in differing:
                report.found("content", f"{one.where}: read again, its samples give other bytes than were delivered")
        loader.suspects = [pair for pair in loader.suspects if loader.is_alike or id(pair[0]) in differing]
        if loader.is_alike and not differing:
            loader.suspects = []


def _length(made: Any) -> int | None:
    dataset = made.dataset if isinstance(made, ShmLoader) else made
    return len(dataset) if hasattr(dataset, "__len__") else None


def _reader(made: Any, header: Header) -> InlineReader:
    if not isinstance(made, ShmLoader):
        seed_samples = None if header.seed is None else header.seed_samples
        made = ShmLoader(made, header.batch_size, seed=header.seed, seed_samples=seed_samples)
    elif made.seed != header.seed:
        raise ValueError(f"--dataset gave a loader with seed={made.seed!r}, the record is of seed={header.seed!r}")
    return InlineReader(made._config().job(), made._builder.bad_samples)


def _can_be_read(one: Delivery) -> bool:
    batch = one.batch
    return batch is not None and batch.num_rows > 0 and not batch.is_partial


def _is_same(one: Delivery, reader: InlineReader, report: Report) -> bool:
    batch = one.batch
    assert batch is not None
    report.num_reread += 1
    keys = batch.keys if isinstance(batch.keys, np.ndarray) else list(batch.keys or ())
    return digest_of(reader.read(Order(one.epoch, one.step, keys)))[0] == batch.digest
