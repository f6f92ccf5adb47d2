"""Every error shmload raises on purpose.

    ShmloadError
    ├── WorkerDied        (RuntimeError)   a worker process ended and could not be, or may not be, replaced
    ├── RankFailed        (RuntimeError)   a process that `spawn` started failed; its traceback is in the text
    ├── RankLeft          (RuntimeError)   a rank that shares this one's ring has ended, or does not read the same batches
    ├── CopyFailed        (RuntimeError)   a batch could not be copied to a device
    ├── ClusterUnreachable (ConnectionError) there is no Ray cluster where one was said to be, or it lacks something
    ├── SampleTimeout     (RuntimeError)   one sample took longer than `sample_timeout_s`
    ├── SampleError       (RuntimeError)   a sample could not be read or placed; the worker's traceback is in the text
    ├── RingTooSmall      (MemoryError)    the ring does not fit in the memory there is
    ├── ShardCorrupt      (ValueError)     a shard's bytes are not what its format says
    ├── StateMismatch     (ValueError)     a saved state belongs to another loader
    └── StoreError        (OSError)        an object store could not be read or written
        ├── CacheFull                     a cache has no room: what it holds is leased, or needed sooner
        └── ObjectMissing (FileNotFoundError)  there is no such object

Each class is also the fitting builtin, so that code written for torch's loader catches it.
"""


class ShmloadError(Exception):
    """Root of shmload's own errors."""


class WorkerDied(ShmloadError, RuntimeError):
    """A worker process ended and could not be, or may not be, replaced.

    The text says which worker, by what signal or exit status, and which epoch, batch and sample it was at. In torch mode that is
    every death, unless `max_restarts` allows for it; in seed mode a sample that ended its worker twice.
    """


class RankFailed(ShmloadError, RuntimeError):
    """One of the processes that `spawn` started failed, and the others have been ended.

    The text says which was the first and how it ended, by exception, exit code or signal, with its traceback or the last it wrote
    to stderr; then what became of the others.
    """


class RankLeft(ShmloadError, RuntimeError):
    """A rank of this node that shares a ring with this one (`share="node"`) has ended, or does not read the same batches.

    The text says which, what it did, and how many batches it had read.
    """


class CopyFailed(ShmloadError, RuntimeError):
    """A batch could not be copied to a device. The text says which batch, if that is known, and what the device said."""


class ClusterUnreachable(ShmloadError, ConnectionError):
    """There is no Ray cluster at the address given, or none of its nodes can decode.

    The text says where it was looked for, and how one is started and joined; or what its nodes lack: CPUs, versions, packages.
    """


class SampleTimeout(ShmloadError, RuntimeError):
    """One sample took longer than `sample_timeout_s`. The text says which, and where in Python its worker was."""


class SampleError(ShmloadError, RuntimeError):
    """A sample could not be read or placed in its batch.

    What a dataset raised keeps its own type, as with torch's loader; this is for what has none: a sample of another shape, dtype or
    structure than its batch, a record that does not fit its schema, more bad samples than `max_bad`.
    """


class RingTooSmall(ShmloadError, MemoryError):
    """The ring does not fit in the memory there is. The text says how much is needed and free, and how many slots would fit."""


class ShardCorrupt(ShmloadError, ValueError):
    """A file's bytes are not what its format says. The text names the file, the place in it and the cause."""


class StateMismatch(ShmloadError, ValueError):
    """A saved state belongs to another loader. The text says what differs: length, seed, global batch, order, format."""


class StoreError(ShmloadError, OSError):
    """An object store could not be read or written."""


class CacheFull(StoreError):
    """A cache has no room, within its budget or on its disk. The text says how much is needed, used, leased and evictable."""


class ObjectMissing(StoreError, FileNotFoundError):
    """A store has no such object. The text names its URL."""
