"""Measure the cost per sample of reading shards of MosaicML Streaming and LitData unchanged, compared with their own readers.

Method: 2,000 photos of 90 KB (bytes and a label), and 40,000 rows of 1,025 int32 with a label, are written by each library's
own writer in shards of 20 MB, to a folder on this machine. Each reader runs in a process of its own, with 2 workers and batches
of 64, shuffled. shmload is ShmLoader over `RemoteDataset.from_urls(folder).indexed()` with a block shuffle; the others are
their own dataset in their own DataLoader (MosaicML's in torch's). Nothing is decoded. The same workers make two passes. The
second one is timed, from its beginning to its last batch, and the CPU is that of all processes.

How to read: Compare ratios within a round. SHMLOAD_OTHER_LOADERS names a folder with the libraries (.ci/run makes one); without
it nothing is measured. The CPU is read in ticks of 10 ms, and a pass over the photos takes shmload five of them.

Result (2 cores, quiet, 3 rounds; mosaicml-streaming 0.13.0, litdata 0.2.76):
| CPU us per sample, samples/s | shmload | its own reader | shmload over it: CPU, rate |
|---|---|---|---|
| MosaicML's shards of photos | 25, 55,800 | 175, 5,800 | 0.15, 10.3 |
| of rows | 14.5, 133,900 | 84.7, 16,700 | 0.17, 8.0 |
| LitData's chunks of photos (rows of Arrow) | 35, 50,000 | 125, 7,800 | 0.20, 7.1 |
| of rows | 13, 148,100 | 28, 46,800 | 0.47, 3.2 |
LitData's rows took 18 us when positions, indexes and copies were looked up for each sample instead of each shard.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Result, Row, Settings, in_order, main

BATCH, SHARD_NBYTES = 64, 20_000_000
SAMPLES = {"photos": 2000, "rows": 40_000}
PEERS = ("mosaicml", "litdata")
FOLDER = "SHMLOAD_OTHER_LOADERS"


def samples(kind: str) -> Iterator[dict[str, Any]]:
    """Yields the samples to write."""
    from benchmarks.remote import photos

    if kind == "photos":
        for number, photo in enumerate(islice(photos(), SAMPLES[kind])):
            yield {"x": photo, "label": number}
    else:
        for number in range(SAMPLES[kind]):
            yield {"x": np.arange(number, number + 1025, dtype=np.int32), "label": number}


def write(peer: str, kind: str, folder: str) -> None:
    """Writes the samples with the peer's writer."""
    if peer == "mosaicml":
        import streaming

        columns = {"x": "bytes" if kind == "photos" else "ndarray:int32:1025", "label": "int"}
        with streaming.MDSWriter(out=folder, columns=columns, size_limit=SHARD_NBYTES) as sink:
            for sample in samples(kind):
                sink.write(sample)
    else:
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(folder, chunk_bytes=SHARD_NBYTES)
        for number, sample in enumerate(samples(kind)):
            writer[number] = sample
        writer.done()
        writer.merge()


def listed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Collates photos into a list, because the default collate functions do not accept bytes."""
    return {"x": [bytes(row["x"]) for row in rows], "label": [row["label"] for row in rows]}


def loader(reader: str, peer: str, kind: str, folder: str) -> Any:
    """Returns a loader of shuffled batches from the shards that the peer wrote."""
    if reader == "shmload":
        from shmload import ShmLoader
        from shmload.remote import RemoteDataset

        view = RemoteDataset.from_urls(folder).indexed()
        order = view.block_shuffle()
        return ShmLoader(view, BATCH, seed=0, sampler=order, num_workers=2, persistent_workers=True)
    collate = {"collate_fn": listed} if kind == "photos" else {}
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": 2, "persistent_workers": True, **collate}
    if peer == "mosaicml":
        import streaming
        import torch

        data = streaming.StreamingDataset(local=folder, shuffle=True, shuffle_seed=0, batch_size=BATCH, num_canonical_nodes=1)
        return torch.utils.data.DataLoader(data, **options)
    import litdata

    return litdata.StreamingDataLoader(litdata.StreamingDataset(folder, shuffle=True, seed=0), **options)


def cpu_s() -> float:
    """Returns the CPU seconds of this process and all its children, running and ended."""
    import psutil

    me = psutil.Process()
    return sum(me.cpu_times()[:4]) + sum(sum(child.cpu_times()[:2]) for child in me.children(recursive=True))


def case(action: str, peer: str, kind: str, folder: str) -> None:
    """Writes the shards, or reads them and prints the cost; runs in a process of its own."""
    from tests.remote.write_foreign import Stub

    sys.meta_path.append(Stub())
    if action == "write":
        write(peer, kind, folder)
        return
    found = loader(action, peer, kind, folder)
    for _ in range(2):
        begin, cpu, seen = time.perf_counter(), cpu_s(), 0
        for batch in found:
            seen += len(batch["label"])
        wall, used = time.perf_counter() - begin, cpu_s() - cpu
    assert seen == SAMPLES[kind], f"{seen} of {SAMPLES[kind]} samples"
    print(json.dumps({"rate": seen / wall, "cpu_us": used / seen * 1e6}), flush=True)
    os._exit(0)  # a peer's shutdown is not measured


def run(action: str, peer: str, kind: str, folder: Path) -> dict[str, float]:
    """Runs a case in a process of its own. Returns its cost, or an empty dict for writing."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.layouts", "case", action, peer, kind, str(folder)]
    path = os.pathsep.join([os.environ[FOLDER], os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{action} {peer} {kind}: {done.stderr[-2000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, float] = json.loads(lines[-1]) if lines else {}
    return found


def measure(settings: Settings) -> Result:
    """Measures all readers of all shards, in turn."""
    if not os.path.isdir(os.environ.get(FOLDER, "")):
        return Result([], {"left out": f"needs mosaicml-streaming and litdata in a folder that {FOLDER} names"})
    rows, measured = [], {}
    with tempfile.TemporaryDirectory() as place:
        for peer in PEERS:
            for kind in SAMPLES:
                folder = Path(place, f"{peer}-{kind}")
                run("write", peer, kind, folder)
                rounds = []
                for number in range(settings.rounds):
                    readers = in_order(("shmload", "peer"), number)
                    rounds.append({reader: run(reader, peer, kind, folder) for reader in readers})
                measured[f"{peer} {kind}"] = rounds
                rows += rows_of(peer, kind, rounds)
    return Result(rows, measured)


def rows_of(peer: str, kind: str, rounds: list[dict[str, dict[str, float]]]) -> list[Row]:
    """Returns the rows of the table for one peer and kind."""

    def middle(reader: str, what: str) -> float:
        return statistics.median(each[reader][what] for each in rounds)

    def ratio(what: str) -> float:
        return statistics.median(each["shmload"][what] / each["peer"][what] for each in rounds)

    cpu, rate = ratio("cpu_us"), ratio("rate")
    us = f"{middle('shmload', 'cpu_us'):.1f} us, {peer} {middle('peer', 'cpu_us'):.1f}"
    per_s = f"{middle('shmload', 'rate'):,.0f} samples/s, {peer} {middle('peer', 'rate'):,.0f}"
    return [
        Row(f"{peer}'s shards of {kind}: CPU a sample over its own reader's", cpu, "x", us, "<= 0.5x", cpu <= 0.5),
        Row(f"{peer}'s shards of {kind}: samples/s over its own reader's", rate, "x", per_s, ">= 1x", rate >= 1),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        case(*sys.argv[2:])
    else:
        main("layouts", __doc__ or "", measure)
