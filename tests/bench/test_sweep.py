"""Settings: their cross product, how they are written, and a sweep end to end."""

import json

import pytest

from shmload.tools.bench.rounds import BenchOptions, Point
from shmload.tools.named import BenchError, numbers


def points(num_workers=(), prefetch_factor=(), batch_size=()):
    return BenchOptions(num_workers=num_workers, prefetch_factor=prefetch_factor, batch_size=batch_size).points()


def test_every_combination_is_a_point_with_the_batch_size_outermost():
    assert [Point(1, 2, 16), Point(1, 4, 16), Point(3, 2, 16), Point(3, 4, 16)] == points((1, 3), (2, 4), (16,))
    assert len(points((1, 2), (1, 2, 4), (16, 64))) == 12


def test_without_workers_nothing_is_prefetched_so_that_is_one_point():
    assert [Point(0, None), Point(2, 1), Point(2, 4)] == points((0, 2), (1, 4))


def test_what_nobody_asked_for_is_left_to_the_workload():
    assert BenchOptions().points() == [Point(num_workers=2)]
    assert BenchOptions(torch_loader="m:n").points() == [Point()]
    assert BenchOptions(torch_loader="m:n", num_workers=(0, 1)).points() == [Point(0), Point(1)]


def test_a_point_is_labelled_by_what_was_asked_for():
    assert Point(1, 4, 64).label() == "1 worker, 4 ahead, batch 64"
    assert Point(2).label() == "2 workers"
    assert Point().label() == ""


def test_a_sweep_has_one_round_unless_more_are_asked_for():
    assert BenchOptions().num_rounds == 3
    assert BenchOptions(num_workers=(1, 2)).num_rounds == 1
    assert BenchOptions(num_workers=(1, 2), rounds=2).num_rounds == 2
    assert BenchOptions(rounds=2, quick=True).num_rounds == 1


def test_numbers_are_lists_with_commas():
    assert numbers("--workers", ["0,1", "2", "1"]) == (0, 1, 2)
    with pytest.raises(BenchError, match=r"--workers: needs whole numbers, one or several with commas .*, given 'two'"):
        numbers("--workers", ["1,two"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prefetch_factor": (2, 0)}, "--prefetch: needs at least 1, given 0"),
        ({"step_ms": -1.0}, "--step-ms: needs 0 to 60000, given -1"),
        ({"step_ms": float("nan")}, "--step-ms: needs 0 to 60000, given nan"),
    ],
)
def test_a_setting_out_of_range_says_what_was_needed_and_given(options, text):
    with pytest.raises(BenchError, match=text):
        BenchOptions(**options)


@pytest.mark.slow(reason="measures every setting in fresh processes, which import torch")
def test_a_sweep_measures_every_point_and_recommends_one(bench, tmp_path):
    pytest.importorskip("matplotlib")
    plot, file = tmp_path / "sweep.png", tmp_path / "sweep.json"
    done = bench(
        *("--quick", "--dataset", "planted:Good", "--loader", "shmload", "--workers", "0,1", "--batch-size", "10"),
        *("--step-ms", "5", "--json", str(file), "--plot", str(plot)),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert [section["num_workers"] for section in report["workloads"]] == [0, 1]
    for section in report["workloads"]:
        metrics = section["loaders"]["shmload"]["metrics"]
        assert 0 < metrics["step_efficiency"]["median"] <= 1
        assert metrics["trainer_own_ms_per_batch"]["median"] >= 5
    assert report["recommendations"]["dataset"]["origin"] == "sweep"
    printed = " ".join(done.stdout.split())
    assert "where it is fastest" in printed
    assert "recommended: num_workers=" in printed
    assert "step" in done.stdout
    assert plot.stat().st_size > 10_000
