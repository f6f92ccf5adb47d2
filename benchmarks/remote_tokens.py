"""Measure the rate and CPU cost of reading windows of tokens from an object store, compared with LitData and MosaicML Streaming.

Method: 40,000 windows of 2,049 uint16 tokens, 164 MB, are in shards of 20 MB in the store of benchmarks/remote.py: as `.npy`
files, in the format of LitData's TokensLoader, and as MosaicML's arrays. Every case reads all of them once, shuffled, in a
process of its own, with 2 forked workers and batches of 32, including the start of the workers, without imports. It reads cold
with an empty folder, then warm with the same folder. The sum of all tokens is checked.

    npy                      ShmLoader over `RemoteDataset.indexed()`, block shuffle
    of litdata, of mosaicml  the same over the shards that these libraries have written
    litdata, mosaicml        their own readers and loaders (TokensLoader; torch's DataLoader)

How to read: See benchmarks/remote.py. CPU is that of the reader's processes per window; the last figure includes the server's.

Result (2 cores, beside other programs at a load of 7, one round):
| | npy | of litdata | of mosaicml | litdata | mosaicml |
|---|---|---|---|---|---|
| cold, MB/s; CPU us per window | 116; 26 | 68; 28 | 63; 38 | 23; 93 | 17; 279 |
| warm | 148; 21 | 75; 24 | 111; 29 | 79; 65 | 22; 211 |
Predicted: 0.3 of LitData's CPU. At first it was 0.7 cold and 1.0 warm, because numpy's state was read twice for each chunk of a
batch, to detect whether its samples drew random numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import remote
from benchmarks.common import Result, Row, Settings, main
from benchmarks.remote_peers import litdata_dataset, mosaicml_package

NUM_WINDOWS, LENGTH, BATCH = 40_000, 2049, 32
SHARD_NBYTES = 20_000_000
WRITERS = ("npy", "litdata", "mosaicml")
MOST_US = {"cold": 30, "warm": 25}  # aims
CASES = ("npy", "of litdata", "of mosaicml", "litdata", "mosaicml")


def windows() -> Iterator[np.ndarray[Any, Any]]:
    """Yields distinct windows."""
    rng = np.random.default_rng(7)
    for _ in range(NUM_WINDOWS):
        yield rng.integers(0, 50_000, LENGTH, np.uint16)


def write(kind: str, folder: str) -> None:
    """Writes the windows in the format of one of the three libraries."""
    if kind == "npy":
        each, found = SHARD_NBYTES // (2 * LENGTH), np.stack(list(windows()))
        for number, first in enumerate(range(0, NUM_WINDOWS, each)):
            np.save(f"{folder}/{number:04d}.npy", found[first : first + each])
    elif kind == "litdata":
        import torch
        from litdata.streaming.item_loader import TokensLoader
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(folder, chunk_bytes=SHARD_NBYTES, item_loader=TokensLoader(LENGTH))
        for number, window in enumerate(windows()):
            writer[number] = torch.from_numpy(window)
        writer.done()
        writer.merge()
    else:
        streaming, _declared = mosaicml_package()
        columns = {"tokens": f"ndarray:uint16:{LENGTH}"}
        with streaming.MDSWriter(out=folder, columns=columns, size_limit=SHARD_NBYTES, hashes=[]) as out:
            for window in windows():
                out.write({"tokens": window})


def upload(kind: str) -> None:
    """Uploads the windows to the store's bucket, unless they are already there."""
    client, prefix = remote.s3(), f"tokens/{kind}"
    if client.list_objects_v2(Bucket=remote.BUCKET, Prefix=f"{prefix}/").get("KeyCount"):
        return
    with tempfile.TemporaryDirectory() as folder:
        write(kind, folder)
        for path in sorted(Path(folder).iterdir()):
            client.upload_file(str(path), remote.BUCKET, f"{prefix}/{path.name}")


def own(kind: str, folder: str) -> Iterator[Any]:
    """Yields shmload's batches."""
    from shmload import ShmLoader
    from shmload.remote import RemoteDataset
    from shmload.remote.layouts import LitData

    layout = LitData(block_size=LENGTH) if kind == "litdata" else None
    data = RemoteDataset.from_urls(f"s3://{remote.BUCKET}/tokens/{kind}", layout=layout, cache_folder=folder, window=5)
    view = data.indexed()
    with ShmLoader(view, BATCH, sampler=view.block_shuffle(), seed=0, num_workers=2) as loader:
        for batch in loader:
            (tokens,) = (value for value in batch.values() if getattr(value, "ndim", 0) == 2)
            yield tokens


