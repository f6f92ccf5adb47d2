"""Workers that are threads give the batches of worker processes, draw for draw, and leave nothing behind."""

from __future__ import annotations

import functools
import os
import queue
import random
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import gauss as bound_gauss  # bound to random's own generator before any redirection
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import ChainDataset, DataLoader, Dataset, IterableDataset, get_worker_info

from shmload import ShmLoader, WorkerDied, sample_rng
from shmload.engine.ring_reader import RingReader
from shmload.shm.names import process_stem
from shmload.worker import thread_pool, thread_side
from shmload.worker.generator_set import OF_PROCESS
from shmload.worker.own_generators import separate
from shmload.worker.thread_generators import make_set
from shmload.worker.thread_pool import WorkerThread

N = 40


class Draws(Dataset[Any]):
    """Draws from every global generator, gaussians first, and yields the thread now and then."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        drawn = [random.gauss(0, 1), float(np.random.randn()), float(torch.randn(1)), float(torch.rand(2).sum())]
        sys.setswitchinterval(1e-6) if index % 2 else None  # threads of the trainer take turns within samples
        drawn += [bound_gauss(0, 1), random.random(), float(random.sample(range(1000), 3)[2]), float(np.random.rand())]
        drawn += [float(torch.empty(3).uniform_().sum()), float(torch.randint(0, 1 << 40, (1,))), float(np.random.normal())]
        drawn += [float(torch.rand_like(torch.zeros(2)).sum()), float(random.getrandbits(40)), float(random.gauss(0, 1))]
        return torch.tensor([float(index), *drawn, sample_rng().random()], dtype=torch.float64)


@pytest.fixture(autouse=True)
def _switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def whole(loader: Any) -> list[Any]:
    return [row for batch in loader for row in batch.tolist()]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_seeded_batches_equal_those_without_workers(num_workers: int) -> None:
    with ShmLoader(Draws(), 4, seed=5, shuffle=True) as inline:
        expected = [whole(inline) for _ in range(2)]
    with ShmLoader(Draws(), 4, seed=5, shuffle=True, num_workers=num_workers, backend="thread") as loader:
        assert [whole(loader) for _ in range(2)] == expected


class DropsOut(Draws):
    def __getitem__(self, index: int) -> Any:
        ones, (halves, thirds, zeros) = torch.ones(50), (torch.nn.Dropout(p) for p in (0.5, 0.3, 1.0))
        drawn = torch.distributions.Gamma(2.0, 1.0).sample(), torch.binomial(100 * ones[:1], ones[:1] / 2)
        in_place = torch.nn.functional.dropout(3 * ones, 0.3, inplace=True)
        return torch.cat([halves(ones), zeros(ones), in_place, thirds(ones), *map(torch.atleast_1d, drawn)])


class DrawsLike(Draws):
    def __getitem__(self, index: int) -> Any:
        zeros, wide = torch.zeros(3), torch.zeros(2, dtype=torch.int64)
        own = torch.Generator().manual_seed(index)
        drawn = [torch.rand_like(zeros), torch.randn_like(input=zeros, dtype=torch.float64), torch.rand_like(zeros, generator=own)]
        drawn += [torch.randint_like(zeros, 1000), torch.randint_like(wide, 5, 1000), torch.randint_like(wide, low=5, high=1000)]
        drawn += [torch.randint_like(wide, high=1000), torch.distributions.Beta(1.0, 2.0).sample((2,))]
        drawn += [torch.distributions.Dirichlet(torch.ones(3)).sample(), torch.nn.init.uniform_(torch.empty(2))]
        drawn += [torch.nn.init.normal_(torch.empty(2)), torch.nn.init.kaiming_uniform_(torch.empty(2, 2)).flatten()]
        return torch.cat([part.double() for part in drawn])


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("kind", [DropsOut, DrawsLike])
def test_functions_without_a_generator_draw_from_the_threads(kind: Any, num_workers: int) -> None:
    with ShmLoader(kind(), 4, seed=5) as inline:
        expected = whole(inline)
    with ShmLoader(kind(), 4, seed=5, num_workers=num_workers, backend="thread") as loader:
        assert whole(loader) == expected


@pytest.mark.slow(reason="starts worker processes")
@pytest.mark.parametrize("shuffle", [False, True])
def test_torch_mode_draws_as_torchs_worker_processes(shuffle: bool) -> None:

    def reading(make: Callable[..., Any], **options: Any) -> list[Any]:
        torch.manual_seed(3)
        return whole(make(_PlainDraws(), 4, shuffle=shuffle, num_workers=2, **options))

    assert reading(ShmLoader, backend="thread") == reading(DataLoader)


class _PlainDraws(Draws):
    def __getitem__(self, index: int) -> Any:
        drawn = [random.gauss(0, 1), float(np.random.randn()), float(torch.randn(1)), random.random(), float(torch.rand(1))]
        return torch.tensor([float(index), *drawn], dtype=torch.float64)


class DrawsNumpys(Draws):
    """Draws one number from each function of np.random that needs no arguments."""

    NAMES = ("normal", "rand", "randn", "random", "random_sample", "ranf", "sample", "standard_normal", "uniform")

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([getattr(np.random, name)() for name in self.NAMES], dtype=torch.float64)


def test_every_function_of_numpy_draws_as_without_workers() -> None:
    with ShmLoader(DrawsNumpys(), 4, seed=5) as inline:
        expected = whole(inline)
    words = str(np.random.get_state())
    with ShmLoader(DrawsNumpys(), 4, seed=5, num_workers=3, backend="thread") as loader:
        assert whole(loader) == expected
    assert str(np.random.get_state()) == words
    assert np.random.sample.__name__ == "sample"


def test_trainers_generators_are_not_drawn_from() -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    expected = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(1))]
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    with ShmLoader(Draws(), 4, seed=5, num_workers=2, backend="thread") as loader:
        whole(loader)
    assert [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(1))] == expected
    state, words = random.getstate(), np.random.get_state()
    assert state == OF_PROCESS.python.getstate()
    assert (words[1] == OF_PROCESS.numpy.get_state()[1]).all()


class Reseeding(Draws):
    """Seeds the global generators itself, and looks at their states."""

    def __getitem__(self, index: int) -> Any:
        random.seed(index)
        np.random.seed(index)
        torch.manual_seed(index)
        state = torch.get_rng_state()
        drawn = float(torch.rand(1))
        torch.set_rng_state(state)
        again = float(torch.rand(1))
        python, numpys = random.getstate(), np.random.get_state()
        first = random.random(), np.random.rand()
        random.setstate(python)
        np.random.set_state(numpys)
        assert (drawn, *first) == (again, random.random(), np.random.rand())
        return torch.tensor([drawn, *first], dtype=torch.float64)


def test_dataset_that_seeds_generators_seeds_its_threads_own() -> None:
    with ShmLoader(Reseeding(), 4, seed=5) as inline:
        expected = whole(inline)
    before = torch.initial_seed()
    with ShmLoader(Reseeding(), 4, seed=5, num_workers=3, backend="thread") as loader:
        assert whole(loader) == expected
    assert torch.initial_seed() == before


class WhereRead(Dataset[Any]):
    """Returns the thread and the worker that read the sample."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return index, threading.get_ident(), info.id, info.num_workers, info.seed


