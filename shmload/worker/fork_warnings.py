"""Warn before workers are forked if CUDA is in use or other threads run.

CUDA cannot be used in a forked child, so a dataset that touches the GPU would fail there, and a warning is raised. A lock that
another thread holds during the fork stays held in the child forever. This is rare, so it is only logged, once. Daemon threads do
not count, because almost every program has some (progress bars, loggers).
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings

log = logging.getLogger("shmload")

_has_logged_threads = False


def warn_of_fork() -> None:
    """Warn if CUDA is in use, and log once if other threads run."""
    global _has_logged_threads
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        warnings.warn(
            "CUDA is in use in this process, and workers started by fork cannot use it: a dataset that touches the GPU will fail "
            'there. Keep the dataset on the CPU, or give multiprocessing_context="spawn" or "forkserver"',
            RuntimeWarning,
            stacklevel=2,
        )
    here = threading.current_thread(), threading.main_thread()
    others = [thread.name for thread in threading.enumerate() if thread not in here and not thread.daemon]
    if others and not _has_logged_threads:
        _has_logged_threads = True
        log.warning(
            "workers are forked while %d other thread%s (%s): a lock that %s at that moment stays held in them forever. If a "
            'worker hangs before its first sample, give multiprocessing_context="forkserver"',
            len(others),
            " runs" if len(others) == 1 else "s run",
            ", ".join(others),
            "it holds" if len(others) == 1 else "they hold",
        )
