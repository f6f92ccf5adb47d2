"""The options of a loader whose workers are actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_SET_BY_LOADER = {"concurrency_groups", "get_if_exists", "lifetime", "max_concurrency", "max_restarts", "max_task_retries", "name"}


@dataclass(frozen=True, kw_only=True)
class Ray:
    """The options of a loader's actors: `ShmLoader(..., backend=shmload.Ray(...))`. `backend="ray"` means `Ray()`.

    Args:
        address: address of the cluster's head; "auto" means the cluster that runs on this machine.
        actor_options: the resources that each actor requests, as arguments of Ray's `.options`, for example `{"num_cpus": 2}`.
            Without a `scheduling_strategy`, actors are placed near the blocks of a `RayDataset`, or else spread by free CPUs.
        connect_timeout_s: seconds that the cluster may take to answer, at first and after a lost connection.
        ship_timeout_s: seconds until an actor has found a CPU and received the dataset; in torch mode, until all have. None for no
            limit.
        num_local_workers: processes of this machine that read along with the actors, into the same ring. Torch mode and
            `get_worker_info()` count them after the actors.
    Raises:
        ValueError, TypeError: an option is invalid.
    Example:
        >>> import shmload
        >>> shmload.Ray(actor_options={"num_cpus": 2}).address
        'auto'
    """

    address: str = "auto"
    actor_options: Mapping[str, Any] = field(default_factory=dict)
    connect_timeout_s: float = 60.0
    ship_timeout_s: float | None = 600.0
    num_local_workers: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.address, str) or not self.address:
            raise TypeError(f'address must be the address of the cluster\'s head, or "auto"; got {self.address!r}')
        if not isinstance(self.actor_options, Mapping) or _SET_BY_LOADER & self.actor_options.keys():
            raise ValueError(
                "actor_options must be a mapping of what Ray's .options takes, without what the loader sets itself "
                f"({', '.join(sorted(_SET_BY_LOADER))}); got {self.actor_options!r}"
            )
        for name in ("connect_timeout_s", "ship_timeout_s"):
            value = getattr(self, name)
            if value is None and name == "ship_timeout_s":
                continue
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a positive number of seconds; got {value!r}")
        if not isinstance(self.num_local_workers, int) or self.num_local_workers < 0:
            raise ValueError(f"num_local_workers must be an int of at least 0; got {self.num_local_workers!r}")