def peers(kind: str, folder: str) -> Iterator[Any]:
    """Yields the batches of litdata or mosaicml."""
    import torch

    url = f"s3://{remote.BUCKET}/tokens/{kind}"
    os.makedirs(folder, exist_ok=True)
    if kind == "litdata":
        import litdata
        from litdata.streaming.item_loader import TokensLoader

        data = litdata_dataset(url, folder, item_loader=TokensLoader(LENGTH), drop_last=False)
        yield from litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=2)
    else:
        streaming, _declared = mosaicml_package()
        os.environ.setdefault("S3_ENDPOINT_URL", os.environ["AWS_ENDPOINT_URL"])
        data = streaming.StreamingDataset(remote=url, local=folder, shuffle=True, shuffle_seed=0, batch_size=BATCH)
        for batch in torch.utils.data.DataLoader(data, batch_size=BATCH, num_workers=2):
            yield batch["tokens"]


def read(case: str, folder: str) -> dict[str, int]:
    """Reads one pass. Returns the number of bytes, and the sum of the tokens."""
    kind = case.removeprefix("of ")
    batches: Iterable[Any] = peers(kind, folder) if case in ("litdata", "mosaicml") else own(kind, folder)
    total = seen = 0
    for tokens in batches:
        total += int(tokens.numpy().sum(dtype=np.int64))
        seen += len(tokens)
    return {"nbytes": 2 * LENGTH * seen, "sum": total}


def measure(settings: Settings) -> Result:
    """Reads the windows in every way, in turn."""
    if (left_out := remote.no_store()) is not None:
        return Result([], {"left out": left_out})
    expected = sum(int(window.sum(dtype=np.int64)) for window in windows())
    found: dict[str, list[dict[str, float]]] = {}
    absent: dict[str, str] = {}
    for kind in WRITERS:
        command = [remote.peers_python(), "-W", "ignore", "-m", "benchmarks.remote_tokens", "upload", kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            absent[kind] = (done.stderr.strip() or "no word").splitlines()[-1][:200]
            print(f"left out: {kind}: {absent[kind]}", file=sys.stderr)
    cases = [case for case in CASES if case.removeprefix("of ") not in absent]
    for _ in range(settings.rounds):
        with tempfile.TemporaryDirectory() as place:
            for case in cases:
                for way in ("cold", "warm"):
                    python = remote.peers_python() if case in ("litdata", "mosaicml") else sys.executable
                    name = case.replace(" ", "-")
                    one = remote.in_a_process(case, f"{place}/{name}", python, "benchmarks.remote_tokens")
                    if one["sum"] != expected:
                        raise SystemExit(f"{case}, {way}: the sum of the tokens is {one['sum']:.0f}, not {expected}")
                    found.setdefault(f"{case}, {way}", []).append(one)
    return Result(rows_of(found), {"cases": found, "left out": absent, "load": os.getloadavg()})


def rows_of(found: dict[str, list[dict[str, float]]]) -> list[Row]:
    """Returns the cost of the plain files, and the ratios of the medians to those of the best peer."""

    def middle(name: str, of: Callable[[dict[str, float]], float]) -> float:
        return median(map(of, found[name]))

    rows = []
    for way in ("cold", "warm"):
        names = [name for name in found if name.endswith(way)]
        rate = {name: middle(name, lambda one: one["nbytes"] / one["s"] / 1e6) for name in names}
        cpu = {name: middle(name, lambda one: one["cpu_s"] / NUM_WINDOWS * 1e6) for name in names}
        whole = {name: middle(name, lambda one: (one["cpu_s"] + one["server_s"]) / NUM_WINDOWS * 1e6) for name in names}
        theirs = [name for name in names if name.startswith(("litdata", "mosaicml"))]
        kind = f"npy, {way}"
        most = MOST_US[way]
        rows.append(Row(f"{kind}: CPU a window", cpu[kind], "us", f"{rate[kind]:.0f} MB/s", f"<= {most}", cpu[kind] <= most))
        for name in names if theirs else ():
            beside = f"{rate[name]:.0f} MB/s, {cpu[name]:.1f} us, {whole[name]:.1f} with the server's"
            if name in theirs:
                print(f"{name}: {beside}", file=sys.stderr)
                continue
            times, share = rate[name] / max(rate[each] for each in theirs), cpu[name] / min(cpu[each] for each in theirs)
            others = ", ".join(f"{each} {rate[each]:.0f} MB/s, {cpu[each]:.1f} us" for each in theirs)
            rows.append(Row(f"{name}: rate over the best peer's", times, "x", f"{beside}; {others}", ">= 1x", times >= 1))
            rows.append(Row(f"{name}: CPU a window over the best peer's", share, "x", "", "<= 0.5x", share <= 0.5))
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        remote.run(sys.argv[2], sys.argv[3], read)
    elif sys.argv[1:2] == ["upload"]:
        upload(sys.argv[2])
    else:
        main("remote_tokens", __doc__, measure)
