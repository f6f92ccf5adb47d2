"""The stage decode(): convert the bytes of a sample's members to values, as in webdataset 1.0.2.

A handler is a function of (extension, bytes). Handlers are tried in this order:

    pre         decompress (.gz, .zst) and return a Continue, with which the other handlers go on
    handlers    image specs and the user's functions; the first result that is not None is used
    post        the decoders by the last part of the extension: formats/tar/decoders.py
    otherwise   the bytes stay unchanged

Formats that can run code raise an error unless they are allowed, because bytes would only fail later and less clearly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial as partial_of
from typing import Any

from shmload.errors import ShardCorrupt
from shmload.formats.encryption import ENCRYPTED
from shmload.formats.tar.decoders import Decoders
from shmload.formats.tar.extensions import IMAGE_EXTENSIONS
from shmload.formats.tar.image_specs import image_decoder
from shmload.formats.tar.member_compression import EXPANDERS
from shmload.remote.stage_functions import needs_dict

MemberHandler = Callable[[str, bytes], Any]  # (".seg.png", bytes) -> the value, or None if it does not handle the extension
_PICKLES = frozenset({"pickle", "pkl", "pyd", "pth"})


@dataclass
class Continue:
    """Returned by a handler that has only decompressed the member: the other handlers continue with this.

    Args:
        key: the extension without the part that was handled.
        data: the bytes.
    """

    key: str
    data: bytes


def _decoded_image(decode: Callable[[bytes], Any], key: str, data: bytes) -> Any:
    return decode(data) if _last(key) in IMAGE_EXTENSIONS else None


def _expanded(key: str, data: bytes) -> Continue | None:
    inner, _, last = key.rpartition(".")
    return Continue(inner, EXPANDERS[last](data)) if last in EXPANDERS else None


@dataclass
class _Decoded:
    """A decoded value, which may be None (JSON's null). A bare None from a handler means that it has not decoded the member."""

    value: Any


def _by_extension(decoders: Decoders, allow_pickle: bool, key: str, data: bytes) -> _Decoded | None:
    """Decode a member with the default decoder for its extension, if there is one."""
    if not allow_pickle and _last(key) in _PICKLES:
        raise PermissionError(
            f"{key.removeprefix('.')!r} is a pickle, which can run any code when it is read: give "
            "decode(allow_pickle=True) for shards you trust, or leave it as bytes by only="
        )
    if key.endswith(ENCRYPTED):
        raise PermissionError(f"{key.removeprefix('.')!r} is encrypted: give RemoteDataset(key=...), or leave it as bytes by only=")
    decoder = decoders.of(key.removeprefix("."))
    return None if decoder is None else _Decoded(decoder(data))


class SampleDecoder:
    """Decodes the members of a sample: the function of the stage `decode`.

    Args:
        handlers: image specs or functions of (extension with leading dot, bytes).
        pre, post: functions called before and after them; None uses the default ones.
        only: extensions to decode; None decodes all.
        partial: skip members that are already decoded.
        allow_pickle: decode pickles.
    """

    def __init__(
        self,
        handlers: Sequence[str | MemberHandler],
        pre: Sequence[MemberHandler] | None,
        post: Sequence[MemberHandler] | None,
        only: str | Iterable[str] | None,
        *,
        partial: bool,
        allow_pickle: bool,
    ) -> None:
        first = [_expanded] if pre is None else list(pre)
        last = [partial_of(_by_extension, Decoders(True, allow_pickle=allow_pickle), allow_pickle)] if post is None else list(post)
        own = [partial_of(_decoded_image, image_decoder(each)) if isinstance(each, str) else each for each in handlers]
        self._handlers: list[MemberHandler] = [*first, *own, *last]
        for handler in self._handlers:
            if not callable(handler):
                raise TypeError(f"decode: a handler is an image spec or a function of (extension, bytes); got {handler!r}")
        self._only = None if only is None else frozenset(only.split() if isinstance(only, str) else only)
        self._partial = partial

    def __call__(self, sample: Any) -> dict[str, Any]:
        needs_dict("decode", sample)
        found = {}
        for name, value in sample.items():
            is_left = name.startswith("__") or (self._only is not None and name not in self._only)
            if is_left or (self._partial and not isinstance(value, bytes)):
                found[name] = value
                continue
            if not isinstance(value, bytes):
                raise TypeError(
                    f"decode: {name!r} of sample {sample.get('__key__')!r} is of type {type(value).__name__} already, bytes are "
                    "needed: decode before map, or give decode(partial=True)"
                )
            try:
                found[name] = self._decoded(f".{name}", value)
            except (ImportError, MemoryError):  # the member is not the cause
                raise
            except PermissionError as error:
                raise ValueError(f"{_where(sample)}: {error}") from None
            except Exception as error:  # raised by a library or the user's handler
                raise ShardCorrupt(f"{_where(sample)}: member {name!r}: {error}") from error
        return found

    def _decoded(self, key: str, data: bytes) -> Any:
        for handler in self._handlers:
            found = handler(key, data)
            if isinstance(found, Continue):
                key, data = found.key, found.data
            elif isinstance(found, _Decoded):
                return found.value
            elif found is not None:
                return found
        return data


def _last(key: str) -> str:
    return key.rpartition(".")[2].lower()


def _where(sample: dict[str, Any]) -> str:
    return f"{sample.get('__url__', 'a shard')}: sample {sample.get('__key__')!r}"
