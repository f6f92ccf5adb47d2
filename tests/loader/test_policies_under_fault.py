"""on_error, max_bad, max_restarts and sample_timeout_s when several things fail: flaky sources, stopped workers, deaths."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmload import ShmLoader
from shmload.errors import SampleError, SampleTimeout, WorkerDied
from tests.loader import bad_data as data

pytestmark = [
    pytest.mark.slow(reason="each starts workers that die, stop or exceed a time limit"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
WHOLE = [[*range(6)], [*range(6, 12)]]
LIMIT_S = 0.3


def passes(loader: Any) -> Iterator[tuple[list[list[int]], list[str]]]:
    """Yields for each pass the indices of its batches and the errors raised in between."""
    while True:
        stream, batches, errors = iter(loader), [], []
        while True:
            try:
                batches.append(next(stream)["index"].tolist())
            except StopIteration:
                break
            except (data.Broken, SampleError, SampleTimeout, WorkerDied) as error:
                errors.append(str(error))
        yield batches, errors


# ------------------------------------------------------------ a source that fails several times


@pytest.mark.parametrize("workers", [0, 1])  # two could be in two epochs, and either could meet the failure first
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("times", [1, 3])
def test_flaky_source_raises_once_per_failure_and_then_recovers(times: int, seed: int | None, workers: int, tmp_path: Path) -> None:
    dataset = data.Flaky(12, frozenset({4}), str(tmp_path), times)
    with ShmLoader(dataset, 6, seed=seed, num_workers=workers) as loader:
        every = passes(loader)
        for time in range(times):
            batches, errors = next(every)
            assert batches == WHOLE[1:]
            assert len(errors) == 1
            assert f"sample 4 fails, attempt {time + 1}" in errors[0]
        assert next(every) == (WHOLE, [])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(("on_error", "instead"), [("skip", [0, 1, 2, 3, 5]), ("substitute", [0, 1, 2, 3, 5, 5])])
def test_flaky_sample_is_bad_once_per_failure_and_then_good(
    on_error: Any, instead: list[int], seed: int | None, workers: int, tmp_path: Path
) -> None:
    dataset = data.Flaky(12, frozenset({4}), str(tmp_path), 3)
    with ShmLoader(dataset, 6, seed=seed, num_workers=workers, on_error=on_error) as loader:
        every = passes(loader)
        for _ in range(3):
            assert next(every) == ([instead, WHOLE[1]], [])
        assert next(every) == (WHOLE, [])
        assert loader.stats()["num_bad_samples"] == 3


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("seed", [None, 5])
def test_each_failure_counts_against_max_bad(seed: int | None, workers: int, tmp_path: Path) -> None:
    dataset = data.Flaky(12, frozenset({4}), str(tmp_path), 3)
    with ShmLoader(dataset, 6, seed=seed, num_workers=workers, on_error="skip", max_bad=2) as loader:
        every = passes(loader)
        assert [next(every)[1] for _ in range(2)] == [[], []]
        batches, errors = next(every)
    assert batches == WHOLE[1:]
    assert len(errors) == 1
    assert errors[0].startswith("3 bad samples are more than max_bad=2 allows; the last was sample 4 of epoch 2.")


# ------------------------------------------------------------ samples that kill their worker


class DeadlyAmongSlow(data.Deadly):
    """A dataset whose deadly sample kills its worker while the first sample of its batch is still read by another thread."""

    def check(self, index: int) -> None:
        if index == 0 and threading.current_thread() is not threading.main_thread():
            threading.Event().wait(LIMIT_S)
        super().check(index)


@pytest.mark.parametrize("seed", [None, 5])
def test_deadly_sample_is_blamed_among_samples_read_by_several_threads(seed: int | None) -> None:
    options = {"seed": seed, "num_workers": 1, "threads_per_worker": 4, "max_restarts": 20}
    with ShmLoader(DeadlyAmongSlow(6, frozenset({3})), 6, **options) as loader:
        batches, errors = next(passes(loader))
    assert batches == []
    assert len(errors) == 1
    assert "sample 3 of epoch 0 (row 3 of batch 0) ended its worker twice" in errors[0]


def test_only_the_deadly_sample_is_skipped_among_several_threads() -> None:
    options = {"seed": 5, "num_workers": 1, "threads_per_worker": 4}
    with ShmLoader(DeadlyAmongSlow(6, frozenset({3})), 6, on_error="skip", **options) as loader:
        assert next(passes(loader)) == ([[0, 1, 2, 4, 5]], [])
        assert {bad["index"] for bad in loader.stats()["bad_samples"]} == {3}


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(("bad", "first"), [({2, 4}, [0, 1, 3, 3, 5, 5]), ({0, 1}, [2, 2, 2, 3, 4, 5])])
def test_two_deadly_samples_of_one_batch_are_substituted(bad: set[int], first: list[int], threads: int) -> None:
    options: dict[str, Any] = {"seed": 5, "num_workers": 1, "threads_per_worker": threads}
    with ShmLoader(data.Deadly(12, frozenset(bad)), 6, on_error="substitute", **options) as loader:
        assert next(passes(loader)) == ([first, WHOLE[1]], [])
        assert {found["index"] for found in loader.stats()["bad_samples"]} == bad


def test_good_sample_read_repeatedly_beside_a_deadly_one_is_kept() -> None:
    with ShmLoader(DeadlyAmongSlow(6, frozenset({3})), 6, seed=5, num_workers=1, threads_per_worker=4, on_error="skip") as loader:
        for _ in range(3):
            loader.set_epoch(0)
            assert next(passes(loader)) == ([[0, 1, 2, 4, 5]], [])


class ReadsAtOnce:
    """Samples that are read several at once, of which number 4 hangs or kills its worker."""

    def __init__(self, harm: str) -> None:
        self.harm = harm

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, int]:
        if index == 4 and self.harm == "waits":
            threading.Event().wait()
        elif index == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"index": index}


class Items(ReadsAtOnce):
    def __getitems__(self, indices: list[int]) -> list[dict[str, int]]:
        return [self[index] for index in indices]


class Rows(ReadsAtOnce):
    schema: Any = {"index": "int64"}

    def read_batch_into(self, indices: Any, out: Any) -> None:
        out["index"] = [self[int(index)]["index"] for index in indices]


class Texts(Rows):
    schema: Any = {"index": "int64", "text": str}

    def read_batch_into(self, indices: Any, out: Any) -> None:
        super().read_batch_into(indices, out)
        out["text"] = [str(index) for index in indices]


@pytest.mark.parametrize("kind", [Items, Rows, Texts])
@pytest.mark.parametrize("harm", ["waits", "kills"])
@pytest.mark.parametrize("seed", [None, 5])
def test_only_the_bad_sample_is_skipped_among_samples_read_at_once(seed: int | None, harm: str, kind: Any) -> None:
    options: dict[str, Any] = {"sample_timeout_s": LIMIT_S} if harm == "waits" else {"max_restarts": 9}
    with ShmLoader(kind(harm), 6, seed=seed, num_workers=1, on_error="skip", **options) as loader:
        assert next(passes(loader)) == ([[0, 1, 2, 3, 5], WHOLE[1]], [])
        assert [bad["index"] for bad in loader.stats()["bad_samples"]] == [4]


@pytest.mark.parametrize("seed", [None, 5])
def test_timeout_names_the_sample_among_samples_read_at_once(seed: int | None) -> None:
    with ShmLoader(Items("waits"), 6, seed=seed, num_workers=1, sample_timeout_s=LIMIT_S) as loader:
        batches, errors = next(passes(loader))
    assert batches == WHOLE[1:]
    assert [error.split(" took")[0] for error in errors] == ["sample 4 of epoch 0 (row 4 of batch 0)"]


@pytest.mark.parametrize("workers", [1, 2])
def test_deadly_sample_is_skipped_in_torch_mode_if_workers_may_be_replaced(workers: int) -> None:
    loader = ShmLoader(data.Deadly(12, frozenset({4})), 6, num_workers=workers, on_error="skip", max_restarts=4)
    with loader:
        assert next(passes(loader)) == ([[0, 1, 2, 3, 5], WHOLE[1]], [])
        assert [bad["index"] for bad in loader.stats()["bad_samples"]] == [4]


@pytest.mark.parametrize("seed", [None, 5])
def test_pass_continues_after_deadly_samples_to_its_end(seed: int | None) -> None:
    """Checks a former defect: each deadly sample took the place of a batch ordered ahead, and without one left the pass had
    ended.
    """
    options: dict[str, Any] = {"seed": seed, "num_workers": 1, "prefetch_factor": 1, "max_restarts": 4}
    with ShmLoader(data.Deadly(5, frozenset({1})), 1, **options) as loader:
        batches, errors = next(passes(loader))
    assert batches == [[0], [2], [3], [4]]
    assert len(errors) == 1


def test_deadly_sample_without_restarts_left_is_a_worker_death() -> None:
    loader = ShmLoader(data.Deadly(12, frozenset({4})), 6, num_workers=2, on_error="skip", max_restarts=1)
    with loader, pytest.raises(WorkerDied, match="exited unexpectedly") as caught:
        list(loader)
    (note,) = caught.value.__notes__
    pattern = (
        r"shmload: worker \d \(pid \d+\) was killed by SIGKILL while reading sample 4 of epoch 0 \(row 4 of batch 0\); "
        "max_restarts=1 is used up"
    )
    assert re.fullmatch(pattern, note)


def test_restarts_of_all_passes_count_against_max_restarts() -> None:
    with ShmLoader(data.Deadly(12, frozenset({4})), 6, num_workers=1, on_error="skip", max_restarts=2) as loader:
        assert [batch["index"].tolist() for batch in loader] == [[0, 1, 2, 3, 5], WHOLE[1]]
        with pytest.raises(WorkerDied, match="exited unexpectedly"):
            list(loader)


def test_deadly_samples_count_against_max_bad() -> None:
    loader = ShmLoader(data.Deadly(12, frozenset({4, 7})), 6, seed=5, num_workers=2, on_error="skip", max_bad=1)
    with loader, pytest.raises(SampleError, match="2 bad samples are more than max_bad=1 allows; the last was sample 7"):
        list(loader)


# ------------------------------------------------------------ workers that are late or stopped


class StopsItself(data.Rows):
    """A dataset whose bad samples stop their worker forever."""

    def check(self, index: int) -> None:
        if index in self.bad:
            os.kill(os.getpid(), signal.SIGSTOP)


class RecoveryCheck:
    """A ring that checks, before it reassigns a worker's rows, that this worker is gone."""

    def __init__(self, ring: Any) -> None:
        self._ring = ring
        self.num_recovered = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)

    def recover(self, worker: int, **options: Any) -> int:
        """Recovers the rows of a worker, which must have been waited for."""
        self.num_recovered += 1
        if pid := self._ring.worker(worker)["pid"]:  # called until nothing is left to recover
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        return self._ring.recover(worker, **options)


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("kind", [StopsItself, data.Stuck, data.Deadly])
def test_worker_is_gone_before_its_rows_are_reassigned(kind: Any, seed: int | None) -> None:
    options = {"sample_timeout_s": LIMIT_S, "on_error": "skip", "max_restarts": 9}
    with ShmLoader(kind(12, frozenset({4})), 6, seed=seed, num_workers=2, **options) as loader:
        stream = iter(loader)
        supervisor = loader._builder.last._supervisor if seed is None else None
        if supervisor is None:  # in seed mode, asking for the first batch makes the engine
            loader._passes._made_engine()
            supervisor = loader._builder.last._supervisor
        supervisor._ring = watched = RecoveryCheck(supervisor._ring)
        assert [batch["index"].tolist() for batch in stream] == [[0, 1, 2, 3, 5], WHOLE[1]]
        assert watched.num_recovered >= 1


