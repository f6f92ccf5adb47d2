"""Measure the rate and the CPU cost of reading photos of 100 KB from an object store.

Method: 10,000 photos of 88 KB, a thousand of them distinct, cut from those that ship with shmload, are packed into 45 tar
shards of 20 MB in a real S3-compatible store on this machine. Every case reads all of them once in a process of its own, with 2
forked workers and batches of 64. It delivers the bytes of the photos and decodes nothing. Whole passes are timed, including the
start of the workers, without imports. If a virtual machine has given memory back to its host, touching it again costs 3 s of
CPU per GiB, which is 260 us per photo. Therefore each case first touches its own memory and, with a temporary file, that of the
page cache, which is separate.

    raw       the client library alone (obstore): every shard in parallel ranges of 8 MB into memory; the content is ignored
    cold      ShmLoader over `RemoteDataset.indexed()`, block shuffle, an empty cache folder
    warm      the same folder once more
    none      a private folder with room for fifteen shards, which are three windows
    fluent    RemoteDataset.to_tuple().batched() in ShmLoader, cold
    webdataset          1.0.2 over the same shards by presigned URLs and curl, torch's DataLoader
    litdata, mosaicml   their own formats in the same store (remote_peers.py), the same three ways; once, because they take long

How to read: Server and reader share the two cores, so the server gets the CPU that a reader saves; CPU per photo including the
server's shows what the store could deliver. The trainer's CPU counts from the ninth batch on, when the ring has its final size.
The store is the one that the environment names (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), or else a gateway
that is started for the benchmark. SHMLOAD_PEERS_PYTHON names a Python that has obstore, webdataset, litdata and
mosaicml-streaming; the libraries that it lacks are skipped. Rows that name no other library are for comparing a tree with an
earlier one where these are missing.

Result (2 cores, quiet, two rounds of everything; raw and cold four rounds more):
| | raw | cold | warm | none | fluent | webdataset | litdata cold, warm, none | mosaicml cold, warm |
|---|---|---|---|---|---|---|---|---|
| MB/s | 531-630 | 459-671 | 1764-3335 | 572-599 | 506-590 | 249-260 | 220, 509, 304 | 148-162, 172-252 |
| CPU us per photo | 67-77 | 98-141 | 40-62 | 104-118 | 123-142 | 415-426 | 465, 211, 347 | 642-679, 423-650 |
| with the server's | 198-245 | 233-315 | 52-73 | 274-280 | 282-302 | 540-573 | 644, 231, 454 | 748-850, 430-686 |
Cold over raw by wall time: 0.74, 0.90, 0.93, 1.03, 1.15, 1.20; by CPU with the server's 0.66 to 0.98, median 0.75. Cold over
webdataset 1.85 and 2.58, where raw is 2.25 and 2.45. remote_http.py reads the same data from a server that costs almost
nothing, 3.3 times as fast as webdataset. The trainer takes 0.021-0.027 s per GiB cold, 0.010-0.012 warm, and 0.008-0.010 in
batches of 256. mosaicml with room for 300 MB was stopped after 60 s, and in the second round failed with "Relative sample index
26 is not present". `fluent` copies three times where `indexed()` copies once: to bytes, to the slot, and to bytes again. With
room for 303 MB, the folder took 300 MB, a worker 38-49 MB of private memory, and the trainer 4-9 MB more than before.

These changes helped: not waiting for the disk before a copy is named (predicted 0.5 s of a pass; before, cold was 0.77 of raw
by wall time); copying from socket to file without the GIL (predicted -10 us; found -6, and 1.24 times the rate beside a thread
that runs Python); fewer Python calls for a batch that is waited for (trainer, cold: 0.068 and 0.043 before). These were tried,
with other results than predicted: splice from socket to file (predicted -15 us; no gain, and the server pays more); two shards
at once in each worker.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import mmap
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.common import Result, Row, Settings, main

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "storage"))

import store_kit  # after its folder is in sys.path

BUCKET, FOLDER = "shmload-benchmark", "photos"
NUM_PHOTOS, NUM_TILES = 10_000, 1000
SHARD_NBYTES = 20_000_000
BATCH = 64
DEADLINE_S = 60  # for a case
NUM_SETTLING = 8  # batches after which the ring's slots have their final size
CACHE_BYTES = 15 * (SHARD_NBYTES + 200_000)
INTERPRETER = "SHMLOAD_PEERS_PYTHON"  # names a Python that has obstore, litdata, mosaicml-streaming, webdataset
TOUCHED_NBYTES = 3 << 29


def photos() -> Iterator[bytes]:
    """Yields distinct JPEG files of about 100 KB."""
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
    """Packs the photos into the store's bucket."""
    from shmload.remote import make_client

    pack_into(make_client().store(BUCKET, FOLDER))


