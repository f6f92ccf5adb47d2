"""One iterator used by several threads: each batch goes to one thread, and next() is safe while others close, inspect or fork."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Sampler

from shmload import ShmLoader
from shmload.engine.iterator_lock import IteratorLock
from shmload.pipeline import Collate, Conveyer, DistributedBatchedMap, Join, Range
from tests.behaviour.behaviour_kit import DEADLINE_S, Numbers, error_text

pytestmark = pytest.mark.filterwarnings("ignore:.*batches are still in use")  # four threads may keep as many

FORK = multiprocessing.get_context("fork")
NUM_THREADS, N = 4, 2000
MODES = pytest.mark.parametrize("seed", [None, 1], ids=["torch mode", "seed mode"])


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


def read_by_threads(stream: Any) -> tuple[list[int], list[str]]:
    """Returns the samples that several threads got from one iterator, and unexpected errors."""
    together = threading.Barrier(NUM_THREADS)
    found: list[int] = []
    wrong: list[str] = []

    def take() -> None:
        together.wait(DEADLINE_S)
        try:
            while True:
                batch = next(stream)
                found.extend(np.atleast_1d(np.asarray(batch)).tolist())
                del batch
        except StopIteration:
            pass
        except BaseException as error:
            wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=take, daemon=True) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return found, wrong + ["a thread does not end" for thread in threads if thread.is_alive()]


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Makes Python switch threads very often."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("num_workers", [0, 2])
@MODES
def test_each_batch_goes_to_one_thread(seed: int | None, num_workers: int) -> None:
    prefetch = 8 if num_workers else None  # threads keep batches
    with ShmLoader(Numbers(N), 4, True, num_workers=num_workers, seed=seed, prefetch_factor=prefetch) as loader:
        for _ in range(2):
            found, wrong = read_by_threads(iter(loader))
            assert (wrong, sorted(found)) == ([], list(range(N)))


@pytest.mark.usefixtures("quick_switches")
def test_each_batch_of_an_iterable_dataset_goes_to_one_thread() -> None:
    found, wrong = read_by_threads(iter(ShmLoader(Counting(), 4, num_workers=1, prefetch_factor=8)))
    assert (wrong, sorted(found)) == ([], list(range(N)))


@pytest.mark.usefixtures("quick_switches")
def test_each_item_of_a_pipeline_goes_to_one_thread() -> None:
    def numbers(first: int, *stages: Any) -> Conveyer:
        work = DistributedBatchedMap(lambda i: i + first, n_workers=1)
        return Conveyer([Range(N, repeating=False), work, *stages])

    with numbers(0, Collate(4)) as batches:
        found, wrong = read_by_threads(batches)
        assert (wrong, sorted(found)) == ([], list(range(N)))
    with Join([(numbers(0), 1), (numbers(N), 1)], stop="all") as items:
        found, wrong = read_by_threads(items)
        assert (wrong, sorted(found)) == ([], list(range(2 * N)))


class ReentrantNext:
    """A function that calls next() on an iterator within its next()."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.results: list[str] = []

    def __call__(self) -> None:
        if self.stream is not None:
            self.results.append(error_text(lambda: next(self.stream)))


class ReentrantSampler(Sampler[int]):
    def __init__(self, asking: ReentrantNext) -> None:
        self._asking = asking

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        for index in range(40):
            self._asking()
            yield index


@pytest.mark.parametrize("num_workers", [0, 1])
@MODES
def test_next_called_by_the_sampler_within_next_is_an_error(seed: int | None, num_workers: int) -> None:
    asking = ReentrantNext()
    with ShmLoader(Numbers(40), 1, sampler=ReentrantSampler(asking), num_workers=num_workers, seed=seed) as loader:
        stream = iter(loader)
        found = [int(next(stream))]
        asking.stream = stream
        found += [int(batch) for batch in stream]
        assert found == list(range(40))
        assert {text.split(":")[0] for text in asking.results} == {
            "next() was called within next() of the same iterator, in the same thread. Samplers, datasets, callbacks and signal handlers "
            "that run during next() cannot take the next batch; take it after the first call has returned"
        }
        asking.stream = None


class Gated(Numbers):
    """A dataset whose samples from 4 on wait for the gate."""

    def __init__(self) -> None:
        super().__init__(40)
        self.gate = FORK.Event()

    def __getitem__(self, index: int) -> int:
        if index >= 4:
            assert self.gate.wait(DEADLINE_S)
        return index


