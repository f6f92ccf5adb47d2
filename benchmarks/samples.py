"""Datasets, collate functions and loaders for the benchmarks of variable-length samples and text."""

from collections.abc import Callable, Iterator
from datetime import date
from typing import Any, ClassVar

import numpy as np
import torch

from shmload import ShmLoader
from shmload.tools.bench.contestants import Loader, LoaderOptions, keywords

FIELDS = ("a", "b", "c")


class Dicts:
    """Samples of three float32 arrays of 100 to 2,000 values and a string, copied from one flat array (W5 of peers.py)."""

    def __init__(self, num_samples: int = 20_000) -> None:
        lengths = np.random.default_rng(8).integers(100, 2001, 3 * num_samples)
        self.ends = np.concatenate([[0], lengths.cumsum()])
        self.flat = np.random.default_rng(9).random(int(self.ends[-1]), np.float32)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        ends = self.ends[3 * index : 3 * index + 4]
        sample: dict[str, Any] = {name: self.flat[ends[k] : ends[k + 1]].copy() for k, name in enumerate(FIELDS)}
        sample["id"] = f"sample-{index:08d}"
        return sample


class DictsInPlace(Dicts):
    """The same samples, written directly into the batch."""

    schema: ClassVar = {**dict.fromkeys(FIELDS, ("float32", (None,))), "id": str}

    def read_into(self, index: int, out: Any) -> None:
        ends = self.ends[3 * index : 3 * index + 4].tolist()
        for k, name in enumerate(FIELDS):
            out.reserve(name, ends[k + 1] - ends[k])[:] = self.flat[ends[k] : ends[k + 1]]
        out["id"] = f"sample-{index:08d}"


class Texts:
    """Samples of one string of `length` characters."""

    def __init__(self, length: int, num_samples: int = 100_000) -> None:
        letters = np.random.default_rng(10).integers(97, 123, length * 1000, np.uint8).tobytes().decode()
        self.texts = [letters[length * i : length * (i + 1)] for i in range(1000)]
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> str:
        return self.texts[index % 1000]


class Listed:
    """Small samples of one kind, for batches that are the list of their samples."""

    def __init__(self, kind: str, num_samples: int = 100_000) -> None:
        make: dict[str, Callable[[int], Any]] = {
            "numbers and text": lambda i: {"id": i, "text": f"word {i}", "score": i / 7, "missing": None},
            "dates": lambda i: (date.fromordinal(700_000 + i), i),
            "arrays": lambda i: {"x": np.full(8, i), "y": i},
            "objects": lambda i: {"x": np.array([i, "x", None], dtype=object), "y": i},
        }
        self.make = make[kind]
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def end_to_end(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collates samples by concatenating the values of each field, and adds their lengths."""
    batch: dict[str, Any] = {"id": [sample["id"] for sample in samples]}
    for name in FIELDS:
        arrays = [sample[name] for sample in samples]
        batch[name] = torch.from_numpy(np.concatenate(arrays))
        batch[name + "_length"] = torch.tensor([array.size for array in arrays])
    return batch


def as_lists(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collates each field into a list of tensors."""
    batch: dict[str, Any] = {name: [torch.from_numpy(sample[name]) for sample in samples] for name in FIELDS}
    batch["id"] = [sample["id"] for sample in samples]
    return batch


def _ragged(mode: str) -> Any:
    def loader(dataset: Any, options: LoaderOptions) -> Loader:
        settings = {**keywords(options), "ragged": mode}
        made: Loader = ShmLoader(dataset, **settings, generator=options.generator())
        return made

    return loader


shmload_list, shmload_pad, shmload_nested, shmload_jagged = (_ragged(mode) for mode in ("list", "pad", "nested", "jagged"))


class Alone:
    """A substitute for a loader that reads the dataset in the trainer and drops the samples."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.dataset, self.batch_size = dataset, options.batch_size

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.dataset)).tolist()
        for start in range(0, len(order), self.batch_size):
            for index in order[start : start + self.batch_size]:
                self.dataset[index]
            yield None
