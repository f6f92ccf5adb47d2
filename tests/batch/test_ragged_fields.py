"""Ragged fields: how they are declared, their errors, decoders that write them in place, and the memory they use."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, default_collate

from shmload import Jagged, Padded, SampleError, ShmLoader
from shmload._core.filler import WorkerRing
from shmload._core.trainer import TrainerRing, control_nbytes, live_leases
from shmload.engine.ring_memory import RingMemory
from shmload.ray.actor_ring import private_memory
from tests.batch.ragged_kit import Opaque, Samples, assert_same, reference
from tests.growing.growing_kit import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # there may be fewer cores than workers
MODES = ["list", "pad", "nested", "jagged"]
SIZES = {"order_capacity": 4096, "text_capacity": 1024, "layout_capacity": 1024}


def loader_of(samples: list[Any], batch_size: int = 2, **options: Any) -> ShmLoader[Any]:
    return ShmLoader(Samples(samples), batch_size, **{"seed": 1, "num_workers": 1, **options})


def first(loader: ShmLoader[Any]) -> Any:
    with loader:
        return next(iter(loader))


# ---------------------------------------------------------------- declaring


@pytest.mark.parametrize("num_workers", [0, 1])
def test_torch_mode_has_ragged_fields_only_on_request(num_workers: int) -> None:
    samples = [np.ones(1), np.ones(2)]
    with pytest.raises(RuntimeError, match="equal size"):
        first(loader_of(samples, seed=None, num_workers=num_workers))
    for ragged in ("list", {"data": "list"}):
        batch = first(loader_of(samples, seed=None, num_workers=num_workers, ragged=ragged))
        assert [len(row) for row in batch] == [1, 2]


def test_only_list_mode_depends_on_the_batch() -> None:
    samples = [{"x": np.ones(n), "y": n} for n in (2, 2, 1, 3)]
    with loader_of(samples) as loader:
        even, uneven = loader
    assert isinstance(even["x"], torch.Tensor)
    assert [len(row) for row in uneven["x"]] == [1, 3]
    with loader_of(samples, ragged="pad") as loader:
        assert all(isinstance(batch["x"], Padded) and isinstance(batch["y"], torch.Tensor) for batch in loader)


LISTS = {
    "numbers": [[7, 8], [5, 6], [1, 2, 3], [4], [9], [10]],
    "text": [["a", "b"], ["c"], ["d", "e"], ["f", "g"], ["h"], ["i"]],
    "lists": [[[1], [2, 3]], [], [[4], [5]], [[6], [7]], [[8]], [[9]]],
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("seed", [None, 1], ids=["torch mode", "seed mode"])
@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("asked", ["samples, by name", "a field, by name", "a field, by a mode for all"])
def test_lists_are_rows_in_every_batch(kind: str, asked: str, seed: int | None, num_workers: int) -> None:
    rows = LISTS[kind]
    is_field = asked != "samples, by name"
    samples = [{"x": row} for row in rows] if is_field else rows
    ragged: Any = "list" if "mode" in asked else {"x" if is_field else "data": "list"}
    with loader_of(samples, seed=seed, num_workers=num_workers, ragged=ragged) as loader:
        batches = [batch["x"] if is_field else batch for batch in loader]
    assert rows == [row.tolist() if isinstance(row, torch.Tensor) else row for batch in batches for row in batch]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("mode", ["pad", "nested", "jagged"])
@pytest.mark.parametrize("kind", ["numbers", "text"])
def test_lists_of_joined_fields_have_one_structure(kind: str, mode: str, num_workers: int) -> None:
    with loader_of([{"x": row} for row in LISTS[kind]], num_workers=num_workers, ragged=mode) as loader:
        types = {type(batch["x"]) for batch in loader}
    assert len(types) == 1
    assert (types == {list}) == (kind == "text")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_without_ragged_lists_of_one_length_are_transposed_and_others_refused(num_workers: int) -> None:
    samples = [{"x": row, "y": "a"} for row in LISTS["numbers"] if len(row) == 2]
    assert_same(default_collate(samples), first(loader_of(samples, len(samples), num_workers=num_workers)))
    words = r"field 'x' has sequences of different lengths \(3 in row 0, 1 in row 1\).* give ragged=\{'x': 'list'\}"
    with pytest.raises(SampleError, match=words):
        first(loader_of([{"x": row} for row in LISTS["numbers"][2:]], num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_tuples_are_containers_unless_they_are_named(num_workers: int) -> None:
    samples = [{"size": (1, 2), "tokens": [1]}, {"size": (3, 4), "tokens": [2]}]
    for mode in ("list", "pad"):
        batch = first(loader_of(samples, num_workers=num_workers, ragged=mode))
        assert [column.tolist() for column in batch["size"]] == [[1, 3], [2, 4]]
    batch = first(loader_of(samples, num_workers=num_workers, ragged={"size": "list"}))
    assert [row.tolist() for row in batch["size"]] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("tuples", [{0}, {1}, {4}, {0, 2, 4}, set(range(6))], ids=str)
def test_lists_are_rows_also_after_a_batch_of_tuples(tuples: set[int], num_workers: int) -> None:
    samples = [{"box": (i, 9) if i in tuples else [i, 9]} for i in range(6)]
    with ShmLoader(Samples(samples), 2, num_workers=num_workers, ragged="list") as loader:
        got = [[part.tolist() for part in batch["box"]] for batch in loader]
    # the first sample of a batch decides
    assert got == [[[i, i + 1], [9, 9]] if i in tuples else [[i, 9], [i + 1, 9]] for i in (0, 2, 4)]


def test_mapping_of_ragged_fields_to_modes() -> None:
    samples = [{"x": np.ones(n), "d": {"y": np.ones(n)}, "z": np.ones(2)} for n in (2, 3)]
    batch = first(loader_of(samples, ragged={"x": "pad", "d.y": "jagged"}))
    assert (type(batch["x"]), type(batch["d"]["y"]), type(batch["z"])) == (Padded, Jagged, torch.Tensor)
    assert batch["d"]["y"].lengths.tolist() == [2, 3]


class Declared(Samples):
    """Samples read by __getitem__, with a schema that declares ragged fields."""

    schema: ClassVar = {"x": ("float64", (None,)), "y": ("float64", (2,))}


def test_schema_declares_ragged_fields_of_samples() -> None:
    dataset = Declared([{"x": np.ones(2), "y": np.ones(2)}] * 2)
    for mode, kind in {"list": list, "pad": Padded, "jagged": Jagged}.items():
        batch = first(ShmLoader(dataset, 2, num_workers=1, ragged=mode))
        assert (type(batch["x"]), type(batch["y"])) == (kind, torch.Tensor)


def test_field_that_the_schema_of_a_decoder_lacks_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"^ragged names 'y', but the schema of Decoder has the fields 'x'$"):
        ShmLoader(Decoder(), batch_size=2, ragged={"y": "pad"})


class Decoder:
    schema: ClassVar[Any] = {"x": ("int64", (None,))}

    def __len__(self) -> int:
        return 4

    def read_into(self, index: int, out: Any) -> None:
        out["x"] = np.arange(index)


def test_unknown_mode_is_an_error() -> None:
    for wrong in ("padded", {"x": "stack"}):
        with pytest.raises(ValueError, match='ragged is "list", "pad", "nested", "jagged", or a mapping'):
            loader_of([1], ragged=wrong)


def test_nested_tensor_needs_a_ragged_first_dimension() -> None:
    class Wide(Samples):
        schema: ClassVar = {"x": ("float64", (2, None))}

    for mode in ("nested", "jagged"):
        with pytest.raises(ValueError, match=rf"ragged=\"{mode}\" needs the first dimension.*'x' .*\(2, None\)"):
            ShmLoader(Wide([1]), ragged=mode)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("samples", "ragged", "words"),
    [
        ([np.ones((1, 2)), np.ones((1, 3))], "pad", r"'data' may differ in dimension 0 only; row 0 .* \(1, 2\), row 1 .*3"),
        ([np.ones(1), np.ones((1, 3))], "jagged", "different numbers of dimensions"),
        ([np.ones(()), np.ones(3)], "pad", "different numbers of dimensions"),
        ([{"x": np.ones(1), "y": np.ones(1)}, {"x": np.ones(1), "y": np.ones(2)}], {"x": "pad"}, "'y' .*not declared ragged"),
        ([{"x": 1}] * 2, {"w": "pad"}, "ragged names 'w', but samples have arrays only in no field"),
        ([{"x": 1}] * 2, {"data": "pad"}, "ragged names 'data', but samples have arrays only in no field"),
        ([["a"], ["b", "c"]], "list", "field 'data' has sequences of different lengths .1 in row 0, 2 in row 1."),
        ([{"x": (1,)}, {"x": (1, 2)}], "list", "field 'x' has sequences of different lengths"),
        ([{"x": [np.ones(1)]}, {"x": [None, 2]}], "pad", "field 'x' has sequences of different lengths"),
        ([{"x": None}] * 2, {"x": "pad"}, "ragged names 'x', but samples have arrays only in no field"),
        ([{"x": {"y": np.ones(2)}}] * 2, {"x": "list"}, "ragged names 'x', but samples have arrays only in 'x.y'"),
        ([{"x": 1}, {"y": 1}], "list", r"row 1 of the batch has the keys \['y'\], and row 0 has \['x'\]"),
        ([lambda: 0] * 2, "list", "function in the batch cannot be pickled"),
        ([{"x": np.ones(2)}, {"x": None}], {"x": "pad"}, r"rows of field 'x': row 0 is of type ndarray, float64, row 1 is None"),
        ([None, [1, 2]], "nested", "rows of field 'data': row 0 is None, row 1 is of type list"),
        ([[1, 2], [1, "a"]], "pad", "cannot join the rows of field 'data'"),
        ([[1 << 70], [1, 2]], "pad", "row 0 is of type list with an integer beyond int64, row 1 is of type list"),
        ([np.ones(2, ">f4"), np.ones(1, ">f4")], "pad", "row 0 is of type ndarray, >f4, and has the other byte order"),
        ([torch.ones(n, dtype=torch.complex64).conj() for n in (2, 1)], "nested", "complex64, and is conjugated or negated lazily"),
        ([torch.ones(n, dtype=torch.complex64).conj().imag for n in (2, 1)], "pad", "float32, and is conjugated or negated lazily"),
        ([torch.ones(2, requires_grad=True), torch.ones(1)], "jagged", "row 0 is of type Tensor, float32, and requires grad"),
        ([torch.ones(2, dtype=torch.uint16), torch.ones(1, dtype=torch.int64)], "pad", "row 0 .* uint16, row 1 .* int64"),
    ],
)
def test_impossible_combinations_are_errors(samples: list[Any], ragged: Any, words: str, num_workers: int) -> None:
    with pytest.raises(SampleError, match=words):
        first(loader_of(samples, ragged=ragged, shuffle=False, num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("values", "mode"),
    [
        ([np.ones(2, np.float32), np.arange(3)], "list"),
        ([torch.ones(2), np.ones(3)], "list"),
        ([np.ones(2), None], "list"),
        ([["a"], ["b", "c"]], "list"),
        ([1, 2], "pad"),
        ([np.float32(1), np.float32(2)], "pad"),
        ([1, 2.5], "pad"),
    ],
)
def test_field_named_in_ragged_is_delivered_as_by_the_mode_for_all_fields(values: list[Any], mode: str, num_workers: int) -> None:
    batches = [
        first(loader_of([{"x": value} for value in values], ragged=ragged, shuffle=False, num_workers=num_workers))
        for ragged in (mode, {"x": mode})
    ]
    assert_same(*batches)


def test_scalar_samples_may_be_named_in_ragged() -> None:
    assert_same(torch.tensor([1, 2]), first(loader_of([1, 2], ragged={"data": "pad"}, shuffle=False, num_workers=0)))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("mode", ["pad", "nested", "jagged"])
@pytest.mark.parametrize(
    "samples",
    [
        [np.ones(2, np.float32), np.arange(3)],
        [torch.ones(2, dtype=torch.int8), torch.ones(1, dtype=torch.uint8)],
        [torch.ones(2), np.arange(1.0)],
        [np.arange(1), torch.ones(2)],
    ],
    ids=["arrays", "tensors", "tensor first", "array first"],
)
def test_joined_rows_of_several_dtypes_have_the_dtype_of_torchs_collate(samples: list[Any], mode: str, num_workers: int) -> None:
    expected = torch.stack([torch.as_tensor(row)[:1] for row in samples]).dtype
    batch = first(loader_of(samples, ragged=mode, shuffle=False, num_workers=num_workers))
    values = batch.values() if mode == "nested" else batch.values
    assert values.dtype == expected
    assert_same(reference([torch.as_tensor(row) for row in samples], mode), batch)


def test_iterable_dataset_can_have_ragged_fields() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([np.ones(n) for n in (1, 2, 3)])

    for num_workers in (0, 1):
        with ShmLoader(Stream(), 2, num_workers=num_workers, ragged="pad") as loader:
            batches = list(loader)
        assert [batch.lengths.tolist() for batch in batches] == [[1, 2], [3]]


# ---------------------------------------------------------------- written in place

LENGTHS = [3, 0, 5, 1, 2, 4, 900, 2, 1, 0]


class Decoded:
    """A dataset that writes ragged fields in place: numpy and torch-only dtypes, two ragged dimensions, and text."""

    schema: ClassVar = {
        "values": ("float32", (None, 2)),
        "half": (torch.bfloat16, (None,)),
        "image": ("uint8", (None, None)),
        "label": "int64",
        "caption": str,
    }

    def __len__(self) -> int:
        return len(LENGTHS)

    def sample(self, index: int) -> dict[str, Any]:
        n = LENGTHS[index]
        return {
            "values": np.full((n, 2), index, np.float32),
            "half": torch.full((n,), index, dtype=torch.bfloat16),
            "image": np.full((n, 3), index, np.uint8),
            "label": index,
            "caption": f"№ {index}",
        }

    def read_into(self, index: int, out: Any) -> None:
        sample = self.sample(index)
        n = LENGTHS[index]
        out.reserve("values", n)[:] = sample["values"]
        out["half"] = sample["half"]
        out.reserve("image", (n, 3))[:] = sample["image"]
        out["label"] = index
        out["caption"] = sample["caption"]


class InBatches(Decoded):
    read_into = None  # type: ignore[assignment]  # only whole batches

    def read_batch_into(self, indices: Any, out: Any) -> None:
        samples = [self.sample(int(i)) for i in indices]
        n = np.array([LENGTHS[i] for i in indices])
        out.reserve("values", n)[:] = np.concatenate([s["values"].reshape(-1) for s in samples])
        out["half"] = [s["half"] for s in samples]
        out.reserve("image", [(k, 3) for k in n])[:] = np.concatenate([s["image"].reshape(-1) for s in samples])
        out["label"] = indices
        out["caption"] = [s["caption"] for s in samples]


def expected_of(indices: list[int], mode: str) -> dict[str, Any]:
    samples = [Decoded().sample(i) for i in indices]
    batch = reference(samples, mode)
    assert isinstance(batch, dict)
    if mode == "list":
        for name in ("values", "half", "image"):  # declared fields are lists even if their lengths are equal
            batch[name] = [torch.as_tensor(s[name]) for s in samples]
    elif mode == "pad":
        batch["image"] = Padded(batch["image"].values, torch.tensor([s["image"].shape for s in samples]))
    return batch


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("mode", ["list", "pad"])
@pytest.mark.parametrize("kind", [Decoded, InBatches])
def test_decoder_writes_ragged_fields_in_place(kind: Any, mode: str, num_workers: int) -> None:
    with ShmLoader(kind(), 2, num_workers=num_workers, ragged=mode, seed=None) as loader:
        for _ in range(2):  # the second epoch reserves what the first one needed
            for i, batch in enumerate(loader):
                assert_same(expected_of([2 * i, 2 * i + 1], mode), batch)


class Flat(Decoded):
    schema: ClassVar = {"values": ("float32", (None, 2)), "label": "int64"}

    def read_into(self, index: int, out: Any) -> None:
        out.reserve("values", LENGTHS[index])[:] = index
        out["label"] = index


@pytest.mark.parametrize("mode", ["nested", "jagged"])
def test_ragged_fields_written_in_place_are_delivered_concatenated(mode: str) -> None:
    with ShmLoader(Flat(), 5, num_workers=1, ragged=mode) as loader:
        for _ in range(2):
            for i, batch in enumerate(loader):
                samples = [{"values": np.full((LENGTHS[k], 2), k, np.float32), "label": k} for k in range(5 * i, 5 * i + 5)]
                assert_same(reference(samples, mode), batch)


class SingleField:
    """A dataset of a single field, which has no rows of fixed size."""

    batch_type = "single"

    def __init__(self, spec: Any) -> None:
        self.schema = {"x": spec}

    def __len__(self) -> int:
        return 4

    def read_into(self, index: int, out: Any) -> None:
        out["x"] = np.array(["a", "é", "", "b"])[index] if self.schema["x"] is str else np.arange(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_single_field_is_the_batch(num_workers: int) -> None:
    with ShmLoader(SingleField(("int64", (None,))), 4, num_workers=num_workers) as loader:
        (rows,) = loader
    assert [row.tolist() for row in rows] == [[], [0], [0, 1], [0, 1, 2]]
    with ShmLoader(SingleField(("int64", (None,))), 4, num_workers=num_workers, ragged="pad") as loader:
        (padded,) = loader
    assert padded.lengths.tolist() == [0, 1, 2, 3]
    with ShmLoader(SingleField(str), 4, num_workers=num_workers) as loader:
        (texts,) = loader
    assert texts == ["a", "é", "", "b"]
    assert {*map(type, texts)} == {str}  # including numpy strings


@pytest.mark.parametrize("kind", [Flat, InBatches])
def test_wrappers_forward_ragged_fields(kind: Any) -> None:
    whole = first(ShmLoader(kind(), 4, num_workers=1))
    assert_same(whole, first(ShmLoader(Subset(kind(), [0, 1, 2, 3]), 4, num_workers=1)))
    if kind is Flat:
        assert_same(whole, first(ShmLoader(ConcatDataset([kind(), kind()]), 4, num_workers=1)))


class CustomWriter(Flat):
    """A dataset that writes with a given function."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def read_into(self, index: int, out: Any) -> None:
        self.task(out)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("task", "error", "words"),
    [
        (lambda out: out.update(), AttributeError, "update"),
        (lambda out: None, SampleError, "did not write field 'label' of sample 0"),
        (lambda out: out.__setitem__("label", 1), SampleError, r"did not write field 'values': .* out.reserve\('values', n\)"),
        (lambda out: out.reserve("label", 1), KeyError, "'label'.*: not a ragged field of the schema; those are 'values'"),
        (lambda out: out.reserve("values", -1), ValueError, r"an extent of 0 or more for each None of the shape \(None, 2\)"),
        (lambda out: out.reserve("values", (1, 2)), ValueError, r"got \(1, 2\)"),
        (lambda out: out["values"], KeyError, "a ragged field has no view before"),
        (lambda out: out.__setitem__("values", np.ones((2, 3))), SampleError, r"shape \(None, 2\) .* a row of \(2, 3\)"),
        (lambda out: [out.__setitem__("label", 1), *(out.reserve("values", 1) for _ in "ab")], SampleError, "'values'"),
    ],
)
def test_invalid_writes_of_a_decoder_are_errors(task: Any, error: type[Exception], words: str, num_workers: int) -> None:
    with pytest.raises(error, match=words):
        first(ShmLoader(CustomWriter(task), 2, num_workers=num_workers))


