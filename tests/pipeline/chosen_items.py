"""Datasets for pipelines that only select samples: some draw at random, read several samples at once, or decode into rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from shmload import sample_rng
from shmload.formats import (
    ArrayDataset,
    HDF5Dataset,
    ImageDecoder,
    ImageFolder,
    ParquetDataset,
    Resize,
    SafetensorsDataset,
    TarDataset,
    TarWriter,
    TFRecordDataset,
    TFRecordWriter,
    TokenDataset,
    ZarrDataset,
)

N = 23


NAMES = ("drawn", "globally", "own")


class Drawing:
    """Samples that draw random numbers, read one by one."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        draws = sample_rng().random(), random.random(), self.rng.random()
        return {"x": np.int64(index)} | {name: np.float64(draw) for name, draw in zip(NAMES, draws, strict=True)}


class Into(Drawing):
    """The same samples, decoded into rows."""

    schema = {"x": "int64", **dict.fromkeys(NAMES, "float64")}

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("read_into comes first")

    def read_into(self, index: int, out: Any) -> None:
        out["x"] = index
        out["drawn"], out["globally"], out["own"] = sample_rng().random(), random.random(), self.rng.random()


class Getting(Drawing):
    """The same samples, read several at once."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("__getitems__ comes first")

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [super(Getting, self).__getitem__(index) for index in indices]


class ByIndex:
    """Samples that draw with sample_rng, read one by one."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.int64(index), "drawn": np.float64(sample_rng().random())}


class ByIndexInto(ByIndex):
    """The same samples, decoded into several rows at once."""

    schema = {"x": "int64", "drawn": "float64"}

    def __init__(self) -> None:
        self.num_batches = 0

    def read_batch_into(self, indices: Any, out: Any) -> None:
        self.num_batches += 1
        out["x"][...] = indices
        out["drawn"][...] = [sample_rng(index).random() for index in indices]


class ByIndexGetting(ByIndex):
    """The same samples, read several at once."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("__getitems__ comes first")

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{"x": np.int64(index), "drawn": np.float64(sample_rng(index).random())} for index in indices]


class Broken(ByIndexInto):
    """A dataset whose 7th sample cannot be read."""

    def read_batch_into(self, indices: Any, out: Any) -> None:
        if 7 in indices:
            raise ValueError("no sample")
        super().read_batch_into(indices, out)


class BrokenInto(Into):
    """The same dataset, decoded row by row."""

    def read_into(self, index: int, out: Any) -> None:
        if index == 7:
            raise ValueError("no sample")
        super().read_into(index, out)


class BrokenGetting(ByIndexGetting):
    """The same dataset, read with __getitems__."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        if 7 in indices:
            raise ValueError("no sample")
        return super().__getitems__(indices)


# ------------------------------------------------------------ the formats


def columns() -> dict[str, np.ndarray[Any, Any]]:
    """Returns columns of N samples."""
    return {"x": np.arange(N), "row": np.arange(3.0 * N, dtype=np.float32).reshape(N, 3)}


def arrays(folder: Path) -> Any:
    return ArrayDataset(columns())


def npy(folder: Path) -> Any:
    for name, column in columns().items():
        np.save(folder / f"{name}.npy", column)
    return ArrayDataset({name: str(folder / f"{name}.npy") for name in columns()})


def tensors(folder: Path) -> Any:
    import torch

    return torch.utils.data.TensorDataset(*map(torch.as_tensor, columns().values()))


def hdf5(folder: Path) -> Any:
    import h5py

    with h5py.File(folder / "x.h5", "w") as file:
        for name, column in columns().items():
            file[name] = column
    return HDF5Dataset(str(folder / "x.h5"))


def zarr(folder: Path) -> Any:
    import zarr

    group = zarr.open_group(str(folder / "x.zarr"), mode="w")
    for name, column in columns().items():
        group.create_array(name, data=column, chunks=(5, *column.shape[1:]))
    return ZarrDataset(str(folder / "x.zarr"))


def safetensors(folder: Path) -> Any:
    from safetensors.numpy import save_file

    save_file(columns(), folder / "x.safetensors")
    return SafetensorsDataset(str(folder / "x.safetensors"))


