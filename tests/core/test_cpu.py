"""The processor's features are detected at run time, whichever compiler built the modules; otherwise the modules would be slow."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from shmload._core.crc32c import HAS_INSTRUCTION
from shmload._core.permutation import ISAS

CPUINFO = Path("/proc/cpuinfo").read_text()
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs this processor architecture")
def test_detected_x86_features_equal_the_kernels() -> None:
    flags = set(re.findall(r"^flags\s*: (.*)$", CPUINFO, re.MULTILINE)[0].split())
    assert ("sse4_2" in flags) == HAS_INSTRUCTION
    assert ("base", "avx2", "avx512")[: 1 + ("avx2" in flags) + (flags >= AVX512 | {"avx2"})] == ISAS


@pytest.mark.skipif(os.uname().machine != "aarch64", reason="needs this processor architecture")
def test_detected_arm_features_equal_the_kernels() -> None:
    features = re.findall(r"^Features\s*: (.*)$", CPUINFO, re.MULTILINE)
    if not features:
        pytest.skip("/proc/cpuinfo is not this processor's: it is emulated")
    assert ("crc32" in features[0].split()) == HAS_INSTRUCTION
    assert ISAS == ("base",)
