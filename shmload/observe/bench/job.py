"""What one fresh process is asked to measure, and what it answers: plain data that travels as JSON."""

from dataclasses import asdict, dataclass, field
from typing import Any

LOADERS = {
    "shmload": "shmload.ShmLoader in torch mode",
    "torch": "torch's DataLoader, a sample at a time: how most people use it",
    "torch-getitems": "torch's DataLoader at its best: a whole batch at once into a shared tensor",
    "torch-0": "torch's DataLoader without workers",
    "threads": "a thread pool in the trainer: what can be had with no library at all",
    "shmload-seed": "shmload.ShmLoader in seed mode, in its own order",
}
OWN_ORDER = frozenset({"shmload-seed"})  # these shuffle by the keyed schedule: their batches are not torch's
OTHER_STREAMS = frozenset({"torch-0", "threads"})  # no workers: a dataset that draws random numbers draws others here
NEEDS_PROTOCOL = frozenset({"torch-getitems"})  # these fill batches through read_into or read_batch_into


@dataclass(frozen=True, kw_only=True)
class Job:
    """One loader on one dataset.

    Args:
        workload: name used in reports.
        dataset: `module:name` of the dataset or its factory; called with `arguments`.
        loader: a name of the contestants' table or `module:factory`; empty means the limit without any loader.
        seconds, epochs: the timed part ends after so many whole epochs, or if 0 after so many seconds; both 0 skips it.
        num_digests: batches of the untimed pass whose bytes are digested.
        memory_s: seconds of delivery during which the parent samples memory.
    """

    workload: str
    dataset: str
    loader: str
    batch_size: int
    num_workers: int
    arguments: dict[str, Any] = field(default_factory=dict)
    seconds: float = 2.0
    epochs: int = 0
    warmup_s: float = 1.0
    seed: int = 0
    start_method: str | None = None
    collate: str | None = None
    shuffle: bool = True
    num_digests: int = 0
    memory_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """The answer to one job: `values` by metric and batch `digests`, or an `error` line.

    `bad_usage` says that the user's dataset or options are at fault, not a loader.
    """

    job: Job
    values: dict[str, float] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    error: str | None = None
    bad_usage: bool = False
    details: str = ""
