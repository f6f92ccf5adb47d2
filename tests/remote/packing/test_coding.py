"""Coding of members and shards: compression, encryption and custom serializers, and how readers undo it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmload.errors import ShardCorrupt
from shmload.formats import TarDataset, TarWriter
from shmload.formats.encryption import SampleCipher, key_in_file, key_in_variable
from shmload.remote import RemoteDataset
from shmload.remote.manifest import Manifest
from shmload.remote.packing.members import members_of
from shmload.remote.packing.pack_options import PackOptions
from shmload.storage.local_store import LocalStore
from tests.remote.packing.packing_kit import CountingStore, Noisy, names_in, names_of, packed

KEY, OTHER = bytes(range(32)), bytes(32)
CODINGS = [{"compress": how, "cipher": cipher} for how in (None, "samples", "shards") for cipher in (None, SampleCipher(KEY))][1:]
coded = pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: f"{coding['compress']}-{coding['cipher'] is not None}")


class Lines:
    """Samples of an image, its number, text and an array."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = np.full((4, 5, 3), index, np.uint8)
        return {"image": image, "label": index, "text": f"line {index} " * 30, "x": np.arange(index, index + 40)}


def dataset_in(folder: Path, coding: dict[str, Any], **options: Any) -> RemoteDataset:
    return RemoteDataset.from_urls(str(folder), shuffle=False, key=KEY if coding["cipher"] else None, **options)


@coded
def test_samples_are_read_back_by_every_reader(coding: dict[str, Any], tmp_path: Path) -> None:
    manifest = packed(Lines(15), LocalStore(tmp_path), **coding)
    ending = ".zst" if coding["compress"] == "samples" else ""
    text, array = f"text{ending}", f"x.npy{ending}"
    assert {f"{name}.enc" if coding["cipher"] else name for name in ("cls", "png", text, array)} == set(manifest.extensions)
    dataset = dataset_in(tmp_path, coding)
    fluent = {sample["cls"]: sample for sample in dataset.decode("rgb8")}
    schema = {"cls": "int64", "text": str, "x": ("int64", (40,))}
    view = dataset.indexed(fields={"cls": "cls", "text": text, "x": array}, schema=schema)
    plain = dataset.indexed()
    tiny = dataset_in(tmp_path, coding, cache_bytes=manifest.shards[0].nbytes).indexed(
        fields={"cls": "cls", "text": text}, schema={"text": str}
    )
    assert sorted(fluent) == sorted(view[row]["cls"] for row in range(15)) == list(range(15))
    for row in range(15):
        number = view[row]["cls"]
        wanted = Lines(15)[number]
        for found in (fluent[number], {**view[row], text: view[row]["text"], array: view[row]["x"]}, plain[row]):
            assert (found["cls"], found[text], found[array].tolist()) == (number, wanted["text"], wanted["x"].tolist())
        assert np.array_equal(wanted["image"], fluent[number]["png"])
        assert tiny[row]["text"] == wanted["text"]


@coded
def test_lost_shard_is_packed_again_with_the_same_bytes(coding: dict[str, Any], tmp_path: Path) -> None:
    manifest = packed(Noisy(32), LocalStore(tmp_path), **coding)
    whole = {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)}
    assert names_of(manifest) == sorted(whole)
    assert sum(len(whole[shard.name]) for shard in manifest.shards) == sum(shard.stored[0] for shard in manifest.shards)
    damaged = bytearray(whole[manifest.shards[2].name])
    damaged[-1] ^= 1
    (tmp_path / manifest.shards[2].name).write_bytes(damaged)
    store = CountingStore(tmp_path)
    assert manifest == packed(Noisy(32), store, **coding)
    assert {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)} == whole
    assert manifest.shards[1].name not in store.written


