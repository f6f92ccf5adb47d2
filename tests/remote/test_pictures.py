"""Images in the format of Hugging Face, struct<bytes, path>, are decoded by an `ImageDecoder`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from shmload import ShmLoader
from shmload.formats import CenterCrop, ImageDecoder, ParquetDataset
from shmload.remote import RemoteDataset

slow = pytest.mark.slow(reason="starts workers")


@pytest.fixture
def pixels(tmp_path: Path) -> list[np.ndarray[Any, Any]]:
    """Writes 8 images in two row groups to `tmp_path` and returns their pixels."""
    made = [np.full((9, 12, 3), number, np.uint8) for number in range(8)]
    pictures = []
    for number, each in enumerate(made):
        file = io.BytesIO()
        Image.fromarray(each).save(file, "PNG")
        pictures.append({"bytes": file.getvalue(), "path": f"{number}.png"})
    pq.write_table(pa.table({"image": pictures, "label": range(8)}), tmp_path / "a.parquet", row_group_size=4)
    return made


def test_indexed_view_decodes_images(tmp_path: Path, pixels: list[Any]) -> None:
    view = RemoteDataset.from_urls(str(tmp_path)).indexed(decode={"image": ImageDecoder(layout="HWC")})
    for number, expected in enumerate(pixels):
        assert np.array_equal(expected, view[number]["image"])
        assert view[number]["label"] == number
    view._source.local.close()


def test_map_dict_decodes_images(tmp_path: Path, pixels: list[Any]) -> None:
    dataset = RemoteDataset.from_urls(str(tmp_path), shuffle=False)
    found = [sample["image"] for sample in dataset.map_dict(image=ImageDecoder(layout="HWC"))]
    dataset.close()
    assert np.array_equal(pixels, found)


@slow
def test_workers_decode_images_into_batches(tmp_path: Path, pixels: list[Any]) -> None:
    view = RemoteDataset.from_urls(str(tmp_path)).indexed(decode={"image": ImageDecoder(CenterCrop(4))})
    with ShmLoader(view, batch_size=4, seed=0, num_workers=2) as loader:
        for batch in loader:
            assert batch["image"].shape == (4, 3, 4, 4)
            assert batch["image"][:, 0, 0, 0].tolist() == batch["label"].tolist()


def test_image_without_bytes_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    pq.write_table(pa.table({"image": pa.array([{"bytes": None, "path": "a.png"}], kind)}), tmp_path / "a.parquet")
    view = RemoteDataset.from_urls(str(tmp_path)).indexed(decode={"image": ImageDecoder()})
    with pytest.raises(ValueError, match=r"stored as its path alone, 'a.png', without its bytes. Store the bytes"):
        view[0]
    view._source.local.close()


def test_error_of_parquet_dataset_names_the_class_that_reads_images(tmp_path: Path, pixels: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"read its pictures with RemoteDataset.*indexed\(decode=\{'image': ImageDecoder\(\)\}\)"):
        ParquetDataset(tmp_path / "a.parquet")[0]
