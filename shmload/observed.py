"""What a loader tells of itself: where it stands, what it has counted, who holds its batches, what it did when."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from typing_extensions import TypeVar  # torch's own requirement

from shmload.audit.recorder import Recorder
from shmload.debug import Holder, WatchedEngine
from shmload.engine.autotune import Autotuner
from shmload.engine.engine import Engine
from shmload.engine.orders import BadSamples
from shmload.modes.epoch_metrics import EpochCallback
from shmload.modes.seed_mode import SeedStream
from shmload.modes.torch_state import TorchState

if TYPE_CHECKING:
    from rich.console import Console

    from shmload.tools.trace.session import Trace

T = TypeVar("T", covariant=True, default=Any)  # of datasets that only decode into rows nothing is known


class ObservedLoader(DataLoader[T]):
    """The part of ShmLoader that only looks."""

    seed: int | None
    _bad_samples: BadSamples
    _recorder: Recorder
    _tuner: Autotuner | None
    _stream: SeedStream | None
    _loaded: TorchState | None
    _last_engine: Engine | None
    _engines: WeakSet[Engine]
    _trace: Trace | None
    _epoch_callbacks: list[EpochCallback]

    @property
    def first_step(self) -> int:
        """The step that the next iteration begins with: 0, or where a loaded state left off.

        A bar over a resumed loader begins there: `tqdm(loader, initial=loader.first_step)`.
        """
        if self._stream is not None:
            return self._stream.first_step
        return 0 if self._loaded is None or self._loaded["is_finished"] else int(self._loaded["position"])

    @property
    def valid(self) -> int | None:
        """Seed mode: how many rows of the batch just yielded are real and not padding; None before the first."""
        return None if self._stream is None else self._stream.valid

    @property
    def last_indices(self) -> NDArray[np.int64] | list[Any] | None:
        """Which samples the batch just yielded is made of, row by row; None before the first, and for an iterable dataset.

        An int64 array, or the list of keys as the sampler gave it; after skipped and substituted samples. It is the loader's own:
        copy it before changing it. With batch_size=None a list of one key.
        """
        return self._recorder.last_indices

    # ------------------------------------------------------------ looking at it

    def stats(self) -> dict[str, Any]:
        """What `shmload top` shows of this loader, over the life of the ring last used; docs/top.md names every key with its unit.

        These are: `batches`, `samples`, `nbytes` delivered and their rates a second; `epoch`, `step`, `num_steps`; `slots` by
        state; `orders` under way; `time`: in how many per cent of it the trainer waited, the workers waited, nobody did, and
        workers started; `limit`, `waits_for`, `is_hung`; `workers`, one record each, with its process, sample and busy share;
        `memory`; counts of restarts, foreign objects, copies. Absent before the first iteration and with num_workers=0. Always
        there: `num_bad_samples` and `bad_samples`, a list of `epoch`, `step`, `index`, `error`, over the life of the loader. With
        "auto" for a number, `autotune` says what is set, what holds the pipeline back, and what was changed and why.

        Cost: about 0.1 ms with a few workers; the files of their processes under /proc are read.
        """
        bad: dict[str, Any] = {
            "num_bad_samples": self._bad_samples.count,
            "bad_samples": list(self._bad_samples.listed),
        }
        if self._tuner is not None:
            bad["autotune"] = self._tuner.stats()
        return bad if self._last_engine is None else {**self._last_engine.counters(), **bad}

    def holders(self) -> list[Holder]:
        """The batches whose slots are still held: which, how old, how large, and the line that took each. The oldest first.

        Returns:
            a list of `shmload.debug.Holder`.
        Raises:
            RuntimeError: nothing is noted of that, because `shmload.debug` was not enabled when the workers started.
        """
        watched = [engine for engine in self._engines if isinstance(engine, WatchedEngine)]
        if self._engines and not watched:
            raise RuntimeError(
                "nobody has noted who takes this loader's batches: call shmload.debug.enable() before its workers start, or set "
                "SHMLOAD_DEBUG_BATCHES=1"
            )
        return sorted((holder for engine in watched for holder in engine.holders()), key=lambda h: -h.age_s)

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Records, in a `with` block, what trainer and workers do, and writes it for Perfetto at the block's end; docs/trace.md.

        Args:
            path: of the JSON file. It is written also if the block ends with an exception.
        Raises:
            ValueError: the loader has no workers.
            FileNotFoundError: the file's folder does not exist.
            RuntimeError: in the `with`: the loader is being traced already.
        """
        from shmload.tools.trace.session import Trace

        return Trace(self, path)

    def on_epoch_end(self, callback: EpochCallback) -> EpochCallback:
        """Has `callback` called with what each epoch was like (`shmload.modes.epoch_metrics.EpochMetrics`), from the next pass on.

        A pass that is broken off is told as soon as its iterator is gone. A callback that fails is logged, and training goes on.

        Returns:
            the callback, so that this can decorate it.
        """
        self._epoch_callbacks.append(callback)
        return callback

    def progress(self, description: str = "", *, console: Console | None = None) -> Iterator[T]:
        """Iterates like the loader itself, with a bar on stderr: batches, samples/s, share of waiting. No bar if it is piped.

        Args:
            description: what stands before the bar.
            console: rich's, to draw elsewhere.
        """
        from shmload.tools.top.bar import shown

        return shown(self, description, console)
