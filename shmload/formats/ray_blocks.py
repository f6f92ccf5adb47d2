"""RayDataset: the rows of a ray.data.Dataset by their number, copied from Arrow blocks in Ray's object store into the batch.

RayStream: the rows of one that is not held anywhere as a whole, block by block, as Ray Data makes them.

Ray Data decides what the rows are; which of them are read when, by whom, and where a run goes on is ShmLoader's, as for any dataset
with a length. So the dataset is executed once, and its blocks stay in the object store, each with a known number of rows. Whoever
reads is a process of the cluster by itself and gets a block where it is needed: one that lies on its node is read there without a
copy.

A reference travels with its owner's address, as Ray passes references on by hand (docs.ray.io, "out-of-band serialization"): Ray
then keeps the blocks until the program that made the dataset ends. That program is their owner: with it the blocks go.

Ray Data's iterators are for what is too large for that. They give blocks to a fixed number of consumers and know no place to go on
from, so a stream is an IterableDataset: a worker is a consumer, and a state counts what came, which is read again on a resume. That
is the same only where Ray keeps the order of blocks. Then the split that has fewest rows gets the next one, whoever is slow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from shmload.batch.row_placer import OneSample, empty_rows
from shmload.formats.arrow.arrow_groups import Groups
from shmload.formats.arrow.arrow_schema import schema_of
from shmload.formats.arrow.arrow_types import plain_values
from shmload.formats.column_dataset import GroupedDataset, Opened
from shmload.formats.field_names import names_of
from shmload.formats.row_numbers import Indices
from shmload.world import rank_and_world_size


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

        blocks = _in_order(dataset, dataset.to_arrow_refs)
        look = ray.remote(_look).options(num_cpus=0)
        looks = ray.get([look.remote(block) for block in blocks])
        held = [(block, *found) for block, found in zip(blocks, looks, strict=True) if found[0]]
        super().__init__(f"{len(held)} blocks of Ray Data")
        if not held:
            raise ValueError("the ray.data.Dataset has no rows")
        _check_columns(columns)
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
        self._blocks = _here(self._blocks, self._pid, self._address, "RayDataset")
        return list(self._blocks)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": _pickled(self._blocks)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import ray

        self.__dict__.update(state, _pid=os.getpid())
        if ray.is_initialized():  # now, while what has brought the references still holds them
            self._references()


class RayStream(IterableDataset[dict[str, Any]]):
    """Rows of a `ray.data.Dataset` as Ray makes them, block by block: an IterableDataset of what fits in no memory, say.

    Each pass executes the Dataset. Fields are as `RayDataset`'s. Read it in the process that made it (`num_workers=0`), by an actor
    (`backend="ray"`), or by processes that connect to the cluster (`multiprocessing_context="forkserver"`, or "spawn").

    Order and resume: with `preserve_order` among the Dataset's execution options, which a Dataset given here is read with, and a
    source that gives the same rows each time, so does the stream, and a loader's state goes on exactly, with as many workers and
    ranks: what came before is read again and thrown away. Without it, as Ray Train's shards are by default
    (`ray.train.DataConfig(execution_options=...)` changes that), rows come as they are done, and a resume is of their number alone.

    Args:
        source: a `ray.data.Dataset`, of which this process is the only reader; or a `ray.data.DataIterator`, which is one rank's
            part: what `ray.train.get_dataset_shard` gives, or one of `Dataset.streaming_split`. Those are read by all ranks at the
            same time: each waits for the others to begin its pass.
        num_readers: workers that read a Dataset, each blocks of its own. A DataIterator has one.
        columns, schema, fill_null: as ParquetDataset's.
    Raises:
        TypeError: `source` is neither.
        ValueError: a DataIterator with several readers, or a Dataset that several ranks would each read whole. On reading: the
            loader has not as many workers as readers; blocks with different columns, or one whose rows are no field of a batch.
        RuntimeError: on reading: in a fork of the process that made it.
        SampleError: on reading: a row has a null, or another number of values than the schema says.
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
        import ray

        if num_readers < 1:
            raise ValueError(f"num_readers is the number of workers that read, at least 1; got {num_readers}")
        _check_columns(columns)
        if hasattr(source, "streaming_split"):
            if (num_ranks := rank_and_world_size()[1]) > 1:
                raise ValueError(
                    f"each of the {num_ranks} ranks would execute the whole ray.data.Dataset and read all of it. Give each rank "
                    f"its part: ray.train.get_dataset_shard(name) under Ray Train, else one of dataset.streaming_split({num_ranks})"
                )
            self._splits: Any = _in_order(source, lambda: source.streaming_split(num_readers))  # or those pickled
        elif hasattr(source, "iter_batches"):
            if num_readers > 1:
                raise ValueError(
                    f"a ray.data.DataIterator has one reader; got num_readers={num_readers}. Give the loader num_workers=1, or "
                    "split the Dataset into as many parts as there are workers in all ranks"
                )
            self._splits = [source]
        else:
            raise TypeError(
                "RayStream takes a ray.data.Dataset, or a DataIterator as ray.train.get_dataset_shard gives; got a "
                f"{type(source).__name__}"
            )
        self.num_readers = num_readers
        self._columns, self._asked, self._fill_null = columns, dict(schema or {}), dict(fill_null or {})
        self._address = ray.get_runtime_context().gcs_address
        self._pid = os.getpid()

    def __iter__(self) -> Iterator[dict[str, Any]]:
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


class RayBlocks(Groups):
    """The blocks, open in this process.

    Args:
        get: (one of `blocks`) -> its table; None: they are references.
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


def _at_once(table: Any, schema: Mapping[str, Any]) -> Iterator[Indices]:
    """The rows of a block, a MiB of them at a time, or one where a field's rows differ in length."""
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


def _check_columns(columns: Sequence[str] | None) -> None:
    if columns is not None and not names_of(columns, "columns"):
        raise ValueError("columns needs at least one name; None takes all of them")


def _in_order(dataset: Any, call: Callable[[], Any]) -> Any:
    """What a call gives that executes a Dataset, or keeps a copy of it, whose blocks come in the order of its source."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        return call()
    finally:
        options.preserve_order = before


def _here(held: Any, pid: int, address: str, name: str) -> Any:
    """What Ray passes on by hand, in this process, which is connected from here on.

    Raises:
        RuntimeError: it is a fork of the process `pid`, in which it was made or unpickled.
    """
    import ray

    if pid != os.getpid():
        raise RuntimeError(
            f"a {name} cannot be read in a fork of the process that made it, since Ray's connection does not survive one: "
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
    """Rows, bytes and schema of a block, found where it lies."""
    return table.num_rows, table.nbytes, table.schema
