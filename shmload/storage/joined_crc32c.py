"""Compute the CRC-32C of concatenated parts from the checksums of the parts."""

from __future__ import annotations

__all__ = ["joined_crc32c"]

_POLYNOMIAL = 0x82F63B78  # of CRC-32C, with the highest power in the lowest bit


def joined_crc32c(parts: list[tuple[int, int]]) -> int:
    """Return the checksum of concatenated parts.

    Args:
        parts: (checksum, number of bytes) of each part, in order.
    Source: M. Adler, zlib, crc32_combine: appending n bytes is a multiplication by x^(8n), modulo the polynomial.
    """
    crc = 0
    for part, nbytes in parts:
        crc = _times(_power_of_x(8 * nbytes), crc) ^ part
    return crc


def _power_of_x(exponent: int) -> int:
    """Return x to the power of `exponent`, modulo the checksum's polynomial."""
    found, square = 1 << 31, 1 << 30  # 1 and x
    while exponent:
        if exponent & 1:
            found = _times(square, found)
        square = _times(square, square)
        exponent >>= 1
    return found


def _times(one: int, other: int) -> int:
    """Return the product of two polynomials, modulo the checksum's polynomial."""
    found, bit = 0, 1 << 31
    while bit:
        if one & bit:
            found ^= other
        other = (other >> 1) ^ _POLYNOMIAL if other & 1 else other >> 1
        bit >>= 1
    return found
