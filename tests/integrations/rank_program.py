"""The program of one of two ranks, `python rank_program.py NAME FOLDER` under torchrun. It writes its answer to FOLDER/RANK.json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from shmload import ShmLoader
from tests.integrations.integrations_kit import Numbers, Tiny, facts

RANK = int(os.environ["RANK"])


def train(model: Any, loader: Any) -> list[Any]:
    """Trains for one epoch and returns the indices of each step."""
    steps = []
    for batch in loader:
        model(batch["x"]).backward()
        steps.append(batch["index"].tolist())
    return steps


def ddp() -> Any:
    """Trains two epochs with DistributedDataParallel and a DistributedSampler in torch mode, then two with seed mode's ranks."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DistributedSampler

    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(Tiny())
    answer: dict[str, Any] = {}
    sampler: DistributedSampler[Any] = DistributedSampler(Numbers(), shuffle=True, seed=5)
    answer["torch"] = []
    with ShmLoader(Numbers(), batch_size=4, sampler=sampler, num_workers=1) as loader:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            answer["torch"].append(train(model, loader))
    for uneven in ("pad", "drop"):
        with ShmLoader(Numbers(), batch_size=4, seed=5, shuffle=True, num_workers=1, uneven=uneven) as loader:
            answer[uneven] = [train(model, loader) for _ in range(2)]
    answer["gradient"] = model.module.linear.weight.grad.tolist()
    torch.distributed.destroy_process_group()
    return answer


def checkpoint() -> Any:
    """Saves a loader of two ranks after two steps with torch.distributed.checkpoint and resumes it."""
    from torch.distributed import checkpoint as dcp

    torch.distributed.init_process_group("gloo")
    options: dict[str, Any] = {"batch_size": 4, "seed": 5, "shuffle": True, "num_workers": 1}
    folder = os.path.join(sys.argv[2], "saved")
    with ShmLoader(Numbers(40), **options) as loader:
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        dcp.save({"loader": loader}, checkpoint_id=folder)
        rest = [facts(batch) for batch in batches]
    with ShmLoader(Numbers(40), **options) as loader:
        dcp.load({"loader": loader}, checkpoint_id=folder)
        resumed = [facts(batch) for batch in loader]
    torch.distributed.destroy_process_group()
    return {"rest": rest, "resumed": resumed}


def mesh() -> Any:
    """Reads with a DeviceMesh of data and tensor parallel ranks: two read parts, and two need the same batches."""
    from torch.distributed.device_mesh import init_device_mesh

    answer: dict[str, Any] = {}
    for name, shape in {"data": (2, 1), "tensor": (1, 2)}.items():
        data = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))["data"]
        place = {"rank": data.get_local_rank(), "world_size": data.size()}
        with ShmLoader(Numbers(), batch_size=8 // data.size(), seed=5, shuffle=True, num_workers=1, **place) as loader:
            answer[name] = [facts(batch) for batch in loader]
    torch.distributed.destroy_process_group()
    return answer


def fsdp() -> Any:
    """Trains with FSDP2, and with a distributed checkpoint of model and loader in the middle of an epoch."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    devices = init_device_mesh("cpu", (2,))
    options: dict[str, Any] = {"batch_size": 4, "seed": 5, "shuffle": True, "num_workers": 1}
    folder = os.path.join(sys.argv[2], "saved")

    def make() -> Any:
        fully_shard(model := Tiny(), mesh=devices)
        return model, ShmLoader(Numbers(40), **options)

    def parts(model: Any, loader: Any) -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "loader": loader}

    model, loader = make()
    answer: dict[str, Any] = {"first": []}
    batches = iter(loader)
    for _ in range(2):
        batch = next(batches)
        model(batch["x"]).backward()
        answer["first"].append(facts(batch))
    dcp.save(parts(model, loader), checkpoint_id=folder)
    answer["rest"] = [facts(batch) for batch in batches]
    loader.close()
    model, loader = make()
    dcp.load(parts(model, loader), checkpoint_id=folder)
    answer["resumed"] = [facts(batch) for batch in loader]
    loader.close()
    torch.distributed.destroy_process_group()
    return answer


def torchtitan() -> Any:
    """Runs torchtitan's loop over its own loader, over that on a ShmLoader, and over a TokenDataset, each resumed in the middle."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    from tests.integrations import titan_kit as titan

    data = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["dp"]
    place = {"dp_rank": data.get_local_rank(), "dp_world_size": data.size(), "batch_size": 2}
    answer: dict[str, Any] = {}
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "own": (titan.ParallelAwareDataloader, {}),
        "torch": (titan.ParallelAwareShmLoader, {"num_workers": 1}),
        "seed": (titan.TokenLoader, {"num_workers": 1}),
        "shuffled": (titan.TokenLoader, {"num_workers": 1, "shuffle": True}),
    }
    for way, (kind, options) in ways.items():
        folder = os.path.join(sys.argv[2], way)
        answer[way] = titan.train(loader := kind(**place, **options), titan.NUM_STEPS, folder)
        resumed = kind(**place, **options)
        dcp.load({"dataloader": resumed}, checkpoint_id=folder)
        answer[f"{way} resumed"] = titan.train(resumed, titan.NUM_STEPS - titan.SAVED_STEP)
        if way != "own":
            loader.close()
            resumed.close()
    torch.distributed.destroy_process_group()
    return answer


