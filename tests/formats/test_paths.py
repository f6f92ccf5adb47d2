"""Paths as every reader of files takes them."""

from __future__ import annotations

from typing import Any

import pytest

from shmload.formats import (
    ArrayDataset,
    HDF5Dataset,
    ImageFolder,
    ParquetDataset,
    SafetensorsDataset,
    TarDataset,
    TarStream,
    TFRecordDataset,
    TokenDataset,
    ZarrDataset,
)

URLS = ["s3://bucket/folder/a-{0..3}.tar", "https://host/a.bin", "gs://bucket/a.npy", "file:///data/a.npy"]
READERS: list[Any] = [
    ArrayDataset,
    HDF5Dataset,
    ImageFolder,
    lambda url: ImageFolder([url]),
    ParquetDataset,
    SafetensorsDataset,
    TarDataset,
    TarStream,
    TFRecordDataset,
    lambda url: TFRecordDataset([url]),
    lambda url: TokenDataset(url, 5, dtype="uint16"),
    lambda url: TokenDataset([1, 2], 1, document_index=f"{url}.idx"),
    ZarrDataset,
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("reader", READERS)
def test_a_url_is_refused_where_files_are_read_and_the_error_says_what_to_do(reader: Any, url: str) -> None:
    with pytest.raises(ValueError, match=r"reads files of this machine; got the URL '.*://.*: copy .*RemoteDataset"):
        reader(url)
