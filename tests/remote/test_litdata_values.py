"""Lists and dicts in LitData's items are read as LitData's own serializer wrote them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload.formats.litdata.litdata_format import LitData
from shmload.formats.litdata.litdata_values import nested_value

# as litdata 0.2.76 encodes each value
WRITTEN = [
    ([1, -2], "0202000000" "0100000000000000" "feffffffffffffff"),
    ([], "0100000000"),
    (["a", "é"], "0102000000" "0100000061" "02000000c3a9"),
    ([0.5], "0301000000" "000000000000e03f"),
    ([True, False], "0402000000" "0100"),
    ([1, "a"], "0007000000" + b'[1,"a"]'.hex()),
    ({"a": [1], "b": None}, "0502000000" "0100000061" "0201000000" "0100000000000000" "0100000062" "0b"),
    (
        [{"x": 1, "y": None}, {"x": "s", "y": True}],
        "0602000000" "02000000" "0100000078" "0100000079" "120100000000000000" "10" "110100000073" "1401",
    ),
    ({"f": 0.5, "t": "s", "i": 7, "b": False}, "0504000000" "0100000066" "09000000000000e03f" "0100000074" "070100000073" "0100000069"
     "080700000000000000" "0100000062" "0a00"),
    ([1, 2], b"[1, 2]".hex()),
]  # fmt: skip


@pytest.mark.parametrize(("value", "written"), WRITTEN, ids=lambda value: str(value)[:20])
def test_nested_values_equal_what_litdata_wrote(value: Any, written: str) -> None:
    data = bytes.fromhex(written)
    assert repr(nested_value(data)) == repr(value)
    assert repr(LitData(("json",))._leaf("json", memoryview(data))) == repr(value)
    for end in range(len(data)):
        with pytest.raises(ValueError):  # raised by the JSON parser, by the UTF-8 decoder or by shmload
            nested_value(data[:end])


@settings(deadline=None)
@given(st.binary(max_size=40), st.sampled_from([bytes.fromhex(written) for _, written in WRITTEN]), st.data())
def test_damaged_nested_values_are_errors_or_values(random: bytes, whole: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(whole)))
    for damaged in (random, whole[:at] + random[:2] + whole[at + 1 :], b"\x05\1\0\0\0\0\0\0\0" * 300):
        try:
            nested_value(damaged)
        except ValueError:
            continue


@pytest.mark.slow(reason="starts an interpreter that imports litdata")
def test_litdata_encodes_values_as_listed() -> None:
    folder = os.environ.get("SHMLOAD_OTHER_LOADERS")
    if not folder or not os.path.isdir(folder):
        pytest.skip("needs litdata in a folder that SHMLOAD_OTHER_LOADERS names")
    program = (
        "import json, sys\nfrom litdata.streaming.serializers import JsonSerializer\n"
        "for value in json.load(sys.stdin): print(JsonSerializer().serialize(value)[0].hex())"
    )
    values = json.dumps([value for value, _ in WRITTEN[:-1]])
    environment = {**os.environ, "PYTHONPATH": folder}
    ended = subprocess.run(
        [sys.executable, "-c", program], input=values, env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == [written for _, written in WRITTEN[:-1]]
