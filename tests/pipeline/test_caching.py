"""The Cache stage: items are made once across processes and runs, and made again when the code or data that makes them changes."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import random
import shutil
import sqlite3
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shmload import sample_rng
from shmload.formats import ArrayDataset
from shmload.pipeline import (
    Cache,
    Conveyer,
    DistributedBatchedMap,
    Filter,
    Generate,
    Items,
    Join,
    Map,
    Permutation,
    Range,
    Shuffle,
    Take,
    Window,
    item_file,
)


@dataclass(frozen=True)
class Logged:
    """Makes an item and logs a line."""

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


def test_cache_key_depends_on_everything_that_makes_the_item(tmp_path: Path) -> None:
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


@dataclass(frozen=True)
class TextFile:
    """The bytes of a file as samples."""

    path: str | Path

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return {"x": Path(self.path).read_bytes()[index]}


def npy_rows(path: Path) -> Any:
    return ArrayDataset({"x": path})


@pytest.mark.parametrize("source", [TextFile, lambda path: TextFile(str(path)), npy_rows], ids=["path", "str", "npy"])
def test_cache_key_depends_on_files_of_the_source(source: Any, tmp_path: Path) -> None:
    path = tmp_path / "data"

    def made(*values: int) -> list[int]:
        if source is npy_rows:
            with open(path, "wb") as file:
                np.save(file, np.array(values))
        else:
            path.write_bytes(bytes(values))
        os.utime(path, ns=(sum(values), sum(values)))  # two writes in one tick of the file system's clock have one time
        (found,) = read([Items(source(path)), Cache(tmp_path / "cache")])
        return [int(x) for x in found]

    assert made(1, 2, 3) == [1, 2, 3]
    assert made(4, 5, 6) == [4, 5, 6]
    assert made(1, 2, 3) == [1, 2, 3]
    assert len(list((tmp_path / "cache").glob("*.sqlite"))) == 2


def test_cache_key_depends_on_function_code(tmp_path: Path) -> None:
    functions: list[Any] = [lambda x: {"x": x + 1}, lambda x: {"x": x + 2}, lambda x: {"x": x - 1}]
    functions += [functools.cache(lambda x: {"x": x + 3}), functools.cache(lambda x: {"x": x + 4})]
    found = [read([Range(2, repeating=False), Map(function), Cache(tmp_path)]) for function in functions]
    assert found == [[[1, 2]], [[2, 3]], [[-1, 0]], [[3, 4]], [[4, 5]]]


class Doubling:
    """A dataset whose `__getitem__` calls another method."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return self.made(index)

    def made(self, index: int) -> int:
        return self.factor * self.table[index]

    factor, table = 2, [0, 1]


