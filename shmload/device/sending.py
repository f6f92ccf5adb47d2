"""A batch's tensors, copied to a device; what is no tensor stays as it is.

A field lies in a slot as one storage, and rows of differing shape are views of it: the storage is copied once and viewed again, so
a thousand rows are one copy, and what shared memory before shares it after.

Images of bytes made floating-point numbers on the device, so that a quarter of the bytes cross the bus.

The arithmetic is that of torchvision's ToTensor and Normalize: `(x / 255 - mean) / std` in float32, one rounding an operation, and
for a narrower type one more at the end.

Tensors of the device that are filled again and again, at addresses that stay: what a captured graph needs.

A batch fills one set of tensors, and what is yielded aliases it: through DLPack, so that it has a storage of its own, and the death
of that storage is the death of the last alias. `look`, at each `next()`, takes back the sets that nobody holds, and records
an event on the streams that are current then, and on those named; the stream that copies waits for these events before it
fills the set again. Sets are used in turn. Nothing that is held is ever overwritten: with all sets held there is no next batch.

Which device a loader's arguments mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shmload.batch.deliver import mapped
from shmload.device.calls import Calls

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_AXES = {"HWC": -1, "CHW": -3}  # where the channels are


@dataclass(frozen=True)
class Normalise:
    """What becomes of a batch's images once they are on the device: `(x / 255 - mean) / std`, by the stream that copied them.

    An image is a uint8 tensor of 4 dimensions, or 3 (one image, or a ragged field's), with as many channels as there are means;
    whatever else a batch holds stays as it is. A batch without any is an error.

    Args:
        mean, std: a number for each channel, of values from 0 to 1.
        dtype: of the result: float32, float16 or bfloat16. It is computed in float32.
        source: "HWC", the channels last, as decoders write them, or "CHW".
        target: the same of the result, which is contiguous. `target="HWC"` with `.permute(0, 3, 1, 2)` is what torch calls
            channels_last, without another copy.
    Raises:
        ValueError, TypeError: they do not go together.
    Example:
        >>> from shmload import Normalise
        >>> Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)).target
        'CHW'
    """

    mean: Sequence[float]
    std: Sequence[float]
    dtype: torch.dtype = torch.float32
    source: Literal["HWC", "CHW"] = "HWC"
    target: Literal["HWC", "CHW"] = "CHW"

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError(f"normalise needs one mean and one std a channel; got {len(self.mean)} means and {len(self.std)} stds")
        if not all(value > 0 for value in self.std):
            raise ValueError(f"normalise divides by std, which is above 0; got {self.std}")
        if self.dtype not in DTYPES:
            raise TypeError(f"normalise makes torch.float32, torch.float16 or torch.bfloat16; got {self.dtype}")
        for name in ("source", "target"):
            if getattr(self, name) not in _AXES:
                raise ValueError(f'{name} is "HWC" or "CHW"; got {getattr(self, name)!r}')

    def is_meant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an image, or some."""
        if tensor.dtype is not torch.uint8 or tensor.ndim not in (3, 4):
            return False
        return tensor.shape[_AXES[self.source]] == len(self.mean)

    def shape_of(self, tensor: torch.Tensor) -> torch.Size:
        """The shape of what is made of it."""
        return self._turned(tensor).shape

    def made_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The numbers, by the current stream of the tensor's device."""
        turned = self._turned(tensor)
        scale, mean, std = _constants(self.mean, self.std, self.target, turned.device)
        values = turned.to(torch.float32, memory_format=torch.contiguous_format)
        return values.div_(scale).sub_(mean).div_(std).to(self.dtype)

    def _turned(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.source == self.target:
            return tensor
        return tensor.movedim(_AXES[self.source], _AXES[self.target])


@lru_cache
def _constants(mean: tuple[float, ...], std: tuple[float, ...], target: str, device: torch.device) -> tuple[torch.Tensor, ...]:
    """255, mean and std on the device, made once: that waits for its stream."""
    # 255 as a tensor there: by a number of the host CUDA multiplies with the reciprocal, which rounds twice
    # (pytorch: aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu)
    shape = (-1, 1, 1) if target == "CHW" else (-1,)
    return tuple(torch.tensor(values, dtype=torch.float32, device=device).view(shape) for values in ((255,), mean, std))


_to_dlpack: Callable[[torch.Tensor], Any] = torch._C._to_dlpack
_from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack


class BufferSet:
    """The tensors of one batch, and what is known of who uses them."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.batch = ""  # which batch it holds, in words
        self.events: list[Any] = []  # behind the last use
        self.named: list[Any] = []  # streams beside the current ones
        self._aliases: list[StorageWeakRef] = []

    def begin(self, batch: str) -> None:
        """Another batch comes in."""
        self.batch = batch
        self._aliases.clear()

    def at(self, number: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """The tensor for a batch's next field; None: it is not made yet.

        Raises:
            ValueError: it is of another shape or type.
        """
        if number >= len(self.tensors):
            return None
        found = self.tensors[number]
        if found.shape != shape or found.dtype != dtype:
            raise ValueError(
                f"static_buffers needs batches of one shape: {self.batch} has a tensor of {dtype} {tuple(shape)} where those "
                f"before had {found.dtype} {tuple(found.shape)}. Give drop_last=True or a "
                "collate_fn that pads, or leave static_buffers out"
            )
        return found

    def lend(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """An alias of a tensor that was filled, whose life is followed."""
        if number == len(self.tensors):
            self.tensors.append(tensor)
        alias = _from_dlpack(_to_dlpack(tensor))
        self._aliases.append(StorageWeakRef(alias.untyped_storage()))  # type: ignore[no-untyped-call]  # torch's own
        return alias

    @property
    def is_held(self) -> bool:
        """Whether anybody has an alias."""
        return not all(alias.expired() for alias in self._aliases)  # type: ignore[no-untyped-call]  # torch's own


class Buffers:
    """The sets of one loader, for all of its passes.

    Args:
        count: of sets.
    """

    def __init__(self, calls: Calls, count: int) -> None:
        self._calls = calls
        self._count = count
        self._free = deque(BufferSet() for _ in range(count))
        self._lent: list[BufferSet] = []

    def look(self) -> None:
        """Takes back what nobody holds."""
        gone = [each for each in self._lent if not each.is_held]
        if not gone:
            return
        streams = self._calls.current_streams()
        for each in gone:
            others = (stream for stream in streams if stream not in each.named)
            each.events = [self._calls.record(stream) for stream in (*each.named, *others)]
            each.named = []
            self._lent.remove(each)
            self._free.append(each)

    @property
    def has_room(self) -> bool:
        """Whether a batch may come."""
        return bool(self._free)

    def check_room(self) -> None:
        """Returns if one may.

        Raises:
            RuntimeError: all sets are held.
        """
        if not self._free:
            held = ", ".join(each.batch for each in self._lent)
            raise RuntimeError(
                f"all {self._count} static buffers are held: {held}. A buffer is used again when nothing refers to its batch's "
                "tensors any more: clone what is to be kept, or raise static_buffers"
            )

    def take(self, batch: str, stream: Any) -> BufferSet:
        """The set whose turn it is, which a stream will fill once its last use is done."""
        taken = self._free[0]
        for event in taken.events:
            self._calls.wait_on_stream(stream, event)
        taken.begin(batch)
        self._free.popleft()
        self._lent.append(taken)
        return taken

    def name_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Has the set of a tensor wait for this stream, too."""
        address = tensor.data_ptr()
        for each in self._lent:
            if any(0 <= address - one.data_ptr() < max(one.nbytes, 1) for one in each.tensors):
                if stream not in each.named:
                    each.named.append(stream)
                return


class Sender:
    """How one loader's batches come to a device.

    Args:
        device: what the loader was given for it.
        static_buffers: sets of tensors that are filled in turn; None: every batch has its own.
    """

    def __init__(self, device: Any, calls: Calls, normalise: Normalise | None, static_buffers: int | None) -> None:
        self.device = device
        self.calls = calls
        self.normalise = normalise
        self.buffers = None if static_buffers is None else Buffers(calls, static_buffers)

    def send(self, batch: Any, *, into: BufferSet | None = None, is_slot: bool) -> tuple[Any, list[torch.Tensor]]:
        """The batch on the device, by the current stream, and every tensor of the device that it lies in.

        Args:
            into: tensors to be filled.
            is_slot: it lies in a slot, where a storage is a field. Elsewhere a tensor may be a small part of a large storage.
        Raises:
            ValueError: there is no image to normalise, or `into` is of another shape.
        """
        sending = _Sending(self, into, is_slot)
        sent = mapped(batch, sending.send, _itself)
        if self.normalise is not None and not sending.num_images:
            sending.refuse()
        return sent, sending.made

    def name_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Has a tensor's memory not be used again before what a stream has been given by the tensor's end is done."""
        if self.buffers is not None:
            self.buffers.name_stream(tensor, stream)
        else:
            self.calls.keep_for(tensor, stream)


def sent_now(batch: Any, sender: Sender | None) -> Any:
    """A batch in private memory, on the device, if one is asked for; the current stream has it next."""
    return batch if sender is None else sender.send(batch, is_slot=False)[0]


class _Sending:
    """One batch under way."""

    def __init__(self, sender: Sender, into: BufferSet | None, is_slot: bool) -> None:
        self._calls = sender.calls
        self._normalise = sender.normalise
        self._into = into
        self._is_slot = is_slot
        self._wholes: dict[tuple[int, bool], torch.Tensor] = {}  # address of a storage, is it of images -> its copy
        self._seen: list[str] = []
        self.num_images = 0
        self.made: list[torch.Tensor] = []

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """One tensor of it, on the device."""
        if self._normalise is None:
            return self._copied(tensor, is_image=False)
        self._seen.append(f"{tensor.dtype} {tuple(tensor.shape)}")
        if not self._normalise.is_meant(tensor):
            return self._copied(tensor, is_image=False)
        self.num_images += 1
        bytes_there = self._copied(tensor, is_image=True)
        target = self._target(self._normalise.shape_of(tensor), self._normalise.dtype)
        return self._lent(self._calls.apply(self._normalise.made_of, bytes_there, target))

    def refuse(self) -> None:
        """There was nothing to normalise."""
        assert self._normalise is not None
        normalise, seen = self._normalise, ", ".join(self._seen) or "no tensor"
        raise ValueError(
            f"normalise needs a uint8 tensor of 3 or 4 dimensions with {len(normalise.mean)} channels in {normalise.source} order; "
            f"the batch has {seen}. Give source= or leave normalise out"
        )

    def _copied(self, tensor: torch.Tensor, *, is_image: bool) -> torch.Tensor:
        if not self._is_slot or tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == 0:
            return self._whole(tensor, is_image)
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), is_image)
        whole = self._wholes.get(key)
        if whole is None:
            if tensor.is_contiguous() and tensor.nbytes == storage.nbytes():
                return self._wholes.setdefault(key, self._whole(tensor, is_image))
            whole = self._wholes[key] = self._whole(torch.empty(0, dtype=torch.uint8).set_(storage), is_image)
        like = torch.empty(0, dtype=tensor.dtype, device=whole.device)
        return like.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def _whole(self, tensor: torch.Tensor, is_image: bool) -> torch.Tensor:
        if is_image:  # only what is made of it is handed on: both are this stream's
            return self._calls.copy(tensor)
        return self._lent(self._calls.copy(tensor, self._target(tensor.shape, tensor.dtype)))

    def _target(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        return None if self._into is None else self._into.at(len(self.made), shape, dtype)

    def _lent(self, made: torch.Tensor) -> torch.Tensor:
        self.made.append(made)
        return made if self._into is None else self._into.lend(len(self.made) - 1, made)


def _itself(leaf: Any) -> Any:
    return leaf


NUM_SENT = 2  # batches copied ahead: one is being copied while one waits, and the third is computed with


@dataclass(frozen=True)
class Device:
    """A device that batches are sent to, and what is done with them there: `ShmLoader(..., device=Device("cuda", ...))`.

    Args:
        where: "cuda", "cuda:1" or such a torch.device.
        normalise: makes floating-point numbers of a batch's images, behind the copy and on its stream.
        static_buffers: how many sets of tensors there are, which are filled in turn and keep their addresses as long as the loader
            lives, as captured graphs need it. Batches must have one shape, and workers. A batch's set is used again when nothing
            refers to the batch's tensors any more and what the streams current in its and the next `next()`, or named by
            `record_stream`, were given until then is done; with all sets held `next()` is a RuntimeError. 3 let the copy of a
            batch run beside the step of the one before. None: each batch has memory of its own.
    Raises:
        ValueError, TypeError: they are not such.
    Example:
        >>> from shmload import Device, Normalise
        >>> Device("cuda", normalise=Normalise((0.5,), (0.25,)), static_buffers=3).static_buffers
        3
    """

    where: Any = "cuda"
    _: KW_ONLY
    normalise: Normalise | None = None
    static_buffers: int | None = None

    def __post_init__(self) -> None:
        if self.where is None or isinstance(self.where, Device):
            raise TypeError(f'Device(where=...) is "cuda", "cuda:1" or a torch.device; got {self.where!r}')
        check_device(self.where)
        if self.normalise is not None and not isinstance(self.normalise, Normalise):
            raise TypeError(f"Device(normalise=...) is a shmload.Normalise or None; got {self.normalise!r}")
        count = self.static_buffers
        if count is not None and (not isinstance(count, int) or count < 2):
            raise ValueError(
                f"static_buffers is at least 2, as a loop holds one batch while it takes the next, or None; got {count!r}"
            )


def check_device(device: Any) -> None:
    """Returns if batches may be sent there.

    Raises:
        ValueError, TypeError: it is no CUDA device.
    """
    if device is None or isinstance(device, Calls | Device):
        return
    if not isinstance(device, str | torch.device):
        raise TypeError(f'device is "cuda", "cuda:1" or a torch.device, a shmload.Device, or None; got {device!r}')
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f'device is "cuda" or "cuda:1" and the like, or None; got {device!r}') from error
    if kind != "cuda":
        raise ValueError(
            f"batches are sent to CUDA devices only; got device={str(device)!r}. Leave it out for batches in host memory"
        )


def calls_of_cuda() -> Calls | None:
    """The current CUDA device; None: there is none."""
    return Calls() if torch.cuda.is_available() else None


def sender_of(device: Any) -> Sender:
    """What sends batches to a device that is asked for.

    Raises:
        RuntimeError: there is none.
    """
    options = device if isinstance(device, Device) else Device(device)
    calls = options.where if isinstance(options.where, Calls) else _calls_of(options.where)
    return Sender(device, calls, options.normalise, options.static_buffers)


def _calls_of(device: str | torch.device) -> Calls:
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"device={str(device)!r} needs a GPU and a torch with CUDA: torch.cuda.is_available() is False here. Leave device out "
            "for batches in host memory"
        )
    return Calls(torch.device(device).index)
