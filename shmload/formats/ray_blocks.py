"""RayDataset and RayStream: read the rows of a ray.data.Dataset from Arrow blocks in Ray's object store.

RayDataset reads rows by index. Ray Data determines the rows; ShmLoader determines their order, which worker reads each, and where a
run resumes, as for any dataset with a length. The dataset is therefore executed once, and its blocks stay in the object store, each
with a known number of rows. Each reading process is connected to the cluster and fetches the blocks that it needs. A block on the
same node is read without a copy.

A reference is pickled together with its owner's address (docs.ray.io, "out-of-band serialization"), so Ray keeps the blocks until
the program that created the dataset ends. That program is their owner, and the blocks are freed with it.

RayStream reads rows block by block, for datasets that are too large for the object store. Ray Data's iterators give blocks to a
fixed number of consumers and cannot start at a position. A stream is therefore an IterableDataset in which each worker is a
consumer. A state counts the rows delivered, and a resume reads them again. This is exact only if Ray keeps the order of blocks;
then the split with the fewest rows gets the next block, even if its reader is slow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from shmload.batch.row_placer import OneSample, empty_rows
from shmload.formats.column_dataset import GroupedDataset, Opened
from shmload.formats.extras import library
from shmload.formats.field_names import columns_of
from shmload.formats.row_numbers import Indices
from shmload.processes.ranks import rank_and_world_size

if TYPE_CHECKING:
    from shmload.formats.ray_groups import RayBlocks


class RayDataset(GroupedDataset):
    """Rows of a `ray.data.Dataset`, each of whose blocks is an Arrow table.

    Creating one executes the dataset, in the order of its source. The blocks stay in Ray's object store and must fit there, or on
    the disks that it spills to. Columns become fields as in `ParquetDataset`, and numpy arrays of one shape (Ray's tensors) become
    rows of that shape.

    Read it in the process that created it, in actors (`backend="ray"`, which are placed near the blocks), or in processes that
    connect to the cluster themselves (`multiprocessing_context="forkserver"`, or "spawn").

    Args:
        dataset: a `ray.data.Dataset`. One that is materialized already keeps its order; to get the same rows after a restart, it
            must have been created with `preserve_order`.
        columns, schema, fill_null: as for ParquetDataset.
        cache_bytes: size limit of the blocks that a process keeps; blocks on its own node take no additional memory.
    Raises:
        ValueError: it has no rows, blocks with different columns, or columns whose rows cannot be fields of a batch.
        RuntimeError: on reading: in a fork of the process that created it.
        SampleError: on reading: a row has a null, or a number of values that differs from the schema.
    Thread/process safety: any number of readers, as long as the program that created it runs.
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
        library("pyarrow", "ray")
        ray = library("ray", "ray")
        from shmload.formats.arrow.arrow_schema import schema_of

        blocks = _in_order(dataset, dataset.to_arrow_refs)
        look = ray.remote(_look).options(num_cpus=0)
        looks = ray.get([look.remote(block) for block in blocks])
        held = [(block, *found) for block, found in zip(blocks, looks, strict=True) if found[0]]
        super().__init__(f"{len(held)} blocks of Ray Data")
        if not held:
            raise ValueError("the ray.data.Dataset has no rows")
        columns = columns_of(columns)
        self._blocks: Any = [block for block, *_ in held]  # references, possibly pickled
        self._sizes = [(num_rows, nbytes) for _, num_rows, nbytes, _ in held]
        schemas = {f"block {number}": found for number, (*_, found) in enumerate(held)}
        self._fill_null = dict(fill_null or {})
        self._schema = schema_of(schemas, columns, schema or {}, self._fill_null, "blocks")
        self._cache_bytes = cache_bytes
        self._address = ray.get_runtime_context().gcs_address
        self._pid = os.getpid()

    @property
    def schema(self) -> dict[str, Any]:
        """Return type and shape of each field, as for ParquetDataset."""
        return self._schema

    def __len__(self) -> int:
        return sum(num_rows for num_rows, _ in self._sizes)

    def bytes_by_node(self) -> dict[str, int]:
        """Return the size of the blocks on each node, by Ray's node id; a loader's actors are placed near them."""
        from ray.experimental import get_object_locations

        found: dict[str, int] = {}
        locations = get_object_locations(self._references())
        for block, (_, nbytes) in zip(self._blocks, self._sizes, strict=True):
            for node in locations[block]["node_ids"]:
                found[node] = found.get(node, 0) + nbytes
        return found

    def _open(self) -> Opened:
        from shmload.formats.ray_groups import RayBlocks

        return RayBlocks(self._references(), self._schema, self._sizes, self._fill_null, self._cache_bytes)

    def _references(self) -> list[Any]:
        """Return the references to the blocks, after connecting to Ray if necessary."""
        self._blocks = _here(self._blocks, self._pid, self._address, "RayDataset")
        return list(self._blocks)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": _pickled(self._blocks)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import ray

        self.__dict__.update(state, _pid=os.getpid())
        if ray.is_initialized():  # now, while the message that contained the references still keeps them alive
            self._references()


class RayStream(IterableDataset[dict[str, Any]]):
    """Rows of a `ray.data.Dataset` as Ray produces them, block by block: an IterableDataset, for data too large for memory.

    Each pass executes the Dataset. Fields are the same as for `RayDataset`. Read it in the process that created it
    (`num_workers=0`), in an actor (`backend="ray"`), or in processes that connect to the cluster
    (`multiprocessing_context="forkserver"`, or "spawn").

    Order and resume: with `preserve_order` among the Dataset's execution options, which is set for a Dataset given here, and a
    source that returns the same rows each time, the order is the same in each pass. A loader's state then resumes exactly with the
    same number of workers and ranks: earlier rows are read again and dropped. Without it, which is the default for Ray Train's
    shards (`ray.train.DataConfig(execution_options=...)` changes that), rows arrive as they are completed, and a resume skips only
    their number.

    Args:
        source: a `ray.data.Dataset`, which only this process reads; or a `ray.data.DataIterator`, which is the part of one rank:
            the result of `ray.train.get_dataset_shard`, or one of `Dataset.streaming_split`. All ranks must read theirs at the same
            time: each waits for the others to begin a pass.
        num_readers: number of workers that read a Dataset, each its own blocks. Must be 1 for a DataIterator.
        columns, schema, fill_null: as for ParquetDataset.
    Raises:
        TypeError: `source` is neither of these.
        ValueError: a DataIterator with several readers, or a Dataset that several ranks would each read completely. On reading: the
            loader's number of workers differs from `num_readers`; blocks with different columns, or rows that cannot be fields of a
            batch.
        RuntimeError: on reading: in a fork of the process that created it.
        SampleError: on reading: a row has a null, or a number of values that differs from the schema.
    """

    def __init__(
        self,
        source: Any,
        columns: Sequence[str] | None = None,
        schema: Mapping[str, Any] | None = None,
        *,
        num_readers: int = 1,
        fill_null: Mapping[str, Any] | None = None,
    ) -> None:
        library("pyarrow", "ray")
        ray = library("ray", "ray")
        if num_readers < 1:
            raise ValueError(f"num_readers is the number of workers that read, at least 1; got {num_readers}")
        columns = columns_of(columns)
        if hasattr(source, "streaming_split"):
            if (num_ranks := rank_and_world_size()[1]) > 1:
                raise ValueError(
                    f"each of the {num_ranks} ranks would execute the whole ray.data.Dataset and read all of it. Give each rank "
                    f"its part: ray.train.get_dataset_shard(name) under Ray Train, else one of dataset.streaming_split({num_ranks})"
                )
            self._splits: Any = _in_order(source, lambda: source.streaming_split(num_readers))  # possibly pickled
        elif hasattr(source, "iter_batches"):
            if num_readers > 1:
                raise ValueError(
                    f"a ray.data.DataIterator has one reader; got num_readers={num_readers}. Give the loader num_workers=1, or "
                    "split the Dataset into as many parts as there are workers in all ranks"
                )
            self._splits = [source]
        else:
            raise TypeError(
                "RayStream takes a ray.data.Dataset, or a DataIterator as ray.train.get_dataset_shard gives; got "
                f"{type(source).__name__}"
            )
        self.num_readers = num_readers
        self._columns, self._asked, self._fill_null = columns, dict(schema or {}), dict(fill_null or {})
        self._address = ray.get_runtime_context().gcs_address
        self._pid = os.getpid()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        from shmload.formats.arrow.arrow_schema import schema_of
        from shmload.formats.ray_groups import RayBlocks

        worker = get_worker_info()
        number, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if num_workers != self.num_readers:
            raise ValueError(
                f"a RayStream of num_readers={self.num_readers} is read by {num_workers} workers: some would get no rows, or all "
                "would wait for a reader that is not there. Give the loader as many num_workers as the stream has num_readers"
            )
        self._splits = _here(self._splits, self._pid, self._address, "RayStream")
        first: Any = None
        found = self._splits[number].iter_batches(batch_size=None, batch_format="pyarrow")
        for block, table in enumerate(table for table in found if table.num_rows):
            first = first or table.schema
            schemas = {"block 0": first, f"block {block}": table.schema}
            schema = schema_of(schemas, self._columns, self._asked, self._fill_null, "blocks")
            size = table.num_rows, table.nbytes
            held = RayBlocks([table], schema, [size], self._fill_null, 2 * table.nbytes + 1, get=lambda table: table, first=block)
            for rows in _at_once(table, schema):
                yield from _samples(held, rows)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_splits": _pickled(self._splits)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _pid=os.getpid())


def _at_once(table: Any, schema: Mapping[str, Any]) -> Iterator[Indices]:
    """Return the row numbers of a block in groups of up to a MiB and 256 rows, or singly if a field's rows differ in length."""
    is_fixed = all(spec in (str, bytes) or None not in spec[1] for spec in schema.values())
    count = min(max((table.num_rows << 20) // max(table.nbytes, 1), 1), 256) if is_fixed else 1
    rows = np.arange(table.num_rows)
    return (rows[first : first + count] for first in range(0, len(rows), count))


def _samples(held: RayBlocks, rows: Indices) -> Iterator[dict[str, Any]]:
    schema = held.schema
    if len(rows) == 1:
        out = OneSample(schema)
        held.read(rows, out)
        yield out.sample()
        return
    fields = {name: empty_rows(spec[0], (len(rows), *spec[1])) for name, spec in schema.items() if spec not in (str, bytes)}
    held.read(rows, fields)
    for row in range(len(rows)):
        yield {name: fields[name][row] for name in schema}


def _in_order(dataset: Any, call: Callable[[], Any]) -> Any:
    """Return the result of `call`, which executes or copies a Dataset, with `preserve_order` set during the call."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        return call()
    finally:
        options.preserve_order = before


def _here(held: Any, pid: int, address: str, name: str) -> Any:
    """Return Ray's objects, unpickling `held` if it is bytes, after connecting this process to `address` if necessary.

    Raises:
        RuntimeError: this is a fork of the process `pid`, in which they were created or unpickled.
    """
    import ray

    if pid != os.getpid():
        raise RuntimeError(
            f"{name} cannot be read in a fork of the process that made it, since Ray's connection does not survive one: "
            'give multiprocessing_context="forkserver", or backend="ray"'
        )
    if not ray.is_initialized():
        ray.init(address=address, namespace="shmload", logging_level="WARNING", log_to_driver=False)
    return ray.cloudpickle.loads(held) if isinstance(held, bytes) else held


def _pickled(held: Any) -> bytes:
    import ray

    pickled: bytes = held if isinstance(held, bytes) else ray.cloudpickle.dumps(held)
    return pickled


def _look(table: Any) -> tuple[int, int, Any]:
    """Return rows, bytes and schema of a block. Runs as a task of Ray, which places it near the block."""
    return table.num_rows, table.nbytes, table.schema
