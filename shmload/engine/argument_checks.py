"""Check the values of a loader's arguments, each by itself and in combination. `argument_types.py` checks their types."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from shmload.device.cuda import check_device
from shmload.engine.argument_types import check_types
from shmload.engine.tuning.auto_number import is_auto
from shmload.introspect.abilities import is_stateful, overrides, package_ability
from shmload.introspect.tables import is_table
from shmload.ray_options import Ray
from shmload.schedule.keyed_batches import KeyedBatches
from shmload.schedule.keyed_order import KeyedOrder
from shmload.worker.own_generators import separate

# for each kind of sampler: a method that only torch mode calls, and the method that seed mode calls instead
_INSTEAD = (
    (KeyedOrder, "__iter__", "take"),
    (KeyedOrder, "__len__", "n"),
    (KeyedBatches, "__iter__", "batch"),
    (KeyedBatches, "__len__", "num_batches"),
)
_CHOICES = {"uneven": ("pad", "drop", "exact"), "on_error": ("raise", "skip", "substitute")}
_PIPELINES = {("shmload.pipeline.methods", "Fluent"), ("shmload.pipeline.running_pipeline", "RunningPipeline")}
# argument, smallest value, description of the valid values for the error
_LEAST = (
    ("ring_bytes", 1, "a positive number of bytes"),
    ("snapshot_every_n_steps", 0, "at least 0"),
    ("max_bad", 0, "at least 0"),
    ("max_restarts", 0, "at least 0"),
    ("sample_timeout_s", sys.float_info.min, "a positive number of seconds"),
)


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise unless the arguments are valid, each by itself and in combination.

    Args:
        given: the arguments of `ShmLoader` by name.
    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is invalid, cannot be combined with another, or has no effect together with the others.
        ImportError: an argument needs a package that is not installed.
    """
    check_types(given)
    _check_pipeline(given["dataset"])
    _check_table(given)
    for name, choices in _CHOICES.items():
        if given[name] not in choices:
            *others, last = (f'"{choice}"' for choice in choices)
            raise ValueError(f"{name} must be {', '.join(others)} or {last}; got {given[name]!r}")
    for name, least, what in _LEAST:
        if given[name] is not None and not given[name] >= least:
            raise ValueError(f"{name} must be {what} or None; got {given[name]}")
    _check_backend(given)
    _check_seed(given)
    _check_samplers(given)
    _check_threads(given)
    _check_policies(given)
    _check_share(given)
    _check_effects(given)
    check_device(given["device"])
    if given["audit"] is not None and not os.fspath(given["audit"]):
        raise ValueError("audit must be the path of a folder; got '', which would be the current folder: give audit='.' for that")
    if given["device"] is not None and given["audit"] is not None:
        raise ValueError(
            "audit and device cannot be combined: the audit records a digest of bytes on the host, and these are on the device. "
            "Audit a pass without device"
        )


def _check_pipeline(dataset: Any) -> None:
    """Raise for a pipeline, which has no samples by number and has its own workers."""
    if {(base.__module__, base.__name__) for base in type(dataset).__mro__} & _PIPELINES:
        raise TypeError(
            f"dataset must give a sample for each number, and a source or pipeline ({type(dataset).__name__}) is itself a loader: "
            "iterate it (`for batch in pipeline`) in place of a ShmLoader, with its batches by .batch(...) and its workers by "
            ".map(..., workers=...)"
        )


def _check_table(given: Mapping[str, Any]) -> None:
    """Raise for a DataFrame that torch would index as if it were a list of rows."""
    if any(given[name] is not None for name in ("sampler", "batch_sampler", "collate_fn")):  # they may know how to index it
        return
    if is_table(given["dataset"]):
        raise TypeError(
            "dataset must give a sample for each number, and a DataFrame gives its columns by name: give "
            "shmload.formats.ArrayDataset({name: frame[name].to_numpy() for name in frame.columns}) for columns of numbers, or "
            "shmload.SharedIndex.from_dataframe(frame)"
        )