def test_each_thread_has_a_worker_info_of_its_own() -> None:
    dataset = WhereRead()
    with ShmLoader(dataset, 2, num_workers=2, backend="thread") as loader:
        rows = [row for batch in loader for row in zip(*(column.tolist() for column in batch), strict=True)]
    assert [row[0] for row in rows] == list(range(N))
    assert len({row[1:] for row in rows}) == 2
    assert {row[2:4] for row in rows} == {(0, 2), (1, 2)}
    assert threading.get_ident() not in {row[1] for row in rows}
    assert get_worker_info() is None


class Lines(IterableDataset[Any]):
    """Numbers, divided among the workers."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        return (torch.tensor([float(i), random.random()]) for i in range(info.id, N, info.num_workers))


@pytest.mark.slow(reason="starts worker processes")
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_iterable_dataset_is_divided_as_among_processes(persistent_workers: bool) -> None:
    def reading(make: Callable[..., Any], **options: Any) -> list[Any]:
        torch.manual_seed(3)
        loader = make(Lines(), 4, num_workers=2, persistent_workers=persistent_workers, **options)
        return [whole(loader) for _ in range(2)]

    assert reading(ShmLoader, backend="thread") == reading(DataLoader)


class CountsPasses:
    """A stage that shuffles by a count of its passes, as webdataset's detshuffle does."""

    def __init__(self) -> None:
        self.num_passes = 0

    def run(self) -> list[int]:
        self.num_passes += 1
        return random.Random(self.num_passes).sample(range(N), N)


