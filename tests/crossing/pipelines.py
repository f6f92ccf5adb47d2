"""Compares pipelines of random stages with plain lists, including ranks, resumes and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.crossing.cases import DECODED, EXPANDING, OF_BLOCKS, OF_SEVERAL, Case

if TYPE_CHECKING:
    from tests.crossing.habits import Trial


@dataclass(frozen=True)
class MakeSample:
    """Makes a sample from a number."""

    case: Case

    def __call__(self, x: int) -> dict[str, Any]:
        return {"text": f"item {x}", "x": x, "row": np.full(3, x, np.float32)}


class RowDataset:
    """A dataset with the same samples that decodes them into rows."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.schema = {"text": str, "x": "int64", "row": ("float32", (3,))}

    def __len__(self) -> int:
        return self.case.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError(f"sample {index} must be decoded into its row")

    def read_into(self, index: int, out: Any) -> None:
        for name, value in MakeSample(self.case)(index).items():
            out[name] = value


class BatchDataset(RowDataset):
    """A dataset that decodes several samples at once, without text, because batches have rows at fixed places."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        del self.schema["text"]

    def read_batch_into(self, indices: Any, out: Any) -> None:
        out["x"][...] = indices
        out["row"][...] = indices[:, None]


@dataclass(frozen=True)
class FailFrom:
    """A Map over batches that fails from a given number on."""

    kind: str
    after: int

    def __call__(self, batch: Any) -> Any:
        if int(batch["x"].min()) >= self.after:
            raise StopIteration("from a Map") if self.kind == "stops" else ValueError("from a Map")
        return batch


class AddFromArray:
    """Adds a term from arrays, which differ from each other only in the middle."""

    def __init__(self, term: int) -> None:
        self.held = np.zeros(5000, np.int64)
        self.held[2000:3000] = term

    def __call__(self, x: int) -> int:
        return int(x + self.held[2000 + x % 1000])


@dataclass(frozen=True)
class Add:
    """Adds a number."""

    term: int

    def __call__(self, x: int) -> int:
        return x + self.term


async def add_one(x: int) -> int:
    """Adds one, as an AsyncMap function; smaller numbers wait longer."""
    for _ in range(3 - x % 3):
        await asyncio.sleep(0)
    return x + 1


WINDOW, BOUNDARIES = 5, (2, 6)


def token_sequence(x: int) -> Any:
    """Returns tokens for up to three windows, or none, as input of a Pack."""
    return np.arange(x % 12) + x % 50


def of_window(window: dict[str, Any]) -> int:
    """Returns one number that depends on all arrays of a window."""
    rows = (window[name].tolist() for name in ("tokens", "segment_ids", "position_ids"))
    return sum((at + 1) * (t + 100 * s + 7 * p) for at, (t, s, p) in enumerate(zip(*rows, strict=True)))


def packed_windows(block: list[int], is_best_fit: bool) -> list[int]:
    """Returns the expected windows of a Pack over a block, as numbers of `of_window`."""
    windows: list[list[list[int]]] = []
    for x in block:
        tokens = [x % 50 + at for at in range(x % 12)]
        for first in range(0, len(tokens), WINDOW):
            part = tokens[first : first + WINDOW]
            rooms = [WINDOW - sum(map(len, window)) for window in windows]
            fitting = [at for at, room in enumerate(rooms) if room >= len(part)]
            if not is_best_fit:
                fitting = [at for at in fitting if at == len(windows) - 1]
            if fitting:
                windows[min(fitting, key=rooms.__getitem__)].append(part)
            else:
                windows.append([part])
    return [
        sum(
            (at + 1) * (t + 100 * s + 7 * p)
            for at, (t, s, p) in enumerate((t, s, p) for s, part in enumerate(window, 1) for p, t in enumerate(part))
        )
        for window in windows
    ]


def by_length(sample: dict[str, Any]) -> int:
    """Returns a sample's length, for a Bucket."""
    return int(sample["x"]) % 10


def bucketed(block: list[int], size: int) -> list[list[int]]:
    """Returns the expected batches of a Bucket over a block."""
    held: list[list[int]] = [[], [], []]
    made = []
    for x in block:
        bucket = held[sum(x % 10 > boundary for boundary in BOUNDARIES)]
        bucket.append(x)
        if len(bucket) == size:
            made.append(list(bucket))
            bucket.clear()
    return made + [left for left in held if left]


