"""Device(...): images normalised on the device, and tensors whose addresses stay, whatever order the device does its work in."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shmload import CopyFailed, Device, Normalise, ShmLoader
from shmload.device.calls import Calls
from tests.device.device_kit import Mixed, Rows, rows_of
from tests.stand_in.device import StandIn
from tests.stand_in.device_log import Logged
from tests.stand_in.device_replay import replay

Make = Callable[..., ShmLoader[Any]]
ADVERSARIAL = settings(
    max_examples=12,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # each example starts workers
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Images(Rows):
    """Sample i has bytes drawn from i, and beside them what is no image."""

    def __init__(self, n: int, shape: tuple[int, ...] = (5, 7, 3)) -> None:
        super().__init__(n)
        self.shape = shape

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": np.random.default_rng(i).integers(0, 256, self.shape, np.uint8), "label": i}


def images_of(dataset: Images, first: int, count: int = 2) -> torch.Tensor:
    return torch.stack([torch.from_numpy(dataset[i]["image"]) for i in range(first, first + count)])


def as_torchvision(image: torch.Tensor) -> torch.Tensor:
    """ToTensor and Normalize of one image of H, W, C, by their own operations."""
    scaled = image.permute(2, 0, 1).contiguous().to(torch.float32).div(255)
    mean, std = (torch.as_tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (MEAN, STD))
    return scaled.sub_(mean).div_(std)


# ------------------------------------------------------------ normalising


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", ["HWC", "CHW"])
@pytest.mark.parametrize("source", ["HWC", "CHW"])
def test_every_byte_becomes_what_torchvision_makes_of_it(source: Any, target: Any, dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).repeat(3, 1).T.reshape(1, 16, 16, 3)
    expected = as_torchvision(every[0])[None].to(dtype)
    normalise = Normalise(MEAN, STD, dtype, source=source, target=target)
    given = every if source == "HWC" else every.permute(0, 3, 1, 2)
    made = normalise.made_of(given)
    assert made.is_contiguous()
    assert normalise.shape_of(given) == made.shape
    assert torch.equal(expected if target == "CHW" else expected.permute(0, 2, 3, 1), made)


@pytest.mark.slow
@given(data=st.data())
@ADVERSARIAL
def test_normalised_batches_are_right_whatever_order_the_device_works_in(data: st.DataObject, make: Make) -> None:
    device = StandIn(Random(data.draw(st.integers(0, 1000))).randrange)
    dataset = Images(24)
    static_buffers = data.draw(st.sampled_from([None, 2, 3, 4]))
    loader = make(Device(device, normalise=Normalise(MEAN, STD), static_buffers=static_buffers), dataset)
    found = []
    for batch in loader:
        is_static = static_buffers is not None
        found.append([device.read(batch[name], by_address=is_static) for name in ("image", "label")])
        for number in data.draw(st.lists(st.integers(0, 1), max_size=5)):
            device.step(number)
    device.run()
    for step, (image, label) in enumerate(found):
        expected = torch.stack([as_torchvision(each) for each in images_of(dataset, 2 * step)])
        assert torch.equal(expected, image[0])
        assert [2 * step, 2 * step + 1] == label[0].tolist()
    loader.close()
    assert (device.registered, device.violations) == ({}, [])


@pytest.mark.parametrize("seed", [0, None])
def test_without_workers_images_are_normalised_too(seed: int | None, make: Make) -> None:
    device, dataset = StandIn(), Images(6)
    loader = make(Device(device, normalise=Normalise(MEAN, STD)), dataset, num_workers=0, multiprocessing_context=None, seed=seed)
    found = [device.read(batch["image"]) for batch in loader]
    device.run()
    expected = [torch.stack([as_torchvision(each) for each in images_of(dataset, at)]) for at in (0, 2, 4)]
    assert all(torch.equal(mine, image[0]) for mine, image in zip(expected, found, strict=True))


class Photos(Images):
    """Images of differing heights."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": np.full((i % 3 + 1, 4, 3), i, np.uint8)}


def test_images_of_differing_shape_are_one_copy_and_each_is_normalised(make: Make) -> None:
    device = StandIn()
    logged = Logged(device)
    options = {"ragged": {"image": "list"}, "batch_size": 3}
    loader = make(Device(logged, normalise=Normalise(MEAN, STD)), Photos(48), **options)
    batch = next(iter(loader))
    device.run()
    expected = [as_torchvision(torch.full((i + 1, 4, 3), i, dtype=torch.uint8)) for i in range(3)]
    assert all(torch.equal(mine, image) for mine, image in zip(expected, batch["image"], strict=True))
    first = next(number for number, entry in enumerate(logged.log) if entry[0] == "apply")
    assert [entry[0] for entry in logged.log[first - 1 : first + 3]] == ["copy", "apply", "apply", "apply"]


