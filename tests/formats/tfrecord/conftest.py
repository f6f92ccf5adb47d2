"""Files of Examples for the tests of the loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmload.formats import TFRecordWriter

NUM_SAMPLES = 22


def sample(number: int) -> dict[str, Any]:
    """Returns sample `number` of the files of `shards`."""
    return {
        "image": np.full((2, 3), number, np.uint8),
        "label": np.int64(-number),
        "tokens": np.arange(number % 4) + number,
        "text": f"é {number}",
    }


SCHEMA = {"image": ("uint8", (2, 3)), "label": "int64", "tokens": ("int64", (None,)), "text": str}


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Writes three files of different lengths, the second one compressed. Returns their pattern."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard, numbers in enumerate((range(10), range(10, 15), range(15, NUM_SAMPLES))):
        compression = "gzip" if shard == 1 else None
        with TFRecordWriter(folder / f"{shard:05d}.tfrecord", raw=["image"], compression=compression) as writer:
            for number in numbers:
                writer.write(sample(number))
    return str(folder / "*.tfrecord")
