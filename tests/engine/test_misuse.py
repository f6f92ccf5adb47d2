"""What is done to batches that a loader does not expect: resized, re-bound, sent to other processes, kept beside another loader's."""

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


def test_a_batch_made_smaller_keeps_its_slot_and_made_larger_is_refused_as_torch_refuses_it(stream: Any) -> None:
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
def test_a_tensor_bound_to_other_memory_lets_its_slot_go_and_its_views_keep_theirs(
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
    """In another process: doubles in place what it gets, and says what it saw first."""
    batch = received.get()
    seen = {name: value.clone() for name, value in batch.items()}
    batch["x"].mul_(2)
    answers.put(seen)
    received.get()  # until the other side has looked


@pytest.mark.slow(reason="another process takes the batch's storages out of torch's queue")
def test_a_batch_put_into_a_queue_is_the_other_processes_too_and_no_longer_the_rings(stream: Any) -> None:
    context = torch.multiprocessing.get_context("fork")
    sent, answers = context.SimpleQueue(), context.SimpleQueue()
    child = context.Process(target=double_all, args=(sent, answers))
    child.start()
    batch, expected = stream.next(), stream.expected()
    sent.put(batch)
    assert stream.num_leased == 0  # torch has moved the storages into memory of its own
    stream.run_on()
    seen = answers.get()
    assert all(torch.equal(expected[name], seen[name]) for name in expected)
    assert torch.equal(batch["x"], 2 * expected["x"])  # shared from now on, as every tensor in a queue of torch's
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
def test_a_batch_given_to_a_forked_process_is_its_own_copy(context: Any, stream: Any) -> None:
    batch, expected = stream.next(), stream.expected()
    is_right = multiprocessing.get_context("fork").Value("b", 0)
    child = context.Process(target=write_and_end, args=(batch, is_right))
    child.start()
    child.join(DEADLINE_S)
    assert (child.exitcode, is_right.value) == (0, 1)
    child.close()
    assert torch.equal(batch["x"], expected["x"])


def test_a_batch_that_is_shared_first_is_written_by_a_forked_process(stream: Any) -> None:
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


def test_sharing_takes_every_view_of_the_tensor_along_but_no_numpy_array(stream: Any) -> None:
    """torch exchanges the memory under the storage: what numpy took earlier is left behind, with any tensor of torch's."""
    x = stream.next()["x"]
    view, detached, array = x[1:], x.detach(), x.numpy()
    expected = stream.expected()["x"]
    x.share_memory_()
    assert stream.num_leased == 0
    assert np.all(array.view(np.uint8) == 0xA5)  # poisoned here; elsewhere another batch's
    stream.run_on()
    assert torch.equal(view, expected[1:])
    assert torch.equal(detached, expected)
    assert np.array_equal(x.numpy(), expected.numpy())


def test_a_queue_between_threads_copies_nothing(stream: Any) -> None:
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


# ---------------------------------------------------------------- several loaders, and ends


def test_two_loaders_at_once_use_nothing_of_each_others(make_stream: Any) -> None:
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
def test_a_loader_closed_by_the_loop_over_it_says_so_and_leaves_the_batch(options: dict[str, Any]) -> None:
    loader: ShmLoader[Any] = ShmLoader(list(range(40)), 4, num_workers=2, **options)
    seen = []
    with pytest.raises(RuntimeError, match="this loader is closed: make a new one"):
        for batch in loader:
            seen.append(batch)
            loader.close()
    assert [batch.tolist() for batch in seen] == [[0, 1, 2, 3]]
