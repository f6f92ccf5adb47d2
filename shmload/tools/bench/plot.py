"""The plot: throughput, CPU of the trainer, rates over workers where a sweep has several, and how long batches were waited for."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shmload.tools.bench.report import WAIT_SHARES, LoaderReport, Report, WorkloadReport

WAIT_FLOOR_MS = 0.01  # a wait that is none
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#000000")
MARKERS = "osD^vPX*"
MAX_GRID = 6  # sections whose waits, or workloads whose scaling, have a panel each
COLUMNS = 3  # of small panels
SMALL_HEIGHT = 2.4  # inches

Styles = dict[str, dict[str, Any]]  # by loader: colour and marker, in every panel
Draw = Callable[[Any, Styles], None]


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
    styles: Styles = {name: {"color": COLOURS[n % 8], "marker": MARKERS[n % 8]} for n, name in enumerate(loaders)}
    sections = shown_sections(report)
    rivals = [name for name in loaders if name != report.reference]
    small = small_panels(report, sections)
    heights = [1.0 + len(sections) * (0.3 + 0.24 * max(1, len(rivals)))] + [SMALL_HEIGHT] * -(-len(small) // COLUMNS)
    figure = Figure(figsize=(11, 1.0 + sum(heights)), dpi=140)
    figure.set_layout_engine("constrained", hspace=0.08)
    grid = figure.add_gridspec(len(heights), 6, height_ratios=heights)
    left = figure.add_subplot(grid[0, :3])
    right = figure.add_subplot(grid[0, 3:], sharey=left)
    draw_ratios(left, report, sections, rivals, styles)
    draw_trainer_cpu(right, sections, styles)
    left.set_yticks(range(len(sections)), [section_name(section, report) for section in sections])
    left.set_ylim(len(sections) - 0.4, -0.6)
    for axes in (left, right):
        axes.tick_params(left=False, labelleft=axes is left)
        axes.spines["left"].set_visible(False)
    for number, draw in enumerate(small):
        row, column = divmod(number, COLUMNS)
        draw(figure.add_subplot(grid[1 + row, 2 * column : 2 * column + 2]), styles)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x" if axes in (left, right) else "both", color="#e6e6e6", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.xaxis.label.set_fontsize(8.5)
        axes.yaxis.label.set_fontsize(8.5)
        axes.tick_params(labelsize=10 if axes is left else 8.5)
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


def rate(section: WorkloadReport, loader: str, metric: str = "samples_per_s") -> float:
    found = section.loaders.get(loader, LoaderReport()).metrics.get(metric)
    return found.median if found else 0.0


def draw_ratios(axes: Any, report: Report, sections: list[WorkloadReport], rivals: list[str], styles: Styles) -> None:
    """Bars that start at 1 on a log scale: twice as fast is as long to the right as half as fast to the left."""
    height = 0.74 / max(1, len(rivals))
    seen = [1.0]
    for number, name in enumerate(rivals):
        for row, section in enumerate(sections):
            ratio = section.loaders[name].ratio if name in section.loaders else None
            if ratio is None or ratio.low <= 0:
                continue
            seen += [ratio.low, ratio.high]
            y = row + (number - (len(rivals) - 1) / 2) * height
            axes.barh(y, ratio.median - 1, height * 0.9, left=1, color=styles[name]["color"])
            if ratio.low != ratio.high:
                axes.plot([ratio.low, ratio.high], [y] * 2, color="#333333", linewidth=1.1, marker="|")
            right = ratio.median >= 1
            axes.annotate(
                f"{ratio.median:.2g}x" if ratio.median < 10 else f"{ratio.median:.0f}x",
                (ratio.high if right else ratio.low, y),
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
    axes.axvline(1, color=styles.get(report.reference, {}).get("color", "#333333"), linewidth=1.6)
    of = f", where {report.subject} was fastest" if report.is_sweep else ""
    axes.set_xlabel(f"samples/s against {report.reference}{of} (bar: median, line: all rounds; log scale)")
    axes.set_title("throughput", loc="left", fontweight="bold", fontsize=10)


def draw_trainer_cpu(axes: Any, sections: list[WorkloadReport], styles: Styles) -> None:
    """A dot a loader and section."""
    seen = []
    for row, section in enumerate(sections):
        values = [value for name in styles if (value := rate(section, name, "trainer_us_per_batch")) > 0]
        seen += values
        if values:
            axes.plot([min(values), max(values)], [row, row], color="#cccccc", linewidth=2, zorder=2)
    for depth, (name, style) in enumerate(styles.items()):
        dots = [(value, row) for row, each in enumerate(sections) if (value := rate(each, name, "trainer_us_per_batch")) > 0]
        across, down = zip(*dots, strict=True) if dots else ((), ())
        axes.scatter(across, down, s=52, label=name, zorder=20 - depth, **style)
    log_x(axes, seen)
    axes.set_xlabel("us per batch, without reading the batch (log scale; less is better)")
    axes.set_title("CPU of the trainer", loc="left", fontweight="bold", fontsize=10)


def log_x(axes: Any, seen: Sequence[float], least: float = 0.0) -> None:
    """A log scale of whole decades, so that at least two ticks are labelled."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    if seen:
        low, high = math.floor(math.log10(min(seen)) - 0.05), math.ceil(math.log10(max(seen)) + 0.05)
        axes.set_xlim(max(10**low, least), 10**high)


