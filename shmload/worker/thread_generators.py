"""Give a worker thread generators of its own, from which plain calls of random, numpy and torch draw in this thread.

Such calls draw from one generator of the process, so that in threads the numbers of a sample would depend on what other threads
draw at the same time. The first worker thread therefore puts functions in the place of those of the modules, which draw from the
thread's generator in a worker thread, and from the process's own in all others:

* random: the generator's class is replaced by one whose words come from the thread's generator. Methods that were imported by name
  before (`from random import gauss`) are bound to the same generator, so they follow; only `random` and `getrandbits`, which are
  compiled, must be called as `random.random()`.
* numpy: the functions of `np.random`. A function that was imported by name before draws from the process's generator, and so does
  code that takes the generator itself, `np.random.mtrand._rand`. scipy's distributions take it when they are imported, which may
  be earlier.
* torch: a function mode, which torch keeps for each thread, passes the thread's generator to functions that take one. Functions
  that take none (`alpha_dropout`, for example) draw from the process's generator; but `dropout` is computed here.

What cannot be redirected depends on the order in which threads read. Draw from `sample_rng()` in such a dataset.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from shmload.processes.fork_lock import ForkLock
from shmload.torch_names import sample_dirichlet, standard_gamma
from shmload.worker.generator_set import OF_PROCESS, GeneratorSet, current_set

_lock = ForkLock()
# functions of np.random that are no methods of its generator -> the methods that they call
_ALIASES = {"ranf": "random_sample", "sample": "random_sample"}


def make_set() -> GeneratorSet:
    """Return a new set for one thread. The functions of random, numpy and torch draw from the set that their thread uses."""
    with _lock:
        _redirect()
    numpys = np.random.RandomState()
    return GeneratorSet(random.Random(), numpys, numpys.seed, SimpleNamespace(default_generator=torch.Generator()))


@functools.cache
def _redirect() -> None:
    """Let the functions of random, numpy and torch draw from the current thread's set."""
    python: Any = OF_PROCESS.python
    python.__class__ = _PythonOfThread
    for name in ("random", "getrandbits", "seed", "getstate", "setstate"):
        setattr(random, name, getattr(python, name))
    for name, function in list(vars(np.random.mtrand).items()):
        if name in _ALIASES or getattr(function, "__self__", None) is OF_PROCESS.numpy:
            redirected = _of_thread(_ALIASES.get(name, name), function)
            for module in (np.random.mtrand, np.random):
                if getattr(module, name, None) is function:
                    setattr(module, name, redirected)
    seed = np.random.seed
    np.random.seed = functools.wraps(seed)(lambda *args, **kwargs: _numpy_seed(seed)(*args, **kwargs))
    vars(torch.random)["default_generator"] = _TorchOfThread()  # read by torch.manual_seed() and its like


def _numpy_seed(of_process: Callable[..., Any]) -> Callable[..., Any]:
    own = current_set()
    return of_process if own is OF_PROCESS else own.numpy.seed


