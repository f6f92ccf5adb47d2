"""Data in the trainer's shared memory is sent to other machines and read there without a further copy. Without a cluster."""

from __future__ import annotations

import gc
import importlib.util
import pickle
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from shmload import SharedIndex
from shmload.formats import ArrayDataset, TarWriter
from shmload.ray.dataset_shipping import pickle_job_by_value
from shmload.ray.worker_actor import _name_classes_of_main
from shmload.remote import RemoteDataset
from shmload.remote.pass_counter import PassCounter
from shmload.shm import pickling
from shmload.worker.job import Job
from tests.shm.travel_kit import arrived, received

PROGRAM = """
class Sample:
    number = 0

class Numbers:
    def __getitem__(self, index):
        sample = Sample()
        sample.number = index
        return sample
"""


@pytest.mark.slow(reason="imports Ray")
def test_classes_of_a_spawned_main_module_are_sent_by_value_and_return_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip('Ray is not installed: pip install "shmload[ray]"')
    from ray import cloudpickle  # imported here because few tests need it

    program = ModuleType("__mp_main__")  # the name that multiprocessing gives to the main module
    exec(PROGRAM, vars(program))
    monkeypatch.setitem(sys.modules, "__mp_main__", program)
    pickled_job = arrived(pickle_job_by_value(Job(program.Numbers(), None, None, True, 3, False)))
    cloudpickle.unregister_pickle_by_value(program)
    del program.Numbers, program.Sample  # an actor does not have them
    monkeypatch.setitem(sys.modules, "__main__", program)
    dataset = pickling.loads(pickled_job).dataset
    _name_classes_of_main()
    assert pickle.loads(pickle.dumps(dataset[3])).number == 3


def test_arrays_are_read_in_the_received_memory() -> None:
    pickled_job = received(ArrayDataset((np.arange(12).reshape(4, 3), torch.arange(4, dtype=torch.bfloat16))))
    gc.collect()  # the original is gone, as on another machine
    first, second = pickling.loads(pickled_job), pickling.loads(pickled_job)
    assert [row.tolist() for row in first[3]] == [[9, 10, 11], 3.0]
    arrays = [held._held.arrays["0"].array for held in (first, second)]
    assert np.shares_memory(arrays[0], arrays[1])
    assert not arrays[0].flags.writeable
    assert pickle.loads(pickle.dumps(first))[1][0].tolist() == [3, 4, 5]  # a pickle for a process of this machine contains the data


def test_index_and_its_view_are_read_in_the_received_memory() -> None:
    index = SharedIndex([(f"{n}.jpg", n) for n in range(9)])
    pickled_job = received((index, index[::-2], index.column(1).nbytes))
    nbytes = index.nbytes
    del index
    gc.collect()
    whole, view, _ = pickling.loads(pickled_job)
    assert [whole[3], view[0], view[-1]] == [("3.jpg", 3), ("8.jpg", 8), ("0.jpg", 0)]
    assert whole.nbytes == nbytes
    assert whole.column(1).tolist() == list(range(9))
    assert list(pickle.loads(pickle.dumps(view))) == list(view)


def test_remote_workers_get_the_pass_number_and_the_trainer_continues_from_it() -> None:
    here = PassCounter()
    for number in range(3):
        one, other = pickling.loads(received(here)), pickling.loads(received(here.__class__(number)))
        assert [one.begin(11), other.begin(11)] == [number, number]
    assert here.next == 3


def test_private_folder_of_shards_is_created_on_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TarWriter(tmp_path / "a-000000.tar") as writer:
        writer.write({"__key__": "k", "cls": 3})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    here = RemoteDataset.from_urls(str(tmp_path), shuffle=False)
    pickled_job = received(here)
    home = here._source.local._private
    assert home is not None
    there = pickling.loads(pickled_job)
    assert there._source.local._private.path == home.path  # this process is on the first machine
    shutil.rmtree(home.path)
    there = pickling.loads(pickled_job)
    assert [sample["cls"] for sample in there] == [b"3"]
    made = there._source.local._private.path
    assert made != home.path
    there.close()
    here.close()
    assert not Path(made).exists()