def small_panels(report: Report, sections: list[WorkloadReport]) -> list[Draw]:
    """The panels below the bars: scaling where several numbers of workers ran, then waits of each section."""
    scaling = []
    for name in dict.fromkeys(section.name for section in report.workloads):
        warm = [section for section in report.workloads if section.name == name and section.cache == "warm"]
        if len({section.num_workers for section in warm}) > 1:
            scaling.append(scaling_panel(warm))
    waits = [section for section in sections if any(each.wait_quantiles_ms for each in section.loaders.values())]
    return [*scaling[:MAX_GRID], *(waits_panel(report, section) for section in waits[:MAX_GRID])]


def scaling_panel(sections: list[WorkloadReport]) -> Draw:
    """Rate over workers, each with the best of the other settings; both axes begin at zero."""

    def draw(axes: Any, styles: Styles) -> None:
        workers = sorted({section.num_workers for section in sections})
        for name, style in styles.items():
            rates = [max(rate(each, name) for each in sections if each.num_workers == count) for count in workers]
            points = [(count, found) for count, found in zip(workers, rates, strict=True) if found]
            if points:
                axes.plot(*zip(*points, strict=True), markersize=5, linewidth=1.6, **style)
        axes.set_xticks(workers)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: short(value))
        axes.set_xlabel("workers")
        axes.set_ylabel(f"{sections[0].unit}/s")
        axes.set_title(f"{sections[0].name}: scaling", loc="left", fontsize=9.5)

    return draw


def waits_panel(report: Report, section: WorkloadReport) -> Draw:
    """The share of batches that the trainer waited for no longer than so."""

    def draw(axes: Any, styles: Styles) -> None:
        seen = []
        for name, loader in section.loaders.items():
            waits_ms = [max(WAIT_FLOOR_MS, wait_ms) for wait_ms in loader.wait_quantiles_ms]
            if waits_ms:
                seen += waits_ms
                line = "-" if name == report.subject else "--" if name == report.reference else ":"
                shares = [share * 100 for share in WAIT_SHARES]
                axes.plot(waits_ms, shares, color=styles[name]["color"], linewidth=1.8, linestyle=line)
        log_x(axes, seen, WAIT_FLOOR_MS)
        if report.step_ms:
            axes.axvline(report.step_ms, color="#999999", linewidth=0.9)
            axes.text(report.step_ms, 2, " step", fontsize=7.5, color="#777777")
        axes.set_ylim(0, 102)
        axes.set_xlabel("wait before a batch, ms (log scale)")
        axes.set_ylabel("% of batches")
        axes.set_title(f"{section_name(section, report).replace(chr(10), ', ')}: waits", loc="left", fontsize=9.5)

    return draw


def short(value: float) -> str:
    """A rate for an axis: 1.5k, 20M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
