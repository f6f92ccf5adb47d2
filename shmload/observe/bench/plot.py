"""The report as one picture: throughput, CPU of the trainer, scaling with workers and waits, each where there is data for it.

Colours are Okabe and Ito's, which people with any common colour blindness can tell apart; loaders also differ in marker and line.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shmload.observe.bench import panels
from shmload.observe.bench.report import Report, WorkloadReport

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#000000")
MAX_GRID = 6  # sections whose waits, or workloads whose scaling, have a panel each
COLUMNS = 3  # of small panels
SMALL_HEIGHT = 2.4  # inches

Draw = Callable[[Any, Any, "panels.Styles"], None]


def missing() -> str | None:
    """The pip command for what is not installed, None if all is there."""
    if importlib.util.find_spec("matplotlib") is None:
        return "plot left out: needs matplotlib: pip install 'shmload[plot]'"
    return None


def save(report: Report, path: Path) -> None:
    """Writes a PNG: bars and trainer CPU of the sections, below them the scaling of a sweep, below those the waits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    loaders = list(dict.fromkeys(name for workload in report.workloads for name in workload.loaders))
    styles = {name: panels.Style(COLOURS[n % len(COLOURS)], "osD^vPX*"[n % 8]) for n, name in enumerate(loaders)}
    sections = panels.shown_sections(report)
    rivals = [name for name in loaders if name != report.reference]
    bars_height = 1.0 + len(sections) * (0.3 + 0.24 * max(1, len(rivals)))
    small = small_panels(report, sections)
    rows = -(-len(small) // COLUMNS)
    figure = Figure(figsize=(11, 1.0 + bars_height + SMALL_HEIGHT * rows), dpi=140)
    figure.set_layout_engine("constrained", hspace=0.08)
    heights = [bars_height, *[SMALL_HEIGHT] * rows]
    grid = figure.add_gridspec(len(heights), 6, height_ratios=heights)
    left = figure.add_subplot(grid[0, :3])
    right = figure.add_subplot(grid[0, 3:], sharey=left)
    panels.draw_ratios(left, report, sections, rivals, styles)
    panels.draw_trainer_cpu(right, report, sections, loaders, styles)
    names = [panels.section_name(section, report) for section in sections]
    left.set_yticks(range(len(names)), names, fontsize=10)
    left.set_ylim(len(names) - 0.4, -0.6)
    right.tick_params(labelleft=False)
    for axes in (left, right):
        axes.tick_params(left=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(axis="x", color="#e4e4e4", linewidth=0.7)
        axes.set_axisbelow(True)
    for number, (draw, what) in enumerate(small):
        row, column = divmod(number, COLUMNS)
        axes = figure.add_subplot(grid[1 + row, 2 * column : 2 * column + 2])
        draw(axes, what, styles)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e9e9e9", linewidth=0.7)
        axes.set_axisbelow(True)
    for axes in figure.axes:
        axes.xaxis.label.set_fontsize(8.5)
        axes.yaxis.label.set_fontsize(8.5)
        axes.tick_params(labelsize=8.5 if axes is not left else 10)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=min(len(loaders), 7), frameon=False, fontsize=9)
    figure.suptitle("\n".join(title(report)), x=0.01, ha="left", fontsize=10.5)
    figure.savefig(path, format="png")


def title(report: Report) -> list[str]:
    """What ran, on what, and when."""
    machine = report.machine
    quick = ", --quick: says nothing about speed" if report.quick else ""
    workers = "sweep" if report.is_sweep or report.num_workers is None else f"{report.num_workers} workers"
    step = f", a step of {report.step_ms:g} ms" if report.step_ms else ""
    model = machine.get("cpu_model") or machine["architecture"]
    return [
        f"shmload bench: {workers}{step}{quick}",
        f"{machine['num_cpus']} cores of {model}, Linux {machine['kernel'].split('-')[0]}, torch {machine['torch']}; "
        f"{report.started}",
    ]


def small_panels(report: Report, sections: list[WorkloadReport]) -> list[tuple[Draw, Any]]:
    """The panels below the bars: scaling where several numbers of workers ran, then waits of each section."""
    found: list[tuple[Draw, Any]] = []
    for name in dict.fromkeys(section.name for section in report.workloads):
        scaling = panels.scaling(report, name)
        if scaling.num_points > 1:
            found.append((panels.draw_scaling, scaling))
    waits = [section for section in sections if any(each.wait_quantiles_ms for each in section.loaders.values())]
    found = found[:MAX_GRID]
    return [*found, *((panels.draw_waits, (report, section)) for section in waits[:MAX_GRID])]