def pack_into(store: Any) -> None:
    """Packs the photos, unless they are there already."""
    from shmload._core.crc32c import crc32c
    from shmload.formats import TarWriter
    from shmload.formats.tar.shard_index import ShardIndex, pack_index
    from shmload.remote.manifest import MANIFEST_NAME, IndexEntry, Manifest, ShardEntry

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


_settled: list[tuple[float, int]] = []  # the trainer's CPU and the bytes so far: once workers and ring are ready, and at the end


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


def dataset(url: str | None = None, **options: Any) -> Any:
    from shmload.remote import RemoteDataset, make_client

    return RemoteDataset(None, url, "", **options) if url else RemoteDataset(make_client(), BUCKET, FOLDER, **options)


def read_view(batch_size: int = BATCH, **options: Any) -> int:
    from shmload import ShmLoader

    view = dataset(window=5, **options).indexed(schema={"jpg": ("uint8", (None,)), "cls": "int64"})
    total, seen = 0, 0
    with ShmLoader(view, batch_size=batch_size, sampler=view.block_shuffle(), seed=0, num_workers=2, ragged="jagged") as loader:
        for number, batch in enumerate(loader):
            total += batch["jpg"].values.nbytes
            seen += len(batch["cls"])
            del batch
            if number == NUM_SETTLING:
                _settled.append((time.process_time(), total))
        _settled.append((time.process_time(), total))
    assert seen == NUM_PHOTOS
    return total


def read_fluent(**options: Any) -> int:
    from shmload import ShmLoader

    data = dataset(window=5, **options).decode(only="cls").to_tuple("jpg", "cls").batched(BATCH)
    return counted(ShmLoader(data, batch_size=None, num_workers=2))


