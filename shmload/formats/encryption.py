"""Members that are encrypted with a user's key, each by itself: AES-256-GCM-SIV (RFC 8452).

    nonce (12 bytes) | ciphertext | tag (16 bytes)        under the member's name with ".enc" behind it

Packing promises the same bytes for any number of workers and after a kill, so nothing may be drawn at random. A nonce follows from
the generation and the member's name. Where a dataset has changed under a packing that goes on, one nonce meets two contents: plain
GCM would give its authentication key away then, which is why this is its SIV form, where all that shows is whether two contents are
equal. It is as fast. The member's name, with the sample's key in it, is authenticated with the content: a member that was changed,
or moved to another sample, is an error. Not hidden are the names, the number of samples and their sizes; not noticed is a sample
that is missing.
"""

from __future__ import annotations

import hmac
import os
from hashlib import sha256
from typing import Any

from shmload.formats.extras import library

__all__ = ["ENCRYPTED", "KEY_NBYTES", "SampleCipher", "key_in_file", "key_in_variable"]

ENCRYPTED = ".enc"
KEY_NBYTES = 32
_NONCE_NBYTES = 12
_REMEDY = "make one with `openssl rand -hex 32`, or secrets.token_bytes(32)"


class SampleCipher:
    """Encrypts and decrypts members. Picklable, with the key, for workers; shows it nowhere.

    Args:
        key: 32 random bytes.
    Raises:
        TypeError, ValueError: it is none.
        ModuleNotFoundError: the package cryptography is not there (extra `encryption`).
    """

    def __init__(self, key: bytes) -> None:
        if not isinstance(key, (bytes, bytearray, memoryview)):
            raise TypeError(f"key is {KEY_NBYTES} bytes, got a {type(key).__name__}: {_REMEDY}")
        if len(key) != KEY_NBYTES:
            raise ValueError(f"key is {KEY_NBYTES} bytes, these are {len(key)}: {_REMEDY}")
        self._key = bytes(key)
        self._aead: Any = library("cryptography.hazmat.primitives.ciphers.aead", "encryption").AESGCMSIV(self._key)

    @property
    def fingerprint(self) -> str:
        """8 hexadecimal digits that tell keys apart and say nothing else of them."""
        return hmac.digest(self._key, b"shmload: which key is this?", sha256)[:4].hex()

    def encrypt(self, data: bytes, name: bytes, generation: str) -> bytes:
        """What a member becomes.

        Args:
            name: of the member, with `ENCRYPTED` at its end.
            generation: that it is written in.
        """
        nonce = sha256(generation.encode() + b"\0" + name).digest()[:_NONCE_NBYTES]
        return nonce + bytes(self._aead.encrypt(nonce, data, name))

    def decrypt(self, data: bytes, name: bytes) -> bytes:
        """The member again.

        Raises:
            ValueError: it was encrypted with another key, or changed, or is of another name.
        """
        from cryptography.exceptions import InvalidTag

        try:
            return bytes(self._aead.decrypt(data[:_NONCE_NBYTES], data[_NONCE_NBYTES:], name))
        except (InvalidTag, ValueError):  # of the latter are what is too short
            raise ValueError(
                "cannot be decrypted: it was packed with another key, or changed since. Give the key that it was packed with; if "
                "this is the key, restore the shard from where it came"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleCipher, (self._key,)

    def __repr__(self) -> str:
        return f"<SampleCipher {self.fingerprint}>"


def key_in_file(path: str | os.PathLike[str]) -> bytes:
    """The key in a file: 32 bytes, or 64 hexadecimal digits.

    Raises:
        OSError: there is no such file.
        ValueError: it holds something else.
    """
    with open(path, "rb") as file:
        data = file.read(3 * KEY_NBYTES)
    return data if len(data) == KEY_NBYTES else _of_digits(data, f"the file {os.fspath(path)}")


def key_in_variable(name: str) -> bytes:
    """The key in an environment variable: 64 hexadecimal digits.

    Raises:
        ValueError: it is not set, or holds something else.
    """
    return _of_digits(os.environ.get(name, "").encode(), f"the environment variable {name}")


def _of_digits(text: bytes, where: str) -> bytes:
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_NBYTES:
        raise ValueError(f"{where} holds no key: {2 * KEY_NBYTES} hexadecimal digits are needed; {_REMEDY}")
    return key
