"""Every benchmark runs; its results are not checked."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import autotune, common, curves, resume, scale, small_tensors, start_up
from benchmarks.__main__ import BENCHMARKS
from benchmarks.common import Settings

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("mix", "tar")  # seconds each


def test_every_benchmark_is_listed() -> None:
    measuring = {p.stem for p in (ROOT / "benchmarks").glob("*.py") if "\ndef measure(settings: Settings" in p.read_text()}
    assert measuring == set(BENCHMARKS)


def test_cases_alternate_over_rounds_of_separate_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("shmload", "torch", "threads")
    assert [common.in_order(names, number) for number in range(2)] == [list(names), list(names)[::-1]]
    monkeypatch.setattr(common, "FIRST_ROUND", 1)  # as in the second process of benchmarks.against
    assert common.in_order(names, 0) == list(names)[::-1]


@pytest.mark.slow(reason="runs each benchmark in another process, which imports torch")
@pytest.mark.parametrize("name", QUICK)
def test_benchmark_prints_its_table(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}", "--rounds", "1", "--seconds", "0.05"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stderr
    assert "measured" in done.stdout


@pytest.mark.slow(reason="waits until auto has changed nothing for a while, as the benchmark does")
def test_autotune_is_compared_with_fixed_worker_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    load = replace(autotune.LOADS["consumer-bound"], pools=(1, 2))
    monkeypatch.setattr(autotune, "LOADS", {"consumer-bound": load})
    for name, value in {"REST_S": 0.3, "REST_BATCHES": 4, "LEAD_S": 0.0, "LEAST_S": 0.05}.items():
        monkeypatch.setattr(autotune, name, value)
    (row,) = autotune.measure(Settings(1, 0.05)).rows
    assert row.got > 0
    assert "last change after 0.0 s; best fixed" in row.beside


@pytest.fixture
def small_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the benchmark of resuming read few samples, in this process."""
    small = {"LARGE": 20_000, "LATE": 70, "SMALL": 1000, "NUM_STATES": 5, "NUM_STARTS": 1, "NUM_READ": 2000}
    for name, value in {**small, "fresh": lambda call, *arguments: call(*arguments)}.items():
        monkeypatch.setattr(resume, name, value)


@pytest.mark.slow(reason="starts a worker for each kind of loader")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.usefixtures("small_resume")
def test_resume_is_compared_with_fresh_starts_and_torchdata() -> None:
    rows = resume.measure(Settings(1, 0.05)).rows
    assert [row.unit for row in rows] == ["us", "us", "x", "x", "us"]
    assert all(row.got > 0 for row in rows[:-1])


@pytest.mark.slow(reason="starts a worker for each kind of loader")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.usefixtures("small_resume")
@pytest.mark.parametrize("name", resume.LOADERS)
def test_resume_at_another_position_fails_the_benchmark(name: str) -> None:
    position = resume.POSITIONS[name]()
    with pytest.raises(ValueError, match="not that of the position"):
        resume.started(name, position._replace(batch=position.batch[::-1]))


@pytest.mark.slow(reason="starts each loader in another process, which imports torch")
def test_start_up_skips_cases_that_need_more_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(start_up, "CASES", {name: start_up.CASES[name] for name in ("1,024 rows of 64", "1 GiB")})
    monkeypatch.setattr(start_up, "free_bytes", lambda: 1 << 30)
    result = start_up.measure(Settings(1, 0.05))
    assert [row.unit for row in result.rows] == ["x"] * 6 + ["us"] * 2
    assert all(row.got > 0 for row in result.rows)
    assert result.measured["left out"] in capsys.readouterr().err


@pytest.mark.slow(reason="runs each loader in another process")
@pytest.mark.usefixtures("forked_jobs")
def test_small_tensors_are_measured_in_every_mode_and_without_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_tensors, "CASES", dict(list(small_tensors.CASES.items())[-1:]))
    result = small_tensors.measure(Settings(1, 0.05))
    assert len(result.rows) == 2 * len(small_tensors.OURS)
    assert all(row.got > 0 for row in result.rows)
    assert all("dataset alone" in row.beside for row in result.rows[1::2])


@pytest.mark.slow(reason="starts a process by spawn, which imports torch")
def test_large_job_is_simulated_role_by_role(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SHARDS": 300, "PER_SHARD": 1000, "RANKS": 16, "NODES": 4}.items():
        monkeypatch.setattr(scale, name, value)
    rows = scale.measure(Settings(1, 0.05)).rows
    assert all(row.got > 0 for row in rows)


SMALL_AXES = {
    "workers": (1, 2),
    "fields": (1, 3),
    "bytes": (1 << 10, 1 << 62),
    "samples": (1000, 10**10),
    "loaders": (1, 2),
    "objects": (10, 100),
}


@pytest.mark.slow(reason="starts workers for each loader at each point")
def test_curves_have_every_loader_at_every_point_that_fits_into_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(curves, "AXES", {name: replace(curves.AXES[name], points=points) for name, points in SMALL_AXES.items()})
    monkeypatch.setattr(curves, "fresh", lambda call, *arguments: call(*arguments))
    monkeypatch.setattr(curves, "free_bytes", lambda: 10**9)
    monkeypatch.setattr(curves, "PAGE", tmp_path / "curves.md")
    monkeypatch.setattr(curves, "FIGURE", tmp_path / "curves.svg")
    result = curves.measure(Settings(1, 0.01))
    assert len(result.rows) == 2 * len(SMALL_AXES)
    assert all(row.got > 0 for row in result.rows)
    all_of_them = "torch, torch mode, seed mode"
    assert result.measured["left out"] == [
        f"{1 << 62:,} bytes of a batch with {all_of_them}",
        "10,000,000,000 samples of the dataset with torch, torch mode",
    ]
    curves.write(result)
    page = curves.PAGE.read_text()
    assert page.count("| torch | torch mode | seed mode |\n") == sum(len(axis.metrics) for axis in curves.AXES.values())
    assert re.search(r"^\| 10,000,000,000 \| - \| - \| [\d.,]+ \|$", page, re.MULTILINE)
    assert "</svg>" in curves.FIGURE.read_text()


def test_curves_compare_at_the_largest_point_of_torch() -> None:
    def at(samples_per_s: float) -> list[dict[str, float]]:
        return [{"samples_per_s": samples_per_s}]

    both = {"torch": at(10.0), "torch mode": at(20.0), "seed mode": at(5.0)}
    found = {"workers": {1: both, 16: both, 64: {"seed mode": at(1.0)}}}
    rows = curves.rows_of(found)
    assert [(row.what.split(":")[0], row.got, row.met) for row in rows] == [
        ("16 workers, torch mode", 2.0, True),
        ("16 workers, seed mode", 0.5, False),
    ]
    assert rows[0].beside == "samples/s, from 1: 20 to 20; torch 10 to 10"
