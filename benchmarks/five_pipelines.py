"""Measure five pipelines, each written with five libraries: their rate, and their CPU over that of the functions they call.

The pipelines are: tokenize texts and pack them into windows of 1,024 tokens; augment images of 32 x 32 and mix them within the
batch; pairs of an image and a caption; buckets of texts by length; a weighted mixture of prose, code and chat, each with its
own transform. The programs are in benchmarks/five/, one file per library; docs/pipelines.md shows shmload's.

Method: 2 workers, everything in memory, no shuffle, a fresh process per case, in turn; every process computes with one thread.
Before that, every program is run over 3,000 items, or 150 batches of the mixture: batches must have the same types and contain
the same numbers of items and tokens in each library. Stages that a library lacks are written as its users do: windows for
torch, torchdata.nodes and datasets, buckets for all of them except shmload. Each library reads its data as suits it best: Grain
without threads, torchdata.nodes in whole batches, datasets with images as bytes. A library that is not installed is left out.
These cases are measured for comparison:

    alone       the functions of items and batches in a loop in one process. Nothing is packed, collated or sent. Freed memory is
                kept, as shmload's workers keep it, because new pages for every batch cost more than mixing it
    copied      the same in two processes at a time, which copy their results into shared memory and report them through a pipe:
                the minimum for any loader with processes, without positions, seeds, order or packing
    in a loop   the whole program, packed, collated and mixed as torch's users write it, in two processes at a time, which also keep
                freed memory and send nothing

A stage that does nothing: ten stages of Map(lambda x: x) are compared with none, over integers in batches of 256, without
workers, because these spend some time on waiting for the trainer; then the same after a Filter.

How to read: Items/s are documents, images, pairs, texts and samples, by wall time. CPU is that of all processes. If the
functions are all of the work, no library is much faster than another, and CPU over the functions alone shows what a library
adds.

Predicted: The functions are most of the work in all five, so 1.2 to 2 times the best peer's rate, and 1.1 to 1.5 times the
functions' CPU; packing and buckets the most, because their batches are made in the trainer. An empty stage 0.15 us.

Result (2 cores, quiet, 3 rounds):
| | pack | augment and mix | pairs | buckets | mixture |
|---|---|---|---|---|---|
| items/s over the best peer's | 1.32 (torchdata.nodes in whole batches) | 1.99 | 4.21 | 1.72 (torchdata.nodes) | 1.86 |
| the same if two cores only called the functions | 1.67 | 2.7 | 7.2 | 2.2 | 2.1 |
| CPU over the functions' | 1.26 | 1.36 | 1.68 | 1.28 | 1.12 |
Only pairs can reach three times the best peer's rate. shmload adds most if items are large for the work done with them: pairs
are 12 KB for 6.7 us. An empty stage takes 0.04 us (1.82 us per item without any and 2.20 with ten), after a Filter 0.05 (0.98
and 1.50).

Later results: (a) when everything was slower by half, 3 rounds; (b) after a change by which several steps of a pipeline are
ordered at a time and a native loop passes samples to batch functions, 3 rounds of 0.6 s; (c) after items, `sample_rng()` and
padding took fewer calls, on another machine, twice as slow and uneven:
| | pack | augment and mix | pairs | buckets | mixture |
|---|---|---|---|---|---|
| (a) copied, the minimum, over the functions | 1.08 | 1.02 | 1.54 | 1.06 | 1.08 |
| (a) CPU over copied | | 1.21 | 1.13 | | 1.08 |
| (b) CPU over the whole program in one loop | 1.04 | 1.11 | 1.04 | 1.11 | 0.98 |
| (b) CPU over the functions' | 1.22 | 1.22 | 1.75 | 1.23 | 1.15 |
| (c) CPU over two loops at once | 0.96 | 0.96 | 0.83 | 0.89 | 1.09 |
| (c) items/s over the best peer's | 1.15 | 1.64 | 3.26 | 2.14 | 1.81 |
"""

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import count, islice
from typing import Any, NamedTuple, NoReturn

import numpy as np
from torch.utils.data import default_collate

from benchmarks.common import Result, Row, Settings, forked, in_turn, main, plain
from benchmarks.five import work
from benchmarks.five.data import data, data_of_datasets
from shmload._core.watch import keep_freed
from shmload.pipeline import Items
from shmload.tools.bench.bench_job import BenchJob, run_jobs
from shmload.tools.bench.contestants import LoaderOptions

NEEDS = {"shmload": "shmload", "torch": "torch", "nodes": "torchdata", "huggingface": "datasets", "grain": "grain"}
PEERS = {"torch": "torch", "nodes": "torchdata.nodes", "huggingface": "datasets", "grain": "Grain"}
LENGTH, CHECKED, NUM_STAGES = 1 << 20, 3000, 10
ENDLESS = 1 << 40  # length of an epoch that is never completed