def test_reserve_without_ragged_fields_is_an_error() -> None:
    class Fixed(CustomWriter):
        schema: ClassVar = {"label": "int64"}

    with pytest.raises(KeyError, match="no ragged field"):
        first(ShmLoader(Fixed(lambda out: out.reserve("label", 1)), 2, num_workers=1))


def test_row_of_text_is_one_value() -> None:
    class Texts(CustomWriter):
        schema: ClassVar = {"label": (str, (2,))}

    with pytest.raises(ValueError, match=r"'label' is text of shape \(2,\)"):
        first(ShmLoader(Texts(None), 2, num_workers=1))


def test_value_that_is_not_text_is_an_error() -> None:
    class Texts(CustomWriter):
        schema: ClassVar = {"label": str}

    with pytest.raises(SampleError, match=r"field 'label' is str in the schema, and bytearray.* was written; write a str"):
        first(ShmLoader(Texts(lambda out: out.__setitem__("label", bytearray(b"x"))), 2, num_workers=0))


class ZeroFilled(dict[str, Any]):
    zero_fill = True


class Lazy(Flat):
    """A dataset that writes only the first element of its rows."""

    schema: ClassVar = ZeroFilled(x=("int64", (None,)))

    def read_into(self, index: int, out: Any) -> None:
        out.reserve("x", 9)[0] = index + 1


