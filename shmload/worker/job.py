"""The arguments of a worker: the `Job`, which is the same for all workers of a loader, and the worker's own `WorkerLink`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shmload.worker.own_generators import OwnGenerators
from shmload.worker.read_plan import PLAIN, ReadPlan


@dataclass(frozen=True)
class Job:
    """The work of one loader's workers: read samples of a dataset and make batches of them.

    Attributes:
        dataset: the dataset.
        collate_fn: the user's function; None for torch's default.
        worker_init_fn: called in each worker with its number.
        auto_collation: whether samples are collated into batches.
        seed: the loader's seed; None in torch mode.
        seed_samples: reseed generators before each sample.
        is_iterable: the dataset is an IterableDataset.
        drop_last: drop an incomplete last batch; only used for iterable datasets, because only the worker finds their end.
        shared_seed: seeds the shufflers of DataPipes; None if they are not seeded.
        snapshot_every: interval in batches at which a batch carries its worker's state; 0 for never.
        num_steps: number of batches of a pass, if it is known and workers stay for the next one, else 0. The last batches of such a
            pass always carry a state.
        tolerates_bad_samples: find all bad rows of a batch instead of failing at the first.
        plan: how batches are read.
        num_threads: number of samples that a worker reads at once.
        checks_all: check that each sample decoded in place is written, not only the first.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any] | None
    worker_init_fn: Callable[[int], None] | None
    auto_collation: bool
    seed: int | None
    seed_samples: bool
    is_iterable: bool = False
    drop_last: bool = False
    shared_seed: int | None = None
    snapshot_every: int = 0
    num_steps: int = 0
    tolerates_bad_samples: bool = False
    plan: ReadPlan = PLAIN
    num_threads: int = 1
    checks_all: bool = False

    def note(self, key: Any, epoch: int, batch: int, keys: Sequence[Any] = ()) -> str:
        """Return the note that an error gets: where the pass was, and how to step through the sample.

        Args:
            key: key of the sample that was being read; None if it is unknown.
            epoch: epoch of the pass.
            batch: number of the batch within it.
            keys: keys of all samples of the batch, if they are known; they are named if `key` is not known.
        """
        note = f"shmload: {'' if key is None else f'sample {key!r:.200}, '}epoch {epoch}, batch {batch}"
        if type(self.dataset).__module__.startswith("shmload.pipeline."):  # keys of items mean nothing outside
            return note
        if key is None and len(keys) > 0:
            return f"{note}, of the samples {list(keys)!r:.300}"
        if type(key) is not int:
            return note
        options = "" if self.seed is None else f", seed={self.seed}, epoch={epoch}"
        return f"{note}; to step through it: shmload.debug.read(dataset, {key}{options})"

    def own_generators(self) -> OwnGenerators | None:
        """Return the generators in dataset and collate_fn to seed before each sample; None without any, or without seeding."""
        own = OwnGenerators(self.dataset, self.collate_fn) if self.seed is not None and self.seed_samples else None
        return own or None


@dataclass(frozen=True)
class PeerRing:
    """The ring of another rank of the node, whose chunks a worker may fill when its own ring has none (helping.py).

    Attributes:
        trainer_pid, trainer_began: the rank's process, and its start time, which distinguishes it from a later process of that pid.
        control_path, ready_bell, grants_bell: names to attach to.
        first_record: worker w of this pool has the record `first_record + w` there.
    """

    trainer_pid: int
    trainer_began: str
    control_path: str
    ready_bell: str
    grants_bell: str
    first_record: int


@dataclass(frozen=True)
class WorkerLink:
    """One worker's number, and the memory and bells that it shares with the trainer.

    Attributes:
        worker_id, num_workers: number of the worker, and number of workers.
        trainer_pid: process id of the trainer; the worker ends with it.
        control_path, control_nbytes: segment of the control block.
        ready_bell, orders_bell, grants_bell: names of doorbells.
        base_seed: torch's base seed, to which the worker's number is added.
        affinity: the CPUs on which the worker may run.
        pickled_job_path, pickled_job_nbytes: segment with the pickled job; "" and 0 if the process gets the job as an argument.
        stack_path: segment to which the worker writes its Python stack on request; empty if it cannot.
        peer_rings: rings of other ranks in which the worker helps.
        resume: pickled snapshot to continue from; empty to start from the beginning.
    """

    worker_id: int
    num_workers: int
    trainer_pid: int
    control_path: str
    control_nbytes: int
    ready_bell: str
    orders_bell: str
    grants_bell: str
    base_seed: int
    affinity: tuple[int, ...]
    pickled_job_path: str = ""
    pickled_job_nbytes: int = 0
    stack_path: str = ""
    peer_rings: tuple[PeerRing, ...] = ()
    resume: bytes = b""