def is_in(thread: int, *names: str) -> bool:
    """Returns whether a thread is inside a function with one of these names."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name in names:
            return True
        frame = frame.f_back
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline, pause = monotonic() + DEADLINE_S, threading.Event()
    while not condition():
        assert monotonic() < deadline
        pause.wait(0.005)


class WaitingThread:
    """A loader during a pass, and a thread that waits in its next()."""

    def __init__(self, seed: int | None, **options: Any) -> None:
        self.dataset = Gated()
        options = {"num_workers": 1, "prefetch_factor": 1, **options}
        self.loader: Any = ShmLoader(self.dataset, 2, seed=seed, shuffle=False, multiprocessing_context=FORK, **options)
        self.stream = iter(self.loader)
        self.first = [next(self.stream).tolist(), next(self.stream).tolist()]
        self.results: list[Any] = []
        self.thread = threading.Thread(target=self._take, daemon=True)
        self.thread.start()
        wait_until(lambda: is_in(self.thread.ident or 0, "_sleep_and_take", "wait_for_next"))  # it is inside next() and sleeps

    def _take(self) -> None:
        try:
            self.results.append(next(self.stream).tolist())
        except BaseException as error:
            self.results.append(f"{type(error).__name__}: {error}")


@MODES
def test_close_ends_the_wait_of_another_thread(seed: int | None) -> None:
    waiting = WaitingThread(seed)
    waiting.loader.close()
    waiting.thread.join(DEADLINE_S)
    assert waiting.results == ["RuntimeError: this loader is closed: make a new one"]
    assert waiting.first == [[0, 1], [2, 3]]


@MODES
def test_state_dict_and_stats_work_while_another_thread_waits(seed: int | None) -> None:
    waiting = WaitingThread(seed)
    state, stats = waiting.loader.state_dict(), waiting.loader.stats()
    assert (state["position"], stats["batches"]) == (4 if seed else 2, 2)
    waiting.dataset.gate.set()
    waiting.thread.join(DEADLINE_S)
    assert waiting.results == [[4, 5]]
    waiting.loader.close()
    with ShmLoader(Numbers(40), 2, seed=seed, shuffle=False, num_workers=1, prefetch_factor=1) as again:
        again.load_state_dict(state)
        assert [index for batch in again for index in batch.tolist()] == list(range(4, 40))


@MODES
def test_interrupt_ends_the_wait_for_another_thread(seed: int | None) -> None:
    waiting = WaitingThread(seed)
    me, heard = threading.get_ident(), threading.Event()

    def interrupted(*_: object) -> None:
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    def interrupt() -> None:
        wait_until(lambda: is_in(me, "__next__"))
        while not heard.is_set():  # Python's lock ignores a signal that arrives just before the wait
            signal.pthread_kill(me, signal.SIGINT)
            heard.wait(0.05)

    before = signal.signal(signal.SIGINT, interrupted)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        next(waiting.stream)
    interrupter.join()
    signal.signal(signal.SIGINT, before)
    waiting.dataset.gate.set()
    waiting.thread.join(DEADLINE_S)
    assert [waiting.results[0], *(batch.tolist() for batch in waiting.stream)] == [[i, i + 1] for i in range(4, 40, 2)]
    waiting.loader.close()


def test_child_forked_while_another_thread_is_in_next_is_not_blocked() -> None:
    iterator_lock, entered, leave = IteratorLock(), threading.Event(), threading.Event()

    def stay() -> None:
        with iterator_lock.lock:
            iterator_lock.is_taken = True
            entered.set()
            leave.wait(DEADLINE_S)
            iterator_lock.is_taken = False

    thread = threading.Thread(target=stay)
    thread.start()
    entered.wait(DEADLINE_S)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if iterator_lock.lock.acquire(timeout=1) and not iterator_lock.is_taken else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not iterator_lock.lock.acquire(blocking=False), "the parent's lock is unchanged"
    leave.set()
    thread.join()


def test_tensors_read_by_threads_are_complete() -> None:
    with ShmLoader(
        list(torch.arange(400).repeat_interleave(64).view(400, 64)), 2, num_workers=2, seed=3, prefetch_factor=8
    ) as loader:
        stream = iter(loader)
        wrong: list[Any] = []

        def take() -> None:
            kept = []
            for batch in stream:
                kept = [*kept[-2:], (batch, batch.clone())]
                wrong.extend(one for one, copy in kept if not torch.equal(one, copy))
                if batch.ne(batch[:, :1]).any():
                    wrong.append(batch)

        threads = [threading.Thread(target=take) for _ in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert wrong == []
