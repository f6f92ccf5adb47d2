"""torch's own tools: DistributedDataParallel, DataParallel, torch.distributed.checkpoint."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shmload import ShmLoader
from tests.integrations.integrations_kit import Numbers, Tiny, facts

slow = pytest.mark.slow(reason="two ranks are processes that import torch")


def flat(steps: list[list[int]]) -> list[int]:
    return [index for step in steps for index in step]


@slow
def test_ddp_ranks_divide_each_epoch(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks("ddp")
    assert ranks[0]["gradient"] == ranks[1]["gradient"]
    for way, rows in [("torch", 22), ("pad", 22), ("drop", 16)]:
        epochs = list(zip(ranks[0][way], ranks[1][way], strict=True))
        for first, second in epochs:
            assert len(first) == len(second) == -(-rows // 8)
            assert len(flat(first)) == len(flat(second)) == rows // 2
            assert rows == len({*flat(first), *flat(second)}), "disjoint, and complete unless dropped"
        assert epochs[0] != epochs[1]


@slow
def test_distributed_checkpoint_resumes_every_rank(run_ranks: Callable[..., list[Any]]) -> None:
    for rank in run_ranks("checkpoint"):
        assert len(rank["rest"]) == 3
        assert rank["resumed"] == rank["rest"]


def one_ranks(steps: list[Any], n: int = 22, **options: Any) -> list[Any]:
    """Returns the batches of one rank that reads as much per step as two together, with the second rank's rows after the first's."""
    with ShmLoader(Numbers(n), batch_size=8, seed=5, shuffle=True, **options) as loader:
        return [facts(batch) for _, batch in zip(steps, loader, strict=False)]


def together(ranks: list[list[Any]]) -> list[Any]:
    return [[mine + other for mine, other in zip(*both, strict=True)] for both in zip(*ranks, strict=True)]


@slow
def test_data_ranks_of_a_device_mesh_divide_and_tensor_ranks_read_the_same(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks("mesh")
    assert together([rank["data"] for rank in ranks])[:2] == one_ranks([1, 2])
    assert ranks[0]["tensor"] == ranks[1]["tensor"] == one_ranks([1, 2, 3])


@slow
def test_fsdp_ranks_divide_and_resume_from_a_distributed_checkpoint(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks("fsdp")
    assert together([rank["first"] + rank["rest"] for rank in ranks]) == one_ranks([1] * 5, 40)
    assert [rank["resumed"] for rank in ranks] == [rank["rest"] for rank in ranks]


@slow
@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)  # one rank loads what two have saved
def test_torchtitans_loop_reads_and_resumes_the_same_batches(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    for module in ("datasets", "torchdata"):
        pytest.importorskip(module, reason=f"needs {module}: pip install shmload[integrations,huggingface]")
    from torch.distributed import checkpoint as dcp

    from tests.integrations import titan_kit as titan

    ranks = run_ranks("torchtitan")
    for rank in ranks:
        for way in ("own", "torch", "seed", "shuffled"):
            assert len(rank[way]) == titan.NUM_STEPS
            assert rank[f"{way} resumed"] == rank[way][titan.SAVED_STEP :], way
        assert rank["torch"] == rank["own"]
        assert rank["seed"] != rank["shuffled"]
    alone = torch.utils.data.DataLoader(titan.HuggingFaceDataset(), batch_size=4)
    assert together([rank["seed"] for rank in ranks]) == titan.train(alone, titan.NUM_STEPS)
    for way in ("seed", "shuffled"):
        with titan.TokenLoader(0, 1, batch_size=4, shuffle=way == "shuffled") as loader:
            dcp.load({"dataloader": loader}, checkpoint_id=tmp_path / way)
            rest = titan.train(loader, titan.NUM_STEPS - titan.SAVED_STEP)
        assert together([rank[f"{way} resumed"] for rank in ranks]) == rest


# The checkpoint warns that there is no process group, which is intended here.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("num_done", [0, 2, 6, 8])
@pytest.mark.parametrize(
    "options",
    [
        {"seed": 3, "shuffle": True},
        {"seed": 3, "sampler": range(21, -1, -1)},
        {"shuffle": True, "generator": 5},
        {"sampler": range(21, -1, -1)},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable or uninitialized:UserWarning")  # in torch before 2.8
def test_checkpoint_without_ranks_resumes_exactly(options: dict[str, Any], num_done: int, num_workers: int, tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    def make() -> ShmLoader[Any]:
        generator = {"generator": torch.Generator().manual_seed(5)} if "generator" in options else {}
        return ShmLoader(Numbers(), batch_size=4, num_workers=num_workers, **{**options, **generator})

    def stream(loader: ShmLoader[Any]) -> Any:
        for _ in range(3):
            for batch in loader:
                yield (facts(batch) if "seed" in options else facts(batch)[0])  # without a seed, the noise is up to the program

    with make() as loader:
        batches = stream(loader)
        for _ in range(num_done):
            next(batches)
        dcp.save({"loader": loader}, checkpoint_id=tmp_path)
        expected = [next(batches) for _ in range(6)]
    with make() as loader:
        dcp.load({"loader": loader}, checkpoint_id=tmp_path)
        batches = stream(loader)
        assert [next(batches) for _ in range(6)] == expected


@pytest.mark.parametrize("seed", [None, 3])
def test_data_parallel_on_the_cpu_trains(seed: int | None) -> None:
    model = torch.nn.DataParallel(Tiny())
    with ShmLoader(Numbers(), batch_size=4, seed=seed, num_workers=1) as loader:
        for batch in loader:
            model(batch["x"]).backward()
    assert model.module.linear.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("seed", [None, 3])
def test_loader_can_be_pickled(seed: int | None) -> None:
    """Launchers that spawn ranks (Lightning's ddp_spawn, torch.multiprocessing.spawn) pickle the loader, as they do torch's."""
    loader = ShmLoader(Numbers(), batch_size=4, seed=seed, num_workers=1)
    with pickle.loads(pickle.dumps(loader)) as copy:
        assert [facts(batch)[0] for batch in copy] == [facts(batch)[0] for batch in loader]
    loader.close()


def test_ranks_that_are_known_later_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own launchers create the ranks in fit(); a loader made before must not read everything in each of them."""
    with ShmLoader(Numbers(), batch_size=4, seed=3) as loader:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert [facts(batch)[0] for batch in loader] == [[4, 5, 6, 7], [12, 13, 14, 15], [19, 20, 21]]


ENDING_PROGRAM = """
import signal
from tests.integrations.integrations_kit import Numbers
from shmload import ShmLoader

signal.signal(signal.SIGTERM, lambda *_: None)  # as Lightning's Trainer and many a job script do
loader = ShmLoader(Numbers(), seed=3, num_workers=1, multiprocessing_context="fork")
batches = iter(loader)
next(batches)
"""


@pytest.mark.slow(reason="a program in a process of its own, which imports torch")
def test_program_that_handles_sigterm_can_end(run_program: Callable[..., str]) -> None:
    assert run_program(ENDING_PROGRAM) == ""
