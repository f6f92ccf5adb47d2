"""decode(): from the bytes of a sample's members to values, by handlers of (extension, bytes), as webdataset 1.0.2 has them.

    pre         what unpacks (.gz): gives a Continue, with which the rest go on
    handlers    image specs and the user's own; the first that gives something other than None
    post        by the extension's last part: formats/tar/decoders.py
    nothing     the bytes as they are

What can run code is an error unless it was asked for: left as bytes it would only fail later, and less clearly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shmload.errors import ShardCorrupt
from shmload.formats.tar.decoders import Decoders, gunzip
from shmload.formats.tar.images import IMAGE_EXTENSIONS, image_decoder

__all__ = ["Continue", "MemberHandler", "SampleDecoder"]

MemberHandler = Callable[[str, bytes], Any]  # (".seg.png", bytes) -> the value, or None: not mine
_PICKLES = frozenset({"pickle", "pkl", "pyd", "pth"})


class Continue:
    """What a handler gives that has only unpacked: the others go on with this.

    Args:
        key: the extension without what was unpacked.
        data: the bytes.
    """

    def __init__(self, key: str, data: bytes) -> None:
        self.key, self.data = key, data


class _Image:
    """The handler of an image spec."""

    def __init__(self, spec: str) -> None:
        self._decode = image_decoder(spec)

    def __call__(self, key: str, data: bytes) -> Any:
        return self._decode(data) if _last(key) in IMAGE_EXTENSIONS else None


class _Gunzip:
    """The handler of compressed members."""

    def __call__(self, key: str, data: bytes) -> Continue | None:
        return Continue(key.removesuffix(".gz"), gunzip(data)) if key.endswith(".gz") else None


class _ByExtension:
    """The handler of what the format has a name for."""

    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._decoders = Decoders(True, allow_pickle=allow_pickle)

    def __call__(self, key: str, data: bytes) -> Any:
        if not self._allow_pickle and _last(key) in _PICKLES:
            raise PermissionError(
                f"{key.removeprefix('.')!r} is a pickle, which can run any code when it is read: give "
                "decode(allow_pickle=True) for shards you trust, or leave it as bytes by only="
            )
        decoder = self._decoders.of(key.removeprefix("."))
        return None if decoder is None else decoder(data)


class SampleDecoder:
    """Decodes the members of a sample.

    Args:
        handlers: image specs or functions of (extension with a dot before it, bytes).
        pre, post: that come before and after these; None are the usual ones.
        only: the extensions that are decoded; None is all.
        partial: leave what is decoded already.
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
        first = [_Gunzip()] if pre is None else list(pre)
        last = [_ByExtension(allow_pickle)] if post is None else list(post)
        own = [_Image(handler) if isinstance(handler, str) else handler for handler in handlers]
        self._handlers: list[MemberHandler] = [*first, *own, *last]
        for handler in self._handlers:
            if not callable(handler):
                raise TypeError(
                    f"decode: a handler is an image spec or a function of (extension, bytes); got {handler!r}"
                )
        self._only = None if only is None else frozenset(only.split() if isinstance(only, str) else only)
        self._partial = partial

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in sample.items():
            is_left = name.startswith("__") or (self._only is not None and name not in self._only)
            if is_left or (self._partial and not isinstance(value, bytes)):
                found[name] = value
                continue
            if not isinstance(value, bytes):
                raise TypeError(
                    f"decode: {name!r} of sample {sample.get('__key__')!r} is a {type(value).__name__} already, bytes are needed: "
                    "decode before map, or give decode(partial=True)"
                )
            try:
                found[name] = self._decoded(f".{name}", value)
            except (ImportError, MemoryError):  # the member is not at fault
                raise
            except PermissionError as error:
                raise ValueError(f"{_where(sample)}: {error}") from None
            except Exception as error:  # of a library or of the user's own handler
                raise ShardCorrupt(f"{_where(sample)}: member {name!r}: {error}") from error
        return found

    def _decoded(self, key: str, data: bytes) -> Any:
        for handler in self._handlers:
            found = handler(key, data)
            if isinstance(found, Continue):
                key, data = found.key, found.data
            elif found is not None:
                return found
        return data


def _last(key: str) -> str:
    return key.rpartition(".")[2].lower()


def _where(sample: dict[str, Any]) -> str:
    return f"{sample.get('__url__', 'a shard')}: sample {sample.get('__key__')!r}"
