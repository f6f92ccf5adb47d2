"""The agent's process: a thread for each worker of the ring, and one connection to Ray for all.

It is started as `python -m`, and told by its standard input who it is: so the user's program is not imported again.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shmload._core.filler import WorkerRing
from shmload._core.watch import die_with
from shmload.shm.doorbell import Doorbell
from shmload.worker.actors.cluster import Cluster
from shmload.worker.actors.errand import Setting
from shmload.worker.actors.stand_in import StandIn
from shmload.worker.process import GONE, open_memory
from shmload.worker.spec import Post


@dataclass(frozen=True)
class Briefing:
    """What the agent is told: the workers' posts, where the cluster is, the program's sys.path."""

    posts: tuple[Post, ...]
    address: str
    paths: tuple[str, ...]
    is_seeded: bool


def main() -> None:
    """Runs the agent until the ring closes or the trainer ends."""
    briefing: Briefing = pickle.loads(sys.stdin.buffer.read())
    posts = briefing.posts
    die_with(posts[0].trainer_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a worker's
    try:
        rings = [WorkerRing(open_memory(post.control_path), post.worker_id) for post in posts]
        bells = [
            [Doorbell.attach(name) for name in (post.ready_bell, post.orders_bell, post.grants_bell)] for post in posts
        ]
        memory = open_memory(posts[0].parcel_path)
        parcel: NDArray[np.uint8] = np.ndarray(posts[0].parcel_nbytes, np.uint8, memory)  # type: ignore[arg-type]  # a buffer
    except FileNotFoundError:
        os._exit(GONE)  # the loader has been closed before this process was up
    settings = [
        Setting(post, briefing.paths, ring.text_capacity, ring.layout_capacity)
        for post, ring in zip(posts, rings, strict=True)
    ]
    cluster = Cluster(briefing.address, parcel, settings, is_seeded=briefing.is_seeded)
    del memory, parcel
    threads = [
        threading.Thread(target=_run, args=(ring, cluster, briefing, *bells_of), daemon=True)
        for ring, bells_of in zip(rings, bells, strict=True)
    ]
    for thread in threads:
        thread.start()
    cluster.connect()
    for thread in threads:
        thread.join()
    os._exit(0)  # Ray ends what a driver leaves: an orderly farewell would only take longer


def _run(
    ring: WorkerRing, cluster: Cluster, briefing: Briefing, ready: Doorbell, orders: Doorbell, grants: Doorbell
) -> None:
    stand_in = StandIn(
        ring,
        cluster,
        is_seeded=briefing.is_seeded,
        ready=ready,
        orders=orders,
        grants=grants,
        open_memory=open_memory,
    )
    try:
        stand_in.run()
    except BaseException:  # its claim would stay open for ever: the trainer must see a death
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