def _check_backend(given: Mapping[str, Any]) -> None:
    """Raise if the backend is unknown, is not installed, or does not allow the other arguments."""
    backend = given["backend"]
    if backend in ("process", "auto"):
        return
    if backend == "thread":
        check_thread_workers(given)
        return
    if backend != "ray" and not isinstance(backend, Ray):
        raise ValueError(f'backend must be "process", "thread", "auto", "ray" or a shmload.Ray; got {backend!r}')
    if given["num_workers"] in (0, "auto"):
        raise ValueError(
            f'backend="ray" needs num_workers, the number of its actors (`ray status` shows the CPUs); got {given["num_workers"]!r}'
        )
    if given["sample_timeout_s"] is not None and given["seed"] is None:
        raise ValueError(
            'sample_timeout_s with backend="ray" needs a seed: in torch mode the random streams of an actor end with it'
        )
    if importlib.util.find_spec("ray") is None:
        raise ImportError('backend="ray" needs Ray, which is not installed: pip install "shmload[ray]"')


def check_thread_workers(given: Mapping[str, Any]) -> None:
    """Raise if the other arguments need workers that are processes.

    Args:
        given: the arguments of `ShmLoader` by name.
    Raises:
        ValueError: the message names the argument, and what to do.
    """
    dataset = given["dataset"]
    for is_refused, name, needed in (
        (given["num_workers"] == 0, "num_workers", "num_workers above 0: without workers, the trainer reads"),
        (
            given["multiprocessing_context"] is not None,
            "multiprocessing_context",
            "no processes: leave multiprocessing_context out",
        ),
        (given["threads_per_worker"] != 1, "threads_per_worker", "one thread per worker: raise num_workers in its place"),
        (
            isinstance(dataset, IterDataPipe | MapDataPipe),
            "dataset",
            'a dataset that threads can share, and data pipes have a state: use backend="process"',
        ),
        (
            given["seed"] is None and given["num_workers"] != 1 and is_stateful(dataset),
            "dataset",
            'a dataset without state_dict, because all threads share it: use one worker, or backend="process"',
        ),
    ):
        if is_refused:
            what = type(dataset).__name__ if name == "dataset" else repr(given[name])
            raise ValueError(f'backend="thread" needs {needed}; got {name}={what}')
    try:
        separate(dataset, given["collate_fn"])
    except Exception as error:
        raise ValueError(
            f'backend="thread": each thread needs a copy of the generators that the dataset or collate_fn keeps, and these cannot '
            f'be copied: {error}. Draw from shmload.sample_rng() there, or use backend="process"'
        ) from error


def _check_seed(given: Mapping[str, Any]) -> None:
    """Raise if the seed is invalid, does not go with the dataset, or is missing for an argument that needs one."""
    seed = given["seed"]
    has_order = any(package_ability(given["dataset"], name) is not None for name in ("keyed_order", "epoch_schedule"))
    if seed is None and has_order and given["sampler"] is None and given["batch_sampler"] is None:
        raise ValueError(
            f"{type(given['dataset']).__name__} defines its own order, which only seed mode uses: give ShmLoader a seed, or a "
            "sampler of your own"
        )
    if seed is None:
        if given["seed_samples"]:
            raise ValueError("seed_samples=True needs a seed: without one, each worker has torch's random numbers")
        return
    if not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be an int from 0 to 2**64 - 1; got {seed!r}")
    if given["generator"] is not None:
        raise ValueError("seed and generator cannot be combined: in seed mode, the seed decides the order")
    if isinstance(given["dataset"], IterableDataset):
        raise ValueError(
            "seed mode orders samples by index, which an IterableDataset does not have: give it __getitem__ and "
            "__len__, or leave out seed"
        )


