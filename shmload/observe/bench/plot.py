"""The report as a picture: throughput ratio with its spread, and what a batch costs the trainer, on a log scale."""

import importlib.util
from pathlib import Path

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
    figure = Figure(figsize=(11, 1.6 + 0.42 * len(names) * max(1, len(rivals))), dpi=140, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    height = 0.72 / max(1, len(rivals))
    for number, name in enumerate(rivals):
        offset = (number - (len(rivals) - 1) / 2) * height
        for row, workload in enumerate(report.workloads):
            ratio = workload.loaders[name].ratio if name in workload.loaders else None
            if ratio is None:
                continue
            spread = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
            style = {"ecolor": "#333333", "capsize": 2.5, "elinewidth": 1.0}
            left.barh(row + offset, ratio.median, height * 0.92, xerr=spread, color=colours[name], error_kw=style)
            left.annotate(
                f"{ratio.median:.2f}x",
                (ratio.high, row + offset),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                fontweight="bold" if name == report.subject else "normal",
            )
    left.axvline(1, color=colours.get(report.reference, "#333333"), linewidth=1.4)
    left.set_xlabel(f"samples/s, times {report.reference} (bar: median of rounds, line: lowest to highest)")
    left.set_yticks(range(len(names)), names)
    left.set_ylim(len(names) - 0.4, -0.6)
    left.margins(x=0.14)
    left.set_xlim(left=0)
    for name in loaders:
        points = [
            (workload.loaders[name].metrics["trainer_us_per_batch"].median, row)
            for row, workload in enumerate(report.workloads)
            if name in workload.loaders and "trainer_us_per_batch" in workload.loaders[name].metrics
        ]
        if points:
            right.scatter(*zip(*points, strict=True), s=52, color=colours[name], label=name, zorder=3)
    right.set_xscale("log")
    right.set_xlabel("CPU of the trainer, us per batch (log scale; less is better)")
    right.grid(axis="x", which="both", color="#dddddd", linewidth=0.6)
    right.tick_params(left=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.xaxis.label.set_size(9)
    if loaders:
        figure.legend(loc="outside upper right", ncols=len(loaders), frameon=False, fontsize=9)
    machine = report.machine
    figure.suptitle(
        f"shmload bench: {report.num_workers} workers on {machine['num_cpus']} cores", x=0.01, ha="left", fontsize=12
    )
    figure.savefig(path, format="png")
