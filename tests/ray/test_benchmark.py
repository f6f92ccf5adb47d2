"""The benchmark of Ray actors as workers runs, or reports that Ray is missing."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks import cluster as benchmark
from benchmarks.common import Settings
from tests.ray.cluster_kit import Cluster

QUICK = Settings(rounds=1, seconds=0.05)


def test_benchmark_without_ray_reports_that_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert benchmark.measure(QUICK).rows == []
    assert capfd.readouterr().err == 'left out: Ray is not installed (pip install "shmload[ray]")\n'


def test_rows_compare_the_cases_with_each_other() -> None:
    one = {"mb_per_s": 100.0, "batches_per_s": 10.0, "trainer_s_per_gb": 0.01, "cpu_s_per_gb": 1.0}
    found = {f"{case} x {count}, {nodes}": [one] for nodes, cases in benchmark.CASES.items() for case, count in cases}
    found |= {f"{case} x 1, two nodes": [{"seconds": s}] for case, s in (("ship", 4.0), ("ship nothing", 1.5), ("ray.put", 1.25))}
    found["shmload x 4, two nodes"] = [{**one, "mb_per_s": 70.0}]
    rows = {row.what.partition(": first")[0]: (row.got, row.met) for row in benchmark.rows_of(found)}
    assert rows["4 actors, two nodes: rate over ray.get"] == (0.7, False)
    assert rows["2 actors on one node: rate over the seed's way"] == (1.0, False)
    assert rows["1 GB to another node"] == (2.0, False)
    assert rows["trainer's CPU, 2 actors"] == (0.01, True)
    assert rows["2 actors that wait: share of linear"] == (0.5, False)


@pytest.mark.slow(reason="starts a Ray cluster and measures on it")
def test_case_returns_the_columns_of_the_table(running_cluster: Cluster) -> None:
    found = benchmark.in_turn({"one node": [("shmload", 1), ("ship", 1), ("ship nothing", 1), ("ray.put", 1)]}, QUICK)
    assert len(found) == 4
    assert all(value > 0 for values in found.values() for value in values[0].values())
    assert found["ship x 1, one node"][0]["nbytes"] == 50_000_000