def trainer() -> Any:
    """Trains with transformers.Trainer, whose processes divide the data."""
    import transformers

    from shmload.integrations.accelerate import prepare

    seen: list[Any] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Tiny()

        def forward(self, x: Any, noise: Any, index: Any) -> Any:
            seen.append(facts({"index": index, "noise": noise}))
            return {"loss": self.net(x)}

    class Trainer(transformers.Trainer):  # type: ignore[misc, unused-ignore]  # transformers may be without types
        def get_train_dataloader(self) -> Any:
            return prepare(self.accelerator, loader)

    args = transformers.TrainingArguments(
        output_dir=sys.argv[2], use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", num_train_epochs=2
    )
    with ShmLoader(Numbers(), batch_size=4, seed=5, shuffle=True, num_workers=1) as loader:
        Trainer(model=Model(), args=args).train()
    return {"seen": seen}


def recording_module() -> Any:
    """Returns Lightning's module that records the batches it saw."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]  # lightning may be without types
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = Tiny(), []

        def training_step(self, batch: Any, _: int) -> Any:
            self.seen.append(facts(batch))
            return self.net(batch["x"])

        def predict_step(self, batch: Any) -> None:
            self.seen.append(facts(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Module


def quiet_trainer(**options: Any) -> Any:
    import lightning

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return lightning.Trainer(accelerator="cpu", devices=2, default_root_dir=sys.argv[2], **dict.fromkeys(off, False), **options)


def lightning_ddp() -> Any:
    """Trains with Trainer and Fabric over two ranks for two epochs, with an injected DistributedSampler or seed mode's own ranks."""
    import lightning

    def fit(loader: Any, **options: Any) -> Any:
        trainer = quiet_trainer(strategy="ddp", max_epochs=2, **options)
        trainer.fit(module := recording_module()(), loader)
        return module.seen, trainer.train_dataloader

    answer: dict[str, Any] = {}
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 1}
    with ShmLoader(Numbers(), **options) as loader:
        answer["injected"], used = fit(loader)
        answer["type"], answer["sampler"] = type(used).__name__, type(used.sampler).__name__
        used.close()
    with ShmLoader(Numbers(), **options, seed=7) as loader:
        answer["seed"], used = fit(loader, use_distributed_sampler=False)
        assert used is loader
    for name, is_divided in (("predicted", True), ("predicted_own", False)):
        with ShmLoader(Numbers(), batch_size=4, num_workers=1, seed=7) as loader:
            trainer = quiet_trainer(strategy="ddp", use_distributed_sampler=is_divided)
            trainer.predict(module := recording_module()(), loader, return_predictions=False)
            answer[name] = module.seen
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    for name, more, injected in [
        ("fabric_injected", {}, True),
        ("fabric_own", {"seed": 7, "rank": 0, "world_size": 1}, False),
        ("fabric_seed", {"seed": 7}, False),
    ]:
        with ShmLoader(Numbers(), **options, **more) as loader:
            prepared = fabric.setup_dataloaders(loader, use_distributed_sampler=injected)
            answer[name] = [facts(batch) for _ in range(2) for batch in prepared]
            prepared._dataloader.close()
    return answer


