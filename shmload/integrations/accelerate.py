"""Accelerate's `Accelerator.prepare`, for a ShmLoader.

`accelerator.prepare(loader)` reads a DataLoader's attributes, builds a plain torch DataLoader from them and drops the loader it was
given, without a word. `prepare` here wraps the loader itself in a `DataLoaderShard`, Accelerate's own face of a prepared loader, so
all that Accelerate does around iteration stays Accelerate's code: devices, `end_of_dataloader` and `remainder` (on which gradient
accumulation and `gather_for_metrics` stand), `save_state`. `accelerator.prepare` passes the result through unchanged.

Who gives each process its part:

    seed mode                              the loader itself, by rank and world_size
    torch mode, or a sampler of the user's Accelerate, by its own batch sampler, put into a copy of the loader

Like Accelerate's own it reads one batch ahead, to know the last one; what it says of its state and of `valid` is always of the
batch that the trainer has. Nothing is copied on the CPU: the tensors still lie in the ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.utils import send_to_device
from torch.utils.data import BatchSampler, IterableDataset

from shmload.integrations import orders_itself, rebuilt
from shmload.loader import ShmLoader
from shmload.world import rank_and_world_size

_END = object()


class PreparedLoader(DataLoaderShard):
    """A ShmLoader as Accelerate wants it; attributes it lacks are the loader's (`stats()`, `close()`, `dataset`, ...).

    `len()`, iteration, `state_dict()`, `load_state_dict()` and `set_epoch()` are as the loader's own; `accelerator.save_state`
    saves the loader's state and `load_state` loads it. Made by `prepare`.

    Args:
        loader: what is prepared.
        options: as of Accelerate's DataLoaderShard.
    """

    def __init__(self, loader: ShmLoader[Any], **options: Any) -> None:
        super().__init__(loader.dataset, **options)
        self._is_accelerate_prepared = True
        self.base_dataloader = loader
        self.valid: int | None = loader.valid
        self.use_stateful_dataloader = True  # what save_state and load_state look at
        self.dl_state_dict = loader.state_dict()
        if orders_itself(loader):
            self.load_state_dict(loader.state_dict())  # it goes on where the loader stands
            self.batch_sampler = ScheduledBatches(loader)

    def __iter__(self) -> Iterator[Any]:
        if not orders_itself(self.base_dataloader):
            passing: Iterator[Any] = super().__iter__()
            return passing
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        """One pass in seed mode. Unlike Accelerate's it sets no epoch: the loader counts its own, a pass left early included."""
        self.begin()
        try:
            batches = iter(self.base_dataloader)
            ahead = next(batches, _END)
            while ahead is not _END:
                batch = ahead if self.device is None else send_to_device(ahead, self.device, self._non_blocking)
                self._update_state_dict()
                failure = None
                try:
                    ahead = next(batches, _END)
                except Exception as error:  # of the batch behind this one, which is still to be given
                    failure = error
                self.end_of_dataloader = ahead is _END
                yield batch
                if failure is not None:
                    raise failure
            self._update_state_dict()  # of a rank that has no row in the last step: that is over, too
        finally:
            self.end()

    def _update_state_dict(self) -> None:
        """Notes where the trainer will be; called when its batch is there and the one ahead is not."""
        if not self.end_of_dataloader:
            self.valid = self.base_dataloader.valid
        self.dl_state_dict = self.base_dataloader.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the batch that the trainer has, whatever was read ahead."""
        state: dict[str, Any] = self.dl_state_dict
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `ShmLoader.load_state_dict`; `state_dict` is what `state_dict()` gave here or of the loader itself."""
        self.base_dataloader.load_state_dict(state_dict)
        self._update_state_dict()

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass that `epoch`. A state just loaded stays if it is of that epoch: training loops set it every time."""
        super().set_epoch(epoch)
        if orders_itself(self.base_dataloader):
            self.base_dataloader.set_epoch(epoch)
            self._update_state_dict()

    def __reduce__(self) -> Any:
        raise TypeError("a prepared ShmLoader cannot be pickled: it belongs to this process's Accelerator")


class ScheduledBatches(BatchSampler):
    """What Accelerate asks the batch sampler of a prepared `loader` for, where the loader's schedule rules and not a sampler.

    It cannot be iterated: `accelerate.skip_first_batches` would read other samples through a plain DataLoader.
    """

    def __init__(self, loader: ShmLoader[Any]) -> None:
        self.batch_size = loader.batch_size or 1
        self.num_processes = _num_ranks(loader)
        self.drop_last = loader.drop_last
        # join_uneven_inputs reads and sets it; `uneven` decides all the same
        self.even_batches = loader.uneven != "exact"
        self._num_steps = len(loader)

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[list[int]]:
        raise RuntimeError(
            "a seeded ShmLoader has no batch sampler that others can read: skip_first_batches(prepared, n) would replace it by a "
            "plain DataLoader. Resume with prepared.load_state_dict(state); with transformers.Trainer set ignore_data_skip=True"
        )


def prepare(accelerator: Accelerator, loader: ShmLoader[Any], *, device_placement: bool | None = None) -> PreparedLoader:
    """Prepares a ShmLoader as `accelerator.prepare` prepares a DataLoader, and keeps it a ShmLoader.

    Give the result to `accelerator.prepare` with the model and the optimizer, or not: it is registered either way.
    In seed mode a prepared loader goes on where the loader stands. A loop holds two or three batches at a time, and
    transformers.Trainer two accumulations of them: `prefetch_factor * num_workers` above that keeps all of them in the ring.

    Args:
        accelerator: made before the loader, which asks it for ranks.
        loader: not closed; it is read by the result from now on.
        device_placement: whether batches are moved to `accelerator.device`. None: as the Accelerator says.
    Raises:
        TypeError: not a ShmLoader, or one of an iterable dataset, which gains nothing here.
        ValueError: the Accelerator's and the loader's ways to divide the samples do not go together.
        StateMismatch: Accelerate divides, and the loader has been given a state.
    """
    if isinstance(loader, DataLoaderShard):
        return accelerator.prepare_data_loader(loader)  # type: ignore[no-any-return]  # passed through
    if not isinstance(loader, ShmLoader):
        raise TypeError(f"prepare takes a ShmLoader; give a {type(loader).__name__} to accelerator.prepare")
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError("Accelerate divides iterable datasets in its own way: give this loader to accelerator.prepare")
    if device_placement is None:
        device_placement = accelerator.device_placement
    if accelerator.dispatch_batches:
        raise ValueError(
            "dispatch_batches=True reads in one process and sends batches to the others; a ShmLoader reads in each: leave it None"
        )
    if orders_itself(loader):
        _check_ranks(accelerator, loader)
        prepared = PreparedLoader(
            loader,
            device=accelerator.device if device_placement else None,
            _drop_last=loader.drop_last or loader.uneven == "drop",
            _non_blocking=accelerator.non_blocking,
        )
    else:
        prepared = _divided_by_accelerate(accelerator, loader, device_placement)
    return accelerator.prepare_data_loader(prepared)  # type: ignore[no-any-return]  # registered and passed through


def _divided_by_accelerate(accelerator: Accelerator, loader: ShmLoader[Any], device_placement: bool) -> PreparedLoader:
    if accelerator.num_processes > 1 and loader.batch_sampler is None and not isinstance(loader.sampler, BatchSampler):
        raise ValueError("batch_size=None over several processes: Accelerate divides batches, give batch_size or a seed")
    plain = accelerator.prepare_data_loader(loader, device_placement)
    accelerator._dataloaders.remove(plain)
    if isinstance(plain, DataLoaderDispatcher) or not isinstance(plain, DataLoaderShard):
        raise ValueError(f"{type(plain).__name__} is not supported: without a shard of its own a process has nothing to read")
    if accelerator.num_processes > 1:
        if plain.batch_sampler is None:  # batches come from `sampler`, each read by one call of the dataset
            loader = rebuilt(loader, sampler=plain.sampler, batch_size=None)
        else:
            loader = rebuilt(loader, batch_sampler=plain.batch_sampler)
    return PreparedLoader(
        loader,
        device=plain.device,
        _drop_last=plain._drop_last,
        _non_blocking=plain._non_blocking,
        rng_types=plain.rng_types,
        synchronized_generator=plain.synchronized_generator,
    )


def _check_ranks(accelerator: Accelerator, loader: ShmLoader[Any]) -> None:
    num_ranks = _num_ranks(loader)
    if loader.rank is None and num_ranks != accelerator.num_processes:
        raise ValueError(
            f"this loader divides its samples over {num_ranks} ranks, the Accelerator has {accelerator.num_processes} processes: "
            "make the Accelerator before the loader, or give the loader rank and world_size"
        )
    if accelerator.split_batches and num_ranks > 1:
        raise ValueError(
            "split_batches=True and a seeded ShmLoader: its batch_size is already that of one process; divide it and leave "
            "split_batches False"
        )


def _num_ranks(loader: ShmLoader[Any]) -> int:
    return rank_and_world_size(loader.rank, loader.world_size)[1]
