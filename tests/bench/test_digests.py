"""Bytes of batches are compared: differences are found, and equal batches are not reported."""

import json
from datetime import date

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from shmload.tools.bench.batch_contents import digest, num_rows, touch
from shmload.tools.bench.bench_job import BenchJob, TaskOutcome
from shmload.tools.bench.bench_options import Point
from shmload.tools.bench.builtin_workloads import WORKLOADS
from shmload.tools.bench.byte_comparison import compare, first_difference
from shmload.tools.bench.report import LoaderReport, WorkloadReport
from shmload.tools.bench.task import BenchTask


def batch():
    return {"x": torch.arange(12, dtype=torch.float32).reshape(3, 4), "y": [torch.tensor([1, 2]), "name"], "n": 3}


def test_equal_batches_have_equal_digests_that_depend_on_every_leaf():
    assert digest(batch()) == digest(batch())
    for change in (
        lambda b: b["x"].view(torch.uint8)[0].__setitem__(0, 1),
        lambda b: b["y"][0].__setitem__(1, 3),
        lambda b: b["y"].__setitem__(1, "other"),
        lambda b: b.__setitem__("n", 4),
        lambda b: b.__setitem__("x", b["x"].reshape(4, 3)),
        lambda b: b.__setitem__("x", b["x"].to(torch.float64)),
        lambda b: b.__setitem__("x", b["x"].numpy()),
    ):
        changed = batch()
        change(changed)
        assert digest(batch()) != digest(changed)


def test_digest_of_a_strided_tensor_equals_that_of_its_contiguous_copy():
    wide = torch.arange(12.0).reshape(3, 4)
    assert digest(wide.t().contiguous()) == digest(wide.t())


def test_touch_counts_the_bytes_of_tensors_and_arrays():
    assert touch({"x": batch()["x"], "y": [torch.tensor([1, 2]), "name"], "z": np.zeros(8, np.uint8)}) == 48 + 16 + 8
    assert touch([torch.empty(0), "text", 5]) == 0
    assert touch(torch.zeros((), dtype=torch.bfloat16)) == 2


def test_batches_of_objects_without_bytes_are_not_compared():
    assert digest([date(2026, 1, 1)]) is None


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_touch_counts_the_values_of_sparse_tensors(layout):
    assert touch(torch.eye(5).to_sparse(layout=layout)) == 5 * 4


def test_touch_reads_lazy_conjugations():
    assert touch(torch.zeros(3, dtype=torch.complex64).conj()) == 3 * 8


def test_first_difference_is_numbered_and_includes_missing_batches():
    assert first_difference(["a", "b"], ["a", "b"]) is None
    assert first_difference(["a", "b"], ["a", "c"]) == 1
    assert first_difference(["a", "b"], ["a"]) == 1
    assert first_difference([], ["a"]) == 0


def compared(mine, *, is_own=True, again=("a", "b")):
    """Returns the report on shmload, which delivered `mine`; torch delivered a, b and then `again`."""
    job = BenchJob(workload="rows", dataset="m:n", loader="", batch_size=1, num_workers=2)
    loaders = {"shmload": LoaderReport(digests=list(mine)), "torch": LoaderReport(digests=["a", "b"])}
    report = WorkloadReport("rows", "", 1, {}, loaders)
    task = BenchTask(WORKLOADS["rows"], job, Point(), is_own=is_own)
    answer = TaskOutcome(digests=list(again))
    compare(task, report, "torch", lambda jobs: [answer])
    return report


def test_wrong_byte_in_a_built_in_workload_is_a_mismatch():
    report = compared(["a", "x"], is_own=False)
    assert report.mismatches == ["rows: shmload and torch delivered different bytes in batch 1"]
    assert report.loaders["shmload"].same_bytes is False


def test_wrong_byte_in_a_repeatable_dataset_is_a_mismatch():
    assert compared(["a", "x"]).mismatches


def test_unrepeatable_dataset_is_noted_and_not_a_mismatch():
    report = compared(["a", "x"], again=["a", "y"])
    assert not report.mismatches
    assert "torch does not repeat itself either" in report.notes[0]


def rows_of(numbers):
    return default_collate([(np.full(4, number, np.float32), number) for number in numbers])


def test_rows_are_counted_in_the_first_leaf_with_rows():
    assert num_rows(rows_of([1, 2, 3])) == 3
    assert num_rows({"names": "ab", "x": torch.zeros(5, 2)}) == 5
    assert num_rows(["a", "b"]) == num_rows({"text": ["a", "b"]}) == 2


@pytest.mark.slow(reason="measures in forked processes")
def test_factory_declares_that_it_has_another_order(bench):
    loaders = "planted:backwards,shmload-seed,torch"
    done = bench("--quick", "--workload", "rows", "--loader", loaders, "--workers", "0", "--json")
    assert done.returncode == 0, done.stderr
    (section,) = json.loads(done.stdout)["workloads"]
    same = {name: loader["same_bytes"] for name, loader in section["loaders"].items()}
    assert same == {"planted:backwards": None, "shmload-seed": None, "torch": None}
    assert all(loader["metrics"]["samples_per_s"]["median"] > 0 for loader in section["loaders"].values())
