"""The panels of the plot: each draws one question into the axes it is given."""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmload.tools.bench.report import WAIT_SHARES, LoaderReport, Report, WorkloadReport

WAIT_FLOOR_MS = 0.01  # a wait that is none


@dataclass(frozen=True)
class Style:
    """How a loader looks in every panel."""

    colour: str
    marker: str


Styles = dict[str, Style]


def section_name(section: WorkloadReport, report: Report) -> str:
    return f"{section.label}\n{section.setting}" if report.is_sweep else section.label


def shown_sections(report: Report) -> list[WorkloadReport]:
    """All sections; of a sweep one a workload and state of the cache: the setting in which the subject was fastest."""
    if not report.is_sweep:
        return report.workloads
    best: dict[str, WorkloadReport] = {}
    for section in report.workloads:
        if section.label not in best or rate(section, report.subject) > rate(best[section.label], report.subject):
            best[section.label] = section
    return list(best.values())


def rate(section: WorkloadReport, loader: str) -> float:
    found = section.loaders.get(loader, LoaderReport()).metrics.get("samples_per_s")
    return found.median if found else 0.0


def draw_ratios(axes: Any, report: Report, sections: list[WorkloadReport], rivals: list[str], styles: Styles) -> None:
    """Bars that start at 1 on a log scale: twice as fast is as long to the right as half as fast to the left."""
    height = 0.74 / max(1, len(rivals))
    seen = [1.0]
    for number, name in enumerate(rivals):
        offset = (number - (len(rivals) - 1) / 2) * height
        for row, section in enumerate(sections):
            ratio = section.loaders[name].ratio if name in section.loaders else None
            if ratio is None or ratio.low <= 0:
                continue
            seen += [ratio.low, ratio.high]
            axes.barh(row + offset, ratio.median - 1, height * 0.9, left=1, color=styles[name].colour)
            if ratio.low != ratio.high:
                axes.plot([ratio.low, ratio.high], [row + offset] * 2, color="#333333", linewidth=1.1, marker="|")
            right = ratio.median >= 1
            axes.annotate(
                f"{ratio.median:.2g}x" if ratio.median < 10 else f"{ratio.median:.0f}x",
                (ratio.high if right else ratio.low, row + offset),
                xytext=(6 if right else -6, 0),
                textcoords="offset points",
                va="center",
                ha="left" if right else "right",
                fontsize=8.5,
                fontweight="bold" if name == report.subject else "normal",
            )
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(min(seen) / 1.7, 0.7), max(max(seen) * 1.7, 2.2))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x" if value >= 1 else f"1/{1 / value:g}")
    axes.axvline(1, color=styles[report.reference].colour if report.reference in styles else "#333333", linewidth=1.6)
    of = f", where {report.subject} was fastest" if report.is_sweep else ""
    axes.set_xlabel(f"samples/s against {report.reference}{of} (bar: median, line: all rounds; log scale)")
    axes.set_title("throughput", loc="left", fontweight="bold", fontsize=10)


def draw_trainer_cpu(
    axes: Any, report: Report, sections: list[WorkloadReport], loaders: list[str], styles: Styles
) -> None:
    """A dot a loader and section."""
    rows: list[list[float]] = [[] for _ in sections]
    for depth, name in enumerate(loaders):
        points = []
        for row, section in enumerate(sections):
            found = section.loaders[name].metrics.get("trainer_us_per_batch") if name in section.loaders else None
            if found and found.median > 0:
                points.append((found.median, row))
                rows[row].append(found.median)
        across, down = zip(*points, strict=True) if points else ((), ())
        style = styles[name]
        axes.scatter(across, down, s=52, color=style.colour, marker=style.marker, label=name, zorder=20 - depth)
    for row, values in enumerate(rows):
        if values:
            axes.plot([min(values), max(values)], [row, row], color="#cccccc", linewidth=2, zorder=2)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    seen = [value for values in rows for value in values]
    if seen:
        axes.set_xlim(*whole_decades(seen))
    axes.set_xlabel("us per batch, without reading the batch (log scale; less is better)")
    axes.set_title("CPU of the trainer", loc="left", fontweight="bold", fontsize=10)


