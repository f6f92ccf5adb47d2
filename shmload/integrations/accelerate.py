"""Prepare a ShmLoader for Accelerate, in place of `Accelerator.prepare`.

`accelerator.prepare(loader)` reads a DataLoader's attributes, builds a plain torch DataLoader from them and silently discards the
loader that it was given. `prepare` here wraps the loader itself in a `DataLoaderShard`, the class of Accelerate's prepared loaders.
So everything that Accelerate does around iteration remains Accelerate's code: devices, `save_state`, and `end_of_dataloader` and
`remainder`, which gradient accumulation and `gather_for_metrics` need. `accelerator.prepare` passes the result through unchanged.

How samples are divided among processes:

    seed mode                    by the loader itself, with rank and world_size
    torch mode, or own sampler   by Accelerate, with its own batch sampler, which is put into a copy of the loader

Like Accelerate's own loaders, it reads one batch ahead in order to recognize the last one. The state and `valid` always describe
the batch that the trainer has. Nothing is copied on the CPU: the tensors are still in the ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from shmload.formats.extras import with_extra
from shmload.integrations import orders_itself, rebuilt
from shmload.loader import ShmLoader
from shmload.modes.seed_mode import SeedStream
from shmload.processes.ranks import rank_and_world_size

try:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
    from accelerate.utils import send_to_device
except ModuleNotFoundError as error:
    raise with_extra(error, "integrations") from error

_END = object()


class PreparedLoader(DataLoaderShard):
    """A ShmLoader prepared for Accelerate. Attributes that it lacks are the loader's (`stats()`, `close()`, `dataset`, ...).

    `len()`, iteration, `state_dict()`, `load_state_dict()` and `set_epoch()` behave as the loader's own; `accelerator.save_state`
    saves the loader's state and `load_state` loads it. `prepare` makes these objects.

    Args:
        loader: the loader to wrap.
        options: arguments of Accelerate's DataLoaderShard.
    """

    remainder: int  # samples in the epoch's last global batch; 0 if it is full, -1 if unknown

    def __init__(self, loader: ShmLoader[Any], **options: Any) -> None:
        super().__init__(loader.dataset, **options)
        self._is_accelerate_prepared = True
        self.base_dataloader = loader
        self.valid: int | None = loader.valid
        self.use_stateful_dataloader = True  # read by save_state and load_state
        self.dl_state_dict = loader.state_dict()
        if orders_itself(loader):
            self.load_state_dict(loader.state_dict())  # continue at the loader's position
            self.batch_sampler = ScheduledBatches(loader)

    def begin(self) -> None:
        """Begin a pass as Accelerate does, which takes the dataset's length for that of an epoch. An order may have another one."""
        super().begin()
        passes = self.base_dataloader._passes
        num_samples = passes.epochs.num_samples if isinstance(passes, SeedStream) else None
        if num_samples is not None and self.remainder >= 0:
            self.remainder = num_samples % self.total_batch_size

    def __iter__(self) -> Iterator[Any]:
        if not orders_itself(self.base_dataloader):
            passing: Iterator[Any] = super().__iter__()
            return passing
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        """Run one pass in seed mode. The epoch is not set, unlike in Accelerate: the loader also counts passes that end early."""
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
                except Exception as error:  # an error of the next batch: yield this batch first
                    failure = error
                self.end_of_dataloader = ahead is _END
                yield batch
                if failure is not None:
                    raise failure
            self._update_state_dict()  # after the last step, also for a rank that has no row in it
        finally:
            self.end()

    def _update_state_dict(self) -> None:
        """Record the state after the trainer's batch. Call this before the next batch is read."""
        if not self.end_of_dataloader:
            self.valid = self.base_dataloader.valid
        self.dl_state_dict = self.base_dataloader.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the batch that the trainer has, even if another batch was read ahead."""
        state: dict[str, Any] = self.dl_state_dict
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as `ShmLoader.load_state_dict` does. `state_dict` comes from this object or from the loader itself."""
        self.base_dataloader.load_state_dict(state_dict)
        self._update_state_dict()

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that `epoch`. A state of that epoch stays loaded, because training loops call this every time."""
        super().set_epoch(epoch)
        if orders_itself(self.base_dataloader):
            self.base_dataloader.set_epoch(epoch)
            self._update_state_dict()

    def __reduce__(self) -> Any:
        raise TypeError("a prepared ShmLoader cannot be pickled: it belongs to this process's Accelerator")


class ScheduledBatches(BatchSampler):
    """The batch sampler that Accelerate sees if the seed of the prepared `loader` decides the order of samples.

    It cannot be iterated, because `accelerate.skip_first_batches` would read other samples through a plain DataLoader.
    """

    def __init__(self, loader: ShmLoader[Any]) -> None:
        self.batch_size = loader.batch_size or 1
        self.num_processes = _num_ranks(loader)
        self.drop_last = loader.drop_last
        # join_uneven_inputs reads and sets it; it has no effect, because the loader's `uneven` decides
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
    """Prepare a ShmLoader as `accelerator.prepare` prepares a DataLoader, without replacing it.

    The result is registered with the Accelerator; passing it to `accelerator.prepare` with the model and the optimizer is optional.
    In seed mode, it continues at the loader's position. A training loop holds two or three batches at a time, and
    transformers.Trainer the batches of two accumulations: to keep all of them in the ring, make `prefetch_factor * num_workers`
    larger than that.

    Args:
        accelerator: the Accelerator; make it before the loader, which asks it for ranks.
        loader: the loader; it stays open, and from now on only the result should read it.
        device_placement: whether batches are moved to `accelerator.device`. If None, the Accelerator's own setting decides.
    Raises:
        TypeError: `loader` is not a ShmLoader, or it has an iterable dataset, for which this function has no advantage.
        ValueError: the Accelerator and the loader divide the samples in ways that contradict each other.
        StateMismatch: Accelerate divides the samples, and the loader has loaded a state.
    """
    if isinstance(loader, DataLoaderShard):
        return accelerator.prepare_data_loader(loader)  # type: ignore[no-any-return]  # passed through
    if not isinstance(loader, ShmLoader):
        raise TypeError(f"prepare takes a ShmLoader; got {type(loader).__name__}, which accelerator.prepare takes")
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
