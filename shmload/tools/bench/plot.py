"""Plot the main figures of each loader as bars with their values."""

from pathlib import Path

from shmload.tools.bench.report import LoaderReport, Report
from shmload.tools.counted import counted

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#000000")
# heading, metric, its factor to the heading's unit, whether the axis is logarithmic
PANELS = (
    ("samples per second (log scale, more is better)", "samples_per_s", 1.0, True),
    ("CPU of the trainer per batch, us (log scale, less is better)", "trainer_us_per_batch", 1.0, True),
    ("time to the first batch, s (less is better)", "first_batch_ms", 1e-3, False),
    ("memory of all processes, MB (less is better)", "peak_pss_mb", 1.0, False),
)


def save(report: Report, path: Path) -> None:
    """Write a PNG: a panel for each of PANELS, in it a row for each workload and setting, and in each row a bar for each loader."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    labels = [f"{each.name}\n{each.setting}" if report.is_sweep else each.name for each in report.workloads]
    loaders = list(dict.fromkeys(name for section in report.workloads for name in section.loaders))
    thickness = 0.8 / len(loaders)
    height = 1.6 + len(PANELS) / 2 * (0.6 + len(labels) * (0.15 + 0.2 * len(loaders)))
    figure = Figure(figsize=(9.5, height), dpi=140, layout="constrained", facecolor="white")
    for axes, (heading, metric, factor, is_log) in zip(figure.subplots(2, 2, sharey=True).flat, PANELS, strict=True):
        for number, name in enumerate(loaders):
            found = [section.loaders.get(name, LoaderReport()) for section in report.workloads]
            spreads = [loader.metrics.get(metric) for loader in found]
            values = [0.0 if spread is None else max(spread.median, 0.0) * factor for spread in spreads]
            texts = [f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in values]
            if metric == "samples_per_s" and name != report.reference:
                texts = [
                    f"{text}  ({loader.ratio.median:.2g}x)" if loader.ratio else text
                    for text, loader in zip(texts, found, strict=True)
                ]
            places = [row + (number - (len(loaders) - 1) / 2) * thickness for row in range(len(labels))]
            bars = axes.barh(places, values, height=0.9 * thickness, color=COLORS[number % 8], label=name)
            axes.bar_label(bars, [text if value else "" for text, value in zip(texts, values, strict=True)], padding=3, fontsize=9)
        axes.set_title(heading, fontsize=10.5, loc="left")
        if is_log:
            axes.set_xscale("log")
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.margins(x=0.35)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(left=False, bottom=False, labelbottom=False)  # the bars have their values
        axes.tick_params(which="minor", bottom=False)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside upper right", ncols=min(len(loaders), 7), frameon=False, fontsize=10
    )
    figure.suptitle(title(report), x=0.01, ha="left", fontsize=10.5)
    figure.savefig(path, format="png")


def title(report: Report) -> str:
    """Return what ran, on which machine, and when."""
    machine = report.machine
    quick = ", --quick: says nothing about speed" if report.quick else ""
    workers = "sweep" if report.is_sweep or report.num_workers is None else counted(report.num_workers, "worker")
    step = f", a step of {report.step_ms:g} ms" if report.step_ms else ""
    model = machine["cpu_model"] or machine["architecture"]
    where = f"{machine['num_cpus']} cores of {model}, Linux {machine['kernel'].split('-')[0]}, torch {machine['torch']}"
    return f"shmload bench: {workers}{step}{quick}\n{where}; {report.started}"