class CountsPassesInASlot:
    """The same without a dict of attributes; its slot is not set before the first pass."""

    __slots__ = ("num_passes",)
    num_passes: int

    def run(self) -> list[int]:
        self.num_passes = getattr(self, "num_passes", 0) + 1
        return random.Random(self.num_passes).sample(range(N), N)


class KeepsItsOrder(IterableDataset[int]):
    """Numbers in an order that something within the dataset keeps, divided among the workers."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.stages = [CountsPasses()]
        self.method = self.stages[0].run
        self.slots = CountsPassesInASlot()
        self.namespace = SimpleNamespace(order=tuple(range(N)))
        self.kept: dict[str, Any] = {"list": list(range(N)), "bytearray": bytearray(range(N)), "array.array": array("q", range(N))}
        self.array, self.tensor = np.arange(N), torch.arange(N)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return (int(number) for number in self.next_order()[info.id :: info.num_workers])

    def next_order(self) -> Any:
        if self.kind == "stage":
            return self.stages[0].run()
        if self.kind == "method":
            return self.method()
        if self.kind == "slots":
            return self.slots.run()
        if self.kind == "namespace":
            self.namespace.order = random.Random(1).sample(self.namespace.order, N)
            return self.namespace.order
        if self.kind in ("array", "tensor"):
            order = getattr(self, self.kind)
            order[:] = order[np.random.RandomState(1).permutation(N)]
        else:
            order = self.kept[self.kind]
            order[:] = order[:5:-1] + order[:6]
        return order


@pytest.mark.parametrize("kind", ["stage", "method", "slots", "namespace", "list", "bytearray", "array.array", "array", "tensor"])
def test_state_of_a_pass_within_an_iterable_dataset_is_each_workers_own(kind: str) -> None:
    dataset = KeepsItsOrder(kind)
    with ShmLoader(dataset, batch_size=4, num_workers=3, backend="thread", persistent_workers=True) as loader:
        passes = [[int(number) for batch in loader for number in batch] for _ in range(2)]
    assert [sorted(numbers) for numbers in passes] == [list(range(N))] * 2
    assert passes[0] != passes[1], "persistent workers go on from the state of their last pass"
    assert dataset.stages[0].num_passes == 0
    assert dataset.tensor.tolist() == list(range(N))


class SharesNumbers(IterableDataset[int]):
    """Numbers that the workers take from one queue, and an object with a lock that counts them."""

    def __init__(self) -> None:
        self.queue: queue.Queue[int] = queue.Queue()
        self.counter = CountsWithALock()
        for number in range(N):
            self.queue.put(number)

    def __iter__(self) -> Iterator[int]:
        with suppress(queue.Empty):
            while True:
                yield self.counter.count(self.queue.get_nowait())


class CountsWithALock:
    """A counter for several threads."""

    def __init__(self) -> None:
        self.lock, self.num_counted = threading.Lock(), 0

    def count(self, number: int) -> int:
        with self.lock:
            self.num_counted += 1
        return number


def test_queues_and_objects_with_a_lock_are_shared_by_threads() -> None:
    dataset = SharesNumbers()
    with ShmLoader(dataset, batch_size=4, num_workers=2, backend="thread") as loader:
        assert sorted(int(number) for batch in loader for number in batch) == list(range(N))
    assert dataset.counter.num_counted == N


class Range(IterableDataset[Any]):
    """Numbers from `start` to `end`, which worker_init_fn may set, as torch's documentation of IterableDataset does."""

    start, end, next_number = 0, N, 0

    def __iter__(self) -> Iterator[Any]:
        self.next_number = self.start
        return self

    def __next__(self) -> int:
        if self.next_number == self.end:
            raise StopIteration
        self.next_number += 1
        return self.next_number - 1


