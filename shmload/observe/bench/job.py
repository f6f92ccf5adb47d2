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
        batch_size, num_workers: None where the user's own DataLoader says it.
        prefetch_factor: None is torch's default.
        torch_loader: `module:name` of a torch DataLoader or of the function that makes it; then there is no `dataset`.
        seconds, epochs: the timed part ends after so many whole epochs, or if 0 after so many seconds; both 0 skips it.
        step_s: how long the trainer sleeps after each batch, in place of a training step.
        cold_files: dropped from the page cache first; then the one pass from there on is timed, without a warm-up.
        num_digests: batches of the untimed pass whose bytes are digested.
        digest_epoch: digest one whole epoch row by row, for loaders with an order of their own.
        memory_s: seconds of delivery during which the parent samples memory.
        peer_folder: where a peer's own files are; `write_peer` writes them there instead of measuring.
    """

    workload: str
    dataset: str
    loader: str
    batch_size: int | None
    num_workers: int | None
    prefetch_factor: int | None = None
    torch_loader: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    seconds: float = 2.0
    epochs: int = 0
    warmup_s: float = 1.0
    step_s: float = 0.0
    cold_files: tuple[str, ...] = ()
    seed: int = 0
    start_method: str | None = None
    collate: str | None = None
    shuffle: bool = True
    num_digests: int = 0
    digest_epoch: bool = False
    memory_s: float = 0.0
    peer_folder: str | None = None
    write_peer: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """The answer to one job: `values` by metric and batch `digests`, or an `error` line.

    `wait_quantiles_ms` are the waits at the shares of `summary.WAIT_SHARES`; `rows_digest` is that of `digest_epoch`.
    `bad_usage` says that the user's dataset or options are at fault, not a loader.
    """

    job: Job
    values: dict[str, float] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    wait_quantiles_ms: list[float] = field(default_factory=list)
    rows_digest: str | None = None
    error: str | None = None
    bad_usage: bool = False
    details: str = ""
