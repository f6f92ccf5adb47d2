"""Errors for bad input are clear and raised once, and nothing is lost or left over."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

import shmload
from shmload import BlockShuffle, LengthBuckets, Mix, RingTooSmall, SampleError, SharedIndex, ShmLoader, TokenBudget, Weighted
from shmload.formats import ArrayDataset
from shmload.schedule.node_shuffle import NodeShuffle
from shmload.schedule.shard_shuffle import ShardShuffle
from tests.loader.seeded_data import EveryTenthLonger

BOTH_MODES = pytest.mark.parametrize("seed", [None, 3], ids=["torch mode", "seed mode"])


class Failing:
    """A dataset whose sample 5 raises a given error."""

    def __init__(self, error: Any) -> None:
        self.error = error

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise self.error
        return index


class Unusual(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)


def outcomes(loader: Any) -> list[Any]:
    """Returns every batch or exception in turn."""
    found: list[Any] = []
    stream = iter(loader)
    while True:
        try:
            found.append(next(stream).tolist())
        except StopIteration:
            return found
        except Exception as error:
            found.append(error)


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("key"), Unusual(1, 2), FileNotFoundError(2, "gone", "x")])
def test_sample_exception_is_raised_as_in_torch_and_the_next_batch_follows(error: Exception) -> None:
    got = outcomes(ShmLoader(Failing(error), batch_size=3, num_workers=2))
    torchs = outcomes(DataLoader(Failing(error), batch_size=3, num_workers=2))
    assert [one for one in got if isinstance(one, list)] == [[0, 1, 2], [6, 7, 8], [9, 10, 11]]
    assert type(torchs[1]) is type(got[1])
    assert str(torchs[1]).splitlines()[:2] == str(got[1]).splitlines()[:2]
    assert str(torchs[1]).splitlines()[-1] == str(got[1]).splitlines()[-1]
    assert any("sample 5, epoch 0, batch 1" in note for note in got[1].__notes__)


def test_next_batch_follows_an_exception_in_seed_mode() -> None:
    with ShmLoader(Failing(ValueError("no")), batch_size=3, num_workers=2, seed=1) as loader:
        got = outcomes(loader)
    assert [one for one in got if isinstance(one, list)] == [[0, 1, 2], [6, 7, 8], [9, 10, 11]]
    assert isinstance(got[1], ValueError)
    assert "sample 5, epoch 0, batch 1" in got[1].__notes__[0]


class FailingInPlace(Failing):
    schema: ClassVar = {"x": "int64"}

    def read_into(self, index: int, out: Any) -> None:
        out["x"] = self[index]


@pytest.mark.parametrize("kind", [Failing, FailingInPlace])
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_note_of_a_samples_error_says_how_to_step_through_it(num_workers: int, seed: int | None, kind: Any) -> None:
    options: dict[str, Any] = {"batch_size": 3, "num_workers": num_workers, "seed": seed}
    with pytest.raises(ValueError, match="no") as caught, ShmLoader(kind(ValueError("no")), **options) as loader:
        list(loader)
    read = "shmload.debug.read(dataset, 5" + ("" if seed is None else ", seed=1, epoch=0") + ")"
    assert caught.value.__notes__ == [f"shmload: sample 5, epoch 0, batch 1; to step through it: {read}"]
    if num_workers == 0:
        assert (type(caught.value), str(caught.value)) == (ValueError, "no")


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_note_of_another_error_names_all_samples_of_the_batch(num_workers: int, seed: int | None) -> None:
    def collate(samples: Any) -> Any:
        raise ValueError("collate")

    with pytest.raises(ValueError, match="collate") as caught:
        next(iter(ShmLoader(range(6), 3, collate_fn=collate, num_workers=num_workers, seed=seed)))  # type: ignore[arg-type]  # plain
    assert len(caught.value.__notes__) == 1
    assert re.fullmatch(r"shmload: epoch 0, batch 0, of the samples \[\d, \d, \d\]", caught.value.__notes__[0])


def test_error_of_a_sampler_has_no_note() -> None:
    def keys() -> Any:
        yield 1
        raise ValueError("sampler")

    with pytest.raises(ValueError, match="sampler") as caught:
        list(ShmLoader(range(6), 1, sampler=keys(), num_workers=0))  # type: ignore[arg-type]  # plain
    assert not hasattr(caught.value, "__notes__")


class ReadTogether(EveryTenthLonger):
    """All samples of a batch are read by one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [EveryTenthLonger, ReadTogether])