def test_a_batch_without_images_is_an_error_in_its_turn_and_loses_no_slot(make: Make) -> None:
    device = StandIn()
    loader = make(Device(device, normalise=Normalise(MEAN, STD)))
    iterator = iter(loader)
    for _ in range(24):
        with pytest.raises(ValueError, match="normalise needs") as caught:
            next(iterator)
    assert str(caught.value) == (
        "normalise needs a uint8 tensor of 3 or 4 dimensions with 3 channels in HWC order; the batch has torch.int32 (2, 16), "
        "torch.int64 (2,). Give source= or leave normalise out"
    )
    loader.close()
    assert (device.registered, device.violations) == ({}, [])


# ------------------------------------------------------------ static buffers


def test_batches_come_at_as_many_addresses_as_there_are_buffers_in_turn_in_every_pass(make: Make) -> None:
    device = StandIn()
    for seed in (0, None):
        loader = make(Device(device, static_buffers=3), seed=seed)
        addresses = [batch["x"].data_ptr() for _ in range(2) for batch in loader]
        assert len(set(addresses)) == 3
        assert addresses == addresses[:3] * 16


@pytest.mark.slow
@given(data=st.data())
@ADVERSARIAL
def test_no_buffer_is_filled_before_its_last_use_is_done(data: st.DataObject, make: Make) -> None:
    device = StandIn(Random(data.draw(st.integers(0, 1000))).randrange)
    logged = Logged(device)
    count = data.draw(st.integers(2, 5))
    loader = make(Device(logged, static_buffers=count))
    side, iterator, found, held = device.side_stream(), iter(loader), [], []
    for _ in range(20):
        batch = next(iterator)
        found.append(device.read(batch["x"], by_address=True))
        if data.draw(st.booleans()):
            device.wait_on_stream(side, device.record(device.main))
            with device.using(side):
                found[-1] = device.read(batch["x"], by_address=True)
            loader.record_stream(batch, side)
        if data.draw(st.booleans()):
            held.append(batch["x"][1:].detach())  # an alias is enough
        del held[: max(len(held) - (count - 2), 0)]
        for number in data.draw(st.lists(st.integers(0, 2), max_size=4)):
            device.step(number)
    del batch, held
    device.run()
    loader.close()
    assert [torch.equal(rows_of(2 * step), x[0]) for step, x in enumerate(found)] == [True] * 20
    assert device.violations == []
    assert replay(logged.log) == []


def test_what_is_held_is_not_overwritten_and_says_which_batches_those_are(make: Make) -> None:
    device = StandIn()
    loader = make(Device(device, static_buffers=2))
    iterator = iter(loader)
    held = [next(iterator)["x"][:1], next(iterator)["x"].view(32)]
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            next(iterator)
        assert str(caught.value) == (
            "all 2 static buffers are held: batch 0 of epoch 0, batch 1 of epoch 0. A buffer is used again when nothing refers to its "
            "batch's tensors any more: clone what is to be kept, or raise static_buffers"
        )
    del caught
    device.run()
    assert torch.equal(rows_of(0)[:1], held[0])
    held.pop(0)
    third = device.read(next(iterator)["x"])
    device.run()
    assert torch.equal(rows_of(4), third[0])


def test_an_autograd_graph_holds_its_batch(make: Make) -> None:
    iterator = iter(make(Device(StandIn(), static_buffers=2), Floats(48)))
    weight = torch.ones(4, requires_grad=True)
    loss = (next(iterator)["x"] * weight).sum()
    next(iterator)
    second = next(iterator)  # its own buffer came back; the graph's did not
    with pytest.raises(RuntimeError, match="batch 0 of epoch 0, batch 2 of epoch 0"):
        next(iterator)
    del loss, second
    next(iterator)


