"""Tiny rows: 64 float32 and a label out of an array in memory, shuffled."""

from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shmload.tools.bench.workloads.workload import Field, Workload

LENGTH = 64
NUM_SAMPLES = 500_000
NUM_LABELS = 1000


class Rows:
    """An array of rows and their labels; reads a whole batch at once."""

    schema: dict[str, Field] = {"x": ("float32", (LENGTH,)), "label": ("int64", ())}  # noqa: RUF012  # never changed

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        draw = np.random.default_rng(2)
        self.x = draw.random((num_samples, LENGTH), np.float32)
        self.labels = draw.integers(0, NUM_LABELS, num_samples)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "label": self.labels[index]}

    def read_batch_into(self, indices: Sequence[int], out: MutableMapping[str, Any]) -> None:
        # numpy's default mode checks and buffers; "clip" writes straight into `out` in half the time
        np.take(self.x, indices, 0, out=out["x"], mode="clip")
        np.take(self.labels, indices, 0, out=out["label"], mode="clip")

    def stored(self, index: int) -> tuple[bytes, int]:
        """What a peer keeps of a sample."""
        return self.x[index].tobytes(), int(self.labels[index])

    @staticmethod
    def decoded(payload: bytes, number: int) -> dict[str, Any]:
        """The sample of what was stored."""
        return {"x": np.frombuffer(payload, np.float32), "label": np.int64(number)}


def prepare(folder: Path, small: bool) -> dict[str, Any]:
    return {"num_samples": 50_000 if small else NUM_SAMPLES}


ROWS = Workload(
    name="rows",
    title="rows of 64 float32 and a label from memory, shuffled",
    dataset=f"{__name__}:Rows",
    batch_size=1024,
    unit="rows",
    meaning="a row costs next to nothing to fetch, so this is what a loader adds to every sample",
    prepare=prepare,
    num_with_peers=96 * 1024,
)