def chained() -> Any:
    return ChainDataset([Range(), Range()])


def set_range(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.start, info.dataset.end = (0, 5) if worker == 0 else (5, N)  # type: ignore[attr-defined]  # a Range's


class Marked(Dataset[int]):
    """Samples that are what worker_init_fn sets."""

    mark = -1

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return self.mark


def set_mark(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.mark = worker  # type: ignore[attr-defined]  # a Marked's


@pytest.mark.slow(reason="starts worker processes")
@pytest.mark.parametrize(
    ("dataset", "init"),
    [(Range, None), (Range, set_range), (Marked, set_mark), (chained, None)],
    ids=["own iterator", "divided", "map-style", "chained"],
)
def test_attributes_of_the_dataset_are_each_workers_own(dataset: Any, init: Any) -> None:
    def reading(make: Callable[..., Any], **options: Any) -> list[Any]:
        loader = make(dataset(), 4, num_workers=2, worker_init_fn=init, **options)
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    assert reading(ShmLoader, backend="thread") == reading(DataLoader)


@pytest.mark.parametrize("every", [1, 3])
def test_torch_mode_resumes_with_the_threads_streams(every: int) -> None:
    def loader() -> ShmLoader[Any]:
        return ShmLoader(_PlainDraws(), 4, num_workers=2, backend="thread", snapshot_every_n_steps=every)

    torch.manual_seed(3)
    with loader() as undisturbed:
        expected = whole(undisturbed)
    torch.manual_seed(3)
    with loader() as first:
        iterator = iter(first)
        before = [row for _ in range(4) for row in next(iterator).tolist()]
        state = first.state_dict()
    with loader() as second:
        second.load_state_dict(state)
        assert before + whole(second) == expected


class Failing(Draws):
    def __getitem__(self, index: int) -> Any:
        if index == 6:
            raise LookupError("no such sample")
        if index == 13:
            raise SystemExit(3)
        return torch.tensor(index)


def test_error_of_a_sample_names_it() -> None:
    with (
        ShmLoader(Failing(), 4, seed=1, num_workers=2, backend="thread") as loader,
        pytest.raises(LookupError, match="no such sample") as caught,
    ):
        whole(loader)
    assert "worker thread" in str(caught.value)
    assert any("sample 6" in note for note in caught.value.__notes__)


def test_bad_samples_are_skipped_and_a_thread_that_ends_is_replaced() -> None:
    with ShmLoader(Failing(), 1, seed=1, num_workers=2, backend="thread", on_error="skip") as loader:
        found = [int(batch) for batch in loader]
    assert found == [index for index in range(N) if index not in (6, 13)]


def test_torch_mode_ends_with_the_first_thread_that_ends() -> None:
    with (
        ShmLoader(Failing(), 1, num_workers=1, backend="thread", sampler=[13]) as loader,
        pytest.raises(WorkerDied, match="exited unexpectedly"),
    ):
        list(loader)


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, WorkerThread)]


def test_threads_end_with_the_loader() -> None:
    loader = ShmLoader(Draws(), 4, seed=5, num_workers=3, backend="thread")
    next(iter(loader))
    assert len(workers()) == 3
    loader.close()
    assert not workers()
    loader = ShmLoader(Draws(), 4, seed=5, num_workers=3, backend="thread")
    iterator = iter(loader)
    next(iterator)
    del loader, iterator
    assert not workers()


def test_thread_that_starts_after_the_loader_has_closed_ends_without_a_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_closed = threading.Event()
    monkeypatch.setattr(thread_pool, "set_batch_scheduling", has_closed.wait)
    with ShmLoader(Draws(), 4, num_workers=2, backend="thread") as loader:
        iter(loader)
        late = workers()
    has_closed.set()
    for thread in late:
        thread.join()
    assert len(late) == 2
    assert not caplog.records


def test_thread_that_finds_no_ring_while_the_loader_is_open_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise FileNotFoundError("no ring")

    monkeypatch.setattr(thread_pool, "set_batch_scheduling", fail)
    with ShmLoader(Draws(), 4, num_workers=1, backend="thread") as loader, pytest.raises(WorkerDied):
        next(iter(loader))
    assert "no ring" in caplog.text


