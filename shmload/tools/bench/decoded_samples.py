"""Read single samples of a dataset that only decodes into batches, as torch's DataLoader needs them."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import get_worker_info

from shmload.batch.row_placer import OneSample
from shmload.worker.decoding_protocol import declares_decoding, has_getitem
from shmload.worker.sample_rng import begin_sample, end_samples


def samples_of(dataset: Any) -> Any:
    """Return the dataset itself if it has samples, else one whose `__getitem__` decodes a sample into new arrays."""
    return DecodedSamples(dataset) if declares_decoding(dataset) and not has_getitem(dataset) else dataset


class DecodedSamples:
    """The samples of a dataset that has only `read_into` or `read_batch_into`, as dicts of arrays.

    `sample_rng()` draws the numbers that it draws in a ShmLoader in torch mode with workers.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        dataset, worker = self.dataset, get_worker_info()
        out = OneSample(dataset.schema)
        begin_sample(None, 0, index, worker.id if worker else 0, reseed=False)
        try:
            if hasattr(dataset, "read_into"):
                dataset.read_into(index, _Row(out, dataset.schema))
            else:
                dataset.read_batch_into([index], out)
        finally:
            end_samples()
        return out.sample()


class _Row(Mapping[str, Any]):
    """The `out` of `read_into`: the only row of a OneSample."""

    def __init__(self, rows: OneSample, schema: Mapping[str, Any]) -> None:
        self._rows, self._schema = rows, schema

    def reserve(self, name: str, n: Any) -> Any:
        """Return the writable row of a ragged field, of n elements."""
        self._rows.reserve(name, [n])
        return self._rows[name][0]

    def __getitem__(self, name: str) -> Any:
        return self._rows[name][0, ...]

    def __setitem__(self, name: str, value: Any) -> None:
        try:
            row = self[name]
        except KeyError:  # text or ragged: there is no memory yet
            self._rows[name] = [value]
        else:
            row[...] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._schema)

    def __len__(self) -> int:
        return len(self._schema)
