"""on_error, max_bad and sample_timeout_s: the handling of samples that cannot be read."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from shmload import ShmLoader
from shmload.errors import SampleError, SampleTimeout, WorkerDied
from tests.loader import bad_data as data

slow = pytest.mark.slow(reason="most cases start workers")
PATHS: dict[str, tuple[Any, dict[str, Any]]] = {
    "__getitem__": (data.Rows, {}),
    "__getitems__": (data.Lists, {}),
    "read_into": (data.InPlace, {}),
    "read_batch_into": (data.Batches, {}),
    "texts by read_into": (data.TextsInPlace, {}),
    "texts by read_batch_into": (data.BatchesOfTexts, {}),
    "packed": (data.Texts, {}),
    "collate_fn": (data.Rows, {"collate_fn": data.as_tagged_batch}),
}


def indices(batches: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


def epochs(loader: ShmLoader) -> list[list[list[int]]]:
    with loader:
        return [indices(loader) for _ in range(2)]


@slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seed", [None, 5])
def test_skipping_makes_the_batch_shorter(path: str, seed: int | None) -> None:
    kind, more = PATHS[path]
    expected = [[i for i in range(k, k + 6) if i not in data.BAD] for k in range(0, 30, 6)]
    for workers in (0, 2):
        loader = ShmLoader(kind(), 6, seed=seed, on_error="skip", num_workers=workers, **more)
        assert epochs(loader) == [expected] * 2
        assert loader.stats()["num_bad_samples"] == 8


@slow
@pytest.mark.parametrize("path", PATHS)
def test_bad_sample_is_substituted_by_the_next_of_the_permutation(path: str) -> None:
    kind, more = PATHS[path]
    with ShmLoader(kind(bad=frozenset()), 6, shuffle=True, seed=5, **more) as loader:
        orders = [[i for batch in indices(loader) for i in batch] for _ in range(2)]
    expected = []
    for order in orders:
        stream = []
        for place in range(30):
            at = place
            while order[at % 30] in data.BAD:
                at += 1
            stream.append(order[at % 30])
        expected.append([stream[k : k + 6] for k in range(0, 30, 6)])
    for workers in (0, 1, 2):
        loader = ShmLoader(kind(), 6, shuffle=True, seed=5, on_error="substitute", num_workers=workers, **more)
        assert epochs(loader) == expected


@slow
def test_bad_sample_is_substituted_by_the_next_of_the_dataset_in_torch_mode() -> None:
    expected = [[0, 1, 2, 5, 5, 5], [6, 7, 8, 9, 10, 0]]
    for workers in (0, 2):
        assert epochs(ShmLoader(data.Rows(12), 6, on_error="substitute", num_workers=workers))[0] == expected


@slow
def test_augmentation_draws_do_not_depend_on_workers() -> None:
    def noise(workers: int) -> list[Any]:
        with ShmLoader(data.Rows(), 6, shuffle=True, seed=5, on_error="skip", num_workers=workers) as loader:
            return [b["noise"].tolist() for b in loader]

    assert noise(0) == noise(1) == noise(2)


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_draws_after_a_bad_sample_in_torch_mode_do_not_depend_on_prefetching(on_error: Any) -> None:
    def noise(ahead: int) -> list[Any]:
        torch.manual_seed(5)
        options: dict[str, Any] = {"on_error": on_error, "num_workers": 1, "prefetch_factor": ahead}
        with ShmLoader(data.Rows(16, frozenset({5, 6})), 2, **options) as loader:
            return [b["noise"].tolist() for b in loader]

    assert noise(1) == noise(4)


@slow
@pytest.mark.parametrize("workers", [0, 2])
def test_batch_of_only_bad_samples_is_left_out(workers: int) -> None:
    for seed in (None, 5):
        loader = ShmLoader(data.Rows(9, frozenset({3, 4, 5})), 3, seed=seed, on_error="skip", num_workers=workers)
        assert epochs(loader) == [[[0, 1, 2], [6, 7, 8]]] * 2


@slow
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_listed(workers: int) -> None:
    with ShmLoader(data.Rows(), 6, seed=5, on_error="skip", num_workers=workers) as loader:
        indices(loader)
        listed = sorted(loader.stats()["bad_samples"], key=lambda bad: bad["index"])
    assert [(bad["epoch"], bad["step"], bad["index"]) for bad in listed] == [(0, 0, 3), (0, 0, 4), (0, 1, 11), (0, 4, 28)]
    assert listed[0]["error"] == "Broken: sample 3 is broken"
    assert "Broken" in listed[-1]["error"]


def test_max_bad_zero_allows_no_bad_sample() -> None:
    with pytest.raises(SampleError, match="1 bad samples are more than max_bad=0 allows"):
        indices(ShmLoader(data.Rows(), 6, seed=5, on_error="skip", max_bad=0))


@slow
@pytest.mark.parametrize("workers", [0, 2])
def test_more_bad_samples_than_allowed_end_the_pass(workers: int) -> None:
    with (
        ShmLoader(data.Rows(), 6, seed=5, on_error="skip", max_bad=2, num_workers=workers) as loader,
        pytest.raises(SampleError, match="3 bad samples are more than max_bad=2 allows; the last was sample 11"),
    ):
        indices(loader)


@slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [6, None])
def test_failing_collate_fn_is_not_a_bad_sample(batch_size: int | None, workers: int) -> None:
    def collate(samples: Any) -> Any:
        raise data.Broken("collate")

    dataset = data.Rows(bad=frozenset())
    with (
        ShmLoader(dataset, batch_size, seed=5, on_error="skip", num_workers=workers, collate_fn=collate) as loader,
        pytest.raises(data.Broken, match="collate"),
    ):
        indices(loader)


def drawn_by(loader: Any) -> list[Any]:
    """Returns the noise of each batch, and None for each batch that fails."""
    np.random.seed(5)
    torch.manual_seed(5)
    batches, stream = [], iter(loader)
    while True:
        try:
            batches.append(next(stream)["noise"].tolist())
        except StopIteration:
            return batches
        except (data.Broken, IndexError):
            batches.append(None)


@slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("kind", "batch_size"), [(data.Rows, 2), (data.Rows, None), (data.Filtered, 1)])
def test_samples_of_a_batch_that_cannot_be_collated_are_read_once_in_torch_mode(
    kind: Any, batch_size: int | None, workers: int
) -> None:
    """Otherwise the samples after it would have other random numbers than torch's."""
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": workers}
    if kind is data.Rows:
        options["collate_fn"] = data.fail_at_bad
    expected = drawn_by(DataLoader(kind(12, frozenset()), **options))
    assert None in expected
    with ShmLoader(kind(12, frozenset()), on_error="skip", **options) as loader:
        assert drawn_by(loader) == expected


