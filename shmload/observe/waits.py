"""How long waits were: any number of them in constant memory, for quantiles."""

from __future__ import annotations

SUB_BITS = 4  # buckets per power of two, as bits: a bucket is at most 1/16 of its values wide


class Waits:
    """A count per bucket of durations in ns. A bucket spans less than 1/16 of its values, so its middle is right to 1/32."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self.total_ns = 0

    def add(self, ns: int) -> None:
        """Takes one in."""
        self.count += 1
        self.total_ns += ns
        shift = max(ns.bit_length() - SUB_BITS - 1, 0)
        bucket = (shift << (SUB_BITS + 1)) | (ns >> shift)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1

    def quantile(self, q: float) -> float:
        """The value in ns below or at which a share `q` of them lie; 0 if there is none."""
        wanted = q * self.count
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= wanted:
                shift, head = bucket >> (SUB_BITS + 1), bucket & ((1 << (SUB_BITS + 1)) - 1)
                return (head << shift) + ((1 << shift) - 1) / 2
        return 0.0
