"""Datasets and loaders that the tests pass to the command for reading again."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmload import ShmLoader


class Data:
    """Randomly augmented samples, which the seed reproduces."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return self.first + index, np.random.rand(3)


class Other(Data):
    """A dataset of another type, with other samples."""

    def __init__(self) -> None:
        super().__init__(100)


class Unreadable(Data):
    """A dataset in which one sample has become unreadable."""

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise KeyError("gone")
        return super().__getitem__(index)


class Broken(Data):
    """A dataset whose constructor fails."""

    def __init__(self) -> None:
        raise KeyError("no data")


def other() -> Data:
    return Data(100)


def loader() -> ShmLoader[Any]:
    return ShmLoader(Data(), 4, seed=5)


def loader_of_other_seed() -> ShmLoader[Any]:
    return ShmLoader(Data(), 4, seed=6)
