"""Get the bytes of an encoded image from each form in which datasets store it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Encoded = bytes | bytearray | memoryview | Mapping[str, Any]  # an image file, or a picture as `datasets.Image` stores it


def file_bytes(data: Encoded) -> bytes:
    """Return the bytes of an image file, given as `bytes`, as another buffer, or as a picture that `datasets.Image` stores.

    Raises:
        ValueError: `data` is something else, or a stored picture without its bytes.
    """
    if isinstance(data, Mapping):
        if "bytes" not in data:
            raise ValueError(
                f"ImageDecoder takes the bytes of a file, or a dict that has them as 'bytes'; this one has {sorted(data)}"
            )
        if data["bytes"] is None:
            raise ValueError(
                f"a picture stored as its path alone, {data.get('path')!r}, without its bytes. Store the bytes: datasets does with "
                "embed_external_files=True; or read the file yourself and give ImageDecoder what it holds"
            )
        data = data["bytes"]
    if isinstance(data, bytes):
        return data
    try:
        view = memoryview(data)  # type: ignore[arg-type]  # whether it is a buffer shows here
    except TypeError:
        view = None
    if view is None or view.itemsize != 1 or view.ndim != 1:
        raise ValueError(
            f"ImageDecoder takes the bytes of an image file, got {type(data).__name__}. If you have a path, read the file; if "
            "datasets has decoded the pictures, use datasets.Image(decode=False)"
        )
    return view.tobytes()
