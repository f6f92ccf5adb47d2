"""Bytes are compared: what differs is found, what is alike is not accused."""

import numpy as np
import pytest
import torch

from shmload.tools.bench.measure import digest, first_difference, touch
from shmload.tools.bench.report import LoaderReport, WorkloadReport
from shmload.tools.bench.rounds import OWN, Task, compare
from shmload.tools.bench.settings import Job, Outcome


def batch():
    return {"x": torch.arange(12, dtype=torch.float32).reshape(3, 4), "y": [torch.tensor([1, 2]), "name"], "n": 3}


def test_equal_batches_have_equal_digests_and_every_leaf_counts():
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


def test_a_tensor_with_strides_digests_as_its_contiguous_copy():
    wide = torch.arange(12.0).reshape(3, 4)
    assert digest(wide.t().contiguous()) == digest(wide.t())


def test_touching_counts_the_bytes_of_tensors_and_arrays():
    assert touch({"x": batch()["x"], "y": [torch.tensor([1, 2]), "name"], "z": np.zeros(8, np.uint8)}) == 48 + 16 + 8
    assert touch([torch.empty(0), "text", 5]) == 0
    assert touch(torch.zeros((), dtype=torch.bfloat16)) == 2


def test_the_first_difference_is_numbered_and_a_missing_batch_is_one():
    assert first_difference(["a", "b"], ["a", "b"]) is None
    assert first_difference(["a", "b"], ["a", "c"]) == 1
    assert first_difference(["a", "b"], ["a"]) == 1
    assert first_difference([], ["a"]) == 0


def compared(name, mine, *, task=OWN, again=("a", "b")):
    """The report on `name`, which delivered `mine`, beside torch, which delivered a, b and then `again`."""
    job = Job(workload=task, dataset="m:n", loader="", batch_size=1, num_workers=2)
    loaders = {name: LoaderReport(digests=list(mine)), "torch": LoaderReport(digests=["a", "b"])}
    report = WorkloadReport(task, "", "", "", 1, {}, "", loaders)
    compare(Task(task, "", "", "", job), report, "torch", lambda jobs: [Outcome(jobs[0], digests=list(again))])
    return report


def test_a_wrong_byte_on_a_built_in_workload_is_a_mismatch():
    report = compared("shmload", ["a", "x"], task="rows")
    assert report.mismatches == ["rows: shmload and torch delivered different bytes in batch 1"]
    assert report.loaders["shmload"].same_bytes is False


def test_a_wrong_byte_on_a_repeatable_dataset_is_a_mismatch():
    assert compared("shmload", ["a", "x"]).mismatches


def test_a_dataset_that_does_not_repeat_itself_is_noted_not_accused():
    report = compared("shmload", ["a", "x"], again=["a", "y"])
    assert not report.mismatches
    assert "torch does not repeat itself either" in report.notes[0]


@pytest.mark.parametrize("name", ["threads", "torch-0"])
def test_other_streams_of_randomness_are_noted(name):
    report = compared(name, ["a", "x"])
    assert not report.mismatches
    assert "draws others without workers" in report.notes[0]


def test_a_loader_with_an_order_of_its_own_is_not_compared():
    report = compared("shmload-seed", ["x", "y"])
    assert not report.mismatches
    assert report.loaders["shmload-seed"].same_bytes is None
    assert "order of its own" in report.notes[0]
