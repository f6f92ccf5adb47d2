"""Does each epoch hold each sample exactly once? The files of a folder in, a report out.

Files are read (`file.py`), divided into loaders by what their headers say, freed of what resumes rolled back (`timeline.py`) and
judged: by the schedule (`epochs.py`) or by themselves (`passes.py`); batches that should be alike, or should not, in
`verify.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shmload.audit.file import SUFFIX, AuditLog, Batch, read_log
from shmload.audit.header import DISTRIBUTED, ITERABLE, PIPELINE, SEED, TORCH, Header, read_header
from shmload.tools.audit.epochs import judge_epoch
from shmload.tools.audit.passes import judge_pass
from shmload.tools.audit.streams import Judged, item_numbers, judge_items, judge_stream
from shmload.tools.audit.timeline import Delivery, EpochReport, LoaderReport, Part, Report, Timeline


@dataclass
class Loader:
    """What is left to look at when the records are judged: for reading samples again."""

    header: Header
    timeline: Timeline
    suspects: list[tuple[Delivery, Delivery]]
    is_alike: bool  # so many suspects that it must be the data


def audit_files(folder: Path) -> list[Path]:
    """Every audit file in a folder.

    Raises:
        OSError: the folder cannot be read.
    """
    return [path for path in sorted(folder.iterdir()) if path.name.endswith(SUFFIX)]


def read_folder(folder: Path) -> list[AuditLog]:
    """What the audit files in a folder hold.

    Raises:
        OSError: the folder or a file cannot be read.
    """
    return [read_log(path) for path in audit_files(folder)]


def verify(logs: Iterable[AuditLog], *, allow_restarts: bool = False) -> tuple[Report, list[Loader]]:
    """Judges the records of one folder.

    Args:
        allow_restarts: a start that loaded no state throws away what was delivered before.
    Returns:
        the report, without what suspicion of stale batches says: `tell_suspects` adds that, `reread` settles it first.
    """
    report = Report()
    loaders = []
    for parts in _by_loader(logs, report):
        timeline = Timeline(parts, allow_restarts)
        told = _judge(timeline, report)
        report.loaders.append(told)
        batches = timeline.batches
        check_replays(batches, report)
        suspects, is_alike = stale_suspects(batches)
        loaders.append(Loader(parts[0].header, timeline, suspects, is_alike))
        num_partial = sum(one.batch is not None and one.batch.is_partial for one in batches)
        if num_partial:
            report.notes.append(
                f"{told.title}: {num_partial} batches hold objects that a digest leaves out; they are not compared by their bytes"
            )
    if len(loaders) > 1:
        report.notes.append(
            f"the folder holds {len(loaders)} loaders, which differ in {_differences(loaders)}: each is judged by itself"
        )
    if not loaders:
        report.notes.append("the folder holds no records")
    return report, loaders


def tell_suspects(loaders: Sequence[Loader], report: Report) -> None:
    """Adds what is still suspected of being stale."""
    for loader in loaders:
        if loader.is_alike and loader.suspects:
            report.unjudged.append(
                f"{len(loader.suspects)} batches have the bytes of others although their samples differ: the data seem to hold "
                "many samples that are alike, so stale batches cannot be told. Give --dataset"
            )
            continue
        for one, other in loader.suspects:
            report.found(
                "stale",
                f"{one.where}: the bytes are those of {other.where}, whose samples are others; if these samples are truly alike, "
                "--dataset will tell",
            )


def _by_loader(logs: Iterable[AuditLog], report: Report) -> list[list[Part]]:
    found: dict[str, list[Part]] = {}
    for log in logs:
        for text in log.damage:
            report.found("damaged", f"{log.name}, {text}")
        if log.is_torn:
            report.notes.append(f"{log.name}: the last record is cut off, as a killed process leaves it")
        if not log.header:
            continue
        try:
            header = read_header(log.header)
        except ValueError as error:
            report.found("damaged", f"{log.name}, offset 0: {error}")
            continue
        if any(isinstance(record, Batch) for record in log.records):
            found.setdefault(json.dumps(header.identity), []).append(Part(log, header))
        elif not (log.damage or log.is_torn):
            report.found("missing", f"{log.name}: there is no batch in it, and a file is made with its first")
    return list(found.values())


def _judge(timeline: Timeline, report: Report) -> LoaderReport:
    newest = timeline.parts[-1].header
    told = LoaderReport(_title(newest), [], newest.world_size, len(timeline.parts))
    for one, before in timeline.out_of_order:
        how = "before its epoch began" if before is None else f"behind step {before}"
        report.found("swapped", f"{one.where}: delivered {how}")
    report.notes += timeline.lost
    for part in timeline.restarts:
        report.notes.append(
            f"{part.header.place} began anew, without a state, in {part.log.name}: what it was delivered counts beside what came "
            "before. If that was thrown away, say --allow-restarts"
        )
    counted: dict[int, list[Delivery]] = {}
    superseded: Counter[int] = Counter()
    for one in timeline.batches:
        if one.is_superseded:
            superseded[one.epoch] += 1
        else:
            counted.setdefault(one.epoch, []).append(one)
    ended: dict[int, set[int]] = {}
    for end in timeline.ends:
        if not end.is_superseded:
            ended.setdefault(end.epoch, set()).add(end.rank)
    ranks = {(part.header.rank, part.header.world_size) for part in timeline.parts}
    known = counted.keys() | ended.keys()
    last = max(known, default=-1)
    streamed: list[Judged] = []
    for number in range(min(known, default=0), last + 1):
        epoch = EpochReport(number, num_superseded=superseded[number])
        told.epochs.append(epoch)
        if number not in counted:
            epoch.state = "defect"
            report.found("missing", f"epoch {number}: no batch is recorded")
            continue
        _count(epoch, counted[number], report)
        is_ended = ended.get(number, set())
        if newest.mode == SEED:
            judge_epoch(epoch, counted[number], bool(is_ended), ranks, is_last=number == last, report=report)
        elif newest.mode == PIPELINE:
            streamed.append(judge_stream(epoch, counted[number], timeline.parts, is_last=number == last, report=report))
        else:
            alone = {rank for rank, _ in ranks}
            judge_pass(epoch, counted[number], is_ended, alone, is_last=number == last, report=report)
    judge_items(streamed, told.epochs, report)
    _say_what_is_unjudged(newest, told, report)
    return told


def _count(epoch: EpochReport, deliveries: list[Delivery], report: Report) -> None:
    for one in deliveries:
        batch = one.batch
        assert batch is not None
        epoch.num_batches += 1
        epoch.num_samples += batch.valid
        epoch.num_padding += batch.num_rows - batch.valid
        for row, key, substitute, _ in batch.changes:
            if substitute is None:
                epoch.num_skipped += 1
                text = f"sample {key} of row {row} was skipped"
            else:
                epoch.num_substituted += 1
                text = f"sample {substitute} came in place of {key}, row {row}"
            report.accounted.append(f"{one.where}: {text}")


def _say_what_is_unjudged(header: Header, told: LoaderReport, report: Report) -> None:
    if not any(epoch.state == "consistent" for epoch in told.epochs):
        if header.mode == TORCH and header.order is None and header.world_size > 1:
            report.notes.append(
                f"{told.title}: each of the {header.world_size} ranks is delivered the whole dataset, as torch does without a "
                "DistributedSampler"
            )
        return
    if header.order == ITERABLE:
        what = "an iterable dataset has no indices: only steps and replays were checked"
    elif header.mode == SEED:
        what = (
            f"the order {header.order} decides which samples come: positions and replays were checked, indices were not"
        )
    elif header.order in (None, DISTRIBUTED):
        what = "keys are no indices, or the dataset has no length: only steps and replays were checked"
    else:
        what = f"{header.order} decides which samples come: only steps and replays were checked"
    report.unjudged.append(f"{told.title}: {what}")


def _title(header: Header) -> str:
    mode = f"seed {header.seed}" if header.seed is not None else "torch mode"
    return f"{header.dataset}, {header.n} samples, {mode}"


def _differences(loaders: Sequence[Loader]) -> str:
    identities = [loader.header.identity for loader in loaders]
    names = dict.fromkeys(name for identity in identities for name in identity)
    differing = [
        f"{name} ({', '.join(dict.fromkeys(str(identity.get(name)) for identity in identities))})"
        for name in names
        if len({str(identity.get(name)) for identity in identities}) > 1
    ]
    return ", ".join(differing)


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
