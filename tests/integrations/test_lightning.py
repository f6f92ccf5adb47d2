"""Lightning: Trainer, the loaders it creates again, its checkpoints, Fabric."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shmload import ShmLoader
from shmload.engine.tuning.auto_number import is_auto
from tests.integrations.integrations_kit import Numbers, Tiny, facts

L = pytest.importorskip("lightning", reason="needs lightning: pip install shmload[integrations]")


pytestmark = [
    # Lightning calls torch's tree functions in a deprecated way
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    # Lightning's advice on hosts with more cores than these tests use, and with a GPU
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]


class Module(L.LightningModule):
    """A module that records every batch it saw, by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Tiny()
        self.seen: dict[str, list[Any]] = {"train": [], "val": [], "predict": []}

    def training_step(self, batch: Any, _: int) -> Any:
        self.seen["train"].append(facts(batch))
        return self.net(batch["x"])

    def predict_step(self, batch: Any, _: int) -> Any:
        self.seen["predict"].append(facts(batch))
        return batch["index"].clone()  # Lightning keeps it, and an alias would keep the whole slot

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Validated(Module):
    """The same module with validation."""

    def validation_step(self, batch: Any, _: int) -> None:
        self.seen["val"].append(facts(batch))


def trainer(folder: Path, **options: Any) -> Any:
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False} | options
    return L.Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, **options
    )


def indices(seen: list[Any]) -> list[int]:
    return [index for batch in seen for index in batch[0]]


@pytest.mark.slow(reason="Lightning fits, validates and predicts")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 7])
def test_lightning_fits_validates_and_predicts(seed: int | None, num_workers: int, tmp_path: Path) -> None:
    module, run = Validated(), trainer(tmp_path)
    with (
        ShmLoader(Numbers(), batch_size=4, shuffle=True, num_workers=num_workers, seed=seed) as training,
        ShmLoader(Numbers(10), batch_size=4, num_workers=num_workers, seed=seed) as validation,
    ):
        run.fit(module, training, validation)
        assert run.train_dataloader is training
        assert sorted(indices(module.seen["train"])) == sorted([*range(22)] * 2)
        assert indices(module.seen["train"][:6]) != indices(module.seen["train"][6:])
        module.seen["val"].clear()
        run.validate(module, validation)
        assert indices(module.seen["val"]) == list(range(10))
        predicted = run.predict(module, validation)
        with run.predict_loop._combined_loader.flattened[0] as used:
            assert type(used) is ShmLoader
            assert used is not validation, "Lightning has not created it again"
        assert torch.cat(predicted).tolist() == list(range(10))


def identity(samples: Any) -> Any:
    return torch.utils.data.default_collate(samples)


def do_nothing(worker_id: int) -> None:
    """Does nothing, as a worker_init_fn."""


def test_lightning_keeps_every_argument(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "batch_size": 4,
        "num_workers": 1,
        "collate_fn": identity,
        "timeout": 30.0,
        "worker_init_fn": do_nothing,
        "multiprocessing_context": "fork",
        "prefetch_factor": 3,
        "persistent_workers": True,
        "seed": 7,
        "seed_samples": False,
        "rank": 0,
        "world_size": 1,
        "uneven": "exact",
        "ring_bytes": 1 << 20,
        "max_restarts": 5,
    }
    module, run = Module(), trainer(tmp_path)
    with ShmLoader(Numbers(), **options) as loader:
        run.predict(module, loader)
        used = run.predict_loop._combined_loader.flattened[0]
    used.close()
    changed = {"sampler", "batch_sampler", "batch_size", "shuffle", "drop_last"}  # a loader is created again to change these
    assert type(used) is ShmLoader
    assert used.batch_sampler.batch_size == 4
    for name in inspect.signature(ShmLoader).parameters.keys() - changed:
        now, before = getattr(used, name), getattr(loader, name)
        if name == "multiprocessing_context":
            now, before = now.get_start_method(), before.get_start_method()
        assert now == before, name
    for name, value in options.items():
        if name not in changed | {"multiprocessing_context"}:
            assert getattr(used, name) == value, name


@pytest.mark.parametrize("seed", [None, 7])
def test_lightning_keeps_automatic_values(seed: int | None, tmp_path: Path) -> None:
    run = trainer(tmp_path)
    numbers: dict[str, Any] = {"num_workers": "auto", "prefetch_factor": "auto"}
    with ShmLoader(Numbers(), batch_size=4, seed=seed, **numbers) as loader:
        predicted = run.predict(Module(), loader)
        with run.predict_loop._combined_loader.flattened[0] as used:
            assert used is not loader, "Lightning has not created it again"
            for name in numbers:
                assert is_auto(getattr(used, name)), name
                assert isinstance(getattr(used, name), int), "torch computes with the value"
            assert "autotune" in used.stats()
    assert torch.cat(predicted).tolist() == list(range(22))