def test_sample_of_another_shape_is_refused_in_torch_mode_with_torchs_message(kind: type[EveryTenthLonger]) -> None:
    with ShmLoader(kind(20), batch_size=4, num_workers=2) as loader:
        got = outcomes(loader)
    torchs = outcomes(DataLoader(kind(20), batch_size=4, num_workers=2))
    assert [type(one) for one in torchs] == [type(one) for one in got]
    assert torchs[0] == got[0]
    assert str(torchs[2]).splitlines()[-1] == str(got[2]).splitlines()[-1]
    assert "equal size" in str(got[2])


@BOTH_MODES
def test_index_out_of_range_raises_the_datasets_error(seed: int | None) -> None:
    with ShmLoader(list(range(4)), sampler=[1, 99], num_workers=1, seed=seed) as loader:
        got = outcomes(loader)
    assert got[0] == [1]
    assert isinstance(got[1], IndexError)
    assert "list index out of range" in str(got[1])


def broken_init(worker_id: int) -> None:
    raise OSError("no disk")


@BOTH_MODES
def test_error_of_worker_init_fn_is_raised(seed: int | None) -> None:
    with (
        ShmLoader(list(range(4)), num_workers=1, worker_init_fn=broken_init, seed=seed) as loader,
        pytest.raises(OSError, match="no disk"),
    ):
        next(iter(loader))


def broken_collate(samples: list[Any]) -> Any:
    raise ZeroDivisionError("collate")


def unpicklable_collate(samples: list[Any]) -> Any:
    return lambda: samples


@BOTH_MODES
def test_error_of_collate_fn_is_raised(seed: int | None) -> None:
    with (
        ShmLoader(list(range(4)), num_workers=1, collate_fn=broken_collate, seed=seed) as loader,
        pytest.raises(ZeroDivisionError, match="collate"),
    ):
        next(iter(loader))


@BOTH_MODES
def test_batch_that_cannot_be_pickled_is_refused(seed: int | None) -> None:
    with (
        ShmLoader(list(range(4)), num_workers=1, collate_fn=unpicklable_collate, seed=seed) as loader,
        pytest.raises(SampleError, match="a value of type function in the batch cannot be pickled"),
    ):
        next(iter(loader))


class Transformed:
    def __init__(self) -> None:
        self.transform = {"flip": [1, lambda x: x]}

    def __len__(self) -> int:
        return 3


@BOTH_MODES
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_error_names_the_path_of_what_cannot_be_pickled(method: str, seed: int | None) -> None:
    loader = ShmLoader(Transformed(), num_workers=1, multiprocessing_context=method, seed=seed)
    with pytest.raises(TypeError, match=r"dataset\.transform\['flip'\]\[1\] \(function\)"):
        next(iter(loader))


@pytest.mark.parametrize("batch_size", [0, -3])
@BOTH_MODES
def test_batch_size_below_one_is_refused(batch_size: int, seed: int | None) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        ShmLoader(list(range(4)), batch_size=batch_size, seed=seed)


class Wide:
    schema = {"x": ("uint8", (1 << 30, 1 << 10))}

    def __len__(self) -> int:
        return 4

    def read_into(self, index: int, out: Any) -> None: ...


@BOTH_MODES
def test_ring_larger_than_memory_is_refused_with_figures(seed: int | None) -> None:
    with pytest.raises(RingTooSmall, match=r"the ring needs \d+ bytes, 4 slots of \d+"):
        next(iter(ShmLoader(Wide(), num_workers=1, seed=seed)))


