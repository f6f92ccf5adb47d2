"""Runs two trainings under Ray Train on a cluster; the second resumes with one worker. Runs as its own process.

    python -m tests.ray.train_program ADDRESS FOLDER

Each worker reads a ShmLoader that `prepare` has divided, reports a checkpoint with the loader's state after its last step, and
writes the batches that it received to FOLDER.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from shmload import Ray, ShmLoader
from shmload.formats import RayStream
from shmload.integrations.ray import prepare
from tests.ray.ray_datasets import Rows

GLOBAL_BATCH = 8
STOP = 3  # steps of the first run


def loop(config: dict[str, Any]) -> None:
    """Trains: what each worker runs."""
    context = ray.train.get_context()
    batch_size = GLOBAL_BATCH // context.get_world_size()
    with prepare(ShmLoader(Rows(), batch_size, shuffle=True, seed=3, num_workers=1, **config["pool"])) as loader:
        if config["state"]:
            loader.load_state_dict(json.loads((Path(config["state"]) / "loader.json").read_text()))
        given = []
        for step, batch in enumerate(loader, 1):
            given.append((batch["index"].tolist(), batch["drawn"].tolist()))
            if step == config["stop"]:
                break
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "loader.json").write_text(json.dumps(loader.state_dict()))
            ray.train.report({}, checkpoint=Checkpoint.from_directory(folder))
    if config["stop"]:
        stream = RayStream(ray.train.get_dataset_shard("rows"))
        with ShmLoader(stream, 4, num_workers=1, multiprocessing_context="forkserver") as loader:
            rows = [row for _ in range(2) for batch in loader for row in batch["id"].tolist()]
        (Path(config["folder"]) / f"rows-{context.get_world_rank()}.json").write_text(json.dumps(rows))
    (Path(config["folder"]) / f"{config['name']}-{context.get_world_rank()}.json").write_text(json.dumps(given))


def run(folder: str, name: str, num_workers: int, **config: Any) -> str:
    """Runs one training and returns the folder of its checkpoint."""
    trainer = TorchTrainer(
        loop,
        train_loop_config={"folder": folder, "name": name, **config},
        scaling_config=ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 0.1}),
        datasets={"rows": ray.data.range(20, override_num_blocks=4)} if config["stop"] else None,
        dataset_config=ray.train.DataConfig(execution_options=ray.data.ExecutionOptions(preserve_order=True)),
        run_config=RunConfig(storage_path=f"{folder}/runs"),
    )
    checkpoint = trainer.fit().checkpoint
    assert checkpoint is not None
    return str(checkpoint.path)


def main(address: str, folder: str) -> None:
    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    actors = {"backend": Ray(actor_options={"num_cpus": 0.1})}
    state = run(folder, "two", 2, pool=actors, stop=STOP, state=None)
    run(folder, "one", 1, pool={}, stop=None, state=state)


if __name__ == "__main__":
    main(*sys.argv[1:])