@pytest.mark.parametrize("seed", [None, 5])
def test_stopped_worker_times_out_with_an_unknown_stack(seed: int | None) -> None:
    with ShmLoader(StopsItself(12, frozenset({4})), 6, seed=seed, num_workers=1, sample_timeout_s=LIMIT_S) as loader:
        batches, errors = next(passes(loader))
    assert batches == WHOLE[1:]
    assert len(errors) == 1
    assert errors[0].startswith(f"sample 4 of epoch 0 (row 4 of batch 0) took longer than sample_timeout_s={LIMIT_S}: worker 0")
    assert "(unknown: the process is stopped, or waits in the kernel)" in errors[0]


def test_timed_out_workers_do_not_count_against_max_restarts() -> None:
    options = {"sample_timeout_s": LIMIT_S, "on_error": "skip", "max_restarts": 0}
    with ShmLoader(data.Stuck(12, frozenset({4, 9})), 6, num_workers=2, **options) as loader:
        assert next(passes(loader)) == ([[0, 1, 2, 3, 5], [6, 7, 8, 10, 11]], [])


def test_timed_out_samples_count_against_max_bad() -> None:
    options = {"sample_timeout_s": LIMIT_S, "on_error": "skip", "max_bad": 0}
    with ShmLoader(data.Stuck(12, frozenset({4})), 6, seed=5, num_workers=2, **options) as loader:
        batches, errors = next(passes(loader))
    assert batches == WHOLE[1:]
    assert errors == [error for error in errors if error.startswith("1 bad samples are more than max_bad=0 allows")]
    assert len(errors) == 1


def test_timed_out_sample_is_substituted() -> None:
    options = {"sample_timeout_s": LIMIT_S, "on_error": "substitute"}
    with ShmLoader(data.Stuck(12, frozenset({4})), 6, seed=5, num_workers=2, **options) as loader:
        assert next(passes(loader)) == ([[0, 1, 2, 3, 5, 5], WHOLE[1]], [])
