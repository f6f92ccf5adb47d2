"""Cache: items are made once, by whichever process and run, and again as soon as what makes them has changed."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmload.pipeline import Cache, Conveyer, DistributedBatchedMap, Filter, Generate, Items, Map, Permutation, Range, Shuffle, Take


@dataclass(frozen=True)
class Logged:
    """Makes an item, and leaves a line."""

    log: Path
    factor: int = 2

    def __call__(self, x: int) -> Any:
        with open(self.log, "a") as file:
            file.write(f"{x}\n")
        return {"x": x * self.factor, "row": np.full(4, x)}


def read(stages: list[Any], num_epochs: int = 1) -> list[list[int]]:
    with Conveyer(stages) as pipeline:
        return [[item["x"] for item in pipeline] for _ in range(num_epochs)]


def lines(log: Path) -> list[int]:
    return sorted(map(int, log.read_text().split())) if log.exists() else []


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("has_folder", [True, False], ids=["folder", "memory"])
def test_each_item_is_made_once(num_workers: int, has_folder: bool, tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "cache" if has_folder else None
    workers = [DistributedBatchedMap(dict, num_workers)] if num_workers else []
    stages = [Items(list(range(20))), Map(Logged(log)), Cache(folder), Shuffle(), *workers]
    first, second = read(stages, 2)
    assert sorted(first) == sorted(second) == list(range(0, 40, 2))
    assert first != second
    if has_folder:
        assert lines(log) == list(range(20))
        assert read(stages, 1) == [first]  # another run
        assert lines(log) == list(range(20))
    else:
        assert len(lines(log)) <= 20 * max(num_workers, 1)


def test_what_makes_an_item_is_part_of_its_name(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def made(items: Any, factor: int = 2, **options: Any) -> list[int]:
        (found,) = read([Items(items), Map(Logged(log, factor)), Cache(tmp_path / "cache", **options)])
        return found

    assert made([1, 2]) == [2, 4]
    assert made([1, 2], 3) == [3, 6]
    assert made([1, 5]) == [2, 10]
    assert made([1, 2], version="new") == [2, 4]
    assert made([1, 2]) == [2, 4]
    assert lines(log) == [1, 1, 1, 1, 2, 2, 2, 5]


def test_the_code_of_functions_counts(tmp_path: Path) -> None:
    functions = [lambda x: {"x": x + 1}, lambda x: {"x": x + 2}, lambda x: {"x": x - 1}]
    found = [read([Range(2, repeating=False), Map(function), Cache(tmp_path)]) for function in functions]
    assert found == [[[1, 2]], [[2, 3]], [[-1, 0]]]


@pytest.mark.parametrize(
    "stages",
    [[Permutation(4)], [Range(4), Take(2)], [Items([1, 2]), Shuffle()], [Generate(abs, 4)]],
    ids=["permutation", "take of an endless one", "shuffle", "generate"],
)
def test_a_row_whose_epochs_differ_is_refused(stages: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"a Cache, does not go with what it is given: its items come in another order"):
        Conveyer([*stages, Cache()])


def test_behind_a_filter_it_is_refused() -> None:
    with pytest.raises(ValueError, match="needs to know where each item stands"):
        Conveyer([Range(4), Filter(bool), Cache()])


def test_items_that_nothing_tells_from_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not pickle"):
        Conveyer([Items([lambda: 0]), Cache(tmp_path)])


def test_its_file_is_made_before_workers_open_it(tmp_path: Path) -> None:
    """SQLite does not wait for another process that changes a file's mode: 3 of 150 pipelines failed."""
    Conveyer([Range(4), Cache(tmp_path)]).close()
    (path,) = tmp_path.glob("*.sqlite")
    file = sqlite3.connect(path)
    assert file.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert file.execute("SELECT count(*) FROM items").fetchone() == (0,)
    file.close()