def _check_samplers(given: Mapping[str, Any]) -> None:
    """Raise if a sampler of this package does not fit the dataset, or overrides a method that seed mode does not call."""
    dataset = given["dataset"]
    for name in ("sampler", "batch_sampler"):
        sampler = given[name]
        is_ours = isinstance(sampler, KeyedOrder | KeyedBatches)
        for kind, method, instead in _INSTEAD if given["seed"] is not None else ():
            if isinstance(sampler, kind) and overrides(sampler, (method,), (instead,)):
                raise TypeError(
                    f"{name}: {type(sampler).__name__} overrides {method}, which seed mode does not call: it computes any part of "
                    f"an epoch by {instead}. Override {instead}, or leave out seed"
                )
        if is_ours and given["seed"] is not None and package_ability(dataset, "epoch_schedule") is not None:
            raise ValueError(
                f"the growing {type(dataset).__name__} defines the samples of each epoch itself, and {name}={sampler!r} is an "
                "order of fixed length: leave it out, and give shuffle=True for a random order"
            )
        if not is_ours or sampler.num_needed is None or isinstance(dataset, IterableDataset):
            continue
        try:
            num_samples = len(dataset)
        except (TypeError, NotImplementedError):
            continue
        if sampler.num_needed > num_samples:
            raise ValueError(
                f"{name}={sampler!r} has indices up to {sampler.num_needed - 1} and needs a dataset of {sampler.num_needed} "
                f"samples; this {type(dataset).__name__} has {num_samples}"
            )


def _check_threads(given: Mapping[str, Any]) -> None:
    """Raise if `threads_per_worker` is invalid, or if the context starts threads instead of processes."""
    num_threads = given["threads_per_worker"]
    kind = getattr(given["multiprocessing_context"], "Process", None)
    if isinstance(kind, type) and issubclass(kind, threading.Thread):  # the context of MONAI's ThreadDataLoader
        raise ValueError(
            f"{type(given['multiprocessing_context']).__name__} starts threads, and a ShmLoader's workers are processes: leave "
            "multiprocessing_context out, and give threads_per_worker to read several samples at once in each"
        )
    if not isinstance(num_threads, int) or num_threads < 1:
        raise ValueError(f"threads_per_worker must be an integer of at least 1; got {num_threads!r}")
    if num_threads == 1:
        return
    if given["num_workers"] == 0:
        raise ValueError(f"threads_per_worker={num_threads} needs num_workers > 0: the trainer reads with its own thread")
    if isinstance(given["dataset"], IterableDataset):
        raise ValueError(f"threads_per_worker={num_threads} needs a map-style dataset: an iterator returns one sample at a time")
    if given["seed_samples"]:
        raise ValueError(
            f"seed_samples=True and threads_per_worker={num_threads} cannot be combined: threads share the global generators. "
            "Draw from shmload.sample_rng() in the dataset"
        )


def _check_policies(given: Mapping[str, Any]) -> None:
    """Raise if the policies for errors, late samples and restarts do not fit the dataset or the number of workers."""
    on_error, limit_s, max_restarts = given["on_error"], given["sample_timeout_s"], given["max_restarts"]
    is_iterable = isinstance(given["dataset"], IterableDataset)
    if on_error != "raise" and is_iterable:
        raise ValueError(
            f"on_error={on_error!r} needs a map-style dataset: an iterator ends with its first error. Catch it in the "
            "dataset's __iter__"
        )
    if limit_s is not None and given["num_workers"] == 0:
        raise ValueError("sample_timeout_s needs num_workers > 0: the trainer cannot interrupt a sample that it reads itself")
    if limit_s is not None and is_iterable:
        raise ValueError(
            f"sample_timeout_s={limit_s} needs a map-style dataset: an iterable one's position is lost with its worker, and the "
            "replacement would start over. timeout= limits the time of a batch"
        )
    if max_restarts and is_iterable:
        raise ValueError(
            f"max_restarts={max_restarts} needs a map-style dataset: an iterable one's position is lost with its worker"
        )


def _check_share(given: Mapping[str, Any]) -> None:
    """Raise if `share` is unknown, or if an argument does not allow ranks to share a ring."""
    if given["share"] is None:
        return
    if given["share"] != "node":
        raise ValueError(f'share must be "node" or None; got {given["share"]!r}')
    samplers = [given[name] for name in ("sampler", "batch_sampler") if given[name] is not None]
    for is_refused, name, needed in (
        (
            given["seed"] is None,
            "seed",
            "a seed: in torch mode, order and random streams differ between ranks. Give all ranks the same seed",
        ),
        (
            not all(isinstance(sampler, KeyedOrder | KeyedBatches) for sampler in samplers),
            "sampler" if given["sampler"] is not None else "batch_sampler",
            "an order that all ranks can compute: one of shmload's samplers, or shuffle",
        ),
        (
            given["num_workers"] == 0 or is_auto(given["num_workers"]) or is_auto(given["prefetch_factor"]),
            "prefetch_factor" if is_auto(given["prefetch_factor"]) else "num_workers",
            "a ring of fixed size: num_workers above 0, for the shared worker pool, and prefetch_factor as a number or None",
        ),
        (given["backend"] not in ("process", "auto"), "backend", "workers of this machine: leave backend out"),
        (given["device"] is not None, "device", "batches on the host: leave device out, and copy them with pin_memory=True"),
        (given["on_error"] != "raise", "on_error", 'on_error="raise": each rank would skip or replace bad samples by itself'),
        (given["audit"] is not None, "audit", "no audit, because it expects each sample on one rank: audit a run without share"),
        (
            package_ability(given["dataset"], "epoch_schedule") is not None,
            "dataset",
            "a dataset of fixed length: each rank reads a growing one by itself",
        ),
    ):
        if is_refused:
            what = type(given[name]).__name__ if name in ("dataset", "sampler", "batch_sampler") else repr(given[name])
            raise ValueError(f'share="node" needs {needed}; got {name}={what}')


def _divides(sampler: Any) -> bool:
    """Return whether a sampler, or one inside it, divides the samples among ranks, like torch's DistributedSampler."""
    while sampler is not None:
        if hasattr(sampler, "num_replicas"):
            return True
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return False


def _check_effects(given: Mapping[str, Any]) -> None:
    """Raise for shmload's own arguments that have no effect together with the others.

    torch's own arguments are not checked: torch decides whether it is an error that they have no effect.
    """
    is_seeded, has_workers = given["seed"] is not None, given["num_workers"] != 0
    samplers = [given[name] for name in ("sampler", "batch_sampler") if given[name] is not None]
    is_foreign = not all(isinstance(sampler, KeyedOrder | KeyedBatches) or _divides(sampler) for sampler in samplers)
    # the audit names its files by the rank, so rank and world_size do have an effect
    is_named = given["audit"] is not None and (bool(samplers) or isinstance(given["dataset"], IterableDataset))
    has_ranks = (given["rank"], given["world_size"]) not in ((None, None), (0, 1))  # rank 0 of 1 reads all samples, in every mode
    ranks = f"rank={given['rank']} and world_size={given['world_size']}"
    is_uneven, uneven = given["uneven"] != "pad", f"uneven={given['uneven']!r}"
    for is_idle, what, remedy in (
        (
            has_ranks and not is_seeded and not is_named,
            f"{ranks} have no effect without seed=",
            "every rank would read all samples. Give a seed, or a torch.utils.data.DistributedSampler",
        ),
        (
            has_ranks and is_seeded and is_foreign and not is_named and given["share"] is None,
            f"{ranks} have no effect with a sampler of your own",
            "the sampler decides what this rank reads. Leave them out, or give shuffle= in place of the sampler",
        ),
        (
            is_uneven and not is_seeded,
            f"{uneven} has no effect without seed=",
            "it divides the last batch among the ranks of seed mode",
        ),
        (
            is_uneven and given["drop_last"],
            f"{uneven} has no effect with drop_last=True",
            "the last batch is dropped. Give one of them",
        ),
        (
            is_seeded and given["snapshot_every_n_steps"] != 1,
            f"snapshot_every_n_steps={given['snapshot_every_n_steps']} has no effect with seed=",
            "in seed mode a position needs no snapshots. Leave it out",
        ),
        (
            given["max_bad"] is not None and given["on_error"] == "raise",
            f'max_bad={given["max_bad"]} has no effect with on_error="raise"',
            'the first bad sample is an error. Give on_error="skip" or on_error="substitute"',
        ),
        (
            given["ring_bytes"] is not None and not has_workers,
            f"ring_bytes={given['ring_bytes']} has no effect with num_workers=0",
            "without workers there is no ring. Leave it out",
        ),
        (
            given["max_restarts"] is not None and not has_workers,
            f"max_restarts={given['max_restarts']} has no effect with num_workers=0",
            "there are no workers to replace. Leave it out",
        ),
    ):
        if is_idle:
            raise ValueError(f"{what}: {remedy}")