@pytest.mark.parametrize(
    ("name", "changed"),
    [("__getitem__", lambda self, index: 3 * index), ("made", lambda self, index: 3 * index), ("factor", 8), ("table", [0, 4])],
)
def test_cache_key_depends_on_code_of_dataset_methods(
    name: str, changed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes the class as if the program was edited between two runs."""

    def kept() -> list[int]:
        with Conveyer([Items(Doubling()), Cache(tmp_path)]) as pipeline:
            return list(pipeline)

    assert kept() == [0, 2]
    monkeypatch.setattr(Doubling, name, changed)
    assert kept() == [0, 3 if callable(changed) else 8]


def plus(x: int) -> int:
    return x


def passed_on(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Calling:
    """A function object whose method calls functions of several kinds."""

    def __call__(self, x: int) -> Any:
        return {"x": plus(x) + self.decorated() + self.kept()}

    @passed_on
    def decorated(self) -> int:
        return 0

    kept = staticmethod(functools.cache(lambda: 0))


@pytest.mark.parametrize(
    ("name", "changed"),
    [("plus", lambda x: x + 9), ("decorated", passed_on(lambda self: 9)), ("kept", staticmethod(functools.cache(lambda: 9)))],
)
def test_cache_key_depends_on_functions_that_methods_call(
    name: str, changed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [Range(2, repeating=False), Map(Calling()), Cache(tmp_path)]
    assert read(stages) == read(stages) == [[0, 1]]
    assert len(list(tmp_path.glob("*.sqlite"))) == 1
    if name == "plus":
        monkeypatch.setitem(globals(), name, changed)
    else:
        monkeypatch.setattr(Calling, name, changed)
    assert read(stages) == [[9, 10]]


@pytest.mark.parametrize(
    "stages",
    [[Permutation(4)], [Range(4), Take(2)], [Items([1, 2]), Shuffle()], [Generate(abs, 4)]],
    ids=["permutation", "take of an endless one", "shuffle", "generate"],
)
def test_cache_refuses_items_in_different_order_each_epoch(stages: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"Cache, cannot follow the stages before it: their items differ or come in another order"):
        Conveyer([*stages, Cache()])


def test_cache_after_filter_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the position of each item"):
        Conveyer([Range(4), Filter(bool), Cache()])


@pytest.mark.parametrize("stages", [[Items([Lock()])], [Range(2), Map(Lock().acquire)]], ids=["items", "function"])
def test_values_that_cannot_be_identified_are_refused(stages: list[Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="contains a value that cannot be pickled"):
        Conveyer([*stages, Cache(tmp_path)])


def looked_up(table: Any) -> Any:
    return lambda x, *, first=0: {"x": table[x] + first}


def test_cache_key_depends_on_all_values_a_function_holds(tmp_path: Path) -> None:
    """Checks all values, because the printed form of an array or a tensor leaves out most of them."""
    tables: list[Any] = [np.arange(5000), torch.arange(5000), [*range(5000)], {x: x for x in range(5000)}]
    functions = [looked_up(table) for table in tables]
    for table in copy.deepcopy(tables):
        table[2000] = -1
        functions.append(looked_up(table))
    functions.append(looked_up(tables[0]))
    functions[-1].__kwdefaults__["first"] = 7
    rows = [[Items([2000, 2001]), Map(function), Cache(tmp_path)] for function in functions]
    assert [read(row)[0] for row in rows] == [[2000, 2001]] * 4 + [[-1, 2001]] * 4 + [[2007, 2008]]


SIZE, FILES = 2, ["a.jpg", "b.jpg"]


def opened(item: int) -> Any:
    return resized([FILES[each] for each in range(item + 1)])


def resized(names: list[str]) -> Any:
    return {"name": names[-1], "size": SIZE}


class Opening:
    """A dataset whose method reads a global variable."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return {"name": FILES[index], "size": SIZE}


@pytest.mark.parametrize("stages", [[Range(2, repeating=False), Map(opened)], [Items(Opening())]], ids=["function", "method"])
@pytest.mark.parametrize(("name", "changed"), [("SIZE", 3), ("FILES", ["c.jpg", "d.jpg"])])
def test_cache_key_depends_on_global_variables(
    stages: list[Any], name: str, changed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept() -> list[Any]:
        with Conveyer([*stages, Cache(tmp_path)]) as pipeline:
            return list(pipeline)

    before = [{"name": each, "size": 2} for each in ("a.jpg", "b.jpg")]
    assert kept() == before
    with monkeypatch.context() as patch:
        patch.setitem(globals(), name, changed)
        assert kept() == [{"name": each, "size": SIZE} for each in FILES]
    assert len(list(tmp_path.glob("*.sqlite"))) == 2
    assert kept() == before
    assert len(list(tmp_path.glob("*.sqlite"))) == 2


@dataclass
class Settings:
    size: int


ARGS: Any = SimpleNamespace(size=1)


def sized(item: int) -> Any:
    return {"x": ARGS.size * item}


@pytest.mark.parametrize("kind", [SimpleNamespace, Namespace, Settings])
def test_cache_key_depends_on_settings_in_global_objects(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ARGS", kind(size=2))
    stages = [Items([1, 2]), Map(sized), Cache(tmp_path)]
    assert read(stages) == [[2, 4]]
    ARGS.size = 3
    assert read(stages) == [[3, 6]]
    ARGS.size = 2
    assert read(stages) == [[2, 4]]
    assert len(list(tmp_path.glob("*.sqlite"))) == 2


def named(held: Any, folder: Path) -> None:
    def function(x: int) -> Any:
        return x if x in held else function(-x)  # refers to itself, too

    Conveyer([Items([held]), Map(function), Cache(folder)]).close()


@pytest.mark.parametrize(
    ("one", "other"), [({0, 8}, {8, 0}), (frozenset([0, 8]), frozenset([8, 0])), (torch.ones(3), torch.ones(3))], ids=lambda x: ""
)
def test_equal_values_have_the_same_key_in_every_process(one: Any, other: Any, tmp_path: Path) -> None:
    """Sets have a different order in each process, and pickled tensors contain their address."""
    for held in (one, other):
        named(held, tmp_path)
    assert len(list(tmp_path.glob("*.sqlite"))) == 1


def nested(number: int) -> list[Any]:
    """Returns a list that contains itself and a number."""
    made: list[Any] = [number, {}]
    made[1]["self"] = made
    return made


LOOP = nested(1)


class HasLoop:
    loop = LOOP

    def __call__(self, x: int) -> Any:
        return {"x": x * LOOP[0] * self.loop[0]}


@pytest.mark.parametrize("function", [lambda x: {"x": x * LOOP[0]}, HasLoop()], ids=["global variable", "class attribute"])
def test_cache_key_depends_on_containers_that_contain_themselves(
    function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [Items([1, 2]), Map(function), Cache(tmp_path)]
    assert read(stages) == read(stages) == [[1, 2]]
    monkeypatch.setitem(globals(), "LOOP", nested(5))
    assert read(stages) == [[5, 10]]


def test_removed_cache_file_is_no_longer_read(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "cache"
    stages = [Items([1, 2]), Map(Logged(log)), Cache(folder)]
    for _ in range(2):
        assert read(stages) == [[2, 4]]
    assert lines(log) == [1, 2]
    shutil.rmtree(folder)
    assert read(stages) == [[2, 4]]
    assert lines(log) == [1, 1, 2, 2]


def test_cache_file_exists_before_workers_open_it(tmp_path: Path) -> None:
    """SQLite does not wait for another process that changes a file's mode; 3 of 150 pipelines failed before."""
    Conveyer([Range(4), Cache(tmp_path)]).close()
    (path,) = tmp_path.glob("*.sqlite")
    file = sqlite3.connect(path)
    assert file.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert file.execute("SELECT count(*) FROM items").fetchone() == (0,)
    file.close()


def test_error_names_the_item_that_cannot_be_cached() -> None:
    with Conveyer([Items([1, memoryview(b""), 3]), Cache()]) as pipeline:
        assert pipeline() == 1
        with pytest.raises(
            TypeError, match=r"(?s)Cache keeps items as pickles, and an item of type memoryview .*put Cache before"
        ) as caught:
            pipeline()
        assert caught.value.__notes__ == ["shmload: item 1 of epoch 0", "shmload: sample 1, epoch 0, batch 1"]
        assert pipeline() == 3


def test_dtypes_that_torch_cannot_unpickle_are_cached() -> None:
    with Conveyer([Items([torch.ones(2, dtype=torch.uint8).to(torch.uint16)]), Cache()]) as pipeline:
        assert [[item.tolist() for item in pipeline] for _ in range(2)] == [[[1, 1]]] * 2


def drawn(x: Any) -> tuple[Any, ...]:
    return x, int(sample_rng().integers(1 << 40)), random.random(), np.random.rand(), torch.rand(()).item()


class Noise:
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, x: Any) -> tuple[Any, float]:
        return x, self.rng.random()


def random_items(num_workers: int) -> Conveyer:
    """Return a pipeline whose items have a cached part and a part that is drawn after the cache."""
    after = DistributedBatchedMap(drawn, num_workers) if num_workers else Map(drawn)
    return Conveyer([Range(12, repeating=False), Map(drawn), Map(Noise()), Cache(), after, Window(2), Shuffle(seed=3)])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_numbers_of_cached_items_do_not_depend_on_what_is_cached(num_workers: int) -> None:
    with random_items(0) as pipeline:
        first, second = list(pipeline), list(pipeline)
    assert sorted(pair[0][0] for pair in first) == sorted(pair[0][0] for pair in second)  # the cached part is kept
    assert sorted(first) != sorted(second)  # the part after the cache is drawn again
    with random_items(num_workers) as pipeline:
        assert [list(pipeline), list(pipeline)] == [first, second]
    with random_items(num_workers) as pipeline:  # begins in the second epoch, with an empty cache
        pipeline.begin_next_epoch()
        assert list(pipeline) == second


def test_iterating_again_gives_the_same_cached_random_items() -> None:
    pipeline = Items(range(8)).map(drawn).cache()
    assert list(pipeline) == list(pipeline)


def test_caches_of_one_pipeline_draw_different_numbers() -> None:
    one, other = (Items(range(8)).map(drawn).cache() for _ in range(2))
    assert not any(a[1] == b[1] for a, b in one.zip(other))


def test_caches_of_a_joins_members_draw_different_numbers() -> None:
    one, other = (Items(range(8)).map(drawn).cache().conveyer() for _ in range(2))
    with Conveyer([Join([(one, 1), (other, 1)])]) as pipeline:
        assert len({item[1] for item in pipeline}) == 16


def test_stages_before_and_after_a_cache_draw_different_numbers() -> None:
    def both(item: Any) -> Any:
        return item, sample_rng().random(), random.random(), torch.rand(()).item()

    items = list(Items(range(20)).map(both).cache().map(both))
    assert len({value for before, *after in items for value in (*before[1:], *after)}) == 120


@pytest.mark.parametrize("has_folder", [False, True])
def test_pipeline_that_becomes_a_member_keeps_its_numbers(has_folder: bool, tmp_path: Path) -> None:
    folder = tmp_path if has_folder else None
    pipeline = Items(range(4)).map(drawn).cache(folder).conveyer()
    first = list(pipeline)
    zipped = list(Items(range(4)).map(drawn).cache(folder).zip(pipeline))
    assert list(pipeline) == first
    assert not any(a[1] == b[1] for a, b in zipped)


def test_making_a_cached_item_leaves_generators_that_later_stages_use_too() -> None:
    """Otherwise what they draw depends on whether this process has made the item."""

    def epoch_one(*, is_cached: bool) -> list[Any]:
        noise = Noise()
        with Conveyer([Range(6, repeating=False), Map(noise), Cache(), Map(noise)]) as pipeline:
            if is_cached:
                list(pipeline)
            else:
                pipeline.begin_next_epoch()
            return list(pipeline)

    assert epoch_one(is_cached=True) == epoch_one(is_cached=False)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_caches_with_equal_stages_in_one_folder_keep_items_of_their_own(num_workers: int, tmp_path: Path) -> None:
    """Each draws other numbers, so that an item would depend on which of them makes it first."""

    def read_all(folder: Path | None) -> list[Any]:
        items = Items(range(8)).map(drawn)
        both = items.cache(folder).zip(items.cache(folder).shuffle(seed=2))
        with both.map(tuple, workers=num_workers).conveyer() as pipeline:
            return list(pipeline)

    expected = read_all(None)
    assert [read_all(tmp_path), read_all(tmp_path)] == [expected, expected]


def test_damaged_item_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stages = [Items([1, 2, 3]), Map(Logged(tmp_path / "log")), Cache(tmp_path)]
    assert read(stages) == [[2, 4, 6]]
    (path,) = tmp_path.glob("*.sqlite")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as file:
        (whole,) = file.execute("SELECT item FROM items WHERE place = 1").fetchone()
        file.execute("UPDATE items SET item = ? WHERE place = 1", (whole[:-1] + bytes([whole[-1] ^ 1]),))
    assert [read(stages), read(stages)] == [[[2, 4, 6]]] * 2
    assert lines(tmp_path / "log") == [1, 2, 2, 3]
    assert [record.message for record in caplog.records] == [f"item 1 in {path} is damaged, and is made again"]


def test_error_about_a_damaged_file_names_it(tmp_path: Path) -> None:
    stages = [Items([1, 2]), Map(Logged(tmp_path / "log")), Cache(tmp_path)]
    assert read(stages) == [[2, 4]]
    (path,) = tmp_path.glob("*.sqlite")
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(OSError, match=rf"{path}, is damaged \(.*\): delete it, and its items are made again"):
        read(stages)
    path.unlink()
    assert read(stages) == [[2, 4]]


def test_items_are_not_kept_on_a_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = item_file._connected

    def limited(path: Path) -> sqlite3.Connection:
        file = connected(path)
        file.execute("PRAGMA max_page_count = 8")  # SQLite then fails as on a full disk
        return file

    monkeypatch.setattr(item_file, "_connected", limited)
    items = [bytes([i]) * 9000 for i in range(6)]
    for _ in range(2):
        with Conveyer([Items(items), Cache(tmp_path)]) as pipeline:
            assert list(pipeline) == items
    assert ["no space left" in record.message for record in caplog.records] == [True]


def test_making_a_cached_item_leaves_the_generators_of_the_program() -> None:
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    assert Items([7]).map(drawn).cache().conveyer().plan.source.at(0)[0] == 7  # outside of any reading
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected
