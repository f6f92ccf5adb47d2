"""Pipelines of random stages against plain lists: what `shmload.pipeline` gives, ranks, resumes and errors included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.crossing.cases import DECODED, EXPANDING, Case

if TYPE_CHECKING:
    from tests.crossing.habits import Trial


@dataclass(frozen=True)
class Row:
    """Makes a sample of a number."""

    case: Case

    def __call__(self, x: int) -> dict[str, Any]:
        return {"text": f"item {x}", "x": x, "row": np.full(3, x, np.float32)}


class Rows:
    """The same samples as a dataset that decodes them into rows."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.schema = {"text": str, "x": "int64", "row": ("float32", (3,))}

    def __len__(self) -> int:
        return self.case.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError(f"sample {index} is to be decoded into its row")

    def read_into(self, index: int, out: Any) -> None:
        for name, value in Row(self.case)(index).items():
            out[name] = value


class Batches(Rows):
    """The same, several at once, without text: batches have rows at known places."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        del self.schema["text"]

    def read_batch_into(self, indices: Any, out: Any) -> None:
        out["x"][...] = indices
        out["row"][...] = indices[:, None]


@dataclass(frozen=True)
class Ends:
    """A Map of batches that fails from the third one on."""

    kind: str
    after: int

    def __call__(self, batch: Any) -> Any:
        if int(batch["x"].min()) >= self.after:
            raise StopIteration("from a Map") if self.kind == "stops" else ValueError("from a Map")
        return batch


def summed(pair: Any) -> int:
    """One number of several."""
    return sum(pair)


def is_kept(x: int) -> bool:
    """Of a Filter."""
    return x % 3 != 0


def copies(x: int) -> list[int]:
    """Of a FlatMap."""
    return [x] * (x % 3)


def more_stages(case: Case) -> Iterator[Any]:
    """What the letters of a case stand for."""
    from shmload.pipeline import Enumerate, Filter, FlatMap, Map, Repeat, Skip, Take, Window

    made = {
        "t": [Take(case.n - 2)],
        "s": [Skip(1)],
        "e": [Enumerate(3), Map(summed)],
        "w": [Window(2), Map(summed)],
        "r": [Repeat(2)],
        "z": [Window(3, 3), Map(summed)],
        "f": [Filter(is_kept)],
        "g": [FlatMap(copies)],
    }
    for letter in case.stages:
        yield from made[letter]


def made_by(letter: str, case: Case, epochs: list[list[int]]) -> list[list[int]]:
    """What a stage makes of some epochs."""
    if letter == "r":
        return [a + b for a, b in zip(epochs[::2], epochs[1::2], strict=True)]
    made = {
        "t": lambda row: row[: case.n - 2],
        "s": lambda row: row[1:],
        "e": lambda row: [3 + at + x for at, x in enumerate(row)],
        "w": lambda row: [a + b for a, b in pairwise(row)],
        "z": lambda row: [sum(row[at : at + 3]) for at in range(0, len(row) - 2, 3)],
        "f": lambda row: [x for x in row if x % 3],
        "g": lambda row: [x for x in row for _ in range(x % 3)],
    }[letter]
    return [made(row) for row in epochs]


def stages_of(case: Case, rank: int, ranks: int, workers: int, batch_size: int) -> list[Any]:
    """Of a case's pipeline, for one rank."""
    from shmload.pipeline import Collate, DistributedBatchedMap, Items, Map, Partition, Permutation, Range, Shuffle

    stages: list[Any]
    if case.extra in DECODED:
        dataset = (Rows if case.extra == "rows" else Batches)(case)
        source: list[Any] = [Items(dataset, n_workers=workers), *([Shuffle(case.seed)] if case.shuffle else [])]
    else:
        source = [(Permutation if case.shuffle else Range)(case.n, repeating=False, seed=case.seed)]
    stages = [*source, *more_stages(case)]
    if ranks > 1:
        stages.append(Partition(rank, ranks, uneven=case.uneven))
    if case.extra not in DECODED:
        stages.append(DistributedBatchedMap(Row(case), workers) if workers else Map(Row(case)))
    stages.append(Collate(batch_size, not case.drop_last))
    if case.extra in ("stops", "raises"):
        stages.append(Map(Ends(case.extra, _fails_from(case))))
    return stages


def _fails_from(case: Case) -> int:
    return case.n // 2


def _numbers(case: Case, epoch: int) -> list[int]:
    """The epoch's row: of a Permutation or a Shuffle by one rank alone, which must have each number once."""
    if not case.shuffle:
        return list(range(case.n))
    from shmload.pipeline import Conveyer, Items, Map, Permutation, Shuffle

    shuffled: list[Any] = [Permutation(case.n, repeating=False, seed=case.seed)]
    if case.extra in DECODED:
        shuffled = [Items(range(case.n)), Shuffle(case.seed)]
    with Conveyer([*shuffled, Map(int)]) as alone:
        for _ in range(epoch + 1):
            row = [int(x) for x in alone]
    if sorted(row) != list(range(case.n)):
        raise AssertionError(f"a random order of {case.n} gives {row}")
    return row


def expected_steps(case: Case, epoch: int, ranks: int, batch_size: int) -> Iterator[list[list[int]]]:
    """What each rank is given at each step."""
    stride = ranks * batch_size
    factor = 2 ** case.stages.count("r")  # epochs of the source in one
    epochs = [_numbers(case, factor * epoch + number) for number in range(factor)]
    for letter in case.stages:
        epochs = made_by(letter, case, epochs)
    (row,) = epochs
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
            block = {"block_size": 1 + case.seed % 9} if set(case.stages) & set(EXPANDING) else {}
            return [Conveyer(stages_of(case, rank, ranks, workers, batch_size), **block) for rank in range(ranks)]
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
        texts = [f"item {x}" for x in wanted]
        if got != wanted or batch.get("text", texts) != texts or batch["row"][:, 1].tolist() != wanted:
            raise Wrong(f"pipeline {where}: {got}, {batch.get('text')} and not {wanted}")
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
