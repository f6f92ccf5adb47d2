"""What a ring says of itself to onlookers, once, before its first order: whose it is and how its dataset is read."""

from __future__ import annotations

from shmload._core.trainer import TrainerRing
from shmload.worker.spec import Job
from shmload.world import rank_and_world_size


def introduce(ring: TrainerRing, job: Job, rank: int | None, world_size: int | None) -> None:
    """Writes the dataset's type, the method it is read by, and the rank.

    Args:
        rank, world_size: as the loader was given them; None: what torch.distributed or the environment says.
    """
    try:
        rank, world_size = rank_and_world_size(rank, world_size)
    except ValueError:  # nobody has said which rank this is: the loader asks again, and loudly, where it matters
        rank, world_size = 0, 1
    ring.introduce(
        dataset_name=type(job.dataset).__name__.encode(),
        read_path=job.plan.path.encode(),
        rank=rank,
        world_size=world_size,
    )
