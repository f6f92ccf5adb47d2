"""Encrypt and decrypt the members of samples with a user's key, by AES-256-GCM-SIV (RFC 8452).

    nonce (12 bytes) | ciphertext | tag (16 bytes)        under the member's name followed by ".enc"

Packing must write the same bytes for any number of workers and after a kill, so nothing may be random. The nonce is a hash of the
generation (one version of a packed dataset) and the member's name. If a dataset changes while its packing is interrupted, one nonce
may be used for two different contents. Plain GCM would then reveal its authentication key; the SIV variant only reveals whether two
contents are equal, and is as fast.

The member's name, which includes the sample's key, is authenticated together with the content, so a member that was modified or
moved to another sample is an error. The names, the number of samples and their sizes are not hidden, and a missing sample is not
detected.
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
    """Encrypts and decrypts members. Its pickle contains the key, for workers; its repr does not.

    Args:
        key: 32 random bytes.
    Raises:
        TypeError, ValueError: it is not a 32-byte key.
        ModuleNotFoundError: the package cryptography is not installed (extra `encryption`).
    """

    def __init__(self, key: bytes) -> None:
        if not isinstance(key, (bytes, bytearray, memoryview)):
            raise TypeError(f"key is {KEY_NBYTES} bytes, got {type(key).__name__}: {_REMEDY}")
        if len(key) != KEY_NBYTES:
            raise ValueError(f"key is {KEY_NBYTES} bytes, these are {len(key)}: {_REMEDY}")
        self._key = bytes(key)
        self._aead: Any = library("cryptography.hazmat.primitives.ciphers.aead", "encryption").AESGCMSIV(self._key)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the key, 8 hexadecimal digits, which distinguishes keys and reveals nothing else about them."""
        return hmac.digest(self._key, b"shmload: which key is this?", sha256)[:4].hex()

    def encrypt(self, data: bytes, name: bytes, generation: str) -> bytes:
        """Return the encrypted content of a member: nonce, ciphertext and tag.

        Args:
            data: the content of the member.
            name: name of the member, ending in `ENCRYPTED`.
            generation: generation that the member belongs to.
        """
        nonce = sha256(generation.encode() + b"\0" + name).digest()[:_NONCE_NBYTES]
        return nonce + bytes(self._aead.encrypt(nonce, data, name))

    def decrypt(self, data: bytes, name: bytes) -> bytes:
        """Return the content of a member, given a result of `encrypt` and the same name.

        Raises:
            ValueError: it was encrypted with another key, modified, or has another name.
        """
        from cryptography.exceptions import InvalidTag

        try:
            return bytes(self._aead.decrypt(data[:_NONCE_NBYTES], data[_NONCE_NBYTES:], name))
        except (InvalidTag, ValueError):  # ValueError: the data is too short
            raise ValueError(
                "cannot be decrypted: it was packed with another key, or changed since. Give the key that it was packed with; if "
                "this is the key, restore the shard from where it came"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleCipher, (self._key,)

    def __repr__(self) -> str:
        return f"<SampleCipher {self.fingerprint}>"


def key_in_file(path: str | os.PathLike[str]) -> bytes:
    """Read a key from a file: 32 bytes, or 64 hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
        ValueError: it contains something else.
    """
    with open(path, "rb") as file:
        data = file.read(3 * KEY_NBYTES)
    return data if len(data) == KEY_NBYTES else _of_digits(data, f"the file {os.fspath(path)}")


def key_in_variable(name: str) -> bytes:
    """Read a key from an environment variable: 64 hexadecimal digits.

    Raises:
        ValueError: it is not set, or contains something else.
    """
    return _of_digits(os.environ.get(name, "").encode(), f"the environment variable {name}")


def _of_digits(text: bytes, where: str) -> bytes:
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_NBYTES:
        raise ValueError(f"{where} contains no key: {2 * KEY_NBYTES} hexadecimal digits are needed; {_REMEDY}")
    return key
