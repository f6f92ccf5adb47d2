"""What a worker sees: its number, its copy of the dataset, its seeds, its threads."""

from __future__ import annotations

import multiprocessing
import os
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from shmload import ShmLoader
from tests.behaviour.behaviour_kit import Numbers, as_list, batches, same_as_torch

slow = pytest.mark.slow(reason="workers start as new interpreters, which import everything again")


def draws() -> list[Any]:
    """Draws from every global generator."""
    return [random.random(), random.getrandbits(64), torch.rand(2).tolist(), *np.random.rand(2).tolist()]


class CallInWorker(Numbers):
    """A dataset whose samples are what a function, called in the worker with the dataset or nothing, returns."""

    def __init__(self, what: Any, n: int = 6) -> None:
        super().__init__(n)
        self.what = what
        self.notes: list[Any] = []

    def __getitem__(self, index: int) -> Any:
        return self.what(self)


def fields(dataset: Any) -> Any:
    info = get_worker_info()
    if info is None:
        return None
    newer = getattr(info, "rng", None), getattr(info, "worker_method", None)
    return info.id, info.num_workers, info.seed, info.dataset is dataset, newer, repr(type(info))


def process(dataset: Any) -> Any:
    here = multiprocessing.current_process()
    parent = multiprocessing.parent_process()
    return here.daemon, parent is not None and parent.pid == os.getppid(), torch.get_num_threads()


def states(dataset: Any) -> Any:
    return (torch.initial_seed(), hash(random.getstate()), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def noise(dataset: Any) -> Any:
    return draws()


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_worker_info_has_torchs_fields(num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(CallInWorker(fields), batch_size=2, num_workers=num_workers, collate_fn=as_list)
        return [batches(loader) for _ in range(2)], get_worker_info()

    epochs, outside = same_as_torch(program)
    assert outside is None
    if num_workers:
        assert [i % num_workers for i in range(3)] == [batch[0][0] for batch in epochs[0]]
        assert all(batch[0][3] for batch in epochs[0])


def test_worker_info_is_frozen_and_names_its_fields() -> None:
    def change(dataset: Any) -> Any:
        try:
            get_worker_info().id = 5  # type: ignore[misc,union-attr]  # setting it is tested
        except Exception as error:
            return type(error).__name__, repr(get_worker_info()).split("dataset")[0]
        return None

    same_as_torch(lambda kind: batches(kind(CallInWorker(change), num_workers=1, batch_size=None, generator=torch.Generator())))


@pytest.mark.parametrize("what", [process, states, noise], ids=lambda f: f.__name__)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_process_seeds_and_random_numbers_of_a_worker_are_torchs(what: Any, num_workers: int) -> None:
    def program(kind: Any) -> Any:
        loader = kind(CallInWorker(what), num_workers=num_workers, batch_size=2, collate_fn=as_list)
        return [batches(loader) for _ in range(2)]

    found = same_as_torch(program)
    if what is process:
        assert found[0][0][0] == (True, True, 1)


@pytest.mark.parametrize("persistent", [False, True])
def test_base_seed_is_drawn_from_the_generator(persistent: bool) -> None:
    def program(kind: Any) -> Any:
        generator = torch.Generator().manual_seed(9)
        loader = kind(CallInWorker(noise), num_workers=2, collate_fn=as_list, generator=generator, persistent_workers=persistent)
        return [batches(loader) for _ in range(2)], generator.initial_seed(), torch.rand((), generator=generator)

    first, second = same_as_torch(program)[0]
    assert first != second


def test_base_seed_is_an_attribute_of_the_iterator() -> None:
    def program(kind: Any) -> Any:
        stream = iter(kind(CallInWorker(fields), num_workers=2, collate_fn=as_list))
        return stream._base_seed, next(stream)

    base_seed, [first] = same_as_torch(program)
    assert base_seed == first[2]


def note(worker_id: int) -> None:
    dataset: Any = get_worker_info().dataset
    dataset.notes.append((worker_id, fields(dataset), draws(), torch.get_num_threads()))


def notes(dataset: Any) -> Any:
    return dataset.notes


METHODS = pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=slow), pytest.param("forkserver", marks=slow)])


@METHODS
def test_worker_init_fn_is_called_once_with_the_workers_number_after_seeding(method: str) -> None:
    from tests.behaviour.worker_programs import NotesDataset, note_in_worker

    def program(kind: Any) -> Any:
        dataset = NotesDataset(4)
        loader = kind(
            dataset, num_workers=2, batch_size=2, collate_fn=as_list, worker_init_fn=note_in_worker, multiprocessing_context=method
        )
        return [*loader], dataset.notes

    found, outside = same_as_torch(program)
    assert outside == []
    assert [batch[0][0] for batch in found] == [0, 1]


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_keeps_its_dataset_while_it_lives(persistent: bool) -> None:
    def count(dataset: Any) -> int:
        dataset.notes.append(0)
        return len(dataset.notes)

    def program(kind: Any) -> Any:
        dataset = CallInWorker(count)
        loader = kind(dataset, num_workers=2, batch_size=None, persistent_workers=persistent)
        return [batches(loader) for _ in range(2)], dataset.notes

    epochs, outside = same_as_torch(program)
    assert outside == []
    assert epochs[1] == ([4, 4, 5, 5, 6, 6] if persistent else [1, 1, 2, 2, 3, 3])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"batch_size": None}], ids=str)
def test_generators_of_the_trainer_have_torchs_state_at_each_step(num_workers: int, options: dict[str, Any]) -> None:
    def program(kind: Any) -> Any:
        loader = kind(Numbers(9), num_workers=num_workers, **options)
        seen = [draws()]
        stream = iter(loader)
        seen.append(draws())
        for _ in range(4):
            next(stream)
            seen.append(draws())
        iter(loader)
        seen.append(draws())
        len(loader)
        return seen, draws()

    same_as_torch(program)


def test_worker_has_the_environment_and_folder_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHAVIOUR", "seen")
    dataset = CallInWorker(lambda dataset: (os.environ["BEHAVIOUR"], os.getcwd()), n=1)
    found = same_as_torch(lambda kind: batches(kind(dataset, num_workers=1, collate_fn=as_list)))
    assert found == [[("seen", os.getcwd())]]


def test_warning_in_a_worker_is_not_given_in_the_trainer() -> None:
    def warn(dataset: Any) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("in the worker", stacklevel=1)
        return 1

    assert same_as_torch(lambda kind: len(batches(kind(CallInWorker(warn), num_workers=1)))) == 6


def test_dataset_of_the_trainer_is_not_changed() -> None:
    for kind in (DataLoader, ShmLoader):
        dataset = CallInWorker(notes)
        batches(kind(dataset, num_workers=1, worker_init_fn=note, batch_size=None))
        assert dataset.notes == []
