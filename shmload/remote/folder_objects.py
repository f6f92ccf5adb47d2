"""Choose the shards among the objects of a folder that has neither a manifest nor an index."""

from __future__ import annotations

import logging
import re

from shmload.formats.compression import split_compression
from shmload.formats.file_names import is_about, is_hidden
from shmload.formats.format import ShardFormat
from shmload.formats.known_formats import layout_of
from shmload.formats.plain_files import PlainFiles
from shmload.formats.tfrecord.record_file import FOREIGN_SUFFIXES
from shmload.remote.fetch import SIDECAR
from shmload.storage.store import StoredObject

__all__ = ["log_ignored", "objects_by_format"]

log = logging.getLogger("shmload")


def objects_by_format(listed: list[StoredObject], asked: ShardFormat | None) -> dict[str, list[StoredObject]]:
    """Return the objects that may be a folder's shards, by format; a single format if the other objects are clearly not shards.

    Hidden objects are never shards. If a format is requested, the shards are the objects whose names have its endings. If there are
    none, they are the objects whose names indicate none, without those that describe a dataset. If no format is requested,
    pictures next to tar files are ignored, and so are files with the name of a tar file but for its ending, such as the tables of
    img2dataset. Pictures next to shards of one other format are ignored, too, because they usually belong to a page about these,
    unless the shards are `metadata.*` files about the pictures.
    """
    entries = [entry for entry in listed if not is_hidden(entry.key) and not entry.key.endswith(SIDECAR)]
    if isinstance(asked, PlainFiles):
        return {asked.name: entries} if entries else {}
    groups: dict[str, list[StoredObject]] = {}
    for entry in entries:
        kind = layout_of(split_compression(entry.key)[0])
        is_beside = kind is None and (is_about(entry.key) or entry.key.endswith(FOREIGN_SUFFIXES))
        if not is_beside and (kind is not None or asked is not None):
            groups.setdefault("" if kind is None else kind.name, []).append(entry)
    if asked is not None:
        entries = groups.get(asked.name) or groups.get("", [])
        return {asked.name: entries} if entries else {}
    if "tar" in groups:
        groups.pop(PlainFiles.name, None)
        stems = {_stem(entry) for entry in groups["tar"]}
        is_tar_only = all(_stem(entry) in stems for entries in groups.values() for entry in entries)
        return {"tar": groups["tar"]} if is_tar_only else groups
    if len(groups) == 2 and PlainFiles.name in groups:
        (other,) = groups.keys() - {PlainFiles.name}
        if not all(_ABOUT_PICTURES.match(entry.key.rpartition("/")[2]) for entry in groups[other]):
            return {other: groups[other]}
    return groups


def _stem(entry: StoredObject) -> str:
    """Return the object's key without its endings."""
    folder, slash, name = entry.key.rpartition("/")
    return folder + slash + name.partition(".")[0]


_ABOUT_PICTURES = re.compile(r"metadata\.")  # `datasets` stores captions and labels here; the pictures next to them are the samples


def log_ignored(url: str, listed: list[StoredObject], taken: list[StoredObject]) -> None:
    """Log the objects of a folder that are ignored."""
    if log.isEnabledFor(logging.DEBUG):
        keys = {entry.key for entry in taken}
        if others := [entry.key for entry in listed if entry.key not in keys]:
            log.debug("%s: %d objects are not shards and are ignored: %s", url, len(others), ", ".join(others[:5]))