@BOTH_MODES
def test_ring_larger_than_ring_bytes_is_refused_with_figures(seed: int | None) -> None:
    loader = ShmLoader([np.zeros(10_000)] * 4, num_workers=1, ring_bytes=100_000, seed=seed)
    with pytest.raises(RingTooSmall, match="ring_bytes=100000 has 100000 left, enough for 1 slots"):
        next(iter(loader))
    loader.close()


@BOTH_MODES
def test_closed_loader_refuses_to_read(seed: int | None) -> None:
    loader = ShmLoader(list(range(4)), num_workers=1, seed=seed)
    next(iter(loader))
    loader.close()
    loader.close()
    with pytest.raises(RuntimeError, match="this loader is closed"):
        iter(loader)


@pytest.mark.parametrize("value", ["atuo", 2.5, math.inf, math.nan, b"1", [1], {}, np.array([1, 2]), object()])
@pytest.mark.parametrize("name", ["num_workers", "prefetch_factor"])
def test_an_argument_that_can_be_automatic_is_an_integer_or_auto(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f'{name} must be an integer.* "auto".*; got .* of type {type(value).__name__}$'):
        ShmLoader([1], seed=1, **{name: value})  # in torch mode, the error is torch's


@pytest.mark.parametrize("value", ["atuo", "2", None])
def test_torchs_error_for_a_wrong_type_has_a_note_that_names_the_argument(value: Any) -> None:
    with pytest.raises(TypeError) as theirs:
        DataLoader([1], num_workers=value)
    with pytest.raises(TypeError) as ours:
        ShmLoader([1], num_workers=value)
    assert str(ours.value) == str(theirs.value)
    kind = type(value).__name__
    assert ours.value.__notes__ == [
        f'shmload: num_workers must be an integer of at least 0 or "auto"; got {value!r} of type {kind}'
    ]


def test_number_of_workers_that_torch_refuses_late_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r'^num_workers must be an integer of at least 0 or "auto"; got 2\.0 of type float$'):
        ShmLoader([1], num_workers=2.0)  # type: ignore[arg-type]  # the wrong type is the point


@BOTH_MODES
def test_text_as_batch_size_is_named_with_quotes_in_a_note(seed: int | None) -> None:
    with pytest.raises(ValueError, match="got batch_size=16") as caught:
        ShmLoader([1], batch_size="16", seed=seed)  # type: ignore[arg-type]  # the wrong type is the point
    assert caught.value.__notes__ == ["shmload: batch_size must be an int or None; got '16' of type str"]