@slow
@pytest.mark.parametrize("workers", [0, 2])
def test_search_for_the_bad_sample_draws_no_random_numbers_in_torch_mode(workers: int) -> None:
    expected = drawn_by(DataLoader(data.FailsTogether(12, frozenset()), 2, num_workers=workers))
    assert None in expected
    with ShmLoader(data.FailsTogether(12, frozenset()), 2, on_error="skip", num_workers=workers) as loader:
        assert drawn_by(loader) == expected


@pytest.mark.slow(reason="reads hundreds of samples that raise")
def test_dataset_of_only_bad_samples_ends_in_an_error() -> None:
    with (
        ShmLoader(data.Rows(300, frozenset(range(300))), 2, seed=5, on_error="substitute") as loader,
        pytest.raises(SampleError, match="100 substitutes for one bad sample"),
    ):
        indices(loader)


@slow
def test_valid_rows_of_a_padded_batch_stay_known() -> None:
    with ShmLoader(data.Rows(10, frozenset({8})), 4, seed=5, on_error="skip", rank=1, world_size=2, num_workers=1) as loader:
        seen = [(batch["index"].tolist(), loader.valid) for batch in loader]
    assert seen == [([4, 5, 6, 7], 4), ([9], 1)]


@pytest.mark.slow(reason="workers die over a sample and are replaced")
def test_sample_that_kills_its_worker_twice_is_a_bad_sample() -> None:
    with ShmLoader(data.Deadly(12, frozenset({4})), 6, seed=5, on_error="skip", num_workers=2) as loader:
        assert indices(loader) == [[0, 1, 2, 3, 5], [6, 7, 8, 9, 10, 11]]
        stats = loader.stats()
    assert stats["num_restarts"] >= 2  # the next epoch has begun
    assert {bad["index"] for bad in stats["bad_samples"]} == {4}
    with (
        ShmLoader(data.Deadly(12, frozenset({4})), 6, seed=5, num_workers=2) as loader,
        pytest.raises(WorkerDied, match=r"sample 4 of epoch 0 \(row 4 of batch 0\) ended its worker twice"),
    ):
        indices(loader)


