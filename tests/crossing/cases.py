"""The `Case` value, one combination of product features that survives JSON, and the functions that draw it at random.

A case is complete: it has the dataset, the loader's arguments, and what is done with the loader. `draw` gives only legal
combinations, so a refusal at construction is unexpected (the command counts them). The rules that make a draw legal are in
`made_legal`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

PLAIN = ("dict", "mapping", "tuple", "namedtuple", "dataclass", "nested", "bare")
IN_PLACE = ("read_into", "read_batch_into")
NATIVE = ("tfrecord", "tar", "arrays", "npy", "tokens", "tensordataset", "images")
COLUMNS = ("parquet", "hdf5", "zarr", "safetensors", "hf")
REMOTE = ("remote",)
LITTERED = ("tfrecord", "tar", "parquet", "remote", "foreign")  # kinds that are read from a folder
FORMATS = NATIVE + COLUMNS + REMOTE + ("growing",)
KINDS = (*PLAIN, *IN_PLACE, *FORMATS, "foreign", "mix", "iterable", "pipeline")

# one letter for each field; see VALUES in values.py
ALL_FIELDS = "iaturbsyvwehxkdlLcNoqSCPg"
FIELDS_OF: dict[str, str] = {
    **dict.fromkeys((*PLAIN, "iterable"), ALL_FIELDS),
    "mix": "iatrbsyvwk",
    "read_into": "iarusyvhekN",
    "read_batch_into": "iarusyvhekN",
    "tfrecord": "iasyv",
    "growing": "iasyv",
    "tar": "iasv",
    "remote": "iasv",
    "foreign": "iasv",
    "arrays": "iaruhke",
    "npy": "iaruk",
    "tensordataset": "iatk",
    "parquet": "iarsyvH",
    "hdf5": "iar",
    "zarr": "iar",
    "safetensors": "iar",
    "hf": "iarsv",
    "tokens": "i",
    "images": "i",
    "pipeline": "i",
}
TEXT, RAGGED, ODD = "sy", "vwL", "oqSCPg"  # ODD: fields that torch's collate refuses or treats specially
REFUSED_BY_TORCH = "oqS"
BY_BATCH = ("lengths", "tokens", "batch_sampler")
KEYED = ("block", "weighted")
EXPANDING = "fgpa"  # stages that work on blocks: they change the number of items or wait for several
OF_BLOCKS = EXPANDING + "Bmcu"  # plus buckets, a Stream as source, a Scan at the end, and unordered workers
OF_FIXED = "tsewzk"  # stages allowed before a Cache; "k" is a Map and a Cache
OF_SEVERAL = "qyij"  # sources with several inputs: a Chain, a Zip, an Interleave, a Join
CHOOSING = "tsr"  # stages that leave the items themselves unchanged
KEYS = ("int64", "int32", "tensor", "array", "tensors")  # what the user's sampler yields in place of ints and lists of them
MANY = ("list", "fewer", "more", "none", "tuple", "tensor", "array", "object")
FAILING = ("fewer", "none", "tensor")  # those for which torch's collate raises on some batches
EVERYTHING = 10**9  # a batch size with which programs ask for the whole dataset in one batch
DECODED = ("rows", "batches")  # in place, by a pipeline's dataset

# arguments that do not change the batches, one letter each; see options.py
ALSO = "tsmbwknzogad"


MAKE_OF = {
    "tfrecord": "TFRecordDataset",
    "tar": "TarDataset",
    "remote": "RemoteDataset.from_urls(folder, cache_bytes=...).indexed(...)",
    "foreign": "RemoteDataset.from_urls(folder, ...).indexed() of shards in another layout",
    "arrays": "ArrayDataset of arrays",
    "npy": "ArrayDataset of .npy files",
    "growing": "SampleCache(...).dataset(...)",
    "hf": "datasets.Dataset",
    "mix": "Mix",
    "pipeline": "Conveyer",
}


@dataclass(frozen=True)
class Case:
    """One combination of features. The defaults are the plainest case."""

    seed: int = 0  # of the samples, of the order, and of the position at which a habit interrupts a pass
    # the dataset
    kind: str = "dict"
    fields: str = "i"
    n: int = 12
    size: int = 3  # approximate number of elements of an array
    text: int = 3  # approximate number of characters of a text
    sizes: str = "even"
    wrap: str = ""
    extra: str = ""
    appends: int = 0  # how many times a packed dataset grows while a loader follows it
    store: str = ""  # "http": shards come from a web server; "fails": from one that fails every few requests
    litter: bool = False  # the folder also has files of other programs, and readers get the folder
    bad: int = 0  # number of samples that cannot be read
    deadly: bool = False  # each bad sample kills the worker that reads it
    keeps: bool = False  # samples draw from generators that the dataset owns
    shares: bool = False  # all loaders read one dataset object
    stages: str = ""  # of a pipeline, one letter each; see pipelines.py
    # the loader
    mode: str = "seed"
    batch_size: int | None = 4
    shuffle: bool = False
    order: str = ""
    keys: str = ""  # what the user's sampler yields (KEYS); empty: ints
    ragged: str = ""
    drop_last: bool = False
    uneven: str = "pad"
    ranks: int = 1
    workers: int | str = 1
    start: str = "fork"
    prefetch: int | str | None = None
    threads: int = 1
    on_error: str = "raise"
    in_order: bool = True
    persistent: bool = False
    collate: str = ""
    many: str = ""  # what the dataset's __getitems__ returns (MANY); empty: it has no __getitems__
    after: str = ""  # what after_batch does: marks each batch, or raises on every third
    also: str = ""  # arguments that do not change the batches
    backend: str = "process"
    actors: str = ""  # what actors request from Ray: a CPU each, nothing ("share"), or half a CPU on any node ("spread")
    shm: str = "usual"
    # what is done with the loader
    habit: str = "pass"
    at: float = 0.5  # position in the epoch; 0.999: before its last step; 1: at its end
    hold: str = "none"  # "last": as many of the newest ones as the seed says, up to twice the ring's size
    idle: str = ""  # an argument that has no effect here, so it must be refused; see IDLE in options.py
    harm: str = "none"
    restarts: int = 0  # workers replaced in torch mode after they were killed
    then_workers: int = 1
    then_ranks: int = 1
    loaders: int = 1  # fresh loaders that do the same, because races show only sometimes
    program: str = ""  # what else the program does (HABITS_OF_PROGRAMS)

    def dumps(self) -> str:
        """Returns what differs from the plainest case, as JSON."""
        return json.dumps(self.changed())

    def changed(self) -> dict[str, Any]:
        """Returns what differs from the plainest case, as a dict."""
        return {name: value for name, value in asdict(self).items() if value != getattr(PLAINEST, name)}

    @staticmethod
    def loads(text: str) -> Case:
        """Returns the case that `dumps` wrote."""
        return Case(**json.loads(text))

    @property
    def global_batch(self) -> int:
        return (self.batch_size or 1) * self.ranks

    @property
    def is_noisy(self) -> bool:
        """Returns whether samples draw random numbers."""
        return "N" in self.fields

    @property
    def is_seeded(self) -> bool:
        return self.mode == "seed"


# The program ignores SIGCHLD; handles it by waiting for all children; closes all descriptors between loaders; has a
# multiprocessing.Value in the dataset; gives the dataset attributes whose names have a meaning in the package; or sets an attribute
# of it before each pass.
HABITS_OF_PROGRAMS = ("ignored", "handler", "closes", "value", "names", "sets")

PLAINEST = Case()
NAMES = tuple(field.name for field in fields(Case))


def draw(
    rng: random.Random, only: Mapping[str, Any] | None = None, *, shm_kinds: tuple[str, ...] = ("usual",), ray_share: float = 0.0
) -> Case:
    """Draws a random case, with the dimensions of `only` as given."""
    for _ in range(10_000):
        drawn = replace(_drawn(rng, shm_kinds), **(only or {}))
        if ray_share and rng.random() < ray_share:
            rays: dict[str, Any] = {"backend": "ray", "actors": rng.choice(("", "share", "spread"))}
            rays["shm"] = rng.choice(("usual", "host"))  # its own /dev/shm, or the cluster's
            if rng.random() < 0.15:  # rows of Ray Data
                rays |= {"kind": "parquet", "extra": "ray"}
            drawn = replace(drawn, **{**rays, **(only or {})})
        case = made_legal(drawn)
        if all(getattr(case, name) == value for name, value in (only or {}).items()):
            return case
    raise ValueError(f"no legal case has {only}; see made_legal() in tests/crossing/cases.py")


def _drawn(rng: random.Random, shm_kinds: tuple[str, ...]) -> Case:
    def one(*weighted: tuple[Any, float]) -> Any:
        return rng.choices([value for value, _ in weighted], [weight for _, weight in weighted])[0]

    kind = one(
        *[(kind, 1.2) for kind in PLAIN],
        *[(kind, 1.5) for kind in IN_PLACE],
        ("tfrecord", 2.5),
        *[(kind, 0.7) for kind in NATIVE[1:]],
        *[(kind, 0.5) for kind in COLUMNS],
        ("remote", 1.5),
        ("foreign", 1.5),
        ("growing", 0.8),
        ("mix", 0.8),
        ("iterable", 1.5),
        ("pipeline", 2.0),
    )
    letters = FIELDS_OF[kind]
    common = [letter for letter in letters if letter not in ODD + "N"]
    chosen = rng.sample(common, min(len(common), rng.randint(1, 4)))
    odd = [letter for letter in letters if letter in ODD]
    if odd and rng.random() < 0.35:
        chosen.append(rng.choice(odd))
    if "N" in letters and rng.random() < 0.15:
        chosen.append("N")
    rng.shuffle(chosen)
    is_native = kind in ("tfrecord", "tar", "growing", *IN_PLACE)
    if is_native and rng.random() < 0.5:
        chosen.sort(key=lambda letter: letter not in "sy")  # text first: then fixed fields are packed after it
    shm = rng.choices(shm_kinds, [6.0 if name == "usual" else 1.0 for name in shm_kinds])[0]
    case = Case(
        seed=rng.randrange(1 << 20),
        kind=kind,
        fields="".join(chosen),
        n=one((rng.randint(2, 40), 3 if is_native else 6), (rng.randint(40, 200), 5 if is_native else 3), (1, 0.3), (0, 0.2)),
        size=one((0, 0.5), (1, 1), (3, 4), (17, 2), (250, 2), (1000, 3 if is_native else 1), (4000, 0.7)) if shm == "usual" else one((250, 1), (4000, 2)),
        text=one((0, 0.5), (5, 3), (100, 2), (1000, 4)),
        sizes=one(("even", 3), ("random", 3), ("growing", 1.5), ("spike", 1)),
        wrap=one(("", 6), ("subset", 1.5), ("concat", 1)),
        extra=one(("", 2), ("gzip", 1), ("zlib", 1), ("files", 1), ("bare", 1)),
        bad=one((0, 5), (1, 1), (rng.randint(2, 6), 1)),
        deadly=rng.random() < 0.3,
        keeps=rng.random() < 0.5,
        shares=rng.random() < 0.3,
        stages="".join(rng.choice("tsewrzfgmcukpaBqyij") for _ in range(rng.randint(0, 4))),
        mode=one(("seed", 3), ("torch", 2)),
        batch_size=one((1, 1), (3, 2), (4, 2), (6, 2), (rng.randint(7, 33), 1), (None, 0.7), (EVERYTHING, 0.15)),
        shuffle=rng.random() < 0.65,
        order=one(("", 8), ("block", 1), ("weighted", 0.7), ("lengths", 1), ("tokens", 1), ("sampler", 0.7), ("batch_sampler", 0.7)),
        ragged=one(("", 5), ("list", 1), ("pad", 1), ("nested", 0.6), ("jagged", 1), ("map", 0.7)),
        drop_last=rng.random() < 0.25,
        uneven=one(("pad", 2), ("drop", 1), ("exact", 2)),
        ranks=one((1, 5), (2, 2), (3, 1), (4, 0.7)),
        workers=one((0, 1.5), (1, 3), (2, 3), (3, 2), (4, 0.7), ("auto", 1)),
        start=one(("fork", 40), ("forkserver", 1), ("spawn", 1)),
        prefetch=one((None, 5), (1, 1), (2, 1), (4, 1), ("auto", 0.5)),
        threads=one((1, 6), (3, 1)),
        on_error=one(("raise", 2), ("skip", 1), ("substitute", 1)),
        in_order=rng.random() < 0.8,
        persistent=rng.random() < 0.4,
        collate=one(("", 6), ("list", 1), ("rename", 1), ("same", 1)),
        many=one(("", 12), *[(many, 1) for many in MANY]),
        after=one(("", 4), ("mark", 1), ("fail", 1)),
        also="".join(letter for letter in ALSO if rng.random() < 0.12),
        shm=shm,
        habit=one(
            ("pass", 3), ("break", 1.5), ("second", 1), ("resume", 4), ("reload", 2), ("transfer", 1), ("end", 1.5), ("threads", 1), ("corrupt", 0.5),
            ("rebuild", 0.3),
        ),
        at=one((0.0, 1), (0.3, 2), (0.6, 2), (0.999, 2), (1.0, 1)),
        hold=one(("none", 4), ("some", 1.5), ("all", 1.5), ("last", 1.5)),
        idle=one(("", 6), *((letter, 0.2) for letter in "rumnbxd")),
        harm=one(("none", 6), ("kill", 1), ("stop", 0.5)),
        restarts=rng.choice((0, 99)),
        then_workers=one((0, 1), (1, 2), (2, 2), (3, 1)),
        then_ranks=rng.choice((1, 1, 2, 3, 4)),
        loaders=1,
        appends=rng.choice((0, 0, 0, 1, 2, 5)),
        store=one(("", 3), ("http", 0.5), ("fails", 1)),
        litter=rng.random() < 0.4,
    )  # fmt: skip
    if is_native and rng.random() < 0.3:  # several workers, long texts, short rows: prone to races
        case = replace(
            case,
            mode="seed",
            n=rng.randint(60, 200),
            size=3,
            text=1000,
            batch_size=rng.choice((4, 6)),
            workers=3,
            ragged="",
            collate="",
        )
    elif rng.random() < 0.06:  # a last step in which some ranks have no row
        ranks, size = rng.choice((2, 3)), rng.choice((1, 3, 4))
        case = replace(
            case,
            mode="seed",
            order="",
            ranks=ranks,
            batch_size=size,
            n=size * ranks * rng.randint(1, 5) + rng.randint(1, ranks - 1),
            uneven="exact",
            habit="resume",
            at=0.999,
        )
    elif kind == "iterable" and rng.random() < 0.3:  # workers that survive the end of their iterable
        case = replace(case, mode="torch", persistent=True, habit="resume", at=1.0)
    own = random.Random(case.seed)  # a generator of its own, so that the other dimensions stay as they were for the same seed
    if own.random() < 0.3:
        case = replace(case, program=own.choice(HABITS_OF_PROGRAMS))
    if own.random() < 0.15:
        case = replace(case, backend="thread")
    if own.random() < 0.08:
        case = replace(case, backend="auto")
    return replace(case, keys=own.choice(("", *KEYS)))


def made_legal(case: Case) -> Case:
    """Returns the case, changed as little as necessary to be legal."""
    before = None
    while case != before:
        before = case
        for rule in (
            _legal_kind,
            _legal_getitems,
            _legal_mode,
            _legal_order,
            _legal_fields,
            _legal_loader,
            _legal_habit,
            _legal_backend,
            _legal_also,
            _legal_program,
            _legal_idle,
        ):
            case = rule(case)
    return case


def _legal_kind(case: Case) -> Case:
    allowed = FIELDS_OF[case.kind]
    letters = "".join(dict.fromkeys(letter for letter in case.fields if letter in allowed)) or "i"
    if case.kind == "bare":
        letters = letters[:1]
    if case.kind in ("namedtuple", "dataclass"):
        letters = letters[:2] if len(letters) > 1 else ("i" + letters if letters != "i" else "is")
    if case.kind in ("hf", "tensordataset", "growing", "pipeline", "mix") and "i" not in letters:
        letters = letters[: len(letters) // 2] + "i" + letters[len(letters) // 2 :]  # a field that identifies the sample
    extra = {
        "tfrecord": case.extra if case.extra in ("gzip", "zlib", "files", "bare") else "",
        "tar": "files" if case.extra else "",
        "remote": case.extra,  # gzip: less cache than one shard; files: room for some; zlib: packed with zstd; bare: encrypted
        "foreign": case.extra,
        "pipeline": {"gzip": "stops", "zlib": "raises", "files": "rows", "bare": "batches"}.get(
            case.extra, case.extra if case.extra in ("stops", "raises", *DECODED) else ""
        ),
        "npy": "",
        "parquet": {"ray": "ray" if case.backend == "ray" else ""}.get(case.extra, "hive" if case.extra else ""),
        "iterable": {"gzip": "state", "zlib": "stages", "files": "shards", "bare": "shards"}.get(case.extra, case.extra),
        "tokens": "files" if case.extra else "",
        "mix": "files" if case.extra else "",
    }.get(case.kind, "")
    if case.kind == "tfrecord" and extra == "bare":
        letters = "y"
    if case.kind == "parquet":  # the names of the folders give one more column
        letters = (letters.replace("H", "") or "i") + "H" * (extra == "hive")
    if case.kind == "foreign" and extra in ("gzip", "bare"):  # lines of JSON have no dtypes
        letters = "".join(letter for letter in letters if letter in "is") or "i"
    if case.kind != "remote" or case.appends or case.backend == "ray":
        case = replace(case, store="")
    is_littered = (
        case.litter and not case.store and case.kind in LITTERED and extra != "ray" and not (case.kind == "remote" and case.appends)
    )
    case = replace(case, fields=letters, extra=extra, litter=is_littered)
    if case.kind not in (*PLAIN, *IN_PLACE):
        case = replace(case, bad=0)
    if case.kind in (*FORMATS, "foreign", "mix", "pipeline"):
        case = replace(case, n=max(case.n, 1))
    if case.kind in ("growing", "mix", "iterable", "pipeline", "remote", "foreign", "images", "hf"):
        case = replace(case, wrap="")
    if case.kind in ("growing", "mix"):
        case = replace(case, mode="seed", order="", batch_size=case.batch_size or 4)
    if case.kind == "mix":
        case = replace(case, uneven=case.uneven)
    if case.kind == "iterable":
        case = replace(case, mode="torch", order="", shuffle=False, on_error="raise", threads=1, n=case.n)
    if case.kind == "pipeline":
        case = replace(
            case,
            **{
                name: getattr(PLAINEST, name)
                for name in ("fields", "size", "text", "sizes", "bad", "order", "ragged", "threads", "prefetch")
            },
            **{name: getattr(PLAINEST, name) for name in ("on_error", "in_order", "persistent", "collate", "after", "mode")},
            workers=case.workers if isinstance(case.workers, int) else 2,
            batch_size=case.batch_size or 4,
            habit=case.habit if case.habit in ("pass", "resume") else "pass",
            drop_last=case.drop_last,
        )
    if case.kind != "pipeline" or case.n < 8:
        case = replace(case, stages="")
    if case.extra in DECODED and case.kind == "pipeline":
        case = replace(case, stages="".join(letter for letter in case.stages if letter in CHOOSING))
    case = replace(case, stages=_legal_stages(case.stages))
    if "k" in case.stages:  # a Cache needs the same items in every epoch
        case = replace(case, shuffle=False)
    if "u" in case.stages:  # needs one rank, workers, and no item dropped at random
        case = replace(case, ranks=1, then_ranks=1, workers=case.workers or 2, then_workers=case.then_workers or 1, drop_last=False)
        case = replace(case, extra="")
    if "B" in case.stages:  # ranks share whole buckets
        case = replace(case, then_ranks=case.ranks, drop_last=False)
    if case.batch_size == EVERYTHING and (case.kind in ("iterable", "pipeline", "growing", "mix") or case.appends):
        case = replace(case, batch_size=4)  # these have no bound on an epoch's size, or wait for a whole batch
    if case.batch_size == EVERYTHING and not case.is_seeded:
        case = replace(case, drop_last=False)  # torch's sampler, the oracle, would make a list of that many entries
    if case.wrap and case.n < 2:
        case = replace(case, wrap="")
    if case.kind != "remote":
        case = replace(case, appends=0)
    if case.kind == "pipeline":
        case = replace(case, shares=False)
    if case.appends:  # following takes a seed and no sampler; and samples must differ from each other
        case = replace(case, mode="seed", order="", extra=case.extra if case.extra in ("zlib", "bare") else "")
        case = replace(case, fields=case.fields if "i" in case.fields else case.fields + "i", backend="process")
    if case.n == 0 and case.kind not in PLAIN:
        case = replace(case, n=1)
    return case


def _legal_getitems(case: Case) -> Case:
    if case.many and (case.kind not in PLAIN or case.wrap == "concat" or case.batch_size is None):
        case = replace(case, many="")
    if case.is_noisy and case.many in ("tensor", "array", "object"):
        case = replace(case, many="list")
    if case.many in ("tensor", "array"):  # stacking needs equal rows of numbers
        case = replace(case, kind="bare", fields="a" if case.fields[0] in "atru" else "i", sizes="even", ragged="")
    if case.many == "object" and not case.collate:
        case = replace(case, collate="same")
    if case.collate == "same" and not case.many:
        case = replace(case, collate="list")
    if case.many in FAILING:  # the audit of an epoch reports the failed batches as missing
        habit = "pass" if case.habit in ("threads", "corrupt") else case.habit
        case = replace(case, in_order=True, habit=habit, also=case.also.replace("a", ""))
    return case


def _legal_stages(stages: str) -> str:
    """Returns the part of `stages` that makes a pipeline: the source first, a Scan or buckets last."""
    is_streamed, is_scanned, is_unordered = "m" in stages, "c" in stages and "u" not in stages, "u" in stages
    several = "" if is_streamed else next((letter for letter in stages if letter in OF_SEVERAL), "")
    refused = "mcuB" + OF_SEVERAL + ("wrzk" if is_streamed else "tsewrzk" if several == "j" else "")
    inner = [letter for letter in stages if letter not in refused]
    is_bucketed = "B" in stages and not (is_scanned or is_unordered)
    fixed = next((at for at, letter in enumerate(inner) if letter not in OF_FIXED), len(inner))
    inner = [letter for at, letter in enumerate(inner) if letter != "k" or at < fixed]
    ends = EXPANDING + ("e" if is_streamed else "")  # items of a Stream have no numbers after a Map
    first = min([at for at, letter in enumerate(inner) if letter in ends] or [len(inner)])
    kept = [letter for at, letter in enumerate(inner) if at < first or letter in EXPANDING or (at == first and letter in ends)]
    return "m" * is_streamed + several + "".join(kept) + "B" * is_bucketed + "c" * is_scanned + "u" * is_unordered


def _legal_mode(case: Case) -> Case:
    if case.is_seeded:
        case = replace(case, in_order=True, persistent=False)
        if case.batch_size is None and (case.kind not in PLAIN or case.ragged):
            case = replace(case, batch_size=4)
        if case.n == 0:
            case = replace(case, n=1)
        return case
    order = case.order if case.order in ("sampler", "batch_sampler") else ""
    return replace(case, order=order, ranks=1, uneven="pad", then_ranks=1)


def _legal_order(case: Case) -> Case:
    if case.order:
        case = replace(case, shuffle=False, wrap="" if case.order not in ("sampler", "batch_sampler") else case.wrap)
    if case.order in BY_BATCH:
        case = replace(case, drop_last=False, batch_size=case.batch_size or 4)
    if case.order in ("sampler", "batch_sampler"):
        case = replace(case, ranks=1, then_ranks=1)  # a sampler of the user's works on one rank only
    if case.n == 0:
        case = replace(case, shuffle=False, order="")
    if case.order not in ("sampler", "batch_sampler") or case.kind not in (*PLAIN, *IN_PLACE):
        case = replace(case, keys="")
    if case.order == "sampler" and case.keys in ("array", "tensors"):  # kinds of whole batches
        case = replace(case, keys="int64")
    if case.kind == "mix" or case.kind == "growing":
        case = replace(case, on_error="raise")
    if case.batch_size is None:
        case = replace(case, drop_last=False, collate="")
    return case


def _legal_fields(case: Case) -> Case:
    letters = case.fields
    if case.kind == "bare" and letters in "dlL":
        letters = "a"
    if case.size == 0 and case.kind in (*FORMATS, "foreign"):
        case = replace(case, size=1)  # the writers of several formats reject empty arrays
    if "k" in letters and case.size > 1000:
        case = replace(case, size=1000)
    if case.kind in ("tokens", "images", "tensordataset", "hdf5", "zarr", "safetensors", "npy", "arrays"):
        case = replace(case, sizes="even", ragged="")
    if set(letters) & set(REFUSED_BY_TORCH) and not case.collate and not case.is_seeded and not case.ragged:
        case = replace(case, ragged="list")
    if set(letters) & set(ODD + "cN") and case.ragged not in ("", "list"):
        case = replace(case, ragged="list")
    is_declared = case.kind in (*IN_PLACE, *FORMATS)
    has_ragged = bool(set(letters) & set(RAGGED))
    if case.ragged == "map" and not (has_ragged and case.kind in ("dict", *IN_PLACE, "tfrecord")):
        case = replace(case, ragged="list")
    if case.ragged in ("pad", "nested", "jagged") and not is_declared and set(letters) & set("bcxkedh"):
        letters = "".join(letter for letter in letters if letter not in "cxkedh") or "i"
    if case.ragged in ("pad", "nested", "jagged") and case.kind in (
        "tuple",
        "nested",
        "namedtuple",
        "dataclass",
        "bare",
        "iterable",
    ):
        case = replace(case, ragged="list")
    if case.kind == "dataclass" and not case.is_seeded and not case.ragged and not case.collate:
        case = replace(case, ragged="list")
    if not case.is_seeded and not case.ragged and has_ragged and not case.collate and not is_declared:
        case = replace(case, ragged="list")
    if "L" in letters and not case.ragged and not case.collate:
        case = replace(case, ragged="list")  # by default, lists of different lengths are refused
    if case.kind in ("hf", "mix") and not case.is_seeded and has_ragged and not case.ragged:
        case = replace(case, ragged="list")
    if case.batch_size is None:
        case = replace(case, ragged="")
    if case.collate:
        case = replace(case, ragged="")
    if case.order in ("lengths", "tokens") and case.sizes == "even":
        case = replace(case, sizes="random")
    if case.kind in ("namedtuple", "dataclass") and len(letters) < 2:
        letters += "s" if letters != "s" else "i"
    keeps = case.keeps and case.is_seeded and "N" in letters and case.kind in (*PLAIN, *IN_PLACE)
    return replace(case, fields=letters, keeps=keeps)


def _legal_loader(case: Case) -> Case:
    workers: Any = case.workers
    if case.ranks > 2 and workers in ("auto", 3, 4):
        workers = 1
    if case.prefetch == "auto" and not case.is_seeded:
        case = replace(case, prefetch=None)
    if workers == 0:
        case = replace(case, start="fork", prefetch=None, threads=1, persistent=False, harm="none", in_order=True)
    if workers == "auto" and not case.is_seeded:
        workers = 2
    if case.threads > 1 and (case.is_noisy or case.kind == "iterable"):
        case = replace(case, threads=1)
    if case.start != "fork":
        workers = min(workers, 2) if isinstance(workers, int) else 2
        case = replace(case, ranks=1, then_ranks=1, then_workers=min(case.then_workers, 1))
    if case.kind == "iterable" and case.n == 0:
        case = replace(case, n=1)
    if case.on_error != "raise" and case.kind == "iterable":
        case = replace(case, on_error="raise")
    if (
        case.bad
        and case.on_error == "substitute"
        and (case.bad >= case.n or case.order in ("sampler", "batch_sampler", "weighted"))
    ):
        case = replace(case, on_error="skip")
    if case.bad and case.on_error == "substitute" and (case.order or case.batch_size is None):
        case = replace(case, on_error="skip")
    if case.bad and case.on_error == "substitute" and case.wrap:
        case = replace(case, on_error="skip")
    if case.batch_size is None and case.bad:
        case = replace(case, on_error="raise")
    if case.shm != "usual":
        case = replace(case, start="fork")
    if case.shm == "512k" and not case.is_seeded:
        case = replace(case, shm="64m")  # torch's loader, the oracle, needs room there for its own locks
    return replace(case, workers=workers)


def _legal_backend(case: Case) -> Case:
    """Keeps actors to cases that fit: actors start slowly, and no actor is killed or stopped here, which tests/ray does. Threads
    cannot be killed.
    """
    if case.backend == "thread" and case.workers != 0:
        return replace(case, start="fork", threads=1, harm="none", actors="")
    if case.backend == "auto" and case.workers != 0:  # processes for another start method or several threads, else either
        return replace(case, harm="none", actors="")
    if case.backend != "ray" or case.kind in ("growing", "pipeline") or case.workers == 0:
        return replace(case, backend="process", actors="", shm="usual" if case.shm == "host" else case.shm)
    workers = min(case.workers, 2) if isinstance(case.workers, int) else 2
    shm = "host" if case.shm == "host" else "usual"
    return replace(
        case, workers=workers, ranks=1, then_ranks=1, loaders=1, harm="none", shm=shm, start="fork", threads=1, prefetch=None
    )


def _legal_also(case: Case) -> Case:
    refused = set("nzg" if case.is_seeded else "o")
    if 0 in (case.workers, case.then_workers):
        refused |= set("tsb")
    if case.on_error == "raise":
        refused |= set("m")
    if case.kind == "iterable" or case.backend in ("thread", "auto") or (case.backend == "ray" and not case.is_seeded):
        refused |= set("s")
    if case.is_noisy:
        refused |= set("o")
    if case.shuffle and case.habit not in ("pass", "resume", "rebuild"):
        refused |= set("g")  # torch's sampler draws again at its end, which the oracle may reach before a loader
    if case.habit in ("corrupt", "transfer"):
        refused |= set("a")  # a pass that begins again without a state is an audit finding
    if case.kind == "pipeline":
        can_audit = case.extra not in ("stops", "raises") and not set(case.stages) & set(OF_BLOCKS)
        refused |= set(ALSO) - set("a" if can_audit else "")
    if "a" in case.also and "a" not in refused:
        refused |= set("d")
    if "n" in case.also:
        refused |= set("z")
    return replace(case, also="".join(letter for letter in ALSO if letter in case.also and letter not in refused))


def _legal_idle(case: Case) -> Case:
    """Keeps `idle` only where the argument has no effect. Pipelines have arguments of their own."""
    has_effect = {
        "r": case.is_seeded,
        "u": case.is_seeded,
        "m": case.on_error != "raise",
        "n": not case.is_seeded,
        "b": case.workers != 0,
        "x": case.workers != 0,
        "d": not (case.is_seeded and case.drop_last),
    }
    return replace(case, idle="" if case.kind == "pipeline" or has_effect.get(case.idle, True) else case.idle)


def _legal_habit(case: Case) -> Case:
    if case.habit == "second" and (case.persistent or case.workers == "auto"):
        case = replace(case, habit="break")
    if case.habit == "rebuild" and (case.wrap or case.kind == "growing"):
        case = replace(case, habit="pass")
    if case.extra == "shards" and case.start != "fork" and case.habit != "pass":
        case = replace(case, start="fork")  # a pass that is left before its workers have begun it is not counted
    if case.extra == "stages":  # no state has their passes, so only a fresh dataset reads a pass again
        in_turn = {"reload": "resume", "transfer": "resume", "end": "resume", "second": "second" if case.workers else "break"}
        case = replace(case, habit=in_turn.get(case.habit, case.habit), shares=case.shares and case.workers != 0)
    if case.extra == "shards" and case.habit == "transfer":
        case = replace(case, habit="resume")  # each dataset counts its own passes, and torch's one loader, the oracle, goes on
    if case.harm != "kill" or case.is_seeded or case.is_noisy or case.kind == "iterable":
        case = replace(case, restarts=0)  # seed mode replaces all; in torch mode a dead worker's draws and position are lost
    if case.habit == "threads":
        case = replace(case, harm="none", bad=0)
    if case.after == "fail" and case.habit in ("threads", "corrupt"):
        case = replace(case, after="mark")  # these habits check for other errors
    if case.is_noisy and not case.is_seeded:
        case = replace(case, bad=0)  # a sample that is not read draws nothing
    if not case.is_seeded:
        if case.habit == "transfer":
            case = replace(case, persistent=False)  # torch's one loader, the oracle, starts again
        if case.is_noisy or case.kind == "iterable":  # the draws of workers and the assignment of items depend on their number
            case = replace(case, then_workers=case.workers if isinstance(case.workers, int) else 2)
        if case.is_noisy and case.persistent and case.habit == "break":
            case = replace(case, persistent=False)  # the next draws depend on how far workers have read ahead
        if case.is_noisy and (case.habit in ("second", "reload", "transfer", "end", "resume", "threads") or case.workers == 0):
            case = replace(case, habit="pass", workers=max(int(case.workers), 1))
        if not case.in_order:
            case = replace(case, bad=0)
        if not case.in_order and int(case.workers) > 1:
            if case.kind == "iterable":
                case = replace(case, in_order=True)
            elif case.habit in ("reload", "transfer", "end", "second"):
                case = replace(case, habit="resume")
    if case.ranks > 1 and case.habit == "threads":
        case = replace(case, ranks=1)
    if case.is_noisy and not case.in_order:
        case = replace(case, in_order=True)  # any idle worker draws for the next batch
    if case.kind == "growing" and (case.drop_last or case.uneven == "drop"):
        case = replace(case, n=max(case.n, case.global_batch))  # it waits for a whole batch
    if not (case.bad and case.is_seeded and case.harm == "none" and case.backend == "process" and case.on_error != "raise"):
        case = replace(case, deadly=False)  # otherwise an error or another kill ends the loader
    if case.kind == "pipeline" and case.uneven != "pad" and (case.ranks == 1) != (case.then_ranks == 1):
        case = replace(case, then_ranks=case.ranks)  # one rank alone has no rule for an uneven end
    # a resume on other ranks keeps the global batch
    is_split = case.batch_size is not None and case.global_batch % case.then_ranks == 0
    if case.order not in BY_BATCH and case.habit == "resume" and not is_split:
        case = replace(case, then_ranks=case.ranks)
    if case.habit not in ("resume", "reload", "transfer"):
        case = replace(case, then_ranks=1, then_workers=1)
    if case.habit in ("reload", "transfer"):
        case = replace(case, then_ranks=case.ranks)
    is_native = case.kind in ("tfrecord", "tar", "growing", "parquet", "remote", "foreign", *IN_PLACE)
    loaders = 1 if not is_native or case.workers in (0, 1) else 24 if case.fields[0] in "sy" and case.is_seeded else 4
    if case.start != "fork" or case.harm != "none" or case.ranks > 2:
        loaders = 1
    return replace(case, loaders=loaders)


def _legal_program(case: Case) -> Case:
    is_plain = case.kind in PLAIN
    refused = {
        "ignored": case.backend == "ray",  # the cluster's head and agents are children of the test
        "handler": case.backend == "ray",
        "closes": not is_plain or not case.is_seeded or case.hold != "none" or case.backend == "ray",  # torch's own loader is open
        "value": not is_plain or case.backend == "ray",  # other machines do not have the Value
        "names": not is_plain,
        # persistent workers keep the value of their start, and passes at once would have different ones
        "sets": not is_plain
        or case.backend == "ray"
        or case.persistent
        or case.shares
        or case.habit in ("threads", "rebuild")
        or (case.habit == "second" and not case.is_seeded),
        "": False,
    }
    return replace(case, program="") if refused[case.program] else case
