"""`shmload.debug`: which line of the program holds which slot, and the content of a slot that nothing holds."""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

import shmload.debug
from shmload import ShmLoader, sample_info, sample_rng
from shmload.debug import is_poisoned
from shmload.engine.engine import Engine

N, BATCH_SIZE = 48, 4


class Numbers:
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": np.full(16, i + 1, np.float32), "label": i}


@pytest.fixture
def debugging() -> Iterator[None]:
    """Enables debugging for the loaders of a test."""
    shmload.debug.enable()
    yield
    shmload.debug.enable(False)


def loader_over_numbers(**options: Any) -> ShmLoader[Any]:
    return ShmLoader(Numbers(), **({"batch_size": BATCH_SIZE, "num_workers": 1} | options))


def take(iterator: Iterator[Any]) -> tuple[Any, str]:
    """Returns a batch and the line that took it."""
    frame = inspect.currentframe()
    assert frame is not None
    return next(iterator), f"{__file__}:{frame.f_lineno} in take"


@pytest.mark.usefixtures("debugging")
@pytest.mark.parametrize("seed", [None, 3])
def test_holders_are_reported_with_the_line_that_took_their_batch(seed: int | None) -> None:
    with loader_over_numbers(seed=seed, prefetch_factor=4) as loader:
        iterator = iter(loader)
        kept, line = take(iterator)
        dropped = next(iterator)
        view = next(iterator)["x"][1:].numpy()
        nbytes = loader._builder.last._ring.payload_nbytes(0)
        assert [(h.epoch, h.step, h.nbytes) for h in loader.holders()] == [(0, step, nbytes) for step in range(3)]
        del dropped
        first, second = loader.holders()
        assert (first.step, first.where) == (0, line)
        assert (second.step, second.where.split(":")[0]) == (2, __file__)
        assert first.age_s >= second.age_s >= 0
        assert str(first).startswith(f"slot {first.slot} ({nbytes} bytes): batch 0 of epoch 0, taken 0.0 s ago at {line}")
        assert [h["step"] for h in loader.stats()["holders"]] == [0, 2]
        del kept, view
        assert loader.holders() == []


@pytest.mark.usefixtures("debugging")
def test_for_loop_is_reported_and_a_copied_batch_is_not() -> None:
    with loader_over_numbers() as loader, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held: list[Any] = []
        for batch in loader:
            held += [batch]
        num_slots = loader._builder.last.num_slots
        where = {holder.where.rpartition(" in ")[2] for holder in loader.holders()}
        assert where == {"test_for_loop_is_reported_and_a_copied_batch_is_not"}
        assert len(loader.holders()) == num_slots - 1
        assert len(held) == N // BATCH_SIZE
    (warning,) = caught
    assert warning.filename == __file__
    first, *lines = str(warning.message).splitlines()
    assert first.startswith(f"{num_slots - 1} batches are still in use")
    assert len(lines) == num_slots - 1  # the copied batch is not in the ring
    assert all(f"batch {step} of epoch 0" in line and __file__ in line for step, line in enumerate(lines))


@pytest.mark.usefixtures("debugging")
def test_slot_is_poisoned_when_its_last_alias_dies() -> None:
    with loader_over_numbers() as loader:
        iterator = iter(loader)
        batch = next(iterator)
        assert not is_poisoned(batch["x"])
        values = batch["x"]
        raw = (ctypes.c_uint8 * values.nbytes).from_address(values.data_ptr())
        batch.clear()
        del values
        stale = np.frombuffer(raw, np.float32)
        assert is_poisoned(stale)
        assert is_poisoned(torch.from_numpy(stale.copy()))
        assert {str(stale.view(t)[0]) for t in (np.uint8, np.int32, np.int64)} == {"165", "-1515870811", "-6510615555426900571"}
        assert (f"{stale[0]:.2e}", f"{stale.view(np.float64)[0]:.1e}") == ("-2.87e-16", "-2.5e-127")


class HalfWritten:
    """Rows of which later samples write one number, after a first one that is complete."""

    schema: ClassVar = {"x": ("float32", (1024,))}

    def __len__(self) -> int:
        return N

    def read_into(self, index: int, out: Any) -> None:
        out["x"][: None if index == 0 else 1] = 1


@pytest.mark.usefixtures("debugging")
@pytest.mark.parametrize("options", [{}, {"backend": "thread"}], ids=str)
def test_row_of_a_new_slot_that_is_written_in_part_is_poisoned(options: dict[str, Any]) -> None:
    with ShmLoader(HalfWritten(), **{"batch_size": BATCH_SIZE, "num_workers": 1, "seed": 1, **options}) as loader:
        batch = next(iter(loader))
        assert [is_poisoned(row[1:]) for row in batch["x"][:4]] == [False, True, True, True]


@pytest.mark.parametrize(
    "values", [np.empty(0), np.array([0xA5, 0xA4], np.uint8), torch.zeros(3), torch.tensor(1, dtype=torch.bfloat16)]
)
def test_other_values_are_not_reported_as_poisoned(values: Any) -> None:
    assert not is_poisoned(values)


def test_without_debugging_the_error_names_how_to_enable_it() -> None:
    with loader_over_numbers() as loader:
        assert loader.holders() == []  # no batch was taken yet
        batch = next(iter(loader))
        assert type(loader._builder.last) is Engine
        assert not loader._builder.last._ring.poison
        with pytest.raises(
            RuntimeError, match=r"call shmload.debug.enable\(\) before its workers start, or set SHMLOAD_DEBUG_BATCHES=1"
        ):
            loader.holders()
        assert "holders" not in loader.stats()
        assert batch["label"].tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("debugging")
