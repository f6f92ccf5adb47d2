"""Windows of tokens widened into a batch, and the plan that packs documents into windows."""

from typing import Any

from numpy.typing import NDArray

class WindowReader:
    num_windows: int
    def __new__(
        cls,
        addresses: NDArray[Any],
        file_begins: NDArray[Any],
        window_begins: NDArray[Any],
        kind: str,
        window: int,
        num_windows: int,
        stride: int,
        ends: NDArray[Any],
        starts: NDArray[Any],
        lengths: NDArray[Any],
        pad: int,
        is_long: bool,
        keeper: object,
    ) -> WindowReader: ...
    def files_of(self, indices: NDArray[Any]) -> list[int]: ...
    def into(self, tokens: int, segments: int, positions: int, nbytes: int, indices: NDArray[Any]) -> None: ...

def document_offsets(tokens: NDArray[Any], separator: int) -> NDArray[Any]: ...
def check_offsets(offsets: NDArray[Any], num_tokens: int) -> int: ...
def cut(offsets: NDArray[Any], order: NDArray[Any], window: int, stride: int) -> tuple[NDArray[Any], NDArray[Any]]: ...
def cross(offsets: NDArray[Any], window: int, stride: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
def pack(lengths: NDArray[Any], window: int, block: int) -> tuple[NDArray[Any], int]: ...
def by_window(
    window_of: NDArray[Any], num_windows: int, starts: NDArray[Any], lengths: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
