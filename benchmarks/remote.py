"""How fast do photos of 100 KB come from an object store, and what does that cost?

Method: 10,000 photos of 88 KB, a thousand different ones, cut from those that ship with shmload, packed into 45 tar shards of 20 MB
in a real S3-compatible store on this machine. Every case reads all shards once in a process of its own, 2 forked workers,
batches of 64, the bytes of the photos delivered, nothing decoded; rates are of whole passes, imports excluded, start of the workers
(0.1 to 0.2 s) included. A virtual machine's memory that was given back to its host costs 3 s of CPU a GiB when it is touched again;
so each case touches 3 GiB before its clock begins.

    raw       the client library alone (obstore): every shard by parallel ranges of 8 MB into memory, nothing looked at
    cold      ShmLoader over `RemoteDataset.indexed()`, block shuffle, an empty cache folder
    warm      the same folder once more
    none      a private folder with room for six shards
    fluent    RemoteDataset.to_tuple().batched() in ShmLoader, cold
    webdataset  1.0.2 over the same shards by presigned URLs and curl, torch's DataLoader

How to read: server and reader share the two cores, so CPU that a reader saves the server has. The store is the one that the usual
environment names (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), else a gateway that is started for it.

Result (2 cores, load 6 by others, one run of each, so wall times say little: look at the CPU; the server took 160 us a
photo beside):
| | raw | cold | warm | none | fluent | webdataset |
|---|---|---|---|---|---|---|
| MB/s | 550 | 297 | 948 | 268 | 112 (375 in another run) | 188 (223) |
| CPU us a photo | 51 | 127 | 45 | 138 | 423 (203) | 456 (507) |
Cold was 143 to 164 us while shards were written through a mapping (same hour, in turn): 35 less were predicted from the cost of the
pages alone, about 25 came. The trainer took 0.06 s a GiB cold and 0.04 warm, in batches of 5.6 MB: the aim is 0.02. With the
server's CPU counted, cold comes to 0.7 of raw: the aim of 0.8 is missed, too, and so is 3 times webdataset.
"""

from __future__ import annotations

import importlib
import io
import json
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import Result, Row, Settings, main

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "storage"))

import store_kit  # the path comes first

BUCKET, FOLDER = "shmload-benchmark", "photos"
NUM_PHOTOS, NUM_TILES = 10_000, 1000
SHARD_NBYTES = 20_000_000
BATCH = 64
TOUCHED_NBYTES = 3 << 30


def photos() -> Iterator[bytes]:
    """JPEG files of about 100 KB, each another."""
    from PIL import Image

    import shmload

    found = sorted((Path(shmload.__file__).parent / "data").glob("*.jpg"))
    pictures = [Image.open(path).convert("RGB") for path in found]
    tiles = []
    for number in range(NUM_TILES):
        picture = pictures[number % len(pictures)]
        left = number * 7 % max(picture.width - 300, 1)
        top = number * 3 % max(picture.height - 225, 1)
        tile = picture.crop((left, top, left + 300, top + 225)).resize((640, 480))
        file = io.BytesIO()
        tile.save(file, "JPEG", quality=97)
        tiles.append(file.getvalue())
    for number in range(NUM_PHOTOS):
        yield tiles[number % NUM_TILES] + number.to_bytes(4, "little")


def upload() -> None:
    """Packs the photos, unless they are there."""
    from shmload._core.crc32c import crc32c
    from shmload.formats import TarWriter
    from shmload.formats.tar.shard import ShardIndex, pack_index
    from shmload.remote import make_client
    from shmload.remote.manifest import MANIFEST_NAME, IndexEntry, Manifest, ShardEntry

    store = make_client().store(BUCKET, FOLDER)
    s3().create_bucket(Bucket=BUCKET)
    if list(store.list_objects()):
        return
    with tempfile.TemporaryDirectory() as folder:
        with TarWriter(f"{folder}/x-%06d.tar", maxsize=SHARD_NBYTES) as writer:
            for number, photo in enumerate(photos()):
                writer.write({"__key__": f"{number:06d}", "jpg": photo, "cls": number})
        entries = []
        for number, path in enumerate(sorted(Path(folder).glob("*.tar"))):
            name, data = f"{'0' * 16}/shard-{number:06d}.tar", path.read_bytes()
            packed = pack_index(name, data)
            store.put_file(name, path)
            store.put(f"{name}.index", packed)
            index = IndexEntry(f"{name}.index", len(packed), f"{crc32c(packed):08x}")
            num_samples = ShardIndex(name, packed).num_samples
            entries.append(ShardEntry(name, len(data), num_samples, f"{crc32c(data):08x}", index))
        nbytes = sum(entry.nbytes for entry in entries)
        manifest = Manifest("0" * 16, 0, NUM_PHOTOS, nbytes, ("cls", "jpg"), tuple(entries))
        store.put(MANIFEST_NAME, manifest.dump())


_first_batch: list[float] = [0.0]  # the trainer's CPU when it came, workers and ring being up


def s3() -> Any:
    import boto3
    from botocore.config import Config

    config = Config(request_checksum_calculation="when_required", s3={"addressing_style": "path"})
    return boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name="default", config=config)


def shards() -> list[tuple[str, int]]:
    from shmload.remote import make_client

    return [(o.key, o.nbytes) for o in make_client().store(BUCKET, FOLDER).list_objects() if o.key.endswith(".tar")]


def read_raw() -> int:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        prefix=FOLDER,
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        region="default",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    total = 0
    for key, nbytes in shards():
        starts = list(range(0, nbytes, 8 << 20))
        ends = [*starts[1:], nbytes]
        total += sum(len(part) for part in obstore.get_ranges(store, key, starts=starts, ends=ends))
    return total


