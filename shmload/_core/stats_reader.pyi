"""Read a control block from outside."""

from typing import Any

from shmload._core.mapping import Mapping

ABI: int

class StatsReader:
    num_slots: int
    num_workers: int
    def __new__(cls, control: Mapping) -> StatsReader: ...
    def snapshot(self) -> dict[str, Any]: ...
