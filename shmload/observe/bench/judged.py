"""The verdict and the recommended setting of every workload of a report, from its figures."""

from shmload.observe.bench.recommend import Recommendation, Tried, from_model, from_sweep
from shmload.observe.bench.report import Report, WorkloadReport
from shmload.observe.bench.verdict import Figures, judge


def judge_all(report: Report) -> None:
    """Writes verdicts into the sections and one recommendation a workload into the report."""
    num_cpus = report.machine["num_cpus"]
    for section in report.workloads:
        figures = figures_of(section, report.subject, num_cpus)
        if figures is None:
            continue
        verdict = judge(figures)
        section.verdict, section.verdict_text = verdict.as_dict(), verdict.sentence()
        section.notes += verdict.doubts
    for name in dict.fromkeys(section.name for section in report.workloads):
        found = recommend([section for section in report.workloads if section.name == name], report, num_cpus)
        if found is not None:
            report.recommendations[name] = found.as_dict() | {"sentence": found.sentence()}


def figures_of(section: WorkloadReport, subject: str, num_cpus: int) -> Figures | None:
    """What the verdict on the subject is worked out from; None if it did not run."""
    loader = section.loaders.get(subject)
    if loader is None or loader.error or not loader.metrics:
        return None
    metrics = {name: spread.median for name, spread in loader.metrics.items()}
    limit, rows = section.limit, metrics["samples_per_batch"]
    trainer_cpu_s = metrics["trainer_us_per_batch"] / 1e6
    return Figures(
        num_workers=section.num_workers,
        num_cpus=num_cpus,
        read_cpu_s=limit["read_cpu_us_per_sample"] * rows / 1e6,
        read_blocked_s=limit["read_blocked_us_per_sample"] * rows / 1e6,
        copy_s=limit["batch_nbytes"] / section.batch_size * rows / (limit["memcpy_mb_per_s"] * 1e6),
        worker_cpu_s=max(0.0, metrics["cpu_us_per_sample"] * rows / 1e6 - trainer_cpu_s),
        trainer_cpu_s=trainer_cpu_s,
        consumer_s=metrics["consumer_ms_per_batch"] / 1e3,
        wall_s=metrics["batch_wall_ms"] / 1e3,
        wait_share=metrics["wait_share"],
        busy_share=metrics.get("worker_busy_share"),
        others_cpu_cores=metrics["others_cpu_cores"],
    )


def recommend(sections: list[WorkloadReport], report: Report, num_cpus: int) -> Recommendation | None:
    """One workload's setting: out of the warm sections of a sweep, else by the model from the only one."""
    warm = [section for section in sections if section.cache == "warm"]
    figures = {
        number: found
        for number, section in enumerate(warm)
        if (found := figures_of(section, report.subject, num_cpus)) is not None
    }
    if not figures:
        return None
    if len(warm) == 1:
        metrics = warm[0].loaders[report.subject].metrics
        return from_model(
            figures[0],
            wait_p50_ms=metrics["wait_p50_ms"].median,
            wait_p99_ms=metrics["wait_p99_ms"].median,
            step_ms=report.step_ms,
        )
    tried = []
    for number in figures:
        section = warm[number]
        metrics = section.loaders[report.subject].metrics
        tried.append(
            Tried(
                num_workers=section.num_workers,
                prefetch_factor=section.prefetch_factor,
                batch_size=section.batch_size,
                samples_per_s=metrics["samples_per_s"].median,
                wait_ms=metrics["wait_mean_ms"].median,
            )
        )
    return from_sweep(tried, report.step_ms)
