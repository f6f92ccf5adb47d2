"""Before each sample the global generators are seeded as by their public calls, whatever the previous sample did with them."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shmload._core.permutation import ISAS, sample_key
from shmload._core.twister import seeded
from shmload.worker import reseeding
from shmload.worker.reseeding import GlobalGenerators
from shmload.worker.sample_rng import generators_kept, global_generators

STREAM = 1
BITS64 = st.integers(0, 2**64 - 1)


@pytest.fixture(autouse=True)
def restored_generators() -> Iterator[None]:
    with generators_kept():
        yield


def states() -> dict[str, Any]:
    """Returns the visible state of all generators."""
    numpys: Any = np.random.get_state()
    return {
        "random": random.getstate(),
        "numpy": (numpys[0], numpys[1].tolist(), *numpys[2:]),
        "torch": (torch.get_rng_state().tolist(), torch.initial_seed(), torch.default_generator.initial_seed()),
    }


def draws() -> list[float]:
    """Returns the next draws of each generator, gaussians first."""
    pythons = [random.gauss(), random.random(), random.gauss(), random.getrandbits(70)]
    numpys = [np.random.standard_normal(), np.random.random(), *np.random.randn(2), np.random.randint(1 << 40)]
    torchs = [*torch.randn(3, dtype=torch.float64).tolist(), *torch.rand(20).tolist(), *torch.randn(17).tolist()]
    return [*pythons, *numpys, *torchs]


def as_seeded(seed: int, epoch: int, index: int) -> tuple[dict[str, Any], list[float]]:
    """Returns states and draws after seeding by the public calls."""
    key = sample_key(seed, epoch, index & 0xFFFFFFFFFFFFFFFF, STREAM)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)
    return states(), draws()


def twice_gaussian(is_float: bool) -> None:
    """Leaves torch with half a pair of gaussians, doubles or floats, and the words unchanged."""
    raw = bytearray(torch.get_rng_state().numpy().tobytes())
    at, left = (5048, struct.pack("<f?", 0.5, True)) if is_float else (5016, struct.pack("<dddi", 0.5, 0.0, 0.0, 1))
    raw[at : at + len(left)] = left
    torch.set_rng_state(torch.frombuffer(raw, dtype=torch.uint8))


HABITS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "random": random.random,
    "random gauss": random.gauss,
    "random 624 words": lambda: random.getrandbits(32 * 624),
    "random seeds": lambda: random.seed(3),
    "random seeds by text": lambda: random.seed("three"),
    "random keeps a gaussian, and its words": lambda: random.setstate((*random.getstate()[:2], 0.5)),
    "random goes back": lambda: random.setstate(random.Random(5).getstate()),
    "random shuffles": lambda: random.shuffle([1, 2, 3]),
    "numpy": np.random.random,
    "numpy gauss": np.random.standard_normal,
    "numpy 624 words": lambda: np.random.bytes(4 * 624),
    "numpy seeds": lambda: np.random.seed(3),
    "numpy seeds by a list": lambda: np.random.seed([3, 4]),
    "numpy keeps a gaussian, and its words": lambda: np.random.set_state((*np.random.get_state()[:3], 1, 0.5)),  # type: ignore[arg-type]
    "numpy has used its gaussian": lambda: np.random.set_state((*np.random.get_state()[:3], 0, 0.5)),  # type: ignore[arg-type]
    "numpy goes back": lambda: np.random.set_state(np.random.RandomState(5).get_state()),
    "numpy binomial": lambda: np.random.binomial(100, 0.3),
    "torch": lambda: torch.rand(1),
    "torch gauss": lambda: torch.randn(1, dtype=torch.float64),
    "torch many": lambda: torch.randn(100),
    "torch 624 words": lambda: torch.empty(624, dtype=torch.int32).random_(),
    "torch seeds": lambda: torch.manual_seed(3),
    "torch seeds itself": torch.seed,
    "torch goes back": lambda: torch.set_rng_state(torch.Generator().manual_seed(5).get_state()),
    "torch keeps a gaussian": lambda: twice_gaussian(is_float=False),
    "torch keeps a float gaussian": lambda: twice_gaussian(is_float=True),
    "torch permutes": lambda: torch.randperm(20),
    "torch forks": lambda: torch.random.fork_rng(devices=[]).__enter__(),
}


@pytest.mark.parametrize("habit", HABITS)
def test_every_use_of_a_generator_is_detected(habit: str) -> None:
    generators = GlobalGenerators()
    for index in range(3):
        generators.begin(7, 0, index, [0, 1, 2], index)
        before = states()
        assert generators.reseeder.are_as_seeded()
        HABITS[habit]()
        found = states()
        has_moved = found | {"numpy": found["numpy"][:4]} != before | {"numpy": before["numpy"][:4]}  # a gaussian that is not there
        assert generators.reseeder.are_as_seeded() is not has_moved


@pytest.mark.parametrize("place", ["random_at", "numpy_at", "torch_at"])
def test_generator_without_readable_memory_counts_as_used(place: str) -> None:
    generators = GlobalGenerators()
    assert not generators.reseeder.are_as_seeded()  # nothing is seeded yet
    generators.begin(7, 0, 0, None, 0)
    assert generators.reseeder.are_as_seeded()
    setattr(generators.reseeder, place, 0)
    assert not generators.reseeder.are_as_seeded()


@pytest.mark.slow(reason="many examples")
@given(st.lists(BITS64 | st.integers(0, 2**32), min_size=1, max_size=16), st.sampled_from([0, 1, 2]))
def test_seeded_words_equal_those_of_the_public_calls(keys: list[int], isa: int) -> None:
    for key, (mixed, plain) in zip(keys, seeded(keys, min(isa, len(ISAS) - 1)), strict=True):
        assert random.Random(key).getstate()[1][:-1] == tuple(np.frombuffer(mixed, np.uint32).tolist())
        numpys: Any = np.random.RandomState(key & 0xFFFFFFFF).get_state()
        assert numpys[1].tolist() == np.frombuffer(plain, np.uint32).tolist()
        torchs = torch.Generator().manual_seed(key).get_state().numpy()[24 : 24 + 8 * 624]
        assert np.frombuffer(torchs.tobytes(), np.uint64).tolist() == np.frombuffer(plain, np.uint32).tolist()


@pytest.mark.slow(reason="many examples")
@given(
    BITS64,
    BITS64,
    st.lists(
        st.tuples(st.integers(-(1 << 63), (1 << 63) - 1), st.lists(st.sampled_from(sorted(HABITS)), max_size=3), st.booleans()),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from(["ahead", "nothing ahead", "others ahead"]),
)
def test_sample_begins_as_after_the_public_calls(
    seed: int, epoch: int, samples: list[tuple[int, list[str], bool]], ahead: str
) -> None:
    generators = GlobalGenerators()
    keys: list[Any] | None = {"ahead": [index for index, *_ in samples], "nothing ahead": None}.get(ahead, [0, "a", 1 << 70] * 7)
    for row, (index, habits, draws_all) in enumerate(samples):
        generators.begin(seed, epoch, index, keys, row)
        began = states()
        drawn = draws() if draws_all else None
        ended = states()
        wanted, wanted_draws = as_seeded(seed, epoch, index)
        assert wanted == began
        if drawn is None:  # the next sample begins from there with nothing drawn
            generators.begin(seed, epoch, index, None, 0)
            assert wanted == states()
        else:
            assert wanted_draws == drawn
            assert states() == ended
        for habit in habits:
            HABITS[habit]()


@pytest.mark.parametrize("habit", HABITS)
def test_next_sample_does_not_see_what_a_sample_did(habit: str) -> None:
    generators = GlobalGenerators()
    for index in range(3):
        generators.begin(7, 0, index, [0, 1, 2], index)
        began = states()
        HABITS[habit]()
        after = states()
        assert as_seeded(7, 0, index)[0] == began
        random.setstate(after["random"])  # exactly as the sample left them
        np.random.set_state(after["numpy"])
        torch.set_rng_state(torch.tensor(after["torch"][0], dtype=torch.uint8))


def test_seeds_prepared_for_one_epoch_are_not_used_in_the_next() -> None:
    generators = GlobalGenerators()
    for seed, epoch, index in [(7, 0, 0), (7, 0, 1), (7, 1, 2), (8, 1, 3), (8, 1, 3), (8, 1, 5), (8, 2, 4)]:
        generators.begin(seed, epoch, index, [0, 1, 2, 3, 4, 5], index)
        began = states()
        assert as_seeded(seed, epoch, index)[0] == began


def test_addresses_of_generator_words_are_found() -> None:
    """Otherwise seeding works but takes twelve times as long: CPython, numpy and torch must keep their words at these addresses."""
    generators = GlobalGenerators()
    generators.begin(1, 2, 0, None, 0)
    reseeder = generators.reseeder
    assert all((reseeder.random_at, reseeder.numpy_at, reseeder.gauss_at, reseeder.torch_at))
    assert [reseeder.begin(1, 2, index, [3, 4, 5], index - 3) for index in (3, 4, 5)] == [0, 0, 0]
    torch.rand(1)
    np.random.random()
    random.random()
    assert reseeder.begin(1, 2, 6, None, 0) == reseeding.NUMPY | reseeding.TORCH


PLACES = {"_random_at": reseeding.RANDOM, "_gauss_at": reseeding.NUMPY, "_torch_at": reseeding.TORCH}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("is_wrong", [False, True], ids=["is not found", "is another"])
def test_generator_without_a_known_address_is_seeded_by_its_call(
    monkeypatch: pytest.MonkeyPatch, name: str, is_wrong: bool
) -> None:
    elsewhere = (ctypes.c_char * 6000)()
    monkeypatch.setattr(reseeding, name, lambda *args: ctypes.addressof(elsewhere) + 1004 if is_wrong else 0)
    generators = GlobalGenerators()
    generators.begin(7, 0, 0, None, 0)
    assert generators.reseeder.begin(7, 0, 1, None, 0) == PLACES[name]
    for index in range(3):
        generators.begin(7, 0, index, [0, 1, 2], index)
        began, drawn = states(), draws()
        assert (began, drawn) == as_seeded(7, 0, index)


def test_unreadable_process_memory_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, flags: int) -> int:
        raise PermissionError(path)

    monkeypatch.setattr(reseeding.os, "open", refuse)  # type: ignore[attr-defined]
    assert reseeding._torch_at(torch.default_generator) == 0


def test_invalid_pointer_does_not_crash() -> None:
    class Elsewhere:
        """An object that does not hold a memory address."""

        __slots__ = ("a", "b")

        def manual_seed(self, seed: int) -> torch.Generator:
            return torch.default_generator.manual_seed(seed)

    assert reseeding._torch_at(Elsewhere()) == 0


def test_bit_generator_replaced_in_numpy_is_seeded_by_numpy() -> None:
    own = np.random.get_bit_generator()  # type: ignore[attr-defined]
    generators = GlobalGenerators()
    try:
        generators.begin(7, 0, 0, None, 0)
        for other in (np.random.MT19937(5), np.random.PCG64(5)):
            np.random.set_bit_generator(other)  # type: ignore[attr-defined]
            generators.begin(7, 0, 1, None, 0)
            drawn = np.random.random(3).tolist()
            np.random.seed(sample_key(7, 0, 1, STREAM) & 0xFFFFFFFF)
            assert np.random.random(3).tolist() == drawn
    finally:
        np.random.set_bit_generator(own)  # type: ignore[attr-defined]
    generators.begin(7, 0, 2, None, 0)
    began, drawn_all = states(), draws()
    assert (began, drawn_all) == as_seeded(7, 0, 2)


@pytest.mark.slow(reason="starts an interpreter")
def test_torch_is_not_imported_for_seeding_and_is_seeded_once_imported(output_of: Callable[..., str]) -> None:
    program = """
