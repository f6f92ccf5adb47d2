from collections.abc import Callable
from types import ModuleType
from typing import Any, Self

NUM_LANES: int
RANDOM: int
NUMPY: int
TORCH: int

def seeded(keys: list[int], isa: int | None = None) -> list[tuple[bytes, bytes]]: ...

class Reseeder:
    random_at: int
    numpy_at: int
    gauss_at: int
    torch_at: int
    @property
    def key(self) -> int: ...
    def __new__(cls, stream: int) -> Self: ...
    def watch(self, random: Any, numpys_own: Callable[[], Any], modules: dict[str, ModuleType]) -> None: ...
    def watch_torch(self, module: ModuleType) -> None: ...
    def begin(self, seed: int, epoch: int, index: int, keys: list[Any] | None, row: int) -> int: ...