@pytest.mark.slow(reason="packs with workers, by spawn, too")
@coded
def test_bytes_do_not_depend_on_the_workers(coding: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for number, (workers, method) in enumerate(((0, None), (2, "fork"), (1, "spawn"))):
        packed(Noisy(300), LocalStore(tmp_path / str(number)), workers=workers, multiprocessing_context=method, **coding)
        found.append({name: (tmp_path / str(number) / name).read_bytes() for name in names_in(tmp_path / str(number))})
    assert found[0] == found[1] == found[2]


def test_compressed_files_are_smaller_and_have_a_suffix(tmp_path: Path) -> None:
    plain, samples, shards = (
        packed(Lines(20), LocalStore(tmp_path / str(how)), compress=how) for how in (None, "samples", "shards")
    )
    assert len({plain.generation, samples.generation, shards.generation}) == 3
    assert all(shard.name.endswith(".tar.zst") and shard.stored[0] < shard.nbytes / 4 for shard in shards.shards)
    assert [shard.crc32c for shard in plain.shards] != [shard.crc32c for shard in samples.shards]
    small = packed(Lines(20), LocalStore(tmp_path / "19"), compress="shards", compression_level=19)
    assert sum(shard.stored[0] for shard in small.shards) < sum(shard.stored[0] for shard in shards.shards)
    told = json.loads((tmp_path / "shards" / "manifest.json").read_bytes())
    assert told["shards"][0]["packed"] == {"nbytes": shards.shards[0].stored[0], "crc32c": shards.shards[0].stored[1]}


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)  # webdataset leaves files open
def test_webdataset_decompresses_gzip_members_and_reads_others_as_bytes(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    manifest = packed([{"text": "a" * 99, "t.txt.gz": "b" * 9, "label": 3}], LocalStore(tmp_path), compress="samples")
    (found,) = webdataset.WebDataset(str(tmp_path / manifest.shards[0].name), shardshuffle=False).decode()
    assert (found["cls"], found["t.txt.gz"]) == (3, "b" * 9)
    (own,) = TarDataset(tmp_path / manifest.shards[0].name, decode=False)  # type: ignore[call-overload]
    assert found["text.zst"] == own["text.zst"] != b"a" * 99
    (again,) = dataset_in(tmp_path, {"cipher": None}).decode()
    assert (again["text.zst"], again["t.txt.gz"]) == ("a" * 99, "b" * 9)


def test_decompressed_size_of_a_member_is_limited_and_damage_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "0", "txt.zst": "z" * 5000})
    (sample,) = TarDataset(tmp_path / "a.tar")  # type: ignore[call-overload]
    assert sample["txt.zst"] == "z" * 5000
    monkeypatch.setattr("shmload.formats.tar.member_compression.EXPANDED_LIMIT", 4000)
    with pytest.raises(
        ShardCorrupt, match=r"a.tar: field 'txt.zst' of sample '0' at byte 512: zstd: expands to more than 4000 bytes"
    ):
        TarDataset(tmp_path / "a.tar")[0]
    monkeypatch.undo()
    data = bytearray((tmp_path / "a.tar").read_bytes())
    data[514] ^= 255
    (tmp_path / "b.tar").write_bytes(data)
    with pytest.raises(ShardCorrupt, match="the zst stream is damaged or cut after 0 expanded bytes"):
        TarDataset(tmp_path / "b.tar")[0]


def test_tar_dataset_does_not_change_the_index_of_a_packed_shard(tmp_path: Path) -> None:
    manifest = packed(Lines(3), LocalStore(tmp_path))
    assert len(TarDataset(tmp_path / manifest.shards[0].name)) == 3  # an index file would be written beside other shards
    assert len(list(dataset_in(tmp_path, {"cipher": None}))) == 3


def test_two_fields_with_the_same_member_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"two fields of the sample would both be its member 'a.txt.zst'"):
        packed([{"a.txt": "x", "a.txt.zst": b"y"}], LocalStore(tmp_path), compress="samples")


# ------------------------------------------------------------ encryption


def written(folder: Path, *samples: dict[str, Any]) -> str:
    with TarWriter(folder / "x.tar") as writer:
        for sample in samples:
            writer.write(sample)
    return str(folder / "x.tar")


