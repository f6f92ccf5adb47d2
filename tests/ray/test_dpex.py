"""The three examples of the loader that DpexDataLoader replaces run on a real cluster with only the import changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shmload.cluster import DpexDataLoader
from tests.ray.cluster_kit import Cluster, assert_same
from tests.ray.torch_datasets import Drawing

slow = pytest.mark.slow(reason="programs that import torch and Ray, and a Ray cluster")
EXAMPLE = """
import torch
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler
from shmload.cluster import DpexDataLoader

{begin}

class RandomDataset(Dataset):
    def __init__(self, size, length):
        self.len = length
        self.data = torch.randn(length, size, generator=torch.Generator().manual_seed(1))

    def __getitem__(self, index):
        return self.data[index]

    def __len__(self):
        return self.len

dataset = RandomDataset(5, 24)

def batches(distribute_mode):
    torch.manual_seed(2)
    loader = DpexDataLoader(dataset=dataset, distribute_mode=distribute_mode, head_address={address!r}, {arguments})
    torch.manual_seed(3)
    return [batch for _ in range({epochs}) for batch in loader]

models = {models}
losses = [[[model(b).square().mean().item() for model in models] for b in batches(mode)] for mode in (True, False)]
assert losses[0] == losses[1], losses
print(len(losses[0]))
{end}
"""
DDP_BEGIN = (
    """torch.distributed.init_process_group(backend="gloo", init_method="file://{folder}/store", rank={rank}, world_size=2)"""
)


def example(cluster: Cluster, begin: str = "", end: str = "", epochs: int = 1, **texts: str) -> str:
    return EXAMPLE.format(begin=begin, end=end, epochs=epochs, address=cluster.address, **texts)


def started(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@slow
def test_example_of_a_single_card_and_of_data_parallel(cluster: Cluster) -> None:
    models = "[torch.nn.Linear(5, 2), torch.nn.DataParallel(torch.nn.Linear(5, 2))]"
    code = example(cluster, epochs=2, models=models, arguments="batch_size=4, shuffle=True, num_workers=1")
    with started(code) as program:
        assert program.communicate(timeout=220)[0] == "12\n"


@slow
def test_example_of_distributed_data_parallel(cluster: Cluster, tmp_path: Path) -> None:
    def code(rank: int) -> str:
        return example(
            cluster,
            begin=DDP_BEGIN.format(folder=tmp_path, rank=rank),
            end="torch.distributed.destroy_process_group()",
            models="[torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 2))]",
            arguments="batch_size=1, sampler=DistributedSampler(dataset), num_workers=1",
        )

    with started(code(0)) as first, started(code(1)) as second:
        assert [program.communicate(timeout=220)[0] for program in (first, second)] == ["12\n", "12\n"]


def test_arguments_are_attributes_and_without_distribution_it_acts_as_a_local_loader() -> None:
    drawn = Drawing()
    loader = DpexDataLoader(drawn, False, "head:6379", 4, num_workers=1)
    assert (loader.distribute_mode, loader.head_address, loader.backend) == (False, "head:6379", "process")
    with loader:
        assert sum(1 for _ in loader) == len(loader) == 8


def test_distribution_without_workers_is_refused() -> None:
    samples: Any = [1, 2, 3]
    assert_same([[1, 2], [3]], [batch.tolist() for batch in DpexDataLoader(samples, True, batch_size=2)])