def dataset(**options: Any) -> Any:
    from shmload.remote import RemoteDataset, make_client

    return RemoteDataset(make_client(), BUCKET, FOLDER, **options)


def read_view(**options: Any) -> int:
    from shmload import ShmLoader

    view = dataset(window=5, **options).indexed(schema={"jpg": ("uint8", (None,)), "cls": "int64"})
    total, seen = 0, 0
    with ShmLoader(
        view, batch_size=BATCH, sampler=view.block_shuffle(), seed=0, num_workers=2, ragged="jagged"
    ) as loader:
        for batch in loader:
            _first_batch.append(time.process_time() if not seen else 0.0)
            total += batch["jpg"].values.nbytes
            seen += len(batch["cls"])
            del batch
    assert seen == NUM_PHOTOS
    return total


def read_fluent(**options: Any) -> int:
    from shmload import ShmLoader

    data = dataset(window=5, **options).decode(only="cls").to_tuple("jpg", "cls").batched(BATCH)
    return counted(ShmLoader(data, batch_size=None, num_workers=2))


def read_webdataset() -> int:
    import torch
    import webdataset

    client = s3()
    urls = [
        client.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": f"{FOLDER}/{key}"})
        for key, _ in shards()
    ]
    data = (
        webdataset.WebDataset([f"pipe:curl -s '{url}'" for url in urls], shardshuffle=100)
        .shuffle(1000)
        .decode(only="cls")
        .to_tuple("jpg", "cls")
        .batched(BATCH)
    )
    return counted(torch.utils.data.DataLoader(data, batch_size=None, num_workers=2))


def counted(loader: Any) -> int:
    total, seen = 0, 0
    for jpg, cls in loader:
        total += sum(map(len, jpg))
        seen += len(cls)
    assert seen == NUM_PHOTOS
    return total


CASES: dict[str, Callable[[str], int]] = {
    "raw": lambda folder: read_raw(),
    "cold": lambda folder: read_view(cache_folder=folder),
    "warm": lambda folder: read_view(cache_folder=folder),
    "none": lambda folder: read_view(cache_bytes=15 * (SHARD_NBYTES + 200_000)),
    "fluent": lambda folder: read_fluent(cache_folder=f"{folder}-fluent"),
    "webdataset": lambda folder: read_webdataset(),
}


def touch_memory() -> None:
    """Has the host back the memory that the case will use: a virtual machine's costs 3 s of CPU a GiB when it is first touched."""
    with mmap.mmap(-1, TOUCHED_NBYTES) as memory:
        memory.madvise(23)  # MADV_POPULATE_WRITE


def run(case: str, folder: str) -> None:
    """One case, in this process."""
    for module in ("obstore", "boto3", "webdataset", "shmload.loader", "shmload.remote.dataset"):
        importlib.import_module(module)
    touch_memory()
    begin, mine = time.perf_counter(), time.process_time()
    nbytes = CASES[case](folder)
    seconds, trainer = time.perf_counter() - begin, time.process_time() - max(mine, *_first_batch)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = trainer + used.ru_utime + used.ru_stime
    print(json.dumps({"nbytes": nbytes, "s": seconds, "trainer_s": trainer, "cpu_s": cpu}))


def measure(settings: Settings) -> Result:
    """Reads the shards in every way, in turn."""
    if "AWS_ENDPOINT_URL" not in os.environ:
        try:
            server = store_kit.s3_server()
        except LookupError as error:
            return Result([], {"left out": str(error)})
        os.environ.update(
            AWS_ENDPOINT_URL=server.endpoint,
            AWS_ACCESS_KEY_ID=server.access_key,
            AWS_SECRET_ACCESS_KEY=server.secret_key,
        )
    upload()
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(settings.rounds):
        with tempfile.TemporaryDirectory() as place:
            for case in CASES:
                command = [sys.executable, "-W", "ignore", "-m", "benchmarks.remote", "case", case, f"{place}/cache"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=300)
                if done.returncode:
                    raise SystemExit(f"{case}: {done.stderr[-2000:]}")
                found[case].append(json.loads(done.stdout.splitlines()[-1]))
    best = {case: min(runs, key=lambda run: run["s"]) for case, runs in found.items()}
    rate = {case: one["nbytes"] / one["s"] / 1e6 for case, one in best.items()}
    beside = ", ".join(
        f"{case} {rate[case]:.0f} MB/s, {best[case]['cpu_s'] / NUM_PHOTOS * 1e6:.0f} us of CPU a photo"
        for case in CASES
    )
    trainer = best["cold"]["trainer_s"] / (best["cold"]["nbytes"] / 2**30)
    rows = [
        Row("cold over raw GET", rate["cold"] / rate["raw"], "x", beside, ">= 0.8x", rate["cold"] >= 0.8 * rate["raw"]),
        Row("no cache over raw GET", rate["none"] / rate["raw"], "x", "", ">= 0.8x", rate["none"] >= 0.8 * rate["raw"]),
        Row("warm over raw GET", rate["warm"] / rate["raw"], "x", "", "> 1x", rate["warm"] > rate["raw"]),
        *(
            Row(
                f"{case} over webdataset",
                rate[case] / rate["webdataset"],
                "x",
                "",
                ">= 3x",
                rate[case] >= 3 * rate["webdataset"],
            )
            for case in ("cold", "none", "fluent")
        ),
        Row("trainer CPU from the first batch on", trainer, "s/GiB", "", "<= 0.02", trainer <= 0.02),
    ]
    return Result(rows, {"cases": found})


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        run(*sys.argv[2:4])
    else:
        main("remote", __doc__, measure)
