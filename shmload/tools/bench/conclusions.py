"""Add a verdict to each loader of a report, and a recommendation to the report."""

from __future__ import annotations

import math
from dataclasses import asdict

from shmload.tools.bench.bench_job import MIN_BATCHES
from shmload.tools.bench.recommendation import MeasuredSetting, Recommendation, from_model, from_sweep
from shmload.tools.bench.report import Report, WorkloadReport
from shmload.tools.bench.verdict import Figures, judged


def judge_all(report: Report) -> None:
    """Write verdicts into the sections, and one recommendation per workload into the report."""
    num_cpus = report.machine["num_cpus"]
    for section in report.workloads:
        if not report.quick and (text := too_few(section)):
            section.has_too_few_batches = True
            section.notes.append(text)
            continue
        figures = figures_of(section, report.subject, num_cpus)
        if figures is None:
            continue
        verdict = judged(figures)
        section.verdict = asdict(verdict)
        section.verdict_text = verdict.sentence(
            decodes_in_place=bool(section.limit["decodes_in_place"]), has_collate_fn=bool(section.limit["has_collate_fn"])
        )
    for name in dict.fromkeys(section.name for section in report.workloads):
        found = recommend([section for section in report.workloads if section.name == name], report, num_cpus)
        if found is not None:
            report.recommendations[name] = asdict(found) | {"sentence": found.sentence()}


def too_few(section: WorkloadReport) -> str:
    """Return a line that says which loader delivered too few batches to judge a workload; empty if none did."""
    for name, loader in section.loaders.items():
        if loader.metrics and (num_batches := loader.metrics["num_batches"].low) < MIN_BATCHES:
            measured_s = loader.metrics["measured_s"].high
            needed_s = math.ceil(1.25 * MIN_BATCHES * measured_s / num_batches)
            return (
                f"too few batches to judge: {name} delivered {num_batches:.0f} in {measured_s:.1f} s, and {MIN_BATCHES} are "
                f"needed; use --seconds {needed_s} or a smaller --batch-size"
            )
    return ""


def figures_of(section: WorkloadReport, subject: str, num_cpus: int) -> Figures | None:
    """Return the measurements for the verdict on the subject; None if it did not run."""
    loader = section.loaders.get(subject)
    if loader is None or loader.error or not loader.metrics:
        return None
    metrics = {name: spread.median for name, spread in loader.metrics.items()}
    limit, rows = section.limit, metrics["samples_per_batch"]
    trainer_cpu_s = metrics["trainer_us_per_batch"] / 1e6
    return Figures(
        num_workers=section.num_workers,
        are_threads=subject == "shmload-threads",
        num_cpus=num_cpus,
        read_cpu_s=limit["read_cpu_us_per_sample"] * rows / 1e6,
        read_blocked_s=limit["read_blocked_us_per_sample"] * rows / 1e6,
        copy_s=limit["batch_nbytes"] / section.batch_size * rows / (limit["memcpy_mb_per_s"] * 1e6),
        worker_cpu_s=max(0.0, metrics["cpu_us_per_sample"] * rows / 1e6 - trainer_cpu_s),
        trainer_cpu_s=trainer_cpu_s,
        trainer_s=metrics["trainer_own_ms_per_batch"] / 1e3,
        wall_s=metrics["batch_wall_ms"] / 1e3,
        wait_share=metrics["wait_share"],
    )


def recommend(sections: list[WorkloadReport], report: Report, num_cpus: int) -> Recommendation | None:
    """Return a workload's recommended setting: from the sections of a sweep, else by the model from the only section."""
    if any(section.has_too_few_batches for section in sections):
        return None
    ran = [(section, found) for section in sections if (found := figures_of(section, report.subject, num_cpus))]
    if not ran:
        return None
    if len(sections) == 1:
        num_samples, batch_size = ran[0][0].limit["num_samples"], ran[0][0].batch_size
        # in seed mode, several workers make parts of one batch
        is_shared = report.subject == "shmload-seed" or not num_samples
        epoch_batches = None if is_shared else math.ceil(num_samples / batch_size)
        return from_model(ran[0][1], step_ms=report.step_ms, epoch_batches=epoch_batches)
    tried = []
    for section, _ in ran:
        metrics = section.loaders[report.subject].metrics
        rate, wait_ms = metrics["samples_per_s"].median, metrics["wait_mean_ms"].median
        tried.append(MeasuredSetting(section.num_workers, section.prefetch_factor, section.batch_size, rate, wait_ms))
    return from_sweep(tried, report.step_ms)