def test_wrong_key_is_an_error_at_once_or_without_a_manifest_at_the_first_sample(tmp_path: Path) -> None:
    manifest = packed(Lines(12), LocalStore(tmp_path), cipher=SampleCipher(KEY))
    with pytest.raises(
        ValueError, match=r"are encrypted with another key than key=, [0-9a-f]{8} and not [0-9a-f]{8} by their"
    ) as told:
        RemoteDataset.from_urls(str(tmp_path), key=OTHER)
    shard = str(tmp_path / manifest.shards[0].name)
    wrong = RemoteDataset.from_urls(shard, key=OTHER, shuffle=False)
    for read in (
        lambda: next(iter(wrong)),
        lambda: wrong.indexed(fields={"y": "text"}, schema={"y": str})[0],
        lambda: wrong.indexed()[0],
    ):
        with pytest.raises(ShardCorrupt, match=rf"{shard}: member '\w+' of sample '\d+' cannot be decrypted: .* Give the key that"):
            read()
    assert KEY.hex() not in str(told.value)
    with pytest.raises(ValueError, match=r"'cls.enc' is encrypted: give RemoteDataset\(key=...\)"):
        next(iter(RemoteDataset.from_urls(shard, shuffle=False).decode()))


def test_changed_cut_moved_or_unencrypted_data_is_detected(tmp_path: Path) -> None:
    cipher = SampleCipher(KEY)
    secret = cipher.encrypt(b"plain", b"a.txt.enc", "0" * 16)
    assert cipher.decrypt(secret, b"a.txt.enc") == b"plain"
    flipped = secret[:15] + bytes([secret[15] ^ 1]) + secret[16:]
    for data, key, extension in (
        (flipped, "a", "txt.enc"),
        (secret[:-1], "a", "txt.enc"),
        (secret[:10], "a", "txt.enc"),
        (b"", "a", "txt.enc"),
        (secret, "b", "txt.enc"),
        (secret, "a", "cap.txt.enc"),
    ):
        folder = tmp_path / f"{key}{len(data)}{extension}{data[:20].hex()}"
        folder.mkdir()
        url = written(folder, {"__key__": key, extension: data})
        with pytest.raises(ShardCorrupt, match="cannot be decrypted"):
            next(iter(RemoteDataset.from_urls(url, key=KEY)))
    url = written(tmp_path, {"__key__": "a", "txt.enc": secret, "cls": 4})
    with pytest.raises(ShardCorrupt, match=r"x.tar: its members 'cls' are not encrypted, but key= was given"):
        next(iter(RemoteDataset.from_urls(url, key=KEY)))


def test_equal_contents_are_encrypted_differently_and_each_position_has_one_nonce() -> None:
    cipher = SampleCipher(KEY)
    made = {
        cipher.encrypt(b"same", name, generation) for name in (b"a.txt.enc", b"b.txt.enc") for generation in ("0" * 16, "1" * 16)
    }
    assert len({data[:12] for data in made}) == len({data[12:] for data in made}) == 4
    assert cipher.encrypt(b"same", b"a.txt.enc", "0" * 16) in made


def test_key_is_never_shown_and_workers_receive_it(tmp_path: Path) -> None:
    options = PackOptions(100_000, 10, 0, 0, cipher=SampleCipher(KEY))
    manifest = packed(Lines(3), LocalStore(tmp_path), cipher=SampleCipher(KEY))
    dataset = RemoteDataset.from_urls(str(tmp_path), key=KEY)
    shown = [repr(options), repr(options.cipher), repr(dataset), repr(manifest), repr(dataset.indexed()), str(vars(dataset))]
    stored = b"".join((tmp_path / name).read_bytes() for name in names_in(tmp_path))
    for text in (*(each.encode() for each in shown), stored):
        assert KEY not in text
        assert KEY.hex().encode() not in text
        assert repr(KEY).encode() not in text
    assert len(list(pickle.loads(pickle.dumps(dataset)))) == 3


def test_key_for_an_unencrypted_dataset_is_an_error(tmp_path: Path) -> None:
    packed(Lines(3), LocalStore(tmp_path))
    with pytest.raises(ValueError, match="this dataset is not encrypted, but key= was given"):
        RemoteDataset.from_urls(str(tmp_path), key=KEY)


def test_different_key_makes_a_new_generation(tmp_path: Path) -> None:
    first, second = (packed(Lines(12), LocalStore(tmp_path), cipher=SampleCipher(key)) for key in (KEY, OTHER))
    assert first.generation != second.generation
    assert first.key != second.key
    assert Manifest.parse((tmp_path / "manifest.json").read_bytes()) == second
    assert names_of(second) == names_in(tmp_path)


