"""Datasets for tests of a worker pool of Ray actors whose samples do not end; importable by the actors, and without torch."""

from __future__ import annotations

import threading
from typing import Any

from tests.ray.ray_datasets import Rows


class Stuck(Rows):
    """One sample waits for what never comes."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            threading.Event().wait()
        return super().__getitem__(index)


def stick_away_from_the_head(worker: int) -> None:
    """A worker_init_fn that does not end on any node but the head's."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    (head,) = [node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"]]
    if here != head:
        threading.Event().wait()