@pytest.mark.parametrize("name", ["shuffle", "pin_memory", "persistent_workers", "in_order", "seed_samples", "trust_state"])
def test_text_as_truth_value_is_refused_in_seed_mode(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be True or False; got 'no' of type str$"):
        ShmLoader([1], num_workers=1, seed=1, **{name: "no"})
    if name in ("shuffle", "in_order"):
        ShmLoader([1], **{name: "no"})  # true, as in torch


@pytest.mark.parametrize(("method", "seed"), [("spawn", None), ("forkserver", None), ("spawn", 1)])
def test_program_without_a_main_guard_is_told_to_have_one(method: str, seed: int | None, tmp_path: Path) -> None:
    program = tmp_path / "unguarded.py"
    program.write_text(
        f"from shmload import ShmLoader\nlist(ShmLoader([1, 2], num_workers=1, seed={seed}, multiprocessing_context={method!r}))\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=False)
    last = done.stderr.splitlines()[-1]
    assert "WorkerDied: " in last
    assert last.endswith("; it died while it started and imported the program: is its code under `if __name__ == '__main__':`?")


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_backend_that_was_given_is_in_the_repr(backend: Any) -> None:
    assert ("backend='thread'" in repr(ShmLoader([1], num_workers=1, backend=backend))) is (backend == "thread")


WRONG_TYPES = {
    "max_bad": ("x", 1.5),
    "max_restarts": ("x", 1.5),
    "rank": ("0", 0.0),
    "world_size": ("2", 2.0),
    "snapshot_every_n_steps": ("x", 1.5),
    "sample_timeout_s": ("x", [1]),
    "ring_bytes": ("1GB", {}),
    "generator": (3, np.random.default_rng(0)),
    "sampler": (3, lambda: [0]),
    "batch_sampler": (3, lambda: [[0]]),
    "collate_fn": (3, "default"),
    "worker_init_fn": (3, "seed"),
    "after_batch": (3, "normalize"),
    "audit": (3, b"folder"),
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG_TYPES.items() for value in values])
def test_an_argument_of_a_wrong_type_is_named_at_construction(name: str, value: Any, num_workers: int) -> None:
    with pytest.raises(TypeError, match=rf"^{name} must be an? .*; got .* of type {type(value).__name__}$|^audit must be the path"):
        ShmLoader([1, 2], num_workers=num_workers, **{name: value})


def test_integers_of_every_library_and_fractions_of_seconds_are_taken() -> None:
    with ShmLoader(
        [1, 2],
        num_workers=np.int64(1),
        prefetch_factor=torch.tensor(2),
        timeout=60.5,
        ring_bytes=1e6,
        sample_timeout_s=np.float32(60),
    ) as loader:  # type: ignore[arg-type]  # a list, and numbers of numpy and torch
        assert [int(sample) for sample in loader] == [1, 2]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(5))


def test_iterable_dataset_of_torch_is_read() -> None:
    assert [batch.tolist() for batch in ShmLoader(Stream(), batch_size=2, num_workers=1)] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": -1}, "seed must be an int from 0"),
        ({"seed": 1.5}, "seed must be an int from 0"),
        ({"seed": 1, "generator": torch.Generator()}, "cannot be combined"),
        ({"seed_samples": True}, "needs a seed"),
        ({"uneven": "odd"}, "uneven must be"),
        ({"ring_bytes": 0}, "ring_bytes must be a positive"),
        ({"audit": ""}, "audit must be the path of a folder; got ''"),
        ({"max_restarts": -1}, "max_restarts must be at least 0"),
        ({"seed": 1, "rank": 1}, "go together"),
        ({"seed": 1, "rank": 2, "world_size": 2}, "below world_size"),
        ({"num_workers": -1}, "num_workers option should be non-negative"),
        ({"prefetch_factor": 2}, "prefetch_factor option could only be specified in multiprocessing"),
        ({"persistent_workers": True}, "persistent_workers option needs num_workers > 0"),
        ({"shuffle": True, "sampler": [0]}, "mutually exclusive"),
    ],
)
def test_invalid_or_conflicting_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ShmLoader([1, 2], **options)


@pytest.mark.parametrize("options", [{}, {"sampler": [0, 1, 1]}])
def test_invalid_epoch_is_refused(options: dict[str, Any]) -> None:
    loader = ShmLoader([1, 2, 3], seed=4, **options)
    with pytest.raises(ValueError, match=r"^epoch must be in \[0, 2\^62\], got 1180591620717411303424; epochs are counted from 0$"):
        loader.set_epoch(2**70)
    with pytest.raises(TypeError, match=r"^epoch must be an integer, got 1.5 of type float"):
        loader.set_epoch(1.5)  # type: ignore[arg-type]  # must be refused
    loader.set_epoch(2**62)
    assert [int(sample) for sample in loader] == ([1, 2, 3] if not options else [1, 2, 2])
    assert loader.state_dict()["epoch"] == 2**62 + 1


@pytest.mark.parametrize("options", [{}, {"sampler": [0, 1, 1]}])
def test_numpy_integers_are_accepted(options: dict[str, Any]) -> None:
    numbers = {"seed": 4, "rank": 0, "world_size": 1, "threads_per_worker": 1}
    one, other = (ShmLoader([1, 2, 3], 2, **of, **options) for of in (numbers, {name: np.uint8(n) for name, n in numbers.items()}))
    assert [batch.tolist() for batch in one] == [batch.tolist() for batch in other]
    assert json.dumps(one.state_dict()) == json.dumps(other.state_dict())
    assert {type(getattr(other, name)) for name in numbers} == {int}


