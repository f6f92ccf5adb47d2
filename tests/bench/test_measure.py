"""The stopwatch and its limits: steps, waits, epochs of unknown length, and sleeping versus computing."""

import time

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from shmload.tools.bench import core_limit
from shmload.tools.bench.measured_stream import MeasuredSegment, MeasuredStream, after, after_whole_epochs, record
from shmload.tools.object_reference import make_dataset


class Batches:
    """Batches of the given sizes, without a length."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def __iter__(self):
        return (torch.zeros(size, 2) for size in self.sizes)


def test_rows_are_counted_in_batches_of_unknown_structure():
    stream = MeasuredStream(Batches(3, 1, 2), None, None)
    assert [stream.next()[1] for _ in range(4)] == [3, 1, 2, 3]
    assert stream.num_epochs == 2


def test_rows_are_computed_from_a_known_batch_size():
    stream = MeasuredStream(Batches(4, 4, 2), 10, 4)
    assert [stream.next()[1] for _ in range(4)] == [4, 4, 2, 4]


def test_errors_distinguish_exhausted_generators_from_empty_loaders():
    for batches, words in ((iter(Batches(2)), "in a whole epoch, after others that had some: is it a generator"), ((), "epoch$")):
        with pytest.raises(RuntimeError, match=words):
            record(MeasuredStream(batches, None, None), after(0.0, num_batches=2))


def test_step_is_simulated_by_sleep_and_is_not_counted_as_waiting():
    segment = record(MeasuredStream(Batches(*[1] * 5), 5, 1), after(0.0, num_batches=5), step_s=0.002)
    values = segment.values()
    assert segment.slept_s >= 5 * 0.002
    assert values["trainer_own_ms_per_batch"] >= 2
    assert 0 < values["step_efficiency"] <= 1
    assert sum(segment.waits_s) <= segment.wall_s - segment.slept_s


class Uneven(Batches):
    """Two batches of 2 samples that take no time, and one of 1 sample that takes long."""

    def __init__(self):
        self.sizes = 2, 2, 1

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.02 * (len(batch) == 1))
            yield batch


@pytest.mark.parametrize("num_before", range(1, 4))
def test_short_epochs_are_measured_whole(num_before):
    stream = MeasuredStream(Uneven(), 5, 2)
    record(stream, after(0.0, num_batches=3 + num_before))
    segment = record(stream, after_whole_epochs(stream, 0.0, 4, limit_s=60))
    assert (len(segment.waits_s), segment.num_samples) == (6, 10)


@pytest.mark.parametrize(("batch_size", "expected"), [(2, [2, 1]), (None, [6, 1])])
def test_rows_of_samples_put_end_to_end_are_not_samples(batch_size, expected):
    batches = [{"values": torch.zeros(6), "lengths": torch.tensor([4, 2])}, {"values": torch.zeros(1)}]
    stream = MeasuredStream(batches, None, batch_size)
    assert [stream.next()[1] for _ in expected] == expected


def test_slow_batches_are_measured_until_the_limit():
    stream = MeasuredStream(Uneven(), 5, 2)
    segment = record(stream, after_whole_epochs(stream, 0.0, 1000, limit_s=0.05))
    assert 0.05 <= segment.wall_s < 10
    assert 3 <= len(segment.waits_s) < 1000


def test_no_step_is_reported_without_one():
    assert "step_efficiency" not in record(MeasuredStream(Batches(1), 1, 1), after(0.0)).values()


def test_step_efficiency_is_step_time_divided_by_total_time():
    segment = MeasuredSegment(num_samples=4, nbytes=8, wall_s=2.0, step_s=0.25, waits_s=[0.1] * 4)
    assert segment.values()["step_efficiency"] == pytest.approx(0.5)
    assert segment.values()["wait_share"] == pytest.approx(0.2)


class Sleeps:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(0.001)
        return np.zeros(4)


class Computes(Sleeps):
    def __getitem__(self, index):
        end_s = time.thread_time() + 0.001
        while time.thread_time() < end_s:
            pass
        return np.zeros(4)


def read(dataset, **more):
    batches = core_limit.random_batches(dataset, 5)
    return core_limit.read(dataset, batches, seconds=0.02, copy_bytes_per_s=1e9, **more)


def test_sleeping_and_computing_datasets_are_distinguished():
    asleep, computing = read(Sleeps()), read(Computes())
    assert asleep.blocked_s >= 0.0008
    assert asleep.cpu_s < 0.0008
    assert computing.cpu_s >= 0.0008
    assert computing.blocked_s < computing.cpu_s


def test_custom_collate_function_counts_as_reading():
    calls = []
    read(Sleeps(), collate=calls.append)
    assert {5} == {len(samples) for samples in calls}


def test_iterable_dataset_is_read_repeatedly():
    class MeasuredStream(IterableDataset):
        def __iter__(self):
            return iter([np.zeros(2)] * 3)

    assert core_limit.protocol(MeasuredStream()) == "__iter__"
    assert read(MeasuredStream()).samples_per_s > 0


@pytest.mark.parametrize("name", ["InPlace", "RandomInPlace", "RaggedInPlace"])
def test_core_reads_datasets_that_only_decode_into_batches(name, monkeypatch, request):
    monkeypatch.syspath_prepend(request.path.parent)
    dataset = make_dataset(f"planted:{name}", {})
    assert read(dataset).samples_per_s > 0
    assert all(0 <= index < 100 for index in next(core_limit.random_batches(dataset, 10)))


@pytest.mark.parametrize("is_decoded", [False, True])
def test_sample_that_raises_is_named(is_decoded):
    class Third:
        schema = {"x": ("int64", ())}

        def __len__(self):
            return 1000

        def __getitem__(self, index):
            if index == 3:
                raise KeyError("image")
            return np.zeros(2)

    class ThirdInPlace(Third):
        def read_into(self, index, out):
            out["x"] = self[index][0]

    read_batch = core_limit.reader(ThirdInPlace() if is_decoded else Third(), [1, 2], None)
    read_batch([1, 2])
    with pytest.raises(KeyError) as caught:
        read_batch([2, 3])
    assert caught.value.__notes__ == ["sample 3"]
