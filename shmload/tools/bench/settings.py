"""What one fresh process is asked to measure, and what it answers: plain data that travels as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from shmload.tools.bench.peers import PEERS
from shmload.tools.bench.workloads import WORKLOADS
from shmload.tools.named import BenchError

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


@dataclass(frozen=True)
class Point:
    """One setting of every loader; None is what the workload, the user's DataLoader or torch says."""

    num_workers: int | None = None
    prefetch_factor: int | None = None
    batch_size: int | None = None

    def label(self) -> str:
        """The parts that were asked for, as a reader of the table knows them."""
        parts = [
            f"{number} {word}"
            for number, word in (
                (self.num_workers, "worker" if self.num_workers == 1 else "workers"),
                (self.prefetch_factor, "ahead"),
            )
            if number is not None
        ]
        return ", ".join([*parts, *([f"batch {self.batch_size}"] if self.batch_size else [])])


def points(
    num_workers: Sequence[int | None], prefetch_factors: Sequence[int | None], batch_sizes: Sequence[int | None]
) -> list[Point]:
    """The cross product, the batch size outermost. Without workers nothing is prefetched, so there those are one point."""
    found = [
        Point(workers, None if workers == 0 else prefetch, batch_size)
        for batch_size, workers, prefetch in product(
            batch_sizes or [None], num_workers or [None], prefetch_factors or [None]
        )
    ]
    return list(dict.fromkeys(found))


START_METHODS = ("fork", "spawn", "forkserver")
ALL_PEERS = "peers"
AS_BUILT = ("shmload", "torch")  # what can be made of a DataLoader that the user built


@dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of a whole benchmark.

    Args:
        workloads: built-in ones by name; empty means all, or none if `dataset` or `torch_loader` is given.
        dataset, torch_loader: the user's own, as `module:name`.
        loaders: the first is the subject of every ratio, `torch` (else the last) its reference. `peers` stands for all
            peers that are installed.
        num_workers, prefetch_factor, batch_size: with more than one value each, every combination is measured.
        step_ms: length of the simulated training step after each batch.
        cold: each loader also reads once with the workload's files dropped from the page cache.
        cold_files: files and folders that `dataset` or `torch_loader` read.
        seconds, epochs: length of each timed part; `epochs` wins if not 0.
        rounds: None is 3, or 1 where several settings are measured.
        quick: small data, one process a loader, fractions of a second: to see that it works, not how fast.

    Raises:
        BenchError: a value that cannot be measured, named with what was needed.
    """

    workloads: tuple[str, ...] = ()
    dataset: str | None = None
    torch_loader: str | None = None
    images: Path | None = None
    loaders: tuple[str, ...] = ("shmload", "torch")
    num_workers: tuple[int, ...] = ()
    prefetch_factor: tuple[int, ...] = ()
    batch_size: tuple[int, ...] = ()
    step_ms: float = 0.0
    cold: bool = False
    cold_files: tuple[Path, ...] = ()
    seconds: float = 1.5
    epochs: int = 0
    rounds: int | None = None
    seed: int = 0
    start_method: str | None = None
    collate: str | None = None
    num_digests: int = 32
    quick: bool = False
    selected: tuple[str, ...] = field(init=False)  # built-in workloads to run

    def __post_init__(self) -> None:
        self._check_names()
        for option, values, least in (
            ("--batch-size", self.batch_size, 1),
            ("--workers", self.num_workers, 0),
            ("--prefetch", self.prefetch_factor, 1),
            ("--rounds", (1 if self.rounds is None else self.rounds,), 1),
            ("--epochs", (self.epochs,), 0),
        ):
            check_least(option, values, least)
        if not self.seconds > 0:
            raise BenchError(f"--seconds: needs more than 0, given {self.seconds:g}")
        if not 0 <= self.step_ms < 60_000:
            raise BenchError(f"--step-ms: needs 0 to 60000, given {self.step_ms:g}")
        if self.start_method not in (None, *START_METHODS):
            raise BenchError(f"--start-method: needs one of {', '.join(START_METHODS)}, given {self.start_method!r}")
        if self.torch_loader:
            self._check_torch_loader()
        if self.cold_files and not self.cold:
            raise BenchError("--cold-files: needs --cold, which measures a pass with them dropped from the page cache")
        if self.cold and (self.dataset or self.torch_loader) and not self.cold_files:
            raise BenchError(
                "--cold: needs --cold-files with your own data: the files and folders it reads, which are to be dropped "
                "from the page cache"
            )
        everything = () if self.dataset or self.torch_loader else tuple(WORKLOADS)
        object.__setattr__(self, "selected", self.workloads or everything)

    def _check_names(self) -> None:
        for name in self.workloads:
            if name not in WORKLOADS:
                raise BenchError(f"--workload: needs one of {', '.join(WORKLOADS)}, given {name!r}")
        known = (*LOADERS, *PEERS, ALL_PEERS)
        for name in self.loaders:
            if name not in known and ":" not in name:
                raise BenchError(f"--loader: needs one of {', '.join(known)} or module:factory, given {name!r}")
        if not self.loaders:
            raise BenchError(f"--loader: needs at least one of {', '.join(known)}, given none")
        if self.loaders[0] == ALL_PEERS:
            raise BenchError(f"--loader: needs a loader before {ALL_PEERS!r}: the first is compared with the others")

    def _check_torch_loader(self) -> None:
        for option, given in (
            ("--dataset", self.dataset),
            ("--workload", self.workloads),
            ("--collate", self.collate),
            ("--batch-size", self.batch_size),
            ("--start-method", self.start_method),
        ):
            if given:
                raise BenchError(
                    f"{option}: needs no --torch-loader, whose DataLoader says that itself; give one of the two"
                )
        others = [name for name in self.loaders if name not in AS_BUILT]
        if others:
            raise BenchError(
                f"--loader: needs {' or '.join(AS_BUILT)} with --torch-loader, given {others[0]!r}: others cannot take its "
                "arguments"
            )

    @property
    def reference(self) -> str:
        """What ratios and bytes are compared with: `torch`, else the last loader that is no peer."""
        own = [name for name in self.loaders if name != ALL_PEERS and name not in PEERS]
        return "torch" if "torch" in own else (own or self.loaders)[-1]

    @property
    def subject(self) -> str:
        return self.loaders[0]

    @property
    def num_rounds(self) -> int:
        if self.quick:
            return 1
        return self.rounds or (1 if len(self.points()) > 1 else 3)

    def points(self) -> list[Point]:
        """The settings to measure. Two workers, unless the user's own DataLoader says how many."""
        default = (None,) if self.torch_loader else (2,)
        return points(self.num_workers or default, self.prefetch_factor, self.batch_size)


def check_least(option: str, values: Sequence[int], least: int) -> None:
    for value in values:
        if value < least:
            raise BenchError(f"{option}: needs at least {least}, given {value}")
