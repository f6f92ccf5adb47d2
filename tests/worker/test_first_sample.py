"""The first sample that a reader decodes in place is checked: every field is written, and the sample is not returned."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import shmload.debug
from shmload import SampleError, ShmLoader, sample_rng
from shmload.engine import holders
from shmload.worker.first_sample import PATTERNS

WAYS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 0, "seed": 1},
    {"num_workers": 1},
    {"num_workers": 1, "seed": 1, "backend": "thread"},
    {"num_workers": 1, "seed": 1, "threads_per_worker": 2},
]
LARGE = 3 * 4096


class Rows:
    """A dataset whose `read_into` is given."""

    schema: ClassVar[Any] = {"x": ("float32", (4,)), "large": ("uint8", (LARGE,)), "half": ("bfloat16", (2,)), "label": "uint8"}

    def __init__(self, read: Callable[[int, Any], Any], schema: Any = None) -> None:
        self.read = read
        if schema is not None:
            self.schema = schema

    def __len__(self) -> int:
        return 12

    def read_into(self, index: int, out: Any) -> Any:
        return self.read(index, out)


class Batches(Rows):
    """The same by `read_batch_into`."""

    def read_batch_into(self, indices: Any, out: Any) -> Any:
        return self.read(indices[0], out)


def write(index: int, out: Any, *, but: str = "") -> None:
    for name in out:
        if name != but:
            out[name][...] = index


def error_of(dataset: Any, **options: Any) -> str:
    with pytest.raises((SampleError, TypeError)) as caught, ShmLoader(dataset, 4, **options) as loader:
        next(iter(loader))
    kind = TypeError if "return None" in str(caught.value) else SampleError
    assert isinstance(caught.value, kind)
    return str(caught.value)


@pytest.mark.parametrize("kind", [Rows, Batches])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_field_that_is_not_written_is_named(options: dict[str, Any], kind: Any) -> None:
    for name in kind.schema:
        message = error_of(kind(lambda index, out, name=name: write(index, out, but=name)), **options)
        method = "read_into" if kind is Rows else "read_batch_into"
        assert f"{kind.__name__}: {method} did not write field {name!r} of sample" in message
        assert f"write out[{name!r}] for every sample" in message
        if options == WAYS[0]:
            break  # the kinds of fields are the same code


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_row_of_a_batch_that_is_not_written_is_named(options: dict[str, Any]) -> None:
    class AllButOne(Batches):
        def read_batch_into(self, indices: Any, out: Any) -> None:
            for name in out:
                out[name][1:] = 7

    dataset = AllButOne(lambda index, out: None)
    message = error_of(dataset, **options, shuffle=False)
    assert "AllButOne: read_batch_into did not write field 'x' of sample 0, which" in message


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_debugging_checks_every_sample(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "_is_enabled", True)
    with (
        ShmLoader(Rows(lambda index, out: write(index, out, but="label" * (index == 9))), 4, **options) as loader,
        pytest.raises(SampleError, match="read_into did not write field 'label' of sample 9"),
    ):
        list(loader)


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize(
    ("returned", "kind"),
    [({"x": 1}, "a dict"), ((1, 2), "a tuple"), ([1], "a list"), (np.zeros(3), "an array"), (torch.zeros(3), "a tensor")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sample_that_is_returned_is_an_error(options: dict[str, Any], returned: Any, kind: str) -> None:
    def read(index: int, out: Any) -> Any:
        write(index, out)
        return returned

    message = error_of(Rows(read), **options)
    assert f"read_into must write into `out` and return None; it returned {kind}" in message


def test_sample_read_alone_is_checked() -> None:
    with pytest.raises(TypeError, match="it returned a dict"):
        shmload.debug.read(Rows(lambda index, out: {}), 3)
    with pytest.raises(SampleError, match="field 'label' of sample 3"):
        shmload.debug.read(Rows(lambda index, out: write(index, out, but="label")), 3)


def test_ragged_schema_has_its_fixed_fields_checked() -> None:
    schema = {"label": "int64", "text": str}

    def read(index: int, out: Any) -> None:
        out["text"] = "a"

    assert "did not write field 'label'" in error_of(Rows(read, schema), num_workers=0)


def test_readers_through_subsets_and_concatenations_are_checked() -> None:
    forgetful = Rows(lambda index, out: write(index, out, but="x"))
    subset = torch.utils.data.Subset[Any](forgetful, [5, 6, 7, 8])  # type: ignore[arg-type]  # torch asks for no base class
    for dataset in (subset, torch.utils.data.ConcatDataset([forgetful, forgetful])):  # type: ignore[list-item]  # as above
        assert "Rows: read_into did not write field 'x'" in error_of(dataset, num_workers=0)
    returning = torch.utils.data.ConcatDataset([Rows(lambda index, out: {})])  # type: ignore[list-item]  # as above
    assert "it returned a dict" in error_of(returning, num_workers=0)


@pytest.mark.parametrize("kind", [Rows, Batches])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_data_equal_to_a_pattern_are_delivered(pattern: int, kind: Any) -> None:
    calls = []

    def read(index: int, out: Any) -> None:
        calls.append(index)
        for name in ("x", "large", "half", "label"):
            rows = torch.as_tensor(out[name])
            rows.reshape(-1).view(torch.uint8).fill_(pattern)

    with ShmLoader(kind(read), 4, num_workers=0) as loader:
        for batch in loader:
            assert all((rows.reshape(-1).view(torch.uint8) == pattern).all() for rows in batch.values())
    num_reads = 12 if kind is Rows else 3
    assert len(calls) == num_reads + (pattern == PATTERNS[0])  # read twice only where the first read is in doubt


def test_large_field_written_only_in_its_middle_is_written() -> None:
    def read(index: int, out: Any) -> None:
        write(index, out, but="large")
        out["large"][LARGE // 2] = index

    with ShmLoader(Rows(read), 4, num_workers=0) as loader:
        assert next(iter(loader))["large"][:, LARGE // 2].tolist() == [0, 1, 2, 3]


def test_row_that_is_zeroed_first_need_not_be_written() -> None:
    class Zeroed(dict[str, Any]):
        zero_fill = True

    with ShmLoader(Rows(lambda index, out: None, Zeroed(x="int64")), 4, num_workers=0) as loader:
        assert next(iter(loader))["x"].tolist() == [0] * 4


def test_array_of_the_row_may_be_returned() -> None:
    def read(index: int, out: Any) -> Any:
        write(index, out)
        return np.multiply(np.float32(index), np.ones(4, np.float32), out=out["x"])

    with ShmLoader(Rows(read), 4, num_workers=0) as loader:
        assert next(iter(loader))["x"][:, 0].tolist() == [0, 1, 2, 3]


def test_returned_samples_are_not_skipped_silently() -> None:
    options: dict[str, Any] = {"seed": 1, "on_error": "skip", "max_bad": 100}
    with ShmLoader(Rows(lambda index, out: {}), 4, num_workers=1, **options) as loader:
        assert list(loader) == []
        assert loader.stats()["num_bad_samples"] == 12


class Drawing:
    """Draws from every kind of generator, and writes data that equals the first pattern."""

    schema: ClassVar = {"flag": "uint8", "draws": ("float64", (6,))}

    def __init__(self, pattern: int) -> None:
        self.pattern, self.own = pattern, [random.Random(1), np.random.default_rng(2), np.random.RandomState(3), torch.Generator()]

    def __len__(self) -> int:
        return 8

    def read_into(self, index: int, out: Any) -> None:
        out["flag"] = self.pattern
        python, generator, legacy, torchs = self.own
        own = python.random(), generator.random() + legacy.random_sample(), torch.rand((), generator=torchs).item()
        out["draws"] = random.random(), np.random.random(), torch.rand(()).item() + sample_rng().random(), *own


@pytest.mark.parametrize("options", WAYS[:4], ids=str)
def test_second_read_disturbs_no_random_numbers(options: dict[str, Any]) -> None:
    found = []
    for pattern in (PATTERNS[0], 0):
        torch.manual_seed(5)
        random.seed(6)
        np.random.seed(7)
        with ShmLoader(Drawing(pattern), 4, **options) as loader:
            found.append(torch.cat([batch["draws"] for batch in loader]))
    assert torch.equal(*found)