class Floats(Rows):
    """Rows that a graph can be made over."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": np.full(4, i, np.float32)}


class Widening(Rows):
    """Batches of differing width."""

    def __getitem__(self, i: int) -> Any:
        return np.full(4 + i // 2 % 3, i, np.int32)


def test_a_batch_of_another_shape_is_an_error_in_its_turn_and_the_next_comes(make: Make) -> None:
    device = StandIn()
    loader = make(Device(device, static_buffers=2), Widening(24), ragged="list")
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    with pytest.raises(ValueError, match="static_buffers needs batches of one shape: batch 2 of epoch 0 has a tensor of"):
        next(iterator)
    loader.close()
    assert (device.registered, device.violations) == ({}, [])


def test_a_short_last_batch_says_what_to_do(make: Make) -> None:
    iterator = iter(make(Device(StandIn(), static_buffers=3), Rows(7), uneven="exact"))
    for _ in range(3):
        next(iterator)
    with pytest.raises(ValueError) as caught:
        next(iterator)
    assert str(caught.value) == (
        "static_buffers needs batches of one shape: batch 3 of epoch 0 has a tensor of torch.int32 (1, 16) where those before had "
        "torch.int32 (2, 16). Give drop_last=True or a collate_fn that pads, or leave static_buffers out"
    )


def test_a_copy_that_fails_gives_its_buffer_back(make: Make) -> None:
    device = StandIn()
    loader = make(Device(device, static_buffers=2))
    iterator = iter(loader)
    num_failed = 0
    for step in range(24):
        if step % 3 == 1:
            device.fail("copy")
        try:
            next(iterator)
        except CopyFailed:
            num_failed += 1
    assert num_failed == 8


def test_a_pass_broken_off_gives_back_what_was_sent_ahead(make: Make) -> None:
    device = StandIn()
    loader = make(Device(device, static_buffers=3))
    for _ in range(5):
        for batch in loader:
            first = device.read(batch["x"], by_address=True)
            break
        del batch
    device.run()
    assert torch.equal(rows_of(0), first[0])


def test_a_batch_outlives_its_loader(make: Make) -> None:
    device = StandIn()
    loader = make(Device(device, static_buffers=2))
    batch = next(iter(loader))
    loader.close()
    del loader
    gc.collect()
    device.run()
    assert torch.equal(rows_of(0), batch["x"])


def test_a_structure_with_text_keeps_it(make: Make) -> None:
    device = StandIn()
    loader = make(Device(device, static_buffers=2), Mixed(48), ragged={"x": "list"}, batch_size=3)
    batch = next(iter(loader))
    device.run()
    assert batch["text"] == ["sample 0", "sample 1", "sample 2"]
    assert [row.tolist() for row in batch["x"]] == [[0], [1, 1], [2, 2, 2]]


# ------------------------------------------------------------ what may be asked for


@pytest.mark.parametrize(
    ("make_it", "error", "text"),
    [
        (lambda: Normalise((0.5,), ()), ValueError, "normalise needs one mean and one std a channel; got 1 means and 0 stds"),
        (lambda: Normalise((), ()), ValueError, "normalise needs one mean and one std a channel; got 0 means and 0 stds"),
        (lambda: Normalise((0.5,), (0,)), ValueError, "normalise divides by std, which is above 0; got (0.0,)"),
        (
            lambda: Normalise((0.5,), (1,), torch.int8),
            TypeError,
            "normalise makes torch.float32, torch.float16 or torch.bfloat16; got torch.int8",
        ),
        (lambda: Normalise((0.5,), (1,), source="WHC"), ValueError, 'source is "HWC" or "CHW"; got \'WHC\''),
        (lambda: Normalise((0.5,), (1,), target="NCHW"), ValueError, 'target is "HWC" or "CHW"; got \'NCHW\''),
        (lambda: Device(normalise=(0.5, 0.5)), TypeError, "Device(normalise=...) is a shmload.Normalise or None; got (0.5, 0.5)"),
        (
            lambda: Device(static_buffers=1),
            ValueError,
            "static_buffers is at least 2, as a loop holds one batch while it takes the next, or None; got 1",
        ),
        (lambda: Device(None), TypeError, 'Device(where=...) is "cuda", "cuda:1" or a torch.device; got None'),
        (
            lambda: ShmLoader([1], device=Device(static_buffers=2)),
            ValueError,
            "static_buffers needs num_workers > 0: without workers each batch is sent when it is read",
        ),
        (
            lambda: Device("cpu"),
            ValueError,
            "batches are sent to CUDA devices only; got device='cpu'. Leave it out for batches in host memory",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(make_it: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        make_it()
    assert str(caught.value) == text


def test_a_loader_with_options_can_be_copied(make: Make) -> None:
    loader = make(Device("cuda:1", normalise=Normalise(MEAN, STD, torch.bfloat16)), num_workers=0, multiprocessing_context=None)
    copied = pickle.loads(pickle.dumps(loader))
    assert copied.device == loader.device
    copied.close()


def test_the_current_device_is_the_one_that_was_current_when_it_was_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [1]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    calls = Calls()
    found = [calls.current_stream()]
    current[0] = 0  # as torch.cuda.set_device has it
    found.append(calls.current_stream())
    assert found == [torch.device("cuda", 1)] * 2
