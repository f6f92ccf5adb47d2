"""The table and the sentences that `shmload bench` prints."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shmload.tools.bench.report import LoaderReport, Report, WorkloadReport
from shmload.tools.bench.workload_table import described
from shmload.tools.counted import counted

WIDE = 128  # terminal columns of the full table
# header, metric, minimum width of the terminal that shows it
COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("samples\n/s", "samples_per_s", 0),
    ("step\nkept %", "step_efficiency", 0),
    ("MB/s", "mb_per_s", WIDE),
    ("CPU us\n/sample", "cpu_us_per_sample", 0),
    ("first\nbatch ms", "first_batch_ms", 100),
    ("wait ms\np50", "wait_p50_ms", WIDE),
    ("wait ms\np99", "wait_p99_ms", 100),
    ("trainer\nus/batch", "trainer_us_per_batch", 0),
    ("trainer\ns/GiB", "trainer_s_per_gib", WIDE),
    ("peak\nMB", "peak_pss_mb", 100),
)

FOOTNOTES = (  # text, and the metrics that it explains
    ("trainer: CPU of the consuming process without reading the batch", "trainer_us_per_batch", "trainer_s_per_gib"),
    ("peak: memory of all processes (PSS)", "peak_pss_mb"),
)


def show(report: Report, console: Console) -> None:
    """Print the table, the sentences, and what is missing or has failed."""

    def say(text: str, head: str = "", style: str = "") -> None:
        start = f"[bold]{escape(head)}[/]: " if head else ""
        console.print(start + escape(text), highlight=False, style=style or None)

    console.print(table(report, console.width))
    for label in dict.fromkeys(section.name for section in report.workloads):
        sections = [section for section in report.workloads if section.name == label]
        # for a sweep, the sentences describe the setting in which the subject was fastest
        best = max(sections, key=lambda section: rate(section, report.subject))
        say(sentence(best, report), label)
        if text := measured(best):
            say(f"{text}.", "  measured")
        if best.verdict:
            say(f"{best.verdict_text}.", "  verdict")
        if best.name in report.recommendations:
            say(f"{report.recommendations[best.name]['sentence']}.", "  recommended")
        for section in sections:
            for note in section.notes:
                say(f"  note: {f'{section.setting}: ' if report.is_sweep else ''}{note}")
    for note in report.notes:
        say(note, style="yellow")
    if report.quick:
        say("--quick shows that it works; its figures say nothing about speed", style="yellow")
    for details in {loader.details for workload in report.workloads for loader in workload.loaders.values()} - {""}:
        say(details.strip(), style="dim")
    for text in report.failures:
        say(f"FAILED {text}", style="bold red")
    for text in report.mismatches:
        say(f"DIFFERENT BYTES {text}", style="bold red")


def rate(section: WorkloadReport, loader: str) -> float:
    """Return samples per second; 0 if the loader did not run."""
    found = section.loaders[loader].metrics.get("samples_per_s")
    return found.median if found else 0.0


def table(report: Report, width: int) -> Table:
    """Return a table with one row per loader, and one section per workload and setting; the subject's ratio is highlighted."""
    machine = report.machine
    workers = "" if report.is_sweep or report.num_workers is None else f"{counted(report.num_workers, 'worker')} "
    width -= 12 * report.is_sweep + 7 * bool(report.step_ms)  # columns that only some reports have
    known = {name for workload in report.workloads for each in workload.loaders.values() for name in each.metrics}
    present = [column for column in COLUMNS if column[1] in known | {"samples_per_s"}]
    shown = [column for column in present if width >= column[2]]
    caption = [text for text, *metrics in FOOTNOTES if any(column[1] in metrics for column in shown)]
    if hidden := [header.replace("\n", " ") for header, _, least in present if width < least]:
        caption.append(f"the terminal is too narrow for {', '.join(hidden)}: --json has them")
    step = f", a step of {report.step_ms:g} ms after each batch" if report.step_ms else ""
    made = Table(
        title=(
            f"{workers}({report.start_method}) on {machine['num_cpus']} cores, "
            f"Python {machine['python']}, torch {machine['torch']}; medians over rounds, \\[lowest-highest]{step}"
        ),
        caption="; ".join(caption),
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    for header in ("workload", "setting", "loader") if report.is_sweep else ("workload", "loader"):
        made.add_column(header, no_wrap=True)
    for header in (f"x {report.reference}\nsamples/s", *(header for header, _, _ in shown)):
        made.add_column(header, justify="right", no_wrap=True)
    for workload in report.workloads:
        where = [workload.name, workload.setting] if report.is_sweep else [workload.name]
        for name, loader in workload.loaders.items():
            cells = ["failed"] if loader.error else [number(loader, metric) for _, metric, _ in shown]
            # of a name such as benchmarks.contestants.grain:open_loader, the part that differs: grain:open_loader
            made.add_row(*where, name.rpartition(".")[2], ratio_cell(name, loader, report), *cells)
            where = [""] * len(where)
        made.add_section()
    return made


def ratio_cell(name: str, loader: LoaderReport, report: Report) -> str:
    ratio = loader.ratio
    if name == report.reference or ratio is None:
        return "1" if name == report.reference and loader.rounds else ""
    text = f"{ratio.median:.2f}x"
    if ratio.low != ratio.high:
        text += f" \\[{ratio.low:.2f}-{ratio.high:.2f}]"
    if name != report.subject:
        return text
    return f"[bold {'green' if ratio.median >= 1 else 'red'}]{text}[/]"


def number(loader: LoaderReport, metric: str) -> str:
    spread = loader.metrics.get(metric)
    if spread is None:
        return ""
    return figure(spread.median * 100 if metric == "step_efficiency" else spread.median)


def figure(value: float) -> str:
    """Return a number with about three digits, thousands separated."""
    if value != value:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def sentence(section: WorkloadReport, report: Report) -> str:
    """Return the subject's rate on this workload, and what one core can do, as sentences."""
    subject = section.loaders[report.subject]
    core = f"One core, without a loader, puts {figure(section.limit['fill_samples_per_s'])} samples/s into a batch"
    delivered = rate(section, report.subject)
    if subject.error or not delivered:
        return f"{report.subject} did not run. {core}."
    beside = f", {subject.ratio.median:.2f}x {report.reference}" if subject.ratio and report.subject != report.reference else ""
    checked = " and with the same bytes" if subject.same_bytes else ""
    where = f" with {section.setting}, where it is fastest" if report.is_sweep else ""
    return f"{report.subject} delivers {figure(delivered)} samples/s{beside}{checked}{where}. {core}."


def measured(section: WorkloadReport) -> str:
    """Return what was measured: the samples, the batch size, and each loader's batches and seconds in a round; empty if nothing."""
    ran = {name: loader.metrics for name, loader in section.loaders.items() if loader.metrics}
    if not ran:
        return ""
    nbytes = max(metrics["mb_per_s"].median * 1e6 / metrics["samples_per_s"].median for metrics in ran.values())
    counts = [
        f"{name} {metrics['num_batches'].median:,.0f} in {metrics['measured_s'].median:.1f} s" for name, metrics in ran.items()
    ]
    return f"{described(section.title, nbytes, section.batch_size)}; in a round: {', '.join(counts)}"
