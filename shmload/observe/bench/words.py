"""What the figures of a section mean, in plain sentences."""

from shmload.observe.bench.report import LoaderReport, Report, WorkloadReport


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
    step = step_sentence(subject, workload.loaders.get(report.reference), report)
    return (
        f"{report.subject} delivers{against or f' {figure(delivered)} {unit}/s'}{checked}; {workload.meaning}. "
        f"{step}The limit: {limit}; {report.subject} reaches {delivered / rate:.0%} of that core."
    )


def step_sentence(subject: LoaderReport, reference: LoaderReport | None, report: Report) -> str:
    """How much of the simulated step was kept, and what the trainer waited for each; empty without a step."""
    kept = subject.metrics.get("step_efficiency")
    if kept is None:
        return ""
    other = reference.metrics.get("step_efficiency") if reference and reference is not subject else None
    beside = f" ({report.reference} {other.median:.0%})" if other else ""
    p50, p99 = (subject.metrics[f"wait_{name}_ms"].median for name in ("p50", "p99"))
    return (
        f"Of a step of {report.step_ms:g} ms it keeps {kept.median:.0%}{beside}, with a wait of {figure(p50)} ms (p50) and "
        f"{figure(p99)} ms (p99) before each. "
    )


def comparison(workload: WorkloadReport, report: Report) -> str:
    """Which loaders' bytes were compared with the reference's, and how; empty where the table's sentence says it all."""
    ways: dict[str, list[str]] = {}
    for name, loader in workload.loaders.items():
        if loader.same_bytes and loader.compared:
            ways.setdefault(loader.compared, []).append(name)
    if sum(map(len, ways.values())) < 2:
        return ""
    return f"same bytes as {report.reference}: " + "; ".join(
        f"{', '.join(names)} ({way})" for way, names in ways.items()
    )
