"""What the terminal says: sections, steps, sweeps, comparisons; and which panels the plot has."""

import io

import pytest
from rich.console import Console

from shmload.tools.bench import plot
from shmload.tools.bench.report import WAIT_SHARES, LoaderReport, Report, WorkloadReport, show
from shmload.tools.bench.rounds import BenchJob, TaskOutcome
from shmload.tools.bench.verdict import judge_all

LIMIT = {
    "fill_samples_per_s": 1000.0,
    "read_cpu_us_per_sample": 900.0,
    "read_blocked_us_per_sample": 0.0,
    "batch_nbytes": 640.0,
    "memcpy_mb_per_s": 8000.0,
}


def values(rate, **more):
    return {
        "samples_per_batch": 64.0,
        "samples_per_s": rate,
        "mb_per_s": 1.0,
        "batch_wall_ms": 64e3 / rate,
        "cpu_us_per_sample": 950.0,
        "wait_p50_ms": 1.0,
        "wait_p99_ms": 2.0,
        "wait_mean_ms": 1.2,
        "wait_share": 0.9,
        "trainer_us_per_batch": 100.0,
        "trainer_s_per_gib": 0.1,
        "consumer_ms_per_batch": 0.2,
        "others_cpu_cores": 0.0,
        **more,
    }


def section(rates, workers=2, step=False, **known):
    loaders = {name: LoaderReport() for name in rates}
    for name, rate in rates.items():
        more = {"step_efficiency": 0.5} if step else {}
        loaders[name].add(TaskOutcome(JOB, values(rate, **more), wait_quantiles_ms=[1.0] * len(WAIT_SHARES)))
        loaders[name].digests = ["a"]
    made = WorkloadReport("photos", "title", "photos", "it is so", 64, LIMIT, "read_into", loaders, num_workers=workers)
    for name, value in known.items():
        setattr(made, name, value)
    for loader in loaders.values():
        loader.summarise(loaders["torch"])
    return made


JOB = BenchJob(workload="photos", dataset="m:n", loader="", batch_size=64, num_workers=2)


@pytest.fixture
def report():
    machine = {"num_cpus": 2, "python": "3", "torch": "2", "kernel": "6-x", "architecture": "x86_64", "cpu_model": None}
    return Report("shmload", "torch", 2, False, "fork", machine)


def said(report, width=160):
    judge_all(report)
    text = io.StringIO()
    show(report, Console(file=text, width=width))
    return " ".join(text.getvalue().split())


def test_a_section_has_its_verdict_and_what_is_recommended(report):
    report.workloads = [section({"shmload": 2000.0, "torch": 1000.0})]
    text = said(report)
    assert "2.00x" in text
    assert "verdict: decode bound: workers compute" in text
    assert "recommended: num_workers=2, prefetch_factor=2 (without a training step" in text
    assert "step kept" not in text


def test_with_a_step_it_is_said_how_much_of_it_was_kept(report):
    report.step_ms = 32.0
    report.workloads = [section({"shmload": 2000.0, "torch": 1000.0}, step=True)]
    for name, loader in report.workloads[0].loaders.items():
        loader.rounds[0]["step_efficiency"] = {"shmload": 0.96, "torch": 0.48}[name]
        loader.summarise(report.workloads[0].loaders["torch"])
    text = said(report)
    assert "a step of 32 ms after each batch" in text
    assert "Of a step of 32 ms it keeps 96% (torch 48%), with a wait of 1.00 ms (p50) and 2.00 ms (p99) before each." in text


def test_a_sweep_names_the_setting_of_each_section_and_one_recommendation(report):
    report.is_sweep = True
    report.workloads = [
        section({"shmload": 990.0, "torch": 500.0}, workers=1, setting="1 worker"),
        section({"shmload": 1000.0, "torch": 900.0}, workers=2, setting="2 workers"),
        section({"shmload": 300.0, "torch": 300.0}, workers=2, setting="2 workers", cache="cold"),
    ]
    text = said(report)
    assert "photos cold 2 workers" in text
    assert "photos: shmload is fastest with 2 workers" in text
    assert text.count("recommended:") == 1
    assert "num_workers=1, prefetch_factor=2 (the least that was tried with 95% of the best rate)" in text


def test_which_loaders_were_compared_how_is_said_where_there_are_several(report):
    loaders = {"torch": 1.0, "shmload": 1.0, "webdataset": 1.0}
    report.workloads = [section(loaders)]
    for name, way in (("shmload", "batches in order"), ("webdataset", "rows of an epoch in any order")):
        report.workloads[0].loaders[name].same_bytes = True
        report.workloads[0].loaders[name].compared = way
    assert "same bytes as torch: shmload (batches in order); webdataset (rows of an epoch in any order)." in said(report)


def test_a_subject_that_failed_has_neither_verdict_nor_recommendation(report):
    failed = section({"shmload": 1.0, "torch": 1.0})
    failed.loaders["shmload"] = LoaderReport(error="it broke")
    report.workloads = [failed]
    assert "shmload did not run" in said(report)
    assert (failed.verdict, report.recommendations) == (None, {})


def test_the_plot_has_a_panel_for_each_thing_that_was_measured(report):
    waits = section({"shmload": 2.0, "torch": 1.0})
    report.workloads = [waits]
    assert len(plot.small_panels(report, [waits])) == 1
    report.is_sweep = True
    report.workloads = [waits, section({"shmload": 3.0, "torch": 1.0}, workers=4)]
    assert len(plot.small_panels(report, [waits])) == 2
    assert plot.title(report)[1].startswith("2 cores of x86_64, Linux 6, torch 2; ")


@pytest.mark.slow
def test_a_plot_of_a_loader_that_failed_is_drawn_all_the_same(report, tmp_path):
    pytest.importorskip("matplotlib")
    broken = section({"shmload": 1.0, "torch": 1.0})
    broken.loaders["shmload"] = LoaderReport(error="it broke")
    report.workloads = [broken]
    plot.save(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000
