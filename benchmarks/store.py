"""Measure the rate of reading shards from an object store, compared with client libraries.

Method: An object of 100 MB of seeded random bytes on a Ceph gateway on this machine is read repeatedly; every case runs in a
fresh process, in turn. CPU is the reader's own, user and system. The gateway's is not included, although it uses the same
processors.

How to read: The aim is 0.95 of the rate of the fastest other client; obstore was the fastest library found. obstore returns a
buffer of its own (`get`), or pieces that are copied to their destination (`stream`), whereas shmload reads directly into the
destination. A library that is not installed is left out.

Predicted: 1.0 times obstore's rate at 0.6 of its CPU, because the bytes are written once.

Result (2 cores, with a load of 8 to 15 on them): 0.97 times obstore's rate (345 and 360 MB/s; boto3 329, urllib3 363) at 0.75
of its CPU (0.40 and 0.53 s/GiB; boto3 0.66, urllib3 0.42). With one range, shmload takes 0.33 s/GiB, half of boto3's. One range
is as fast as four if the server is near: parallel ranges are for distant servers. urllib3 is as fast, but its readinto returns
nothing before the whole piece has arrived: bytes received before an interruption would be read again, and a very slow response
would not be detected.
"""

import multiprocessing
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from benchmarks.common import Result, Row, Settings, in_order, main, repeated
from shmload.tools.bench.spread import Spread

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "storage"))

import store_kit  # after its folder is in sys.path

BUCKET, KEY, NBYTES = "benchmark", "shard", 100_000_000
MIB = 1 << 20


def shmload_reader(server: store_kit.Server, out: Any, parallel: int = 4) -> Callable[[], object]:
    """Reads directly into the caller's memory with read_into."""
    store = server.store(BUCKET, parallel=parallel)
    return lambda: store.read_into(KEY, out)


def one_range(server: store_kit.Server, out: Any) -> Callable[[], object]:
    """Reads with read_into over one connection."""
    return shmload_reader(server, out, parallel=1)


def _obstore(server: store_kit.Server) -> Any:
    from obstore.store import S3Store

    return S3Store(
        BUCKET,
        endpoint=server.endpoint,
        access_key_id=server.access_key,
        secret_access_key=server.secret_key,
        region=server.region,
        client_options={"allow_http": True, "timeout": "60s"},
    )


def obstore_get(server: store_kit.Server, out: Any) -> Callable[[], object]:
    """Reads into obstore's own buffer, without a copy."""
    import obstore

    store = _obstore(server)
    return lambda: obstore.get(store, KEY).bytes()


def obstore_stream(server: store_kit.Server, out: Any) -> Callable[[], object]:
    """Copies obstore's pieces of 256 KiB to their destination."""
    import obstore

    store = _obstore(server)

    def read() -> None:
        at, view = 0, memoryview(out)
        for piece in obstore.get(store, KEY).stream(min_chunk_size=MIB // 4):
            view[at : at + len(piece)] = piece
            at += len(piece)

    return read


def boto3_read(server: store_kit.Server, out: Any) -> Callable[[], object]:
    """Reads with boto3's get_object."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name=server.region,
    )
    return lambda: client.get_object(Bucket=BUCKET, Key=KEY)["Body"].read()


def urllib3_read(server: store_kit.Server, out: Any) -> Callable[[], object]:
    """Reads with urllib3 into the caller's memory, 1 MiB at a time, with shmload's signatures."""
    import urllib3
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest

    pool = urllib3.PoolManager()
    client = server.client()

    def read() -> None:
        request = AWSRequest("GET", f"{server.endpoint}/{BUCKET}/{KEY}", {})
        S3SigV4Auth(client.credentials.frozen(), "s3", server.region).add_auth(request)
        headers = dict(request.headers.items())
        answer: Any = pool.request("GET", request.url, headers=headers, preload_content=False)
        at, view = 0, memoryview(out)
        while at < NBYTES:
            at += answer.readinto(view[at : at + MIB])
        answer.release_conn()

    return read


CASES = {
    "shmload": shmload_reader,
    "shmload, one range": one_range,
    "obstore get": obstore_get,
    "obstore stream": obstore_stream,
    "boto3": boto3_read,
    "urllib3 readinto": urllib3_read,
}


NEEDS = {"obstore get": "obstore", "obstore stream": "obstore", "boto3": "boto3", "urllib3 readinto": "urllib3"}  # case -> package


def run_case(name: str, server: store_kit.Server, seconds: float, answer: Any) -> None:
    """Measures a case in its own process, and sends MB/s and CPU s/GiB."""
    out = np.zeros(NBYTES, np.uint8)
    read = CASES[name](server, out)
    read()
    cpu = process_time()
    num, took = repeated(read, seconds)
    used = process_time() - cpu
    answer.send((num * NBYTES / took / 1e6, used / (num * NBYTES) * 2**30))


def in_a_process(name: str, server: store_kit.Server, seconds: float) -> tuple[float, float]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    child = context.Process(target=run_case, args=(name, server, seconds, theirs))
    child.start()
    theirs.close()
    found: tuple[float, float] = mine.recv()
    child.join()
    return found


def measure(settings: Settings) -> Result:
    """Measures every reader with the same object."""
    try:
        server = store_kit.s3_server()
    except LookupError as error:
        return Result([], {"left out": str(error)})
    server.bucket(BUCKET)
    server.store(BUCKET).put(KEY, np.random.default_rng(0).bytes(NBYTES))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES if find_spec(NEEDS.get(name, "shmload"))}
    for number in range(settings.rounds):
        for name in in_order(found, number):
            found[name].append(in_a_process(name, server, settings.seconds))
    rate = {name: Spread.of([each[0] for each in rounds]) for name, rounds in found.items()}
    cpu = {name: Spread.of([each[1] for each in rounds]) for name, rounds in found.items()}

    def over(name: str, other: str, which: int) -> float:
        pairs = zip(found[name], found[other], strict=True)
        return Spread.of([mine[which] / theirs[which] for mine, theirs in pairs]).median

    fastest = max((name for name in found if name in NEEDS), key=lambda name: rate[name].median)
    faster, cheaper = over("shmload", fastest, 0), over("shmload", fastest, 1)
    rows = [
        Row(
            "100 MB from an S3 gateway: MB/s over the fastest other client's",
            faster,
            "x",
            f"{server.name}, {fastest}; " + ", ".join(f"{name} {spread.median:.0f}" for name, spread in rate.items()),
            ">= 0.95x",
            faster >= 0.95,
        ),
        Row(
            "the same: CPU s/GiB over it",
            cheaper,
            "x",
            ", ".join(f"{name} {spread.median:.2f}" for name, spread in cpu.items()),
            "<= 1x",
            cheaper <= 1,
        ),
    ]
    return Result(rows, {"cases": found})


if __name__ == "__main__":
    main("store", __doc__, measure)
