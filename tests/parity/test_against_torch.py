"""In more than 200 configurations, ShmLoader without a seed and torch's DataLoader deliver equal batches and use the global
generators equally.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from shmload import ShmLoader
from tests.parity.parity_data import KINDS, N, SampleFunction, StringKeys, WithGetItems

slow = pytest.mark.slow(reason="workers start as new interpreters, which import everything again")


class Drawing(Sampler[int]):
    """A sampler that draws from every global generator for each index."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(N):
            yield (int(torch.randint(N, ())) + int(np.random.randint(N)) + random.randrange(N)) % N

    def __len__(self) -> int:
        return N


class Uneven(Sampler[list[int]]):
    """A batch sampler of 1, 2, 3, ... indices."""

    def __iter__(self) -> Iterator[list[int]]:
        at = 0
        for size in range(1, 7):
            yield list(range(at, at + size))
            at += size

    def __len__(self) -> int:
        return 6


def listed(samples: list[Any]) -> Any:
    return samples


def stacked(samples: list[Any]) -> Any:
    return {"sum": torch.stack(list(samples)).sum(0), "max": np.array(torch.stack(list(samples)).max().item()), "n": len(samples)}


def one(sample: Any) -> Any:
    return sample, "one"


def strange(samples: list[Any]) -> Any:
    return torch.stack(list(samples)).t(), {1: None, "x": [b"y", 2j]}, np.asfortranarray(np.ones((2, 3))), np.float32(3)


def seeded(worker_id: int) -> None:
    random.seed(worker_id)
    torch.manual_seed(worker_id)
    np.random.seed(worker_id)


class Case:
    """A name, a dataset and the keyword arguments of DataLoader, created separately for each side."""

    def __init__(self, name: str, dataset: Callable[[], Any], epochs: int = 1, **options: Any) -> None:
        self.name, self.dataset, self.epochs, self.options = name, dataset, epochs, options

    def keywords(self) -> dict[str, Any]:
        return {k: v() if k in ("sampler", "batch_sampler", "generator") else v for k, v in self.options.items()}


def cases() -> Iterator[Case]:
    def of(kind: str, base: type[SampleFunction] = SampleFunction) -> Callable[[], Any]:
        return lambda: base(KINDS[kind])

    for kind in KINDS:  # every kind of sample: without workers, with one, with two, and without batches
        for num_workers in (0, 1, 2):
            yield Case(f"{kind}-w{num_workers}", of(kind), batch_size=5, num_workers=num_workers)
        if kind != "varying":  # torch itself refuses these
            yield Case(f"{kind}-shuffled-w2", of(kind), batch_size=4, num_workers=2, shuffle=True, drop_last=True)
        yield Case(f"{kind}-single-w2", of(kind), batch_size=None, num_workers=2)
    for batch_size in (1, 3, 7, 23, 50):
        for drop_last in (False, True):
            for shuffle in (False, True):
                yield Case(
                    f"size{batch_size}-drop{drop_last}-shuffle{shuffle}",
                    of("pair"),
                    batch_size=batch_size,
                    drop_last=drop_last,
                    shuffle=shuffle,
                    num_workers=2,
                )
    for name, sampler in SAMPLERS.items():
        for num_workers in (0, 2):
            yield Case(f"sampler-{name}-w{num_workers}", of("torch_noise"), batch_size=4, sampler=sampler, num_workers=num_workers)
        yield Case(f"sampler-{name}-prefetch5", of("pair"), batch_size=3, sampler=sampler, num_workers=2, prefetch_factor=5)
    for name, batch_sampler in BATCH_SAMPLERS.items():
        for num_workers in (0, 2):
            yield Case(f"batches-{name}-w{num_workers}", of("pair"), batch_sampler=batch_sampler, num_workers=num_workers)
    yield Case("keys", lambda: StringKeys(None), sampler=lambda: [f"k{i}" for i in range(N)], batch_size=4, num_workers=2)
    yield Case("key-batches", lambda: StringKeys(None), batch_sampler=lambda: [["k1", "k2"], ["k3"]], num_workers=2)
    for num_workers in (0, 2):
        yield Case(
            f"iterators-w{num_workers}", of("pair"), batch_sampler=lambda: [iter([1, 2]), iter([3])], num_workers=num_workers
        )
    yield Case("negative", of("pair"), sampler=lambda: [-1, 0, -N, 3], batch_size=2, num_workers=2)
    for kind in ("pair", "text", "all_noise", "varying"):
        for num_workers in (0, 2):
            yield Case(f"getitems-{kind}-w{num_workers}", of(kind, WithGetItems), batch_size=5, num_workers=num_workers)
    for collate in (listed, stacked, strange):
        for num_workers in (0, 1, 2):
            yield Case(
                f"collate-{collate.__name__}-w{num_workers}",
                of("tensor"),
                batch_size=4,
                collate_fn=collate,
                num_workers=num_workers,
            )
    yield Case("collate-lambda", of("tensor"), batch_size=4, collate_fn=lambda s: torch.stack(s).sum(), num_workers=2)
    yield Case("collate-one", of("tensor"), batch_size=None, collate_fn=one, num_workers=2)
    for prefetch_factor in (1, 2, 4, 9):
        yield Case(f"prefetch{prefetch_factor}", of("all_noise"), batch_size=3, num_workers=2, prefetch_factor=prefetch_factor)
    for persistent in (False, True):
        for kind in ("pair", "all_noise", "worker_of"):
            for num_workers in (1, 2):
                yield Case(
                    f"epochs3-{kind}-persistent{persistent}-w{num_workers}",
                    of(kind),
                    epochs=3,
                    batch_size=5,
                    shuffle=True,
                    num_workers=num_workers,
                    persistent_workers=persistent,
                )
    for num_workers in (0, 2):
        yield Case(
            f"generator-w{num_workers}",
            of("torch_noise"),
            epochs=2,
            batch_size=4,
            shuffle=True,
            generator=lambda: torch.Generator().manual_seed(5),
            num_workers=num_workers,
        )
        yield Case(
            f"subset-w{num_workers}",
            lambda: Subset(SampleFunction(KINDS["pair"]), [3, 1, 4, 1, 5]),
            batch_size=2,
            num_workers=num_workers,
        )
        yield Case(
            f"concat-w{num_workers}",
            lambda: ConcatDataset([SampleFunction(KINDS["pair"], 4), SampleFunction(KINDS["pair"], 3)]),
            batch_size=3,
            num_workers=num_workers,
        )
        yield Case(
            f"tensors-w{num_workers}",
            lambda: TensorDataset(torch.arange(20).reshape(10, 2), torch.arange(10.0)),
            batch_size=3,
            shuffle=True,
            num_workers=num_workers,
        )
    for kind in ("all_noise", "worker_of"):
        yield Case(f"init-{kind}", of(kind), batch_size=5, num_workers=2, worker_init_fn=seeded)
    yield Case("three-workers", of("all_noise"), epochs=2, batch_size=2, num_workers=3, shuffle=True)
    yield Case("pinned-without-a-gpu", of("pair"), batch_size=5, num_workers=2, pin_memory=True)
    yield Case("out-of-order-allowed", of("pair"), batch_size=50, num_workers=2, in_order=False)
    yield Case("timeout", of("pair"), batch_size=5, num_workers=2, timeout=60)
    for method, kind in (("spawn", "all_noise"), ("forkserver", "nested")):  # torch's workers import it for seconds
        yield Case(f"{method}-{kind}", of(kind), batch_size=5, num_workers=2, shuffle=True, multiprocessing_context=method)
    tokens = torch.arange(20).to(torch.uint16)  # torch cannot read its own pickle of this dtype
    yield Case("spawn-uint16", lambda: TensorDataset(tokens), num_workers=2, multiprocessing_context="spawn")


SAMPLERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialSampler(range(N)),
    "random": lambda: RandomSampler(range(N)),
    "replacement": lambda: RandomSampler(range(N), replacement=True, num_samples=40),
    "fewer": lambda: RandomSampler(range(N), num_samples=9),
    "more": lambda: RandomSampler(range(N), num_samples=50),
    "subset": lambda: SubsetRandomSampler(range(3, 17)),
    "weighted": lambda: WeightedRandomSampler([float(i) for i in range(N)], 30),
    "drawing": Drawing,
    "list": lambda: [5, 3, 5, 8],
    "generator": lambda: RandomSampler(range(N), generator=torch.Generator().manual_seed(3)),
}
BATCH_SAMPLERS: dict[str, Callable[[], Any]] = {
    "uneven": Uneven,
    "torchs": lambda: BatchSampler(RandomSampler(range(N)), 4, False),
    "dropping": lambda: BatchSampler(SequentialSampler(range(N)), 4, True),
    "drawing": lambda: BatchSampler(Drawing(), 3, False),
    "tuples": lambda: [(1, 2), (3, 4, 5)],
}
CASES = list(cases())


def test_at_least_two_hundred_configurations_are_listed() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 200


def equal(a: Any, b: Any) -> bool:
    """Returns whether two values are equal in type, structure, dtype, shape, strides and content."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        return same and bool(torch.equal(a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.strides == b.strides and bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "__next__"):
        return equal(list(a), list(b))
    return bool(a == b)


def run(kind: Any, case: Case) -> tuple[list[Any], list[Any]]:
    """Returns every batch of every epoch, and the draws from the global generators after each."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    batches, draws = [], []
    loader = kind(case.dataset(), **case.keywords())
    length = len(loader)
    for _ in range(case.epochs):
        for batch in loader:
            batches.append(batch)
            if len(batches) % 3 == 0:  # a training loop draws, too
                draws.append(torch.rand(()).item())
        draws += [torch.rand(()).item(), np.random.rand(), random.random()]
    if hasattr(loader, "close"):
        loader.close()
    return batches, [length, *draws]


def marked(case: Case) -> Any:
    """Returns the case as a parameter, marked slow if each worker imports torch."""
    method = case.options.get("multiprocessing_context")
    return pytest.param(case, id=case.name, marks=[slow] if method in ("spawn", "forkserver") else [])


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_batches_and_draws_equal_torchs(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice that other tests check
        expected, expected_draws = run(DataLoader, case)
        got, draws = run(ShmLoader, case)
    assert expected_draws == draws
    assert len(expected) == len(got)
    for one_expected, one_got in zip(expected, got, strict=True):
        assert equal(one_expected, one_got), (one_expected, one_got)