class Program(NamedTuple):
    """One of the five programs.

    Attributes:
        title: its name for readers.
        sources: the names of its data.
        num_items: columns of a batch -> its number of items.
        total: columns of a batch -> a number, whose sum over all batches must be the same in all libraries.
        ends: whether the program ends.
    """

    title: str
    sources: tuple[str, ...]
    num_items: Callable[[list[Any]], int]
    total: Callable[[list[Any]], float]
    ends: bool = True


PROGRAMS = {
    "tokenize_and_pack": Program(
        "tokenize and pack", ("texts",), lambda batch: int(batch[1].max(1).sum()), lambda batch: (batch[1] > 0).sum()
    ),
    "augment_and_mix": Program("augment and mix", ("photos",), lambda batch: len(batch[1]), lambda batch: batch[1].sum().round()),
    "pairs": Program("pairs", ("images", "captions"), lambda batch: len(batch[1]), lambda batch: (batch[1] > 0).sum()),
    "buckets": Program("buckets", ("texts",), lambda batch: len(batch[1]), lambda batch: (batch[0] > 0).sum()),
    "mixture": Program("mixture", ("prose", "code", "chat"), lambda batch: len(batch[1]), lambda batch: len(batch[1]), ends=False),
}


def columns(batch: Any) -> list[np.ndarray]:
    """Returns the arrays of a batch of any library."""
    return [np.asarray(column) for column in (batch.values() if isinstance(batch, dict) else batch)]


class Sources:
    """The dataset of a job: the program of a library, and the items that it reads."""

    def __init__(self, name: str, library: str, num_items: int = LENGTH) -> None:
        self.name, self.library, self.num_items = name, library, num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> Any:
        raise TypeError("a program reads its sources itself")

    def batches(self) -> Any:
        """Returns the program's batches."""
        found = (data_of_datasets if self.library == "huggingface" else data)(self.num_items)
        program = getattr(import_module(f"benchmarks.five.{self.library}"), self.name)
        return program(*(found[name] for name in PROGRAMS[self.name].sources))


class Delivered:
    """Yields the batches of a program, each preceded by an array as long as its number of items."""

    keeps_order = False

    def __init__(self, sources: Sources, options: LoaderOptions) -> None:
        self.program, self.batches = PROGRAMS[sources.name], sources.batches()

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            found = columns(batch)
            yield np.empty(self.program.num_items(found), np.uint8), found


class Checked:
    """A loader that compares a program's output with the expected output when it is created. It delivers no batches of use.

    Raises:
        ValueError: the outputs differ.
    """

    def __init__(self, sources: Sources, options: LoaderOptions) -> None:
        program, name = PROGRAMS[sources.name], sources.name
        batches = [columns(batch) for batch in islice(sources.batches(), None if program.ends else 150)]
        kinds = [(column.dtype.kind, column.shape[1:]) for column in batches[0]]
        if name == "buckets":
            kinds[0] = (kinds[0][0], ())  # the shape varies with the longest item
        expected = KINDS[name]
        if kinds != expected:
            raise ValueError(f"{sources.library}, {name}: batches are {kinds}, expected {expected}")
        got = sum(map(program.num_items, batches)), sum(float(program.total(batch)) for batch in batches)
        if program.ends:
            wanted = CHECKED, self.total(name)
        else:
            shares = np.bincount(np.concatenate([batch[1] for batch in batches]), minlength=3) / got[0]
            if abs(shares - list(work.WEIGHTS.values())).max() > 0.05:  # drawn at random, in some programs without a seed
                raise ValueError(f"{sources.library}, {name}: shares are {shares}")
            wanted = 150 * 64, 150 * 64.0
        if got != wanted:
            raise ValueError(f"{sources.library}, {name}: items and their total are {got}, expected {wanted}")

    @staticmethod
    def total(name: str) -> float:
        """Returns the total over all items of a program that ends."""
        if name == "augment_and_mix":
            return float(CHECKED)
        texts = data(CHECKED)[PROGRAMS[name].sources[-1]]
        most = 16 if name == "pairs" else None
        return float(sum(len(work.tokenize(text)[:most]) for text in texts))

    def __iter__(self) -> Iterator[Any]:
        yield np.empty(1, np.uint8)


KINDS: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "tokenize_and_pack": [("i", (work.WINDOW,))] * 3,
    "augment_and_mix": [("f", (32, 32, 3)), ("f", (10,))],
    "pairs": [("f", (3, 32, 32)), ("i", (16,))],
    "buckets": [("i", ()), ("i", ())],
    "mixture": [("i", (128,)), ("i", ())],
}


