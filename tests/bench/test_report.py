"""The report in the terminal: sections, steps, sweeps, comparisons, and the plot."""

import io

import pytest
import torch
from rich.console import Console

from shmload.tools.bench import plot
from shmload.tools.bench.conclusions import judge_all
from shmload.tools.bench.report import LoaderReport, Report, WorkloadReport
from shmload.tools.bench.report_table import show
from shmload.tools.object_reference import one_line

LIMIT = {
    "fill_samples_per_s": 1000.0,
    "read_cpu_us_per_sample": 900.0,
    "read_blocked_us_per_sample": 0.0,
    "batch_nbytes": 640.0,
    "memcpy_mb_per_s": 8000.0,
    "num_samples": 6400.0,
    "decodes_in_place": 0.0,
    "has_collate_fn": 0.0,
}


def values(rate, **more):
    return {
        "num_batches": 30.0,
        "measured_s": 1.5,
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
        "trainer_own_ms_per_batch": 0.2,
        **more,
    }


def section(rates, workers=2, step=False, **known):
    loaders = {name: LoaderReport() for name in rates}
    for name, rate in rates.items():
        more = {"step_efficiency": 0.5} if step else {}
        loaders[name].rounds.append(values(rate, **more))
        loaders[name].digests = ["a"]
    made = WorkloadReport("photos", "title", 64, LIMIT, loaders, num_workers=workers)
    for name, value in known.items():
        setattr(made, name, value)
    for loader in loaders.values():
        loader.summarize(loaders["torch"])
    return made


@pytest.fixture
def report():
    machine = {"num_cpus": 2, "python": "3", "torch": "2", "kernel": "6-x", "architecture": "x86_64", "cpu_model": None}
    return Report("shmload", "torch", 2, False, "fork", machine)


def printed(report, width=160):
    judge_all(report)
    text = io.StringIO()
    show(report, Console(file=text, width=width))
    return " ".join(text.getvalue().split())


def test_section_has_its_verdict_and_recommendation(report):
    report.workloads = [section({"shmload": 2000.0, "torch": 1000.0})]
    text = printed(report)
    assert "2.00x" in text
    assert "verdict: bottleneck is decode: workers decode" in text
    assert "Remedy: use more workers, if there are idle cores, or cheaper transforms, or a `schema` with `read_into`." in text
    assert "One core, without a loader, puts 1,000 samples/s into a batch." in text
    assert "measured: title; 1,000 bytes a sample, batches of 64; in a round: shmload 30 in 1.5 s, torch 30 in 1.5 s." in text
    assert "recommended: num_workers=2, prefetch_factor=2 (without a training step" in text
    assert "step kept" not in text


def test_there_is_no_verdict_if_the_figures_do_not_explain_the_time(report):
    report.workloads = [section({"shmload": 2000.0, "torch": 1000.0})]
    report.workloads[0].loaders["shmload"].rounds[0]["batch_wall_ms"] = 200.0
    report.workloads[0].loaders["shmload"].summarize(report.workloads[0].loaders["torch"])
    text = printed(report)
    assert "verdict: none, because the figures explain only 15% of the time of a batch" in text
    assert "bottleneck" not in text
    assert report.workloads[0].verdict["explained_share"] == pytest.approx(0.15, abs=0.005)
    assert "measure again while the machine is idle" in text


def test_nothing_is_advised_from_too_few_batches(report):
    report.workloads = [section({"shmload": 2000.0, "torch": 1000.0})]
    torchs = report.workloads[0].loaders["torch"]
    torchs.rounds = [values(1000.0, num_batches=5.0, measured_s=30.0)]
    torchs.summarize(torchs)
    text = printed(report)
    assert "note: too few batches to judge: torch delivered 5 in 30.0 s, and 20 are needed; use --seconds 150 or" in text
    assert "verdict" not in text
    assert "recommended" not in text


def test_footnotes_explain_only_the_columns_that_fit(report):
    report.workloads = [section({"shmload": 2000.0, "torch": 1000.0})]
    for loader in report.workloads[0].loaders.values():
        loader.rounds[0]["peak_pss_mb"] = 100.0
        loader.summarize(report.workloads[0].loaders["torch"])
    assert "peak: memory of all processes" in printed(report)
    narrow = printed(report, width=90)
    assert "peak: memory" not in narrow
    assert "too narrow for MB/s, wait ms p50, wait ms p99, trainer s/GiB, peak MB: --json has them" in narrow


def test_table_with_a_step_has_the_step_efficiency(report):
    report.step_ms = 32.0
    report.workloads = [section({"shmload": 2000.0, "torch": 1000.0}, step=True)]
    text = printed(report)
    assert "a step of 32 ms after each batch" in text
    assert "kept %" in text
    assert "50.0" in text


def test_sweep_names_each_setting_and_has_one_recommendation(report):
    report.is_sweep = True
    report.workloads = [
        section({"shmload": 990.0, "torch": 500.0}, workers=1, setting="1 worker"),
        section({"shmload": 1000.0, "torch": 900.0}, workers=2, setting="2 workers"),
    ]
    text = printed(report)
    assert "photos: shmload delivers 1,000 samples/s, 1.11x torch with 2 workers, where it is fastest" in text
    assert text.count("recommended:") == 1
    assert "num_workers=1, prefetch_factor=2 (the least that was tried with 95% of the best rate)" in text


def test_failed_subject_has_neither_verdict_nor_recommendation(report):
    failed = section({"shmload": 1.0, "torch": 1.0})
    failed.loaders["shmload"] = LoaderReport(error="it broke")
    report.workloads = [failed]
    assert "shmload did not run" in printed(report)
    assert (failed.verdict, report.recommendations) == (None, {})


@pytest.mark.parametrize("sample", [torch.zeros, [0.0].__mul__, lambda length: {"x": [0] * length}])
def test_samples_that_torch_does_not_collate_have_a_remedy(report, sample):
    with pytest.raises(RuntimeError) as caught:
        torch.utils.data.default_collate([sample(2), sample(3)])
    failed = section({"shmload": 1.0, "torch": 1.0})
    failed.loaders["torch"] = LoaderReport(error=one_line(caught.value))
    report.workloads = [failed]
    *_, remedy = report.failures
    assert remedy.startswith("samples differ in shape or length, and torch's collate refuses them: give --collate")


@pytest.mark.slow(reason="imports matplotlib and draws a plot")
def test_plot_is_drawn_although_a_loader_failed(report, tmp_path):
    pytest.importorskip("matplotlib")
    broken = section({"shmload": 1.0, "torch": 1.0})
    broken.loaders["shmload"] = LoaderReport(error="it broke")
    report.workloads = [broken]
    assert "2 cores of x86_64, Linux 6, torch 2; " in plot.title(report)
    plot.save(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000
