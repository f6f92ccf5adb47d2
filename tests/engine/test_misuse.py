"""Unusual uses of batches: resizing, re-binding, sending to other processes, keeping next to another loader's."""

from __future__ import annotations

import gc
import multiprocessing
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing

from shmload import ShmLoader

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
DEADLINE_S = 60


# ---------------------------------------------------------------- resizing and re-binding


def test_shrunk_batch_keeps_its_slot_and_growing_is_torchs_error(stream: Any) -> None:
    x = stream.next()["x"]
    expected = stream.expected()["x"]
    assert torch.equal(x.resize_(2, 3, 8), expected[:2])
    assert stream.num_leased == 1
    with pytest.raises(RuntimeError, match="Trying to resize storage that is not resizable"):
        x.resize_(100, 3, 8)
    with pytest.raises(RuntimeError, match="not resizable"):
        x.untyped_storage().resize_(0)
    stream.run_on()
    assert torch.equal(x.as_strided((4, 3, 8), (24, 8, 1)), expected)


@pytest.mark.parametrize(
    "rebind",
    [
        lambda t: t.set_(torch.zeros(3)),
        lambda t: t.set_(torch.zeros(3).untyped_storage(), 0, (3,)),
        lambda t: setattr(t, "data", torch.zeros(3)),
        lambda t: t.set_(),
    ],
    ids=["set_ tensor", "set_ storage", "data", "set_ nothing"],
)
def test_tensor_bound_to_other_memory_releases_its_slot_unless_views_remain(
    rebind: Callable[[torch.Tensor], Any], stream: Any
) -> None:
    x = stream.next()["x"]
    expected = stream.expected()["x"]
    view = x[1:]
    rebind(x)
    stream.run_on()
    assert stream.num_leased == 1
    assert torch.equal(view, expected[1:])
    del view
    assert stream.num_leased == 0
    assert x.numel() in (0, 3)


# ---------------------------------------------------------------- other processes


def double_all(received: Any, answers: Any) -> None:
    """Runs in another process: doubles the received batch in place, and sends back what it was."""
    batch = received.get()
    seen = {name: value.clone() for name, value in batch.items()}
    batch["x"].mul_(2)
    answers.put(seen)
    received.get()  # until the other process has checked


@pytest.mark.slow(reason="another process receives the batch through torch's queue")
def test_batch_put_into_a_queue_is_shared_and_leaves_the_ring(stream: Any) -> None:
    context = torch.multiprocessing.get_context("fork")
    sent, answers = context.SimpleQueue(), context.SimpleQueue()
    child = context.Process(target=double_all, args=(sent, answers))
    child.start()
    batch, expected = stream.next(), stream.expected()
    sent.put(batch)
    assert stream.num_leased == 0  # torch moved the storages into its own shared memory
    stream.run_on()
    seen = answers.get()
    assert all(torch.equal(expected[name], seen[name]) for name in expected)
    assert torch.equal(batch["x"], 2 * expected["x"])  # shared from now on, like every tensor in a torch queue
    sent.put(None)
    child.join(DEADLINE_S)
    assert child.exitcode == 0
    child.close()
    del seen, batch
    gc.collect()


def write_and_end(batch: Any, is_right: Any) -> None:
    is_right.value = bool(torch.all(batch["label"] == batch["x"][:, 0, 0].long()))
    batch["x"].fill_(-1)


@pytest.mark.parametrize("context", [multiprocessing.get_context("fork"), torch.multiprocessing.get_context("fork")])
def test_batch_passed_to_a_forked_process_is_a_copy(context: Any, stream: Any) -> None:
    batch, expected = stream.next(), stream.expected()
    is_right = multiprocessing.get_context("fork").Value("b", 0)
    child = context.Process(target=write_and_end, args=(batch, is_right))
    child.start()
    child.join(DEADLINE_S)
    assert (child.exitcode, is_right.value) == (0, 1)
    child.close()
    assert torch.equal(batch["x"], expected["x"])


def test_batch_after_share_memory_is_written_by_a_forked_process(stream: Any) -> None:
    batch = stream.next()
    for tensor in batch.values():
        tensor.share_memory_()
    assert stream.num_leased == 0
    is_right = multiprocessing.get_context("fork").Value("b", 0)
    child = torch.multiprocessing.get_context("fork").Process(target=write_and_end, args=(batch, is_right))
    child.start()
    child.join(DEADLINE_S)
    assert (child.exitcode, is_right.value) == (0, 1)
    child.close()
    assert torch.all(batch["x"] == -1)


def test_share_memory_moves_every_view_but_no_numpy_array(stream: Any) -> None:
    """Shows that torch replaces the memory of the storage: numpy arrays made earlier keep the old memory, as with any tensor."""
    x = stream.next()["x"]
    view, detached, array = x[1:], x.detach(), x.numpy()
    expected = stream.expected()["x"]
    x.share_memory_()
    assert stream.num_leased == 0
    assert np.all(array.view(np.uint8) == 0xA5)  # poisoned in this test; otherwise it would contain another batch
    stream.run_on()
    assert torch.equal(view, expected[1:])
    assert torch.equal(detached, expected)
    assert np.array_equal(x.numpy(), expected.numpy())


def test_queue_between_threads_copies_nothing(stream: Any) -> None:
    waiting: queue.Queue[Any] = queue.Queue()
    address, found = [], []

    def consume() -> None:
        x = waiting.get()
        found.append((x.data_ptr(), x.clone()))

    thread = threading.Thread(target=consume)
    batch = stream.next()
    address.append(batch["x"].data_ptr())
    expected = stream.expected()["x"]
    waiting.put(batch.pop("x"))
    batch.clear()
    stream.run_on()
    assert stream.num_leased == 1
    thread.start()
    thread.join()
    assert found[0][0] == address[0]
    assert torch.equal(found[0][1], expected)
    found.clear()
    assert stream.num_leased == 0


# ---------------------------------------------------------------- several loaders, and closing


def test_two_simultaneous_loaders_do_not_affect_each_other(make_stream: Any) -> None:
    streams = [make_stream(prefetch_factor=4), make_stream(prefetch_factor=4, seed=None)]
    held: list[tuple[dict[str, Any], Any]] = []
    for _ in range(30):
        held += [(stream.next(), stream.expected()) for stream in streams]
        while len(held) > 6:
            held.pop(len(held) % 5)
        for batch, expected in held:
            assert all(torch.equal(expected[name], batch[name]) for name in expected)
    assert sum(stream.num_leased for stream in streams) == len(held)
    streams[0].loader.close()
    streams[1].run_on()
    for batch, expected in held:
        assert all(torch.equal(expected[name], batch[name]) for name in expected)


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"seed": 0}], ids=str)
def test_loader_closed_within_its_loop_is_an_error_and_the_batch_stays_valid(options: dict[str, Any]) -> None:
    loader: ShmLoader[Any] = ShmLoader(list(range(40)), 4, num_workers=2, **options)
    seen = []
    with pytest.raises(RuntimeError, match="this loader is closed: make a new one"):
        for batch in loader:
            seen.append(batch)
            loader.close()
    assert [batch.tolist() for batch in seen] == [[0, 1, 2, 3]]