def presigned() -> list[str]:
    client = s3()
    return [client.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": f"{FOLDER}/{key}"}) for key, _ in shards()]


def read_webdataset(urls: list[str]) -> int:
    import torch
    import webdataset

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


def read_peer(case: str, folder: str) -> int:
    from benchmarks import remote_peers

    peer, _, way = case.partition(" ")
    limit = CACHE_BYTES if way == "none" else None
    total, seen = remote_peers.read(peer, BUCKET, f"{folder}-{peer}{'-none' * (way == 'none')}", limit)
    assert seen == NUM_PHOTOS
    return total


OWN: dict[str, Callable[[str], int]] = {
    "cold": lambda folder: read_view(cache_folder=folder),
    "warm": lambda folder: read_view(cache_folder=folder),
    "warm, batches of 256": lambda folder: read_view(256, cache_folder=folder),
    "none": lambda folder: read_view(cache_bytes=CACHE_BYTES),
    "fluent": lambda folder: read_fluent(cache_folder=f"{folder}-fluent"),
}
OTHERS: dict[str, Callable[[str], int]] = {
    "raw": lambda folder: read_raw(),
    "webdataset": lambda folder: read_webdataset(presigned()),
}
PEERS = tuple(f"{peer} {way}" for peer in ("litdata", "mosaicml") for way in ("cold", "warm", "none"))


MOST_US = {"cold": 150, "warm": 70, "none": 120, "fluent": 150}  # aims


def touch_memory(place: str) -> None:
    """Makes the host provide the memory that the case will use: its own, and that of the page cache."""
    with mmap.mmap(-1, TOUCHED_NBYTES) as memory:
        memory.madvise(23)  # MADV_POPULATE_WRITE
    piece = bytes(1 << 20)
    with tempfile.TemporaryFile(dir=place) as file:
        for _ in range(TOUCHED_NBYTES >> 20):
            file.write(piece)


def run(case: str, folder: str, read: Callable[[str, str], dict[str, int]]) -> None:
    """Runs one case in this process. `read` maps (case, folder) to the bytes that were read and further figures."""
    for module in ("obstore", "boto3", "webdataset", "shmload.loader", "shmload.remote.remote_dataset"):
        with contextlib.suppress(ImportError):  # only the other interpreter may have it
            importlib.import_module(module)
    touch_memory(os.path.dirname(folder))
    begin, mine = time.perf_counter(), time.process_time()
    said = read(case, folder)
    seconds, trainer = time.perf_counter() - begin, time.process_time() - mine
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {**said, "s": seconds, "cpu_s": trainer + used.ru_utime + used.ru_stime}
    if _settled:
        (cpu, before), (cpu_then, then) = _settled
        found["trainer_s_per_gib"] = (cpu_then - cpu) / ((then - before) / 2**30)
    print(json.dumps(found))


def read_photos(case: str, folder: str) -> dict[str, int]:
    return {"nbytes": read_peer(case, folder) if case in PEERS else (OWN | OTHERS)[case](folder)}


def watch_memory(folder: str) -> None:
    """Reads with a small cache, and prints the maximal memory of processes and folder, in MB."""
    import psutil

    from shmload.storage.cache import Cache

    peaks, is_over = {"trainer": 0, "workers": 0, "cache": 0}, threading.Event()
    trainer = psutil.Process()

    def private(process: Any) -> int:
        with contextlib.suppress(OSError, psutil.Error):
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))
        return 0

    def look() -> None:
        before, cache = private(trainer), Cache(folder, CACHE_BYTES)
        while not is_over.wait(0.05):
            peaks["trainer"] = max(peaks["trainer"], private(trainer) - before)
            peaks["workers"] = max(peaks["workers"], *map(private, trainer.children()), 0)
            peaks["cache"] = max(peaks["cache"], cache.statistics().folder.nbytes)

    importlib.import_module("shmload.loader")
    os.makedirs(folder)
    watcher = threading.Thread(target=look)
    watcher.start()
    nbytes = read_view(cache_folder=os.path.dirname(folder), cache_bytes=CACHE_BYTES)
    is_over.set()
    watcher.join()
    found = {name: peak / 1e6 for name, peak in peaks.items()}
    print(json.dumps({"nbytes": nbytes, "budget": CACHE_BYTES / 1e6, **found}))


def peers_python() -> str:
    """Returns the interpreter that has the other libraries."""
    return os.environ.get(INTERPRETER, sys.executable)


