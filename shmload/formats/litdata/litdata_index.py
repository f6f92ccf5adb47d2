"""Parse the index.json of LitData, which lists the chunks of a dataset and defines what the bytes of an item mean."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shmload.formats.index_json import ListedShard, UnsupportedIndex

PARQUET_LOADER = "ParquetLoader"  # the chunks are files of Parquet
TREE_LOADER = "PyTreeLoader"
TOKENS_LOADER = "TokensLoader"


def item_loader_of(index: Mapping[str, Any]) -> str | None:
    """Return the name of the class with which LitData reads the chunks; None if the index.json is not of LitData."""
    return (index["config"].get("item_loader") or TREE_LOADER) if "chunks" in index else None


def listed_chunks(index: Mapping[str, Any]) -> list[ListedShard]:
    """Return the chunks that an index.json lists."""
    config, loader = index["config"], item_loader_of(index)
    is_whole = config.get("compression_level") in (None, "chunk") and loader != PARQUET_LOADER
    compression = "zst" if str(config.get("compression") or "").startswith("zstd") and is_whole else ""
    return [
        ListedShard(
            str(chunk["filename"]),
            int(chunk["chunk_bytes"]),
            None if loader == TOKENS_LOADER else int(chunk["chunk_size"]),
            compression,
        )
        for chunk in index["chunks"]
    ]


@dataclass(frozen=True)
class ChunkConfig:
    """What an index.json says about the items of its chunks.

    Attributes:
        data_format: format of each leaf, such as "int" or "no_header_tensor:17".
        tree: structure of an item: None is a leaf; a list or a dict contains more of these.
        is_tokens: whether chunks are tokens without boundaries between items.
        is_zipped: whether each item is compressed by itself, as a frame of zstd.
        encryption: (what is encrypted, "chunk" or "sample"; the name of the algorithm), or None.
    """

    data_format: tuple[str, ...]
    tree: Any
    is_tokens: bool
    is_zipped: bool
    encryption: tuple[str, str] | None


def chunk_config(index: Mapping[str, Any], where: str) -> ChunkConfig:
    """Return what an index.json says about the items of its chunks.

    Args:
        index: the parsed index.json.
        where: its path or URL, for errors.
    Raises:
        UnsupportedIndex: it names an option of LitData that is not supported.
    """
    config, loader = index["config"], item_loader_of(index)
    level, encryption = config.get("compression_level"), config.get("encryption") or {"level": None, "algorithm": "nothing"}
    sealed = encryption["level"]
    refused = {
        f"compression_level={level!r}": level not in (None, "chunk", "batch", "sample"),
        f"encryption of level={sealed!r}": sealed not in (None, "chunk", "sample"),
        "tokens encrypted sample by sample": sealed == "sample" and loader == TOKENS_LOADER,
        f"item_loader={loader}": loader not in (TREE_LOADER, TOKENS_LOADER),
    }
    if what := [name for name, is_so in refused.items() if is_so]:
        raise UnsupportedIndex(f"{where}: was written with {', '.join(what)}, which is not supported: run optimize without it")
    spec = json.loads(config["data_spec"])[1] if config.get("data_spec") else {"type": None, "children_spec": []}
    tree, formats = _tree(spec, where), tuple(map(str, config["data_format"]))
    if loader != TOKENS_LOADER and (num_leaves := _num_leaves(tree)) != len(formats):
        raise UnsupportedIndex(f"{where}: has {len(formats)} formats for {num_leaves} values of an item: is the file damaged?")
    return ChunkConfig(
        formats, tree, loader == TOKENS_LOADER, level == "sample", None if sealed is None else (sealed, encryption["algorithm"])
    )


def _num_leaves(tree: Any) -> int:
    parts = tree.values() if isinstance(tree, dict) else tree or ()
    return 1 if tree is None else sum(map(_num_leaves, parts))


def _tree(spec: Mapping[str, Any], where: str) -> Any:
    """Convert a spec of torch's pytree to lists, dicts, and None for each leaf."""
    kind, parts = spec["type"], [_tree(part, where) for part in spec["children_spec"]]
    if kind is None:
        return None
    if kind in ("builtins.dict", "collections.OrderedDict"):
        names: Sequence[Any] = json.loads(spec["context"])
        return {str(name): part for name, part in zip(names, parts, strict=True)}
    if kind in ("builtins.list", "builtins.tuple"):
        return parts
    raise UnsupportedIndex(f"{where}: its items hold values of type {kind}, which are not read here; dicts, lists and tuples are")
