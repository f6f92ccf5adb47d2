"""A plain Python dataset that knows nothing of any loader: what a user's own looks like."""

from pathlib import Path
from typing import Any

import numpy as np

from shmload.tools.bench.workloads.workload import Workload

SHAPE = (3, 224, 224)
NUM_IMAGES = 256
NUM_SAMPLES = 8192


class Plain:
    """(uint8 image, int label) out of memory; sample `index` shows image `index % num_images`."""

    def __init__(self, num_images: int = NUM_IMAGES, num_samples: int = NUM_SAMPLES) -> None:
        self.images = np.random.default_rng(4).integers(0, 256, (num_images, *SHAPE), np.uint8)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index % len(self.images)], index

    def stored(self, index: int) -> tuple[bytes, int]:
        """What a peer keeps of a sample."""
        return self.images[index % len(self.images)].tobytes(), index

    @staticmethod
    def decoded(payload: bytes, number: int) -> tuple[Any, int]:
        """The sample of what was stored."""
        return np.frombuffer(payload, np.uint8).reshape(SHAPE), number


def prepare(folder: Path, small: bool) -> dict[str, Any]:
    return {"num_images": 32, "num_samples": 1024} if small else {}


PLAIN = Workload(
    name="python",
    title="a plain Python dataset of (uint8 3x224x224, int)",
    dataset=f"{__name__}:Plain",
    batch_size=64,
    unit="samples",
    meaning="the dataset is cheap and plain, so this is what changing one line brings",
    prepare=prepare,
    num_with_peers=2048,
)
