"""Raw float32 records of 1 MiB, from a file in the page cache: as scientific data often lies."""

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import numpy as np

from shmload.tools.bench.workloads.workload import Field, Workload

LENGTH = 1 << 18  # float32 values of a record: 1 MiB
NUM_RECORDS = 256
NUM_SAMPLES = 4096


class Records:
    """Records of a file, mapped into memory; sample `index` is record `index % num_records`."""

    schema: dict[str, Field] = {"x": ("float32", (LENGTH,))}  # noqa: RUF012  # never changed

    def __init__(self, path: str, num_samples: int = NUM_SAMPLES) -> None:
        self.path, self.num_samples = path, num_samples
        # Copy on write: rows are writable arrays, as torch's collate wants them, and nobody writes.
        self.records = np.asarray(np.memmap(path, np.float32, mode="c")).reshape(-1, LENGTH)

    def __reduce__(self) -> tuple[type["Records"], tuple[str, int]]:
        return Records, (self.path, self.num_samples)  # a pickled map would carry the file's contents

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.records[index % len(self.records)]}

    def read_into(self, index: int, out: MutableMapping[str, Any]) -> None:
        np.copyto(out["x"], self.records[index % len(self.records)])

    def stored(self, index: int) -> tuple[bytes, int]:
        """What a peer keeps of a sample."""
        return self.records[index % len(self.records)].tobytes(), index

    @staticmethod
    def decoded(payload: bytes, number: int) -> dict[str, Any]:
        """The sample of what was stored."""
        return {"x": np.frombuffer(payload, np.float32)}


def on_disk(arguments: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Each record once."""
    path = arguments["path"]
    return {"path": path, "num_samples": Path(path).stat().st_size // (4 * LENGTH)}, [path]


def prepare(folder: Path, small: bool) -> dict[str, Any]:
    path = folder / "records.bin"
    draw = np.random.default_rng(1)
    with path.open("wb") as file:
        for _ in range(16 if small else NUM_RECORDS):
            file.write(draw.random(LENGTH, np.float32).data)
    return {"path": str(path), "num_samples": 256 if small else NUM_SAMPLES}


RECORDS = Workload(
    name="records",
    title="raw float32 records of 1 MiB from a file in the page cache",
    dataset=f"{__name__}:Records",
    batch_size=16,
    unit="records",
    meaning="there is nothing to decode, so this is how fast bytes get from a file to the trainer",
    prepare=prepare,
    num_with_peers=512,
    on_disk=on_disk,
)
