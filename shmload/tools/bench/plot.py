"""The plot: throughput relative to the reference, and the trainer's cost of a batch."""

from pathlib import Path

from shmload.tools.bench.report import LoaderReport, Report

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#000000")


def save(report: Report, path: Path) -> None:
    """Write a PNG: two panels of bars, with one row per workload and setting, and one bar per loader."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    labels = [f"{each.name}\n{each.setting}" if report.is_sweep else each.name for each in report.workloads]
    loaders = list(dict.fromkeys(name for section in report.workloads for name in section.loaders))
    height = 0.8 / len(loaders)
    figure = Figure(figsize=(11, 1.6 + len(report.workloads) * (0.3 + 0.24 * len(loaders))), dpi=140, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    others = [name for name in loaders if name != report.reference]  # the reference has no bar on the left
    for number, name in enumerate(loaders):
        for row, section in enumerate(report.workloads):
            bar = {"height": 0.9 * height, "color": COLORS[number % 8]}
            loader = section.loaders.get(name, LoaderReport())
            if name in others and (ratio := loader.ratio):
                # starting at 1: on a log scale twice as fast extends as far to the right as half as fast to the left
                error = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
                y = row + (others.index(name) - (len(others) - 1) / 2) * height
                left.bar_label(left.barh(y, ratio.median - 1, left=1, xerr=error, **bar), [f"{ratio.median:.2g}x"], padding=3)
            if found := loader.metrics.get("trainer_us_per_batch"):
                right.barh(row + (number - (len(loaders) - 1) / 2) * height, max(found.median, 0), **bar)
        right.barh([0], [0], color=COLORS[number % 8], label=name)  # for the legend
    left.axvline(1, color="#333333")
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter(lambda value, _: f"{value:g}x" if value >= 1 else f"1/{1 / value:g}")
    left.set_yticks(range(len(report.workloads)), labels)
    left.set_ylim(len(report.workloads) - 0.4, -0.6)
    left.margins(x=0.2)
    left.set_xlabel(f"samples/s against {report.reference} (bar: median, line: all rounds; log scale)")
    right.set_xscale("log")
    right.set_xlabel("CPU of the trainer for a batch, us (log scale; less is better)")
    for axes in (left, right):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
        axes.grid(axis="x", color="#e6e6e6")
        axes.set_axisbelow(True)
    figure.legend(loc="outside upper right", ncols=min(len(loaders), 7), frameon=False, fontsize=9)
    figure.suptitle(title(report), x=0.01, ha="left", fontsize=10.5)
    figure.savefig(path, format="png")


def title(report: Report) -> str:
    """Return what ran, on which machine, and when."""
    machine = report.machine
    quick = ", --quick: says nothing about speed" if report.quick else ""
    workers = "sweep" if report.is_sweep or report.num_workers is None else f"{report.num_workers} workers"
    step = f", a step of {report.step_ms:g} ms" if report.step_ms else ""
    model = machine["cpu_model"] or machine["architecture"]
    where = f"{machine['num_cpus']} cores of {model}, Linux {machine['kernel'].split('-')[0]}, torch {machine['torch']}"
    return f"shmload bench: {workers}{step}{quick}\n{where}; {report.started}"
