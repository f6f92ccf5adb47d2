"""A model learns the same wherever its batches were decoded: losses and accuracy equal those with torch's DataLoader bit for bit.

Prints the table of docs/cluster.md with `pytest -s`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shmload import ShmLoader
from shmload.cluster import DpexDataLoader
from tests.ray.cluster_kit import Cluster
from tests.ray.torch_datasets import Crops, seed_worker

EPOCHS = 3


def trained(loader: Iterable[Any]) -> tuple[list[float], float]:
    """Trains a model; returns the losses of all batches and the accuracy on crops drawn with another seed."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(400, 8)
    )
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(EPOCHS):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    torch.manual_seed(8)
    images, labels = next(iter(DataLoader(Crops(512), 512)))
    with torch.no_grad():
        return losses, (model(images).argmax(1) == labels).float().mean().item()


@pytest.mark.slow(reason="trains a model three times, once from a Ray cluster")
def test_losses_with_ray_with_local_workers_and_with_torch_are_identical(cluster: Cluster) -> None:
    def keywords() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(5)
        return {"batch_size": 64, "shuffle": True, "num_workers": 2, "generator": generator, "worker_init_fn": seed_worker}

    found = {"torch's DataLoader": trained(DataLoader(Crops(512), **keywords()))}
    with ShmLoader(Crops(512), **keywords()) as local:
        found["ShmLoader"] = trained(local)
    with DpexDataLoader(Crops(512), True, cluster.address, **keywords()) as far:
        found["DpexDataLoader"] = trained(far)
    steps = 512 // 64
    for name, (losses, accuracy) in found.items():
        means = [sum(losses[steps * epoch :][:steps]) / steps for epoch in range(EPOCHS)]
        print(f"| {name} | {' | '.join(f'{mean:.6f}' for mean in means)} | {accuracy:.1%} |")
    wanted, *others = found.values()
    assert [wanted, wanted] == others
    assert wanted[0][-1] < wanted[0][0]
