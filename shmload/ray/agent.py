"""The agent process: it claims batches from the ring, sends them to Ray actors, and writes their replies into the ring.

The agent is started with `python -m` and reads its settings from standard input, so that the user's program is not imported again.

Each worker of the ring has several stand-ins. A `StandIn` handles one task at a time: it sends a claim to the actor, copies the
reply into the claim's rows, and ends the claim. With several of them, an actor decodes one batch while the previous one is
transferred or copied.

A `Dispatcher` is the thread that claims for all workers that share a bell, and gives each claim to the worker with the fewest
tasks in progress. In seed mode all workers share one bell and so one dispatcher; in torch mode each worker has its own bell and
dispatcher. The dispatcher itself sends the claim, so that an actor gets tasks in the order of claims; a thread of the stand-in
waits for the reply.

`LocalProcesses` decides which orders are left to processes of this machine that claim from the same ring. Batches are wanted in
order, and only a limited number is ordered ahead, so one slow batch delays all others. Therefore:

* an actor without a task takes the oldest order, like any process; for an actor with tasks, which would start later, the oldest
  orders are skipped, one for each process, because a free process starts at once;
* an actor gets no task while the processes would finish all orders in progress before the actor finished that batch.

The time that an actor takes is measured, separately for each number of tasks that it already has in progress. Measurements decay,
so an actor that was slow once is tried again. Tasks sent before an actor's first answer do not count, because the actor was still
starting.

Rejected: giving everyone the oldest order. The batches queued at a slow actor are then the ones that are needed next: with actors
four times slower, both kinds together reached half of the processes' throughput (benchmarks/local_workers.py).
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from shmload._core.filler import DONE, ERROR, VOID, WorkerRing
from shmload._core.mapping import Mapping
from shmload._core.rows import copy_from
from shmload._core.watch import die_with
from shmload.batch.layout import aligned
from shmload.processes import private_fds
from shmload.ray.actor_pool import ARRIVED, AgentConfig, Call, Cluster
from shmload.ray.actors import ActorSetting, Reply, Slot, Task, same_layout
from shmload.shm.doorbell import Doorbell
from shmload.shm.segment import open_segment
from shmload.worker.failure import Failure
from shmload.worker.loop import process_begin_ns
from shmload.worker.note import dump_note
from shmload.worker.process import GONE, open_memory
from shmload.worker.slot_memory import LOOK_AGAIN_S, Bell, SlotMemory

HALF_LIFE_S = 20.0  # half-life of a measurement; not shorter, because each new attempt with a slow actor delays all batches
WEIGHT = 0.25  # weight of the newest measurement


class LocalProcesses:
    """The processes that claim from the same ring as the actors, and measurements of both.

    Args:
        ring: a view of the ring, which counts the chunks that its workers have finished.
        processes: the worker numbers of the processes.
        num_ordered: batches that the trainer orders ahead.
        clock: returns seconds.
    """

    def __init__(self, ring: WorkerRing, processes: range, num_ordered: int, clock: Callable[[], float] = monotonic) -> None:
        self._ring, self._processes, self._num_ordered, self._clock = ring, processes, num_ordered, clock
        self._last = (0, 0)  # chunks and nanoseconds of all processes at the last measurement
        self._process_s = 0.0  # seconds of a process for a batch; 0 if not known
        self._took: dict[tuple[int, int], tuple[float, float]] = {}  # (actor, tasks in progress) -> (seconds, time of measurement)
        self._first_answers: dict[int, float] = {}  # actor -> time of its first answer

    def num_skipped(self, num_under_way: int) -> int:
        """Return the number of oldest orders that an actor with so many tasks skips."""
        return len(self._processes) if num_under_way else 0

    def may_claim(self, actor: int, num_under_way: int) -> bool:
        """Return whether an actor with so many tasks in progress would finish another one in time."""
        self._look()
        took_s, when = self._took.get((actor, num_under_way), (0.0, 0.0))
        faded_s = took_s * 0.5 ** ((self._clock() - when) / HALF_LIFE_S)
        return not self._process_s or faded_s * len(self._processes) <= self._num_ordered * self._process_s

    def answered(self, actor: int, num_under_way: int, began_s: float, ended_s: float) -> None:
        """Record the time that a task took an actor which had so many tasks in progress when it got this one."""
        if began_s < self._first_answers.setdefault(actor, ended_s):
            return
        took_s = ended_s - began_s
        before, _ = self._took.get((actor, num_under_way), (took_s, 0.0))
        self._took[actor, num_under_way] = before + WEIGHT * (took_s - before), ended_s

    def _look(self) -> None:
        paces = [self._ring.pace_of(worker) for worker in self._processes]
        chunks, took_ns = sum(pace[0] for pace in paces), sum(pace[1] for pace in paces)
        new_chunks = chunks - self._last[0]
        if new_chunks >= len(self._processes):
            self._process_s = (took_ns - self._last[1]) / new_chunks / 1e9
            self._last = chunks, took_ns


class StandIn:
    """A worker's representative in the ring for one claim, whose samples an actor decodes.

    Args:
        ring: its own view of the ring, with the worker's number.
        cluster: the connection to the actors.
        ready: the bell that wakes the trainer.
        grants: the bell that the trainer rings when it has granted memory or a layout.
        open_memory: (path) -> mapping of a segment of the trainer's.
    """

    def __init__(
        self, ring: WorkerRing, cluster: Cluster, *, ready: Bell, grants: Bell, open_memory: Callable[[str], Mapping]
    ) -> None:
        self.ring = ring
        self._cluster = cluster
        self._ready = ready
        self._memory = SlotMemory(ring, ready, grants, open_memory)
        self._num_foreign = self._num_irregular = 0
        self._equal: set[bytes] = set()  # texts of layouts that equal the ring's
        self._call: Call | None = None  # the claim's call, if it needs one
        self._error: Exception | None = None  # the error that prevented the call

    def begin(self) -> None:
        """Send the claim to the worker's actor.

        Call this in the order of claims, because torch mode's random streams depend on it.
        """
        ring = self.ring
        ring.end_rows()
        self._call = self._error = None
        if not ring.is_packed and ring.nchunks > 1 and ring.has_layout and ring.is_packed_only:
            return
        try:
            self._call = self._cluster.begin(ring.worker_id, "work", self._task())
        except Exception as error:
            self._error = error

    def end(self) -> None:
        """Wait for the reply to the claim, write it into the ring, and end the claim."""
        ring = self.ring
        self._num_foreign = self._num_irregular = 0
        try:
            own = self._fill()
        except Exception as error:
            note = f"shmload: epoch {ring.epoch}, batch {ring.batch}"
            failure = Failure.of(error, f"in DataLoader worker process {ring.worker_id}", note)
            ring.write_error(failure.dumps(ring.text_capacity))
            own = ERROR
        self._call = self._error = None
        if ring.finish(own, num_foreign=self._num_foreign, num_irregular=self._num_irregular):
            self._ready.post()

    def _fill(self) -> int:
        ring = self.ring
        if self._error is not None:
            raise self._error
        if self._call is None:
            ring.ask_repack()
            return VOID
        outcome = self._result(self._call)
        if outcome.own == ERROR:
            error = outcome.error
            if outcome.note is not None and (note := self._note(outcome.note, ring.text_capacity // 2, 0)) is not None:
                error = Failure.with_worker(error, note)
            ring.write_error(error)
            ring.is_held_up = self._cluster.repeats_in_order
            return ERROR
        if outcome.note is not None and outcome.note[1]:  # the iterator has ended without a batch
            return self._send_note(outcome.note)
        if not ring.is_packed and not ring.has_layout and not self._memory.settle(outcome.layout or b""):
            return VOID
        if outcome.num_written:
            return DONE if outcome.note is None else self._send_note(outcome.note)
        if outcome.row_nbytes is not None and not self._fits(outcome.layout or b"") and ring.nchunks == 1:
            call = self._cluster.begin(ring.worker_id, "pack_rows", outcome, ring.nrows)
            outcome = self._result(call)._replace(note=outcome.note)
        own = self._write(outcome)
        return self._send_note(outcome.note) if own == DONE and outcome.note is not None else own

    def _result(self, call: Call) -> Reply:
        ring, cluster = self.ring, self._cluster
        outcome: Reply = cluster.result(ring.worker_id, call)
        self._num_irregular += outcome.num_irregular
        if outcome.place is not None:
            ring.count_fetch(
                outcome.payload.nbytes + outcome.num_written,
                is_remote=not outcome.num_written and outcome.place[0] != cluster.node_id,
                node=outcome.place[0].encode(),
                num_actors=cluster.num_actors(ring.worker_id, outcome.place),
            )
        return outcome

    def _task(self) -> Task:
        ring = self.ring
        path = ring.order_path
        order = bytes(memoryview(self._memory.open(path.decode()))[: ring.order_nbytes]) if path else ring.order_bytes()
        is_packed = ring.is_packed or (ring.has_layout and ring.is_packed_only)
        slot = None
        if not is_packed and ring.has_layout and self._cluster.can_write_ring(ring.worker_id):
            _, path, offset, nbytes = ring.payload
            slot = Slot(ring.slot, path.decode(), offset, nbytes, ring.layout_text)
        return Task(ring.epoch, ring.step, ring.first_row, ring.end_row, ring.nrows, order, ring.is_pickled, is_packed, slot)

    def _fits(self, text: bytes) -> bool:
        """Return whether rows of this layout have places in the ring."""
        ring = self.ring
        if ring.is_packed or ring.is_packed_only:
            return False
        if text in self._equal or text == ring.layout_text:
            return True
        if not same_layout(text, ring.layout_text):
            return False
        self._equal.add(text)
        return True

    def _write(self, outcome: Reply) -> int:
        ring, payload = self.ring, outcome.payload
        if outcome.row_nbytes is not None and self._fits(outcome.layout or b""):
            self._place(payload, outcome.row_nbytes)
            return DONE
        if ring.nchunks > 1:
            ring.ask_repack()
            return VOID
        if ring.payload[3] < payload.nbytes and not self._memory.grow(payload.nbytes):
            return VOID
        copy_from(self._memory.room(payload.nbytes).ctypes.data, payload.ctypes.data, payload.nbytes)
        ring.set_used(payload.nbytes)
        self._num_foreign = outcome.num_foreign
        return DONE

    def _place(self, payload: NDArray[np.uint8], row_nbytes: tuple[int, ...]) -> None:
        """Copy rows, which are dense field by field, to their places in the batch. `Layout.place` defines both layouts."""
        ring = self.ring
        num_rows = ring.end_row - ring.first_row
        slot = self._memory.room(sum(aligned(ring.nrows * nbytes) for nbytes in row_nbytes))
        source, target = payload.ctypes.data, slot.ctypes.data
        for nbytes in row_nbytes:
            copy_from(target + ring.first_row * nbytes, source, num_rows * nbytes)
            source += aligned(num_rows * nbytes)
            target += aligned(ring.nrows * nbytes)

    def _send_note(self, note: tuple[bytes, bool]) -> int:
        """Write the actor's note; a long snapshot is appended to the batch's memory."""
        ring = self.ring
        used = 0 if note[1] else ring.used_nbytes or self._memory.layout.nbytes(ring.nrows)
        dumped = self._note(note, ring.text_capacity, used)
        if dumped is None:
            return VOID
        ring.write_note(dumped)
        return DONE

    def _note(self, note: tuple[bytes, bool], capacity: int, used_nbytes: int) -> bytes | None:
        """Return a note as bytes, like WorkerLoop; None if the snapshot does not get memory."""
        snapshot, has_ended = note
        dumped = dump_note(snapshot, has_ended=has_ended)
        if len(dumped) > capacity:
            at = self._memory.append(used_nbytes, snapshot)
            if at < 0:
                return None
            dumped = dump_note((at, len(snapshot)), has_ended=has_ended)
        return dumped


class Dispatcher:
    """A thread that claims orders for workers that share a bell.

    Args:
        cluster: the connection to the actors.
        stand_ins: the stand-ins of each worker.
        orders: the bell that these workers share.
        local: the processes of this machine that claim from the same ring, if there are any.
    """

    def __init__(
        self, cluster: Cluster, stand_ins: list[list[StandIn]], orders: Doorbell, local: LocalProcesses | None = None
    ) -> None:
        self._cluster = cluster
        self._orders = orders
        self._free = [list(of_worker) for of_worker in stand_ins]
        self._num_each = len(stand_ins[0])
        self._local = local
        self._begun: dict[StandIn, tuple[int, float]] = {}  # (tasks of its worker at the claim, time of the claim)
        self._back: SimpleQueue[tuple[int, StandIn, float] | None] = SimpleQueue()  # free stand-ins, with the time
        self._sent: dict[StandIn, SimpleQueue[None]] = {}
        cluster.when_started.append(lambda: self._back.put(None))
        for place, of_worker in enumerate(stand_ins):
            for stand_in in of_worker:
                self._sent[stand_in] = SimpleQueue()
                _started(self._serve, place, stand_in)

    def run(self) -> None:
        """Claim orders until the trainer closes the ring."""
        first = self._free[0][0].ring
        for of_worker in self._free:
            of_worker[0].ring.announce(process_begin_ns())
        while first.is_wanted:
            place = self._least_busy()
            if place < 0:
                self._take_back(LOOK_AGAIN_S)
                continue
            stand_in = self._free[place][-1]
            num_under_way = self._num_each - len(self._free[place])
            began_s = monotonic()
            if stand_in.ring.claim(0 if self._local is None else self._local.num_skipped(num_under_way)):
                self._free[place].pop()
                self._begun[stand_in] = num_under_way, began_s
                stand_in.begin()
                self._sent[stand_in].put(None)
                self._take_back(0)
            else:
                self._wait()
        self._orders.post()  # as WorkerLoop.run does

    def _least_busy(self) -> int:
        """Return the worker to claim for; -1 if none has both a free stand-in and an actor that would finish in time."""
        best, most = -1, 0
        for place, free in enumerate(self._free):
            if len(free) <= most:
                continue
            worker = free[-1].ring.worker_id
            if self._cluster.is_repeating(worker) or not self._cluster.may_claim(worker):
                continue
            if self._local is None or self._local.may_claim(place, self._num_each - len(free)):
                best, most = place, len(free)
        return best

    def _take_back(self, timeout_s: float) -> None:
        """Take back stand-ins that are free again; wait up to `timeout_s` for the first, or until an actor has started."""
        try:
            back = self._back.get(timeout_s > 0, timeout_s or None)
            while True:
                if back is not None:
                    place, stand_in, ended_s = back
                    self._free[place].append(stand_in)
                    if self._local is not None:
                        self._local.answered(place, *self._begun[stand_in], ended_s)
                back = self._back.get_nowait()
        except Empty:
            pass

    def _wait(self) -> None:
        """Wait for orders. During that time, workers without a task are marked as waiting."""
        idle = [free[0].ring for free in self._free if len(free) == self._num_each]
        for ring in idle:
            ring.waiting(True)
        self._orders.wait(LOOK_AGAIN_S)
        for ring in idle:
            ring.waiting(False)
        self._take_back(0)

    def _serve(self, place: int, stand_in: StandIn) -> None:
        while True:
            self._sent[stand_in].get()
            stand_in.end()
            self._back.put((place, stand_in, monotonic()))
            if self._local is not None:  # its actor may now be idle, and take an order that was skipped
                self._orders.post_up_to(1)


def _started(run: Callable[..., None], *args: object) -> threading.Thread:
    """Start a thread that ends the agent if it fails.

    Otherwise its claim would stay open forever. The trainer handles the agent's death.
    """

    def run_or_die() -> None:
        try:
            run(*args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    thread = threading.Thread(target=run_or_die, daemon=True)
    thread.start()
    return thread


def wait_for_job() -> None:
    """Wait until the trainer has written the pickled job."""
    if sys.stdin.buffer.read(len(ARRIVED)) != ARRIVED:
        os._exit(GONE)  # the trainer failed to write it, and its loader failed, too


def main() -> None:
    """Run the agent until the ring closes or the trainer ends."""
    config: AgentConfig = pickle.load(sys.stdin.buffer)
    posts = config.posts
    die_with(posts[0].trainer_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a worker
    try:
        control = open_memory(posts[0].control_path)
        control_fd = private_fds.keep(open_segment(posts[0].control_path))
        ready, grants = (Doorbell.attach(name) for name in (posts[0].ready_bell, posts[0].grants_bell))
        orders = {post.orders_bell: Doorbell.attach(post.orders_bell) for post in posts}
        memory = open_memory(posts[0].pickled_job_path)
        pickled_job: NDArray[np.uint8] = np.ndarray(posts[0].pickled_job_nbytes, np.uint8, memory)  # type: ignore[arg-type]  # a buffer
    except FileNotFoundError:
        os._exit(GONE)  # the loader was closed before this process had started
    rings = [[WorkerRing(control, post.worker_id) for _ in range(config.num_ahead)] for post in posts]
    sizes = rings[0][0].text_capacity, rings[0][0].layout_capacity
    settings = [ActorSetting(post, config.paths, *sizes, config.sample_timeout_s) for post in posts]
    cluster = Cluster(config, pickled_job, settings, wait_for_job, control_fd)
    del memory, pickled_job
    by_bell: dict[str, list[list[StandIn]]] = {name: [] for name in orders}
    for post, of_worker in zip(posts, rings, strict=True):
        by_bell[post.orders_bell].append(
            [StandIn(ring, cluster, ready=ready, grants=grants, open_memory=open_memory) for ring in of_worker]
        )
    local = None
    if config.num_local and config.is_seeded:  # in torch mode, no worker may take another's orders
        processes = range(len(posts), len(posts) + config.num_local)
        local = LocalProcesses(rings[0][0], processes, config.num_ordered)
    dispatchers = [Dispatcher(cluster, stand_ins, orders[name], local) for name, stand_ins in by_bell.items()]
    threading.Thread(target=cluster.connect, daemon=True).start()
    cluster.wait(lambda: not rings[0][0].is_closing)
    threads = [_started(dispatcher.run) for dispatcher in dispatchers]
    cluster.watch(lambda: not rings[0][0].is_closing)
    for thread in threads:
        thread.join()
    os._exit(0)  # without an orderly shutdown, which takes longer, because Ray cleans up after a driver


if __name__ == "__main__":
    main()
