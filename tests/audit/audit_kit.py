"""Makes records of real runs, and plants defects in records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shmload import ShmLoader
from shmload.audit.audit_file import AuditLog, Batch, Record, batch_record, event_record, header_line
from shmload.tools.audit.findings import AuditReport
from shmload.tools.audit.verify import read_folder, verify

N, BATCH, SEED = 45, 4, 7


class Samples:
    """Distinct samples with a random part, some of which raise an error."""

    def __init__(self, n: int = N, bad: frozenset[int] = frozenset()) -> None:
        self.n, self.bad = n, bad

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise ValueError(f"sample {index} is broken")
        return {"index": index, "noise": np.random.rand(2)}


def make(folder: Path, rank: int = 0, world_size: int = 1, batch_size: int = BATCH, **more: Any) -> ShmLoader[Any]:
    given = {"shuffle": True, "seed": SEED, **more}
    dataset = given.pop("dataset", Samples())
    return ShmLoader(dataset, batch_size, rank=rank, world_size=world_size, audit=folder, **given)


def run(loaders: list[ShmLoader[Any]], num_steps: int | None = None) -> None:
    """Reads one pass, or its first steps, of all ranks in parallel."""
    passes = [iter(loader) for loader in loaders]
    step = 0
    while step != num_steps:
        if not [batch for one in passes if (batch := next(one, None)) is not None]:
            return
        step += 1


def run_with_resumes(folder: Path, **more: Any) -> None:
    """Runs two ranks for epoch 0 and four steps of epoch 1, repeats two of them, and continues with one rank through epoch 2."""
    ranks = [make(folder, rank, 2, **more) for rank in range(2)]
    run(ranks)
    passes = [iter(rank) for rank in ranks]
    for step in range(4):
        if step == 2:
            state = ranks[0].state_dict()
        for one in passes:
            next(one)
    for rank in ranks:
        rank.load_state_dict(state)  # as a user does after a spike of the loss
    run(ranks, 2)
    alone = make(folder, batch_size=2 * BATCH, **more)
    alone.load_state_dict(state)
    run([alone])
    run([alone])


def verdict_of(folder: Path, **options: Any) -> AuditReport:
    return verify(read_folder(folder), **options)[0]


def kinds(report: AuditReport) -> set[str]:
    return set(report.num_found)


def written(folder: Path, log: AuditLog, records: list[Record] | None = None) -> None:
    """Writes a log back to its file."""
    content = [header_line(log.header)]
    for record in log.records if records is None else records:
        if isinstance(record, Batch):
            content.append(batch_record(record))
        else:
            content.append(event_record(record.kind, record.details))
    (folder / log.name).write_bytes(b"".join(content))


def verdict_after(folder: Path, edit: Callable[[list[AuditLog]], None]) -> AuditReport:
    """Changes the logs of a folder. Returns the verdict afterwards."""
    logs = read_folder(folder)
    edit(logs)
    for log in logs:
        written(folder, log)
    return verdict_of(folder)


def batches_of(log: AuditLog, epoch: int) -> Iterator[tuple[int, Batch]]:
    """Yields (number of the record, batch) of an epoch."""
    for number, record in enumerate(log.records):
        if isinstance(record, Batch) and record.epoch == epoch:
            yield number, record


def changed(batch: Batch, **fields: Any) -> Batch:
    return dataclasses.replace(batch, **fields)