def weighted_sum(parts: Any) -> int:
    """Returns a sum of the parts that depends on their order."""
    return sum((at + 1) * int(part) for at, part in enumerate(parts))


def summed(pair: Any) -> int:
    """Returns the sum of the pair."""
    return sum(pair)


def is_kept(x: int) -> bool:
    """Returns whether a Filter keeps the number."""
    return x % 3 != 0


def copies(x: int) -> list[int]:
    """Returns up to two copies of the number, as a FlatMap function."""
    return [x] * (x % 3)


def running(total: int, x: int) -> tuple[int, int]:
    """Returns the running total twice, as a Scan function."""
    total = (total + x) % 1000
    return total, total


class Numbers:
    """An iterable over the row of an epoch, which a resume reads from the start."""

    def __init__(self, case: Case) -> None:
        self.case, self.epoch, self.at = case, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from _numbers(self.case, self.epoch)


class ResumableNumbers(Numbers):
    """An iterable that can save and restore its position."""

    def __iter__(self) -> Iterator[int]:
        row = _numbers(self.case, self.epoch)
        while self.at < len(row):
            self.at += 1
            yield row[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def lettered_stages(case: Case, folder: Path) -> Iterator[Any]:
    """Yields the stages of the case's letters."""
    from shmload.pipeline import AsyncMap, Cache, Enumerate, Filter, FlatMap, Map, Pack, Repeat, Skip, Take, Window

    make: dict[str, Callable[[], list[Any]]] = {  # only the stages of the case, because Take(0) of another would be an error
        "t": lambda: [Take(case.n - 2)],
        "s": lambda: [Skip(1)],
        "e": lambda: [Enumerate(3), Map(summed)],
        "w": lambda: [Window(2), Map(summed)],
        "r": lambda: [Repeat(2)],
        "z": lambda: [Window(3, 3), Map(summed)],
        "f": lambda: [Filter(is_kept)],
        "g": lambda: [FlatMap(copies)],
        "a": lambda: [AsyncMap(add_one, 1 + case.seed % 3)],
        "p": lambda: [Map(token_sequence), Pack(WINDOW, strategy=("greedy", "best_fit")[case.seed % 2]), Map(of_window)],
        **dict.fromkeys("mcuB" + OF_SEVERAL, list),
    }
    for number, letter in enumerate(case.stages):
        if letter == "k":
            yield from (Map(AddFromArray(number)), Cache(folder if case.seed % 2 else None))
        else:
            yield from make[letter]()


def applied_stage(number: int, case: Case, epochs: list[list[int]]) -> list[list[int]]:
    """Returns what stage `number` makes of some epochs, or of the blocks of one."""
    letter = case.stages[number]
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
        "k": lambda row: [x + number for x in row],
        "a": lambda row: [x + 1 for x in row],
        "p": lambda row: packed_windows(row, case.seed % 2 == 1),
        **dict.fromkeys("muB" + OF_SEVERAL, lambda row: row),
        "c": lambda row: list(accumulate(row, lambda a, b: (a + b) % 1000, initial=0))[1:],
    }[letter]
    return [made(row) for row in epochs]


