from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import braceexpand
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload.formats.braces import expand_braces, shard_paths


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x.tar", ["x.tar"]),
        ("{a,b}.tar", ["a.tar", "b.tar"]),
        ("a{,b}", ["a", "ab"]),
        ("{a,{b,c}d}", ["a", "bd", "cd"]),
        ("x{1..03}", ["x01", "x02", "x03"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{-1..1}", ["-1", "0", "1"]),
        ("{0..10..5}", ["0", "5", "10"]),
        ("{c..a}", ["c", "b", "a"]),
        ("{a,b}{0..1}", ["a0", "a1", "b0", "b1"]),
        (r"\{a,b\}", ["{a,b}"]),
        ("{a}", ["{a}"]),
        ("{}", ["{}"]),
    ],
)
def test_braces_expand_as_in_bash(text: str, expected: list[str]) -> None:
    assert expected == expand_braces(text)


@given(st.lists(st.sampled_from(["{", "}", ",", "a", "B", "0", "07", "..", "-1", "z"]), max_size=9).map("".join))
def test_braces_expand_as_in_webdataset(text: str) -> None:
    depths = list(accumulate((c == "{") - (c == "}") for c in text))
    if min(depths, default=0) < 0 or (depths and depths[-1]):  # braceexpand accepts some of these, such as "}{"
        with pytest.raises(ValueError, match="has no partner"):
            expand_braces(text)
    else:
        assert list(braceexpand.braceexpand(text)) == expand_braces(text)


@pytest.mark.parametrize("text", ["a{b", "a}b", "{{a}"])
def test_unbalanced_brace_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="has no partner; a literal one is written"):
        expand_braces(text)


@pytest.mark.parametrize("text", ["{0..999999999999}", "{0..9999}{0..9999}"])
def test_pattern_for_millions_of_names_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="expands to more than 1,000,000 names"):
        expand_braces(text)


def test_colons_separate_names() -> None:
    assert shard_paths("/data/{0..1}::b") == ["/data/0", "/data/1", "b"]


def test_path_object_is_not_expanded() -> None:
    assert shard_paths([Path("a{0..1}"), "b"]) == ["a{0..1}", "b"]


def test_empty_list_of_shards_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs at least one shard"):
        shard_paths([])


def test_readers_of_local_shards_expand_patterns(tmp_path: Path) -> None:
    names = ["a0.tar", "a1.tar", "a1.tar.index", "b.tar", "literal[1].tar"]
    for name in names:
        (tmp_path / name).touch()
    local: dict[str, Any] = {"reader": "TarDataset", "endings": (".tar",)}
    found = shard_paths(f"{tmp_path}/{{b,a}}*", **local)
    assert found == [f"{tmp_path}/{name}" for name in ("b.tar", "a0.tar", "a1.tar")]
    assert shard_paths(f"{tmp_path}/literal[1].tar", **local) == [f"{tmp_path}/literal[1].tar"]
    assert shard_paths("x/*.tar") == ["x/*.tar"]
    with pytest.raises(FileNotFoundError, match=r"no tar file has the name '.*/c\*\.tar'"):
        shard_paths(f"{tmp_path}/c*.tar", **local)
