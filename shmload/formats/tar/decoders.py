"""Find the decoder of a member by the last part of its extension, as webdataset does.

A member with an unknown extension stays bytes. Formats that can run code (pickle, torch.load) are decoded only on request.

Source: webdataset 1.0.2, its autodecode module. It encodes class, count, msgpack, tenbin, and html but does not decode them; they
are decoded here.
"""

from __future__ import annotations

import importlib
import io
import json
import pickle
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from shmload.formats.images.crops import check_decoder
from shmload.formats.tar.extensions import IMAGE_EXTENSIONS, INTEGERS, TEXTS
from shmload.formats.tar.image_specs import image_decoder
from shmload.formats.tar.member_compression import EXPANDERS
from shmload.formats.tar.numpy_members import decode_npy, decode_npz
from shmload.formats.tar.tenbin import decode_tenbin

Decoder = Callable[[bytes], Any]
Decode = bool | str | Mapping[str, Decoder]


class Decoders:
    """The decoders of a dataset, found by the extensions of members.

    Args:
        decode: True uses the safe ones; False none; a str also decodes images, by webdataset's image specs ("pil", "rgb8"); a
            mapping of extensions to functions takes precedence over the safe ones.
        allow_pickle: also use decoders that can run arbitrary code.
    Raises:
        TypeError: a decoder is not callable.
        ValueError: the image spec is invalid.
    """

    def __init__(self, decode: Decode, *, allow_pickle: bool = False) -> None:
        self._decode, self._allow_pickle = decode, allow_pickle
        self._image = image_decoder(decode) if isinstance(decode, str) else None
        self._own = dict(decode) if isinstance(decode, Mapping) else {}
        for extension, decoder in self._own.items():
            check_decoder(f"decode[{extension!r}]", decoder)
        self._found: dict[str, Decoder | None] = {}

    @property
    def own(self) -> Collection[Decoder]:
        """Return the functions of a mapping."""
        return self._own.values()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Decoders, allow_pickle=self._allow_pickle), (self._decode,)

    def of(self, extension: str) -> Decoder | None:
        """Return the decoder for an extension; None if its value is the unchanged bytes."""
        if extension not in self._found:
            self._found[extension] = self._search(extension)
        return self._found[extension]

    def is_plain(self, extension: str) -> bool:
        """Return whether the extension has its default decoder, so that native code may decode instead."""
        return self._decode is not False and extension not in self._own and extension.rpartition(".")[2] not in self._own

    def _search(self, extension: str) -> Decoder | None:
        last = extension.rpartition(".")[2]
        for name in (extension, last):
            if name in self._own:
                return self._own[name]
        if self._decode is False:
            return None
        if (expand := EXPANDERS.get(last)) is not None:
            inner = self._search(extension.rpartition(".")[0])
            return expand if inner is None else lambda data: inner(expand(data))
        if last in IMAGE_EXTENSIONS and self._image is not None:
            return self._image
        if last in _UNSAFE:
            return _UNSAFE[last] if self._allow_pickle else None
        if last in _MODULES:
            module, function = _MODULES[last]
            try:
                return partial(getattr(importlib.import_module(module), function))
            except ImportError:
                return None
        return _SAFE.get(last)


_SAFE: dict[str, Decoder] = {
    **dict.fromkeys(TEXTS, partial(str, encoding="utf-8")),
    **dict.fromkeys(INTEGERS, int),
    **dict.fromkeys(("jsn", "json"), json.loads),
    **dict.fromkeys(("tb", "ten", "tenbin"), decode_tenbin),
    "npy": decode_npy,
    "npz": decode_npz,
}
_UNSAFE: dict[str, Decoder] = {
    **dict.fromkeys(("pickle", "pkl", "pyd"), pickle.loads),
    "pth": lambda data: importlib.import_module("torch").load(io.BytesIO(data), weights_only=False),
}
_MODULES = {"cbor": ("cbor", "loads"), **dict.fromkeys(("mp", "msg", "msgpack"), ("msgpack", "unpackb"))}
