"""Decoders of several fields of a sample make the same random choices, so that a mask stays aligned with its image."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shmload import ShmLoader
from shmload.formats import CenterCrop, ImageDecoder, RandomResizedCrop, TarDataset, TarWriter, TFRecordDataset, TFRecordWriter
from shmload.remote import RemoteDataset

N = 12
DECODER = ImageDecoder(RandomResizedCrop(16, scale=(0.1, 0.6)), flip=0.5)
SAME = ImageDecoder(RandomResizedCrop(16, scale=(0.1, 0.6)), flip=0.5, dtype="float32")
OTHER = ImageDecoder(RandomResizedCrop(16, scale=(0.1, 0.5)), flip=0.5)


def png() -> bytes:
    """Returns a picture whose crops all differ."""
    ramp = np.arange(64, dtype=np.uint8) * 4
    pixels = np.stack([np.broadcast_to(ramp, (64, 64)), np.broadcast_to(ramp[:, None], (64, 64)), np.zeros((64, 64), np.uint8)], -1)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


PNG = png()


def tar(folder: Path) -> Path:
    with TarWriter(folder / "a.tar") as writer:
        for number in range(N):
            writer.write({"__key__": str(number), "png": PNG, "mask.png": PNG})
    return folder / "a.tar"


def with_schema(folder: Path, decode: Any) -> Iterable[Any]:
    return TarDataset(tar(folder), decode=decode, schema={name: decoder.spec for name, decoder in decode.items()})


def without_schema(folder: Path, decode: Any) -> Iterable[Any]:
    return TarDataset(tar(folder), decode=decode)


def remote(folder: Path, decode: Any) -> Iterable[Any]:
    tar(folder)
    return RemoteDataset.from_urls(str(folder)).indexed(decode=decode)


def parquet(folder: Path, decode: Any) -> Iterable[Any]:
    pa = pytest.importorskip("pyarrow", reason="pyarrow, an extra, is not installed")
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow, an extra, is not installed")
    pq.write_table(pa.table({"png": [PNG] * N, "mask.png": [PNG] * N}), folder / "a.parquet")
    return RemoteDataset.from_urls(str(folder)).indexed(decode=decode)


def records(folder: Path, decode: Any) -> Iterable[Any]:
    with TFRecordWriter(folder / "a.tfrecord") as writer:
        for _ in range(N):
            writer.write({"png": PNG, "mask.png": PNG})
    return TFRecordDataset(folder / "a.tfrecord", {name: decoder.spec for name, decoder in decode.items()}, decode=decode)


INDEXED = [with_schema, without_schema, remote, parquet, records]


def pairs(samples: Iterable[Any]) -> list[tuple[Any, Any]]:
    return [(np.asarray(sample["png"], np.float64), np.asarray(sample["mask.png"], np.float64)) for sample in samples]


def read(dataset: Any, **options: Any) -> list[tuple[Any, Any]]:
    with ShmLoader(dataset, batch_size=4, collate_fn=None, **options) as loader:
        return [pair for batch in loader for pair in zip(*pairs([batch])[0], strict=True)]


@pytest.mark.parametrize("make", INDEXED)
@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"seed": 1, "num_workers": 2}], ids=["torch mode", "seed mode", "workers"])
def test_equal_decoders_make_the_same_choices(make: Callable[..., Any], options: dict[str, Any], tmp_path: Path) -> None:
    found = read(make(tmp_path, {"png": DECODER, "mask.png": DECODER}), **options)
    assert all(np.array_equal(image, mask) for image, mask in found)
    assert len({image.tobytes() for image, _ in found}) == N


@pytest.mark.parametrize("make", INDEXED)
def test_samples_read_alone_are_aligned_too(make: Callable[..., Any], tmp_path: Path) -> None:
    dataset: Any = make(tmp_path, {"png": DECODER, "mask.png": SAME})
    for image, mask in pairs(dataset[number] for number in range(N)):
        assert np.allclose(image / 255, mask, atol=1e-6)


def test_decoders_of_other_crops_make_their_own_choices(tmp_path: Path) -> None:
    found = read(with_schema(tmp_path, {"png": DECODER, "mask.png": OTHER}), seed=1)
    assert not any(np.array_equal(image, mask) for image, mask in found)


def test_draws_of_a_single_decoder_do_not_change(tmp_path: Path) -> None:
    alone = read(with_schema(tmp_path, {"png": DECODER, "mask.png": ImageDecoder(CenterCrop(16))}), seed=1)
    both = read(with_schema(tmp_path, {"png": DECODER, "mask.png": DECODER}), seed=1)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(alone, both, strict=True))


@pytest.mark.parametrize("seed", [None, 1])
def test_mapped_fields_are_aligned(seed: int | None, tmp_path: Path) -> None:
    tar(tmp_path)
    dataset: Any = RemoteDataset.from_urls(str(tmp_path), seed=1)
    by_name = dataset.map_dict(**{"png": DECODER, "mask.png": DECODER})
    by_place = dataset.to_tuple("png", "mask.png").map_tuple(DECODER, DECODER)
    named, placed = pairs(by_name), [tuple(map(np.asarray, pair)) for pair in by_place]
    assert len(named) == len(placed) == N
    assert all(np.array_equal(image, mask) for image, mask in [*named, *placed])
    assert len({image.tobytes() for image, _ in named}) == N
