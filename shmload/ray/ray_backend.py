"""Make the worker pool of a loader with `backend="ray"`, whose workers are Ray actors."""

from __future__ import annotations

import dataclasses
import os
import sys

from shmload.introspect.abilities import package_ability
from shmload.ray.agent_config import AgentConfig
from shmload.ray.cluster_connection import current_cluster_address
from shmload.ray.dataset_shipping import pickle_job_by_value
from shmload.ray.joint_pool import JointPool
from shmload.ray.ray_pool import RayPool
from shmload.ray_options import Ray
from shmload.worker.pool import PreparedWorkers, process_pool, with_job_path

MAX_AHEAD = 4  # most tasks of a worker in progress: one is decoded, one transferred, one copied, and one waits


@dataclasses.dataclass(frozen=True)
class RayBackend:
    """A `Backend` that puts workers on a Ray cluster, and optionally some on this machine.

    Args:
        ray: options of the cluster. The last `num_local_workers` of the workers run on this machine.
    """

    ray: Ray

    def __call__(self, prepared: PreparedWorkers) -> RayPool | JointPool:
        """Return the worker pool, not started."""
        num_ray_workers = len(prepared.links) - self.ray.num_local_workers
        parcel = pickle_job_by_value(prepared.job)
        segment = prepared.group.segment("pickled_job", parcel.nbytes, num_reserved=0)
        links = with_job_path(prepared.links[:num_ray_workers], segment)
        locate = package_ability(prepared.job.dataset, "bytes_by_node")
        repeats_in_order = prepared.job.seed is None and prepared.job.tolerates_bad_samples
        config = AgentConfig(
            tuple(links),
            current_cluster_address() if self.ray.address == "auto" else self.ray.address,
            tuple(path or os.getcwd() for path in sys.path),
            is_seeded=prepared.job.seed is not None,
            num_ahead=1 if repeats_in_order else max(1, min(prepared.num_ahead, MAX_AHEAD)),
            num_local=self.ray.num_local_workers,
            num_ordered=prepared.num_ahead * len(prepared.links),
            connect_timeout_s=self.ray.connect_timeout_s,
            ship_timeout_s=self.ray.ship_timeout_s,
            actor_options=dict(self.ray.actor_options),
            node_nbytes=locate() if locate is not None else {},
            sample_timeout_s=prepared.sample_timeout_s,
            repeats_in_order=repeats_in_order,
        )
        assert prepared.group.control is not None
        actors = RayPool(config, parcel, segment, prepared.group.control)
        if not self.ray.num_local_workers:
            return actors
        local = dataclasses.replace(prepared, links=prepared.links[num_ray_workers:])
        return JointPool(actors, process_pool(local), num_ray_workers)
