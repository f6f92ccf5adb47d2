"""Unusual behavior of the user's functions in every stage: exceptions, StopIteration, None, and very large items."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmload.pipeline import (
    AsyncMap,
    BatchMap,
    Bucket,
    Cache,
    Collate,
    Conveyer,
    DistributedBatchedMap,
    Filter,
    FlatMap,
    Generate,
    Interleave,
    Items,
    Join,
    Map,
    Pack,
    Range,
    Scan,
    Shuffle,
    Stream,
    Window,
    Zip,
)

BAD = 7


@dataclass(frozen=True)
class Odd:
    """A function of an item, and of a batch, with unusual behavior at one of them."""

    what: str
    made: Callable[[Any], Any] = int

    def __call__(self, x: Any) -> Any:
        if BAD in np.asarray(x):
            if self.what == "raises":
                raise ValueError("seven")
            if self.what == "stops":
                next(iter(()))
            return None
        return self.made(x)


class Waiting(Odd):
    async def __call__(self, x: Any) -> Any:  # type: ignore[override]  # a coroutine function
        return Odd.__call__(self, x)


class Late(Odd):
    """A function that fails inside the iterable it has returned."""

    def __call__(self, x: Any) -> Iterator[Any]:
        yield Odd.__call__(self, x)


@dataclass(frozen=True)
class Carrying(Odd):
    def __call__(self, state: Any, x: Any = None) -> Any:
        made = Odd.__call__(self, x)
        return None if made is None else (state, made)


class Indexed(list[Any]):
    """A dataset that fails at one item."""

    def __init__(self, odd: Odd) -> None:
        super().__init__(range(10))
        self.odd = odd

    def __getitem__(self, index: Any) -> Any:
        return self.odd(super().__getitem__(index))


SOURCE = Range(10, repeating=False)
ITEM = "item 7 of epoch 0"
STAGES: dict[str, tuple[Callable[[str], list[Any]], str, str]] = {  # name: (stages, the failing stage, the failing item)
    "Map": (lambda what: [SOURCE, Map(Odd(what))], r"stage 1 \(Map\)", ITEM),
    "workers": (lambda what: [SOURCE, DistributedBatchedMap(Odd(what), 1)], r"stage 1 \(DistributedBatchedMap\)", ITEM),
    "Map, collated": (lambda what: [SOURCE, Map(Odd(what)), Collate(2)], r"stage 1 \(Map\)", ITEM),
    "Map before a shuffle": (lambda what: [SOURCE, Map(Odd(what)), Shuffle(3)], r"stage 1 \(Map\)", ITEM),
    "Map before a window": (lambda what: [SOURCE, Map(Odd(what)), Window(2, 2)], r"stage 1 \(Map\)", ITEM),
    "Map after a Filter": (lambda what: [SOURCE, Filter(lambda x: True), Map(Odd(what))], r"stage 2 \(Map\)", ITEM),
    "Map of a Stream": (lambda what: [Stream(range(10)), Map(Odd(what))], r"stage 1 \(Map\)", f"{ITEM} of the Stream"),
    "Map, kept": (lambda what: [SOURCE, Map(Odd(what)), Cache()], r"stage 1 \(Map\)", ITEM),
    "Filter": (lambda what: [SOURCE, Filter(Odd(what, lambda x: True))], r"stage 1 \(Filter\)", ITEM),
    "FlatMap": (lambda what: [SOURCE, FlatMap(Odd(what, lambda x: [x]))], r"stage 1 \(FlatMap\)", ITEM),
    "FlatMap, late": (lambda what: [SOURCE, FlatMap(Late(what))], r"stage 1 \(FlatMap\)", ITEM),
    "AsyncMap": (lambda what: [SOURCE, AsyncMap(Waiting(what))], r"stage 1 \(AsyncMap\)", ITEM),
    "Bucket": (lambda what: [SOURCE, Bucket(Odd(what), [4], 2)], r"stage 1 \(Bucket\)", ITEM),
    "Pack": (lambda what: [SOURCE, Map(Odd(what, lambda x: [x])), Pack(2)], r"stage [12] \((Map|Pack)\)", ITEM),
    "Scan": (lambda what: [SOURCE, Scan(Carrying(what), 0)], r"stage 1 \(Scan\)", "item of block 1 of epoch 0"),
    "Map after a Scan": (
        lambda what: [SOURCE, Scan(lambda s, x: (s, x)), Map(Odd(what))],
        r"stage 2 \(Map\)",
        "block 1 of epoch 0",
    ),
    "BatchMap": (
        lambda what: [SOURCE, Collate(2), BatchMap(Odd(what, list))],
        r"stage 2 \(BatchMap\)",
        "batch 3, whose step begins",
    ),
    "Map of batches": (lambda what: [SOURCE, Collate(2), Map(Odd(what, list))], r"stage 2 \(Map\)", "batch 3, whose step begins"),
    "Items": (lambda what: [Items(Indexed(Odd(what)))], "__getitem__", ITEM),
    "Items after a Filter": (
        lambda what: [Items(Indexed(Odd(what))), Filter(lambda x: True)],
        "__getitem__|reading the source",
        ITEM,
    ),
    "Generate": (lambda what: [Generate(Odd(what), 10)], "Generate", ITEM),
    "Zip": (lambda what: [Zip([SOURCE, Map(Odd(what))], Range(10))], r"stage 1 \(Map\)", ITEM),
    "Interleave": (lambda what: [Interleave([SOURCE, Map(Odd(what))], Range(10, repeating=False))], r"stage 1 \(Map\)", ITEM),
    "Join": (lambda what: [Join([(Conveyer([SOURCE, Map(Odd(what))]), 1)])], r"stage 1 \(Map\) of member 0", f"{ITEM} of member 0"),
}
NONE_IS_NO_ITEM = {"FlatMap", "Bucket", "Pack", "Scan"}
NONE_IS_A_BATCH = {"BatchMap", "Map of batches"}


def outcomes(stages: list[Any]) -> tuple[list[Any], list[Exception]]:
    """Returns the items of a pipeline and the errors that it raises, up to its end."""
    found, errors = [], []
    with Conveyer(stages, block_size=4) as pipeline:
        for _ in range(40):
            try:
                found.append(pipeline())
            except StopIteration:
                break
            except Exception as error:
                errors.append(error)
    return found, errors


@pytest.mark.parametrize("what", ["raises", "stops"])
@pytest.mark.parametrize("name", STAGES)
def test_error_names_the_stage_and_the_item(name: str, what: str) -> None:
    stages, stage, item = STAGES[name]
    found, errors = outcomes(stages(what))
    assert len(errors) == 1
    message = "".join(traceback.format_exception(errors[0]))
    assert ("seven" if what == "raises" else "StopIteration") in message
    assert type(errors[0]) is (ValueError if what == "raises" else RuntimeError)
    for wanted in (stage, item):
        assert re.search(wanted, message), message
    assert len(found) >= 4  # the other items arrive


@pytest.mark.parametrize("name", STAGES)
def test_none_is_an_item_or_a_clear_error(name: str) -> None:
    stages, stage, item = STAGES[name]
    found, errors = outcomes(stages("none"))
    if name in NONE_IS_NO_ITEM:
        assert len(errors) == 1
        message = "".join(traceback.format_exception(errors[0]))
        assert re.search(stage, message), message
        assert item in message
    else:
        assert errors == []
        assert len(found) >= 4


HUGE = 48 << 20


def huge(x: Any) -> Any:
    return np.full(HUGE, x, np.uint8) if x == BAD else x


def last(x: Any) -> int:
    return int(np.asarray(x).reshape(-1)[-1])


def is_there(x: Any) -> bool:
    return last(x) >= 0


def alone(x: Any) -> list[Any]:
    return [x]


async def later(x: Any) -> Any:
    return x


def counted(count: int, x: Any) -> tuple[int, Any]:
    return count + 1, x


@pytest.mark.parametrize(
    "later_stages",
    [
        [],
        [Filter(is_there)],
        [FlatMap(alone)],
        [AsyncMap(later)],
        [Filter(is_there), Shuffle(buffer_size=3)],
        [Scan(counted, 0)],
        [Window(1), Map(lambda items: items[0])],
    ],
    ids=lambda stages: "-".join(type(stage).__name__ for stage in stages) or "alone",
)
def test_large_item_passes_through_every_stage(later_stages: list[Any], tmp_path: Path) -> None:
    by_place = [stage for stage in later_stages if isinstance(stage, Window)]
    stages = [SOURCE, Map(huge), *later_stages] if by_place else [SOURCE, DistributedBatchedMap(huge, 1), *later_stages]
    with Conveyer(stages, block_size=4) as pipeline:
        found = [(last(item), np.asarray(item).nbytes) for item in pipeline]
    assert sorted(value for value, _ in found) == list(range(10))
    assert dict(found)[BAD] == HUGE
