"""Measure how costs grow with the number of workers, fields, bytes, samples, loaders, and objects of the trainer.

Method: torch's DataLoader, torch mode and seed mode read the same Python dataset, shuffled, with forked persistent workers.
Each point is measured in a fresh process. Loaders take turns at each point, in an order that is reversed in every other round;
the figures are medians of the rounds. The clock of a first batch starts before the loader is created. The other figures are of
batches after a warm-up of at most a second. Points that need more memory than is free are left out and listed.

    workers     1 to 64 of them, batches of 256 rows of 64 float32 and a number: samples/s of all workers together
    fields      1 to 200 per sample, each of 16 float32, batches of 64
    bytes       batches of 16 samples, 1 KiB to 1 GiB per batch; each sample is a copy of an array, as a decoder makes it
    samples     a dataset of its own indices, batches of 256: the first batch, the trainer's CPU per batch, and the growth of the
                trainer's peak memory. torch and torch mode draw a permutation of all indices. Small datasets have short epochs,
                whose ends are part of the figures
    loaders     1 to 40 in one process, with one worker each; a batch of each in turn
    objects     small lists in the trainer, which every full garbage collection visits, while the program keeps its newest 1, 6 or
                12 batches of 8 rows of 1,000 float32; the ring of two workers has 6 slots, and torch's batches own their memory

How to read: Look at the shape of a curve, and compare the loaders at one point. With more workers than cores, samples/s cannot
grow, but they must not fall.

    python -m benchmarks.curves --write      writes docs/curves.md and docs/curves.svg, in about half an hour
"""

import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import Result, Row, Settings, endless, fresh, in_order, main, repeated
from benchmarks.pages import table
from benchmarks.resume import Numbers
from benchmarks.start_up import LOADERS, Copies, Rows, free_bytes
from shmload.tools.bench.report import machine

PAGE, FIGURE = Path("docs/curves.md"), Path("docs/curves.svg")
KEPT = (1, 6, 12)
COLORS = {"torch": "#d55e00", "torch mode": "#56b4e9", "seed mode": "#0072b2"}


class Fields:
    """Samples of `num_fields` arrays of 16 float32; each is a view."""

    def __init__(self, num_fields: int) -> None:
        self.names = [f"field {number}" for number in range(num_fields)]
        self.rows = np.random.default_rng(0).random((1 << 14, 16), np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: self.rows[index - number] for number, name in enumerate(self.names)}


