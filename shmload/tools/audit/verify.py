"""Verify that each epoch contained each sample exactly once: from the audit files of a folder to a report.

Batches that should be equal are compared by their digests.

If the dataset is available, batches are read again by the loader's own inline reader, with the seed, epoch and indices of the
record. So random augmentations repeat, and a difference means that memory or rows were mixed up, or that the data has changed.
Torch mode's augmentations cannot be repeated batch by batch, nor can those with `seed_samples=False`; a difference there means
nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shmload._core.trainer import Order
from shmload.audit.audit_file import DISTRIBUTED, ITERABLE, SUFFIX, AuditLog, Batch, Header, Mode, read_header, read_log
from shmload.audit.batch_digest import digest_of
from shmload.loader import ShmLoader, inline_reader_of
from shmload.modes.inline_reader import InlineReader
from shmload.tools.audit.deliveries import AuditPart, Delivery, End
from shmload.tools.audit.findings import AuditedLoader, AuditReport, EpochReport
from shmload.tools.audit.items import judge_items
from shmload.tools.audit.passes import judge_pass
from shmload.tools.audit.positions import JudgedEpoch, judge_positions
from shmload.tools.audit.timeline import AuditTimeline
from shmload.tools.counted import counted
from shmload.tools.object_reference import one_line


def read_folder(folder: Path, *, over: Callable[[Sequence[Path]], Iterable[Path]] = iter) -> list[AuditLog]:
    """Return the contents of the audit files in a folder.

    Args:
        folder: the folder.
        over: iterates over the files, for example to show progress.
    Raises:
        OSError: the folder or a file cannot be read.
    """
    return [read_log(path) for path in over([path for path in sorted(folder.iterdir()) if path.name.endswith(SUFFIX)])]


def verify(logs: Iterable[AuditLog], *, allow_restarts: bool = False) -> tuple[AuditReport, list[AuditTimeline]]:
    """Judge the records of one folder.

    Args:
        logs: the audit files.
        allow_restarts: accept starts that loaded no state. Each discards the batches that were delivered before it.
    Returns:
        the report, and the deliveries of each loader, which `reread` takes.
    """
    report = AuditReport()
    loaders = []
    for parts in _by_loader(logs, report):
        timeline = AuditTimeline(parts)
        summary = _judge(timeline, report, allow_restarts=allow_restarts)
        report.loaders.append(summary)
        check_replays(timeline.batches, report)
        loaders.append(timeline)
        num_partial = sum(one.batch.is_partial for one in timeline.batches)
        if num_partial:
            report.notes.append(
                f"{summary.title}: {counted(num_partial, 'batch')} with objects that a digest leaves out; not compared by "
                "their bytes"
            )
    if len(loaders) > 1:
        report.notes.append(f"the folder holds {len(loaders)} loaders with different arguments: each is judged by itself")
    if not loaders:
        report.notes.append("the folder holds no records, which ShmLoader(audit=FOLDER) writes: see docs/resume.md")
    return report, loaders


def _by_loader(logs: Iterable[AuditLog], report: AuditReport) -> list[list[AuditPart]]:
    found: dict[str, list[AuditPart]] = {}
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
        if any(isinstance(record, Batch) or record.kind == "end" for record in log.records):
            found.setdefault(json.dumps(header.identity), []).append(AuditPart(log, header))
        elif not (log.damage or log.is_torn):
            report.found("missing", f"{log.name}: contains no batch and no end of a pass, although a file is created with one")
    return list(found.values())


@dataclass
class _RecordedEpoch:
    """The records of an epoch, without those that a resume rolled back, which are only counted."""

    deliveries: list[Delivery] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    num_superseded: int = 0


def _judge(timeline: AuditTimeline, report: AuditReport, *, allow_restarts: bool) -> AuditedLoader:
    newest = timeline.parts[-1].header
    summary = AuditedLoader(_title(newest), [], newest.world_size, len(timeline.parts))
    for one, before in timeline.out_of_order:
        how = "before its epoch began" if before is None else f"after step {before}"
        report.found("swapped", f"{one.where}: delivered {how}")
    report.notes += timeline.lost
    restarts = [] if allow_restarts else timeline.restarts
    for part, num_batches, num_samples in restarts:
        report.found(
            "doubled",
            f"rank {part.header.rank} of {part.header.world_size} started from the beginning without a state, in "
            f"{part.log.name}, after {counted(num_batches, 'batch')} ({counted(num_samples, 'sample')}) had been delivered. "
            "Load the state of the earlier start (load_state_dict); or, if the model of the earlier start was discarded, give "
            "--allow-restarts",
        )
    recorded = _by_epoch(timeline)
    known = [number for number, one in recorded.items() if one.deliveries or one.ends]
    streamed: list[JudgedEpoch] = []
    for number in range(min(known, default=0), max(known, default=-1) + 1):
        records = recorded.get(number, _RecordedEpoch())
        epoch = EpochReport(number, num_superseded=records.num_superseded, num_expected=_num_expected(newest))
        summary.epochs.append(epoch)
        if not records.deliveries:
            _judge_empty(epoch, records, summary.title, report)
            continue
        num_found = report.num_found.total()
        judged = _judge_epoch(epoch, records, timeline, report, is_last=number == max(known))
        if judged is not None and newest.stream is not None:
            streamed.append(judged)
        if report.num_found.total() > num_found or (restarts and records.num_superseded):
            epoch.state = "defect"
        elif epoch.state == "proven" and newest.uneven == "drop" and epoch.num_expected is not None:
            epoch.num_left_out = max(epoch.num_expected - epoch.num_samples - epoch.num_skipped, 0)
    if newest.stream is not None:
        num_found = report.num_found.total()
        judge_items(streamed, newest.stream["members"], report)
        if report.num_found.total() > num_found:
            for epoch in summary.epochs:
                epoch.state = "defect"
    _note_unjudged(newest, summary, report)
    return summary


def _by_epoch(timeline: AuditTimeline) -> dict[int, _RecordedEpoch]:
    found: dict[int, _RecordedEpoch] = {}
    for one in timeline.batches:
        epoch = found.setdefault(one.epoch, _RecordedEpoch())
        if one.is_superseded:
            epoch.num_superseded += 1
        else:
            epoch.deliveries.append(one)
    for end in timeline.ends:
        if not end.is_superseded:
            found.setdefault(end.epoch, _RecordedEpoch()).ends.append(end)
    return found


def _judge_empty(epoch: EpochReport, records: _RecordedEpoch, title: str, report: AuditReport) -> None:
    """Judge an epoch without deliveries."""
    if max((end.step for end in records.ends), default=1):  # else it ended where it began
        epoch.state = "defect"
        report.found("missing", f"epoch {epoch.epoch}: no batch is recorded")
    elif epoch.num_expected is None:
        epoch.state = "consistent"
    elif epoch.num_expected:
        epoch.state, epoch.num_left_out = "consistent", epoch.num_expected
        report.unjudged.append(
            f'{title}, epoch {epoch.epoch}: nothing was delivered, because drop_last or uneven="drop" leaves out all '
            f"{counted(epoch.num_expected, 'sample')}: use smaller batches"
        )


def _judge_epoch(
    epoch: EpochReport, records: _RecordedEpoch, timeline: AuditTimeline, report: AuditReport, *, is_last: bool
) -> JudgedEpoch | None:
    """Judge an epoch with deliveries. Return its positions if they are what was judged."""
    _count(epoch, records.deliveries, report)
    mode, ended = timeline.parts[-1].header.mode, {end.rank for end in records.ends}
    if mode in (Mode.SEED, Mode.PIPELINE):
        has_ended = bool(ended) and mode == Mode.SEED  # ranks of a pipeline end one by one
        return judge_positions(epoch, records.deliveries, timeline.parts, is_last=is_last, has_ended=has_ended, report=report)
    judge_pass(epoch, records.deliveries, ended, {part.header.rank for part in timeline.parts}, is_last=is_last, report=report)
    return None


def _num_expected(header: Header) -> int | None:
    if header.n is None or (header.stream or {}).get("is_endless"):
        return None
    return header.n * (header.world_size if header.each_rank_reads_all else 1)


def _count(epoch: EpochReport, deliveries: list[Delivery], report: AuditReport) -> None:
    for one in deliveries:
        batch = one.batch
        epoch.num_batches += 1
        epoch.num_samples += batch.valid
        epoch.num_padding += 0 if batch.keys is None else batch.num_rows - batch.valid  # an iterable dataset is not padded
        for row, key, substitute, _ in batch.changes:
            if substitute is None:
                epoch.num_skipped += 1
                text = f"sample {key} of row {row} was skipped"
            else:
                epoch.num_substituted += 1
                text = f"sample {substitute} came in place of {key}, row {row}"
            report.accounted.append(f"{one.where}: {text}")


def _note_unjudged(header: Header, summary: AuditedLoader, report: AuditReport) -> None:
    """Add what could not be judged about a loader to the report, and why."""
    if not any(epoch.state == "consistent" and epoch.num_batches for epoch in summary.epochs):
        if header.each_rank_reads_all and header.world_size > 1:
            report.notes.append(
                f"{summary.title}: each of the {header.world_size} ranks is delivered the whole dataset, as torch does without a "
                "DistributedSampler"
            )
        return
    why = f"{header.order} decides which samples come"
    if header.order == ITERABLE:
        why = "an iterable dataset has no indices"
    elif header.order in (None, DISTRIBUTED):
        why = "keys are not indices, or the dataset has no length"
    what = "positions" if header.mode == Mode.SEED else "steps"
    report.unjudged.append(f"{summary.title}: {why}: only {what} and replays were checked")


def _title(header: Header) -> str:
    mode = f"seed {header.seed}" if header.seed is not None else "torch mode"
    of = f"{header.n} samples" if header.n is None else counted(header.n, "sample")
    return f"{header.dataset}, {of}, {mode}"


# ------------------------------------------------------------ batches that should be equal


def same_keys(one: Batch, other: Batch) -> bool:
    """Return whether two batches have the same samples in the same rows."""
    if isinstance(one.keys, np.ndarray) and isinstance(other.keys, np.ndarray):
        return np.array_equal(one.keys, other.keys)
    return type(one.keys) is type(other.keys) and one.keys == other.keys


def check_replays(deliveries: Sequence[Delivery], report: AuditReport) -> None:
    """Report batches that differ from an earlier delivery of the same step."""
    first: dict[tuple[Any, ...], Delivery] = {}
    for one in deliveries:
        header, batch = one.part.header, one.batch
        life = one.life if header.mode == Mode.TORCH else 0  # after a restart, a sampler draws another order
        other = first.setdefault((one.epoch, one.step, header.rank, header.world_size, header.batch_size, life), one)
        if header.stream is not None and batch.num_rows != other.batch.num_rows:
            continue  # single items: how many are fetched together depends on timing; `judge_items` judges them
        is_keyed = header.mode == Mode.SEED or (header.mode == Mode.PIPELINE and header.batch_size is not None)
        repeats = is_keyed and header.seed_samples
        if not same_keys(batch, other.batch):
            report.found("replay", f"{one.where}: delivered again with other samples than {other.where}")
        elif batch.digest != other.batch.digest and repeats and not (batch.is_partial or other.batch.is_partial):
            what = "delivered again with the same samples and other bytes than"
            report.found("replay", f"{one.where}: {what} {other.where}")


# ------------------------------------------------------------ reading again


def reread(
    loaders: Sequence[AuditTimeline],
    made: Any,
    num_samples: int,
    report: AuditReport,
    *,
    over: Callable[[Sequence[Delivery]], Iterable[Delivery]] = iter,
) -> None:
    """Read random batches again, and report those whose content differs.

    Args:
        loaders: the deliveries of each loader.
        made: the dataset; or a ShmLoader that reads it, if a collate_fn or other arguments matter; or the pipeline.
        num_samples: number of batches to read of each loader.
        report: receives the findings.
        over: iterates over the batches of one loader, for example to show progress.
    """
    skipped: list[str] = []
    for timeline in loaders:
        header, dataset = timeline.parts[0].header, made.dataset if isinstance(made, ShmLoader) else made
        if difference := _difference(made, dataset, header, is_only=len(loaders) == 1):
            skipped.append(f"{_title(header)}: {difference}: not read again")
            continue
        try:
            reader = _reader(made, header)
        except (TypeError, ValueError) as error:
            skipped.append(f"{_title(header)}: not read again: {error}")
            continue
        whole = [one for one in timeline.batches if one.batch.num_rows and not one.batch.is_partial]
        chosen = random.Random(0).sample(whole, min(num_samples, len(whole)))
        differing, failed = [], []
        for one in over(chosen):
            try:
                if not _is_same(one, reader, report):
                    differing.append(one)
            except Exception as error:  # whatever a dataset raises; what the records say is judged all the same
                failed.append(f"{one.where}: {one_line(error)}")
        if failed:
            report.unjudged.append(f"{len(failed)} of {len(chosen)} batches could not be read again, the first of {failed[0]}")
        is_repeatable = header.mode != Mode.TORCH and header.seed_samples
        if differing and not is_repeatable:
            which = "torch mode's augmentations" if header.mode == Mode.TORCH else "augmentations with seed_samples=False"
            report.unjudged.append(
                f"{len(differing)} of {len(chosen)} batches read again differ: {which} cannot be repeated, so this means nothing "
                "if the dataset has any"
            )
            continue
        for one in differing:
            report.found("content", f"{one.where}: read again, its samples give bytes other than those delivered")
    (report.notes if len(skipped) < len(loaders) else report.unjudged).extend(skipped)


def _difference(made: Any, dataset: Any, header: Header, *, is_only: bool) -> str:
    """Return what shows that a loader's record is not of this dataset or loader; empty if nothing does.

    The type of the dataset tells several loaders of a folder apart. It says nothing about the folder's only loader, because a
    program may read the same data with a class of another name.
    """
    if (header.mode == Mode.PIPELINE) != _is_pipeline(made):
        return f"--dataset is {'a' if _is_pipeline(made) else 'no'} pipeline"
    if _is_pipeline(made):
        return ""
    length = len(dataset) if hasattr(dataset, "__len__") else None
    kind = type(dataset).__qualname__
    if kind != header.dataset and not is_only:
        return f"--dataset is of type {kind}"
    if length != header.n and header.order is None:
        return f"--dataset has {length} samples"
    if isinstance(made, ShmLoader) and made.seed != header.seed:
        return f"--dataset gave a loader with seed={made.seed!r}"
    return ""


def _is_pipeline(made: Any) -> bool:
    """Return whether an object is a pipeline, or a source of one."""
    return hasattr(made, "stages")


def _reader(made: Any, header: Header) -> InlineReader:
    if _is_pipeline(made):
        from shmload.pipeline.keyed_engine import reader_of_stages  # not imported unless needed

        reader, order = reader_of_stages(made.stages)
        if order.identity != header.order:
            raise ValueError(f"--dataset is {order.identity}, and the record is of {header.order}")
        if (order.batch_size is None) != (header.batch_size is None):
            raise ValueError(f"--dataset has {'no' if order.batch_size is None else 'a'} Collate, unlike the recorded pipeline")
        return reader
    if not isinstance(made, ShmLoader):
        seed_samples = None if header.seed is None else header.seed_samples
        made = ShmLoader(made, header.batch_size, seed=header.seed, seed_samples=seed_samples)
    return inline_reader_of(made)


def _is_same(one: Delivery, reader: InlineReader, report: AuditReport) -> bool:
    keys = one.batch.keys if isinstance(one.batch.keys, np.ndarray) else list(one.batch.keys or ())
    digest = digest_of(reader.read(Order(one.epoch, one.step, keys)))[0]
    report.num_reread += 1
    return digest == one.batch.digest
