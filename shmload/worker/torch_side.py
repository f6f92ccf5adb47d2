"""Code that needs torch: torch mode's seeds and worker info, its default collate, and the generator states of an order.

It is a module of its own because a worker whose dataset never touches torch does not import it.
"""

from __future__ import annotations

import base64
import ctypes
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shmload.torch_names import collate_module, numpy_seed, set_thread_name, worker_module
from shmload.worker.sample_rng import generators_kept


def prepare(dataset: Any, worker_id: int, num_workers: int, base_seed: int) -> None:
    """Seed random, torch and numpy as torch's worker does, and set the result of get_worker_info()."""
    set_thread_name("pt_data_worker")
    torch.set_num_threads(1)
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(numpy_seed(base_seed, worker_id))
    # torch.utils.data.get_worker_info() returns this
    worker_module._worker_info = worker_module.WorkerInfo(id=worker_id, num_workers=num_workers, seed=seed, dataset=dataset)


def default_collate(samples: list[Any]) -> Any:
    """Collate samples as torch's default does, into private memory.

    In a worker, torch's own function stacks into a new shared-memory file for its queue; this one stacks into private memory,
    because the batch is then written to the slot. Both stack into an array of the first sample's dtype, which matters if dtypes
    differ.
    """
    functions = dict(collate_module.default_collate_fn_map)
    if functions.get(torch.Tensor) is collate_module.collate_tensor_fn:  # otherwise the user has registered another function
        functions[torch.Tensor] = _stack
    return collate_module.collate(samples, collate_fn_map=functions)