Made = tuple[int, list[Any]]  # a number of items, and the arrays that the functions have made from them


class Alone:
    """Calls the functions of a program in a loop, and drops their results."""

    keeps_order = False

    def __init__(self, sources: Sources, options: LoaderOptions) -> None:
        keep_freed()
        found = data(sources.num_items)
        items = [found[name] for name in PROGRAMS[sources.name].sources]
        self.made: Iterator[Made] = getattr(self, sources.name)(*items)

    def __iter__(self) -> Iterator[Any]:
        for size, _ in self.made:
            yield np.empty(size, np.uint8)

    def tokenize_and_pack(self, texts: Any) -> Iterator[Made]:
        for start in count(0, 128):
            yield 128, [work.tokenize(texts[index % len(texts)]) for index in range(start, start + 128)]

    buckets = tokenize_and_pack

    def augment_and_mix(self, photos: Any) -> Iterator[Made]:
        rng, batch = work.own_rng(), default_collate([photos[index] for index in range(128)])
        for start in count(0, 128):
            images = [work.augment(photos[index % len(photos)], rng)["image"] for index in range(start, start + 128)]
            yield 128, [*images, *map(np.asarray, work.mix(batch, rng).values())]

    def pairs(self, images: Any, captions: Any) -> Iterator[Made]:
        for start in count(0, 64):
            made = [work.pair((images[n % len(images)], captions[n % len(images)])) for n in range(start, start + 64)]
            yield 64, [array for both in made for array in both.values()]

    def mixture(self, prose: Any, code: Any, chat: Any) -> Iterator[Made]:
        of_ten = [(prose, work.of_prose)] * 6 + [(code, work.of_code)] * 3 + [(chat, work.of_chat)]
        for start in count(0, 10):
            made = [work.fit(function(source[(start + place) % len(source)])) for place, (source, function) in enumerate(of_ten)]
            yield 10, [sample["tokens"] for sample in made]


def from_two(work: Callable[[int], NoReturn]) -> Iterator[Any]:
    """Yields an array for each batch that two concurrent processes report through a pipe, as long as its number of items.

    Args:
        work: makes batches forever, and writes the number of items of each to the given file descriptor.
    """
    said, say = os.pipe()
    children = []
    for _ in range(2):
        if not (child := os.fork()):
            work(say)
        children.append(child)
    os.close(say)
    try:
        while sizes := os.read(said, 1 << 12):
            for size in np.frombuffer(sizes, np.uint16):
                yield np.empty(size, np.uint8)
    finally:
        os.close(said)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


class AtOnce:
    """Runs a whole program in a loop in two processes at a time, which share caches, as workers do."""

    keeps_order = False

    def __init__(self, sources: Sources, options: LoaderOptions) -> None:
        keep_freed()
        self.program, self.made = PROGRAMS[sources.name], iter(sources.batches())

    def __iter__(self) -> Iterator[Any]:
        return from_two(self._work)

    def _work(self, say: int) -> NoReturn:
        for batch in self.made:
            os.write(say, np.uint16(self.program.num_items(columns(batch))).tobytes())
        os._exit(0)