LARGER = {
    "blocks": {"sampler": BlockShuffle(11, block_size=2)},
    "shards": {"sampler": ShardShuffle([5, 6])},
    "nodes": {"sampler": NodeShuffle([5, 6], nodes=1, global_batch=1)},
    "weights": {"sampler": Weighted([0.0] * 10 + [1.0], num_samples=3)},
    "lengths": {"batch_sampler": LengthBuckets([1] * 11, batch_size=2)},
    "tokens": {"batch_sampler": TokenBudget([1] * 11, max_tokens=4)},
}


@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("options", LARGER.values(), ids=LARGER)
def test_sampler_with_indices_beyond_the_dataset_is_refused(options: dict[str, Any], seed: int | None) -> None:
    words = r"ampler=<.*> has indices up to 10 and needs a dataset of 11 samples; this list has 10$"
    with pytest.raises(ValueError, match=words):
        ShmLoader([1] * 10, seed=seed, **options)
    assert int(next(iter(ShmLoader([1] * 12, seed=seed, **options)))[0]) == 1


def test_sampler_with_indices_inside_the_dataset_is_accepted() -> None:
    order = Weighted([1.0] * 3 + [0.0] * 7, num_samples=20)
    assert [int(sample) for sample in ShmLoader([1, 1, 1], None, sampler=order, seed=4)] == [1] * 20


def test_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="color"):
        ShmLoader([1], color=2)


def in_a_daemon(pipe: Any) -> None:
    try:
        next(iter(ShmLoader([1, 2], num_workers=1)))
    except AssertionError as error:
        pipe.send(str(error))


def test_loader_in_a_daemonic_process_is_refused_with_pythons_message() -> None:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=in_a_daemon, args=(theirs,), daemon=True)
    child.start()
    assert "daemonic processes are not allowed to have children" in ours.recv()
    child.join()
    child.close()


