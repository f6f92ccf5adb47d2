"""The error of a failing stage of a fluent reader names the shard, the sample and the stage, in any process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shmload import ShmLoader
from shmload.errors import ShardCorrupt
from shmload.formats import ImageDecoder, TarWriter
from shmload.remote import RemoteDataset

Stages = Callable[[RemoteDataset], RemoteDataset]


class CustomTextError(Exception):
    """An exception that overrides `__str__`."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return f"number {self.number} is refused"


def refuses(value: Any, kind: Callable[[], Exception] = lambda: ValueError("is refused")) -> Any:
    """Raises for the sample with label 2: a user's function."""
    if (value["cls"] if isinstance(value, dict) else value) in (b"2", 2):
        raise kind()
    return value


def collated(items: list[Any]) -> list[Any]:
    return [refuses(item) for item in items]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    with TarWriter(tmp_path / "a.tar") as writer:
        for number in range(4):
            writer.write({"__key__": f"img_{number}", "jpg": b"", "cls": number})
    return tmp_path


STAGES: dict[str, tuple[Stages, str]] = {
    "map": (lambda data: data.map(refuses), "img_2': map: is refused"),
    "map of tuples": (lambda data: data.to_tuple("cls").map(partial(first, refuses)), "img_2': map: is refused"),
    "map_dict": (lambda data: data.map_dict(cls=refuses), "img_2': map_dict: is refused"),
    "map_tuple": (lambda data: data.to_tuple("jpg", "cls").map_tuple(None, refuses), "img_2': map_tuple: is refused"),
    "an image": (lambda data: data.to_tuple("jpg;png", "cls").map_tuple(ImageDecoder(), int), "img_0': map_tuple: an empty file"),
    "to_tuple": (lambda data: data.to_tuple("txt"), "img_0': to_tuple: sample 'img_0' has no 'txt'"),
    "rename": (lambda data: data.rename(x="txt"), "img_0': rename: sample 'img_0' has no 'txt'"),
    "select": (lambda data: data.select(refuses), "img_2': select: is refused"),
    "behind a shuffle": (lambda data: data.to_tuple("cls").shuffle(4).map(partial(first, refuses)), "img_2': map: is refused"),
    "behind unbatched items that are shuffled": (
        lambda data: data.to_tuple("cls").batched(1).unbatched().shuffle(4).map(partial(first, refuses)),
        "the batch that begins with sample 'img_2': map: is refused",
    ),
    "unbatched": (lambda data: data.unbatched(), "img_0': unbatched: the columns of a batch"),
    "behind a slice": (lambda data: data.select(bool).slice(1, None).map(refuses), "img_2': map: is refused"),
    "batched": (
        lambda data: data.slice(1, None).batched(2, collation_fn=collated),
        "the batch that begins with sample 'img_1': batched: is refused",
    ),
    "behind a batch": (
        lambda data: data.to_tuple("cls").slice(2, None).batched(1).map(partial(first_of_first, refuses)),
        "the batch that begins with sample 'img_2': map: is refused",
    ),
    "behind the user's own": (lambda data: data.then(again).map(refuses), "img_2': map: is refused"),
}


def first(function: Callable[[Any], Any], item: tuple[Any, ...]) -> Any:
    return function(item[0])


def first_of_first(function: Callable[[Any], Any], item: Any) -> Any:
    return function(item[0][0])


def again(items: Iterator[Any]) -> Iterator[Any]:
    yield from items


@pytest.mark.parametrize("name", STAGES)
def test_error_of_a_failing_stage_names_shard_sample_and_stage(name: str, shard: Path) -> None:
    build, message = STAGES[name]
    with pytest.raises(ValueError, match=rf"a\.tar: .*{message}"):
        list(build(RemoteDataset.from_urls(str(shard), shuffle=False)))


@pytest.mark.slow(reason="starts worker processes")
@pytest.mark.parametrize("seed", [None, 1])
def test_error_of_a_failing_stage_names_them_in_workers(shard: Path, seed: int | None) -> None:
    dataset = RemoteDataset.from_urls(str(shard)).to_tuple("jpg", "cls").map_tuple(None, refuses)
    loaders = [lambda: ShmLoader(dataset, batch_size=1, num_workers=1, seed=seed)]
    if seed is None:
        loaders.append(lambda: DataLoader(dataset, batch_size=1, num_workers=1))
    for make in loaders:
        with pytest.raises(ValueError, match=r"a\.tar: sample 'img_2': map_tuple: is refused"):
            list(make())


def test_error_keeps_its_type_and_one_with_custom_text_gets_a_note(shard: Path) -> None:
    dataset = RemoteDataset.from_urls(str(shard))
    with pytest.raises(CustomTextError, match="number 7 is refused") as caught:
        list(dataset.map(partial(refuses, kind=partial(CustomTextError, 7))))
    assert caught.value.args == (7,)
    assert caught.value.__notes__ == [f"shmload: map, of {shard}/a.tar: sample 'img_2'"]
    with pytest.raises(KeyError, match="no such") as missing:
        list(dataset.map(partial(refuses, kind=partial(KeyError, "no such"))))
    assert missing.value.args == ("no such",)
    assert missing.value.__notes__ == [f"shmload: map, of {shard}/a.tar: sample 'img_2'"]


def test_error_that_names_its_sample_does_not_name_it_twice(shard: Path) -> None:
    with pytest.raises(ShardCorrupt) as caught:
        list(RemoteDataset.from_urls(str(shard), shuffle=False).decode("rgb8"))
    assert str(caught.value).count("img_0") == str(caught.value).count("a.tar") == 1


def test_handler_receives_an_error_that_names_the_sample(shard: Path) -> None:
    seen: list[str] = []
    dataset = RemoteDataset.from_urls(str(shard)).map(refuses, handler=lambda error: bool(seen.append(str(error))) or True)
    assert len(list(dataset)) == 3
    assert seen == [f"{shard}/a.tar: sample 'img_2': map: is refused"]


def test_decoding_error_of_an_indexed_view_names_shard_and_sample(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    view = RemoteDataset.from_urls(str(tmp_path)).indexed(decode={"n": refuses})
    with pytest.raises(ShardCorrupt, match=r"a\.jsonl: field 'n' of sample '.*1': is refused"):
        view[1]


def test_tar_options_are_refused_for_other_layouts_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    with pytest.raises(TypeError, match=r"indexed\(schema=...\) is an option for tar shards, but these are jsonl, .* with fields="):
        RemoteDataset.from_urls(str(tmp_path)).indexed(schema={"n": "int64"})
