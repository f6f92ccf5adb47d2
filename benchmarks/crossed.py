"""Compare shmload with torch's DataLoader on datasets and loaders that are drawn at random.

Method: Both loaders read each case. The cases are those of tests/crossing with 2,000 samples in batches of 16 to 256: plain
datasets, whose samples are already in memory, and every format; tuples, dicts and dataclasses of one to three fields; numbers,
arrays and texts; the whole dataset, a Subset or a ConcatDataset; with 2 persistent workers, or none; with a seed or in torch
mode. Both loaders read the files of the same dataset object with torch's collate. Datasets that torch refuses are skipped.
Complete passes after the first one are measured, for the duration of the settings.

How to read: For cases with and without workers, the rows show the case that is most expensive compared with torch, by CPU per
sample over all processes, and the case that is slowest compared with torch, by wall time. Set `SHMLOAD_CROSSED_SEED` to another
seed to draw other cases.

Result (2 cores, beside other programs): Of 133 cases with 2 workers, the most expensive took 0.98 of torch's CPU (lines of JSON
in torch mode). Of 57 more cases, of formats alone, one took 0.89 of torch's CPU and 1.12 of its time. Without workers and with
a seed, a sample that costs torch 0.5 us costs 2.5, because three generators are seeded before it. The benchmark found two
defects: a ConcatDataset of tensors took 10 us per row, and Parquet's footer took 2 ms per row group.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch

from benchmarks.common import Result, Row, Settings, in_order, main
from shmload import ShmLoader
from tests.crossing.cases import COLUMNS, FIELDS_OF, NATIVE, ODD, PLAIN, RAGGED, Case, made_legal
from tests.crossing.datasets import CaseDataset

KINDS = (*PLAIN, *NATIVE, *COLUMNS, "remote", "lies")
NUM_SAMPLES, NUM_MADE, CASES_A_ROUND = 2000, 512, 20


class Cost(NamedTuple):
    """Microseconds per sample."""

    cpu: float
    wall: float


class Ready:
    """Samples that cost nothing to read."""

    def __init__(self, dataset: Any) -> None:
        self._samples, self._num = [dataset[index] for index in range(min(len(dataset), NUM_MADE))], len(dataset)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % len(self._samples)]


def drawn(rng: random.Random) -> Case:
    """Draws a case that torch can usually read, too."""
    kind = rng.choice(KINDS)
    letters = [letter for letter in FIELDS_OF[kind] if letter not in ODD + RAGGED + "N"]
    case = Case(
        seed=rng.randrange(1 << 20),
        kind=kind,
        fields="".join(rng.sample(letters, min(len(letters), rng.randint(1, 3)))),
        n=NUM_SAMPLES,
        size=rng.choice((1, 17, 250, 1000)),
        text=rng.choice((5, 100)),
        wrap=rng.choice(("", "", "subset", "concat")),
        extra=rng.choice(("", "files", "bare")),
        mode=rng.choice(("seed", "torch")),
        batch_size=rng.choice((16, 64, 256)),
        shuffle=rng.random() < 0.6,
        persistent=True,
        workers=rng.choice((0, 2, 2)),
    )
    return replace(made_legal(case), loaders=1)


def cpu_s() -> float:
    """Returns the CPU seconds of this process and its children."""
    this = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (this, *this.children(recursive=True)))


def cost(loader: Any, num_samples: int, seconds: float) -> Cost:
    """Measures the passes after the first one."""
    for _ in loader:
        pass
    cpu, began, seen = cpu_s(), time.perf_counter(), 0
    while time.perf_counter() - began < seconds or not seen:
        for _ in loader:
            pass
        seen += num_samples
    return Cost((cpu_s() - cpu) / seen * 1e6, (time.perf_counter() - began) / seen * 1e6)


def both(case: Case, seconds: float, number: int) -> tuple[Cost, Cost] | None:
    """Returns the costs of both loaders, or None if torch refuses the samples. Their order alternates."""
    with tempfile.TemporaryDirectory() as folder:
        made = CaseDataset(case, Path(folder))
        datasets = [made.fresh() for _ in range(2)]
        if case.kind in PLAIN:
            datasets = [Ready(dataset) for dataset in datasets]
        options = {
            "batch_size": case.batch_size,
            "shuffle": case.shuffle,
            "num_workers": case.workers,
            "persistent_workers": bool(case.workers),
        }
        seed = {"seed": 1} if case.is_seeded else {}

        def torchs() -> Cost:
            return cost(torch.utils.data.DataLoader(datasets[0], **options), len(datasets[0]), seconds)

        def ours() -> Cost:
            with ShmLoader(datasets[1], **options, **seed) as loader:
                return cost(loader, len(datasets[1]), seconds)

        found: dict[Any, Cost] = {}
        for measured in in_order((torchs, ours), number):
            try:
                found[measured] = measured()
            except (TypeError, RuntimeError):
                if measured is torchs:
                    return None
                raise
        return found[ours], found[torchs]


def measure(settings: Settings) -> Result:
    """Draws cases and reads each with both loaders."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # ignores warnings about fewer cores than workers
    rng = random.Random(int(os.environ.get("SHMLOAD_CROSSED_SEED", "1")))
    found: list[tuple[Case, Cost, Cost]] = []
    for number in range(CASES_A_ROUND * settings.rounds):
        case = drawn(rng)
        if (costs := both(case, settings.seconds / 2, number)) is not None:
            found.append((case, *costs))
    rows = []
    for where, has_workers in (("2 workers", True), ("no workers", False)):
        its = [
            (own.cpu / max(theirs.cpu, 0.1), case, own, theirs) for case, own, theirs in found if bool(case.workers) is has_workers
        ]
        some = sorted(its, key=lambda one: one[0])
        if not some:
            continue
        share, case, own, theirs = some[-1]
        beside = f"{own.cpu:.1f} us to {theirs.cpu:.1f}: {case.dumps()}; median of {len(some)} {median(one[0] for one in some):.2f}"
        rows.append(Row(f"{where}: CPU a sample over torch's, the dearest case", share, "x", beside, "<= 1x", share <= 1))
        slowest, case = max(((o.wall / t.wall, c) for _, c, o, t in some), key=lambda one: one[0])
        beside = f"{case.dumps()}"
        rows.append(Row(f"{where}: time a sample over torch's, the slowest case", slowest, "x", beside, "<= 1x", slowest <= 1))
    return Result(rows, {"cases": [[case.changed(), own._asdict(), theirs._asdict()] for case, own, theirs in found]})


if __name__ == "__main__":
    main("crossed", __doc__, measure)
