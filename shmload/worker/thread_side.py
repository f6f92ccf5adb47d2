"""Set up a worker thread as torch sets up a worker process: seeds, and the result of get_worker_info()."""

from __future__ import annotations

import functools
import threading
from typing import Any

from torch.utils.data import get_worker_info

from shmload.processes.fork_lock import ForkLock
from shmload.torch_names import numpy_seed, set_thread_name, worker_module
from shmload.worker.generator_set import GeneratorSet
from shmload.worker.one_thread import compute_alone


def prepare(dataset: Any, worker_id: int, num_workers: int, base_seed: int, generators: GeneratorSet) -> None:
    """Seed the thread's generators as torch seeds a worker's, and set the result of get_worker_info() in this thread.

    Args:
        dataset: the dataset, which all threads share.
        worker_id, num_workers: number of the worker, and number of workers.
        base_seed: torch's base seed of the workers.
        generators: the thread's generators.
    """
    set_thread_name("pt_data_worker")
    compute_alone()
    seed = base_seed + worker_id
    generators.python.seed(seed)
    generators.torch_home.default_generator.manual_seed(seed)
    generators.seed_numpy(numpy_seed(base_seed, worker_id))
    info: dict[str, Any] = {"id": worker_id, "num_workers": num_workers, "seed": seed, "dataset": dataset}
    if rng := getattr(worker_module, "_RNG", None):  # torch.random.thread_safe_generator() returns the thread's generator
        own = rng(generators.python, generators.torch_home.default_generator, generators.numpy)
        info |= {"rng": own, "worker_method": "thread"}
    with _lock:
        infos = _info_of_thread()
    infos.info = worker_module.WorkerInfo(**info)


_lock = ForkLock()  # functools.cache calls its function more than once if threads call it at the same time


@functools.cache
def _info_of_thread() -> threading.local:
    """Let get_worker_info() return a worker thread's own info in that thread, and return where each thread keeps it.

    The function itself is changed, because programs import it by name before they make a loader.
    """
    infos = threading.local()
    vars(worker_module)["_shmload_info_of_thread"] = infos
    get_worker_info.__code__ = _get_worker_info.__code__
    return infos


def _get_worker_info() -> Any:
    """Return the info of this thread, else that of this process; runs with torch's module as its globals."""
    return getattr(_shmload_info_of_thread, "info", None) or _worker_info  # type: ignore[name-defined]  # noqa: F821  # see above
