"""shmload: a shared-memory, zero-copy data loader for PyTorch."""

__version__ = "0.1.0"
