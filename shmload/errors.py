"""Every error shmload raises on purpose.

    ShmloadError
    ├── WorkerDied        (RuntimeError)   a worker process ended and could not be, or may not be, replaced
    ├── SampleTimeout     (RuntimeError)   one sample took longer than `sample_timeout_s`
    ├── SampleError       (RuntimeError)   a sample could not be read or placed; the worker's traceback is in the text
    ├── RingTooSmall      (MemoryError)    the ring does not fit in the memory there is
    ├── ShardCorrupt      (ValueError)     a shard's bytes are not what its format says
    ├── StateMismatch     (ValueError)     a saved state belongs to another loader
    └── StoreError        (OSError)        an object store could not be read or written

Each class is also the fitting builtin, so that code written for torch's loader catches it.
"""

__all__ = [
    "RingTooSmall",
    "SampleError",
    "SampleTimeout",
    "ShardCorrupt",
    "ShmloadError",
    "StateMismatch",
    "StoreError",
    "WorkerDied",
]


class ShmloadError(Exception):
    """Root of shmload's own errors."""


class WorkerDied(ShmloadError, RuntimeError):
    """A worker process ended and could not be, or may not be, replaced."""


class SampleTimeout(ShmloadError, RuntimeError):
    """One sample took longer than `sample_timeout_s`."""


class SampleError(ShmloadError, RuntimeError):
    """A sample could not be read or placed in its batch."""


class RingTooSmall(ShmloadError, MemoryError):
    """The ring does not fit in the memory there is."""


class ShardCorrupt(ShmloadError, ValueError):
    """A shard's bytes are not what its format says."""


class StateMismatch(ShmloadError, ValueError):
    """A saved state belongs to another loader."""


class StoreError(ShmloadError, OSError):
    """An object store could not be read or written."""
