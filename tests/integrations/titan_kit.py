"""torchtitan's way of loading, like its hf_datasets.py and dataloader.py (it is not installed), and the same with a TokenDataset."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from shmload import ShmLoader
from shmload.formats import TokenDataset

SEQ_LEN, SAVED_STEP, NUM_STEPS = 16, 3, 7
DOCUMENTS = [[1000 * i + place for place in range(5 + 7 * i % 31)] for i in range(40)]


class HuggingFaceDataset(IterableDataset):  # type: ignore[type-arg, unused-ignore]  # as torchtitan's
    """The tokens of a rank's documents, concatenated and cut into sequences, endlessly and with a state."""

    def __init__(self, dp_rank: int = 0, dp_world_size: int = 1) -> None:
        self._data = split_dataset_by_node(Dataset.from_dict({"tokens": DOCUMENTS}), dp_rank, dp_world_size)
        self._sample_idx, self._token_buffer = 0, []

    def __iter__(self) -> Iterator[Any]:
        while True:
            for sample in self._data.skip(self._sample_idx):
                self._token_buffer.extend(sample["tokens"])
                self._sample_idx += 1
                while len(self._token_buffer) >= SEQ_LEN + 1:
                    tokens = torch.LongTensor(self._token_buffer[: SEQ_LEN + 1])
                    self._token_buffer = self._token_buffer[SEQ_LEN + 1 :]
                    yield {"input": tokens[:-1]}, tokens[1:]
            self._sample_idx = 0

    def state_dict(self) -> dict[str, Any]:
        return {"token_buffer": self._token_buffer, "sample_idx": self._sample_idx}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._token_buffer, self._sample_idx = state["token_buffer"], state["sample_idx"]


class StateByRank:
    """A mixin like torchtitan's ParallelAwareDataloader: the state has a key for each data-parallel rank."""

    def __init__(self, dp_rank: int, dp_world_size: int, **options: Any) -> None:
        super().__init__(HuggingFaceDataset(dp_rank, dp_world_size), **options)
        self._rank_id, self._dp_world_size = f"dp_rank_{dp_rank}", dp_world_size

    def state_dict(self) -> dict[str, Any]:
        return {self._rank_id: pickle.dumps(super().state_dict()), "world_size": self._dp_world_size}  # type: ignore[misc]  # the loader's

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self._dp_world_size == state["world_size"], "dataloader resharding is not supported yet"
        super().load_state_dict(pickle.loads(state[self._rank_id]))  # type: ignore[misc]  # the loader's


class BaseDataLoader(Stateful, ABC):
    """torchtitan's interface of all loaders."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...


class ParallelAwareDataloader(StateByRank, StatefulDataLoader, BaseDataLoader):  # type: ignore[type-arg, misc, unused-ignore]  # as torchtitan's
    """torchtitan's loader."""


class ParallelAwareShmLoader(StateByRank, ShmLoader[Any], BaseDataLoader):  # type: ignore[misc]  # two states, of which the first wraps the second
    """The same on a ShmLoader: torch mode, with a worker."""


class TokenLoader(ShmLoader[Any]):
    """Seed mode: sequences of one token file, divided by the loader; endless batches in the form that torchtitan's loop needs."""

    def __init__(self, dp_rank: int, dp_world_size: int, **options: Any) -> None:
        tokens = torch.tensor([token for document in DOCUMENTS for token in document])
        dataset = TokenDataset(tokens.numpy(), SEQ_LEN + 1)
        super().__init__(dataset, seed=5, rank=dp_rank, world_size=dp_world_size, **options)

    def __iter__(self) -> Iterator[Any]:
        while True:
            for batch in super().__iter__():
                yield {"input": batch["tokens"][:, :-1]}, batch["tokens"][:, 1:]


def train(loader: Any, num_steps: int, folder: str | None = None) -> list[Any]:
    """Runs torchtitan's loop, with one iterator for the whole training and checkpoints of the loader. Returns the batches of each
    step.
    """
    model, steps = torch.nn.Linear(SEQ_LEN, SEQ_LEN), []
    batches = iter(loader)
    while len(steps) < num_steps:
        input_dict, labels = next(batches)
        torch.nn.functional.mse_loss(model(input_dict["input"].float()), labels.float()).backward()
        steps.append([input_dict["input"].tolist(), labels.tolist()])
        if folder is not None and len(steps) == SAVED_STEP:
            dcp.save({"dataloader": loader}, checkpoint_id=folder)
    return steps
