"""Generators that a dataset owns start each sample at its own stream, whichever worker reads it."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from shmload import ShmLoader
from shmload.worker import own_generators, reseeding
from shmload.worker.own_generators import OwnGenerators
from shmload.worker.sample_rng import generators_kept
from tests.loader.own_data import DrawingCollate, OwnsGenerators, ReadsSeveral, ReplacesGenerators

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # there may be fewer cores than workers
slow = pytest.mark.slow(reason="workers start as new interpreters, which import everything again")
DATASETS = {"one by one": OwnsGenerators, "replaced": ReplacesGenerators, "many": ReadsSeveral}
OPTIONS: dict[str, Any] = {"batch_size": 5, "shuffle": True, "seed": 7}


@pytest.fixture(autouse=True)
def restored_generators() -> Iterator[None]:
    with generators_kept():
        yield


def epochs(dataset: Any, count: int = 2, **options: Any) -> list[list[bytes]]:
    with ShmLoader(dataset, **{**OPTIONS, **options}) as loader:
        return [[batch.numpy().tobytes() for batch in loader] for _ in range(count)]


@pytest.fixture(scope="module")
def expected() -> list[list[bytes]]:
    return epochs(OwnsGenerators())


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 1},
        {"num_workers": 2},
        pytest.param({"num_workers": 2, "multiprocessing_context": "spawn"}, marks=slow),
        pytest.param({"num_workers": 1, "multiprocessing_context": "forkserver"}, marks=slow),
    ],
    ids=str,
)
def test_draws_do_not_depend_on_the_reader(name: str, options: dict[str, Any], expected: list[list[bytes]]) -> None:
    dataset = DATASETS[name]()
    for _ in range(7):
        dataset[0]  # wherever the generators are
    assert expected == epochs(dataset, **options)


def test_draws_differ_by_sample_and_epoch(expected: list[list[bytes]]) -> None:
    rows = [row for epoch in expected for batch in epoch for row in np.frombuffer(batch).reshape(-1, 14)]
    assert len(rows) == 48
    for column in range(1, 14):
        assert len({row[column] for row in rows}) == 48, column
    assert len(set(rows[0])) == 14  # no two generators share a stream


def test_draws_differ_by_seed(expected: list[list[bytes]]) -> None:
    assert expected != epochs(OwnsGenerators(), seed=8)


@pytest.mark.parametrize("stop", [1, 4])
def test_resume_continues_the_draws(stop: int, expected: list[list[bytes]]) -> None:
    with ShmLoader(OwnsGenerators(), num_workers=2, **OPTIONS) as loader:
        stream = iter(loader)
        for _ in range(stop):
            next(stream)
        state = json.loads(json.dumps(loader.state_dict()))
    with ShmLoader(OwnsGenerators(), num_workers=1, **OPTIONS) as resumed:
        resumed.load_state_dict(state)
        assert expected[0][stop:] == [batch.numpy().tobytes() for batch in resumed]


class Deadly(OwnsGenerators):
    """A dataset that kills its worker at one sample, once."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.flag = flag

    def __getitem__(self, index: int) -> Any:
        if index == 11 and not os.path.exists(self.flag):
            with open(self.flag, "w"):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_replaced_worker_draws_the_same(tmp_path: Any, expected: list[list[bytes]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the death is reported
        assert expected == epochs(Deadly(str(tmp_path / "died")), num_workers=2)
    assert (tmp_path / "died").exists()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_collate_fn_continues_the_last_samples_stream(num_workers: int) -> None:
    collate_fn = DrawingCollate()
    assert epochs(OwnsGenerators(), collate_fn=DrawingCollate()) == epochs(
        OwnsGenerators(), collate_fn=collate_fn, num_workers=num_workers
    )


def words_of(seed: int, epoch: int, index: int, path: str) -> list[int]:
    """Returns a sample's words for the generator at `path`, by numpy's Philox, which increments before it draws."""
    stream = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little")
    counter = (index | epoch << 64 | stream << 128 | 2 << 192) - 1
    words: list[int] = np.random.Philox(key=[seed, 0], counter=counter % (1 << 256)).random_raw(4).tolist()
    return words


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_start_of_each_stream_never_changes(monkeypatch: pytest.MonkeyPatch, is_in_memory: bool) -> None:
    """A change here changes the data of every seed. Tested with and without known memory addresses of generators."""
    if not is_in_memory:
        monkeypatch.setattr(own_generators, "python_offset", lambda: 0)
        monkeypatch.setattr(own_generators, "_knows_pcg64", lambda: False)
    dataset = Subset(OwnsGenerators(), range(24))  # type: ignore[arg-type]
    own = OwnGenerators(dataset)
    restored_generators: Any = dataset.dataset
    for index in (0, 9, -1):
        for _ in range(3):
            restored_generators[0]
        own.begin(7, 2, index)
        words = {
            name: words_of(7, 2, index % (1 << 64), f"dataset.dataset.{name}")
            for name in ("python", "numpy", "torch", "legacy['train']")
        }
        assert random.Random(words["python"][0]).getstate() == restored_generators.python.getstate()
        bits = np.random.PCG64()
        a, b, c, d = words["numpy"]
        bits.state = {
            "bit_generator": "PCG64",
            "state": {"state": a << 64 | b, "inc": c << 64 | d | 1},
            "has_uint32": 0,
            "uinteger": 0,
        }
        assert bits.state == restored_generators.numpy.bit_generator.state
        assert torch.equal(torch.Generator().manual_seed(words["torch"][0]).get_state(), restored_generators.torch.get_state())
        legacy = np.random.RandomState(words["legacy['train']"][0] & 0xFFFFFFFF)
        assert str(legacy.get_state()) == str(restored_generators.legacy["train"].get_state())


def test_addresses_of_generator_states_are_found() -> None:
    assert reseeding.python_offset()
    assert own_generators._knows_pcg64()


class _Transform:
    def __init__(self, generator: Any) -> None:
        self.generators = [generator]


class Unknown(np.random.PCG64):
    """A user-defined kind of bit generator."""


@pytest.mark.parametrize("num_workers", [0, 1])
def test_seed_samples_false_leaves_own_generators_alone(num_workers: int) -> None:
    dataset = OwnsGenerators()
    before = dataset.python.getstate()
    assert epochs(dataset, seed_samples=False, num_workers=num_workers) != epochs(OwnsGenerators())
    assert (before == dataset.python.getstate()) == (num_workers == 1)


@pytest.mark.parametrize(
    "generator", [random.SystemRandom(), np.random.Generator(Unknown(1)), {random.Random(1)}], ids=["system", "unknown", "set"]
)
def test_generators_that_cannot_be_seeded_are_warned_about(generator: Any) -> None:
    dataset = OwnsGenerators()
    dataset.transform = {"train": _Transform(generator)}  # type: ignore[attr-defined]  # as users attach them
    with pytest.warns(UserWarning, match=r"dataset\.transform\['train'\]\.generators\[0\](\{\})?\. What they draw"):
        ShmLoader(dataset, seed=1)
    ShmLoader(dataset, seed=1, seed_samples=False)
    ShmLoader(dataset)


class LazyCollator:
    """Makes its generator in its first call, like a collator of transformers for language models with a seed."""

    def __init__(self, seed: int | None) -> None:
        self.seed, self.generator = seed, None

    def get_generator(self, seed: int) -> Any:
        return torch.Generator().manual_seed(seed)

    def __call__(self, samples: list[int]) -> Any:
        if self.seed and self.generator is None:
            self.generator = self.get_generator(self.seed)
        return torch.stack([torch.tensor(samples), torch.randint(1 << 40, (len(samples),), generator=self.generator)])


@pytest.mark.parametrize(("num_workers", "backend"), [(1, "process"), (2, "process"), (2, "thread")])
@pytest.mark.parametrize("seed", [None, 4])
def test_collator_that_makes_its_generator_later_draws_the_same(seed: int | None, num_workers: int, backend: str) -> None:
    expected = epochs(range(30), collate_fn=LazyCollator(seed))
    assert len({row for epoch in expected for row in epoch}) == 12
    assert epochs(range(30), collate_fn=LazyCollator(seed), num_workers=num_workers, backend=backend) == expected


def test_global_generators_are_not_treated_as_own() -> None:
    dataset = Subset([0], [0])
    dataset.draw = random.random  # type: ignore[attr-defined]  # a method of the global one
    dataset.legacy = np.random.mtrand._rand  # type: ignore[attr-defined]  # the global one
    dataset.bits = np.random.get_bit_generator()  # type: ignore[attr-defined]  # as above
    dataset.generator = torch.default_generator  # type: ignore[attr-defined]  # as above
    assert not OwnGenerators(dataset)


def test_deeply_nested_generator_is_found() -> None:
    dataset = Subset([0], [0])
    dataset.__dict__.update({f"option{i}": object() for i in range(100)}, rng=random.Random(1))
    assert OwnGenerators(dataset)


def test_first_path_by_name_identifies_a_shared_generator() -> None:
    """The order of attributes can change in a copy."""
    shared = random.Random()
    ways: list[Any] = [Subset([0], [0]), Subset([0], [0])]
    ways[0].__dict__.update(a=_Transform(shared), b=_Transform(shared), c=[[shared]])
    ways[1].__dict__.update(c=[[shared]], b=_Transform(shared), a=_Transform(shared))
    drawn = []
    for dataset in ways:
        OwnGenerators(dataset).begin(1, 2, 3)
        drawn.append(shared.random())
    assert drawn[0] == drawn[1]


def test_generators_in_closures_and_defaults_are_found() -> None:
    rng, other = np.random.default_rng(), random.Random()

    def transform(value: float, by_default: random.Random = other) -> float:
        return value + rng.random() + by_default.random()

    dataset = Subset([0], [0])
    dataset.transform = [transform, lambda: None]  # type: ignore[attr-defined]
    own = OwnGenerators(dataset)
    drawn = []
    for _ in range(2):
        own.begin(1, 2, 3)
        drawn.append((rng.random(), other.random()))
    assert drawn[0] == drawn[1]


def _keeping(draw: Any) -> Any:
    """Returns a dataset that keeps a method of a generator in every way."""
    dataset: Any = Subset([0], [0])
    dataset.draw = draw[0]
    dataset.of_list, dataset.of_dict = [draw[1]], {"draw": draw[2]}
    dataset.of_partial = functools.partial(draw[3])
    dataset.of_closure = lambda: draw_in_closure()
    draw_in_closure = draw[4]
    return dataset


@pytest.mark.parametrize(
    "method",
    [
        lambda: random.Random(1).random,
        lambda: functools.partial(random.Random(1).getrandbits, 60),
        lambda: random.Random(1).normalvariate,
        lambda: np.random.default_rng(1).random,
        lambda: np.random.RandomState(1).rand,
        lambda: np.random.PCG64(1).random_raw,
    ],
    ids=["random", "getrandbits", "normalvariate", "Generator", "RandomState", "BitGenerator"],
)
def test_generator_of_a_kept_method_is_found(method: Any) -> None:
    dataset = _keeping([method() for _ in range(5)])
    ways = [dataset.draw, dataset.of_list[0], dataset.of_dict["draw"], dataset.of_partial, dataset.of_closure]
    own = OwnGenerators(dataset)
    drawn = []
    for _ in range(2):
        own.begin(1, 2, 3)
        drawn.append([way() for way in ways])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 5


def test_objects_of_other_compiled_functions_are_not_searched() -> None:
    dataset: Any = Subset([0], [0])
    dataset.functions = [len, np.zeros, torch.rand, dict.fromkeys, random.random, random.getrandbits]  # of modules and classes
    assert not OwnGenerators(dataset)
    assert OwnGenerators(dataset).unreachable == []
