"""The part of a worker that needs torch: torch mode's seeds and worker info, and its default collate.

Apart from the rest so that a worker whose dataset never touches torch does not import it.

The trainer's generators: where they stand, as text, and a while in which they stand there again.
"""

from __future__ import annotations

import base64
import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shmload.torch_names import collate_module, numpy_seed, set_thread_name, worker_module
from shmload.worker.sample_rng import kept_generators


def prepare(dataset: Any, worker_id: int, num_workers: int, base_seed: int) -> None:
    """Seeds random, torch and numpy as torch's worker does, and sets what get_worker_info() answers."""
    set_thread_name("pt_data_worker")
    torch.set_num_threads(1)
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(numpy_seed(base_seed, worker_id))
    # what torch.utils.data.get_worker_info() answers
    worker_module._worker_info = worker_module.WorkerInfo(id=worker_id, num_workers=num_workers, seed=seed, dataset=dataset)


def default_collate(samples: list[Any]) -> Any:
    """torch's default collate, into private memory.

    In a worker torch's own stacks into a fresh shared-memory file for its queue; our batch goes to the slot instead. Like
    torch's it stacks into an array of the first sample's dtype, which matters where dtypes differ.
    """
    functions = dict(collate_module.default_collate_fn_map)
    if functions.get(torch.Tensor) is collate_module.collate_tensor_fn:  # else the user has put in one of his own
        functions[torch.Tensor] = _stack
    return collate_module.collate(samples, collate_fn_map=functions)


def _stack(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    first = batch[0]
    if first.is_nested or first.layout != torch.strided:
        collate_module.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # raises, and says what it does not take
    if all(tensor.dtype is first.dtype for tensor in batch):
        return torch.stack(batch, 0)  # also what `out=` refuses: tensors that require grad, quantised ones
    out = first.new_empty((len(batch), *first.size()))
    return torch.stack(batch, 0, out=out)


@dataclass(frozen=True)
class Origin:
    """Where the generators stood that an order may be drawn from."""

    torch_state: torch.Tensor
    python: tuple[Any, ...]
    numpy: Any
    own: torch.Tensor | None  # the loader's `generator`

    def dumps(self, is_torch_enough: bool) -> dict[str, str]:
        """JSON-able. About 3.4 KB for each generator.

        Args:
            is_torch_enough: leave out Python's and numpy's.
        """
        texts = {}
        if self.own is not None:
            texts["generator"] = _torch_text(self.own)
        else:
            texts["torch"] = _torch_text(self.torch_state)
        if not is_torch_enough:
            texts["torch"] = _torch_text(self.torch_state)
            _, words, gauss = self.python
            texts["random"] = f"{gauss!r} {_text(np.array(words, np.uint32).tobytes())}"
            if self.numpy[0] == "MT19937":
                _, words, place, has_gauss, cached = self.numpy
                texts["numpy"] = f"{place} {has_gauss} {float(cached)!r} {_text(np.asarray(words, np.uint32).tobytes())}"
        return texts

    def is_now(self) -> bool:
        """Whether torch's generator stands there."""
        return torch.equal(self.torch_state, torch.get_rng_state())

    @classmethod
    def loads(cls, texts: dict[str, str]) -> Origin:
        """Inverse of `dumps`; what was left out stands as now."""
        python = random.getstate()
        numpy: Any = np.random.get_state()
        torch_state, own = torch.get_rng_state(), None
        if "torch" in texts:
            torch_state = _tensor(texts["torch"])
        if "generator" in texts:
            own = _tensor(texts["generator"])
        if "random" in texts:
            gauss, words = texts["random"].split()
            numbers = np.frombuffer(_bytes(words), np.uint32).tolist()
            python = (3, tuple(numbers), None if gauss == "None" else float(gauss))
        if "numpy" in texts:
            place, has_gauss, cached, words = texts["numpy"].split()
            numpy = ("MT19937", np.frombuffer(_bytes(words), np.uint32), int(place), int(has_gauss), float(cached))
        return cls(torch_state, python, numpy, own)


def origin_of(generator: torch.Generator | None) -> Origin:
    """Where they stand now. About 40 us."""
    own = None if generator is None else generator.get_state()
    return Origin(torch.get_rng_state(), random.getstate(), np.random.get_state(), own)


@contextmanager
def replayed(origin: Origin, generator: torch.Generator | None) -> Iterator[None]:
    """Lets the generators stand there again. Afterwards the global ones are where they were; `generator` stays where it came to."""
    with kept_generators():
        torch.set_rng_state(origin.torch_state)
        random.setstate(origin.python)
        np.random.set_state(origin.numpy)
        if generator is not None and origin.own is not None:
            generator.set_state(origin.own)
        yield


def _text(state: bytes) -> str:
    return base64.b64encode(state).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


# torch's CPU generator has a state of 5056 bytes: 24 of head, 624 words that are 8 wide and use 4, 40 of tail
_HEAD, _WORDS_END, _NBYTES = 24, 24 + 8 * 624, 5056


def _torch_text(state: torch.Tensor) -> str:
    raw = state.numpy().tobytes()
    if len(raw) != _NBYTES:
        return _text(raw)
    words = np.frombuffer(raw[_HEAD:_WORDS_END], np.uint64).astype(np.uint32).tobytes()
    return _text(raw[:_HEAD] + raw[_WORDS_END:] + words)


def _tensor(text: str) -> torch.Tensor:
    raw, around = _bytes(text), _HEAD + _NBYTES - _WORDS_END
    if len(raw) == around + 4 * 624:
        words = np.frombuffer(raw[around:], np.uint32).astype(np.uint64).tobytes()
        raw = raw[:_HEAD] + words + raw[_HEAD:around]
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


_openmp: Any = ctypes.CDLL(None)  # what torch computes with, in whatever file that lies: its symbols are global
_HAS_OPENMP = hasattr(_openmp, "omp_set_num_threads")


def randperm(n: int, generator: torch.Generator | None) -> torch.Tensor:
    """`torch.randperm(n)`, in this thread alone.

    torch fills the array with several threads before it shuffles with one. They save nothing, and then wait in a loop for more to
    do: at n = 100,000 on 2 busy cores that made 63 ns of CPU an index, against 5 (measured). OpenMP counts threads for each calling
    thread by itself, so no other one sees the change.
    """
    if not _HAS_OPENMP:
        return torch.randperm(n, generator=generator)
    num_threads = _openmp.omp_get_max_threads()
    _openmp.omp_set_num_threads(1)
    try:
        return torch.randperm(n, generator=generator)
    finally:
        _openmp.omp_set_num_threads(num_threads)
