"""A Mix forwards its members' protocols, and works with noise, policies, resumes and audits."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmload import Mix, ShmLoader, StateMismatch
from shmload.schedule.state_checksum import with_checksum
from shmload.tools.audit.verify import read_folder, verify
from tests.loader.mix_data import Decoding, DecodingBatches, KillsOnce, ReadsLists, Tagged

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # there may be fewer cores than workers


def mix_of(kind: Any = Tagged, **options: Any) -> Mix:
    return Mix([(kind(0, 30), 3), (kind(1, 20), 2), (kind(2, 400), 1)], **options)


def loader_of(mix: Mix | None = None, **options: Any) -> ShmLoader[Any]:
    return ShmLoader(mix or mix_of(), **{"batch_size": 8, "shuffle": True, "seed": 5, **options})


def plain(batch: Any) -> dict[str, list[Any]]:
    return {name: values.tolist() for name, values in batch.items()}


def epoch_of(loader: ShmLoader[Any]) -> list[dict[str, list[Any]]]:
    return [plain(batch) for batch in loader]


def rows_of(batches: list[dict[str, list[Any]]]) -> list[tuple[int, int]]:
    return [row for batch in batches for row in zip(batch["member"], batch["index"], strict=True)]


@pytest.fixture(scope="module")
def expected() -> list[list[dict[str, list[Any]]]]:
    with loader_of() as loader:
        return [epoch_of(loader) for _ in range(3)]


def test_epoch_has_each_members_share(expected: Any) -> None:
    for epoch in expected:
        rows = rows_of(epoch)
        assert len(rows) == 60 == len(set(rows))
        for n in range(61):
            counts = np.bincount([member for member, _ in rows[:n]], minlength=3)
            assert abs(counts - np.array([3, 2, 1]) / 6 * n).max() <= 0.75 + 1e-9
    assert len({str(epoch) for epoch in expected}) == 3


def test_killed_worker_changes_nothing(tmp_path: Path, expected: Any) -> None:
    (charge := tmp_path / "charge").touch()
    mix = Mix([(KillsOnce(0, 30, charge), 3), (Tagged(1, 20), 2), (Tagged(2, 400), 1)])
    with loader_of(mix, num_workers=2) as loader:
        assert expected[0] == epoch_of(loader)
    assert not charge.exists()


@pytest.mark.parametrize("stop", [0, 1, 5, 8])
@pytest.mark.parametrize("world_size", [1, 2])
def test_resume_continues_with_exactly_the_rest(stop: int, world_size: int, expected: Any) -> None:
    with loader_of(num_workers=2) as loader:
        loader.set_epoch(1)
        passing = iter(loader)
        for _ in range(stop):
            next(passing)
        state = json.loads(json.dumps(loader.state_dict()))
    assert len(state["counters"]) == 3
    assert sum(state["counters"]) == state["position"]
    assert len(json.dumps(state)) < 600
    parts = []
    for rank in range(world_size):
        with loader_of(batch_size=8 // world_size, rank=rank, world_size=world_size) as resumed:
            resumed.load_state_dict(state)
            assert state == resumed.state_dict()
            parts.append([batch["index"] for batch in epoch_of(resumed)])
    wanted = expected[1][stop:] if stop < 8 else expected[2]
    assert [batch["index"] for batch in wanted] == [list(itertools.chain(*batches)) for batches in zip(*parts, strict=True)]


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({"mix": Mix([(Tagged(0, 30), 3), (Tagged(1, 20), 1), (Tagged(2, 400), 1)])}, "order: saved .mix.*, now .mix"),
        ({"shuffle": False}, "order: saved .mix.*, now .mix"),
        ({"mix": Tagged(0, 60)}, "order: saved .mix.*, now None"),
        ({"batch_size": 4}, "global_batch: saved 8, now 4"),
    ],
)
def test_state_of_another_mixture_is_refused(change: dict[str, Any], differing: str) -> None:
    state = loader_of().state_dict()
    with pytest.raises(StateMismatch, match=differing):
        loader_of(**change).load_state_dict(state)
    with pytest.raises(StateMismatch, match="counters must be the draws of 3 members before position 0"):
        loader_of().load_state_dict(with_checksum({**state, "counters": [1, 0, 0]}))


def test_set_epoch_gives_that_epoch(expected: Any) -> None:
    with loader_of(num_workers=1) as loader:
        loader.set_epoch(2)
        assert expected[2] == epoch_of(loader)
        loader.set_epoch(0)
        assert expected[0] == epoch_of(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_repeat_never_ends_and_draws_new_noise(num_workers: int) -> None:
    mix = Mix([(Tagged(0, 2), 1), (Tagged(1, 3), 1)], stop="repeat")
    with loader_of(mix, num_workers=num_workers) as loader:
        batches = [plain(batch) for batch in itertools.islice(loader, 30)]
        assert len(loader.last_indices) == 8
        with pytest.raises(TypeError, match=r'a Mix with stop="repeat" never ends: this loader has no len\(\)'):
            len(loader)
        passing = iter(loader)
        with pytest.raises(TypeError, match="no len"):
            len(passing)
        state = loader.state_dict()
    noise = [value for batch in batches for value in batch["noise"]]
    assert len(set(noise)) == len(noise) == 240
    assert {(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)} == set(rows_of(batches))
    assert state["n"] == 2**62


def test_curriculum_changes_the_weights_at_a_step() -> None:
    members = [(Tagged(0, 1000), 1), (Tagged(1, 1000), 0), (Tagged(2, 1000), 1)]
    mix = Mix(members, curriculum={np.int64(10): [0, 1, 0], 4: [1, 1, 2]})
    with loader_of(mix) as loader:
        assert len(loader) == (10 * 8 + 1000 - 12) // 8 + 1
        batches = list(itertools.islice(loader, 12))
    with loader_of(mix, batch_size=2, world_size=4, rank=3) as loader:
        assert [batch["index"][6:].tolist() for batch in batches] == [
            batch["index"].tolist() for batch in itertools.islice(loader, 12)
        ]
    counts = [np.bincount(batch["member"], minlength=3).tolist() for batch in batches]
    assert counts == [[4, 0, 4]] * 4 + [[2, 2, 4]] * 6 + [[0, 8, 0]] * 2


def test_member_of_each_batch_row_is_known() -> None:
    mix = mix_of(stop="repeat")
    with loader_of(mix) as loader:
        for batch in itertools.islice(loader, 20):
            assert batch["member"].tolist() == mix.member_of(loader.last_indices).tolist()
            places = [mix.place_of(index) for index in loader.last_indices]
            assert list(zip(batch["member"].tolist(), batch["index"].tolist(), strict=True)) == places
    assert [mix.member_of(i) for i in (0, 29, 30, 49, 50, 449)] == [0, 0, 1, 1, 2, 2]
    assert (mix.member_of(450), mix.member_of(-1), mix.place_of(450), mix.place_of(-1)) == (0, 2, (0, 0), (2, 399))
    assert type(mix.member_of(3)) is int


@pytest.mark.parametrize("num_workers", [0, 2])
def test_members_that_read_several_at_once_get_lists(num_workers: int, expected: Any) -> None:
    several = ReadsLists(1, 20)
    mix = Mix([(Tagged(0, 30), 3), (several, 2), (ReadsLists(2, 400), 1)])
    with loader_of(mix, num_workers=num_workers) as loader:
        assert "read by __getitems__" in repr(loader)
        batches = epoch_of(loader)
    assert rows_of(expected[0]) == rows_of(batches)
    if num_workers == 0:
        assert max(map(len, several.asked)) > 1
    assert mix_of().__getitems__ is None  # torch then reads sample by sample


class OnlyEven:
    """The numbers from `first` on; a batch of them has only the even ones, each `times` times."""

    def __init__(self, first: int, n: int, times: int = 1) -> None:
        self.first, self.n, self.times = first, n, times

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return self.first + index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices if self[index] % 2 == 0 for _ in range(self.times)]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_member_that_filters_or_adds_samples_does_so_in_a_mix(num_workers: int, times: int) -> None:
    mix = Mix([(range(12), 2), (OnlyEven(100, 6, times), 1)])
    wanted = [
        [sample for index in indices for sample in ([index] if index < 12 else OnlyEven(88, 30, times).__getitems__([index]))]
        for indices in ([0, 12, 1, 2, 13, 3], [4, 14, 5, 6, 15, 7], [8, 16, 9, 10, 17, 11])
    ]
    assert [mix.__getitems__(indices) for indices in ([0, 12, 1, 2, 13, 3], [17, 16])] == [wanted[0], [104] * times]
    with ShmLoader(mix, batch_size=6, seed=0, num_workers=num_workers) as loader:
        assert [sorted(batch.tolist()) for batch in loader] == [sorted(batch) for batch in wanted]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_members_decode_in_place_in_a_mix(num_workers: int, expected: Any) -> None:
    with loader_of(mix_of(Decoding), num_workers=num_workers) as loader:
        assert "read by read_into" in repr(loader)
        assert expected[0] == epoch_of(loader)
    with loader_of(Mix([(Decoding(0, 3), 1), (DecodingBatches(1, 2), 1)], stop="repeat")) as loader:
        rows = rows_of([plain(batch) for batch in itertools.islice(loader, 4)])
    assert {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)} == set(rows)
    assert "read by __getitem__" in repr(loader_of(Mix([(Decoding(0, 3), 1), (Tagged(1, 2), 1)])))


class OnlyDecodes:
    """A dataset that decodes in place and returns no samples."""

    schema = {"member": "int64", "index": "int64"}

    def __init__(self, name: int, n: int) -> None:
        self.name, self.n = name, n

    def __len__(self) -> int:
        return self.n

    def read_into(self, index: int, out: Any) -> None:
        out["member"], out["index"] = self.name, index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_members_without_samples_are_read_in_place(num_workers: int) -> None:
    with loader_of(mix_of(OnlyDecodes), num_workers=num_workers) as only, loader_of(num_workers=num_workers) as tagged:
        assert rows_of(epoch_of(only)) == rows_of(epoch_of(tagged))


def test_bad_sample_is_substituted_by_the_next_of_the_mixture() -> None:
    mix = Mix([(range(40), 1), (_Bad(40), 1)])
    with loader_of(mix, shuffle=False, on_error="substitute") as loader:
        batches = [batch.tolist() for batch in loader]
    assert batches[0] == [0, 0, 1, 1, 2, 2, 3, 4]
    with loader_of(mix, shuffle=False, on_error="skip") as loader:
        assert next(iter(loader)).tolist() == [0, 0, 1, 1, 2, 2, 3]


class _Bad:
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise ValueError("bad")
        return index


@pytest.mark.parametrize("stop", ["all", "repeat"])
def test_audit_of_a_mixture_finds_no_defect(stop: Any, tmp_path: Path) -> None:
    with loader_of(mix_of(stop=stop), audit=tmp_path, num_workers=1) as loader:
        for _ in itertools.islice(loader, 12):
            pass
    report, _ = verify(read_folder(tmp_path))
    assert [len(report.loaders), dict(report.num_found)] == [1, {}]


def test_indices_of_a_repeating_mix_wrap_around() -> None:
    mix = Mix([([1, 2], 1), ([], 0), ([3], 1)])
    assert [1, 2, 3] == list(mix) == [mix[i] for i in range(3, 6)]
    assert mix[-1] == 3
    with pytest.raises(IndexError, match="an index of this Mix is at least -3; got -4"):
        mix[-4]


def test_weights_of_any_number_type_count_as_written() -> None:
    inner = Mix([(range(20), 0.1), (range(40), 0.2)])
    mixes = [
        Mix([(range(70), np.float32(0.7)), (range(30), np.float32(0.3))]),
        Mix([(range(60), Fraction(1, 2)), (inner, 0.5)]),
        Mix([(range(2**30), 2**70), (range(1), 2**40)]),
    ]
    assert [mix.keyed_order(shuffle=True, global_batch=8).n for mix in mixes] == [100, 120, 2**30 + 1]
