"""What the user asked for, checked before anything is started."""

from dataclasses import dataclass, field
from pathlib import Path

from shmload.observe.bench.job import LOADERS
from shmload.observe.bench.spec import BenchError
from shmload.observe.bench.workloads import WORKLOADS

START_METHODS = ("fork", "spawn", "forkserver")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of a whole benchmark.

    Args:
        workloads: built-in ones by name; empty means all, or none if `dataset` is given.
        dataset: the user's own, as `module:name`.
        loaders: the first is the subject of every ratio, `torch` (else the last) its reference.
        seconds, epochs: length of each timed part; `epochs` wins if not 0.
        quick: small data, one process a loader, fractions of a second: to see that it works, not how fast.

    Raises:
        BenchError: a value that cannot be measured, named with what was needed.
    """

    workloads: tuple[str, ...] = ()
    dataset: str | None = None
    images: Path | None = None
    loaders: tuple[str, ...] = ("shmload", "torch")
    batch_size: int | None = None
    num_workers: int = 2
    seconds: float = 2.0
    epochs: int = 0
    rounds: int = 3
    seed: int = 0
    start_method: str | None = None
    collate: str | None = None
    num_digests: int = 32
    quick: bool = False
    selected: tuple[str, ...] = field(init=False)  # built-in workloads to run

    def __post_init__(self) -> None:
        for name in self.workloads:
            if name not in WORKLOADS:
                raise BenchError(f"--workload: needs one of {', '.join(WORKLOADS)}, given {name!r}")
        for name in self.loaders:
            if name not in LOADERS and ":" not in name:
                raise BenchError(f"--loader: needs one of {', '.join(LOADERS)} or module:factory, given {name!r}")
        for option, value, least in (
            ("--batch-size", self.batch_size, 1),
            ("--workers", self.num_workers, 0),
            ("--rounds", self.rounds, 1),
            ("--epochs", self.epochs, 0),
        ):
            if value is not None and value < least:
                raise BenchError(f"{option}: needs at least {least}, given {value}")
        if not self.seconds > 0:
            raise BenchError(f"--seconds: needs more than 0, given {self.seconds:g}")
        if not self.loaders:
            raise BenchError(f"--loader: needs at least one of {', '.join(LOADERS)}, given none")
        if self.start_method not in (None, *START_METHODS):
            raise BenchError(f"--start-method: needs one of {', '.join(START_METHODS)}, given {self.start_method!r}")
        everything = () if self.dataset else tuple(WORKLOADS)
        object.__setattr__(self, "selected", self.workloads or everything)

    @property
    def reference(self) -> str:
        return "torch" if "torch" in self.loaders else self.loaders[-1]

    @property
    def subject(self) -> str:
        return self.loaders[0]
