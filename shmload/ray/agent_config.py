"""The settings that the trainer sends to its agent process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shmload.worker.job import WorkerLink


@dataclass(frozen=True)
class AgentConfig:
    """The agent's settings.

    Attributes:
        links: the link of each actor's worker.
        address: address of the cluster's head, or "auto".
        paths: sys.path of the trainer's program.
        is_seeded: whether a task's result depends only on the task, so that another actor may repeat it.
        num_ahead: number of tasks that each worker may have in progress.
        num_local: number of workers of this machine that claim from the same ring.
        num_ordered: number of batches that the trainer orders ahead, over all workers.
        connect_timeout_s: seconds that the cluster may take to answer; sending the dataset afterward has no limit.
        ship_timeout_s: seconds that an actor may take to receive the dataset and start; None for no limit.
        actor_options: arguments of Ray's `.options` for the actors.
        node_nbytes: bytes of the dataset on each node, by Ray's node id; empty if the dataset does not report them.
        sample_timeout_s: seconds that one sample may take before its actor is ended; None for no limit.
        repeats_in_order: whether a worker repeats a batch with bad samples before all others, because its random streams continue
            from batch to batch (torch mode with on_error="skip" or "substitute").
        is_replacement: whether this agent replaces another; then it retries a cluster that does not answer.
    """

    links: tuple[WorkerLink, ...]
    address: str
    paths: tuple[str, ...]
    is_seeded: bool
    num_ahead: int
    num_local: int
    num_ordered: int
    connect_timeout_s: float
    ship_timeout_s: float | None = None
    actor_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    node_nbytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sample_timeout_s: float | None = None
    repeats_in_order: bool = False
    is_replacement: bool = False


ARRIVED = b"!"  # sent to the agent's standard input after the AgentConfig, once the pickled job has been written
