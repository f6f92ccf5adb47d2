"""Kills a reader while it downloads and restarts it over the same cache folder, many times.

    python -m tests.remote.killed --kills 50 [--seed N]

A process reads an epoch of packed shards from a real store through a cache with room for some of them, and is killed with
SIGKILL: at a named point of the storage code, which its prefetcher or its reader reaches, or after a random number of samples.
After each kill, the folder is examined without the cache's own code: every file is a whole shard, and the sum of their sizes is
within the budget. After every few kills, one reader runs undisturbed: it delivers exactly the epoch, and no partial file remains.
The last line of the output is the result as JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shmload import faults
from shmload.remote import RemoteDataset
from shmload.remote.listing import shards_in
from shmload.storage.cache import Cache
from shmload.storage.ledger import NEW
from shmload.storage.store import Store
from tests.faults.points import STORAGE_POINTS
from tests.remote.remote_kit import labels, upload, write_packed
from tests.storage.store_kit import Server, s3_server

COUNTS = (9, 14, 5, 12, 11, 8)
NUM_SAMPLES = sum(COUNTS)
RUNS_OF_KILLS = 4  # kills before each undisturbed run
DEADLINE_S = 60


def read(store: Store, cache: Path, capacity: int, epoch: int, out: int) -> None:
    """Reads an epoch and writes each label as soon as its sample arrives. Runs in the reader's process."""
    dataset = RemoteDataset(None, shards_in(store), cache_folder=cache, cache_bytes=capacity, window=1, seed=5)
    dataset.set_epoch(epoch)
    for sample in dataset:
        os.write(out, int(sample["cls"]).to_bytes(2, "little"))


def new_folder(server: Server) -> Store:
    """Returns a new, empty folder of an S3 server."""
    return server.store(server.bucket("reading"), os.urandom(6).hex())


class Readers:
    """Runs readers over one cache folder.


    Args:
        store: the store of the shards.
        folder: the folder for files and the cache.
        seed: the seed of the moments at which readers are killed.
    """

    def __init__(self, store: Store, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        files = folder / "files"
        files.mkdir()
        write_packed(files, COUNTS, nbytes=4000)
        self.shards = {hashlib.sha256(path.read_bytes()).digest() for path in files.rglob("*.tar")}
        self.capacity = 3 * max(path.stat().st_size for path in files.rglob("*.tar"))
        self.store = store
        upload(store, files)
        self.cache, self.charges = folder / "cache", folder / "charges"
        self.charges.mkdir()
        self.expected = [self.epoch(epoch) for epoch in range(2)]
        self.kills: dict[str, int] = {}

    def epoch(self, number: int) -> list[int]:
        """Returns the labels of an undisturbed epoch."""
        dataset = RemoteDataset(None, shards_in(self.store), window=1, seed=5)
        dataset.set_epoch(number)
        return labels(dataset)

    def run(self, epoch: int, point: str, after: int) -> tuple[list[int], bool]:
        """Runs a reader, killed at `point` or after `after` samples; returns the labels it read and whether it ended by itself."""
        for left in self.charges.iterdir():
            left.unlink()
        if point:
            (self.charges / f"{point}.1").write_text("")
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(DEADLINE_S)
            status = 1
            try:
                os.close(reading)
                faults._folder, faults.armed = str(self.charges), True
                read(self.store, self.cache, self.capacity, epoch, writing)
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        data = b""
        while part := os.read(reading, 2):
            data += part
            if len(data) == 2 * after:
                os.kill(pid, signal.SIGKILL)
        os.close(reading)
        status = os.waitpid(pid, 0)[1]
        assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, f"the reader ended with {status}"
        if status:
            name = point or "a sample"
            self.kills[name] = self.kills.get(name, 0) + 1
        return [int.from_bytes(data[at : at + 2], "little") for at in range(0, len(data), 2)], status == 0

    def check_cache_files(self) -> None:
        """Checks the files of the cache after a kill."""
        published = [path for path in (self.cache / "shards").glob("*") if path.is_file() and path.name[0] != "."]
        assert all(hashlib.sha256(path.read_bytes()).digest() in self.shards for path in published), (
            "a published file is not a whole shard"
        )
        assert sum(path.stat().st_size for path in published) <= self.capacity

    def unpublished_after_opening(self) -> list[Path]:
        """Opens the cache, which removes the files of dead processes; returns the unpublished files that remain."""
        Cache(self.cache / "shards", self.capacity).close()
        return self.unpublished()

    def unpublished(self) -> list[Path]:
        """Returns the files of shards that are not published."""
        return list((self.cache / "shards" / NEW).iterdir())

    def run_round(self) -> None:
        """Runs some readers that are killed, and one to the end."""
        epoch = self.rng.randrange(2)
        for _ in range(RUNS_OF_KILLS):
            point = self.rng.choice((*STORAGE_POINTS, "", ""))
            found, ended = self.run(epoch, point, 0 if point else self.rng.randrange(1, NUM_SAMPLES))
            assert found == self.expected[epoch][: len(found)]
            assert not ended or found == self.expected[epoch]
            self.check_cache_files()
        found, ended = self.run(epoch, "", 0)
        assert ended
        assert found == self.expected[epoch]
        self.check_cache_files()
        left = self.unpublished_after_opening()
        assert left == [], f"partial files remain: {left}"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        readers = Readers(new_folder(s3_server()), Path(folder), given.seed)
        while sum(readers.kills.values()) < given.kills:
            readers.run_round()
        print(json.dumps({"seed": given.seed, "kills": readers.kills, "shards": len(COUNTS)}))


if __name__ == "__main__":
    main(sys.argv[1:])