PROGRAM = """
import torch
from torch.utils.data import Dataset
from shmload import ShmLoader

class Slow(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.rand(50, 50) @ torch.rand(50, 50)

loader = ShmLoader(Slow(), 4, num_workers=3, backend="thread"{seed})
for batch in loader:
    break
print("done")
"""


@pytest.mark.slow(reason="runs programs of their own")
@pytest.mark.parametrize("seed", ["", ", seed=1"])
def test_program_that_ends_within_a_pass_prints_nothing(output_of: Callable[..., str], seed: str) -> None:
    assert output_of(PROGRAM.format(seed=seed)) == "done\n"


class Transform:
    """Draws from a generator of its own, as those of albumentations do, and keeps a large array."""

    def __init__(self) -> None:
        self.rng, self.random, self.of_torch = np.random.default_rng(0), random.Random(0), torch.Generator()
        self.table = np.zeros(1 << 20)

    def __call__(self, index: int) -> Any:
        drawn = [self.rng.random(), self.rng.normal(), self.random.gauss(0, 1), float(torch.rand(1, generator=self.of_torch))]
        return torch.tensor([index, *drawn, self.rng.integers(1 << 40)], dtype=torch.float64)


class Transformed(Draws):
    def __init__(self) -> None:
        self.transforms = [Transform(), Transform()]

    def __getitem__(self, index: int) -> Any:
        return torch.stack([transform(index) for transform in self.transforms])


def test_generators_of_the_dataset_are_copied_for_each_thread_and_nothing_else() -> None:
    dataset = Transformed()
    with ShmLoader(dataset, 4, seed=5) as inline:
        expected = whole(inline)
    states = [transform.rng.bit_generator.state for transform in dataset.transforms]
    with ShmLoader(dataset, 4, seed=5, num_workers=3, backend="thread") as loader:
        assert whole(loader) == expected
    assert [transform.rng.bit_generator.state for transform in dataset.transforms] == states
    (copied, _), (other, _) = separate(dataset, None), separate(dataset, None)
    for mine, its, theirs in zip(dataset.transforms, copied.transforms, other.transforms, strict=True):
        assert mine.table is its.table
        assert len({id(mine.rng), id(its.rng), id(theirs.rng)}) == 3
    plain = Draws()
    assert separate(plain, len) == (plain, len)


class KeepsMethods(Dataset[Any]):
    """A dataset that keeps methods of generators: compiled ones, which `copy.deepcopy` does not copy, and others."""

    def __init__(self) -> None:
        python = random.Random(1)
        self.draws: list[Any] = [
            python.random,
            functools.partial(python.getrandbits, 30),
            python.gauss,
            np.random.default_rng(1).random,
        ]
        self.named = {"again": (python.random, 1)}

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, *(draw() for draw in self.draws)], dtype=torch.float64)


def test_threads_draw_from_copies_of_generators_whose_methods_are_kept() -> None:
    with ShmLoader(KeepsMethods(), 4, seed=5) as inline:
        expected = whole(inline)
    dataset = KeepsMethods()
    states = [dataset.draws[0].__self__.getstate()]
    with ShmLoader(dataset, 4, seed=5, num_workers=3, backend="thread") as loader:
        assert whole(loader) == expected
    assert [dataset.draws[0].__self__.getstate()] == states
    copied: Any = separate(dataset, None)[0]
    own = {id(draw.__self__) for draw in (copied.draws[0], copied.draws[1].func, copied.draws[2], copied.named["again"][0])}
    assert len(own) == 1
    assert own.isdisjoint({id(dataset.draws[0].__self__)})


@pytest.mark.slow(reason="starts worker processes")
def test_generators_of_the_dataset_draw_as_in_worker_processes() -> None:
    expected = whole(DataLoader(Transformed(), 4, num_workers=2))
    with ShmLoader(Transformed(), 4, num_workers=2, backend="thread") as loader:
        assert whole(loader) == expected


