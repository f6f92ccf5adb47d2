"""The fluent methods behave as those of webdataset 1.0.2 over the same shards."""

from __future__ import annotations

import gc
import gzip
import io
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

import shmload
from shmload.errors import ShardCorrupt
from shmload.formats import TarWriter
from shmload.remote import (
    Continue,
    RemoteDataset,
    ignore_and_continue,
    ignore_and_stop,
    reraise_exception,
    warn_and_continue,
    warn_and_stop,
)
from tests.remote.remote_kit import label, write_plain

SPECS = [
    "l8",
    "rgb8",
    "rgba8",
    "l",
    "rgb",
    "rgba",
    "torchl8",
    "torchrgb8",
    "torchrgba8",
    "torchl",
    "torchrgb",
    "torch",
    "torchrgba",
    "pill",
    "pil",
    "pilrgb",
    "pilrgba",
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns two shards with images, labels and one member for each decoder."""
    folder = tmp_path_factory.mktemp("fluent")
    tensors = io.BytesIO()
    torch.save({"a": torch.arange(3)}, tensors)
    for shard in range(2):
        with TarWriter(folder / f"x-{shard}.tar") as writer:
            for number in range(4):
                picture = np.random.default_rng(number).integers(0, 255, (6, 5, 3), np.uint8)
                writer.write(
                    {
                        "__key__": f"a/{shard}{number}",
                        "jpg" if number % 2 else "png": Image.fromarray(picture),
                        "cls": 10 * shard + number,
                        "txt": f"text {number}",
                        "json": {"n": number},
                        "seg.npy": np.arange(number + 1),
                        "meta.json.gz": gzip.compress(json.dumps([number]).encode()),
                        "raw": b"\x00\x01",
                    }
                )
    return folder


def ours(shards: Path) -> RemoteDataset:
    return RemoteDataset.from_urls(str(shards), shuffle=False)


def theirs(shards: Path) -> Any:
    return webdataset.WebDataset(sorted(map(str, shards.glob("*.tar"))), shardshuffle=False, empty_check=False)


def comparable(value: Any) -> Any:
    if isinstance(value, Image.Image):
        return value.mode, value.size, value.tobytes()
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {name: comparable(v) for name, v in value.items() if name not in ("__url__", "__local_path__")}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [comparable(v) for v in value]
    return type(value).__name__, value


def of_webdataset(build: Any, data: Any) -> list[Any]:
    """Returns webdataset's items. webdataset leaves files open, so its ResourceWarning is ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        found = [comparable(item) for item in build(data)]
        del data
        gc.collect()
    return found


def same(shards: Path, build: Any) -> list[Any]:
    """Asserts that both libraries yield the same items for the same calls, and returns them."""
    mine = [comparable(item) for item in build(ours(shards))]
    assert of_webdataset(build, theirs(shards)) == mine
    return mine


@pytest.mark.parametrize("spec", SPECS)
def test_every_image_spec_decodes_as_webdataset(shards: Path, spec: str) -> None:
    assert len(same(shards, lambda data: data.decode(spec).to_tuple("jpg;png", "cls"))) == 8


def test_all_other_extensions_decode_as_webdataset(shards: Path) -> None:
    assert len(same(shards, lambda data: data.decode())) == 8


def double(value: int) -> int:
    return 2 * value


def is_even(sample: dict[str, Any]) -> bool:
    return bool(sample["cls"] % 2 == 0)


def with_only_label(sample: dict[str, Any]) -> dict[str, Any]:
    return {"label": sample["cls"]}


def only_even(sample: dict[str, Any]) -> dict[str, Any] | None:
    return sample if is_even(sample) else None


def upper(key: str, data: bytes) -> Any:
    return data.decode().upper() if key == ".txt" else None


BUILDS = {
    "to_tuple in one string": lambda data: data.decode().to_tuple("cls txt"),
    "to_tuple without what is missing": lambda data: data.decode().to_tuple("cls", "no", missing_is_error=False),
    "map_tuple": lambda data: data.decode().to_tuple("cls", "txt").map_tuple(double),
    "map_tuple over None": lambda data: data.decode().to_tuple("cls", "txt").map_tuple(None, str.upper, double),
    "map_dict": lambda data: data.decode().map_dict(cls=double),
    "map keeps the key": lambda data: data.decode().map(with_only_label),
    "map to None drops": lambda data: data.decode().map(only_even),
    "rename": lambda data: data.decode().rename(label="no;cls", text="txt"),
    "rename alone": lambda data: data.decode().rename(label="cls", keep=False),
    "select": lambda data: data.decode().select(is_even),
    "slice": lambda data: data.decode().slice(1, 7, 2),
    "slice to an end": lambda data: data.decode().slice(3),
    "batched": lambda data: data.decode().to_tuple("cls", "txt").batched(3),
    "batched without the rest": lambda data: data.decode().to_tuple("cls", "txt").batched(3, partial=False),
    "batched dicts": lambda data: data.decode("torchrgb").rename(image="jpg;png", label="cls", keep=False).batched(3),
    "batched lists": lambda data: data.decode().to_tuple("cls", "txt").batched(3, collation_fn=None),
    "batched tensors": lambda data: data.decode("torchrgb8").to_tuple("png;jpg", "cls").batched(8),
    "batched arrays": lambda data: data.decode("rgb8").to_tuple("png;jpg", "json").batched(8),
    "batches of batches": lambda data: data.decode().to_tuple("cls").batched(3).batched(2, collation_fn=None),
    "slices of batches": lambda data: data.decode().to_tuple("cls").batched(3).slice(1, None),
    "unbatched": lambda data: data.decode().to_tuple("cls", "txt").batched(3).unbatched(),
    "a handler of one's own": lambda data: data.decode(upper).to_tuple("txt"),
    "only": lambda data: data.decode(only="cls txt").to_tuple("cls", "txt", "json"),
    "nothing before or behind": lambda data: data.decode(pre=[], post=[]).to_tuple("cls", "meta.json.gz"),
    "partial": lambda data: data.decode(only=["cls"]).decode(partial=True).to_tuple("cls", "txt"),
}


@pytest.mark.parametrize("name", BUILDS)
def test_stages_yield_the_same_items_as_webdataset(shards: Path, name: str) -> None:
    assert same(shards, BUILDS[name])


def fails_at_three(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] == 3:
        raise RuntimeError("three")
    return sample


@pytest.mark.parametrize(("handler", "expected"), [(ignore_and_continue, 7), (ignore_and_stop, 3)])
def test_silent_handlers_skip_failing_samples(shards: Path, handler: Any, expected: int) -> None:
    assert expected == len(list(ours(shards).decode().map(fails_at_three, handler=handler)))


@pytest.mark.parametrize(("handler", "expected"), [(warn_and_continue, 7), (warn_and_stop, 3)])
def test_warning_handlers_warn_as_webdataset(shards: Path, handler: Any, expected: int) -> None:
    with pytest.warns(UserWarning, match=r"RuntimeError\(.*x-0.tar: sample 'a/03': map: three.\)"):
        assert expected == len(list(ours(shards).decode().map(fails_at_three, handler=handler)))


def test_default_handler_raises(shards: Path) -> None:
    with pytest.raises(RuntimeError, match="three"):
        list(ours(shards).decode().map(fails_at_three, handler=reraise_exception))


def stops_at_three(item: Any) -> Any:
    if label(item[0] if isinstance(item, list) else item) == 3:
        raise StopIteration
    return item


@pytest.mark.parametrize("stage", ["map", "select", "batched"])
def test_stop_iteration_raised_by_a_function_does_not_end_the_pass(shards: Path, stage: str) -> None:
    dataset = ours(shards).decode()
    made = {
        "map": lambda: dataset.map(stops_at_three),
        "select": lambda: dataset.select(stops_at_three),
        "batched": lambda: dataset.batched(1, collation_fn=stops_at_three),
    }[stage]()
    with pytest.raises(RuntimeError, match=f"the function of {stage if stage != 'map' else '.*'} at sample 'a/03' raised"):
        list(made)


@pytest.mark.parametrize("extension", ["pkl", "pickle", "pyd", "pth"])
def test_pickles_are_refused_unless_allowed(tmp_path: Path, extension: str) -> None:
    stored = io.BytesIO()
    torch.save([1, 2], stored)
    data = stored.getvalue() if extension == "pth" else pickle.dumps([1, 2])
    with TarWriter(tmp_path / "x.tar") as writer:
        writer.write({"__key__": "a", extension: data, "cls": 1})
    dataset = RemoteDataset.from_urls(str(tmp_path))
    with pytest.raises(ValueError, match=rf"x.tar: sample 'a': '{extension}' is a pickle, which can run any code.*allow_pickle"):
        list(dataset.decode())
    assert [data] == [sample[extension] for sample in dataset.decode(only="cls")]
    assert [sample[extension] for sample in dataset.decode(allow_pickle=True)] == [[1, 2]]


def test_error_names_the_member_that_cannot_be_decoded(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "x.tar") as writer:
        writer.write({"__key__": "a", "cls": b"one", "txt": "x"})
    with pytest.raises(ShardCorrupt, match=r"x.tar: sample 'a': member 'cls': invalid literal for int"):
        list(RemoteDataset.from_urls(str(tmp_path)).decode())


def unpacks(key: str, data: bytes) -> Any:
    return Continue(".txt", data[::-1]) if key == ".raw" else None


def test_handler_may_change_bytes_without_decoding(shards: Path) -> None:
    assert next(iter(ours(shards).decode(pre=[unpacks])))["raw"] == "\x01\x00"


def test_shuffle_order_depends_on_seed_and_epoch(shards: Path) -> None:
    dataset = ours(shards).decode().shuffle(4, initial=2).map(label_of)
    first, second = list(dataset), list(dataset)
    dataset.set_epoch(0)
    assert first == list(dataset) != second
    assert sorted(first) == sorted(second) == [0, 1, 2, 3, 10, 11, 12, 13]
    assert list(ours(shards).decode().shuffle(0).map(label_of)) == [0, 1, 2, 3, 10, 11, 12, 13]


def label_of(sample: dict[str, Any]) -> int:
    return label(sample)


def pairs(items: Any, skip: int) -> Any:
    for number, item in enumerate(items):
        if number >= skip:
            yield number, item


def test_then_applies_a_custom_generator(shards: Path) -> None:
    found = list(ours(shards).map(label_of).then(pairs, skip=6))
    assert found == [(6, 12), (7, 13)]
    assert found == list(ours(shards).map(label_of).then(pairs, 6))


def test_slice_after_shuffle_slices_the_shuffled_items(shards: Path) -> None:
    dataset = ours(shards).map(label_of).shuffle(8).slice(1, 3)
    assert len(list(dataset)) == 2
    with pytest.raises(TypeError, match="items after slice is not known"):
        len(dataset)


def test_each_method_returns_a_new_dataset(shards: Path) -> None:
    dataset = ours(shards)
    decoded = dataset.decode()
    assert next(iter(dataset))["cls"] == b"0"
    assert next(iter(decoded))["cls"] == 0


def test_photos_decode_as_webdataset_decodes_them(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "x-0.tar") as writer:
        for number, path in enumerate(sorted((Path(shmload.__file__).parent / "data").glob("*.jpg"))[:2]):
            writer.write({"__key__": str(number), "jpg": path.read_bytes(), "cls": number})
    assert len(same(tmp_path, lambda data: data.decode("rgb8").to_tuple("jpg", "cls"))) == 2


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda d: d.decode("cmyk"), ValueError, "decode='cmyk': not an image spec"),
        (lambda d: d.decode(3), TypeError, r"a handler is an image spec or a function of \(extension, bytes\); got 3"),
        (lambda d: d.to_tuple(), ValueError, "to_tuple needs at least one field"),
        (lambda d: d.map(3), TypeError, "map needs a function; got 3"),
        (lambda d: d.map_dict(), ValueError, "map_dict needs functions by field"),
        (lambda d: d.map_dict(a=1), TypeError, "map_dict needs a function; got 1"),
        (lambda d: d.map_tuple(1), TypeError, "map_tuple needs a function; got 1"),
        (lambda d: d.rename(), ValueError, "rename needs names"),
        (lambda d: d.select(1), TypeError, "select needs a function; got 1"),
        (lambda d: d.then(1), TypeError, "then needs a function; got 1"),
        (lambda d: d.shuffle(-1), ValueError, "shuffle: size must be an integer of at least 0, got -1"),
        (lambda d: d.batched(0), ValueError, "batched: batchsize must be an integer of at least 1, got 0"),
        (lambda d: d.batched(1.5), ValueError, "batched: batchsize must be an integer of at least 1, got 1.5"),
        (lambda d: d.slice(), TypeError, "slice takes one to three arguments, stop or start, stop, step; got 0"),
        (lambda d: d.slice(-1), ValueError, "slice: stop must be an integer of at least 0, got -1"),
        (lambda d: d.slice(0, 4, 0), ValueError, "slice: step must be an integer of at least 1, got 0"),
        (lambda d: d.repeat(0), ValueError, "repeat: nepochs must be an integer of at least 1, got 0"),
        (lambda d: d.with_epoch(0), ValueError, "with_epoch: n must be an integer of at least 1, got 0"),
        (lambda d: d.with_length(-1), ValueError, "with_length: n must be an integer of at least 0, got -1"),
        (lambda d: list(d.to_tuple("no")), ValueError, r"to_tuple: sample 'a/00' has no 'no', only 'cls', "),
        (lambda d: list(d.rename(a="b;c")), ValueError, r"rename: sample 'a/00' has no 'b' or 'c', only 'cls', "),
        (lambda d: list(d.map_dict(no=str)), ValueError, "map_dict: there is no 'no' in the sample, only '__key__'"),
        (lambda d: list(d.map_tuple(str)), TypeError, r"map_tuple needs a tuple, got dict: call to_tuple"),
        (lambda d: list(d.to_tuple("cls").decode()), TypeError, "decode needs samples that are dicts, got tuple"),
        (lambda d: list(d.decode().decode()), TypeError, "decode: 'cls' of sample 'a/00' is of type int already, bytes are needed"),
        (lambda d: list(d.map(label_of).unbatched()), TypeError, "unbatched needs batches, tuples or dicts of columns; got int"),
        (lambda d: list(d.unbatched()), ValueError, r"unbatched: the columns of a batch are of one length, these of \["),
        (
            lambda d: list(d.map(odd_columns).unbatched()),
            ValueError,
            r"the columns of a batch are of one length, these of \[1, 2\]",
        ),
        (lambda d: list(d.batched(4)), ValueError, r"batched: samples of a batch have the same fields; these have \["),
        (lambda d: list(d.decode().to_tuple("seg.npy").batched(2)), ValueError, r"field 0 has values of shapes \(1,\), \(2,\)"),
        (lambda d: list(d.map(odd_tuple).batched(2)), ValueError, r"samples of a batch have one length; these have \[1, 2\]"),
        (lambda d: list(d.map(none_field).to_tuple("cls", "x")), ValueError, "to_tuple: 'x' of sample 'a/00' is None"),
    ],
)
def test_invalid_arguments_raise_explanatory_errors(shards: Path, build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(ours(shards))


def odd_tuple(sample: dict[str, Any]) -> tuple[int, ...]:
    return (1,) * (1 + label(sample) % 2)


def odd_columns(sample: dict[str, Any]) -> tuple[list[int], ...]:
    return [1], [2, 3]


def none_field(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": None}


def test_indexed_after_a_stage_is_refused(tmp_path: Path) -> None:
    write_plain(tmp_path, [3])
    with pytest.raises(ValueError, match=r"indexed\(\) reads the shards without stages: call it before decode"):
        RemoteDataset.from_urls(str(tmp_path)).decode().indexed()
