"""Datasets and loaders with planted faults, which the tests name as `planted:name`."""

import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.contestants.ways import torch_inline
from shmload import sample_rng
from shmload.tools.bench.contestants import LoaderOptions


class Good:
    """Samples of four numbers and their index."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.full(4, index, np.float32), index


good = Good()


class InPlace:
    """A dataset that decodes into batches and has no samples for torch's DataLoader."""

    schema: ClassVar[dict[str, Any]] = {"x": ("float32", ())}

    def __len__(self) -> int:
        return 100

    def read_into(self, index: int, out: Any) -> None:
        out["x"][...] = index


in_place = InPlace()


class RandomInPlace(InPlace):
    """The dataset of the README: it draws the sample's own random numbers, and sets a field without a view."""

    schema: ClassVar[dict[str, Any]] = {"image": ("uint8", (3, 8, 8)), "label": "int64"}

    def read_into(self, index: int, out: Any) -> None:
        out["image"][...] = sample_rng().integers(0, 256, (3, 8, 8))
        out["label"] = index % 10


class RaggedInPlace(InPlace):
    """Samples of text and of different lengths, all 3 long, so that torch can collate them."""

    schema: ClassVar[dict[str, Any]] = {"text": str, "values": ("int16", (None,))}

    def read_into(self, index: int, out: Any) -> None:
        out["text"] = str(index)
        out.reserve("values", 3)[...] = index


class WithoutLength:
    schema: ClassVar[dict[str, Any]] = InPlace.schema

    def read_into(self, index: int, out: Any) -> None:
        out["x"][...] = index


class WithoutSchema:
    def read_into(self, index: int, out: Any) -> None:
        out["x"][...] = index


class Unrepeatable(Good):
    """Samples from an unseeded generator, different in every pass."""

    draw = np.random.default_rng()

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.draw.random(4), index


class Empty(Good):
    def __len__(self) -> int:
        return 0


class Unreadable(Good):
    def __getitem__(self, index: int) -> tuple[Any, int]:
        raise KeyError("image")


class Deadly(Good):
    """A dataset that ends the process that reads it."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        raise SystemExit(3)


class Stream(IterableDataset[Any]):
    """An iterable dataset of 1,000 samples in a custom order, divided among the workers."""

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(first, len(self), step):
            yield np.full(64, number, np.float32), number


stream = Stream()


def lines() -> Iterator[int]:
    return (number for number in range(3))


def raises() -> Good:
    raise FileNotFoundError("no folder train/")


def needs_path(path: str) -> Good:
    return Good()


number = 7


def torch_like(dataset: Any, options: LoaderOptions) -> Any:
    """Makes a correct loader."""
    return torch_inline(dataset, options)


class OneWrongByte:
    """torch's batches, of which the second has one byte changed."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.loader = torch_inline(dataset, options)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.loader):
            if number == 1:
                first = batch[0] if isinstance(batch, list) else next(iter(batch.values()))
                first.reshape(-1).view(torch.uint8)[-1] ^= 1
            yield batch


class Backwards:
    """torch's batches of an epoch in reverse order."""

    keeps_order = False

    def __call__(self, dataset: Any, options: LoaderOptions) -> Any:
        return list(torch_inline(dataset, options))[::-1]


backwards = Backwards()


def raises_at_once(dataset: Any, options: LoaderOptions) -> Iterator[Any]:
    raise RuntimeError("no batch today")


def delivers_nothing(dataset: Any, options: LoaderOptions) -> "DataLoader[Any]":
    """Makes an empty loader."""
    return DataLoader([], batch_size=1)  # type: ignore[arg-type]  # an empty list is a dataset


class Uneven(Good):
    """A dataset whose samples differ in length."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(index % 7 + 1)


class Sleeping(Good):
    """A dataset that sleeps and computes almost nothing."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        time.sleep(0.004)
        return super().__getitem__(index)


class Computing(Good):
    """A dataset that computes and never sleeps."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        end_s = time.thread_time() + 0.004
        while time.thread_time() < end_s:
            pass
        return super().__getitem__(index)


def shuffled_loader() -> "DataLoader[Any]":
    """Makes a shuffled loader with its own generator, as in a user's script."""
    generator = torch.Generator().manual_seed(3)
    return DataLoader(Good(), batch_size=8, shuffle=True, num_workers=1, drop_last=True, generator=generator)


def doubled(samples: list[Any]) -> Any:
    return torch.stack([torch.from_numpy(values) * 2 for values, _ in samples])


def custom_loader() -> "DataLoader[Any]":
    """Makes a loader with a custom batch sampler and collate function, without workers."""
    batches = [[0, 1, 2], [5], [7, 3]]
    return DataLoader(Good(), batch_sampler=batches, collate_fn=doubled)


def stream_loader() -> "DataLoader[Any]":
    return DataLoader(Stream(), batch_size=2)


class Sized(Good):
    """A dataset whose keys are pairs of an index and a size, for training with several sizes."""

    def __getitem__(self, key: Any) -> Any:
        index, size = key
        return np.full(size, index, np.float32)


def stacked(samples: list[Any]) -> Any:
    return torch.as_tensor(np.stack(samples))


def sized_loader() -> "DataLoader[Any]":
    batches = [[(index, 4 + batch % 3) for index in range(6 * batch, 6 * batch + 6)] for batch in range(16)]
    return DataLoader(Sized(), batch_sampler=batches, collate_fn=stacked, num_workers=1)


def unseeded_loader() -> "DataLoader[Any]":
    """Makes a loader that shuffles with torch's global generator."""
    return DataLoader(Good(), batch_size=8, shuffle=True)


def loader_that_fails() -> "DataLoader[Any]":
    raise FileNotFoundError("no folder train/")