@pytest.mark.slow(reason="a sample times out and its worker is replaced, also by spawn")
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_sample_timeout_error_has_the_stack_of_the_worker(seed: int | None, method: str, caplog: pytest.LogCaptureFixture) -> None:
    with ShmLoader(
        data.Stuck(12, frozenset({4})), 6, seed=seed, sample_timeout_s=0.3, num_workers=1, multiprocessing_context=method
    ) as loader:
        iterator = iter(loader)
        with pytest.raises(SampleTimeout) as caught:
            next(iterator)
        assert next(iterator)["index"].tolist() == [6, 7, 8, 9, 10, 11]
    assert "Stack" not in caplog.text, "the stack belongs to the error, not to the log"
    text = str(caught.value)
    assert text.startswith("sample 4 of epoch 0 (row 4 of batch 0) took longer than sample_timeout_s=0.3: worker 0 (pid ")
    assert "bad_data.py" in text
    assert "in check" in text
    assert 'Raise sample_timeout_s if such samples are valid, or give on_error="skip"' in text


class AsleepInC(data.Rows):
    def check(self, index: int) -> None:
        if index in self.bad:
            time.sleep(1000)


@pytest.mark.slow(reason="two samples time out and their workers are replaced")
def test_timed_out_samples_can_be_skipped(caplog: pytest.LogCaptureFixture) -> None:
    late = frozenset({4, 6, 9})  # includes the first of a batch
    with ShmLoader(AsleepInC(12, late), 6, seed=5, sample_timeout_s=0.3, on_error="skip", num_workers=2) as loader:
        assert indices(loader) == [[0, 1, 2, 3, 5], [7, 8, 10, 11]]
        stats = loader.stats()
    assert "in check" in caplog.text, "only the log says where the skipped samples hung"
    assert stats["num_restarts"] >= 2  # the next epoch has begun
    assert all(bad["error"].startswith("SampleTimeout") for bad in stats["bad_samples"])


@pytest.mark.slow(reason="reads twenty epochs with two workers")
def test_fast_samples_never_time_out() -> None:
    with ShmLoader(data.Rows(bad=frozenset()), 6, seed=5, sample_timeout_s=2.0, num_workers=2) as loader:
        for _ in range(20):
            assert len(indices(loader)) == 5
        assert loader.stats()["num_restarts"] == 0


class Gated(data.Rows):
    """Rows of which the bad ones wait for the gate."""

    def __init__(self, n: int, bad: frozenset[int], gate: Any) -> None:
        super().__init__(n, bad)
        self.gate = gate

    def check(self, index: int) -> None:
        if index in self.bad:
            self.gate.wait(60)


@pytest.mark.slow(reason="a sample's time limit runs out")
def test_sample_that_is_late_at_one_look_only_does_not_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers a machine that was paused: the worker has no time to continue before the trainer looks."""
    gate = multiprocessing.get_context("fork").Event()
    options = {"sample_timeout_s": 0.3, "num_workers": 1, "multiprocessing_context": "fork"}
    with ShmLoader(Gated(12, frozenset({4}), gate), 6, seed=5, **options) as loader:
        batches = iter(loader)
        engine = loader._passes._made_engine()
        look, ring, num_late = engine._supervisor.end_if_timed_out, engine._ring, 0

        def look_and_continue(worker: int) -> bool:
            nonlocal num_late
            late, is_killed = ring.held_by(worker), look(worker)
            if engine._supervisor._late:
                num_late += 1
                gate.set()
                while ring.held_by(worker) == late:
                    pass
            return is_killed

        monkeypatch.setattr(engine._supervisor, "end_if_timed_out", look_and_continue)
        assert [batch["index"].tolist() for batch in batches] == [[*range(6)], [*range(6, 12)]]
        assert num_late
        assert loader.stats()["num_restarts"] == 0


class Texts(data.Rows):
    """Long texts: the batch needs memory that only the trainer can provide."""

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "text": str(index) * 100_000}


@pytest.mark.slow(reason="a step of the trainer lasts three times the time limit")
@pytest.mark.parametrize("kind", [data.Rows, Texts])
def test_waiting_for_the_trainer_does_not_time_out(kind: Any) -> None:
    """Lets the worker wait for the layout, or for memory, while the trainer does other things."""
    with ShmLoader(kind(12, frozenset()), 6, sample_timeout_s=0.5, num_workers=1) as loader:
        iterator = iter(loader)
        worker = loader._builder.last._ring.worker
        while worker(0)["started_ns"] == 0:
            pass
        until = time.monotonic() + 1.5  # a step of the trainer that is longer than any sample may take
        while time.monotonic() < until:
            pass
        assert [batch["index"].tolist() for batch in iterator] == [[*range(6)], [*range(6, 12)]]
        assert loader.stats()["num_restarts"] == 0
