"""The value that all passes of a loader in torch mode get."""

from __future__ import annotations

from shmload.engine.builder import EngineBuilder
from shmload.engine.config import LoaderConfig
from shmload.engine.delivery_log import DeliveryLog
from shmload.modes.continuation import Continuation
from shmload.modes.epoch_metrics import EpochWatches
from shmload.modes.pass_progress import PassProgress


class PassContext:
    """The parts of a loader, and the state, that its passes in torch mode share.

    Attributes:
        config: the loader's arguments for the newest pass, set by the loader.
        builder: makes the loader's engines, and has its policy for bad samples.
        log: the record of deliveries.
        watches: measures the passes for `on_epoch_end`.
        progress: the progress of the newest pass. It outlives the iterator, because a loop that was left can be resumed.
        generators: where random generators continue between passes.
        is_over: whether a dataset's state, loaded into this process, was saved at the end of a pass through it.
    """

    def __init__(self, config: LoaderConfig, builder: EngineBuilder, log: DeliveryLog, watches: EpochWatches) -> None:
        self.config, self.builder, self.log, self.watches = config, builder, log, watches
        self.progress: PassProgress | None = None
        self.generators = Continuation()
        self.is_over = False