def stages_of(case: Case, folder: Path, rank: int, ranks: int, workers: int, batch_size: int) -> list[Any]:
    """Returns the stages of the case's pipeline for one rank."""
    from shmload.pipeline import (
        Bucket,
        Chain,
        Collate,
        Conveyer,
        DistributedBatchedMap,
        Interleave,
        Items,
        Join,
        Map,
        Partition,
        Permutation,
        Range,
        Scan,
        Shuffle,
        Stream,
        Zip,
    )

    source: list[Any]
    if case.extra in DECODED:
        dataset = (RowDataset if case.extra == "rows" else BatchDataset)(case)
        source = [Items(dataset, n_workers=workers), *([Shuffle(case.seed)] if case.shuffle else [])]
    elif "m" in case.stages:
        source = [Stream(ResumableNumbers(case) if case.keeps else Numbers(case), seed=case.seed)]
    else:
        source = [(Permutation if case.shuffle else Range)(case.n, repeating=False, seed=case.seed)]
    other = [Range(other_length(case), repeating=False, seed=case.seed), Map(Add(500))]
    if "q" in case.stages:
        source = [Chain(source, other)]
    elif "y" in case.stages:
        source = [Zip(source, other), Map(weighted_sum)]
    elif "i" in case.stages:
        source = [Interleave(source, other, block_length=2)]
    elif "j" in case.stages:
        source = [Join([(Conveyer(source), 2), (Conveyer(other), 1)], stop="first")]
    stages: list[Any] = [*source, *lettered_stages(case, folder)]
    if ranks > 1:
        stages.append(Partition(rank, ranks, uneven=case.uneven))
    is_scanned = "c" in case.stages
    if case.extra not in DECODED:
        made = int if is_scanned else MakeSample(case)
        in_order = "u" not in case.stages
        stages.append(DistributedBatchedMap(made, workers, in_order=in_order) if workers else Map(made))
    if is_scanned:
        stages += [Scan(running, 0), Map(MakeSample(case))]
    if "B" in case.stages:
        stages.append(Bucket(by_length, BOUNDARIES, case.batch_size))
    else:
        stages.append(Collate(batch_size, not case.drop_last))
    if case.extra in ("stops", "raises"):
        stages.append(Map(FailFrom(case.extra, _fails_from(case))))
    return stages


def block_size(case: Case) -> int:
    """Returns the number of items in a block."""
    return 1 + case.seed % 9


def other_length(case: Case) -> int:
    """Returns the length of the second row, of a source with several inputs."""
    return case.n // 2 + 1


def _fails_from(case: Case) -> int:
    return case.n // 2


