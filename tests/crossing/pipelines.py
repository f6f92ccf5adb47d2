"""Pipelines of random stages against plain lists: what `shmload.pipeline` gives, ranks, resumes and errors included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.crossing.cases import Case

if TYPE_CHECKING:
    from tests.crossing.habits import Trial


@dataclass(frozen=True)
class Row:
    """Makes a sample of a number."""

    case: Case

    def __call__(self, x: int) -> dict[str, Any]:
        return {"text": f"item {x}", "x": x, "row": np.full(3, x, np.float32)}


@dataclass(frozen=True)
class Ends:
    """A Map of batches that fails from the third one on."""

    kind: str
    after: int

    def __call__(self, batch: Any) -> Any:
        if int(batch["x"].min()) >= self.after:
            raise StopIteration("from a Map") if self.kind == "stops" else ValueError("from a Map")
        return batch


def stages_of(case: Case, rank: int, ranks: int, workers: int, batch_size: int) -> list[Any]:
    """Of a case's pipeline, for one rank."""
    from shmload.pipeline import Collate, DistributedBatchedMap, Map, Partition, Permutation, Range

    source = (Permutation if case.shuffle else Range)(case.n, repeating=False, seed=case.seed)
    stages: list[Any] = [source]
    if ranks > 1:
        stages.append(Partition(rank, ranks, uneven=case.uneven))
    stages.append(DistributedBatchedMap(Row(case), workers) if workers else Map(Row(case)))
    stages.append(Collate(batch_size, not case.drop_last))
    if case.extra in ("stops", "raises"):
        stages.append(Map(Ends(case.extra, _fails_from(case))))
    return stages


def _fails_from(case: Case) -> int:
    return case.n // 2


def _numbers(case: Case, epoch: int) -> list[int]:
    """The epoch's row: of a Permutation by one rank alone, which must have each number once."""
    if not case.shuffle:
        return list(range(case.n))
    from shmload.pipeline import Conveyer, Map, Permutation

    with Conveyer([Permutation(case.n, repeating=False, seed=case.seed), Map(int)]) as alone:
        for _ in range(epoch + 1):
            row = [int(x) for x in alone]
    if sorted(row) != list(range(case.n)):
        raise AssertionError(f"a Permutation of {case.n} gives {row}")
    return row


def expected_steps(case: Case, epoch: int, ranks: int, batch_size: int) -> Iterator[list[list[int]]]:
    """What each rank is given at each step."""
    row, stride = _numbers(case, epoch), ranks * batch_size
    uneven = case.uneven if ranks > 1 else "pad"
    for first in range(0, len(row), stride):
        part, each = row[first : first + stride], batch_size
        if len(part) < stride:
            if case.drop_last or uneven == "drop":
                return
            if uneven == "exact":
                yield [mine.tolist() for mine in np.array_split(np.array(part), ranks)]
                return
            each = -(-len(part) // ranks)
            part = part + [row[at % len(row)] for at in range(each * ranks - len(part))]
        yield [part[rank * each : (rank + 1) * each] for rank in range(ranks)]


def run_pipeline(trial: Trial) -> None:
    """Runs the case; raises what is wrong."""
    from shmload.pipeline import Conveyer
    from tests.crossing.habits import Refused, Wrong

    case = trial.case
    size = case.batch_size or 1

    def made(ranks: int, workers: int, batch_size: int) -> list[Any]:
        try:
            return [Conveyer(stages_of(case, rank, ranks, workers, batch_size)) for rank in range(ranks)]
        except (ValueError, TypeError) as error:
            raise Refused(f"{type(error).__name__}: {error}") from error

    def read(pipeline: Any, wanted: list[int], where: str) -> bool:
        """One batch; False if the pipeline failed as it had to."""
        trial.harm()
        fails = case.extra in ("stops", "raises") and min(wanted) >= _fails_from(case)
        try:
            batch = trial.watch.timed(lambda: next(pipeline))
        except StopIteration as error:
            raise Wrong(f"pipeline {where}: the end, silently, and not {'an error' if fails else wanted}") from error
        except Exception:
            if fails:
                return False
            raise
        if fails:
            raise Wrong(f"pipeline {where}: a batch where a Map fails")
        got = batch["x"].tolist()
        if got != wanted or batch["text"] != [f"item {x}" for x in wanted] or batch["row"][:, 1].tolist() != wanted:
            raise Wrong(f"pipeline {where}: {got}, {batch['text']} and not {wanted}")
        trial.num_batches += 1
        return True

    def ended(pipeline: Any, where: str) -> None:
        if next(pipeline, None) is not None:
            raise Wrong(f"pipeline {where}: a batch too many")

    pipelines = made(case.ranks, int(case.workers), size)
    steps = list(expected_steps(case, 0, case.ranks, size))
    strikes = len(steps) if case.habit == "pass" else max(min(int(len(steps) * case.at), len(steps) - 1), 0)
    iterators = [iter(pipeline) for pipeline in pipelines]
    for number, step in enumerate(steps[:strikes]):
        for rank, wanted in enumerate(step):
            if wanted:
                read(iterators[rank], wanted, f"step {number}, rank {rank}")
    if case.habit == "pass":
        for rank, iterator in enumerate(iterators):
            ended(iterator, f"rank {rank}")
    else:
        states = [json.dumps(pipeline.state()) for pipeline in pipelines]
        ranks = case.then_ranks if case.global_batch % case.then_ranks == 0 else case.ranks
        again = made(ranks, case.then_workers, case.global_batch // ranks)
        for pipeline in again:
            pipeline.load_state(json.loads(states[case.seed % len(states)]))
        rest = list(expected_steps(case, 0, ranks, case.global_batch // ranks))[strikes:]
        iterators = [iter(pipeline) for pipeline in again] if rest else []
        for number, step in enumerate(rest):
            for rank, wanted in enumerate(step):
                if wanted:
                    read(iterators[rank], wanted, f"step {number} after a resume, rank {rank}")
        for rank, iterator in enumerate(iterators):
            ended(iterator, f"rank {rank} after a resume")
        pipelines += again
    for pipeline in pipelines:
        pipeline.close()