def _stack(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    first = batch[0]
    if first.is_nested or first.layout != torch.strided:
        collate_module.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # raises torch's error for a type that it refuses
    if all(tensor.dtype is first.dtype for tensor in batch):
        return torch.stack(batch, 0)  # for tensors that `out=` refuses: quantized ones, and those that require grad
    out = first.new_empty((len(batch), *first.size()))
    return torch.stack(batch, 0, out=out)


GENERATORS = ("of_torch", "of_python", "of_numpy")  # attributes of Origin for the global generators


@dataclass(frozen=True)
class Origin:
    """The states of the generators from which an order may be drawn.

    Attributes:
        of_torch: state of torch's global CPU generator.
        of_python: state of Python's generator.
        of_numpy: state of numpy's generator.
        own: state of the loader's `generator`, if it has one.
        of_sampler: state of the sampler's `generator`, if it has one that is not the loader's.
    """

    of_torch: torch.Tensor
    of_python: tuple[Any, ...]
    of_numpy: Any
    own: torch.Tensor | None
    of_sampler: torch.Tensor | None = None

    def dumps(self, is_torch_enough: bool) -> dict[str, str]:
        """Return the states as a JSON-able dict, about 3.4 KB for each generator.

        Args:
            is_torch_enough: leave out Python's and numpy's states.
        """
        texts = {}
        if self.own is not None:
            texts["generator"] = _torch_text(self.own)
        else:
            texts["torch"] = _torch_text(self.of_torch)
        if self.of_sampler is not None:
            texts["sampler"] = _torch_text(self.of_sampler)
        if not is_torch_enough:
            texts["torch"] = _torch_text(self.of_torch)
            _, words, gauss = self.of_python
            texts["random"] = f"{gauss!r} {_text(np.array(words, np.uint32).tobytes())}"
            if self.of_numpy[0] == "MT19937":
                _, words, place, has_gauss, cached = self.of_numpy
                texts["numpy"] = f"{place} {has_gauss} {float(cached)!r} {_text(np.asarray(words, np.uint32).tobytes())}"
        return texts

    def bytes_of(self, name: str) -> bytes:
        """Return the state of one of GENERATORS as bytes. Equal states have equal bytes."""
        if name == "of_torch":
            return self.of_torch.numpy().tobytes()
        if name == "of_python":
            _, words, gauss = self.of_python
            return np.array(words, np.uint32).tobytes() + repr(gauss).encode()
        kind, *parts = self.of_numpy if isinstance(self.of_numpy, tuple) else ("", self.of_numpy)
        return b" ".join(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode() for part in (kind, *parts))

    def is_same(self, other: Origin, name: str) -> bool:
        """Return whether one of GENERATORS has the same state in `other`."""
        return self.bytes_of(name) == other.bytes_of(name)

    def replaced(self, other: Origin, names: Iterable[str]) -> Origin:
        """Return a copy with the states of `other` for the generators named."""
        return replace(self, **{name: getattr(other, name) for name in names})

    def is_now(self) -> bool:
        """Return whether every global generator has this state."""
        now = origin_of(None)
        return all(self.is_same(now, name) for name in GENERATORS)

    @classmethod
    def loads(cls, texts: dict[str, str]) -> Origin:
        """Return the states that `dumps` wrote; a generator that was left out has its present state."""
        now = origin_of(None)
        python, numpy, torch_state, own = now.of_python, now.of_numpy, now.of_torch, None
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
        return cls(torch_state, python, numpy, own, _tensor(texts["sampler"]) if "sampler" in texts else None)


def origin_of(generator: torch.Generator | None, of_sampler: torch.Generator | None = None) -> Origin:
    """Return the present states of all global generators, the loader's own and the sampler's own. Takes about 40 us.

    Args:
        generator: the loader's own, if it has one.
        of_sampler: the sampler's own, if it has one that is not the loader's.
    """
    own, its = (None if each is None else each.get_state() for each in (generator, of_sampler))
    return Origin(torch.get_rng_state(), random.getstate(), np.random.get_state(), own, its)


def torch_origin(generator: torch.Generator | None) -> Origin:
    """Return the present states of torch's generators alone, which can only be dumped with `is_torch_enough`. Takes about 5 us.

    Args:
        generator: the loader's own, if it has one.
    """
    return Origin(torch.get_rng_state(), (), None, None if generator is None else generator.get_state())


@contextmanager
def replayed(origin: Origin, generator: torch.Generator | None, of_sampler: torch.Generator | None = None) -> Iterator[None]:
    """Set the generators to saved states within the block, and restore the global ones afterward.

    Args:
        origin: the saved states.
        generator, of_sampler: the loader's own and the sampler's own, which keep the states after the draws.
    """
    with generators_kept():
        torch.set_rng_state(origin.of_torch)
        random.setstate(origin.of_python)
        np.random.set_state(origin.of_numpy)
        set_own(origin, generator, of_sampler)
        yield


def set_own(origin: Origin, generator: torch.Generator | None, of_sampler: torch.Generator | None) -> None:
    """Set the loader's own generator and the sampler's own, where they exist, to their states in `origin`."""
    for each, state in ((generator, origin.own), (of_sampler, origin.of_sampler)):
        if each is not None and state is not None:
            each.set_state(state)


def _text(state: bytes) -> str:
    return base64.b64encode(state).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


# the state of torch's CPU generator has 5056 bytes: a head of 24, 624 words of 8 of which 4 are used, a tail of 40
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


_openmp: Any = ctypes.CDLL(None)  # torch's OpenMP, whichever library it is: its symbols are global
_HAS_OPENMP = hasattr(_openmp, "omp_set_num_threads")


def compute_alone() -> None:
    """Let torch compute in this thread alone, when it is called by this thread. Other threads' calls are not changed."""
    if _HAS_OPENMP:
        _openmp.omp_set_num_threads(1)


def randperm(n: int, generator: torch.Generator | None) -> torch.Tensor:
    """Return `torch.randperm(n)`, computed in this thread alone.

    torch fills the array with several threads before one thread shuffles it. They save nothing and then spin until there is more to
    do: with n = 100,000 on 2 busy cores this took 63 ns of CPU for each index, against 5 (measured). OpenMP keeps the number of
    threads for each calling thread, so no other thread sees the change.

    Args:
        n: length of the permutation.
        generator: the generator to draw from; None for torch's global one.
    """
    if not _HAS_OPENMP:
        return torch.randperm(n, generator=generator)
    num_threads = _openmp.omp_get_max_threads()
    _openmp.omp_set_num_threads(1)
    try:
        return torch.randperm(n, generator=generator)
    finally:
        _openmp.omp_set_num_threads(num_threads)