def test_key_is_read_from_a_file_or_a_variable_and_has_32_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, text in enumerate((KEY, KEY.hex().encode(), KEY.hex().encode() + b"\n")):
        (tmp_path / str(number)).write_bytes(text)
        assert key_in_file(tmp_path / str(number)) == KEY
    monkeypatch.setenv("PACKING_KEY", KEY.hex())
    assert key_in_variable("PACKING_KEY") == KEY
    (tmp_path / "short").write_bytes(KEY[:-1])
    for read in (lambda: key_in_file(tmp_path / "short"), lambda: key_in_variable("NO_SUCH_KEY")):
        with pytest.raises(
            ValueError, match=r"contains no key: 64 hexadecimal digits are needed; make one with `openssl rand -hex 32`"
        ):
            read()
    with pytest.raises(ValueError, match="key is 32 bytes, these are 31"):
        SampleCipher(KEY[:-1])
    with pytest.raises(TypeError, match="key is 32 bytes, got str"):
        SampleCipher(KEY.hex())  # type: ignore[arg-type]


# ------------------------------------------------------------ serializers


class Graph:
    def __init__(self, edges: list[int]) -> None:
        self.edges = edges


class Tree(Graph):
    pass


def dumps(graph: Graph) -> bytes:
    return json.dumps(graph.edges).encode()


OWN = {Graph: ("graph", dumps), str: ("utf16", lambda text: text.encode("utf-16"))}


def test_values_are_serialized_by_the_serializer_of_their_type(tmp_path: Path) -> None:
    samples = [{"image": Graph([number]), "tree": Tree([number, 1]), "text": "ä", "label": number} for number in range(3)]
    packed(samples, LocalStore(tmp_path), serializers=OWN)
    decoders = {"graph": json.loads, "utf16": lambda data: data.decode("utf-16")}
    found = sorted(RemoteDataset.from_urls(str(tmp_path)).indexed(decode=decoders), key=lambda sample: sample["cls"])  # type: ignore[call-overload]
    assert [{"graph": [n], "tree.graph": [n, 1], "text.utf16": "ä", "cls": n} for n in range(3)] == [
        {name: value for name, value in sample.items() if name != "__key__"} for sample in found
    ]

    def decode(extension: str, data: bytes) -> Any:
        return json.loads(data) if extension.endswith(".graph") else None

    assert sorted(s["graph"][0] for s in RemoteDataset.from_urls(str(tmp_path)).decode(decode)) == [0, 1, 2]


def test_whole_samples_and_labels_of_files_are_serialized_too(tmp_path: Path) -> None:
    from PIL import Image

    from tests.remote.packing.packing_kit import Folder, encoded

    assert members_of(Tree([1]), None, OWN) == [("graph", b"[1]")]
    (tmp_path / "a.png").write_bytes(encoded(Image.new("L", (3, 3)), "PNG"))
    packed(Folder([tmp_path / "a.png"]), LocalStore(tmp_path / "out"), serializers={int: ("number", lambda n: b"%03d" % n)})
    ((sample),) = RemoteDataset.from_urls(str(tmp_path / "out")).indexed(decode=False)  # type: ignore[call-overload]
    assert (sample["number"], sample["png"]) == (b"000", (tmp_path / "a.png").read_bytes())


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"Graph": ("graph", dumps)}, TypeError, "serializers are type -> "),
        ({Graph: ("graph",)}, TypeError, "serializers are type -> "),
        ({Graph: ("Graph", dumps)}, ValueError, "cannot be separated again"),
        ({Graph: ("graph", lambda graph: "text")}, TypeError, "field 'image': the serializer of .*Graph gives bytes; it gave str"),
    ],
)
def test_invalid_serializer_is_refused(given: Any, error: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=text):
        packed([Graph([1])], LocalStore(tmp_path), serializers=given)


@pytest.mark.parametrize("given", [{"compress": "zstd"}, {"compress": "shards", "compression_level": 0}])
def test_unknown_compression_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='compress is "samples", "shards" or None, and compression_level from 1 to 22; got'):
        packed(Lines(3), LocalStore(tmp_path), **given)
