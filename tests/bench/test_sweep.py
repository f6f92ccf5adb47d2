"""Settings: their product, their notation, and a sweep end to end."""

import json

import pytest

from shmload.tools.bench.bench_options import BenchOptions, Point
from shmload.tools.list_options import numbers
from shmload.tools.object_reference import UsageError


def points(num_workers=(), prefetch_factor=(), batch_size=()):
    return BenchOptions(num_workers=num_workers, prefetch_factor=prefetch_factor, batch_size=batch_size).points()


def test_points_are_the_product_of_settings_ordered_by_batch_size():
    assert [Point(1, 2, 16), Point(1, 4, 16), Point(3, 2, 16), Point(3, 4, 16)] == points((1, 3), (2, 4), (16,))
    assert len(points((1, 2), (1, 2, 4), (16, 64))) == 12


def test_zero_workers_is_one_point_without_prefetching():
    assert [Point(0, None), Point(2, 1), Point(2, 4)] == points((0, 2), (1, 4))


def test_settings_that_are_not_given_are_the_workloads():
    assert BenchOptions().points() == [Point(num_workers=2)]
    assert BenchOptions(torch_loader="m:n").points() == [Point()]
    assert BenchOptions(torch_loader="m:n", num_workers=(0, 1)).points() == [Point(0), Point(1)]


def test_point_is_labeled_by_the_given_settings():
    assert Point(1, 4, 64).label() == "1 worker, 4 ahead, batch 64"
    assert Point(2).label() == "2 workers"
    assert Point().label() == ""


def test_sweep_has_one_round_by_default():
    assert BenchOptions().num_rounds == 3
    assert BenchOptions(num_workers=(1, 2)).num_rounds == 1
    assert BenchOptions(num_workers=(1, 2), rounds=2).num_rounds == 2
    assert BenchOptions(rounds=2, quick=True).num_rounds == 1


def test_numbers_are_comma_separated():
    assert numbers("--workers", ["0,1", "2", "1"]) == (0, 1, 2)
    with pytest.raises(UsageError, match=r"--workers: needs whole numbers, one or several with commas .*, given 'two'"):
        numbers("--workers", ["1,two"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prefetch_factor": (2, 0)}, "--prefetch: needs at least 1, given 0"),
        ({"step_ms": -1.0}, "--step-ms: needs 0 to 60000, given -1"),
        ({"step_ms": float("nan")}, "--step-ms: needs 0 to 60000, given nan"),
    ],
)
def test_error_for_a_setting_out_of_range_names_the_range_and_value(options, text):
    with pytest.raises(UsageError, match=text):
        BenchOptions(**options)


@pytest.mark.slow(reason="measures every setting in forked processes")
def test_sweep_measures_every_point_and_recommends_one(bench, tmp_path):
    pytest.importorskip("matplotlib")
    plot, file = tmp_path / "sweep.png", tmp_path / "sweep.json"
    done = bench(
        *("--quick", "--dataset", "planted:Good", "--loader", "shmload", "--workers", "0,1", "--batch-size", "10"),
        *("--step-ms", "5", "--save", str(file), "--plot", str(plot)),
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
