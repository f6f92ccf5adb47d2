"""Accelerate: a prepared ShmLoader stays one, and everything that Accelerate does around iteration works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from shmload import ShmLoader, Weighted
from shmload.engine.tuning.auto_number import is_auto
from tests.integrations.integrations_kit import Numbers, Tiny, facts

accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install shmload[integrations]")

from shmload.integrations import rebuilt  # noqa: E402  # only where accelerate is
from shmload.integrations.accelerate import PreparedLoader, prepare  # noqa: E402  # only where accelerate is


@pytest.fixture
def make_loader() -> Iterator[Callable[..., ShmLoader[Any]]]:
    made: list[ShmLoader[Any]] = []

    def make(n: int = 22, **options: Any) -> ShmLoader[Any]:
        made.append(ShmLoader(Numbers(n), **{"batch_size": 4, "seed": 7, "shuffle": True} | options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


Make = Callable[..., ShmLoader[Any]]


AUTO = {"num_workers": "auto", "prefetch_factor": "auto"}


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"seed": None, "num_workers": 1}, {"seed": None}, AUTO, {"seed": None, **AUTO}]
)
def test_prepared_loader_stays_a_shm_loader(make_loader: Make, options: dict[str, Any]) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    loader = make_loader(**options)
    prepared = prepare(accelerator, loader)
    assert isinstance(prepared, ShmLoader)
    assert prepared.base_dataloader is loader
    assert accelerator.prepare(prepared) is prepared
    assert prepare(accelerator, prepared) is prepared
    assert accelerator._dataloaders == [prepared]
    assert len(prepared) == len(loader) == 6
    assert prepared.seed == loader.seed


def test_prepared_batches_are_the_loaders_own(make_loader: Make) -> None:
    alone = make_loader()
    expected = [facts(batch) for _ in range(2) for batch in alone]
    prepared = prepare(accelerate.Accelerator(cpu=True), make_loader(num_workers=1))
    assert [facts(batch) for _ in range(2) for batch in prepared] == expected


def test_automatic_values_are_kept(make_loader: Make) -> None:
    with rebuilt(make_loader(**AUTO), batch_size=2) as copied:
        assert all(is_auto(getattr(copied, name)) for name in AUTO)
        assert sum(len(batch["index"]) for batch in copied) == 22


def test_torch_mode_keeps_torchs_order(make_loader: Make) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 1}
    torch.manual_seed(5)
    plain = accelerate.Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(Numbers(), **options))
    expected = [batch["index"].tolist() for _ in range(2) for batch in plain]
    torch.manual_seed(5)
    prepared = prepare(accelerate.Accelerator(cpu=True), make_loader(seed=None, num_workers=1))
    assert [batch["index"].tolist() for _ in range(2) for batch in prepared] == expected


@pytest.mark.parametrize("seed", [None, 7])
def test_nothing_is_copied_and_held_batches_stay(make_loader: Make, seed: int | None) -> None:
    prepared = prepare(accelerate.Accelerator(cpu=True), make_loader(400, seed=seed, num_workers=1, prefetch_factor=6))
    batches = iter(prepared)
    held = [next(batches) for _ in range(3)]
    copies = [facts(batch) for batch in held]
    assert prepared.stats()["slots"]["leased"] == len(held) + 1, "the held batches and the prefetched one are in the ring"
    del held[:2]
    for batch in batches:  # the loop holds one, the adapter the next
        assert (batch["x"] == batch["index"][:, None]).all()
    assert facts(held[0]) == copies[2]
    assert prepared.stats()["num_copied_out"] == 0


@pytest.mark.parametrize("uneven", ["pad", "drop", "exact"])
def test_valid_belongs_to_the_current_batch(make_loader: Make, uneven: str) -> None:
    loader = make_loader(uneven=uneven, num_workers=1)
    prepared = prepare(accelerate.Accelerator(cpu=True), loader)
    expected = [4] * 5 if uneven == "drop" else [4] * 5 + [2]
    assert prepared.valid is None
    assert [prepared.valid for _ in prepared] == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_error_is_raised_after_the_batches_before_it(make_loader: Make, num_workers: int) -> None:
    alone = make_loader(num_workers=num_workers, after_batch=none_of_number_5)
    expected = [batch["index"].tolist() for batch in until_error(alone)]
    prepared = prepare(accelerate.Accelerator(cpu=True), make_loader(num_workers=num_workers, after_batch=none_of_number_5))
    got = [batch["index"].tolist() for batch in until_error(prepared)]
    assert got == expected
    assert 0 < len(got) < 6
    prepared.load_state_dict(prepared.state_dict())
    with pytest.raises(ValueError, match="number 5"):
        next(iter(prepared))


def none_of_number_5(batch: Any) -> Any:
    if 5 in batch["index"].tolist():
        raise ValueError("number 5")
    return batch


def until_error(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    with suppress(ValueError):
        while True:
            yield next(batches)


def test_empty_loader_gives_an_empty_pass(make_loader: Make) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = prepare(accelerator, make_loader(0, shuffle=False))
    assert list(prepared) == []
    assert not accelerator.gradient_state.in_dataloader


def test_all_ranks_have_the_same_state_after_a_pass(make_loader: Make) -> None:
    states = []
    for rank in range(2):
        prepared = prepare(accelerate.Accelerator(cpu=True), make_loader(25, batch_size=6, uneven="exact", rank=rank, world_size=2))
        found = [prepared.state_dict() for _ in prepared]
        states.append([*found[:2], prepared.state_dict()])
    assert states[0] == states[1]
    assert states[0][2]["epoch"] == 1


def test_interrupted_pass_leaves_no_trace(make_loader: Make) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    loader = make_loader(num_workers=1, prefetch_factor=4)
    expected = [facts(batch) for batch in make_loader()][:3]
    prepared = prepare(accelerator, loader)
    got = []
    for batch in prepared:
        got.append(facts(batch))
        if len(got) == 3:
            break
    assert got == expected
    assert prepared.state_dict()["position"] == 12, "the prefetched batch does not count"
    assert not accelerator.gradient_state.in_dataloader
    assert sum(1 for _ in prepared) == 6
    assert prepared.state_dict()["epoch"] == 2


@pytest.mark.parametrize("seed", [None, 7])
def test_gradient_accumulation_steps_at_the_end_too(make_loader: Make, seed: int | None) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    net = Tiny()
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.01), prepare(accelerator, make_loader(seed=seed, num_workers=1))
    )
    stepped, ends = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["x"]))
            optimizer.step()
            stepped.append(accelerator.sync_gradients)
            optimizer.zero_grad()
        ends.append(accelerator.gradient_state.end_of_dataloader)
    assert stepped == [False, False, False, True, False, True]
    assert ends == [False] * 5 + [True]


@pytest.mark.parametrize(("seed", "uneven"), [(None, "pad"), (7, "pad"), (7, "drop"), (7, "exact")])
def test_gather_for_metrics_gives_each_sample_once(make_loader: Make, seed: int | None, uneven: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = prepare(accelerator, make_loader(seed=seed, uneven=uneven))
    gathered = torch.cat([accelerator.gather_for_metrics(batch["index"]) for batch in prepared]).tolist()
    assert len(gathered) == len(set(gathered)) == (20 if seed and uneven == "drop" else 22)


def test_gather_for_metrics_keeps_each_sample_of_an_order_that_is_longer_than_the_dataset() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    with ShmLoader(range(10), 4, sampler=Weighted([1.0] * 10, num_samples=16), seed=3) as loader:
        gathered = [len(accelerator.gather_for_metrics(batch)) for batch in prepare(accelerator, loader)]
    assert gathered == [4, 4, 4, 4]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("num_done", [0, 2, 5, 6, 8])
def test_save_state_resumes_exactly(make_loader: Make, num_done: int, num_workers: int, tmp_path: Path) -> None:
    def stream(loader: Any) -> Iterator[Any]:
        for _ in range(3):
            yield from map(facts, loader)

    accelerator = accelerate.Accelerator(cpu=True)
    batches = stream(prepare(accelerator, make_loader(num_workers=num_workers)))
    for _ in range(num_done):
        next(batches)
    accelerator.save_state(str(tmp_path))
    expected = [next(batches) for _ in range(7)]
    batches.close()
    again = accelerate.Accelerator(cpu=True)
    again._dataloaders.clear()
    loader = prepare(again, make_loader(num_workers=num_workers))
    again.load_state(str(tmp_path))
    batches = stream(loader)
    assert [next(batches) for _ in range(7)] == expected


def test_set_epoch_keeps_the_position_just_loaded(make_loader: Make) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    first = prepare(accelerator, make_loader())
    first.set_epoch(3)
    batches = iter(first)
    for _ in range(2):
        next(batches)
    state = first.state_dict()
    rest = [facts(batch) for batch in batches]
    second = prepare(accelerator, make_loader())
    second.load_state_dict(state)
    assert second.state_dict() == state
    second.set_epoch(3)
    assert [facts(batch) for batch in second] == rest
    second.load_state_dict(state)
    second.set_epoch(4)
    expected = make_loader()
    expected.set_epoch(4)
    assert [facts(batch) for batch in second] == [facts(batch) for batch in expected]


def test_skip_first_batches_is_refused(make_loader: Make) -> None:
    prepared = prepare(accelerate.Accelerator(cpu=True), make_loader())
    with pytest.raises(RuntimeError, match=r"no batch sampler that others can read.*load_state_dict"):
        list(accelerate.skip_first_batches(prepared, 2))


def test_conflicting_options_are_refused(make_loader: Make) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(TypeError, match="takes a ShmLoader; got DataLoader, which"):
        prepare(accelerator, torch.utils.data.DataLoader(Numbers()))
    with pytest.raises(ValueError, match=r"over 1 ranks, the Accelerator has 2 processes: make the Accelerator before"):
        prepare(FakeAccelerator(accelerator, num_processes=2), make_loader())
    with pytest.raises(ValueError, match="split_batches=True and a seeded ShmLoader"):
        prepare(FakeAccelerator(accelerator, num_processes=2, split_batches=True), make_loader(rank=0, world_size=2))
    with pytest.raises(ValueError, match="dispatch_batches=True reads in one process"):
        prepare(FakeAccelerator(accelerator, dispatch_batches=True), make_loader())
    with pytest.raises(ValueError, match="batch_size=None over several processes"):
        prepare(FakeAccelerator(accelerator, num_processes=2), make_loader(batch_size=None, seed=None))


def test_iterable_dataset_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg, unused-ignore]  # the items do not matter here
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(TypeError, match="iterable datasets in its own way"):
        prepare(accelerate.Accelerator(cpu=True), ShmLoader(Stream()))


def test_prepared_loader_cannot_be_pickled(make_loader: Make) -> None:
    prepared: PreparedLoader = prepare(accelerate.Accelerator(cpu=True), make_loader())
    with pytest.raises(TypeError, match="cannot be pickled"):
        prepared.__reduce__()


# With --cpu it starts a single process unless MPI starts them, so it is given GPUs and the program uses Accelerator(cpu=True).
LAUNCH = (
    "accelerate.commands.launch --multi_gpu --num_processes=2 --num_machines=1 --mixed_precision=no --dynamo_backend=no "
    "--main_process_port=0"
)


class FakeAccelerator:
    """An Accelerator with some attributes replaced."""

    def __init__(self, accelerator: Any, **attributes: Any) -> None:
        self._accelerator = accelerator
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


@pytest.mark.slow(reason="two ranks are processes that import torch and Accelerate")
@pytest.mark.parametrize("launch", [(), (LAUNCH,)], ids=["torchrun", "accelerate-launch"])
def test_two_processes_divide_each_epoch(run_ranks: Callable[..., list[Any]], make_loader: Make, launch: tuple[str]) -> None:
    first, second = run_ranks("accelerated", *launch)
    alone = make_loader(batch_size=8)
    for mine, other in zip(first["seed"]["epochs"], second["seed"]["epochs"], strict=True):
        one_ranks = [batch["index"].tolist() for batch in alone]
        assert [a + b for a, b in zip(mine[:2], other[:2], strict=True)] == one_ranks[:2]  # the third is uneven and padded
    for way in ("seed", "torch", "sampler"):
        for mine, other in zip(first[way]["epochs"], second[way]["epochs"], strict=True):
            assert len(mine) == len(other) == 3, way
            assert {i for step in mine for i in step} | {i for step in other for i in step} == set(range(22)), way
            assert first[way]["type"] == "ShmLoader"
        assert first[way]["synced"] == second[way]["synced"] == [False, True, True], way
        for gathered in (first[way]["gathered"], second[way]["gathered"]):
            assert sorted(gathered) == list(range(22)), way
    assert first["seed"]["epochs"][0] != first["seed"]["epochs"][1]
    assert first["resumed"] == first["rest"]
    assert second["resumed"] == second["rest"]
    assert first["gradient"] == second["gradient"]