@dataclass(frozen=True)
class Scaling:
    """The rates of a workload by number of workers, each with the best of the other settings."""

    workload: str
    unit: str
    by_loader: dict[str, list[tuple[int, float]]]

    @property
    def num_points(self) -> int:
        return max((len(points) for points in self.by_loader.values()), default=0)


def scaling(report: Report, workload: str) -> Scaling:
    sections = [each for each in report.workloads if each.name == workload and each.cache == "warm"]
    by_loader: dict[str, list[tuple[int, float]]] = {}
    for name in dict.fromkeys(name for section in sections for name in section.loaders):
        best: dict[int, float] = {}
        for section in sections:
            if rate(section, name):
                best[section.num_workers] = max(best.get(section.num_workers, 0.0), rate(section, name))
        by_loader[name] = sorted(best.items())
    return Scaling(workload, sections[0].unit if sections else "samples", by_loader)


def draw_scaling(axes: Any, found: Scaling, styles: Styles) -> None:
    """Rate over workers; both axes begin at zero."""
    for name, points in found.by_loader.items():
        if points:
            style = styles[name]
            axes.plot(*zip(*points, strict=True), color=style.colour, marker=style.marker, markersize=5, linewidth=1.6)
    workers = sorted({workers for points in found.by_loader.values() for workers, _ in points})
    axes.set_xticks(workers)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.set_xlabel("workers")
    axes.set_ylabel(f"{found.unit}/s")
    axes.set_title(f"{found.workload}: scaling", loc="left", fontsize=9.5)


def draw_waits(axes: Any, what: tuple[Report, WorkloadReport], styles: Styles) -> None:
    """The share of batches that the trainer waited for no longer than so."""
    report, section = what
    seen = []
    for name, loader in section.loaders.items():
        if loader.wait_quantiles_ms:
            waits_ms = [max(WAIT_FLOOR_MS, wait_ms) for wait_ms in loader.wait_quantiles_ms]
            seen += waits_ms
            first = name == report.subject
            axes.plot(
                waits_ms,
                [share * 100 for share in WAIT_SHARES],
                color=styles[name].colour,
                linewidth=2.2 if first else 1.5,
                linestyle="-" if first else "--" if name == report.reference else ":",
            )
    if report.step_ms:
        axes.axvline(report.step_ms, color="#999999", linewidth=0.9)
        axes.annotate(
            "step", (report.step_ms, 2), xytext=(3, 0), textcoords="offset points", fontsize=7.5, color="#777777"
        )
    axes.set_xscale("log")
    low, high = whole_decades(seen)
    axes.set_xlim(max(low, WAIT_FLOOR_MS), high)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_ylim(0, 102)
    axes.set_xlabel("wait before a batch, ms (log scale)")
    axes.set_ylabel("% of batches")
    axes.set_title(f"{section_name(section, report).replace(chr(10), ', ')}: waits", loc="left", fontsize=9.5)


def whole_decades(seen: list[float]) -> tuple[float, float]:
    """Limits of a log axis, so that at least two ticks are labelled."""
    return 10 ** math.floor(math.log10(min(seen)) - 0.05), 10 ** math.ceil(math.log10(max(seen)) + 0.05)


def short(value: float) -> str:
    """A rate for an axis: 1.5k, 20M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#000000")
MAX_GRID = 6  # sections whose waits, or workloads whose scaling, have a panel each
COLUMNS = 3  # of small panels
SMALL_HEIGHT = 2.4  # inches

Draw = Callable[[Any, Any, "Styles"], None]


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
    styles = {name: Style(COLOURS[n % len(COLOURS)], "osD^vPX*"[n % 8]) for n, name in enumerate(loaders)}
    sections = shown_sections(report)
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
    draw_ratios(left, report, sections, rivals, styles)
    draw_trainer_cpu(right, report, sections, loaders, styles)
    names = [section_name(section, report) for section in sections]
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
        points = scaling(report, name)
        if points.num_points > 1:
            found.append((draw_scaling, points))
    waits = [section for section in sections if any(each.wait_quantiles_ms for each in section.loaders.values())]
    found = found[:MAX_GRID]
    return [*found, *((draw_waits, (report, section)) for section in waits[:MAX_GRID])]