class Copied(Alone):
    """Calls the functions in two processes at a time, which copy their results to shared memory and report each batch."""

    def __iter__(self) -> Iterator[Any]:
        return from_two(self._work)

    def _work(self, say: int) -> NoReturn:
        shared = np.frombuffer(mmap.mmap(-1, 1 << 25), np.uint8)
        at = 0
        for size, arrays in self.made:
            for array in arrays:
                at = at if at + array.nbytes <= len(shared) else 0
                shared[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
                at += array.nbytes
            os.write(say, np.uint16(size).tobytes())
        os._exit(0)


class Nothing:
    """A source of integers, and the number of stages without effect after it."""

    def __init__(self, num_stages: int, is_filtered: bool) -> None:
        self.num_stages, self.is_filtered = num_stages, is_filtered

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> int:
        return index


def nothing(sources: Nothing, options: LoaderOptions) -> Any:
    """Returns a pipeline over integers, with stages that do nothing."""
    pipeline = Items(range(ENDLESS), repeating=True).map(int)
    if sources.is_filtered:
        pipeline = pipeline.filter(lambda x: x >= 0)
    for _ in range(sources.num_stages):
        pipeline = pipeline.map(lambda x: x)
    return pipeline.batch(256)


def check(library: str) -> None:
    """Runs every program of a library over a few items.

    Raises:
        SystemExit: the output of one of them differs from the expected output.
    """
    here = "benchmarks.five_pipelines"
    jobs = [
        BenchJob(
            workload=name,
            dataset=f"{here}:Sources",
            arguments={"name": name, "library": library, "num_items": CHECKED},
            loader=f"{here}:Checked",
            batch_size=1,
            num_workers=2,
            seconds=0.0,
            num_digests=1,
        )
        for name in PROGRAMS
    ]
    for outcome in run_jobs(jobs):
        if outcome.error:
            raise SystemExit(f"{outcome.error}\n{outcome.details}")


def measure(settings: Settings) -> Result:
    """Measures the five programs in every installed library, their functions alone, and stages without effect."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for workers that are started as new interpreters
    libraries = [library for library, package in NEEDS.items() if find_spec(package)]
    for library in (*libraries, "loop"):
        check(library)

    def job(loader: str, dataset: str, **arguments: Any) -> BenchJob:
        here = "benchmarks.five_pipelines"
        names = {"dataset": f"{here}:{dataset}", "loader": f"{here}:{loader}"}
        return forked(settings, workload="five", batch_size=256, arguments=arguments, **names)

    cases = {f"{name}, {way}": job("Delivered", "Sources", name=name, library=way) for name in PROGRAMS for way in libraries}
    for of in ("Alone", "Copied"):
        cases |= {f"{name}, {of.lower()}": job(of, "Sources", name=name, library="") for name in PROGRAMS}
    cases |= {f"{name}, loop": job("AtOnce", "Sources", name=name, library="loop") for name in PROGRAMS}
    stages = {f"{n} stages{where}": (n, bool(where)) for n in (0, NUM_STAGES) for where in ("", " behind a Filter")}
    cases |= {name: job("nothing", "Nothing", num_stages=n, is_filtered=where) for name, (n, where) in stages.items()}
    measured = in_turn(cases, settings)
    absent = [PEERS[library] for library in PEERS if library not in libraries]
    rows = [row for name in PROGRAMS for row in _rows(name, libraries, measured, absent)]
    for where in ("", " behind a Filter"):
        few, many = (measured[f"{n} stages{where}"]["cpu_us_per_sample"].median for n in (0, NUM_STAGES))
        each, beside = (many - few) / NUM_STAGES, f"{few:.2f} us an item without, {many:.2f} with {NUM_STAGES}"
        rows.append(Row(f"a stage that does nothing{where}, CPU an item", each, "us", beside, "<= 0.3", each <= 0.3))
    return Result(rows, {"cases": plain(measured), "not installed": absent})


def _rows(name: str, libraries: list[str], measured: Any, absent: list[str]) -> Iterator[Row]:
    """Yields the rows of one program: its rate over the best peer's, and its CPU over that of the functions."""
    title = PROGRAMS[name].title
    rate = {library: measured[f"{name}, {library}"]["samples_per_s"].median for library in libraries}
    peers = sorted((rate[library], PEERS[library]) for library in libraries if library in PEERS)
    cpu = {of: measured[f"{name}, {of}"]["cpu_us_per_sample"].median for of in [*libraries, "alone", "loop", "copied"]}
    times, own = rate["shmload"] / peers[-1][0], cpu["shmload"] / cpu["alone"]
    met = times >= 3 or own <= 1.1
    found = [f"{peer} {each:,.0f}" for each, peer in reversed(peers)] + [f"{peer} is not installed" for peer in absent]
    beside = f"{rate['shmload']:,.0f}; {', '.join(found)}"
    yield Row(f"{title}: items/s over the best peer's", times, "x", beside, ">= 3x, or the next row", met)
    found = [f"{PEERS[library]} {cpu[library]:.1f}" for library in libraries if library in PEERS]
    beside = f"{cpu['shmload']:.1f} us; alone {cpu['alone']:.1f}, {', '.join(found)}"
    yield Row(f"{title}: CPU an item over its functions alone", own, "x", beside, "<= 1.1x, or the row above", met)
    whole, beside = cpu["shmload"] / cpu["loop"], f"in a loop {cpu['loop']:.1f} us, {cpu['loop'] / cpu['alone']:.2f} of alone"
    yield Row(f"{title}: CPU an item over all of the program in two loops at once", whole, "x", beside, "<= 1.1x", whole <= 1.1)
    least, beside = cpu["shmload"] / cpu["copied"], f"copied {cpu['copied']:.1f} us, {cpu['copied'] / cpu['alone']:.2f} of alone"
    yield Row(f"{title}: CPU an item over two processes that only copy", least, "x", beside, "<= 1.2x", least <= 1.2)


if __name__ == "__main__":
    main("five_pipelines", __doc__, measure)