def parquet(folder: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    words = [None if x % 5 == 4 else f"word {x}" for x in range(N)]
    lists = [list(range(x % 4)) for x in range(N)]
    table = pa.table({"x": np.arange(N), "word": [word or "" for word in words], "list": pa.array(lists, pa.list_(pa.int64()))})
    pq.write_table(table, folder / "x.parquet", row_group_size=5)
    return ParquetDataset(str(folder / "x.parquet"))


def tfrecord(folder: Path) -> Any:
    with TFRecordWriter(folder / "x.tfrecord") as writer:
        for x, row in enumerate(columns()["row"]):
            writer.write({"x": x, "row": row, "word": f"word {x}", "list": np.arange(x % 4)})
    schema = {"x": "int64", "row": ("float32", (3,)), "word": str, "list": ("int64", (None,))}
    return TFRecordDataset(str(folder / "x.tfrecord"), schema)


def raw_records(folder: Path) -> Any:
    with TFRecordWriter(folder / "x.tfrecord") as writer:
        for x in range(N):
            writer.write(b"record %d" % x)
    return TFRecordDataset(str(folder / "x.tfrecord"))


def write_tar(folder: Path) -> list[str]:
    """Writes two shards and returns their paths."""
    with TarWriter(folder / "x-%06d.tar", maxcount=12) as writer:
        for x, row in enumerate(columns()["row"]):
            writer.write({"__key__": f"{x:03d}", "npy": row, "cls": x, "txt": f"word {x}"})
    return sorted(map(str, folder.glob("x-*.tar")))


def tar(folder: Path) -> Any:
    return TarDataset(write_tar(folder), schema={"npy": ("float32", (3,)), "cls": "int64", "txt": str, "__key__": str})


def tar_of_one_type(folder: Path) -> Any:
    return TarDataset(write_tar(folder), schema={"npy": ("float32", (3,)), "cls": "int64"})


def tar_without_a_schema(folder: Path) -> Any:
    return TarDataset(write_tar(folder))


def remote_view(folder: Path) -> Any:
    from shmload.remote import RemoteDataset

    write_tar(folder)
    return RemoteDataset.from_urls(str(folder)).indexed(schema={"npy": ("float32", (3,)), "cls": "int64"})


def tokens(folder: Path) -> Any:
    return TokenDataset(np.arange(4 * N) % 250, 4)


def write_images(folder: Path) -> list[str]:
    """Writes small pictures of different sizes and returns their paths."""
    from PIL import Image

    pixels = np.random.default_rng(0)
    for x in range(N):
        picture = pixels.integers(0, 256, (12 + x % 3, 16, 3), dtype=np.uint8)
        Image.fromarray(picture).save(folder / f"{x:03d}.png")
    return [str(folder / f"{x:03d}.png") for x in range(N)]


def images(folder: Path) -> Any:
    return ImageFolder(write_images(folder), ImageDecoder(Resize(8)), labels=range(N))


def images_of_all_sizes(folder: Path) -> Any:
    return ImageFolder(write_images(folder))


def subset(folder: Path) -> Any:
    import torch

    return torch.utils.data.Subset(arrays(folder), [3, 1, 20, 3, 7])


def concatenated(folder: Path) -> Any:
    import torch

    return torch.utils.data.ConcatDataset([arrays(folder), npy(folder)])


def huggingface(folder: Path) -> Any:
    import datasets

    made = datasets.Dataset.from_dict({"x": list(range(N)), "word": [f"word {x}" for x in range(N)]})
    return made.with_format("numpy")


FORMATS = {
    make.__name__: make
    for make in (
        *(arrays, npy, tensors, hdf5, zarr, safetensors, parquet, tfrecord, raw_records, tar, tar_of_one_type),
        *(tar_without_a_schema, remote_view, tokens, images, images_of_all_sizes, subset, concatenated, huggingface),
    )
}
NEEDED = {"hdf5": "h5py", "zarr": "zarr", "safetensors": "safetensors", "parquet": "pyarrow", "huggingface": "datasets"}