def _of_thread(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method of the current thread's RandomState.

    Args:
        name: name of the method.
        function: the method of the process's own.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        own = current_set()
        return (function if own is OF_PROCESS else getattr(own.numpy, name))(*args, **kwargs)

    return call


class _PythonOfThread(random.Random):
    """The class of `random`'s own generator. Its words and states are those of the current thread's generator."""

    def _own(self) -> random.Random | None:
        python = current_set().python
        return None if python is self else python

    def random(self) -> float:
        own = self._own()
        return super().random() if own is None else own.random()

    def getrandbits(self, k: int, /) -> int:
        own = self._own()
        return super().getrandbits(k) if own is None else own.getrandbits(k)

    def seed(self, a: Any = None, version: int = 2) -> None:
        own = self._own()
        if own is None:
            super().seed(a, version)
        else:
            own.seed(a, version)

    def getstate(self) -> tuple[Any, ...]:
        own = self._own()
        return super().getstate() if own is None else own.getstate()

    def setstate(self, state: tuple[Any, ...]) -> None:
        own = self._own()
        if own is None:
            super().setstate(state)
        else:
            own.setstate(state)

    @property
    def gauss_next(self) -> float | None:  # the second of a pair of gaussians, kept by `gauss`
        own = self._own()
        return vars(self).get("gauss_next") if own is None else own.gauss_next  # type: ignore[attr-defined]  # not in the stubs

    @gauss_next.setter
    def gauss_next(self, value: float | None) -> None:
        own = self._own()
        if own is None:
            vars(self)["gauss_next"] = value
        else:
            own.gauss_next = value  # type: ignore[attr-defined]  # not in the stubs


class _TorchOfThread:
    """Stands for torch's generator in the functions of torch.random: `manual_seed`, `get_rng_state` and their like."""

    def __getattr__(self, name: str) -> Any:
        return getattr(current_set().torch_home.default_generator, name)


# functions that draw, and take a generator
_DRAWING = {
    sample_dirichlet,
    standard_gamma,
    torch.bernoulli,
    torch.binomial,
    torch.multinomial,
    torch.nn.init.kaiming_uniform_,
    torch.nn.init.normal_,
    torch.nn.init.uniform_,
    torch.normal,
    torch.poisson,
    torch.rand,
    torch.randint,
    torch.randn,
    torch.randperm,
    *(
        getattr(torch.Tensor, name)
        for name in (
            "bernoulli",
            "bernoulli_",
            "cauchy_",
            "exponential_",
            "geometric_",
            "log_normal_",
            "multinomial",
            "normal_",
            "random_",
            "uniform_",
        )
    ),
}


def _dropout(generator: torch.Generator, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Compute torch's dropout with a generator: the same numbers as those of a worker process."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0 or input.numel() == 0:
        return input
    if p == 1:  # torch draws nothing
        noise = torch.zeros((), dtype=input.dtype)
    else:
        noise = torch.empty_like(input).bernoulli_(1 - p, generator=generator).div_(1 - p)
    return input.mul_(noise) if inplace else input * noise


def _rand_like(generator: torch.Generator, input: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.empty_like(input, **options).uniform_(generator=generator)


def _randn_like(generator: torch.Generator, input: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.empty_like(input, **options).normal_(generator=generator)


def _randint_like(generator: torch.Generator, input: torch.Tensor, *bounds: Any, **options: Any) -> torch.Tensor:
    given = list(bounds)
    high = options.pop("high") if "high" in options else given.pop()
    low = given.pop() if given else options.pop("low", 0)
    return torch.empty_like(input, **options).random_(low, high, generator=generator)


# functions that take no generator in older releases of torch -> functions that draw the same numbers from one
_LIKE: dict[Any, Callable[..., Any]] = {
    torch.rand_like: _rand_like,
    torch.randn_like: _randn_like,
    torch.randint_like: _randint_like,
}


class TorchDraws(TorchFunctionMode):
    """Passes this thread's generator to torch's functions that draw. Enter it in the thread.

    Args:
        generator: the generator.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWING and kwargs.get("generator") is None and _is_on_cpu(args, kwargs):
            kwargs = {**kwargs, "generator": self._generator}
        elif func is torch.nn.functional.dropout and _is_on_cpu(args, kwargs):
            return _dropout(self._generator, *args, **kwargs)
        elif func in _LIKE and kwargs.get("generator") is None and _is_on_cpu(args, kwargs):
            options = {name: value for name, value in kwargs.items() if name != "generator"}
            return _LIKE[func](self._generator, *args, **options)
        return func(*args, **kwargs)


def _is_on_cpu(args: Any, kwargs: Any) -> bool:
    """Return whether a function that draws makes a tensor on the CPU."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "cpu"
    return not (args and isinstance(args[0], torch.Tensor)) or args[0].device.type == "cpu"