class Stop(L.Callback):
    """Saves a checkpoint after a number of steps."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("step", [1, 4, 6, 8])
def test_lightning_resumes_in_the_middle_of_an_epoch(step: int, num_workers: int, tmp_path: Path) -> None:
    def fit(**options: Any) -> list[Any]:
        callbacks, path = options.pop("callbacks", []), options.pop("ckpt_path", None)
        module, run = Module(), trainer(tmp_path, callbacks=callbacks)
        with ShmLoader(Numbers(), batch_size=4, shuffle=True, num_workers=num_workers, seed=7) as loader:
            run.fit(module, loader, ckpt_path=path)
        return module.seen["train"]

    path = tmp_path / "saved.ckpt"
    whole = fit(callbacks=[Stop(step, path)])
    assert len(whole) == 12
    assert fit(ckpt_path=path) == whole[step:]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("options", [{"shuffle": True}, {"seed": 7, "sampler": range(21, -1, -1)}])
def test_lightning_saves_checkpoints_with_any_order(options: dict[str, Any], num_workers: int, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    with ShmLoader(Numbers(), batch_size=4, num_workers=num_workers, **options) as loader:
        trainer(tmp_path, callbacks=[Stop(4, path)]).fit(Module(), loader)
    assert path.exists()


@pytest.mark.slow(reason="two ranks are processes that import torch and Lightning")
def test_lightning_ranks_divide_each_epoch(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks("lightning_ddp")
    assert [rank["type"] for rank in ranks] == ["ShmLoader"] * 2
    assert [rank["sampler"] for rank in ranks] == ["DistributedSampler"] * 2
    assert sorted(indices(ranks[0]["predicted"]) + indices(ranks[1]["predicted"])) == list(range(22))
    for rank in ranks:
        assert sorted(indices(rank["predicted_own"])) == list(range(22)), (
            "each rank predicts everything, as documented in docs/frameworks.md"
        )
    for way in ("injected", "seed", "fabric_injected", "fabric_own", "fabric_seed"):
        first, second = (rank[way] for rank in ranks)
        assert len(first) == len(second), way
        if way == "fabric_own":
            assert first == second, "nothing divides the data"
            continue
        for begin in range(0, len(first), 3):  # steps of an epoch
            mine, other = indices(first[begin : begin + 3]), indices(second[begin : begin + 3])
            assert sorted([*mine, *other]) == list(range(22)), way


@pytest.mark.slow(reason="two ranks are processes that import torch and Lightning")
def test_ranks_of_a_sharded_model_read_one_ranks_batches(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks("lightning_fsdp")
    with ShmLoader(Numbers(), batch_size=8, seed=5, shuffle=True) as alone:
        expected = [facts(batch) for batch in alone]
    for way in ("seen", "trainer"):
        steps = zip(*(rank[way] for rank in ranks), strict=True)
        found = [[mine + other for mine, other in zip(*both, strict=True)] for both in steps]
        assert len(found) == 3, way
        assert found[:2] == expected[:2], way  # the third is uneven and padded


def test_fsdp_strategy_of_trainer_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="requires a GPU accelerator"):  # so the ranks above shard with ModelParallelStrategy
        L.Trainer(accelerator="cpu", devices=2, strategy="fsdp")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("use_distributed_sampler", [True, False])
def test_fabric_sets_a_loader_up(use_distributed_sampler: bool, num_workers: int) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(net := Tiny(), torch.optim.SGD(net.parameters(), lr=0.01))
    with ShmLoader(Numbers(), batch_size=4, shuffle=True, seed=7, num_workers=num_workers) as loader:
        expected = [facts(batch) for _ in range(2) for batch in loader]
        loader.set_epoch(0)
        prepared = fabric.setup_dataloaders(loader, use_distributed_sampler=use_distributed_sampler)
        got = []
        for _ in range(2):
            for batch in prepared:
                fabric.backward(model(batch["x"]))
                optimizer.step()
                got.append(facts(batch))
    assert got == expected


def test_fabric_saves_the_position_of_a_loader(tmp_path: Path) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1)

    def make() -> ShmLoader[Any]:
        return ShmLoader(Numbers(), batch_size=4, shuffle=True, seed=7, num_workers=1)

    with make() as loader:
        batches = iter(prepared := fabric.setup_dataloaders(loader))
        for _ in range(2):
            next(batches)
        fabric.save(tmp_path / "saved.ckpt", {"loader": prepared})
        rest = [facts(batch) for batch in batches]
    with make() as loader:
        prepared = fabric.setup_dataloaders(loader)
        assert fabric.load(tmp_path / "saved.ckpt", {"loader": prepared}) == {}
        assert [facts(batch) for batch in prepared] == rest
