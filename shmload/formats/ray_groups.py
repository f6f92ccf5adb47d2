"""`RayBlocks`: the blocks of a `ray.data.Dataset` as groups of Arrow rows. Importing this module needs pyarrow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shmload.formats.arrow.arrow_groups import Groups
from shmload.formats.arrow.arrow_types import plain_values


class RayBlocks(Groups):
    """The blocks of a `ray.data.Dataset`, open in this process.

    Args:
        blocks: references to the blocks, or objects that `get` accepts.
        schema, fill_null: as for `Groups`.
        sizes: (rows, bytes) of each block.
        cache_bytes: size limit of the blocks that are kept.
        get: (one of `blocks`) -> its Arrow table; None if they are references.
        first: number of the first block, for errors.
    """

    def __init__(
        self,
        blocks: Sequence[Any],
        schema: dict[str, Any],
        sizes: Sequence[tuple[int, int]],
        fill_null: Mapping[str, Any],
        cache_bytes: int,
        *,
        get: Callable[[Any], Any] | None = None,
        first: int = 0,
    ) -> None:
        super().__init__(schema, sizes, fill_null, cache_bytes)
        self._blocks, self._get, self._first = blocks, get, first

    def _where(self, group: int) -> str:
        return f"block {self._first + group} of the ray.data.Dataset"

    def _load(self, group: int) -> Mapping[str, Any]:
        import ray

        table = (self._get or ray.get)(self._blocks[group])
        return {name: plain_values(table.column(name)) for name in self.schema}
