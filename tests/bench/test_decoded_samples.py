"""Single samples of datasets that only decode into batches."""

import numpy as np

from shmload.tools.bench.decoded_samples import samples_of

SCHEMA = {"x": ("float32", (2,)), "n": "int64", "text": str, "values": ("int16", (None,))}


class ByRow:
    schema = SCHEMA

    def __len__(self):
        return 3

    def read_into(self, index, out):
        out["x"][...] = index
        out["n"] = index
        out["text"] = f"number {index}"
        out.reserve("values", index + 1)[...] = 7


class ByBatch:
    schema = {"x": ("float32", (2,)), "n": "int64"}  # never changed

    def __len__(self):
        return 3

    def read_batch_into(self, indices, out):
        out["x"][...] = np.array(indices)[:, None]
        out["n"][...] = indices


def test_sample_of_a_dataset_that_decodes_rows_has_every_kind_of_field():
    sample = samples_of(ByRow())[2]
    assert (sample["x"].tolist(), sample["n"], sample["text"], sample["values"].tolist()) == ([2, 2], 2, "number 2", [7, 7, 7])


def test_sample_of_a_dataset_that_decodes_batches_is_its_only_row():
    sample = samples_of(ByBatch())[1]
    assert (sample["x"].tolist(), sample["n"], sample["n"].dtype) == ([1, 1], 1, np.int64)


def test_dataset_with_samples_is_returned_itself():
    class WithSamples(ByBatch):
        def __getitem__(self, index):
            return index

    made = WithSamples()
    assert samples_of(made) is made