def test_holders_of_a_closed_loader_are_reported() -> None:
    loader = loader_over_numbers()
    iterator = iter(loader)
    kept, line = take(iterator)
    loader.close()
    del iterator
    gc.collect()
    assert [h.where for h in loader.holders()] == [line]
    kept.clear()
    assert loader.holders() == []


@pytest.mark.slow(reason="runs a program that imports torch")
@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("0", False), ("", False)])
def test_environment_variable_enables_debugging(value: str, is_on: bool) -> None:
    program = "import shmload.debug; print(shmload.debug.is_enabled())"
    env = {**os.environ, "PYTHONPATH": ":".join(path or "." for path in sys.path), "SHMLOAD_DEBUG_BATCHES": value}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=env)
    assert (done.stdout.strip(), done.stderr) == (str(is_on), "")


class Drawing:
    """A dataset of rows that are only decoded in place."""

    schema: ClassVar = {"x": ("float64", (2,)), "label": "int64", "text": str, "all": ("int64", (None,))}

    def __len__(self) -> int:
        return 6

    def read_into(self, index: int, out: Any) -> None:
        out["x"] = sample_rng().random(2)
        out["label"], out["text"], out["all"] = index, str(index), np.arange(index)


@pytest.mark.parametrize("index", range(6))
def test_sample_read_alone_is_the_one_of_a_loader(index: int) -> None:
    alone = shmload.debug.read(Drawing(), index, seed=3, epoch=2)
    with ShmLoader(Drawing(), 6, num_workers=0, seed=3) as loader:
        loader.set_epoch(2)
        (batch,) = loader
    assert alone.keys() == batch.keys()
    assert torch.equal(alone["x"], batch["x"][index])
    assert (alone["label"], alone["text"], alone["all"].tolist()) == (index, str(index), [*range(index)])


@pytest.mark.parametrize("kind", [tuple, list, "single"])
def test_sample_read_alone_has_the_type_of_its_batch(kind: Any) -> None:
    class Typed:
        schema: ClassVar = {"x": ("int64", (2,))} if kind == "single" else {"x": ("int64", (2,)), "y": "int64"}
        batch_type = kind

        def __len__(self) -> int:
            return 6

        def read_into(self, index: int, out: Any) -> None:
            for rows in out.values():
                rows[...] = index

    found = shmload.debug.read(Typed(), 5)
    assert (found.tolist() if kind == "single" else [part.tolist() for part in found]) == (
        [5, 5] if kind == "single" else [[5, 5], 5]
    )
    assert kind == "single" or type(found) in (tuple, list)


def test_schema_that_is_not_used_for_decoding_changes_nothing() -> None:
    class Pairs:
        schema: ClassVar = {"columns": ["a", "b"]}

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return index, "b"

    assert shmload.debug.read(Pairs(), 5) == (5, "b")


@pytest.mark.parametrize(
    "wrap", [lambda d: Subset(d, [4, 5]), lambda d: ConcatDataset([d, d]), lambda d: Subset(ConcatDataset([d]), [5, 5])]
)
def test_wrapped_decoder_is_read_in_place(wrap: Callable[[Any], Any]) -> None:
    class Rows:
        schema: ClassVar[dict[str, Any]] = {"x": ("float32", (2,))}

        def __len__(self) -> int:
            return 10

        def read_into(self, index: int, out: Any) -> None:
            out["x"][...] = index % 5

    assert shmload.debug.read(wrap(Rows()), 1)["x"].tolist() == [float(wrap(range(10))[1] % 5)] * 2


def test_sample_without_a_schema_is_what_the_dataset_returns() -> None:
    class Plain:
        def __getitem__(self, index: int) -> Any:
            return {"n": sample_info().index, "draw": random.random(), "what": ("a", None, index)}

        def __len__(self) -> int:
            return 6

    before = random.getstate()
    found = [shmload.debug.read(Plain(), index) for index in (4, 4, 5)]
    assert random.getstate() == before
    assert found[0] == found[1] != found[2]
    assert (found[0]["n"], found[0]["what"]) == (4, ("a", None, 4))


def test_error_of_a_sample_that_is_read_alone_is_the_datasets() -> None:
    with pytest.raises(ZeroDivisionError):
        shmload.debug.read(DividedBy(), 0)


class DividedBy:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        return 1 / index


class Shown:
    """Keeps the text of its last `out`."""

    def __init__(self, **schema: Any) -> None:
        self.schema, self.text = schema, ""

    def __len__(self) -> int:
        return 3

    def read_into(self, index: int, out: Any) -> None:
        self.text = repr(out)
        for name in self.schema:
            out[name] = "a" if name == "text" else 1


def test_out_shows_its_fields_in_a_debugger() -> None:
    fixed = Shown(image=("uint8", (3, 2)), half=("bfloat16", (2,)), label="int64")
    shmload.debug.read(fixed, 1)
    assert fixed.text == "<out of image: uint8[3, 2], half: bfloat16[2], label: int64[]>"
    ragged = Shown(label="int64", text=str)
    shmload.debug.read(ragged, 1)
    assert ragged.text == "<out of label: int64[], text: str[]>"


@pytest.mark.parametrize("index", [-1, 3])
def test_index_outside_of_the_dataset_is_an_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"index must be 0 to 2, because the dataset has 3 samples; got {index}"):
        shmload.debug.read(Shown(label="int64"), index)
