"""The reading snippet of the documentation with real images from a real store; distributed ranks; shards written by webdataset."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

import shmload
from shmload import ShmLoader
from shmload.formats import ImageFolder
from shmload.remote import Client, RemoteDataset, upload_cv_dataset
from tests.remote.remote_kit import labels, uploaded, write_packed
from tests.storage.store_kit import Server

PICTURES = sorted((Path(shmload.__file__).parent / "data").glob("*.jpg"))
NUM_CLASSES, NUM_RANKS = len(PICTURES), 2


def preproc(picture: Image.Image) -> torch.Tensor:
    """Converts an image as the documentation's transforms do, without their randomness."""
    return torch.from_numpy(np.array(picture.convert("RGB").resize((48, 48)))).permute(2, 0, 1).float() / 255


def snippet(client: Client, bucket: str, folder: str) -> RemoteDataset:
    """Builds the dataset of the documentation's snippet."""
    return (
        RemoteDataset(client, bucket, folder)
        .decode("pil")  # Decode the data as PIL images
        .to_tuple("jpg;png", "cls")  # Extract images and labels from the dataset
        .map_tuple(preproc, lambda x: x)  # Apply data augmentations
        .batched(5)
    )


@pytest.fixture(scope="session")
def pictures(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Packs each image three times, each image as a class, into several shards of the store."""
    place = tmp_path_factory.mktemp("pictures")
    for number, path in enumerate(PICTURES):
        (place / f"{number:02d}").mkdir()
        for copy in range(3):
            shutil.copy(path, place / f"{number:02d}" / f"{copy}.jpg")
    bucket, folder = server.bucket("reading"), os.urandom(6).hex()
    upload_cv_dataset(ImageFolder(place), server.client(), bucket, folder, maxcount=7, workers=0)
    return bucket, folder


def read(loader: Any) -> list[int]:
    """Reads an epoch, checks its images and returns their labels."""
    expected = [preproc(Image.open(path)) for path in PICTURES]
    found: list[int] = []
    for image, label in loader:
        for one, number in zip(image, np.asarray(label).tolist(), strict=True):
            assert torch.equal(one, expected[number])
            found.append(number)
    return found


@pytest.mark.slow(reason="a real S3 server, and three workers, by spawn, too")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize("loader", [torch.utils.data.DataLoader, ShmLoader])
def test_documented_snippet_reads_from_the_store(
    loader: Callable[..., Any], start_method: str, pictures: tuple[str, str], server: Server
) -> None:
    dataset = snippet(server.client(), *pictures) if start_method == "fork" else spawnable(server.client(), *pictures)
    found = read(loader(dataset, num_workers=3, batch_size=None, multiprocessing_context=start_method))
    assert sorted(found) == sorted([*range(NUM_CLASSES)] * 3)


def spawnable(client: Client, bucket: str, folder: str) -> RemoteDataset:
    """Builds the snippet's dataset without its lambda, which cannot be sent to a spawned worker."""
    return RemoteDataset(client, bucket, folder).decode("pil").to_tuple("jpg;png", "cls").map_tuple(preproc).batched(5)


@pytest.mark.slow(reason="a real S3 server, and torchrun with two ranks that import torch")
def test_two_ranks_of_torch_distributed_read_every_sample_exactly_once(server: Server, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    manifest = write_packed(files, [11, 30, 23])
    bucket, folder = uploaded(server, files)
    program = str(Path(__file__).with_name("rank_program.py"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    paths = [str(Path(shmload.__file__).parents[1]), *sys.path]
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "AWS_ENDPOINT_URL": server.endpoint}
    env |= {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
    env |= {"AWS_REGION": server.region, "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, program, bucket, folder, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=220)
    assert done.returncode == 0, done.stderr[-8000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    for epoch in range(2):
        read_by = [rank["epochs"][epoch] for rank in ranks]
        assert {manifest.num_samples // 2} == {len(found) for found in read_by} == {rank["length"] for rank in ranks}
        assert list(range(manifest.num_samples)) == sorted(read_by[0] + read_by[1])
    assert ranks[0]["epochs"][0] != ranks[0]["epochs"][1]


def test_shards_written_by_webdataset_are_read_from_the_store(server: Server, tmp_path: Path) -> None:
    with webdataset.ShardWriter(str(tmp_path / "part-%06d.tar"), maxcount=9, verbose=0) as writer:
        for number in range(25):
            picture = np.full((4, 4, 3), number, np.uint8)
            writer.write({"__key__": f"{number:06d}", "png": picture, "cls": number, "json": {"number": number}})
    bucket, folder = uploaded(server, tmp_path)
    dataset = RemoteDataset(server.client(), bucket, folder).decode("rgb8")
    found = list(dataset)
    assert list(range(25)) == sorted(labels(found))
    assert all(sample["png"].tolist() == np.full((4, 4, 3), sample["cls"]).tolist() for sample in found)
    assert all(sample["json"] == {"number": sample["cls"]} for sample in found)