class LongRows:
    """Samples of 1,000 float32; each is a view."""

    def __init__(self) -> None:
        self.rows = np.random.default_rng(0).random((1 << 12, 1000), np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def made(name: str, dataset: Any, batch_size: int, num_workers: int = 2) -> Any:
    """Returns a loader."""
    loader_class, mode = LOADERS[name]
    options = {"shuffle": True, "multiprocessing_context": "fork", "persistent_workers": True, **mode}
    return loader_class(dataset, batch_size, num_workers=num_workers, **options)


def paced(make: Callable[[], Any], seconds: float, num_kept: int = 1) -> dict[str, float]:
    """Returns the milliseconds to the first batch, and the microseconds and the trainer's CPU per batch after a warm-up.

    Args:
        num_kept: how many of the newest batches the program keeps.
    """
    kept: deque[Any] = deque(maxlen=num_kept)
    began = time.perf_counter()
    batches = endless(make())
    kept.append(next(batches))
    first_s = time.perf_counter() - began

    def step() -> None:
        kept.append(next(batches))

    repeated(step, min(1.0, seconds))
    cpu_s = time.process_time()
    count, took = repeated(step, seconds)
    cpu_s = time.process_time() - cpu_s
    return {"first_ms": first_s * 1e3, "us": took / count * 1e6, "cpu_us": cpu_s / count * 1e6}


def of_workers(count: int, name: str, seconds: float) -> dict[str, float]:
    dataset = Rows()
    found = paced(lambda: made(name, dataset, 256, count), seconds)
    return {**found, "samples_per_s": 256e6 / found["us"]}


def of_fields(count: int, name: str, seconds: float) -> dict[str, float]:
    dataset = Fields(count)
    return paced(lambda: made(name, dataset, 64), seconds)


def of_bytes(nbytes: int, name: str, seconds: float) -> dict[str, float]:
    dataset = Copies(np.random.default_rng(2).random((1, nbytes // 16 // 4), np.float32), 1 << 14)
    found = paced(lambda: made(name, dataset, 16), seconds)
    return {**found, "mib_per_s": nbytes / (1 << 20) / found["us"] * 1e6}


def of_samples(count: int, name: str, seconds: float) -> dict[str, float]:
    before = memory("VmRSS")
    found = paced(lambda: made(name, Numbers(count), 256), seconds)
    return {**found, "mib": (memory("VmHWM") - before) / (1 << 20)}


def of_loaders(count: int, name: str, seconds: float) -> dict[str, float]:
    """Measures the first batch of all loaders, and then a batch of each in turn."""
    dataset = Rows()

    def in_turn() -> Iterator[Any]:
        all_of = [endless(made(name, dataset, 64, 1)) for _ in range(count)]
        yield [next(batches) for batches in all_of]
        while True:
            for batches in all_of:
                yield next(batches)

    return paced(in_turn, seconds)


def of_objects(count: int, name: str, seconds: float) -> dict[str, float]:
    """Creates the objects, and then measures each number of kept batches in the same process."""
    heap = [[number] for number in range(count)]
    dataset = LongRows()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # batches are expected to be copied out
        found = {f"us_{num_kept}": paced(lambda: made(name, dataset, 8), seconds, num_kept)["us"] for num_kept in KEPT}
    assert len(heap) == count
    return found


def memory(field: str) -> int:
    """Returns a field of /proc/self/status, in bytes."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) << 10


@dataclass(frozen=True)
class Axis:
    """A quantity that grows, and what is measured at each of its points.

    Attributes:
        metrics: metric -> its name for readers. The first metric is drawn and compared with torch's.
        needed: (point, loader) -> the bytes that the loader needs there. If 0, the point is always measured.
    """

    x: str
    measure: Callable[[int, str, float], dict[str, float]]
    points: Sequence[int]
    metrics: Mapping[str, str]
    needed: Callable[[int, str], int] = lambda point, name: 0

    @property
    def wants_more(self) -> bool:
        return next(iter(self.metrics)).endswith("per_s")


PER_SAMPLE = {"torch": 60, "torch mode": 12, "seed mode": 0}  # bytes: a permutation, for torch also a list of Python integers
CPU_US, FIRST_MS = {"cpu_us": "trainer's CPU for a batch, us"}, {"first_ms": "first batch, ms"}
AXES = {
    "workers": Axis("workers", of_workers, (1, 4, 16, 64), {"samples_per_s": "samples/s", **FIRST_MS}),
    "fields": Axis("fields of a sample", of_fields, (1, 4, 16, 64, 200), {"us": "time for a batch, us", **CPU_US}),
    "bytes": Axis(
        "bytes of a batch",
        of_bytes,
        tuple(1 << power for power in (10, 15, 20, 25, 28, 30)),
        {"mib_per_s": "MiB/s", **CPU_US},
        lambda nbytes, name: 9 * nbytes,  # six batches in flight, two in hand, and the dataset
    ),
    "samples": Axis(
        "samples of the dataset",
        of_samples,
        tuple(10**power for power in range(3, 11)),
        {**FIRST_MS, **CPU_US, "mib": "growth of the trainer's peak memory, MiB"},
        lambda count, name: PER_SAMPLE[name] * count,
    ),
    "loaders": Axis(
        "loaders in one process", of_loaders, (1, 4, 16, 40), {"us": "time for a batch, us", "first_ms": "first batch of all, ms"}
    ),
    "objects": Axis(
        "objects of the trainer",
        of_objects,
        tuple(10**power for power in range(4, 8)),
        {f"us_{num_kept}": f"time for a batch, {num_kept} kept, us" for num_kept in reversed(KEPT)},
        lambda count, name: 200 * count,
    ),
}
Found = dict[str, dict[int, dict[str, list[dict[str, float]]]]]  # axis -> point -> loader -> the metrics of each round


def measure(settings: Settings) -> Result:
    """Measures every point of every axis."""
    found: Found = {}
    left_out: list[str] = []
    for title, axis in AXES.items():
        for point in axis.points:
            names = [name for name in LOADERS if axis.needed(point, name) <= free_bytes()]
            if absent := [name for name in LOADERS if name not in names]:
                left_out.append(f"{point:,} {axis.x} with {', '.join(absent)}")
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for number in range(settings.rounds):
                for name in in_order(names, number):
                    rounds[name].append(fresh(axis.measure, point, name, settings.seconds))
            found.setdefault(title, {})[point] = rounds
    return Result(rows_of(found), {"axes": found, "left out": left_out, "rounds": settings.rounds, "seconds": settings.seconds})


def middle(found: Found, title: str, point: int, name: str, metric: str) -> float | None:
    """Returns the median of a metric; None if the point was left out."""
    values = [each[metric] for each in found[title][point].get(name, [])]
    return median(values) if values else None


def curve_of(found: Found, title: str, name: str, metric: str, points: Sequence[int]) -> str:
    """Returns a metric at some measured points, as text."""
    return " to ".join(figure_of(middle(found, title, point, name, metric) or 0.0) for point in points)


def rows_of(found: Found) -> list[Row]:
    """Returns, for each axis and mode, the first metric over torch's at the largest point at which all loaders were measured."""
    rows = []
    for title, points in found.items():
        axis, metric = AXES[title], next(iter(AXES[title].metrics))
        compared = [point for point, loaders in points.items() if len(loaders) == len(LOADERS)]
        if not compared:
            continue
        last = compared[-1]
        for name in list(LOADERS)[1:]:
            pairs = zip(points[last][name], points[last]["torch"], strict=True)
            ratio = median(mine[metric] / theirs[metric] for mine, theirs in pairs)
            ours, torchs = (curve_of(found, title, each, metric, (compared[0], last)) for each in (name, "torch"))
            beside = f"{axis.metrics[metric]}, from {compared[0]:,}: {ours}; torch {torchs}"
            aim, met = (">= 1x", ratio >= 1) if axis.wants_more else ("<= 1x", ratio <= 1)
            rows.append(Row(f"{last:,} {axis.x}, {name}: {axis.metrics[metric]} over torch's", ratio, "x", beside, aim, met))
    return rows


def write(result: Result) -> None:
    """Writes the page and its figure."""
    PAGE.write_text(page(result))
    draw(result.measured["axes"], FIGURE)


def page(result: Result) -> str:
    """Returns the page: the conditions, the figure, and a table for each axis."""
    measured, where = result.measured, machine()
    run = (
        f"Measured on {time.strftime('%Y-%m-%d')}: {where['num_cpus']} cores of {where['cpu_model'] or where['architecture']}, "
        f"Linux {where['kernel']}, Python {where['python']}, torch {where['torch']}; load {os.getloadavg()[0]:.1f} at the end. "
        f"Rounds: {measured['rounds']}, timed parts of {measured['seconds']:g} s."
    )
    parts = [
        "# Costs that grow",
        "This page shows how costs grow with the number of workers, fields, bytes, samples, loaders, and objects of the trainer.\n"
        "torch's DataLoader, ShmLoader without a seed (torch mode) and with one (seed mode) read the same data, in turn. The head\n"
        "of `benchmarks/curves.py` describes the method; `python -m benchmarks.curves --write` measures and writes this page.",
        run,
        "Left out, for lack of memory: " + ("; ".join(measured["left out"]) or "nothing") + ".",
        f"![a curve of each cost, for torch's DataLoader, torch mode and seed mode]({FIGURE.name})",
    ]
    for title in measured["axes"]:
        parts.append(f"## {AXES[title].x.capitalize()}")
        for metric, words in AXES[title].metrics.items():
            parts += [f"{words[0].upper()}{words[1:]}:", table_of(measured["axes"], title, metric).rstrip()]
    return "\n\n".join(parts) + "\n"


def table_of(found: Found, title: str, metric: str) -> str:
    """Returns the table of a metric, with a line per point and a column per loader."""
    lines = []
    for point in found[title]:
        values = [middle(found, title, point, name, metric) for name in LOADERS]
        lines.append([f"{point:,}", *("-" if value is None else figure_of(value) for value in values)])
    return table([AXES[title].x, *LOADERS], lines)


def figure_of(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def draw(found: Found, path: Path) -> None:
    """Draws the first metric of each axis."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": path.name, "svg.fonttype": "none"})  # so that the same figures give the same file
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained", facecolor="white")
    for axes, title in zip(figure.subplots(2, 3).flat, found, strict=False):
        axis, metric = AXES[title], next(iter(AXES[title].metrics))
        for name in LOADERS:
            values = {point: middle(found, title, point, name, metric) for point in found[title]}
            shown = {point: value for point, value in values.items() if value is not None}
            axes.plot(list(shown), list(shown.values()), marker="o", markersize=4, color=COLORS[name], label=name)
        axes.set(xscale="log", yscale="log", xlabel=axis.x, title=axis.metrics[metric])
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=len(LOADERS), frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main("curves", __doc__, measure, write)
