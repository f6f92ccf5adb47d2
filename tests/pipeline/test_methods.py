"""Pipelines made with methods: each iteration is the next epoch, from its start."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from shmload.pipeline import Items, Join, Permutation, Range, Stream
from shmload.pipeline.methods import Fluent


def drawn(item: int) -> tuple[int, float]:
    return item, random.random()


PIPELINES: dict[str, Callable[[], Fluent]] = {
    "source": lambda: Permutation(8, repeating=False),
    "shuffle": lambda: Items(range(8)).map(drawn).shuffle(),
    "batches": lambda: Items(range(8)).map(drawn).shuffle().batch(3),
    "buffer": lambda: Items(range(8)).filter(lambda item: item != 3).shuffle(buffer_size=4),
    "stream": lambda: Stream(range(8)).map(drawn).shuffle(buffer_size=4),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_each_iteration_is_the_next_epoch_of_the_conveyer(name: str) -> None:
    pipeline = PIPELINES[name]()
    with PIPELINES[name]().conveyer() as conveyer:
        epochs = [str(list(conveyer)) for _ in range(3)]
    assert [str(list(pipeline)) for _ in range(3)] == epochs
    assert len(set(epochs)) == 3


def test_an_iterator_stays_ended() -> None:
    with Range(4, repeating=False).conveyer() as conveyer:
        iterator = iter(conveyer)
        assert [list(islice(iterator, 2)) for _ in range(4)] == [[0, 1], [2, 3], [], []]
        assert list(iterator) == []
        assert list(conveyer) == [0, 1, 2, 3]
        assert next(iterator, None) is None


def test_iteration_begins_at_the_start_although_the_last_one_was_left() -> None:
    pipeline = Items(range(8)).map(drawn)
    assert [[item for item, _ in islice(pipeline, 3)], [item for item, _ in pipeline]] == [[0, 1, 2], list(range(8))]


def test_deterministic_items_are_the_same_in_each_iteration() -> None:
    pipeline: Any = Items(["a", "b"]).map(str.upper)
    assert [list(pipeline), list(pipeline), list(pipeline.batch(2))] == [["A", "B"], ["A", "B"], [["A", "B"]]]


def test_source_that_repeats_begins_again() -> None:
    pipeline = Range(3).map(lambda item: item)
    assert [list(islice(pipeline, 4)), list(islice(pipeline, 4))] == [[0, 1, 2, 0]] * 2


def test_coroutine_functions_are_applied_by_async_map() -> None:
    async def doubled(item: int) -> int:
        return 2 * item

    assert list(Items(range(5)).async_map(doubled, in_flight=2).filter(lambda item: item != 4)) == [0, 2, 6, 8]


def read(item: int) -> int:
    return item


def test_repr_shows_the_methods_and_not_the_stages_that_they_add() -> None:
    pipeline = Items([1, 2, 3]).map(read, workers=2, buffer_size=8).filter(read).map(read).batch(2)
    text = "Items(list of 3).map(read, workers=2, buffer_size=8).filter(read).map(read).batch(2)"
    assert repr(pipeline) == text
    with pipeline.conveyer() as conveyer:
        assert repr(conveyer) == f"Conveyer({text})"
    with Join([(Items([1]), 1), (Items([2]), 1)]) as join:
        assert repr(join) == "Join(2 members)"


def test_length_is_the_number_of_batches() -> None:
    assert len(Items(range(8)).batch(3)) == len(list(Items(range(8)).batch(3))) == 3
    assert len(Items(range(8)).batch(3, return_partial_batch=False)) == 2
    stream = Stream(range(8)).batch(3)
    assert stream  # has no length, but is not nothing
    with pytest.raises(TypeError, match="number is not known before they are read"):
        len(stream)
    assert len(list(stream)) == 3


@pytest.mark.parametrize("name", ["state_dict", "load_state_dict", "state", "stats"])
@pytest.mark.parametrize("pipeline", [Items(range(8)).batch(3), Range(3), Items([1])], ids=["pipeline", "range", "items"])
def test_method_of_a_conveyer_says_how_to_get_one(pipeline: Any, name: str) -> None:
    assert not hasattr(pipeline, name)
    with pytest.raises(
        AttributeError, match=rf"`with pipeline.conveyer\(\) as batches:`, iterate `batches`, and call `batches.{name}`"
    ):
        getattr(pipeline, name)
    with pytest.raises(AttributeError, match=r"object has no attribute 'other'$"):
        _ = pipeline.other