@pytest.mark.parametrize("mode", ["list", "pad", "jagged"])
def test_zero_fill_clears_ragged_rows_in_every_mode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # possible content of memory that is not cleared
    monkeypatch.setattr(np, "empty", lambda shape, dtype: np.full(shape, 255, dtype))
    for number, batch in enumerate(ShmLoader(Lazy(), 2, seed=1, ragged=mode)):  # arenas exist from the second batch on
        rows = batch["x"] if mode == "list" else batch["x"].values.view(2, 9)
        assert [row.tolist() for row in rows] == [[2 * number + place, *[0] * 8] for place in (1, 2)]


def test_bad_samples_of_a_decoder_of_ragged_fields_are_skipped() -> None:
    class Odd(Flat):
        def read_into(self, index: int, out: Any) -> None:
            if index % 2:
                raise ValueError("odd")
            super().read_into(index, out)

    for num_workers in (0, 1):
        with ShmLoader(Odd(), 4, num_workers=num_workers, on_error="skip", ragged="jagged") as loader:
            assert [batch["label"].tolist() for batch in loader] == [[0, 2], [4, 6], [8]]


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("mode", MODES)
def test_delivered_fields_are_in_the_slot_and_keep_it_leased(mode: str) -> None:
    gc.collect()
    before = len(live_leases())
    with loader_of([{"x": np.full(n, n)} for n in (2, 3, 4, 5)], ragged=mode) as loader:
        iterator = iter(loader)
        field = next(iterator)["x"]
        if mode == "list":
            held = field[1][:1]
        else:
            held = (field.values() if mode == "nested" else field.values)[1:]
        del field
        assert len(live_leases()) == before + 1
        value = held.clone()
        list(iterator)
        assert torch.equal(held, value)
        del held
        assert len(live_leases()) == before


def test_trainer_unpickles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [{"s": f"{i}", "x": np.ones(i), "l": [i] * i, "n": None, "b": b"x" * i} for i in range(8)]
    with loader_of(samples, ragged="list") as loader:
        iterator = iter(loader)
        next(iterator)

        def refuse(*args: Any, **options: Any) -> Any:
            raise AssertionError("pickle in the trainer")

        for name in ("loads", "load", "Unpickler"):
            monkeypatch.setattr(pickle, name, refuse)
        assert [batch["s"] for batch in iterator] != []
        monkeypatch.undo()


def test_batch_larger_than_its_slot_enlarges_later_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [{"x": np.full(10 ** (1 + i // 8), i)} for i in range(48)]
    asked = []
    answer_need = RingMemory.answer_need
    monkeypatch.setattr(RingMemory, "answer_need", lambda self, slot: (asked.append(slot), answer_need(self, slot)))
    with loader_of(samples, 4, shuffle=False, ragged="list") as loader:
        for _ in range(10):
            for i, batch in enumerate(loader):
                for k, row in enumerate(batch["x"]):
                    assert row.tolist()[:3] == [4 * i + k] * 3
                    assert len(row) == len(samples[4 * i + k]["x"])
    assert 6 <= len(asked) <= 6 * loader._builder.last.num_slots  # type: ignore[union-attr]  # each slot once per size


def test_rows_that_never_fit_are_not_retried_forever() -> None:
    samples = [{"x": np.ones(i % 7)} for i in range(400)]
    with loader_of(samples, 8, num_workers=2) as loader:
        for _ in range(3):
            for _batch in loader:
                pass
        assert loader.stats()["num_repacked"] < 30


class ReadTogether(Samples):
    """A dataset in which reading samples 4 and 8 blocks until both are being read."""

    def __init__(self, samples: list[Any]) -> None:
        super().__init__(samples)
        self._begun = {index: multiprocessing.get_context("fork").Event() for index in (4, 8)}

    def __getitem__(self, index: int) -> Any:
        if index in self._begun:
            self._begun[index].set()
            assert all(begun.wait(60) for begun in self._begun.values()), "a single worker read both"
        return super().__getitem__(index)


def test_batches_ordered_before_text_was_detected_are_read_by_several_workers() -> None:
    samples = ReadTogether([str(i) for i in range(12)])
    with ShmLoader(samples, 4, seed=1, num_workers=2, prefetch_factor=2, multiprocessing_context="fork") as loader:
        assert [text for batch in loader for text in batch] == samples.samples


def test_after_many_batches_do_not_fit_as_rows_pending_ones_are_packed() -> None:
    samples = [{"x": np.full(1 + i, i)} for i in range(48)]
    with loader_of(samples, 4, shuffle=False, prefetch_factor=4) as loader:
        batches = iter(loader)
        next(batches)
        wait_until(lambda: loader.stats()["slots"]["filling"] == 0, "the worker to have tried all batches")
        assert sum(1 for _ in batches) == 11
        assert loader.stats()["num_repacked"] == 2


def test_copied_out_batches_are_independent_of_the_slot() -> None:
    samples = [{"x": np.full(i % 3, i), "s": str(i), "o": Opaque(i)} for i in range(60)]
    for mode in MODES:
        with (
            pytest.warns(UserWarning, match="copied to private memory"),
            loader_of(samples, 2, ragged=mode, shuffle=False) as loader,
        ):
            batches = list(loader)
        for i, batch in enumerate(batches):
            assert_same(reference(samples[2 * i : 2 * i + 2], mode), batch)


def test_text_that_no_longer_fits_after_the_arenas_moves_the_batch() -> None:
    class Growing(Flat):
        schema: ClassVar = {"values": ("float32", (None, 2)), "text": str}

        def __len__(self) -> int:
            return 24

        def read_into(self, index: int, out: Any) -> None:
            out.reserve("values", 3)[:] = index
            out["text"] = "x" * (index * index * 40)

    with ShmLoader(Growing(), 2, num_workers=1, ragged="jagged") as loader:
        for i, batch in enumerate(loader):
            assert batch["values"].values[:, 0].tolist() == [2 * i] * 3 + [2 * i + 1] * 3
            assert [len(text) for text in batch["text"]] == [k * k * 40 for k in (2 * i, 2 * i + 1)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_schema_with_text_but_no_ragged_field_needs_no_mode(num_workers: int) -> None:
    class Captions:
        schema: ClassVar = {"caption": str, "x": ("float32", (2,))}

        def __len__(self) -> int:
            return 4

        def read_into(self, index: int, out: Any) -> None:
            out["caption"] = f"№ {index}"
            out["x"][:] = index

    with ShmLoader(Captions(), 2, num_workers=num_workers) as loader:  # type: ignore[arg-type]  # a duck-typed dataset
        assert [batch["caption"] for batch in loader] == [["№ 0", "№ 1"], ["№ 2", "№ 3"]]


class _Captions:
    """A dataset of text without ragged fields: its batches have no rows at known offsets."""

    schema: ClassVar = {"caption": str, "x": "int64"}

    def __init__(self, log: str) -> None:
        self.log = log

    def __len__(self) -> int:
        return 48

    def read_batch_into(self, indices: Any, out: Any) -> None:
        with open(self.log, "a") as log:
            log.write(f"{len(indices)}\n")
        out["caption"] = [f"№ {index}" for index in indices]
        out["x"][...] = indices


def test_batch_of_text_is_read_once_by_one_of_several_workers(tmp_path: Path) -> None:
    """Fails if batches are ordered in chunks, because then several workers write the complete batch into one slot."""
    log = tmp_path / "log"
    with ShmLoader(_Captions(str(log)), 6, shuffle=True, num_workers=3, seed=1) as loader:  # type: ignore[arg-type]  # duck-typed
        batches = [(batch["x"].tolist(), batch["caption"]) for batch in loader]
    assert sorted(index for indices, _ in batches for index in indices) == list(range(48))
    assert all(captions == [f"№ {index}" for index in indices] for indices, captions in batches)
    assert len(batches) <= len(log.read_text().split()) <= 2 * len(batches)  # batches of the next epoch are prefetched


def test_packed_batch_with_several_chunks_is_an_error() -> None:
    ring = TrainerRing(private_memory(control_nbytes(1, 2, **SIZES)), num_slots=1, num_workers=2, **SIZES)
    indices = np.arange(4)
    with pytest.raises(ValueError, match=r"a packed batch must be written by one worker, in an order of 1 chunk, got 2"):
        ring.publish(ring.hold(), epoch=0, step=0, indices=indices, nrows=4, nchunks=2, is_packed=True)


def test_writing_a_packed_batch_in_chunks_is_an_error() -> None:
    control = private_memory(control_nbytes(1, 2, **SIZES))
    trainer = TrainerRing(control, num_slots=1, num_workers=2, **SIZES)
    trainer.publish(trainer.hold(), epoch=0, step=0, indices=np.arange(4), nrows=4, nchunks=2)
    worker = WorkerRing(control, 0)
    assert worker.claim()
    with pytest.raises(ValueError, match="divided into 2 chunks"):
        worker.set_used(8)
