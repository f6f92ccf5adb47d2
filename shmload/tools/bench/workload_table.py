"""The built-in workloads in words and numbers, without their datasets, so that `shmload bench --help` is quick.

The help, the output and docs/bench.md take their descriptions from here.
"""

from typing import NamedTuple

from shmload.tools.byte_size import size_text

BATCH_SIZE = 64  # of a user's dataset, by default


class WorkloadFacts(NamedTuple):
    """What a sample is and how it is decoded; the bytes of a sample in a batch; samples of a batch."""

    title: str
    sample_nbytes: int
    batch_size: int

    def line(self) -> str:
        return described(*self)


def described(title: str, sample_nbytes: float, batch_size: int) -> str:
    """Return a description of a workload in one line."""
    return f"{title}; {size_text(round(sample_nbytes))} a sample, batches of {batch_size:,}"


FACTS = {
    "photos": WorkloadFacts("JPEG of 500x375, decoded by simplejpeg, cropped to 224x224 by OpenCV", 3 * 224 * 224 + 8, 64),
    "records": WorkloadFacts("float32 records of a mapped file, copied", 1 << 20, 16),
    "rows": WorkloadFacts("64 float32 and a label from memory, copied by numpy.take", 4 * 64 + 8, 1024),
    "tokens": WorkloadFacts("windows of 1,025 tokens of a mapped file, uint16 cast to int64", 8 * 1025, 32),
    "python": WorkloadFacts("uint8 images and labels from memory, by a plain __getitem__", 3 * 224 * 224 + 8, 64),
}