@pytest.mark.slow(reason="copies the package and imports it in a process of its own")
def test_import_without_compiled_modules_says_how_to_build(tmp_path: Path) -> None:
    shutil.copytree(Path(shmload.__file__).parent, tmp_path / "shmload", ignore=shutil.ignore_patterns("*.so", "data"))
    done = subprocess.run(
        [sys.executable, "-c", "from shmload import ShmLoader"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert "ImportError: shmload's compiled modules are missing" in done.stderr
    assert f"{tmp_path}. If shmload is installed, run your program from another folder" in done.stderr
    assert "pip install ." in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"on_error": "ignore"}, 'on_error must be "raise", "skip" or "substitute"; got \'ignore\''),
        ({"max_bad": -1}, "max_bad must be at least 0 or None; got -1"),
        ({"sample_timeout_s": 0, "num_workers": 1}, "sample_timeout_s must be a positive number of seconds or None; got 0"),
        ({"sample_timeout_s": 1}, "sample_timeout_s needs num_workers > 0"),
        ({"snapshot_every_n_steps": -1}, "snapshot_every_n_steps must be at least 0 or None; got -1"),
    ],
)
def test_policies_are_checked(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ShmLoader([1], **arguments)


@pytest.mark.parametrize("seed", [None, 1])
def test_data_frame_is_refused_with_the_datasets_that_read_its_rows(seed: int | None) -> None:
    frame = pandas.DataFrame({"x": [1, 2, 3]})
    with pytest.raises(
        TypeError, match=r"dataset must give a sample for each number, .*ArrayDataset\(.*SharedIndex.from_dataframe"
    ):
        ShmLoader(frame, 2, seed=seed)
    for dataset in (ArrayDataset({name: frame[name].to_numpy() for name in frame.columns}), SharedIndex.from_dataframe(frame)):
        assert [batch["x"].tolist() for batch in ShmLoader(dataset, 2, seed=seed)] == [[1, 2], [3]]


def test_data_frame_with_a_sampler_of_columns_is_read_as_in_torch() -> None:
    frame = pandas.DataFrame({"x": [1, 2, 3]})
    (column,) = ShmLoader(frame, batch_size=None, sampler=["x"])
    assert column.tolist() == [1, 2, 3]


def test_iterable_dataset_is_refused_where_indices_are_needed() -> None:
    with pytest.raises(ValueError, match="orders samples by index"):
        ShmLoader(Stream(), seed=1)
    with pytest.raises(ValueError, match="needs a map-style dataset"):
        ShmLoader(Stream(), on_error="skip")


def test_restart_options_are_refused_for_iterable_datasets() -> None:
    with pytest.raises(ValueError, match="sample_timeout_s=1 needs a map-style dataset: an iterable one's position is lost with"):
        ShmLoader(Stream(), num_workers=1, sample_timeout_s=1)
    with pytest.raises(ValueError, match="max_restarts=1 needs a map-style dataset"):
        ShmLoader(Stream(), num_workers=1, max_restarts=1)


def stopping_collate(samples: list[Any]) -> Any:
    if 5 in samples:
        raise StopIteration("collated enough")
    return torch.tensor(samples)


def stopping_start(worker: int) -> None:
    raise StopIteration("no start")


class StoppingLists(Failing):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class StoppingInPlace(Failing):
    schema = {"index": ("int64", ())}

    def read_into(self, index: int, out: Any) -> None:
        out["index"] = self[index]


class StoppingBatches(Failing):
    schema = {"index": ("int64", ())}

    def read_batch_into(self, indices: Any, out: Any) -> None:
        out["index"][:] = [self[int(index)] for index in indices]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Failing, StoppingLists, StoppingInPlace, StoppingBatches, stopping_collate])
def test_stop_iteration_from_user_code_does_not_end_a_pass_in_seed_mode(kind: Any, num_workers: int) -> None:
    is_dataset = isinstance(kind, type)
    dataset = kind(StopIteration("early")) if is_dataset else list(range(12))
    collate = None if is_dataset else kind
    with ShmLoader(dataset, batch_size=2, seed=0, num_workers=num_workers, collate_fn=collate) as loader:
        found: list[Any] = []
        iterator = iter(loader)
        for _ in range(6):
            try:
                next(iterator)
                found.append("a batch")
            except RuntimeError as error:
                found.append(str(error))
        assert list(iterator) == []
    message = "the dataset, collate_fn or sampler (epoch 0, batch 2) raised StopIteration, which would have ended the pass"
    assert found[:2] + found[3:] == ["a batch"] * 5
    assert message in found[2]
    assert ("early" if is_dataset else "collated enough") in found[2]


def test_stop_iteration_at_worker_start_does_not_end_a_pass_in_seed_mode() -> None:
    with ShmLoader(list(range(4)), batch_size=2, seed=0, num_workers=1, worker_init_fn=stopping_start) as loader:
        iterator = iter(loader)
        with pytest.raises(RuntimeError, match=r"(?s)raised StopIteration, .*no start"):
            next(iterator)


class InPlaceOnly:
    """A dataset that has nothing but the decoding protocol."""

    schema: Any = {"image": ("uint8", (2,)), "label": "int64"}  # instances replace it

    def __len__(self) -> int:
        return 6

    def read_into(self, index: int, out: Any) -> None:
        out["image"], out["label"] = index, index


class WithoutSchema(InPlaceOnly):
    schema = None


class WithOneArgument(InPlaceOnly):
    def read_into(self, i: int) -> None:  # type: ignore[override]  # the mistake
        raise NotImplementedError


class WithBatchesOfOneArgument(InPlaceOnly):
    def read_batch_into(self, indices: Any) -> None:
        raise NotImplementedError


