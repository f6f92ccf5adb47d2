"""Tell from a file's name whether it holds samples: hidden files, files about a dataset, and numbers of shards."""

from __future__ import annotations

import re


def is_hidden(key: str) -> bool:
    """Return whether readers of a folder ignore a path in it, because a part of the path begins with "." or "_".

    This is the rule of Hadoop and pyarrow; it covers `.ipynb_checkpoints`, `_temporary`, `_delta_log`, `_SUCCESS` and `__MACOSX`.
    As in Spark, a Hive partition such as `_year=2024` is data.

    Args:
        key: relative to the folder that was given, with slashes.
    """
    *folders, name = key.split("/")
    return name.startswith((".", "_")) or any(
        folder.startswith(".") or (folder.startswith("_") and "=" not in folder) for folder in folders
    )


_NUMBERED = re.compile(r"-\d+-of-\d+$")


def without_number(name: str) -> str:
    """Return a name without the shard number that TensorFlow and Beam append to it: `x.tfrecord-00000-of-00010`."""
    return _NUMBERED.sub("", name)


_ABOUT = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|makefile|dockerfile)(\..*)?"
    r"|(dataset_infos?|dataset_dict|state|features|config|metadata)\.json|(md5|sha\d+)sums?(\.txt)?"
    r"|.*\.(md|rst|py|ipynb|ya?ml|toml|cff|lock|html?|pdf|crc|md5|sha1|sha256)",
    re.IGNORECASE,
)


def is_about(key: str) -> bool:
    """Return whether a file, such as README.md or dataset_info.json, describes a dataset and so is not a shard of it."""
    return _ABOUT.fullmatch(key.rpartition("/")[2]) is not None
