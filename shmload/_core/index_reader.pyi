"""Entries of a packed index, created when they are accessed."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

from numpy.typing import NDArray

from shmload._core.mapping import Mapping

class PackedRows:
    def __new__(cls, *args: Any, **kwargs: Any) -> Self: ...
    def _bind(
        self,
        memory: Mapping,
        columns: Sequence[tuple[str, int, int]],
        *,
        names: tuple[str, ...] | None,
        row_type: type | None,
        arrays: tuple[NDArray[Any] | None, ...],
        rows: range,
    ) -> None: ...
    def _slice(self, item: slice) -> Any: ...
    def __len__(self) -> int: ...
    def __getitem__(self, item: Any, /) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def take(self, indices: Iterable[Any]) -> list[Any]: ...
    def __getitems__(self, indices: Iterable[Any]) -> list[Any]: ...