class WithArrayAsSchema(InPlaceOnly):
    schema: ClassVar = {"x": np.zeros((3, 2))}


class WithOneNameTwice(InPlaceOnly):
    schema: ClassVar = {1: "int64", "1": "float32"}


class WithRaisingSchema(InPlaceOnly):
    @property
    def schema(self) -> Any:
        raise OSError("no such file")


@BOTH_MODES
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (WithoutSchema, TypeError, "WithoutSchema has read_into but no schema, which must map"),
        (WithOneArgument, TypeError, r"WithOneArgument.read_into must take two arguments, \(index, out\); got read_into\(i"),
        (
            WithBatchesOfOneArgument,
            TypeError,
            r"read_batch_into must take two arguments, \(indices, out\); got read_batch_into\(ind",
        ),
        (WithArrayAsSchema, TypeError, "schema field 'x' is array.*: give \\(dtype, shape\\)"),
        (WithOneNameTwice, ValueError, "two fields of the schema have one name as text: 1, '1'; name each differently"),
        (WithRaisingSchema, OSError, "no such file"),
    ],
)
def test_incomplete_decoding_protocol_is_an_error_of_the_constructor(
    kind: Any, error: type[Exception], words: str, num_workers: int, seed: int | None
) -> None:
    with pytest.raises(error, match="(?s)" + words):
        ShmLoader(kind(), 2, num_workers=num_workers, seed=seed)


@BOTH_MODES
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"collate_fn": list}, "with collate_fn, .* InPlaceOnly has no __getitem__: add one, or leave collate_fn out"),
        ({"batch_size": None}, "with batch_size=None, .* InPlaceOnly has no __getitem__: add one, or give a batch_size"),
    ],
)
def test_dataset_without_getitem_is_refused_where_samples_are_not_decoded_in_place(
    options: dict[str, Any], words: str, seed: int | None
) -> None:
    class Derived(Dataset[Any], InPlaceOnly):  # its __getitem__ is torch's, which only raises
        pass

    for dataset in (InPlaceOnly(), Subset(InPlaceOnly(), [1]), ConcatDataset([InPlaceOnly()])):  # type: ignore[type-var]  # no torch Dataset
        with pytest.raises(TypeError, match=words):
            ShmLoader(dataset, seed=seed, **options)
    with pytest.raises(TypeError, match=words.replace("InPlaceOnly", "Derived")):
        ShmLoader(Derived(), seed=seed, **options)


@pytest.mark.parametrize(
    ("join", "seed"), [(ConcatDataset, None), (ConcatDataset, 1), (lambda members: Mix([(member, 1.0) for member in members]), 1)]
)
def test_members_without_getitem_that_have_several_schemas_are_refused(join: Any, seed: int | None) -> None:
    class Other(InPlaceOnly):
        schema = {"image": ("uint8", (3,)), "label": "int64"}

    words = "members of .* all have equal schemas; .* which InPlaceOnly does not have: give all members one schema"
    with pytest.raises(TypeError, match=words):
        ShmLoader(join([InPlaceOnly(), Other()]), 2, seed=seed)


def test_class_in_place_of_a_dataset_is_an_error_that_says_so() -> None:
    with pytest.raises(TypeError, match="the dataset is the class InPlaceOnly: pass an instance of it"):
        ShmLoader(InPlaceOnly, 2)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("does", ["set", "get"])
def test_wrong_name_of_a_field_is_an_error_with_the_schema(does: str, ragged: bool) -> None:
    class Misspelled(InPlaceOnly):
        def read_into(self, index: int, out: Any) -> None:
            if does == "set":
                out["lable"] = 1
            else:
                out["lable"][...] = 1

    dataset = Misspelled()
    dataset.schema = InPlaceOnly.schema | ({"text": str, "values": ("int64", (None,))} if ragged else {})
    with pytest.raises(KeyError, match=r"out\['lable'\]: the schema has image, label" + (", text, values" if ragged else "")):
        next(iter(ShmLoader(dataset, 2, num_workers=0)))
