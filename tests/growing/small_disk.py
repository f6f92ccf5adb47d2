"""Trains from a growing cache on a disk that another program fills: `python -m tests.growing.small_disk FOLDER`, on a tmpfs of 6
MB.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from itertools import pairwise

from shmload.growing import SampleCache
from tests.growing.growing_kit import dataset_of, epoch_of, loader_of, put

NUM_FILES, NUM_SAMPLES = 8, 200


def fill(path: str) -> None:
    """Writes until the disk is completely full."""
    with open(path, "ab", buffering=0) as file:
        for nbytes in (1 << 16, 1):
            with suppress(OSError):
                while file.write(bytes(nbytes)):
                    pass


def main(folder: str) -> None:
    with SampleCache(f"{folder}/cache", 100_000_000, file_nbytes=20_000) as cache:
        for number in range(NUM_FILES):
            put(cache, range(number * NUM_SAMPLES, (number + 1) * NUM_SAMPLES))
        loader = loader_of(dataset_of(cache))
        lengths = []
        for _ in range(4):
            lengths.append(len(epoch_of(loader)))
            fill(f"{folder}/other")
        assert lengths[0] == NUM_FILES * NUM_SAMPLES, lengths
        assert all(earlier - later in (0, NUM_SAMPLES) for earlier, later in pairwise(lengths)), lengths
    fill(f"{folder}/other")
    os.execv(sys.executable, [sys.executable, "-m", "tests.growing.small_disk", folder, "again"])


def run_again(folder: str) -> None:
    with SampleCache(f"{folder}/cache", 100_000_000, file_nbytes=20_000) as cache:  # a later run, on the full disk
        loader = loader_of(dataset_of(cache))
        assert len(epoch_of(loader)) >= (NUM_FILES - 4) * NUM_SAMPLES
    print("right")


if __name__ == "__main__":
    (run_again if len(sys.argv) > 2 else main)(sys.argv[1])
