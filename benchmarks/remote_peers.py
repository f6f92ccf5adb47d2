"""Write and read the photos of benchmarks/remote.py with litdata and mosaicml-streaming, each in its own format.

    python -m benchmarks.remote_peers litdata|mosaicml          writes them to the bucket, unless they are there
    benchmarks.remote case litdata|mosaicml FOLDER              reads them, with FOLDER as the local copy

Both read with a shuffle, 2 workers and batches of 64, and deliver bytes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

BATCH = 64
SHARD_NBYTES = 20_000_000


def pack(peer: str, bucket: str, s3: Any, photos: Iterator[bytes]) -> None:
    """Writes the photos with the peer's own writer and uploads the files."""
    if s3.list_objects_v2(Bucket=bucket, Prefix=f"{peer}/").get("KeyCount"):
        return
    with tempfile.TemporaryDirectory() as folder:
        _WRITERS[peer](folder, photos)
        for path in sorted(Path(folder).iterdir()):
            s3.upload_file(str(path), bucket, f"{peer}/{path.name}")


def _write_litdata(folder: str, photos: Iterable[bytes]) -> None:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(folder, chunk_bytes=SHARD_NBYTES)
    for number, photo in enumerate(photos):
        writer[number] = {"jpg": photo, "cls": number}
    writer.done()
    writer.merge()


def mosaicml_package() -> Any:
    """Imports mosaicml's package.

    It imports torchvision, whose operators the CPU build of torch may lack. Therefore two of them are declared first.
    """
    import torch

    declared = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import streaming

    return streaming, declared


def _write_mosaicml(folder: str, photos: Iterable[bytes]) -> None:
    columns = {"jpg": "bytes", "cls": "int"}
    streaming, _declared = mosaicml_package()
    with streaming.MDSWriter(out=folder, columns=columns, size_limit=SHARD_NBYTES, hashes=[]) as writer:
        for number, photo in enumerate(photos):
            writer.write({"jpg": photo, "cls": number})


_WRITERS: dict[str, Callable[[str, Iterable[bytes]], None]] = {"litdata": _write_litdata, "mosaicml": _write_mosaicml}


def read(peer: str, bucket: str, folder: str, cache_bytes: int | None = None) -> tuple[int, int]:
    """Reads one epoch. Returns the numbers of bytes and samples."""
    os.makedirs(folder, exist_ok=True)
    total = seen = 0
    for batch in _loader(peer, f"s3://{bucket}/{peer}", folder, cache_bytes):
        total += sum(map(len, batch["jpg"]))
        seen += len(batch["cls"])
    return total, seen


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Collates samples into columns of bytes, because torch's collate and queue do not accept litdata's memoryviews."""
    return {"jpg": [bytes(row["jpg"]) for row in rows], "cls": [row["cls"] for row in rows]}


def litdata_dataset(url: str, folder: str, **options: Any) -> Any:
    """Returns a shuffled StreamingDataset of the store that the environment names."""
    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # no argument sets it
    store = {
        "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
        "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    return litdata.StreamingDataset(url, cache_dir=folder, shuffle=True, seed=0, storage_options=store, **options)


def _loader(peer: str, url: str, folder: str, cache_bytes: int | None) -> Any:
    if peer == "litdata":
        import litdata

        limit = {} if cache_bytes is None else {"max_cache_size": cache_bytes}
        data = litdata_dataset(url, folder, **limit)
        return litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=2, collate_fn=_columns)
    import torch

    streaming, _declared = mosaicml_package()
    os.environ.setdefault("S3_ENDPOINT_URL", os.environ["AWS_ENDPOINT_URL"])
    data = streaming.StreamingDataset(
        remote=url, local=folder, shuffle=True, shuffle_seed=0, batch_size=BATCH, cache_limit=cache_bytes
    )
    return torch.utils.data.DataLoader(data, batch_size=BATCH, num_workers=2)


if __name__ == "__main__":
    from benchmarks.remote import BUCKET, photos, s3

    pack(sys.argv[1], BUCKET, s3(), photos())