def in_a_process(case: str, folder: str, interpreter: str, module: str = "benchmarks.remote") -> dict[str, float]:
    """Runs a case with the interpreter that has its libraries. Includes the CPU of the server if that runs on this machine."""
    before = server_cpu_s()
    command = [interpreter, "-W", "ignore", "-m", module, "case", case, folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            out, said = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its workers, which would continue to write
            raise LookupError(f"{case}: not done after {DEADLINE_S} s") from None
    if process.returncode:
        raise LookupError(f"{case}: {(said.strip() or 'no word').splitlines()[-1][:200]}")
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    found["server_s"] = server_cpu_s() - before
    shown = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
    print(f"{case}: {shown}, load {os.getloadavg()[0]:.0f}", file=sys.stderr)
    return found


def server_cpu_s() -> float:
    """Returns the CPU of the gateway's processes that run on this machine."""
    import psutil

    port = urlsplit(os.environ["AWS_ENDPOINT_URL"]).port
    listening = [each.pid for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.laddr.port == port]
    if not listening or listening[0] is None:
        return 0.0
    folder = psutil.Process(listening[0]).environ().get("CEPH_CONF", "none")
    total = 0.0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == listening[0] or process.environ().get("CEPH_CONF") == folder:
                total += sum(process.cpu_times()[:2])
    return total


def no_store() -> str | None:
    """Starts a store unless the environment names one, and creates the bucket. Returns why this is impossible, or None."""
    if "AWS_ENDPOINT_URL" not in os.environ:
        try:
            server = store_kit.s3_server()
        except LookupError as error:
            return str(error)
        os.environ.update(
            AWS_ENDPOINT_URL=server.endpoint, AWS_ACCESS_KEY_ID=server.access_key, AWS_SECRET_ACCESS_KEY=server.secret_key
        )
    s3().create_bucket(Bucket=BUCKET)
    return None


def measure(settings: Settings) -> Result:
    """Reads the shards in every way, in turn."""
    if (left_out := no_store()) is not None:
        return Result([], {"left out": left_out})
    upload()
    found: dict[str, list[dict[str, float]]] = {}
    left_out: dict[str, str] = {}
    for number in range(settings.rounds):
        with tempfile.TemporaryDirectory() as place:
            for case in (*OTHERS, *OWN, *(PEERS if number == 0 else ())):
                if case.split()[0] in left_out:
                    continue
                try:
                    if case in PEERS and case.endswith("cold"):
                        pack_for(case.split()[0])
                    theirs = case in PEERS or case in OTHERS
                    one = in_a_process(case, f"{place}/cache", peers_python() if theirs else sys.executable)
                    found.setdefault(case, []).append(one)
                except LookupError as error:
                    if case in OWN:
                        raise
                    left_out[case.split()[0]] = str(error)
                    print(f"left out: {error}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as place:
        memory = in_a_process("memory", f"{place}/private/shards", sys.executable)
    return Result(rows_of(found, memory), {"cases": found, "memory": memory, "left out": left_out, "load": os.getloadavg()})


def pack_for(peer: str) -> None:
    """Makes a peer write the photos to the store in its own format."""
    command = [peers_python(), "-W", "ignore", "-m", "benchmarks.remote_peers", peer]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise LookupError(f"{peer}: {done.stderr.strip().splitlines()[-1][:200]}")


def rows_of(found: dict[str, list[dict[str, float]]], memory: dict[str, float]) -> list[Row]:
    """Returns the ratios of the medians, and the figures for comparison."""

    def median(case: str, of: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(map(of, found[case]))

    rate = {case: median(case, lambda one: one["nbytes"] / one["s"] / 1e6) for case in found}
    cpu = {case: median(case, lambda one: one["cpu_s"] / NUM_PHOTOS * 1e6) for case in found}
    whole = {case: median(case, lambda one: (one["cpu_s"] + one["server_s"]) / NUM_PHOTOS * 1e6) for case in found}
    beside = ", ".join(f"{case} {rate[case]:.0f} MB/s {cpu[case]:.0f} us ({whole[case]:.0f} with the server)" for case in found)
    rows = []

    def compare(case: str, other: str, aim: float) -> None:
        if other in found:
            got = rate[case] / rate[other]
            rows.append(Row(f"{case} over {other}, by the wall", got, "x", "", f">= {aim}x", got >= aim))
            got = whole[other] / whole[case]
            rows.append(Row(f"{case} over {other}, by CPU, the server's included", got, "x", "", f">= {aim}x", got >= aim))

    for case in ("cold", "none"):
        compare(case, "raw", 0.8)
    for case in ("cold", "none", "fluent"):
        compare(case, "webdataset", 3)
    for way in ("cold", "warm", "none"):
        for peer in ("litdata", "mosaicml"):
            compare(way, f"{peer} {way}", 1)
    for case, most in MOST_US.items():
        rows.append(Row(f"{case}: CPU a photo", cpu[case], "us", f"{rate[case]:.0f} MB/s", f"<= {most}", cpu[case] <= most))
    for case in ("cold", "warm", "warm, batches of 256"):
        got = median(case, lambda one: one["trainer_s_per_gib"])
        rows.append(Row(f"trainer's CPU, {case}", got, "s/GiB", "", "<= 0.02", got <= 0.02))
    over = ", ".join(f"{name} {peak:.0f} MB" for name, peak in memory.items() if name in ("trainer", "workers", "budget"))
    cache = memory["cache"]
    rows.append(Row("disk of the cache at most", cache, "MB", over, "<= budget", cache <= memory["budget"]))
    rows[0] = replace(rows[0], beside=beside)
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        watch_memory(sys.argv[3]) if sys.argv[2] == "memory" else run(*sys.argv[2:4], read_photos)
    else:
        main("remote", __doc__, measure)