def _source(case: Case, epoch: int) -> list[int]:
    """Returns the source's row of an epoch, combined from several if the source has several."""
    row, other = _numbers(case, epoch), [500 + x for x in range(other_length(case))]
    if "q" in case.stages:
        return row + other
    if "y" in case.stages:
        return [x + 2 * y for x, y in zip(row, other, strict=False)]
    if "i" in case.stages:
        rows, dealt = [row, other], []
        for at in range(0, max(map(len, rows)), 2):
            for each in rows:
                dealt += each[at : at + 2]
        return dealt
    if "j" in case.stages:
        from tests.pipeline.pipeline_kit import turns

        num_draws = min(len(row) * 3 // 2, len(other) * 3)
        rests = [iter(row), iter(other)]
        return [next(rests[member]) for member in turns((2, 1), num_draws)]
    return row


def _numbers(case: Case, epoch: int) -> list[int]:
    """Returns the order of an epoch, read by one rank from a Permutation or a Shuffle, which must give each number once."""
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
        raise AssertionError(f"a random order of {case.n} has {row}")
    return row


def expected_steps(case: Case, epoch: int, ranks: int, batch_size: int) -> Iterator[list[list[int]]]:
    """Yields for each step the numbers that each rank gets."""
    if "B" in case.stages:
        batch_size = 1  # a bucket
    factor = 2 ** case.stages.count("r")  # epochs of the source in one of the pipeline
    parts = [_source(case, factor * epoch + number) for number in range(factor)]
    is_cut = False
    for number, letter in enumerate(case.stages):
        if not is_cut and letter in EXPANDING + "B":  # from here on each block is a row of its own
            (whole,), is_cut = parts, True
            parts = [whole[at : at + block_size(case)] for at in range(0, len(whole), block_size(case))]
        if letter == "c":
            parts = [[x for part in parts for x in part]]
        parts = applied_stage(number, case, parts)
    row: list[Any] = [x for part in parts for x in part]
    if "B" in case.stages:
        row = [bucket for part in parts for bucket in bucketed(part, case.batch_size or 1)]
    for step in dealt(case, row, ranks, batch_size):
        yield [[x for bucket in mine for x in bucket] for mine in step] if "B" in case.stages else step


def dealt(case: Case, row: list[Any], ranks: int, batch_size: int) -> Iterator[list[list[Any]]]:
    """Yields the steps of a row, divided among ranks."""
    stride = ranks * batch_size
    uneven = case.uneven if ranks > 1 else "pad"
    for first in range(0, len(row), stride):
        part, each = row[first : first + stride], batch_size
        if len(part) < stride:
            if case.drop_last or uneven == "drop":
                return
            if uneven == "exact":
                bounds = [0, *accumulate(len(part) // ranks + (rank < len(part) % ranks) for rank in range(ranks))]
                yield [part[first:end] for first, end in pairwise(bounds)]
                return
            each = -(-len(part) // ranks)
            part = part + [row[at % len(row)] for at in range(each * ranks - len(part))]
        yield [part[rank * each : (rank + 1) * each] for rank in range(ranks)]


def run_pipeline(trial: Trial) -> None:
    """Runs the case; raises Wrong or any unexpected error."""
    from shmload.pipeline import Conveyer, reconcile
    from tests.crossing.habits import Refused, Wrong

    case = trial.case
    size = case.batch_size or 1

    def made(ranks: int, workers: int, batch_size: int) -> list[Any]:
        try:
            options: dict[str, Any] = {"block_size": block_size(case)} if set(case.stages) & set(OF_BLOCKS) else {}
            if "a" in case.also:
                options["audit"] = trial.made.folder / "audit"
            if case.backend in ("thread", "auto") and workers:
                options["backend"] = case.backend
            return [
                Conveyer(stages_of(case, trial.made.folder / "kept", rank, ranks, workers, batch_size), **options)
                for rank in range(ranks)
            ]
        except (ValueError, TypeError) as error:
            raise Refused(f"{type(error).__name__}: {error}") from error

    def read(pipeline: Any, wanted: list[int], where: str) -> bool:
        """Reads one batch. Returns False if the pipeline failed as expected."""
        trial.inject_fault()
        fails = case.extra in ("stops", "raises") and min(wanted) >= _fails_from(case)
        try:
            batch = trial.timer_of_next.timed(lambda: next(pipeline))
        except StopIteration as error:
            raise Wrong(f"pipeline {where}: ended silently instead of {'an error' if fails else wanted}") from error
        except Exception:
            if fails:
                return False
            raise
        if fails:
            raise Wrong(f"pipeline {where}: a batch although a Map fails")
        got = batch["x"].tolist()
        texts = [f"item {x}" for x in wanted]
        if got != wanted or batch.get("text", texts) != texts or batch["row"][:, 1].tolist() != wanted:
            raise Wrong(f"pipeline {where}: {got}, {batch.get('text')} instead of {wanted}")
        trial.num_batches += 1
        return True

    def read_unordered(pipeline: Any, num_batches: int) -> list[int]:
        """Returns the numbers in the next `num_batches` batches, or in all that are left."""
        found: list[int] = []
        for _ in range(num_batches):
            trial.inject_fault()
            if (batch := trial.timer_of_next.timed(lambda: next(pipeline, None))) is None:
                break
            if batch["text"] != [f"item {x}" for x in batch["x"].tolist()] or batch["row"][:, 1].tolist() != batch["x"].tolist():
                raise Wrong(f"unordered pipeline: a batch of {batch['x'].tolist()} has {batch['text']}")
            found += batch["x"].tolist()
            trial.num_batches += 1
        return found

    def run_unordered() -> None:
        (pipeline,) = made(1, int(case.workers), size)
        wanted = sorted(x for step in expected_steps(case, 0, 1, size) for x in step[0])
        num_first = len(wanted) if case.habit == "pass" else int(len(wanted) * case.at) // size
        found = read_unordered(iter(pipeline), num_first)
        if case.habit != "pass":
            (again,) = made(1, case.then_workers, size)
            again.load_state(json.loads(json.dumps(pipeline.state())))
            found += read_unordered(iter(again), len(wanted)) if len(found) < len(wanted) else []
            again.close()
        pipeline.close()
        if sorted(found) != wanted:
            raise Wrong(f"unordered pipeline: {sorted(found)} instead of {wanted}")

    def ended(iterator: Any, where: str) -> None:
        if next(iter(iterator), None) is not None:  # `iter` of an iterator begins no epoch
            raise Wrong(f"pipeline {where}: an unexpected batch")

    if "u" in case.stages:
        run_unordered()
        return
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
        if case.ranks > 1 and case.seed % 3 == 0 and steps:  # all ranks but the last save a step later
            for rank, wanted in enumerate(steps[strikes][:-1]):
                if wanted:
                    read(iterators[rank], wanted, f"step {strikes}, rank {rank}")
            states = [json.dumps(reconcile([pipeline.state() for pipeline in pipelines]))]
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