def with_closure() -> Dataset[Any]:
    rng = np.random.default_rng(0)
    dataset: Any = Draws()
    dataset.draw = lambda: rng.random()
    return dataset  # type: ignore[no-any-return]  # of any kind


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"multiprocessing_context": "spawn"}, "needs no processes"),
        ({"threads_per_worker": 2}, "one thread per worker"),
        ({"dataset": with_closure(), "seed": 1}, r"cannot be copied: dataset.draw.rng"),
        ({"share": "node", "seed": 1}, "workers of this machine"),
    ],
)
def test_argument_that_needs_processes_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    dataset = options.pop("dataset", None) or Draws()
    with pytest.raises(ValueError, match=text):
        ShmLoader(dataset, 4, num_workers=2, backend="thread", **options)


@pytest.mark.parametrize("seed", [None, 1])
def test_threads_need_no_file_in_dev_shm_and_no_process(seed: int | None) -> None:
    def found() -> list[object]:
        return [*Path("/dev/shm").glob(f"*{process_stem()}-*"), *psutil.Process().children()]

    before = found()
    samples = [torch.arange(number, number + 1024) for number in range(8)]  # their indices do not fit into the control block
    with ShmLoader(samples, batch_sampler=[[*range(8)] * 200] * 2, num_workers=2, backend="thread", seed=seed) as loader:
        for number, batch in enumerate(loader, 1):
            assert batch.shape == (1600, 1024)
            assert found() == before
            (block,) = [block for block in RingReader.find().blocks if block.pid == os.getpid()]
            assert block.kind == "memfd"
            assert RingReader.open(block.path).snapshot()["batches"] == number


def test_stats_show_threads_without_memory_of_their_own() -> None:
    with ShmLoader(Draws(), 4, seed=1, num_workers=2, backend="thread") as loader:
        next(iter(loader))
        report = loader.stats()
    assert [worker["rss_bytes"] for worker in report["workers"]] == [None, None]
    assert report["memory"]["workers_rss_bytes"] is None


def test_pool_of_threads_grows_and_shrinks() -> None:
    with ShmLoader(Draws(), 1, seed=5) as inline:
        expected = whole(inline)
    with ShmLoader(Draws(), 1, seed=5, num_workers="auto", backend="thread") as loader:
        iterator: Any = iter(loader)
        found = next(iterator).tolist()
        engine = loader._builder.last
        assert engine is not None
        for number, batch in enumerate(iterator):
            engine.worker_set.resize(1 + number % 2)  # type: ignore[attr-defined]  # an Engine
            found += batch.tolist()
        assert found == expected


def test_pool_stops_while_it_is_being_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may close a loader in the thread that waits in `stop`, at the program's end too."""
    join, stopping = WorkerThread.join, []

    def join_and_stop_again(thread: WorkerThread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not stopping:
            stopping.append(thread)
            pool.stop(5)

    with ShmLoader(Draws(), 4, seed=1, num_workers=2, backend="thread") as loader:
        next(iter(loader))
        (pool,) = (pool for pool in thread_pool._pools if pool._threads)
        monkeypatch.setattr(WorkerThread, "join", join_and_stop_again)
        pool.end_at_exit()
        assert stopping
        assert not pool._threads


def test_limit_on_threads_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(WorkerThread, "start", start)
    with (
        ShmLoader(Draws(), 4, seed=1, num_workers=2, backend="thread") as loader,
        pytest.raises(OSError, match="can't start new thread"),
    ):
        next(iter(loader))


def test_first_two_threads_of_a_program_start_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one of them has no info, and an iterable dataset gives it all samples."""
    found: dict[int, Any] = {}

    def start(worker: int) -> threading.Thread:
        def run() -> None:
            thread_side.prepare(None, worker, 2, 7, make_set())
            if worker == 0:
                is_ready.set()
            is_ready.wait(60)
            found[worker] = get_worker_info()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def local() -> Any:
        if not others:  # the second thread begins while the first one is here
            others.append(start(1))
            others[0].join(0.2)  # it does not end, because it waits for the first one
        return threading.local()

    is_ready, others = threading.Event(), list[threading.Thread]()
    thread_side._info_of_thread.cache_clear()
    monkeypatch.setattr(thread_side, "threading", SimpleNamespace(local=local))
    start(0).join()
    for thread in others:
        thread.join()
    assert [found[worker].id for worker in range(2)] == [0, 1]