def lightning_fsdp() -> Any:
    """Trains a sharded model on the CPU with Fabric and Trainer, and with a checkpoint in the middle of an epoch."""
    import lightning
    from lightning.fabric.strategies import ModelParallelStrategy
    from lightning.pytorch import strategies
    from torch.distributed.fsdp import fully_shard

    def parallelize(model: Any, devices: Any) -> Any:
        return fully_shard(model, mesh=devices["data_parallel"])

    class Module(recording_module()):  # type: ignore[misc]  # a class created at run time
        def configure_model(self) -> None:
            parallelize(self.net, self.device_mesh)

    def fit(max_steps: int, path: str | None) -> Any:
        strategy = strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        run = quiet_trainer(strategy=strategy, max_steps=max_steps, use_distributed_sampler=False)
        with ShmLoader(Numbers(), batch_size=4, seed=5, shuffle=True, num_workers=1) as loader:
            run.fit(module := Module(), loader, ckpt_path=path)
        if path is None:
            run.save_checkpoint(os.path.join(sys.argv[2], "saved.ckpt"))
        return module.seen

    strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(Tiny())
    answer: dict[str, Any] = {"seen": []}
    with ShmLoader(Numbers(), batch_size=4, seed=5, shuffle=True, num_workers=1) as loader:
        for batch in fabric.setup_dataloaders(loader, use_distributed_sampler=False):
            fabric.backward(model(batch["x"]))
            answer["seen"].append(facts(batch))
    answer["trainer"] = fit(1, None) + fit(3, os.path.join(sys.argv[2], "saved.ckpt"))
    return answer


def accelerated() -> Any:
    """Trains with Accelerate over two processes: three ways to divide the data, accumulation, gather_for_metrics, save_state."""
    from accelerate import Accelerator

    from shmload.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = Tiny()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    answer: dict[str, Any] = {}
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 1}
    for way, more in {
        "seed": {"seed": 7, "shuffle": True},
        "torch": {"shuffle": True},
        "sampler": {"seed": 7, "sampler": range(21, -1, -1)},
    }.items():
        loader: Any = prepare(accelerator, ShmLoader(Numbers(), **options, **more))
        epochs, synced, gathered = [], [], []
        for _ in range(2):
            epochs.append([])
            synced.clear()
            gathered.clear()
            for batch in loader:
                epochs[-1].append(batch["index"].tolist())
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch["x"]))
                    synced.append(accelerator.sync_gradients)
                    optimizer.step()
                gathered += accelerator.gather_for_metrics(batch["index"]).tolist()
        answer[way] = {"epochs": epochs, "synced": synced, "gathered": gathered, "type": type(loader.base_dataloader).__name__}
        loader.close()
    answer["gradient"] = net.linear.weight.grad.tolist()
    accelerator._dataloaders.clear()
    folder = os.path.join(sys.argv[2], "saved")
    loader = prepare(accelerator, ShmLoader(Numbers(40), **options, seed=7, shuffle=True))
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    answer["rest"] = [facts(batch) for batch in batches]
    accelerator.load_state(folder)
    answer["resumed"] = [facts(batch) for batch in loader]
    loader.close()
    accelerator.end_training()
    return answer


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    answer = globals()[name]()
    Path(folder, f"{RANK}.json").write_text(json.dumps(answer))
