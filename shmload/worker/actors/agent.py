"""The agent's process: its dispatchers and stand-ins, and one connection to Ray for all.

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
from shmload.worker.actors.beside import Beside
from shmload.worker.actors.cluster import Cluster
from shmload.worker.actors.dispatch import Dispatcher
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
    num_ahead: int  # errands that each worker may have under way
    num_beside: int  # workers of this machine that claim from the same ring
    num_ordered: int  # batches that the trainer orders ahead, for all
    connect_timeout_s: float
    sample_timeout_s: float | None = None
    is_again: bool = False  # another agent was there before


def main() -> None:
    """Runs the agent until the ring closes or the trainer ends."""
    briefing: Briefing = pickle.loads(sys.stdin.buffer.read())
    posts = briefing.posts
    die_with(posts[0].trainer_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a worker's
    try:
        control = open_memory(posts[0].control_path)
        ready, grants = (Doorbell.attach(name) for name in (posts[0].ready_bell, posts[0].grants_bell))
        orders = {post.orders_bell: Doorbell.attach(post.orders_bell) for post in posts}
        memory = open_memory(posts[0].parcel_path)
        parcel: NDArray[np.uint8] = np.ndarray(posts[0].parcel_nbytes, np.uint8, memory)  # type: ignore[arg-type]  # a buffer
    except FileNotFoundError:
        os._exit(GONE)  # the loader has been closed before this process was up
    rings = [[WorkerRing(control, post.worker_id) for _ in range(briefing.num_ahead)] for post in posts]
    sizes = rings[0][0].text_capacity, rings[0][0].layout_capacity
    settings = [Setting(post, briefing.paths, *sizes, briefing.sample_timeout_s) for post in posts]
    cluster = Cluster(
        briefing.address,
        parcel,
        settings,
        is_seeded=briefing.is_seeded,
        connect_timeout_s=briefing.connect_timeout_s,
        is_again=briefing.is_again,
    )
    del memory, parcel
    by_bell: dict[str, list[list[StandIn]]] = {name: [] for name in orders}
    for post, of_worker in zip(posts, rings, strict=True):
        by_bell[post.orders_bell].append(
            [StandIn(ring, cluster, ready=ready, grants=grants, open_memory=open_memory) for ring in of_worker]
        )
    beside = None
    if briefing.num_beside and briefing.is_seeded:  # in torch mode nobody may take another's orders
        processes = range(len(posts), len(posts) + briefing.num_beside)
        beside = Beside(rings[0][0], processes, briefing.num_ordered)
    dispatchers = [Dispatcher(cluster, stand_ins, orders[name], beside) for name, stand_ins in by_bell.items()]
    threading.Thread(target=cluster.connect, daemon=True).start()
    cluster.wait(lambda: not rings[0][0].is_closing)
    threads = [threading.Thread(target=_run, args=(dispatcher,), daemon=True) for dispatcher in dispatchers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)  # Ray ends what a driver leaves: an orderly farewell would only take longer


def _run(dispatcher: Dispatcher) -> None:
    try:
        dispatcher.run()
    except BaseException:  # nobody would claim any more: the trainer must see a death
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
