"""The report for a terminal: a table with a section per workload and setting, then what it means in plain sentences."""

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shmload.tools.bench.report import LoaderReport, Report, WorkloadReport, comparison, figure, sentence

WIDE = 128  # terminal columns of the full table
MEDIUM = 100
SETTING_WIDTH, STEP_WIDTH = 12, 7  # of columns that not every report has

# header, metric, width of terminal from which it is shown
COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("samples\n/s", "samples_per_s", 0),
    ("step\nkept %", "step_efficiency", 0),
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
        if not report.is_sweep:
            console.print(f"[bold]{escape(workload.label)}[/]: {escape(sentence(workload, report))}", highlight=False)
            if compared := comparison(workload, report):
                console.print(f"  {escape(compared)}.", highlight=False)
            if workload.verdict:
                console.print(f"  [bold]verdict[/]: {escape(workload.verdict_text)}.", highlight=False)
            if workload.cache == "warm":
                show_recommendation(workload.name, report, console)
        for note in workload.notes:
            console.print(
                f"  note: {escape(workload_setting(workload) if report.is_sweep else '')}{escape(note)}",
                highlight=False,
            )
    if report.is_sweep:
        for name in dict.fromkeys(workload.name for workload in report.workloads):
            show_sweep(name, report, console)
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


def workload_setting(workload: WorkloadReport) -> str:
    return f"{workload.label}, {workload.setting}: "


def show_recommendation(name: str, report: Report, console: Console) -> None:
    found = report.recommendations.get(name)
    if found:
        console.print(f"  [bold]recommended[/]: {escape(found['sentence'])}.", highlight=False)


def show_sweep(name: str, report: Report, console: Console) -> None:
    """One workload of a sweep: the verdict where it is least bound by its setting, and what is recommended."""
    ran = [each for each in report.workloads if each.name == name and each.verdict and each.cache == "warm"]
    if not ran:
        return
    best = max(ran, key=lambda each: each.loaders[report.subject].metrics["samples_per_s"].median)
    console.print(
        f"[bold]{escape(name)}[/]: {escape(report.subject)} is fastest with {escape(best.setting)}", highlight=False
    )
    console.print(f"  [bold]verdict there[/]: {escape(best.verdict_text)}.", highlight=False)
    show_recommendation(name, report, console)


def table(report: Report, width: int) -> Table:
    """One row a loader, a section a workload and setting; the subject's ratio stands out."""
    machine = report.machine
    workers = "" if report.is_sweep or report.num_workers is None else f"{report.num_workers} workers "
    step = f", a step of {report.step_ms:g} ms after each batch" if report.step_ms else ""
    made = Table(
        title=(
            f"{workers}({report.start_method}) on {machine['num_cpus']} cores, "
            f"Python {machine['python']}, torch {machine['torch']}; medians over rounds, \\[lowest-highest]{step}"
        ),
        caption="trainer: CPU of the consuming process without reading the batch; peak: memory of all processes (PSS)",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    made.add_column("workload", no_wrap=True)
    if report.is_sweep:
        made.add_column("setting", no_wrap=True)
    made.add_column("loader", no_wrap=True)
    made.add_column(f"x {report.reference}\nsamples/s", justify="right", no_wrap=True)
    width -= SETTING_WIDTH * report.is_sweep + STEP_WIDTH * bool(report.step_ms)
    measured = {name for workload in report.workloads for each in workload.loaders.values() for name in each.metrics}
    shown = [column for column in COLUMNS if width >= column[2] and column[1] in measured | {"samples_per_s"}]
    for header, _, _ in shown:
        made.add_column(header, justify="right", no_wrap=True)
    for workload in report.workloads:
        for name, loader in workload.loaders.items():
            first = name == next(iter(workload.loaders))
            cells = [number(loader, metric) for _, metric, _ in shown]
            if loader.error:
                cells = ["failed", *[""] * (len(shown) - 1)]
            where = [workload.label, workload.setting] if report.is_sweep else [workload.label]
            made.add_row(*(where if first else [""] * len(where)), name, ratio_cell(name, loader, report), *cells)
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
    if spread is None:
        return ""
    return figure(spread.median * 100 if metric == "step_efficiency" else spread.median)
