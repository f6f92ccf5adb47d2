"""Shared parts of the contestants: torch's order, a stream divided into epochs, their own files, and samples as bytes."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from shmload.tools.bench.contestants import LoaderOptions, keywords
from shmload.tools.bench.core_limit import filler, protocol
from shmload.tools.bench.generated_data import ROW_LENGTH, SHAPE, STRIDE, WINDOW
from shmload.tools.bench.photos import SIDE, crop_into
from shmload.tools.bench.workload import NUM_LABELS as NUM_PHOTO_LABELS

NUMBER_NBYTES = 8


class TorchOrder:
    """Yields the indices of torch's batches, epoch after epoch, for loaders that accept an order."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        inline = keywords(replace(options, num_workers=0))
        self.loader: DataLoader[Any] = DataLoader(dataset, **inline, generator=options.generator())
        self.keeps_workers, self.has_begun = options.num_workers > 0, False

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self) -> Iterator[list[int]]:
        # DataLoader draws a base seed from its generator before an epoch's order (only once if its workers persist). The same
        # must be done here to get the same order.
        if not (self.keeps_workers and self.has_begun):
            torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
        self.has_begun = True
        yield from self.loader.batch_sampler or ()

    def endless(self) -> Iterator[list[int]]:
        while True:
            yield from self.epoch()


class Continued:
    """Divides one continuous stream into epochs of `num_batches` batches; a subclass defines how it is opened."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        self.stream: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.stream is None:
            self.stream = self.open()
        for _ in range(self.num_batches):
            yield next(self.stream)

    def open(self) -> Iterator[Any]:
        """Returns the endless stream of batches."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the stream."""
        if self.stream is not None:
            close = getattr(self.stream, "close", None)
            if close is not None:
                close()
            self.stream = None


def fills_batches(dataset: Any) -> bool:
    return protocol(dataset) in ("read_batch_into", "read_into")


class BatchReader:
    """Reads batches in the calling thread, in the fastest way that the dataset offers."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self.dataset, self.collate = dataset, collate or default_collate
        self.fill = filler(dataset) if collate is None and fills_batches(dataset) else None

    def __call__(self, indices: Sequence[int]) -> Any:
        if self.fill is None:
            return self.collate([self.dataset[index] for index in indices])
        arrays = {name: np.empty((len(indices), *shape), dtype) for name, (dtype, shape) in self.dataset.schema.items()}
        self.fill(indices, arrays)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def written(options: LoaderOptions, write: Callable[[Path], None]) -> Path:
    """Returns the folder of a loader's own files. The first call writes them; an interrupted write starts again."""
    if options.scratch is None:
        raise ValueError("a loader with files of its own needs a scratch folder, given none; run it by `shmload bench`")
    folder, part = options.scratch / "files", options.scratch / "part"
    if not folder.exists():
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        write(part)
        part.rename(folder)
    return folder


def photo(payload: bytes, number: int) -> dict[str, Any]:
    image = np.empty((3, SIDE, SIDE), np.uint8)
    crop_into(image, payload, number)
    return {"image": image, "label": number % NUM_PHOTO_LABELS}


def record(payload: bytes, number: int) -> dict[str, Any]:
    return {"x": np.frombuffer(payload, np.float32)}


def row(payload: bytes, number: int) -> dict[str, Any]:
    return {"x": np.frombuffer(payload, np.float32, ROW_LENGTH), "label": np.int64(number)}


def window(payload: bytes, number: int) -> dict[str, Any]:
    return {"tokens": np.frombuffer(payload, np.uint16).astype(np.int64)}


def plain(payload: bytes, number: int) -> tuple[Any, int]:
    return np.frombuffer(payload, np.uint8).reshape(SHAPE), number


Stored = tuple[bytes, int]
# class of a built-in workload's dataset -> functions that return the stored part of a sample, and the sample made from it
FORMS: dict[str, tuple[Callable[[Any, int], Stored], Callable[[bytes, int], Any]]] = {
    "Photos": (lambda of, index: (Path(of.files[index % len(of.files)]).read_bytes(), index), photo),
    "Records": (lambda of, index: (of.records[index % len(of.records)].tobytes(), index), record),
    "RowsWorkload": (lambda of, index: (of.x[index].tobytes(), int(of.labels[index])), row),
    "Tokens": (lambda of, index: (of.tokens[index * STRIDE : index * STRIDE + WINDOW].tobytes(), index), window),
    "Plain": (lambda of, index: (of.images[index % len(of.images)].tobytes(), index), plain),
}


def form(dataset: Any) -> tuple[Callable[[Any, int], Stored], Callable[[bytes, int], Any]]:
    name = type(dataset).__name__
    if name not in FORMS:
        raise ValueError(f"peers store the samples of built-in workloads: needs one of {', '.join(FORMS)}, given {name}")
    return FORMS[name]


def packed(dataset: Any, index: int) -> bytes:
    """Returns the stored form of a sample: its payload, then its number as a little-endian int64."""
    payload, number = form(dataset)[0](dataset, index)
    return payload + int(number).to_bytes(NUMBER_NBYTES, "little", signed=True)


def decoder(dataset: Any) -> Callable[[bytes, int], Any]:
    """Returns the function that makes a sample from its payload and number. It is sent to the other loader's workers."""
    return form(dataset)[1]


def unpacked(data: bytes, decoded: Callable[[bytes, int], Any]) -> Any:
    """Returns the sample from the bytes that `packed` made."""
    number = int.from_bytes(data[-NUMBER_NBYTES:], "little", signed=True)
    return decoded(data[:-NUMBER_NBYTES], number)


def worker_settings(options: LoaderOptions) -> dict[str, Any]:
    """Returns the arguments about workers for torch's DataLoader or a class derived from it."""
    names = ("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context")
    return {name: keywords(options)[name] for name in names}
