"""What peers with files of their own share: a sample as one run of bytes, and back; the workers of a DataLoader over them."""

from collections.abc import Callable
from typing import Any

from shmload.tools.bench.contestants import LoaderOptions

NUMBER_NBYTES = 8


def packed(dataset: Any, index: int) -> bytes:
    """The stored form of a sample: its payload, then its number as a little-endian int64."""
    payload: bytes
    payload, number = dataset.stored(index)
    return payload + int(number).to_bytes(NUMBER_NBYTES, "little", signed=True)


def unpacked(data: bytes, decoded: Callable[[bytes, int], Any]) -> Any:
    """The sample of what `packed` made."""
    number = int.from_bytes(data[-NUMBER_NBYTES:], "little", signed=True)
    return decoded(data[:-NUMBER_NBYTES], number)


def worker_settings(options: LoaderOptions) -> dict[str, Any]:
    """What torch's DataLoader, or one derived from it, is told of its workers."""
    workers = options.num_workers
    return {
        "num_workers": workers,
        "persistent_workers": workers > 0,
        "prefetch_factor": options.prefetch_factor if workers else None,
        "multiprocessing_context": options.start_method if workers else None,
    }
