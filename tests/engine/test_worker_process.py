"""System settings of a worker process: scheduling after the trainer, reuse of freed memory, and OpenCV threads."""

from __future__ import annotations

import os
import resource
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from shmload import ShmLoader
from shmload.worker.process import limit_library_threads, set_batch_scheduling


class Policy:
    """Samples with the scheduling policy of the reading process."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return os.sched_getscheduler(0)


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow(reason="starts interpreters"))])
def test_waking_worker_does_not_preempt_the_trainer(method: str) -> None:
    with ShmLoader(Policy(), 2, num_workers=1, multiprocessing_context=method) as loader:
        assert {os.SCHED_BATCH} == {policy for batch in loader for policy in batch.tolist()}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_explicit_scheduling_policy_is_kept() -> None:
    pid = os.fork()
    if pid == 0:  # a process cannot leave the idle policy without privileges
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        set_batch_scheduling()
        os._exit(os.sched_getscheduler(0) != os.SCHED_IDLE)
    assert os.waitpid(pid, 0)[1] == 0


class Faults:
    """Samples with the number of page faults for an array as large as the previous ones."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(4):
            first, second = np.ones(1 << 20, np.uint8), np.ones(1 << 20, np.uint8)
            del first, second
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_worker_reuses_the_memory_of_freed_arrays() -> None:
    with ShmLoader(Faults(), 64, num_workers=1, multiprocessing_context="fork") as loader:
        (faults,) = loader
    assert faults[1:].median() < 64, "each array of 1 MiB has 256 pages"


class Threads:
    """Samples with the number of OpenCV threads."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        import cv2

        return cv2.getNumThreads()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow(reason="starts interpreters"))])
def test_opencv_uses_one_thread_in_a_worker(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cv2 = pytest.importorskip("cv2")
    monkeypatch.delenv("OPENCV_FOR_THREADS_NUM", raising=False)
    before = cv2.getNumThreads()
    with ShmLoader(Threads(), 2, num_workers=1, multiprocessing_context=method) as loader:
        assert [batch.tolist() for batch in loader] == [[1, 1]]
    assert cv2.getNumThreads() == before


def test_worker_starts_after_the_trainer_has_used_opencv_threads() -> None:
    cv2 = pytest.importorskip("cv2", reason="needs OpenCV")
    if cv2.getNumThreads() < 2:
        pytest.skip("OpenCV has one thread here: there is no other that a fork could leave behind")
    picture = np.zeros((512, 512, 3), np.uint8)
    for _ in range(8):
        cv2.GaussianBlur(picture, (9, 9), 0)  # at the fork its threads are busy, or wait with their lock held
        with ShmLoader(Threads(), 2, num_workers=1, multiprocessing_context="fork", timeout=60) as loader:
            assert [batch.tolist() for batch in loader] == [[1, 1]]


@pytest.mark.parametrize(("num_threads", "wanted"), [(8, [0]), (4, []), (1, [])])
def test_number_of_opencv_threads_set_by_the_user_is_kept(
    num_threads: int, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    fake = SimpleNamespace(getNumThreads=lambda: num_threads, getNumberOfCPUs=lambda: 8, setNumThreads=asked.append)
    monkeypatch.setitem(sys.modules, "cv2", fake)
    monkeypatch.setenv("OPENCV_FOR_THREADS_NUM", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    limit_library_threads()
    assert (asked, os.environ["OPENCV_FOR_THREADS_NUM"], os.environ["OMP_NUM_THREADS"]) == (wanted, "3", "3")
