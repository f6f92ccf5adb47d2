"""RayDataset: the rows of a ray.data.Dataset by their number, copied from Arrow blocks in Ray's object store into the batch.

Ray Data decides what the rows are; which of them are read when, by whom, and where a run goes on is ShmLoader's, as for any dataset
with a length. So the dataset is executed once, and its blocks stay in the object store, each with a known number of rows. Whoever
reads is a process of the cluster by itself and gets a block where it is needed: one that lies on its node is read there without a
copy.

A reference travels with its owner's address, as Ray passes references on by hand (docs.ray.io, "out-of-band serialization"): Ray
then keeps the blocks until the program that made the dataset ends. That program is their owner: with it the blocks go.

Rejected: Ray Data's iterators. They give batches in an order that they choose, to a fixed number of consumers, and know no place to
go on from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from shmload.formats.arrow_tables import Groups, plain_values, schema_of
from shmload.formats.columns import GroupedDataset, Opened


class RayDataset(GroupedDataset):
    """Rows of a `ray.data.Dataset`, of which each block is an Arrow table.

    Making one executes the dataset, in the order of its source, and the blocks stay in Ray's object store: they have to fit there,
    or on the disks it spills to. Columns become fields as `ParquetDataset`'s do, and numpy arrays of one shape (Ray's tensors) rows
    of that shape.

    Read it in the process that made it, by actors (`backend="ray"`, which are put near the blocks), or by processes that connect to
    the cluster for themselves (`multiprocessing_context="forkserver"`, or "spawn").

    Args:
        dataset: a `ray.data.Dataset`. One that is materialised already keeps the order that it has: for the same rows after a
            restart it has to be made with `preserve_order`.
        columns, schema, fill_null: as ParquetDataset's.
        cache_bytes: of blocks that a process holds on to; what lies on its node takes no memory of its own.
    Raises:
        ValueError: it has no rows, blocks with different columns, or columns whose rows are no fields of a batch.
        RuntimeError: on reading: in a fork of the process that made it.
        SampleError: on reading: a row has a null, or another number of values than the schema says.
    Thread/process safety: any number of readers, as long as the program that made it runs.
    """

    def __init__(
        self,
        dataset: Any,
        columns: Sequence[str] | None = None,
        schema: Mapping[str, Any] | None = None,
        *,
        fill_null: Mapping[str, Any] | None = None,
        cache_bytes: int = 1 << 28,
    ) -> None:
        import ray

        options = dataset.context.execution_options
        before, options.preserve_order = options.preserve_order, True
        try:
            blocks = dataset.to_arrow_refs()
        finally:
            options.preserve_order = before
        look = ray.remote(_look).options(num_cpus=0)
        looks = ray.get([look.remote(block) for block in blocks])
        held = [(block, *found) for block, found in zip(blocks, looks, strict=True) if found[0]]
        super().__init__(f"{len(held)} blocks of Ray Data")
        if not held:
            raise ValueError("the ray.data.Dataset has no rows")
        if columns is not None and not columns:
            raise ValueError("columns needs at least one name; None takes all of them")
        self._blocks: Any = [block for block, *_ in held]  # references, or those pickled
        self._sizes = [(num_rows, nbytes) for _, num_rows, nbytes, _ in held]
        schemas = {f"block {number}": found for number, (*_, found) in enumerate(held)}
        self._fill_null = dict(fill_null or {})
        self._schema = schema_of(schemas, columns, schema or {}, self._fill_null, "blocks")
        self._cache_bytes = cache_bytes
        self._address = ray.get_runtime_context().gcs_address
        self._pid = os.getpid()

    @property
    def schema(self) -> dict[str, Any]:
        """Type and shape of each field, as ParquetDataset's."""
        return self._schema

    def __len__(self) -> int:
        return sum(num_rows for num_rows, _ in self._sizes)

    def bytes_by_node(self) -> dict[str, int]:
        """Bytes of the blocks that lie on each node, by Ray's id of it; actors of a loader are put near them."""
        from ray.experimental import get_object_locations

        found: dict[str, int] = {}
        locations = get_object_locations(self._references())
        for block, (_, nbytes) in zip(self._blocks, self._sizes, strict=True):
            for node in locations[block]["node_ids"]:
                found[node] = found.get(node, 0) + nbytes
        return found

    def _open(self) -> Opened:
        return RayBlocks(self._references(), self._schema, self._sizes, self._fill_null, self._cache_bytes)

    def _references(self) -> list[Any]:
        """The blocks, in a process that is connected to Ray."""
        import ray

        if self._pid != os.getpid():
            raise RuntimeError(
                "a RayDataset cannot be read in a fork of the process that made it, since Ray's connection does not survive one: "
                'give multiprocessing_context="forkserver", or backend="ray"'
            )
        if not ray.is_initialized():
            ray.init(address=self._address, namespace="shmload", logging_level="WARNING", log_to_driver=False)
        if isinstance(self._blocks, bytes):
            self._blocks = ray.cloudpickle.loads(self._blocks)
        return list(self._blocks)

    def __getstate__(self) -> dict[str, Any]:
        import ray

        is_pickled = isinstance(self._blocks, bytes)
        return {**self.__dict__, "_blocks": self._blocks if is_pickled else ray.cloudpickle.dumps(self._blocks)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import ray

        self.__dict__.update(state, _pid=os.getpid())
        if ray.is_initialized():  # now, while what has brought the references still holds them
            self._references()


class RayBlocks(Groups):
    """The blocks, open in this process."""

    def __init__(
        self,
        blocks: Sequence[Any],
        schema: dict[str, Any],
        sizes: Sequence[tuple[int, int]],
        fill_null: Mapping[str, Any],
        cache_bytes: int,
    ) -> None:
        super().__init__(schema, sizes, fill_null, cache_bytes)
        self._blocks = blocks

    def _where(self, group: int) -> str:
        return f"block {group} of the ray.data.Dataset"

    def _load(self, group: int) -> Mapping[str, Any]:
        import ray

        table = ray.get(self._blocks[group])
        return {name: plain_values(table.column(name)) for name in self.schema}


def _look(table: Any) -> tuple[int, int, Any]:
    """Rows, bytes and schema of a block, found where it lies."""
    return table.num_rows, table.nbytes, table.schema
