"""All errors that shmload raises.

    ShmloadError
    ├── WorkerDied        (RuntimeError)   a worker process ended, and the pass cannot continue
    ├── RankFailed        (RuntimeError)   a process that `spawn` started failed; the message has its traceback
    ├── RankLeft          (RuntimeError)   a rank that shares this rank's ring ended, or reads other batches
    ├── CopyFailed        (RuntimeError)   a batch could not be copied to a device
    ├── ClusterUnreachable (ConnectionError) the Ray cluster was not found, or cannot decode
    ├── SampleTimeout     (RuntimeError)   one sample took longer than `sample_timeout_s`
    ├── SampleError       (RuntimeError)   a sample could not be read or placed in its batch; the message has the traceback
    ├── RingTooSmall      (MemoryError)    the ring does not fit in the available memory
    ├── ShardCorrupt      (ValueError)     a shard's bytes violate its format
    ├── StateMismatch     (ValueError)     a saved state belongs to another loader
    └── StoreError        (OSError)        an object store could not be read or written
        ├── CacheFull                     a cache is full, and nothing in it may be evicted
        └── ObjectMissing (FileNotFoundError)  an object does not exist

Each class also derives from a builtin exception, so that code written for torch's loader catches it.
"""


class ShmloadError(Exception):
    """Base class of all errors of shmload."""


def is_of_system(error: Exception) -> bool:
    """Return whether an error is the system's, such as too many open files, and not a library's OSError about a file's contents."""
    return isinstance(error, OSError) and error.errno is not None


class WorkerDied(ShmloadError, RuntimeError):
    """A worker process ended, and the pass cannot continue.

    The message has the worker, the signal or exit status, and the epoch, batch and sample that it was reading. In torch mode every
    death raises this unless `max_restarts` allows a replacement. In seed mode dead workers are replaced, and this is raised for a
    sample that ended two workers, or when `max_restarts` is exceeded.
    """


class RankFailed(ShmloadError, RuntimeError):
    """A process that `spawn` started failed, and the others were stopped.

    The message has the first process that failed, its exception, exit code or signal, its traceback or last lines on stderr,
    and what happened to the others.
    """


class RankLeft(ShmloadError, RuntimeError):
    """A rank of this node that shares a ring with this rank (`share="node"`) ended, or reads other batches.

    The message has the rank, what it did, and how many batches it had read.
    """


class CopyFailed(ShmloadError, RuntimeError):
    """A batch could not be copied to a device. The message has the batch, if it is known, and the device's error."""


class ClusterUnreachable(ShmloadError, ConnectionError):
    """No Ray cluster was found at the given address, or none of its nodes can decode.

    The message has the address and how to start and join a cluster; or what the nodes lack: CPUs, versions, packages.
    """


class SampleTimeout(ShmloadError, RuntimeError):
    """One sample took longer than `sample_timeout_s`. The message has the sample and the Python stack of its worker."""


class SampleError(ShmloadError, RuntimeError):
    """A sample could not be read or placed in its batch.

    An exception of the dataset keeps its own type, as in torch's loader. This class is for everything else: a sample whose shape,
    dtype or structure differs from its batch, a record that does not fit its schema, more bad samples than `max_bad`.
    """


class RingTooSmall(ShmloadError, MemoryError):
    """The ring does not fit in the available memory. The message has the bytes needed and free, and how many slots would fit."""


class ShardCorrupt(ShmloadError, ValueError):
    """A file violates its format. The message has the file, the offset and the cause."""


class StateMismatch(ShmloadError, ValueError):
    """A saved state belongs to another loader. The message has what differs: length, seed, global batch, order, format."""


class StoreError(ShmloadError, OSError):
    """An object store could not be read or written."""


class CacheFull(StoreError):
    """A cache is full: its byte budget or its disk. The message has the bytes needed, used, leased and evictable."""


class ObjectMissing(StoreError, FileNotFoundError):
    """An object does not exist in its store. The message has its URL."""
