from typing import Any

from shmload._core.mapping import Mapping

ABI: int

class Onlooker:
    num_slots: int
    num_workers: int
    def __new__(cls, control: Mapping) -> Onlooker: ...
    def snapshot(self) -> dict[str, Any]: ...
