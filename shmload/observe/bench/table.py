"""The report for a terminal: a table with a section per workload, then one plain sentence each."""

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shmload.observe.bench.report import LoaderReport, Report, WorkloadReport

WIDE = 128  # terminal columns of the full table
MEDIUM = 100

# header, metric, width of terminal from which it is shown
COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("samples\n/s", "samples_per_s", 0),
    ("MB/s", "mb_per_s", WIDE),
    ("CPU us\n/sample", "cpu_us_per_sample", 0),
    ("first\nbatch ms", "first_batch_ms", MEDIUM),
    ("wait ms\np50", "wait_p50_ms", WIDE),
    ("wait ms\np99", "wait_p99_ms", MEDIUM),
    ("trainer\nus/batch", "trainer_us_per_batch", 0),
    ("trainer\ns/GiB", "trainer_s_per_gib", WIDE),
    ("peak\nMB", "peak_pss_mb", MEDIUM),
)


def show(report: Report, console: Console) -> None:
    """Prints the table, the sentences, what is missing and what went wrong."""
    console.print(table(report, console.width))
    for workload in report.workloads:
        console.print(f"[bold]{escape(workload.name)}[/]: {escape(sentence(workload, report))}", highlight=False)
        for note in workload.notes:
            console.print(f"  note: {escape(note)}", highlight=False)
    for note in report.notes:
        console.print(f"[yellow]{escape(note)}[/]", highlight=False)
    if report.quick:
        console.print("[yellow]--quick shows that it works; its figures say nothing about speed[/]")
    for text in report.failures:
        console.print(f"[bold red]FAILED {escape(text)}[/]", highlight=False)
    for details in {loader.details for workload in report.workloads for loader in workload.loaders.values()} - {""}:
        console.print(details.strip(), markup=False, highlight=False, style="dim")
    for text in report.mismatches:
        console.print(f"[bold red]DIFFERENT BYTES {escape(text)}[/]", highlight=False)


def table(report: Report, width: int) -> Table:
    """One row a loader, a section a workload; the subject's ratio stands out."""
    machine = report.machine
    made = Table(
        title=(
            f"{report.num_workers} workers ({report.start_method}) on {machine['num_cpus']} cores, "
            f"Python {machine['python']}, torch {machine['torch']}; medians over rounds, \\[lowest-highest]"
        ),
        caption="trainer: CPU of the consuming process without reading the batch; peak: memory of all processes (PSS)",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    made.add_column("workload", no_wrap=True)
    made.add_column("loader", no_wrap=True)
    made.add_column(f"x {report.reference}\nsamples/s", justify="right", no_wrap=True)
    shown = [column for column in COLUMNS if width >= column[2]]
    for header, _, _ in shown:
        made.add_column(header, justify="right", no_wrap=True)
    for workload in report.workloads:
        for name, loader in workload.loaders.items():
            first = name == next(iter(workload.loaders))
            cells = [number(loader, metric) for _, metric, _ in shown]
            if loader.error:
                cells = ["failed", *[""] * (len(shown) - 1)]
            made.add_row(workload.name if first else "", name, ratio_cell(name, loader, report), *cells)
        made.add_section()
    return made


def ratio_cell(name: str, loader: LoaderReport, report: Report) -> str:
    if name == report.reference or loader.ratio is None:
        return "1" if name == report.reference and loader.rounds else ""
    ratio = loader.ratio
    text = f"{ratio.median:.2f}x"
    if ratio.low != ratio.high:
        text += f" \\[{ratio.low:.2f}-{ratio.high:.2f}]"
    if name != report.subject:
        return text
    return f"[bold {'green' if ratio.median >= 1 else 'red'}]{text}[/]"


def number(loader: LoaderReport, metric: str) -> str:
    spread = loader.metrics.get(metric)
    return figure(spread.median) if spread else ""


def figure(value: float) -> str:
    """About three digits, thousands separated."""
    if value != value:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def sentence(workload: WorkloadReport, report: Report) -> str:
    """What the ratio means on this workload, and how far the limit is."""
    subject = workload.loaders[report.subject]
    rate = workload.limit["fill_samples_per_s"]
    unit = workload.unit
    limit = (
        f"one core with no loader at all puts {figure(rate)} {unit}/s into a batch "
        f"and copies {workload.limit['memcpy_mb_per_s'] / 1e3:.1f} GB/s"
    )
    if subject.error or "samples_per_s" not in subject.metrics:
        return f"{report.subject} did not run; {limit}."
    delivered = subject.metrics["samples_per_s"].median
    against = ""
    if report.subject != report.reference and subject.ratio and subject.cpu_ratio:
        against = (
            f" {subject.ratio.median:.2f}x the {unit}/s of {report.reference}, "
            f"at {subject.cpu_ratio.median:.2f}x its CPU per sample"
        )
    checked = " and with the same bytes" if subject.same_bytes else ""
    return (
        f"{report.subject} delivers{against or f' {figure(delivered)} {unit}/s'}{checked}; {workload.meaning}. "
        f"The limit: {limit}; {report.subject} reaches {delivered / rate:.0%} of that core."
    )
