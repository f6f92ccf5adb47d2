from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shmload.schedule.units import Batched, Sliced, Units

LEVELS = st.lists(
    st.one_of(
        st.builds(Batched, st.integers(1, 5), st.booleans()),
        st.builds(Sliced, st.integers(0, 6), st.none() | st.integers(0, 20), st.integers(1, 3)),
    ),
    max_size=4,
)


def flattened(item: Any) -> list[int]:
    return [item] if isinstance(item, int) else [n for part in item for n in flattened(part)]


@given(LEVELS, st.integers(0, 60))
def test_units_equal_slicing_and_batching_the_samples(levels: list[Sliced | Batched], n: int) -> None:
    items: list[Any] = list(range(n))
    for level in levels:
        if isinstance(level, Sliced):
            items = list(itertools.islice(items, level.start, level.stop, level.step))
        else:
            batches = [items[i : i + level.size] for i in range(0, len(items), level.size)]
            items = [b for b in batches if level.partial or len(b) == level.size]
    units = Units(tuple(levels))
    assert len(items) == units.count(n)
    assert [flattened(item) for item in items] == [units.samples(u, n).tolist() for u in range(len(items))]