import sys
from shmload.worker.sample_rng import begin_sample
from shmload._core.permutation import ISAS, sample_key
begin_sample(7, 0, 0, 0, reseed=True)
assert "torch" not in sys.modules
import random, numpy, torch
for index in range(1, 4):
    begin_sample(7, 0, index, 0, reseed=True, keys=[1, 2, 3], row=index - 1)
    key = sample_key(7, 0, index, 1)
    assert random.getstate() == random.Random(key).getstate()
    assert (numpy.random.get_state()[1] == numpy.random.RandomState(key & 0xFFFFFFFF).get_state()[1]).all()
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(key).get_state())
"""
    assert output_of(program, strict=False) == ""


@pytest.mark.parametrize("num_draws", [0, 1, 7, 700])
@pytest.mark.parametrize("has_gaussian", [False, True])
def test_kept_generators_are_restored(num_draws: int, has_gaussian: bool) -> None:
    generators = global_generators()
    generators.begin(1, 2, 3, None, 0)
    assert generators.reseeder.random_at  # so its state is copied from its memory
    random.seed(5)
    for _ in range(num_draws):
        random.random()
    if has_gaussian:
        random.gauss()  # draws two and stores one
    before = states()
    with generators_kept():
        draws()
        random.seed(6)
        generators.begin(1, 2, 4, None, 0)
        draws()
    assert states() == before
