"""The report as a picture: throughput ratio with its spread, and what a batch costs the trainer, on a log scale."""

import importlib.util
import math
from pathlib import Path
from typing import Any

from shmload.observe.bench.report import Report

COLOURS = ("#1b7f79", "#c8553d", "#8a8f98", "#b8a04a", "#5b6c9d", "#7a4e8a")


def missing() -> str | None:
    """The pip command for what is not installed, None if all is there."""
    if importlib.util.find_spec("matplotlib") is None:
        return "plot left out: needs matplotlib: pip install 'shmload[plot]'"
    return None


def save(report: Report, path: Path) -> None:
    """Writes a PNG of two panels that share the workloads as rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    names = [workload.name for workload in report.workloads]
    loaders = list(dict.fromkeys(name for workload in report.workloads for name in workload.loaders))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(loaders)}
    rivals = [name for name in loaders if name != report.reference]
    height = 2.0 + len(names) * (0.35 + 0.25 * max(1, len(rivals)))
    figure = Figure(figsize=(11, height), dpi=140, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    draw_ratios(left, report, rivals, colours)
    draw_trainer_cpu(right, report, loaders, colours)
    left.set_yticks(range(len(names)), names, fontsize=11)
    left.set_ylim(len(names) - 0.4, -0.6)
    for axes in (left, right):
        axes.tick_params(left=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(axis="x", color="#e4e4e4", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.xaxis.label.set_size(9)
    figure.legend(loc="outside upper right", ncols=len(loaders), frameon=False, fontsize=9)
    machine = report.machine
    quick = ", --quick: says nothing about speed" if report.quick else ""
    title = f"shmload bench: {report.num_workers} workers on {machine['num_cpus']} cores{quick}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.savefig(path, format="png")


def draw_ratios(axes: Any, report: Report, rivals: list[str], colours: dict[str, str]) -> None:
    """Bars that start at 1 on a log scale: twice as fast is as long to the right as half as fast to the left."""
    height = 0.74 / max(1, len(rivals))
    seen = [1.0]
    for number, name in enumerate(rivals):
        offset = (number - (len(rivals) - 1) / 2) * height
        for row, workload in enumerate(report.workloads):
            ratio = workload.loaders[name].ratio if name in workload.loaders else None
            if ratio is None:
                continue
            seen += [ratio.low, ratio.high]
            axes.barh(row + offset, ratio.median - 1, height * 0.9, left=1, color=colours[name])
            axes.plot([ratio.low, ratio.high], [row + offset] * 2, color="#333333", linewidth=1.1, marker="|")
            right = ratio.median >= 1
            axes.annotate(
                f"{ratio.median:.2f}x",
                (ratio.high if right else ratio.low, row + offset),
                xytext=(6 if right else -6, 0),
                textcoords="offset points",
                va="center",
                ha="left" if right else "right",
                fontsize=8.5,
                fontweight="bold" if name == report.subject else "normal",
            )
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(min(seen) / 1.5, 0.7), max(max(seen) * 1.6, 2.2))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.axvline(1, color=colours.get(report.reference, "#333333"), linewidth=1.6)
    axes.set_xlabel(f"samples/s against {report.reference} (bar: median of rounds; line: lowest to highest; log scale)")


def draw_trainer_cpu(axes: Any, report: Report, loaders: list[str], colours: dict[str, str]) -> None:
    """A dot a loader and workload."""
    metric = "trainer_us_per_batch"
    rows: list[list[float]] = [[] for _ in report.workloads]
    for depth, name in enumerate(loaders):
        points = []
        for row, workload in enumerate(report.workloads):
            found = workload.loaders[name].metrics.get(metric) if name in workload.loaders else None
            if found and found.median > 0:
                points.append((found.median, row))
                rows[row].append(found.median)
        across, down = zip(*points, strict=True) if points else ((), ())
        axes.scatter(across, down, s=58, color=colours[name], label=name, zorder=20 - depth)
    for row, values in enumerate(rows):
        if values:
            axes.plot([min(values), max(values)], [row, row], color="#cccccc", linewidth=2, zorder=2)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    seen = [value for values in rows for value in values]
    if seen:  # whole decades, so that at least two ticks are labelled
        axes.set_xlim(10 ** math.floor(math.log10(min(seen)) - 0.05), 10 ** math.ceil(math.log10(max(seen)) + 0.05))
    axes.set_xlabel("CPU of the trainer in us per batch (log scale; less is better)")
